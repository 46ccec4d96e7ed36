# SPDX-License-Identifier: Apache-2.0
"""Philox 4x32-10 on the device."""

import cutlass
from cutlass import cute

from dsl_backend.sampling import fixed_point as constants

LOW_32 = (1 << 32) - 1


def random_bits(seed, position, draw=0):
    """62 random bits, uint64, for an int64 seed and position, and the number of the draw."""

    def split(number):
        unsigned = cutlass.Uint64(number)
        return [cutlass.Uint32(unsigned & cutlass.Uint64(LOW_32)), cutlass.Uint32(unsigned >> cutlass.Uint64(32))]

    key = split(seed)
    counter = [*split(position), cutlass.Uint32(constants.PHILOX_STREAM), cutlass.Uint32(draw)]
    first, second = (cutlass.Uint32(multiplier) for multiplier in constants.PHILOX_MULTIPLIERS)
    for round_idx in range(constants.PHILOX_ROUNDS):
        high = [cute.arch.mul_hi(first, counter[0]), cute.arch.mul_hi(second, counter[2])]
        # In the first round this is a product of two constants: CuTe DSL 4.8 warns where it does not fit 32 bits.
        constant = cutlass.Uint32((constants.PHILOX_MULTIPLIERS[1] * constants.PHILOX_STREAM) & LOW_32)
        low = [first * counter[0], constant if round_idx == 0 else second * counter[2]]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [word + cutlass.Uint32(step) for word, step in zip(key, constants.PHILOX_INCREMENTS, strict=True)]
    one = cutlass.Uint32(1)
    return (cutlass.Uint64(counter[0] >> one) << cutlass.Uint64(31)) | cutlass.Uint64(counter[1] >> one)
