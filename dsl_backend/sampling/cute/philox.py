# SPDX-License-Identifier: Apache-2.0
"""The definition's arithmetic on the device: scaled logits, distances, weights, random bits, products of 62 bits.

`fixed.py` says how each is computed; nothing here may be computed otherwise.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.sampling import fixed

LOW_32 = (1 << 32) - 1
SIGN = 1 << 31
# Remainders are exact then: their last bit is at least 2**-23 of a divisor's by 2**-23 of a quotient's, above 2**-149.
SMALLEST_QUOTIENT = 2.0**-80
LARGEST_DIVISOR = 2.0**60


@dsl_user_op
def whole(a, *, loc=None, ip=None):
    """A float32 without its fraction as uint32; 0 for NaN."""
    made = cute.arch.inline_ptx(
        "cvt.rzi.u32.f32 {$w0}, {$r0};", write_only_types=[cutlass.Uint32], read_only_args=[a], loc=loc, ip=ip
    )
    return cutlass.Uint32(made)


@cute.jit
def scale(x: cutlass.Float32, temperature: cutlass.Float32):
    """z: x over the temperature, correctly rounded; no NaN, no negative zero."""
    return cleaned(x / temperature)


@cute.jit
def cleaned(z: cutlass.Float32):
    """NaN as -inf, and no negative zero."""
    z = -cutlass.Float32.inf if z != z else z
    return z + cutlass.Float32(0.0)


class Divisor(NamedTuple):
    """A temperature, and what quotients by it are computed from.

    Attributes:
        value: of the temperature, above 0.
        negative: of it.
        reciprocal: correctly rounded; NaN where quotients are not computed from it.
    """

    value: Any
    negative: Any
    reciprocal: Any


@cute.jit
def divisor(temperature: cutlass.Float32) -> Divisor:
    one, nan = cutlass.Float32(1.0), cutlass.Float32(float("nan"))
    reciprocal = one / temperature if temperature <= LARGEST_DIVISOR else nan
    return Divisor(temperature, -temperature, reciprocal)


def quotient(x, by: Divisor):
    """The quotient, correctly rounded from SMALLEST_QUOTIENT on; a smaller one may be off, one out of range is NaN.

    Two steps of Newton's method with exact remainders: from a correctly rounded reciprocal the second one rounds
    correctly (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    """
    found = x * by.reciprocal
    for _ in range(2):
        found = cute.math.fma(cute.math.fma(by.negative, found, x), by.reciprocal, found)
    return found


@cute.jit
def quotients(x: cute.Tensor, by: Divisor):
    """All of x over the temperature, correctly rounded, in place: float32 in registers."""
    exact = cute.make_rmem_tensor(x.shape, cutlass.Float32)
    certain = cutlass.Boolean(True)
    for i in cutlass.range_constexpr(cute.size(x)):
        exact[i] = quotient(x[i], by)
        certain = certain and cute.math.abs(exact[i]) >= cutlass.Float32(SMALLEST_QUOTIENT)
    if certain:
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = exact[i]
    else:
        for i in cutlass.range_constexpr(cute.size(x)):
            x[i] = x[i] / by.value


@cute.jit
def away(z: cutlass.Float32, largest: cutlass.Float32):
    """How far z is below the largest: 0 for the largest itself, infinite ones included."""
    return cutlass.Float32(0.0) if z == largest else largest - z


def near(z, largest):
    """`distance` of a z at most the largest, or NaN, whose distance is 0.

    The largest has 0 even where it is infinite, since its difference is NaN then, and NaN as an integer is 0.
    """
    clamped = cute.math.min(largest - z, cutlass.Float32(fixed.FARTHEST), propagate_nan=True)
    return whole(clamped * cutlass.Float32(float(1 << fixed.DISTANCE_BITS)))


def distance(z, largest):
    """v, uint32."""
    near = cute.arch.fmin(away(z, largest), cutlass.Float32(fixed.FARTHEST))
    return cutlass.Uint32(near * cutlass.Float32(float(1 << fixed.DISTANCE_BITS)))


@cute.jit
def weigh(v, counted=True):
    """The weight of a distance, uint64; 0 where it is not counted."""
    t = cute.arch.mul_hi(v, cutlass.Uint32(fixed.LOG2E))
    fraction = (t & cutlass.Uint32((1 << fixed.FRACTION_BITS) - 1)) << cutlass.Uint32(32 - fixed.FRACTION_BITS)
    h = cutlass.Uint32(fixed.COEFFICIENTS[-1])
    for coefficient in fixed.COEFFICIENTS[-2::-1]:
        h = cutlass.Uint32(coefficient) - cute.arch.mul_hi(fraction, h)
    if cutlass.const_expr(counted is not True):
        h = h if counted else cutlass.Uint32(0)
    wide = cutlass.Uint64(h) << cutlass.Uint64(fixed.WEIGHT_BITS - 31)
    return wide >> cutlass.Uint64(t >> cutlass.Uint32(fixed.FRACTION_BITS))


@cute.jit
def ordered(z: cutlass.Float32):
    """uint32 in the order of z."""
    bits = z.bitcast(cutlass.Uint32)
    return ~bits if bits >= cutlass.Uint32(SIGN) else bits | cutlass.Uint32(SIGN)


@cute.jit
def unordered(key: cutlass.Uint32):
    """The z of a key of `ordered`."""
    bits = key ^ cutlass.Uint32(SIGN) if key >= cutlass.Uint32(SIGN) else ~key
    return bits.bitcast(cutlass.Float32)


def shifted_product(a, b, bits: int):
    """floor(a * b / 2**bits) of uint64, where that is below 2**64; bits from 1 to 63."""
    high = cute.arch.mul_hi(a, b) << cutlass.Uint64(64 - bits)
    return high | ((a * b) >> cutlass.Uint64(bits))


def random_bits(seed, position):
    """62 of them, uint64, for an int64 seed and position."""

    def words(number):
        unsigned = cutlass.Uint64(number)
        return [cutlass.Uint32(unsigned & cutlass.Uint64(LOW_32)), cutlass.Uint32(unsigned >> cutlass.Uint64(32))]

    key = words(seed)
    counter = [*words(position), cutlass.Uint32(fixed.STREAM), cutlass.Uint32(0)]
    first, second = (cutlass.Uint32(multiplier) for multiplier in fixed.PHILOX_MULTIPLIERS)
    for turn in range(fixed.PHILOX_ROUNDS):
        high = [cute.arch.mul_hi(first, counter[0]), cute.arch.mul_hi(second, counter[2])]
        # The first product is of two constants: Python multiplies them, and CuTe DSL 4.8 warns of what does not fit.
        constant = cutlass.Uint32((fixed.PHILOX_MULTIPLIERS[1] * fixed.STREAM) & LOW_32)
        low = [first * counter[0], constant if turn == 0 else second * counter[2]]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [word + cutlass.Uint32(step) for word, step in zip(key, fixed.PHILOX_INCREMENTS, strict=True)]
    one = cutlass.Uint32(1)
    return (cutlass.Uint64(counter[0] >> one) << cutlass.Uint64(31)) | cutlass.Uint64(counter[1] >> one)


@cute.jit
def farthest(least: cutlass.Uint64):
    """The largest distance, below 2**30, whose weight is as much as min-p asks for."""
    found = cutlass.Uint32((1 << 30) - 1)
    if least > 0:
        found = cutlass.Uint32(0)
        for place in cutlass.range(30, unroll=1):
            farther = found | (cutlass.Uint32(1 << 29) >> cutlass.Uint32(place))
            found = farther if weigh(farther) >= least else found
    return found


@cute.jit
def share_removed(top_p: cutlass.Float32):
    """1 - p as a multiple of 2**-31, uint64; of a p below 1."""
    clamped = top_p if top_p > 0.0 else cutlass.Float32(0.0)
    return cutlass.Uint64((cutlass.Float32(1.0) - clamped) * cutlass.Float32(float(1 << fixed.SHARE_BITS)))


@cute.jit
def least_weight(min_p: cutlass.Float32):
    """The weight that min-p asks for, uint64; 0 where it is off."""
    share = cute.arch.fmin(min_p, cutlass.Float32(1.0)) if min_p > 0.0 else cutlass.Float32(0.0)
    return cutlass.Uint64(share * cutlass.Float32(float(1 << fixed.WEIGHT_BITS)))
