# SPDX-License-Identifier: Apache-2.0
"""How wgmma of SM90 sums products of 8-bit floats: with 13 bits behind the leading one, and cut instead of rounded.

The ISA leaves it open. An H200's answers decided it (tests/emulator/golden): this model has all their bits, with chains
of eight instructions too. Of each element of D:

- The exponent of a product is the sum of its factors' exponents. Their fractions' product, up to 4, is not normalised.
- The largest exponent, of the accumulator also, decides the unit: 2^-13 of it. Each product and the accumulator are cut
  to whole units, towards zero, and then summed exactly.
- A float32 sum is cut once more, to 13 bits behind its leading one. A float16 one is rounded instead.

So a float32 accumulator has 14 bits, and what is added to it is lost below 2^-13 of it. An exponent of a subnormal
factor is that of the smallest normal number: no chip was asked.
"""

import numpy as np
from numpy.typing import NDArray

from emulator.machine.fragments import Floats

FRACTION_BITS = 13
SMALLEST = {"e4m3": -6, "e5m2": -14}
"""Exponents of the smallest normal numbers."""
# Of a factor that is zero or no number: its products' are below LEAST, which those of all others are not. int8 has two.
NONE, LEAST = -60, -40
NO_EXPONENT = -1000
# Unscaled products are float32: beyond this exponent their unit is that of the accumulator, which they do not reach.
LEAST_UNIT = -100


def summed(a: Floats, b: Floats, c: Floats | None, a_type: str, b_type: str) -> Floats:
    """A [m, k] times the transposed b [n, k], plus c [m, n]; not yet cut or rounded as a whole.

    Args:
        a_type, b_type: e4m3 or e5m2.
    """
    with np.errstate(all="ignore"):
        pairs = _exponents(a, a_type)[:, None, :] + _exponents(b, b_type)[None, :, :]
        top = pairs.max(axis=2).astype(np.int64)
        top[top < LEAST] = NO_EXPONENT
        if c is not None:
            top = np.maximum(top, _leading(c))
        unit = top - FRACTION_BITS
        inverse = np.ldexp(np.float32(1), -np.maximum(unit, LEAST_UNIT).astype(np.int32))
        products = a.astype(np.float32)[:, None, :] * b.astype(np.float32)[None, :, :]
        products *= inverse[:, :, None]
        np.trunc(products, out=products)
        # Of at most 32 numbers below 2^16: exact.
        total = np.ldexp(products.sum(axis=2).astype(np.float64), unit.astype(np.int32))
        if c is not None:
            total += _cut(c, unit)
        return total


def cut(total: Floats) -> Floats:
    """Sums with the bits of a float32 accumulator."""
    with np.errstate(all="ignore"):
        return _cut(total, _leading(total) - FRACTION_BITS)


def _exponents(values: Floats, kind: str) -> NDArray[np.int8]:
    """Of factors; NONE of zero, infinity and NaN."""
    found = np.maximum(np.frexp(values)[1] - 1, SMALLEST[kind])
    return np.where((values == 0) | ~np.isfinite(values), NONE, found).astype(np.int8)


def _leading(values: Floats) -> NDArray[np.int64]:
    """Exponents of sums; below all others of zero, infinity and NaN."""
    found = np.frexp(values)[1].astype(np.int64) - 1
    return np.where((values == 0) | ~np.isfinite(values), NO_EXPONENT, found)


def _cut(values: Floats, unit: NDArray[np.int64]) -> Floats:
    """Values in whole units of powers of two; infinity and NaN as they come."""
    power = np.maximum(unit, -500).astype(np.int32)
    return np.ldexp(np.trunc(np.ldexp(values, -power)), power)
