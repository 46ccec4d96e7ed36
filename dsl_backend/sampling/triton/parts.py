# SPDX-License-Identifier: Apache-2.0
"""What the Triton sampler is made of: logits as ordered integers, weights, random bits, the two threshold searches.

Names: `row` is a bundle of what the passes over a row need, z a logit over the temperature, v a distance from the
largest z in fixed point, w a weight. fixed.py says how they are computed; nothing here may be computed otherwise.
"""

import triton
import triton.language as tl

from dsl_backend.sampling import fixed

NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)
SIGN = tl.constexpr(1 << 31)
LEAST_TEMPERATURE = tl.constexpr(fixed.LEAST_TEMPERATURE)
FARTHEST = tl.constexpr(fixed.FARTHEST)
DISTANCE_ONE = tl.constexpr(float(1 << fixed.DISTANCE_BITS))
FRACTION_BITS = tl.constexpr(fixed.FRACTION_BITS)
FRACTION_MASK = tl.constexpr((1 << fixed.FRACTION_BITS) - 1)
FRACTION_TO_32 = tl.constexpr(32 - fixed.FRACTION_BITS)
LOG2E = tl.constexpr(fixed.LOG2E)
C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in fixed.COEFFICIENTS)
WEIGHT_SHIFT = tl.constexpr(fixed.WEIGHT_BITS - 31)
WEIGHT_ONE = tl.constexpr(float(1 << fixed.WEIGHT_BITS))
WEIGHT_UNIT = tl.constexpr(1.0 / (1 << fixed.WEIGHT_BITS))
SHARE_ONE = tl.constexpr(float(1 << fixed.SHARE_BITS))
LOW_31 = tl.constexpr((1 << 31) - 1)
STREAM = tl.constexpr(fixed.STREAM)
BINS = tl.constexpr(256)
DIGIT = tl.constexpr(8)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load(logits, ids, V):
    """Logits in float32, -inf for NaN and past the row's end."""
    x = tl.load(logits + ids, mask=ids < V, other=NEG_INF).to(tl.float32)
    return tl.where(x == x, x, NEG_INF)


@triton.jit
def scale(x, temperature):
    """z: x over the temperature, correctly rounded; no NaN, no negative zero."""
    z = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * temperature)
    z = tl.where(z == z, z, NEG_INF)
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def ordered(z):
    """uint32 in the order of z."""
    bits = z.to(tl.uint32, bitcast=True)
    return tl.where((bits & SIGN) != 0, ~bits, bits | SIGN)


@triton.jit
def away(z, largest):
    """How far z is below the largest: 0 for the largest itself, infinite ones included."""
    at_top = z == largest
    return tl.where(at_top, 0.0, largest - tl.where(at_top, 0.0, z))


@triton.jit
def distance(z, largest):
    """v, int32."""
    return (tl.minimum(away(z, largest), FARTHEST) * DISTANCE_ONE).to(tl.int32)


@triton.jit
def step(c, fraction, h):
    return tl.full(h.shape, c, tl.uint32) - tl.umulhi(fraction, h)


@triton.jit
def weigh(v):
    """w, int64."""
    t = tl.umulhi(v.to(tl.uint32), tl.full(v.shape, LOG2E, tl.uint32))
    fraction = (t & FRACTION_MASK) << FRACTION_TO_32
    h = step(C5, fraction, tl.full(v.shape, C6, tl.uint32))
    h = step(C4, fraction, h)
    h = step(C3, fraction, h)
    h = step(C2, fraction, h)
    h = step(C1, fraction, h)
    h = step(C0, fraction, h)
    return (h.to(tl.int64) << WEIGHT_SHIFT) >> (t >> FRACTION_BITS).to(tl.int64)


@triton.jit
def random_bits(seed, position):
    """62 of them, int64."""
    zero = (position * 0).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, _, _ = tl.philox(seed, low, high, zero + STREAM, zero)
    return ((r0 >> 1).to(tl.int64) << 31) | (r1 >> 1).to(tl.int64)


@triton.jit
def multiply_high(bits, total):
    """floor(bits * total / 2**62) of two numbers below 2**62."""
    b1 = bits >> 31
    b0 = bits & LOW_31
    t1 = total >> 31
    t0 = total & LOW_31
    return b1 * t1 + ((b1 * t0 + b0 * t1 + ((b0 * t0) >> 31)) >> 31)


@triton.jit
def kth_largest(logits, V, temperature, k, BLOCK: tl.constexpr):
    """The k-th largest z of a row as `ordered` has it, by its digits from the highest on; 1 <= k <= V."""
    found = tl.zeros([], tl.uint32)
    left = k
    for place in range(4):
        shift = 24 - DIGIT * place
        higher = (found >> shift) >> DIGIT
        bins = tl.zeros([BINS], tl.int32)
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            key = ordered(scale(load(logits, ids, V), temperature))
            candidate = (ids < V) & (((key >> shift) >> DIGIT) == higher)
            bins += tl.histogram(((key >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=candidate)
        at_least = tl.sum(bins) - tl.cumsum(bins, 0) + bins
        digit = tl.sum((at_least >= left).to(tl.int32)) - 1
        here = tl.arange(0, BINS) == digit
        left -= tl.sum(tl.where(here, at_least - bins, 0))
        found |= digit.to(tl.uint32) << shift
    return found


@triton.jit
def farther(distances, count, bound, BLOCK: tl.constexpr):
    """The sums of the weights of listed distances above bound[0], bound[1] and bound[2]."""
    bound0, bound1, bound2 = bound
    sum0 = tl.zeros([], tl.int64)
    sum1 = tl.zeros([], tl.int64)
    sum2 = tl.zeros([], tl.int64)
    for base in range(0, count, BLOCK):
        at = base + tl.arange(0, BLOCK)
        v = tl.load(distances + at, mask=at < count, other=-1)
        w = tl.where(at < count, weigh(tl.maximum(v, 0)), 0)
        sum0 += tl.sum(tl.where(v > bound0, w, 0))
        sum1 += tl.sum(tl.where(v > bound1, w, 0))
        sum2 += tl.sum(tl.where(v > bound2, w, 0))
    return sum0, sum1, sum2


@triton.jit
def top_p_bound(distances, count, budget, BLOCK: tl.constexpr):
    """The distance at which top-p's budget ends, how many tokens of that distance go too, and the weight that goes.

    It is the least distance beyond which all weights together are within the budget, found by two bits at a time.
    """
    bound = tl.zeros([], tl.int32)
    for place in range(15):
        unit = 1 << (28 - 2 * place)
        tries = (bound + unit - 1, bound + 2 * unit - 1, bound + 3 * unit - 1)
        sum0, sum1, sum2 = farther(distances, count, tries, BLOCK)
        above = (sum0 > budget).to(tl.int32) + (sum1 > budget).to(tl.int32) + (sum2 > budget).to(tl.int32)
        bound += unit * above
    beyond = tl.zeros([], tl.int64)
    ties = tl.zeros([], tl.int32)
    for base in range(0, count, BLOCK):
        at = base + tl.arange(0, BLOCK)
        v = tl.load(distances + at, mask=at < count, other=-1)
        beyond += tl.sum(tl.where(v > bound, weigh(tl.maximum(v, 0)), 0))
        ties += tl.sum((v == bound).to(tl.int32))
    each = tl.max(weigh(bound + tl.zeros([1], tl.int32)), 0)
    removed = tl.minimum((budget - beyond) // each, (ties - 1).to(tl.int64))
    return bound, removed.to(tl.int32), beyond + removed * each
