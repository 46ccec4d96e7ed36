# SPDX-License-Identifier: Apache-2.0
"""The fixed-point arithmetic of the definition on the device.

`dsl_backend/sampling/fixed_point.py` defines each operation. Every kernel must compute it in exactly that way.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.sampling import fixed_point as constants

LOW_32 = (1 << 32) - 1
SIGN = 1 << 31
# From this quotient on the remainders of Newton's method are exact: a remainder's last bit is at least 2**-23 times a
# divisor's and 2**-23 times a quotient's, which is above 2**-149.
MIN_EXACT_QUOTIENT = 2.0**-80
MAX_DIVISOR = 2.0**60
# Distances are below this power of two.
DISTANCE_RANGE_BITS = 30


@dsl_user_op
def truncate_to_uint(a, *, loc=None, ip=None):
    """A float32 rounded toward zero as uint32; 0 for NaN."""
    value = cute.arch.inline_ptx(
        "cvt.rzi.u32.f32 {$w0}, {$r0};", write_only_types=[cutlass.Uint32], read_only_args=[a], loc=loc, ip=ip
    )
    return cutlass.Uint32(value)


# --- scaled logits ---


@cute.jit
def scaled_logit(x: cutlass.Float32, temperature: cutlass.Float32):
    """z: x over the temperature, correctly rounded; never NaN or negative zero."""
    return canonical(x / temperature)


@cute.jit
def canonical(z: cutlass.Float32):
    """NaN becomes -inf, and negative zero becomes zero."""
    z = -cutlass.Float32.inf if z != z else z
    return z + cutlass.Float32(0.0)


class Divisor(NamedTuple):
    """A temperature to divide by.

    Attributes:
        value: the temperature, above 0.
        negative: its negative.
        reciprocal: correctly rounded; NaN where quotients are not computed from it.
    """

    value: Any
    negative: Any
    reciprocal: Any


@cute.jit
def make_divisor(temperature: cutlass.Float32) -> Divisor:
    one, nan = cutlass.Float32(1.0), cutlass.Float32(float("nan"))
    reciprocal = one / temperature if temperature <= MAX_DIVISOR else nan
    return Divisor(temperature, -temperature, reciprocal)


def divide(x, divisor: Divisor):
    """The quotient, correctly rounded from MIN_EXACT_QUOTIENT on; below it may be off, and out of range it is NaN.

    Two steps of Newton's method with exact remainders: from a correctly rounded reciprocal the second one rounds
    correctly (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    """
    quotient = x * divisor.reciprocal
    for _ in range(2):
        remainder = cute.math.fma(divisor.negative, quotient, x)
        quotient = cute.math.fma(remainder, divisor.reciprocal, quotient)
    return quotient


@cute.jit
def divide_all(rX: cute.Tensor, divisor: Divisor):
    """Divide float32 registers by the temperature in place, correctly rounded."""
    rQuotient = cute.make_rmem_tensor(rX.shape, cutlass.Float32)
    exact = cutlass.Boolean(True)
    for i in cutlass.range_constexpr(cute.size(rX)):
        rQuotient[i] = divide(rX[i], divisor)
        exact = exact and cute.math.abs(rQuotient[i]) >= cutlass.Float32(MIN_EXACT_QUOTIENT)
    if exact:
        for i in cutlass.range_constexpr(cute.size(rX)):
            rX[i] = rQuotient[i]
    else:
        for i in cutlass.range_constexpr(cute.size(rX)):
            rX[i] = rX[i] / divisor.value


@cute.jit
def to_ordered_uint(z: cutlass.Float32):
    """A uint32 that is ordered as z is."""
    bits = z.bitcast(cutlass.Uint32)
    return ~bits if bits >= cutlass.Uint32(SIGN) else bits | cutlass.Uint32(SIGN)


@cute.jit
def from_ordered_uint(key: cutlass.Uint32):
    """The z of a `to_ordered_uint`."""
    bits = key ^ cutlass.Uint32(SIGN) if key >= cutlass.Uint32(SIGN) else ~key
    return bits.bitcast(cutlass.Float32)


# --- distances and probabilities ---


@cute.jit
def below_max(z: cutlass.Float32, row_max: cutlass.Float32):
    """row_max - z in float32; 0 at the maximum, also where it is infinite."""
    return cutlass.Float32(0.0) if z == row_max else row_max - z


def distance_of(z, row_max):
    """The distance from the maximum, uint32 in fixed point."""
    clamped = cute.arch.fmin(below_max(z, row_max), cutlass.Float32(constants.MAX_DISTANCE))
    return cutlass.Uint32(clamped * cutlass.Float32(float(1 << constants.DISTANCE_BITS)))


def distance_of_any(z, row_max):
    """As `distance_of`, for a z that may also be NaN: its distance is 0.

    No comparison is needed: at an infinite maximum the difference is NaN, which converts to the integer 0.
    """
    clamped = cute.math.min(row_max - z, cutlass.Float32(constants.MAX_DISTANCE), propagate_nan=True)
    return truncate_to_uint(clamped * cutlass.Float32(float(1 << constants.DISTANCE_BITS)))


@cute.jit
def prob_of(distance, counted=True):
    """The probability at a distance, uint64 in fixed point and not normalized; 0 where counted is false."""
    t = cute.arch.mul_hi(distance, cutlass.Uint32(constants.LOG2_E))
    fraction_mask = cutlass.Uint32((1 << constants.FRACTION_BITS) - 1)
    fraction = (t & fraction_mask) << cutlass.Uint32(32 - constants.FRACTION_BITS)
    h = cutlass.Uint32(constants.EXP2_COEFFICIENTS[-1])
    for coefficient in constants.EXP2_COEFFICIENTS[-2::-1]:
        h = cutlass.Uint32(coefficient) - cute.arch.mul_hi(fraction, h)
    if cutlass.const_expr(counted is not True):
        h = h if counted else cutlass.Uint32(0)
    wide = cutlass.Uint64(h) << cutlass.Uint64(constants.PROB_BITS - 31)
    return wide >> cutlass.Uint64(t >> cutlass.Uint32(constants.FRACTION_BITS))


# --- filters ---


def mul_shift_right(a, b, bits: int):
    """floor(a * b / 2**bits) of uint64, where that is below 2**64; bits from 1 to 63."""
    high = cute.arch.mul_hi(a, b) << cutlass.Uint64(64 - bits)
    return high | ((a * b) >> cutlass.Uint64(bits))


@cute.jit
def top_p_complement(top_p: cutlass.Float32):
    """1 - top_p as a multiple of 2**-31, uint64, for top_p below 1."""
    clamped = top_p if top_p > 0.0 else cutlass.Float32(0.0)
    return cutlass.Uint64((cutlass.Float32(1.0) - clamped) * cutlass.Float32(float(1 << constants.TOP_P_BITS)))


def top_p_budget(top_p, prob_sum):
    """The probability that top-p may remove from prob_sum; the last token stays."""
    budget = mul_shift_right(top_p_complement(top_p), prob_sum, constants.TOP_P_BITS)
    return cutlass.min(budget, prob_sum - 1)


@cute.jit
def min_p_threshold(min_p: cutlass.Float32):
    """The least probability that min-p keeps, uint64; 0 where it is off."""
    clamped = cute.arch.fmin(min_p, cutlass.Float32(1.0)) if min_p > 0.0 else cutlass.Float32(0.0)
    return cutlass.Uint64(clamped * cutlass.Float32(float(1 << constants.PROB_BITS)))


@cute.jit
def max_distance_of(min_prob: cutlass.Uint64):
    """The largest distance, below 2**30, whose probability is at least min_prob."""
    distance = cutlass.Uint32((1 << DISTANCE_RANGE_BITS) - 1)
    if min_prob > 0:
        distance = cutlass.Uint32(0)
        for i in cutlass.range(DISTANCE_RANGE_BITS, unroll=1):
            farther = distance | (cutlass.Uint32(1 << (DISTANCE_RANGE_BITS - 1)) >> cutlass.Uint32(i))
            distance = farther if prob_of(farther) >= min_prob else distance
    return distance


def sampling_target(random_bits, prob_sum):
    """floor(U * prob_sum), U the random bits as a fraction: the first token whose prefix sum exceeds it is drawn."""
    return mul_shift_right(random_bits, prob_sum, 62)


# --- the output ---


def store_token(token: cute.Pointer, token_id):
    """Write a row's token."""
    cute.make_tensor(token, cute.make_layout(1))[0] = token.dtype(token_id)
