# SPDX-License-Identifier: Apache-2.0
"""The fixed-point arithmetic of the definition in Triton.

`dsl_backend/sampling/fixed_point.py` defines each operation. Every kernel must compute it in exactly that way. z is a
logit over the temperature.
"""

import triton
import triton.language as tl

from dsl_backend.sampling import fixed_point

NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)
SIGN = tl.constexpr(1 << 31)
GREEDY_TEMPERATURE = tl.constexpr(fixed_point.GREEDY_TEMPERATURE)
MAX_DISTANCE = tl.constexpr(fixed_point.MAX_DISTANCE)
DISTANCE_ONE = tl.constexpr(float(1 << fixed_point.DISTANCE_BITS))
FRACTION_BITS = tl.constexpr(fixed_point.FRACTION_BITS)
FRACTION_MASK = tl.constexpr((1 << fixed_point.FRACTION_BITS) - 1)
FRACTION_TO_32 = tl.constexpr(32 - fixed_point.FRACTION_BITS)
LOG2_E = tl.constexpr(fixed_point.LOG2_E)
C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in fixed_point.EXP2_COEFFICIENTS)
PROB_SHIFT = tl.constexpr(fixed_point.PROB_BITS - 31)
PROB_ONE = tl.constexpr(float(1 << fixed_point.PROB_BITS))
PROB_UNIT = tl.constexpr(1.0 / (1 << fixed_point.PROB_BITS))
TOP_P_ONE = tl.constexpr(float(1 << fixed_point.TOP_P_BITS))
LOW_31 = tl.constexpr((1 << 31) - 1)
PHILOX_STREAM = tl.constexpr(fixed_point.PHILOX_STREAM)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_logits(logits, ids, V):
    """Logits in float32; -inf for NaN and past the row's end."""
    x = tl.load(logits + ids, mask=ids < V, other=NEG_INF).to(tl.float32)
    return tl.where(x == x, x, NEG_INF)


@triton.jit
def scaled_logit(x, temperature):
    """z: x over the temperature, correctly rounded; never NaN or negative zero."""
    z = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * temperature)
    z = tl.where(z == z, z, NEG_INF)
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def to_ordered_uint(z):
    """A uint32 that is ordered as z is."""
    bits = z.to(tl.uint32, bitcast=True)
    return tl.where((bits & SIGN) != 0, ~bits, bits | SIGN)


@triton.jit
def below_max(z, row_max):
    """row_max - z in float32; 0 at the maximum, also where it is infinite."""
    is_max = z == row_max
    return tl.where(is_max, 0.0, row_max - tl.where(is_max, 0.0, z))


@triton.jit
def distance_of(z, row_max):
    """The distance from the maximum, int32 in fixed point."""
    return (tl.minimum(below_max(z, row_max), MAX_DISTANCE) * DISTANCE_ONE).to(tl.int32)


@triton.jit
def horner_step(c, fraction, h):
    return tl.full(h.shape, c, tl.uint32) - tl.umulhi(fraction, h)


@triton.jit
def prob_of(distance):
    """The probability at a distance, int64 in fixed point and not normalized."""
    t = tl.umulhi(distance.to(tl.uint32), tl.full(distance.shape, LOG2_E, tl.uint32))
    fraction = (t & FRACTION_MASK) << FRACTION_TO_32
    h = horner_step(C5, fraction, tl.full(distance.shape, C6, tl.uint32))
    h = horner_step(C4, fraction, h)
    h = horner_step(C3, fraction, h)
    h = horner_step(C2, fraction, h)
    h = horner_step(C1, fraction, h)
    h = horner_step(C0, fraction, h)
    return (h.to(tl.int64) << PROB_SHIFT) >> (t >> FRACTION_BITS).to(tl.int64)


@triton.jit
def random_bits(seed, position):
    """62 random bits, int64."""
    zero = (position * 0).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, _, _ = tl.philox(seed, low, high, zero + PHILOX_STREAM, zero)
    return ((r0 >> 1).to(tl.int64) << 31) | (r1 >> 1).to(tl.int64)


@triton.jit
def sampling_target(bits, prob_sum):
    """floor(bits * prob_sum / 2**62) of two numbers below 2**62: the prefix sum that the drawn token exceeds."""
    b1 = bits >> 31
    b0 = bits & LOW_31
    t1 = prob_sum >> 31
    t0 = prob_sum & LOW_31
    return b1 * t1 + ((b1 * t0 + b0 * t1 + ((b0 * t0) >> 31)) >> 31)
