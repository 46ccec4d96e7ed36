# SPDX-License-Identifier: Apache-2.0
"""Arithmetic against exact rational numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest

from emulator.machine import floats


def rounded(exact: Fraction, rounding: str) -> float:
    """An exact number as float32, by the definition."""
    if exact == 0:
        return 0.0
    exponent = max(math.frexp(float(exact))[1] - 24, -149)
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    quotient = exact / Fraction(2) ** exponent
    down = math.floor(quotient)
    if rounding == "rn":
        rest = quotient - down
        whole = down + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1))
    elif rounding == "rz":
        whole = math.trunc(quotient)
    else:
        whole = down if rounding == "rm" else math.ceil(quotient)
    return float(whole * Fraction(2) ** exponent)


def hard_cases() -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Sums that lie so close to the middle of two float32 that float64 sees them in the middle; subnormal ones too."""
    draw = np.random.default_rng(1)
    count = 6000
    # a·b = 2^47 + r with |r| <= a / 2, and c has 2^48 for its last bit.
    a = draw.integers(1 << 23, 1 << 24, count)
    b = np.rint(2.0**47 / a).astype(np.int64)
    c = draw.integers(1 << 23, 1 << 24, count) * 2.0**48
    triple = [x.astype(np.float64) for x in (a, b, c)]
    scale = draw.choice([1.0, 2.0**-30, 2.0**-96, 2.0**-110], count)
    a, b, c = (triple[0] * scale, triple[1] * scale, triple[2] * scale * scale)
    return a.astype(np.float32), b.astype(np.float32), (c * draw.choice([1, -1], count)).astype(np.float32)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_fma_is_rounded_once(rounding: str) -> None:
    a, b, c = hard_cases()
    result = floats.fma(a, b, c, rounding)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    wrong = [i for i, value in enumerate(exact) if rounded(value, rounding) != float(result[i])]
    assert not wrong, f"{len(wrong)} wrong, first at {wrong[0]}: {a[wrong[0]]!r} {b[wrong[0]]!r} {c[wrong[0]]!r}"


def test_the_hard_cases_are_hard() -> None:
    a, b, c = hard_cases()
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != floats.fma(a, b, c)).any(), "rounding twice is right for all: the cases show nothing"


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
def test_sums_and_products(rounding: str) -> None:
    a, b, _ = hard_cases()
    for function, exact in ((floats.add, Fraction.__add__), (floats.mul, Fraction.__mul__)):
        result = function(a, b, rounding)
        for x, y, got in zip(a[:300], b[:300], result, strict=False):
            assert rounded(exact(Fraction(float(x)), Fraction(float(y))), rounding) == float(got)


def test_special_values() -> None:
    inf, nan, zero = np.float32(np.inf), np.float32(np.nan), np.float32(0)
    a = np.array([inf, inf, zero, nan, -zero, zero], dtype=np.float32)
    b = np.array([-inf, 1, inf, 1, zero, -zero], dtype=np.float32)
    with np.errstate(all="ignore"):
        assert np.isnan(floats.fma(a, b, np.ones(6, np.float32))).tolist() == [False, False, True, True, False, False]
        assert np.isnan(floats.add(a, b)).tolist() == [True, False, False, True, False, False]
    low, high = floats.minimum(a, b), floats.maximum(a, b)
    assert low.tolist()[:4] == [-np.inf, 1, 0, 1]
    assert high.tolist()[:4] == [np.inf, np.inf, np.inf, 1]
    assert np.signbit(low[4:]).tolist() == [True, True]
    assert np.signbit(high[4:]).tolist() == [False, False]
    assert np.isnan(floats.minimum(a, b, nan=True)).tolist() == [False, False, False, True, False, False]


def test_flush() -> None:
    values = np.array([1e-40, -1e-40, 2.0**-126, 1], dtype=np.float32)
    flushed = floats.flush(values)
    assert flushed.tolist() == [0, 0, 2.0**-126, 1]
    assert np.signbit(flushed[1])
