# SPDX-License-Identifier: Apache-2.0
"""The fixed-point arithmetic of the definition on the device.

`dsl_backend/sampling/fixed_point.py` defines each operation. Every kernel must compute it in exactly that way.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.primitives.math import LOG2_E, ROUND_TO_INT, exp2, fma
from dsl_backend.sampling import fixed_point as constants

SIGN = 1 << 31
# Bits of a float32's mantissa.
MANTISSA = 23
# Of temperature 1: an exponent of 62.
FARTHEST = -constants.MAX_EXPONENT / LOG2_E
NORMAL_BITS = 62
MASS_ONE, PROB_ONE = float(1 << constants.MANTISSA_BITS), float(1 << constants.PROB_BITS)


@dsl_user_op
def truncate_to_uint(a, dtype, *, loc=None, ip=None):
    """A float32 rounded toward zero as dtype, Uint32 or Uint64; 0 for NaN and below 0."""
    value = cute.arch.inline_ptx(
        f"cvt.rzi.u{dtype.width}.f32 {{$w0}}, {{$r0}};", write_only_types=[dtype], read_only_args=[a], loc=loc, ip=ip
    )
    return dtype(value)


@cute.jit
def canonical(x: cutlass.Float32):
    """NaN becomes -inf, and negative zero becomes zero."""
    x = -cutlass.Float32.inf if x != x else x
    return x + cutlass.Float32(0.0)


@cute.jit
def to_ordered_uint(x: cutlass.Float32):
    """A uint32 that is ordered as x is."""
    bits = x.bitcast(cutlass.Uint32)
    return ~bits if bits >= cutlass.Uint32(SIGN) else bits | cutlass.Uint32(SIGN)


@cute.jit
def from_ordered_uint(key: cutlass.Uint32):
    """The x of a `to_ordered_uint`."""
    bits = key ^ cutlass.Uint32(SIGN) if key >= cutlass.Uint32(SIGN) else ~key
    return bits.bitcast(cutlass.Float32)


# --- exponents and probabilities ---


class Scale(NamedTuple):
    """What makes exponents of differences of logits.

    Attributes:
        factor: float32, of the difference.
        farthest: float32, a difference below which a probability is 0.
    """

    factor: Any
    farthest: Any


def scale_of(temperature) -> Scale:
    """Of a temperature, float32; the factor is correctly rounded."""
    usual = cute.arch.fmin(temperature, cutlass.Float32(constants.MAX_TEMPERATURE))
    return Scale(cutlass.Float32(constants.EXPONENT_SCALE) / usual, usual * cutlass.Float32(FARTHEST))


def finite(x):
    """A maximum as a reference: an infinite one as the largest number."""
    return cute.arch.fmin(x, cutlass.Float32(constants.MAX_LOGIT))


def power_of(x, reference, scale: Scale, one: float, above: bool = False):
    """The probability of a logit before normalization, float32 in units of its value at the reference over `one`.

    Twelve instructions. Added to a number of 2**23 to 2**24, the exponent is rounded to an integer, which is in the low
    bits of the sum. These are added to the polynomial's result, at its exponent.

    Args:
        one: a power of two.
        above: x may be above its reference, and then has the reference's probability.
    """
    below = cute.arch.fmax(x - reference, scale.farthest)
    if above:
        below = cute.arch.fmin(below, cutlass.Float32(0.0))
    rounded = fma(below, scale.factor, cutlass.Float32(ROUND_TO_INT))
    n = rounded - cutlass.Float32(ROUND_TO_INT)
    f = fma(below, scale.factor, -n)
    h = cutlass.Float32(constants.EXP2_COEFFICIENTS[-1] * one)
    for coefficient in constants.EXP2_COEFFICIENTS[-2::-1]:
        h = fma(f, h, cutlass.Float32(coefficient * one))
    integer = rounded.bitcast(cutlass.Uint32) << cutlass.Uint32(MANTISSA)
    return (h.bitcast(cutlass.Uint32) + integer).bitcast(cutlass.Float32)


def mass_of(x, reference, scale, above: bool = False):
    """The mass of a logit in its block, uint32 in units of 2**-29; `above` as in `power_of`."""
    return truncate_to_uint(power_of(x, reference, scale, MASS_ONE, above), cutlass.Uint32)


def prob_of(x, reference, scale):
    """The probability of a logit before normalization, uint64 in units of 2**-40."""
    return truncate_to_uint(prob_power_of(x, reference, scale), cutlass.Uint64)


def prob_power_of(x, reference, scale):
    """The same before it is rounded toward zero, float32."""
    return power_of(x, reference, scale, PROB_ONE, above=True)


def mul_shift_right(a, b, bits: int):
    """floor(a * b / 2**bits) of uint64, where that is below 2**64; bits from 1 to 63."""
    high = cute.arch.mul_hi(a, b) << cutlass.Uint64(64 - bits)
    return high | ((a * b) >> cutlass.Uint64(bits))


def weighted(mass_sum, weight):
    """A block's sum of masses in the row, uint64 in units of 2**-40."""
    return mul_shift_right(mass_sum, weight, constants.MANTISSA_BITS)


@cute.jit
def normal_of(prob_sum):
    """2**62 / the sum of a row's probabilities, uint64, which is 2**40 or more; 0 of 0."""
    least, highest = cutlass.Uint64(1 << constants.PROB_BITS), cutlass.Uint64((1 << NORMAL_BITS) - 1)
    divisor = cutlass.Float64(prob_sum if prob_sum > least else least)
    normal = cutlass.Uint64(cutlass.Float64(2.0 ** (NORMAL_BITS + constants.PROB_BITS)) / divisor)
    normal = normal if normal < highest else highest
    return normal if prob_sum > 0 else cutlass.Uint64(0)


def exponential(x, reference):
    """exp(x - reference), approximate: 0 for NaN and where both are -inf, 1 above a finite reference."""
    below = cute.arch.fmin(cute.arch.fmax(x - reference, -cutlass.Float32.inf), cutlass.Float32(0.0))
    return exp2(below * cutlass.Float32(LOG2_E))


# --- filters ---


@cute.jit
def top_p_complement(top_p: cutlass.Float32):
    """1 - top_p as a multiple of 2**-31, uint64, for top_p up to 1."""
    clamped = top_p if top_p > 0.0 else cutlass.Float32(0.0)
    return cutlass.Uint64((cutlass.Float32(1.0) - clamped) * cutlass.Float32(float(1 << constants.TOP_P_BITS)))


def top_p_limit(top_p, prob_sum):
    """Top-p keeps a token while the sum of the likelier ones is below this; all of prob_sum where top_p is 1."""
    budget = mul_shift_right(top_p_complement(top_p), prob_sum, constants.TOP_P_BITS)
    return prob_sum - cutlass.min(budget, prob_sum - 1)


@cute.jit
def min_p_threshold(min_p: cutlass.Float32):
    """The least probability that min-p keeps, uint64; 0 where it is off."""
    clamped = cute.arch.fmin(min_p, cutlass.Float32(1.0)) if min_p > 0.0 else cutlass.Float32(0.0)
    return cutlass.Uint64(clamped * cutlass.Float32(float(1 << constants.PROB_BITS)))


def sampling_target(random_bits, prob_sum):
    """floor(U * prob_sum), U the random bits as a fraction: the first token whose prefix sum exceeds it is drawn."""
    return mul_shift_right(random_bits, prob_sum, 62)


@cute.jit
def is_likelier(x, token_id, bound, bound_id):
    """Whether a token comes before another one in top-p's order; of equal logits the higher id does."""
    return x > bound or (x == bound and token_id > bound_id)
