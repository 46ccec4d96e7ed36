# SPDX-License-Identifier: Apache-2.0
"""The definition's arithmetic on the device: scaled logits, distances, weights, random bits, products of 62 bits.

`fixed.py` says how each is computed; nothing here may be computed otherwise.
"""

import cutlass
from cutlass import cute

from dsl_backend.sampling import fixed

LOW_32 = (1 << 32) - 1
SIGN = 1 << 31


@cute.jit
def scale(x: cutlass.Float32, temperature: cutlass.Float32):
    """z: x over the temperature, correctly rounded; no NaN, no negative zero."""
    z = x / temperature
    z = -cutlass.Float32.inf if z != z else z
    return z + cutlass.Float32(0.0)


@cute.jit
def away(z: cutlass.Float32, largest: cutlass.Float32):
    """How far z is below the largest: 0 for the largest itself, infinite ones included."""
    return cutlass.Float32(0.0) if z == largest else largest - z


def distance(z, largest):
    """v, uint32."""
    near = cute.arch.fmin(away(z, largest), cutlass.Float32(fixed.FARTHEST))
    return cutlass.Uint32(near * cutlass.Float32(float(1 << fixed.DISTANCE_BITS)))


def weigh(v):
    """The weight of a distance, uint64."""
    t = cute.arch.mul_hi(v, cutlass.Uint32(fixed.LOG2E))
    fraction = (t & cutlass.Uint32((1 << fixed.FRACTION_BITS) - 1)) << cutlass.Uint32(32 - fixed.FRACTION_BITS)
    h = cutlass.Uint32(fixed.COEFFICIENTS[-1])
    for coefficient in fixed.COEFFICIENTS[-2::-1]:
        h = cutlass.Uint32(coefficient) - cute.arch.mul_hi(fraction, h)
    wide = cutlass.Uint64(h) << cutlass.Uint64(fixed.WEIGHT_BITS - 31)
    return wide >> cutlass.Uint64(t >> cutlass.Uint32(fixed.FRACTION_BITS))


@cute.jit
def ordered(z: cutlass.Float32):
    """uint32 in the order of z."""
    bits = z.bitcast(cutlass.Uint32)
    return ~bits if bits >= cutlass.Uint32(SIGN) else bits | cutlass.Uint32(SIGN)


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
    for _ in range(fixed.PHILOX_ROUNDS):
        high = [cute.arch.mul_hi(first, counter[0]), cute.arch.mul_hi(second, counter[2])]
        low = [first * counter[0], second * counter[2]]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [word + cutlass.Uint32(step) for word, step in zip(key, fixed.PHILOX_INCREMENTS, strict=True)]
    one = cutlass.Uint32(1)
    return (cutlass.Uint64(counter[0] >> one) << cutlass.Uint64(31)) | cutlass.Uint64(counter[1] >> one)


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
