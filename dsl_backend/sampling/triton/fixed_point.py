# SPDX-License-Identifier: Apache-2.0
"""The fixed-point arithmetic of the definition in Triton.

`dsl_backend/sampling/fixed_point.py` defines each operation. Every kernel must compute it in exactly that way.
"""

import triton
import triton.language as tl

from dsl_backend.sampling import fixed_point

NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)
SIGN = tl.constexpr(1 << 31)
GREEDY_TEMPERATURE = tl.constexpr(fixed_point.GREEDY_TEMPERATURE)
MAX_TEMPERATURE = tl.constexpr(fixed_point.MAX_TEMPERATURE)
MAX_LOGIT = tl.constexpr(fixed_point.MAX_LOGIT)
EXPONENT_SCALE = tl.constexpr(fixed_point.EXPONENT_SCALE)
MAX_EXPONENT = tl.constexpr(fixed_point.MAX_EXPONENT)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in fixed_point.EXP2_COEFFICIENTS)
DEFINED_BLOCK = tl.constexpr(fixed_point.BLOCK)
# Added to a float32 of magnitude below 2**22, it rounds to an integer.
ROUND_TO_INT = tl.constexpr(1.5 * 2**23)
MASS_ONE = tl.constexpr(float(1 << fixed_point.MANTISSA_BITS))
MASS_WEIGHT = tl.constexpr(1 << fixed_point.MANTISSA_BITS)
HIGHEST_62 = tl.constexpr((1 << 62) - 1)
# 2**62 in units of 2**-PROB_BITS.
NORMAL_ONE = tl.constexpr(2.0 ** (62 + fixed_point.PROB_BITS))
WEIGHT_SHIFT = tl.constexpr(62 - fixed_point.MANTISSA_BITS - 11)
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
def to_ordered_uint(x):
    """A uint32 that is ordered as x is; negative zero is zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits & SIGN) != 0, ~bits, bits | SIGN)


@triton.jit
def scale_of(temperature):
    """What differences of logits are multiplied by, [1]; correctly rounded."""
    usual = tl.minimum(temperature, MAX_TEMPERATURE) + tl.zeros([1], tl.float32)
    return tl.div_rn(tl.full([1], EXPONENT_SCALE, tl.float32), usual)


@triton.jit
def float_prob_of(x, reference, scale, one):
    """The probability of x before normalization, float32 with a fraction. Of infinite references only -inf, with 0.

    Args:
        one: the result at the reference, a power of two: `MASS_ONE` or `PROB_ONE`.
    """
    below = tl.minimum(x - reference, 0.0)
    counts = below * scale > -MAX_EXPONENT
    below = tl.where(counts, below, 0.0)
    # The nearest integer.
    n = tl.fma(below, scale, ROUND_TO_INT) - ROUND_TO_INT
    f = tl.fma(below, scale, -n)
    h = tl.fma(f, C5, C4)
    h = tl.fma(f, h, C3)
    h = tl.fma(f, h, C2)
    h = tl.fma(f, h, C1)
    h = tl.fma(f, h, C0)
    # The power of two by its bits: this product is exact.
    power = ((127 + n.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
    return tl.where(counts, h * power * one, 0.0)


@triton.jit
def scaled_prob_of(x, reference, scale, one):
    """The probability of x before normalization, int64. Arguments as in `float_prob_of`."""
    return float_prob_of(x, reference, scale, one).to(tl.int64)


@triton.jit
def mass_of(x, reference, scale):
    """The probability of x before normalization, int32 in units of 2**-29."""
    return float_prob_of(x, reference, scale, MASS_ONE).to(tl.int32)


@triton.jit
def prob_of(x, reference, scale):
    """The probability of x before normalization, int64 in units of 2**-40."""
    return scaled_prob_of(x, reference, scale, PROB_ONE)


@triton.jit
def weighted(mass_sum, weight):
    """A block's sum of masses in the row, int64 in units of 2**-40."""
    return multiply_high(mass_sum << 11, weight << WEIGHT_SHIFT)


@triton.jit
def normal_of(prob_sum):
    """2**62 / the sum of a row's probabilities, which is PROB_ONE or more; of less as of that."""
    divisor = tl.maximum(prob_sum.to(tl.float64), PROB_ONE)
    return tl.minimum((tl.full(divisor.shape, NORMAL_ONE, tl.float64) / divisor).to(tl.int64), HIGHEST_62)


@triton.jit
def normalized(prob, normal):
    """Probabilities in units of 2**-40, int64: floor(prob * normal / 2**62)."""
    high = tl.umulhi((prob << 2).to(tl.uint64), tl.zeros(prob.shape, tl.uint64) + normal.to(tl.uint64))
    return high.to(tl.int64)


@triton.jit
def random_bits(seed, position, draw):
    """62 random bits, int64."""
    zero = (position * 0).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, _, _ = tl.philox(seed, low, high, zero + PHILOX_STREAM, zero + draw)
    return ((r0 >> 1).to(tl.int64) << 31) | (r1 >> 1).to(tl.int64)


@triton.jit
def multiply_high(a, b):
    """floor(a * b / 2**62) of two numbers up to 2**62, not both of them 2**62."""
    a1 = a >> 31
    a0 = a & LOW_31
    b1 = b >> 31
    b0 = b & LOW_31
    return a1 * b1 + ((a1 * b0 + a0 * b1 + ((a0 * b0) >> 31)) >> 31)
