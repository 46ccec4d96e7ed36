# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic on lanes, rounded once, as PTX defines it (ISA 9.7.3, 9.7.4, 9.7.5).

Values are arrays of float32, one element a lane. Sums and products are formed in float64, where products of float32 are
exact; where a second rounding could change a result it is undone (round to odd: Boldo and Melquiond, 2008).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CANONICAL_NAN = np.uint32(0x7FFFFFFF)
SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(x: F32) -> F32:
    """`.ftz`: subnormal numbers become zeros of their sign."""
    small = np.abs(x) < SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def canonical(x: F32) -> F32:
    """Every NaN is the one that PTX arithmetic returns."""
    nan = np.isnan(x)
    return np.where(nan, CANONICAL_NAN.view(np.float32), x) if nan.any() else x


def two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """The rounded sum and what rounding lost (Knuth): a + b = sum + rest exactly."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_odd(total: F64, rest: F64) -> F64:
    """A sum rounded to odd: rounding it again to fewer bits gives the exact sum rounded once."""
    inexact = (rest != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    bits = total.view(np.int64)
    even = bits & 1 == 0
    # Towards the side that the rest lies on; an odd last bit already is neither neighbour.
    away = (rest > 0) == (total > 0)
    moved = np.where(inexact & even, np.where(away, bits + 1, bits - 1), bits)
    return moved.view(np.float64)


def round_f32(x: F64, rounding: str) -> F32:
    """A float64 that was not rounded yet, or rounded to odd, as float32.

    Args:
        rounding: rn, rz, rm or rp.
    """
    nearest = x.astype(np.float32)
    if rounding == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if rounding == "rz":
        over = np.abs(back) > np.abs(x)
        return np.where(over, np.nextafter(nearest, np.float32(0)), nearest)
    if rounding == "rm":
        return np.where(back > x, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    return np.where(back < x, np.nextafter(nearest, np.float32(np.inf)), nearest)


def fma(a: F32, b: F32, c: F32, rounding: str = "rn") -> F32:
    """Each lane's a·b + c, rounded once."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total, rest = two_sum(product, c.astype(np.float64))
    if rounding == "rn":
        # Only a float64 that lies exactly between two float32 can be rounded wrong: subnormal results have fewer bits.
        halfway = total.view(np.int64) & 0x1FFFFFFF == 0x10000000
        risky = halfway | (np.abs(total) < SMALLEST_NORMAL)
        if not (risky & (rest != 0)).any():
            return total.astype(np.float32)
    return round_f32(to_odd(total, rest), rounding)


def add(a: F32, b: F32, rounding: str = "rn") -> F32:
    if rounding == "rn":
        return a + b
    total, rest = two_sum(a.astype(np.float64), b.astype(np.float64))
    result = round_f32(to_odd(total, rest), rounding)
    if rounding == "rm":
        # An exact zero of numbers with different signs is -0 when rounding down.
        result = np.where((total == 0) & (rest == 0) & (np.signbit(a) | np.signbit(b)), np.float32(-0.0), result)
    return result


def mul(a: F32, b: F32, rounding: str = "rn") -> F32:
    if rounding == "rn":
        return a * b
    return round_f32(a.astype(np.float64) * b.astype(np.float64), rounding)


def div(a: F32, b: F32) -> F32:
    """div.rn: float64 carries enough bits that a quotient is never rounded wrong twice (Figueroa, 1995)."""
    return (a.astype(np.float64) / b.astype(np.float64)).astype(np.float32)


def by_f64(function: Callable[[F64], F64]) -> Callable[[F32], F32]:
    """An approximate unit by a function in float64: closer than what the ISA promises of it."""

    def apply(x: F32) -> F32:
        return function(x.astype(np.float64)).astype(np.float32)

    return apply


ex2 = by_f64(np.exp2)
lg2 = by_f64(np.log2)
sqrt = by_f64(np.sqrt)
rcp = by_f64(lambda x: 1.0 / x)
rsqrt = by_f64(lambda x: 1.0 / np.sqrt(x))
sin = by_f64(np.sin)
cos = by_f64(np.cos)
tanh = by_f64(np.tanh)


def minimum(a: F32, b: F32, *, nan: bool = False) -> F32:
    """min: a NaN loses to a number, or wins with `.NaN`; -0 is less than +0."""
    result = np.where((a < b) | ((a == b) & np.signbit(a)) | np.isnan(b), a, b)
    return canonical(np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), result) if nan else result)


def maximum(a: F32, b: F32, *, nan: bool = False) -> F32:
    """max: as `minimum`."""
    return -minimum(-a, -b, nan=nan) if not nan else canonical(-minimum(-a, -b, nan=True))
