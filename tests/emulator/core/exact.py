# SPDX-License-Identifier: Apache-2.0
"""Floating-point formats in exact arithmetic: the tests' reference."""

import math
import random
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """Bits of exponent and mantissa, as in IEEE 754, with a sign.

    Attributes:
        flushes: as with `.ftz`, what is below the smallest normal number becomes zero. It is rounded before, to as many
            bits as a normal number has.
    """

    exponent: int
    mantissa: int
    flushes: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def infinity(self) -> int:
        return (1 << self.exponent) - 1 << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << self.bits - 1

    @property
    def smallest_normal(self) -> int:
        return 1 << self.mantissa

    @property
    def nan(self) -> int:
        return self.sign - 1

    def is_nan(self, code: int) -> bool:
        return code & ~self.sign > self.infinity

    def is_infinite(self, code: int) -> bool:
        return code & ~self.sign == self.infinity

    def flushed(self, code: int) -> int:
        return code & self.sign if code & ~self.sign < self.smallest_normal else code

    def value(self, code: int) -> Fraction:
        """Of a finite code."""
        power, fraction = divmod(code & ~self.sign, 1 << self.mantissa)
        whole = fraction + ((1 << self.mantissa) if power else 0)
        exact = whole * Fraction(2) ** (max(power, 1) - self.bias - self.mantissa)
        return -exact if code & self.sign else exact

    def rounded(self, exact: Fraction, mode: str = "rn", negative_zero: bool = False) -> int:
        """The code of a number, rounded once; overflow goes where the mode says."""
        if exact == 0:
            return self.sign if negative_zero else 0
        sign, size = (self.sign if exact < 0 else 0), abs(exact)
        power = size.numerator.bit_length() - size.denominator.bit_length()
        power -= size < Fraction(2) ** power
        power = power if self.flushes else max(power, 1 - self.bias)
        units = size / Fraction(2) ** (power - self.mantissa)
        whole, rest = divmod(units, 1)
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
            "rna": rest >= Fraction(1, 2),
            "rz": False,
            "rm": bool(sign and rest),
            "rp": bool(not sign and rest),
        }[mode]
        code = int(whole) + up + ((power + self.bias - 1) << self.mantissa)
        if code < self.smallest_normal and self.flushes:
            return sign
        if code >= self.infinity:
            stays = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
            code = self.infinity - 1 if stays else self.infinity
        return sign | code


F16, BF16, F32, F64 = Format(5, 10), Format(8, 7), Format(8, 23), Format(11, 52)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def codes(of: Format, count: int = 120, seed: int = 0) -> list[int]:
    """Zeros, infinities, NaNs, subnormals, ties and random numbers, of all magnitudes and near one."""
    rng = random.Random(seed * 100 + of.bits + of.mantissa)
    one = of.bias << of.mantissa
    sizes = [0, 1, 2, 3, of.smallest_normal - 1, of.smallest_normal, of.smallest_normal + 1, one - 1, one, one + 1]
    sizes += [
        one + (1 << of.mantissa - 1),
        one + (1 << of.mantissa),
        of.infinity - 1,
        of.infinity,
        of.infinity + 1,
        of.nan,
    ]
    found = sizes + [size | of.sign for size in sizes]
    found += [rng.getrandbits(of.bits) for _ in range(count // 2)]
    near = [one + (rng.randint(-6, 6) << of.mantissa) + rng.getrandbits(of.mantissa) for _ in range(count // 2)]
    return found + [code | (rng.getrandbits(1) and of.sign) for code in near]


def sum_of(of: Format, mode: str, a: int, b: int) -> int:
    if of.is_nan(a) or of.is_nan(b):
        return of.nan
    if of.is_infinite(a) or of.is_infinite(b):
        if of.is_infinite(a) and of.is_infinite(b) and a != b:
            return of.nan
        return a if of.is_infinite(a) else b
    exact = of.value(a) + of.value(b)
    # An exact zero is -0 of two negative ones, and of any two when rounding down unless both are +0.
    both, one = a & b & of.sign, (a | b) & of.sign
    return of.rounded(exact, mode, bool(one if mode == "rm" else both))


def product_of(of: Format, mode: str, a: int, b: int) -> int:
    sign = (a ^ b) & of.sign
    if of.is_nan(a) or of.is_nan(b):
        return of.nan
    if of.is_infinite(a) or of.is_infinite(b):
        other = b if of.is_infinite(a) else a
        return of.nan if not other & ~of.sign else sign | of.infinity
    return of.rounded(of.value(a) * of.value(b), mode, bool(sign))


def fma_of(of: Format, mode: str, a: int, b: int, c: int) -> int:
    if of.is_nan(a) or of.is_nan(b) or of.is_nan(c):
        return of.nan
    sign = (a ^ b) & of.sign
    if of.is_infinite(a) or of.is_infinite(b):
        if not a & ~of.sign or not b & ~of.sign or (of.is_infinite(c) and c & of.sign != sign):
            return of.nan
        return sign | of.infinity
    if of.is_infinite(c):
        return c
    exact = of.value(a) * of.value(b) + of.value(c)
    negative = (sign or c & of.sign) if mode == "rm" else (sign and c & of.sign)
    return of.rounded(exact, mode, bool(negative))


def quotient_of(of: Format, mode: str, a: int, b: int) -> int:
    sign = (a ^ b) & of.sign
    if of.is_nan(a) or of.is_nan(b) or (of.is_infinite(a) and of.is_infinite(b)):
        return of.nan
    if of.is_infinite(a):
        return sign | of.infinity
    if of.is_infinite(b):
        return sign
    if not b & ~of.sign:
        return sign | of.infinity if a & ~of.sign else of.nan
    return of.rounded(of.value(a) / of.value(b), mode, bool(sign))


def root_of(of: Format, mode: str, a: int) -> int:
    """The square root, by an integer root with a bit that stands for what it left."""
    if of.is_nan(a) or (a & of.sign and a != of.sign):
        return of.nan
    if of.is_infinite(a) or not a & ~of.sign:
        return a
    shift = 600
    scaled = of.value(a) * 4**shift
    whole = math.isqrt(int(scaled))
    sticky = Fraction(1, 2) if whole * whole != scaled else 0
    return of.rounded((whole + sticky) / Fraction(2**shift), mode)
