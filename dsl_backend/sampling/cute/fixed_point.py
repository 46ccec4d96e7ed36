# SPDX-License-Identifier: Apache-2.0
"""The fixed-point arithmetic of the definition on the device.

`dsl_backend/sampling/fixed_point.py` defines each operation. Every kernel must compute it in exactly that way.
"""

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.primitives.math import LOG2_E, exp2
from dsl_backend.sampling import fixed_point as constants

LOW_32 = (1 << 32) - 1
SIGN = 1 << 31
# From here on a mass is 0, and the shift stays below 32.
MAX_MASS_EXPONENT = 31.0 * 2**24
# At and beyond this exponent a prob is 0.
NO_PROB = (constants.PROB_BITS + 1) << constants.FRACTION_BITS
# Between the units of masses and of probs.
MASS_TO_PROB = constants.PROB_BITS - constants.MANTISSA_BITS


@dsl_user_op
def truncate_to_uint(a, *, loc=None, ip=None):
    """A float32 rounded toward zero as uint32; 0 for NaN and below 0."""
    value = cute.arch.inline_ptx(
        "cvt.rzi.u32.f32 {$w0}, {$r0};", write_only_types=[cutlass.Uint32], read_only_args=[a], loc=loc, ip=ip
    )
    return cutlass.Uint32(value)


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


def scale_of(temperature):
    """What differences of logits are multiplied by; correctly rounded."""
    usual = cute.arch.fmin(temperature, cutlass.Float32(constants.MAX_TEMPERATURE))
    return cutlass.Float32(constants.EXPONENT_SCALE) / usual


def finite(x):
    """A maximum as a reference: an infinite one as the largest number."""
    return cute.arch.fmin(x, cutlass.Float32(constants.MAX_LOGIT))


def exponent_of(x, reference, scale, limit: float = constants.MAX_EXPONENT):
    """How far x lies below a reference, uint32 in fixed point; the limit for NaN, 0 above the reference."""
    return truncate_to_uint(cute.arch.fmin((reference - x) * scale, cutlass.Float32(limit)))


def mantissa_of(exponent):
    fraction = ~(exponent << cutlass.Uint32(32 - constants.FRACTION_BITS))
    h = cutlass.Uint32(constants.EXP2_COEFFICIENTS[-1])
    for coefficient in constants.EXP2_COEFFICIENTS[-2::-1]:
        h = cute.arch.mul_hi(fraction, h) + cutlass.Uint32(coefficient)
    return h


def mass_of(x, reference, scale):
    """The mass of a logit below its block's reference, uint32 in units of 2**-29."""
    exponent = exponent_of(x, reference, scale, MAX_MASS_EXPONENT)
    return mantissa_of(exponent) >> (exponent >> cutlass.Uint32(constants.FRACTION_BITS))


def prob_of(exponent, mass_to_prob=MASS_TO_PROB):
    """The probability at an exponent before normalization, uint64 in units of 2**-40.

    Args:
        mass_to_prob: 0 for units of 2**-29.
    """
    wide = cutlass.Uint64(mantissa_of(exponent)) << cutlass.Uint64(mass_to_prob)
    return wide >> cutlass.Uint64(exponent >> cutlass.Uint32(constants.FRACTION_BITS))


def mul_shift_right(a, b, bits: int):
    """floor(a * b / 2**bits) of uint64, where that is below 2**64; bits from 1 to 63."""
    high = cute.arch.mul_hi(a, b) << cutlass.Uint64(64 - bits)
    return high | ((a * b) >> cutlass.Uint64(bits))


def weighted(mass_sum, weight):
    """A block's sum of masses in the row, uint64 in units of 2**-40."""
    return mul_shift_right(mass_sum, weight, constants.MANTISSA_BITS)


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


# --- the output ---


def store_token(token: cute.Pointer, token_id):
    """Write a row's token."""
    cute.make_tensor(token, cute.make_layout(1))[0] = token.dtype(token_id)
