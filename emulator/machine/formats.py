# SPDX-License-Identifier: Apache-2.0
"""Number formats below float32: decoding by table, encoding with PTX's roundings.

Sources: PTX ISA 9.2, sections Alternate Floating-Point Data Formats (5.2.3) and cvt (9.7.9.21); OCP Microscaling
Formats (MX) Specification 1.0 for the 4- and 6-bit formats and the scale.
"""

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[Any]  # of unsigned integers


class Rounding(enum.Enum):
    """How a value between two representable ones is rounded."""

    NEAREST = "rn"  # ties to the even code
    ZERO = "rz"
    AWAY = "rna"  # to nearest, ties away from zero
    UP = "rp"


@dataclass(frozen=True)
class Format:
    """A floating-point format of up to 16 bits, stored in the low bits of its code.

    Attributes:
        exponent, mantissa: bits of each.
        bias: of the exponent.
        signed: whether the bit above the exponent is a sign.
        infinity: the highest exponent means infinity and NaN, as in IEEE 754.
        nans: codes without sign that mean NaN, where infinity does not exist.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    signed: bool = True
    infinity: bool = False
    nans: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        return self.exponent + self.mantissa + int(self.signed)

    @cached_property
    def magnitudes(self) -> Floats:
        """The value of each code without its sign, in the codes' order; NaN and infinity at the end."""
        codes = np.arange(1 << (self.exponent + self.mantissa))
        power, fraction = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        unit = 2.0**-self.mantissa
        values = np.where(
            power == 0,
            fraction * unit * 2.0 ** (1 - self.bias),
            (1 + fraction * unit) * 2.0 ** (power - self.bias).astype(np.float64),
        )
        if self.exponent and not self.mantissa:
            values = 2.0 ** (codes - self.bias).astype(np.float64)  # a scale has no zero
        if self.infinity:
            top = power == (1 << self.exponent) - 1
            values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
        values[list(self.nans)] = np.nan
        return values

    @cached_property
    def finite(self) -> Floats:
        """The finite magnitudes, ascending; a value's index is its code."""
        values: Floats = self.magnitudes[np.isfinite(self.magnitudes)]
        return values

    @property
    def largest(self) -> float:
        return float(self.finite[-1])

    def decode(self, codes: Codes) -> Floats:
        """Values of codes; bits above the format's own are ignored."""
        magnitude: Floats = self.magnitudes[codes & ((1 << (self.exponent + self.mantissa)) - 1)]
        if not self.signed:
            return magnitude
        return np.where(codes >> (self.bits - 1) & 1, -magnitude, magnitude)

    def encode(
        self, values: Floats, rounding: Rounding = Rounding.NEAREST, *, saturate: bool, relu: bool = False
    ) -> Codes:
        """Codes of values.

        Args:
            saturate: what is beyond the largest finite value becomes it (`.satfinite`); else infinity, or NaN in a
                format without one.
            relu: negative values and NaN become +0 (`.relu` makes NaN canonical; formats without NaN have none).
        """
        values = np.asarray(values, dtype=np.float64)
        nan = np.isnan(values)
        if relu:
            values = np.where(values > 0, values, np.where(nan, values, 0.0))
        magnitude = np.abs(np.where(nan, 0.0, values))
        finite = self.finite
        above = np.minimum(np.searchsorted(finite, magnitude), finite.size - 1)
        below = np.where(finite[above] > magnitude, np.maximum(above - 1, 0), above)
        codes = self._round(magnitude, below, above, rounding)
        codes = np.where(self._overflows(magnitude, rounding), self._beyond(saturate), codes)
        if self.signed:
            codes = codes | (np.signbit(np.where(nan, 0.0, values)).astype(np.int64) << (self.bits - 1))
        return np.where(nan, self._nan(), codes).astype(np.uint16)

    def _round(self, magnitude: Floats, below: Codes, above: Codes, rounding: Rounding) -> Codes:
        low, high = self.finite[below], self.finite[above]
        if rounding is Rounding.ZERO:
            return below
        if rounding is Rounding.UP:
            return np.where(magnitude > low, above, below)
        nearer_low = magnitude - low < high - magnitude
        tie = magnitude - low == high - magnitude
        to_low = nearer_low | (tie & (below % 2 == 0)) if rounding is Rounding.NEAREST else nearer_low
        return np.where(to_low, below, above)

    def _overflows(self, magnitude: Floats, rounding: Rounding) -> NDArray[np.bool_]:
        step = self.largest - float(self.finite[-2])
        if rounding in (Rounding.ZERO,):
            return np.isinf(magnitude)
        if rounding is Rounding.UP:
            return magnitude > self.largest
        # The next value that the exponent would give, were it there; its code is even after an odd last one.
        half = self.largest + step / 2
        odd = (self.finite.size - 1) % 2 == 1
        return magnitude >= half if odd or rounding is Rounding.AWAY else magnitude > half

    def _beyond(self, saturate: bool) -> int:
        if saturate:
            return self.finite.size - 1
        return self.finite.size if self.infinity else self._nan()

    def _nan(self) -> int:
        if self.infinity:
            # PTX's canonical NaN: all mantissa bits set.
            return (1 << (self.exponent + self.mantissa)) - 1
        # Formats without NaN turn it into the largest value.
        return self.nans[-1] if self.nans else self.finite.size - 1


F16 = Format("f16", 5, 10, 15, infinity=True)
BF16 = Format("bf16", 8, 7, 127, infinity=True)
E4M3 = Format("e4m3", 4, 3, 7, nans=(0x7F,))
E5M2 = Format("e5m2", 5, 2, 15, infinity=True)
E2M3 = Format("e2m3", 2, 3, 1)
E3M2 = Format("e3m2", 3, 2, 3)
E2M1 = Format("e2m1", 2, 1, 1)
UE8M0 = Format("ue8m0", 8, 0, 127, signed=False, nans=(0xFF,))
UE4M3 = Format("ue4m3", 4, 3, 7, signed=False, nans=(0x7F,))

FORMATS = {one.name: one for one in (F16, BF16, E4M3, E5M2, E2M3, E3M2, E2M1, UE8M0, UE4M3)}


def decode_tf32(codes: NDArray[np.uint32]) -> Floats:
    """Values of 32-bit codes as the tensor core reads them: the low 13 bits are ignored."""
    return (codes & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def encode_tf32(values: NDArray[np.float32], rounding: Rounding) -> NDArray[np.uint32]:
    """Rounded to tf32: 10 bits of mantissa, the rest zero; NaN is canonical."""
    bits = values.view(np.uint32)
    if rounding is Rounding.AWAY:
        kept = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    elif rounding is Rounding.NEAREST:
        kept = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    else:
        kept = bits & np.uint32(0xFFFFE000)
    kept = np.where(np.isinf(values), bits, kept)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), kept).astype(np.uint32)
