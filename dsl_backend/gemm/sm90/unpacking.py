# SPDX-License-Identifier: Apache-2.0
"""Products of packed weights of 4 and 8 bits, which are unpacked in registers to wgmma's A operand.

The layout is that of `quant/weight_only.py`.

Four bits over the mantissa of `base(dtype)` are the number base + value, two for each word with one instruction. Less
base and zero point that is the element. Eight bits fit the mantissa of float16, and all but the highest one that of
bfloat16: there the highest bit chooses what is subtracted. It is the last of the exponent: with it, base + 128 - 128
is subtracted, that is 128, and without it 256. Every step is exact.
"""

import struct
from collections.abc import Sequence
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.weight_only import WeightOnlyKey
from dsl_backend.primitives.accumulators import fence_operand, words_of
from dsl_backend.primitives.math import fma, masked_bits, sub_f16x2
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.weight_only import TILE_ROWS, base

NIBBLES = 4
LOW_NIBBLES = 0x000F000F
# Of both halves of a word.
LOW_BYTES, TOP_BITS = 0x00FF00FF, 0x00800080


def pair_bits(value: float, dtype: torch.dtype) -> int:
    """Two equal 16-bit numbers in a word, as a signed integer."""
    bits = int.from_bytes(struct.pack("<e", value), "little")
    if dtype == torch.bfloat16:
        bits = int.from_bytes(struct.pack("<f", value), "little") >> 16
    return int.from_bytes((bits | bits << 16).to_bytes(4, "little"), "little", signed=True)


class Unpacking:
    """What kernels of packed weights do in a consumer's registers."""

    x_dtype: Any

    def set_format(self, key: WeightOnlyKey[Any]) -> None:
        """Of the weights, and the type of the elements."""
        self.kind, self.dtype = key.kind, key.dtypes.x
        self.pair = "bf16x2" if self.dtype == torch.bfloat16 else "f16x2"

    def unpacked_mma(self, tokens: int) -> cute.TiledMma:
        """A warpgroup's products of 64 rows of weights in registers with so many tokens."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.x_dtype,
            self.x_dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (MMA_M, tokens),
            wgmma.OperandSource.RMEM,
        )

    def multiply_unpacked(
        self,
        tiled_mma: cute.TiledMma,
        part: cute.Tensor,
        tCrW: cute.Tensor,
        tCrX: cute.Tensor,
        stage: cutlass.Int32,
        accumulate: bool,
    ):
        """Issue the products of unpacked weights with a stage's x: added to `part`, or in place of what it has.

        Args:
            tiled_mma: a new `unpacked_mma`: one that was changed in a loop could not be used behind it.
        """
        self.multiply_stages(tiled_mma, part, tCrW, tCrX, (stage,), accumulate)

    def multiply_stages(
        self,
        tiled_mma: cute.TiledMma,
        part: cute.Tensor,
        tCrW: cute.Tensor,
        tCrX: cute.Tensor,
        stages: Sequence[cutlass.Int32],
        accumulate: bool,
    ):
        """The same with the x of several stages, which have equal parts of the weights' columns, in order."""
        fence_operand(words_of(tCrW))
        tiled_mma.set(wgmma.Field.ACCUMULATE, accumulate)
        wgmma.fence()
        blocks = cute.size(tCrX, mode=[2])
        for i, stage in enumerate(stages):
            for k_block in range(blocks):
                weights = tCrW[None, None, i * blocks + k_block]
                cute.gemm(tiled_mma, part, weights, tCrX[None, None, k_block, stage], part)
                tiled_mma.set(wgmma.Field.ACCUMULATE, True)
        wgmma.commit_group()

    def read_rows(self, source: cute.Pointer, thread: cutlass.Int32, scales: cute.Tensor) -> list:
        """The scales of a thread's two rows; returns what is subtracted from their elements of 4 bits.

        Args:
            source: of what a packed tile has behind its values.
        """
        numbers = self.kind.tile_words - self.kind.value_words
        rows = cute.recast_tensor(cute.make_tensor(source, cute.make_layout(numbers)), self.x_dtype)
        row = thread // 32 * 16 + thread % 32 // 4
        for b in range(2):
            scales[b] = rows[row + 8 * b].to(cutlass.Float32)
        if self.kind.zero_points:
            return [self.twice(rows[TILE_ROWS + row + 8 * b]) for b in range(2)]
        return [pair_bits(base(self.dtype) + self.kind.middle, self.dtype)] * 2

    def read_words(self, source: cute.Pointer, thread: cutlass.Int32, words: cute.Tensor):
        """A thread's words of values, which are as many as `words` holds."""
        for quad in range(cute.size(words) // 4):
            place = cute.make_tensor(source + quad * (4 * WARPGROUP) + thread * 4, cute.make_layout(4))
            place = cute.make_tensor(place.iterator.align(16), place.layout)
            cute.autovec_copy(place, cute.make_tensor(words.iterator + 4 * quad, cute.make_layout(4)))

    def unpack_words(self, words: cute.Tensor, offsets: Sequence[cutlass.Int32 | int], tCrW: cute.Tensor):
        """The elements of a thread's words, as the A operand."""
        elements, at = words_of(tCrW), 0
        for i in range(cute.size(words)):
            for element in self.elements_of(words[i], offsets):
                elements[at] = element
                at += 1

    def elements_of(self, word: cutlass.Int32, offsets: Sequence[cutlass.Int32 | int]) -> list[cutlass.Int32]:
        """The elements in a word as packed 16-bit pairs: of rows 0 and 8, columns in order.

        Args:
            offsets: of both rows, what is subtracted from elements of 4 bits.
        """
        exponent = pair_bits(base(self.dtype), self.dtype)
        if self.kind.bits == 4:
            parts = [masked_bits(word >> 4 * i, LOW_NIBBLES, exponent, "or") for i in range(NIBBLES)]
            return [sub_f16x2(part, offsets[i % 2], self.pair) for i, part in enumerate(parts)]
        parts = [word, word >> 8]
        if self.dtype == torch.float16:
            offset = pair_bits(base(self.dtype) + self.kind.middle, self.dtype)
            return [sub_f16x2(masked_bits(part, LOW_BYTES, exponent, "or"), offset, self.pair) for part in parts]
        return [
            sub_f16x2(
                masked_bits(part, LOW_BYTES ^ TOP_BITS, exponent, "or"),
                masked_bits(part, TOP_BITS, pair_bits(2 * base(self.dtype), self.dtype), "xor"),
                self.pair,
            )
            for part in parts
        ]

    def await_again(self, pipeline: Pipeline, position: cutlass.Int32):
        """Wait for what was awaited: ptxas moves nothing across the loop that this is.

        It moves what unpacks behind a wait for products, and behind barriers: nothing would run beside the products.
        """
        pipeline.consumer_wait(position)

    def twice(self, value) -> cutlass.Int32:
        """A 16-bit number as a packed pair."""
        pair = cute.make_rmem_tensor(2, self.x_dtype)
        pair[0], pair[1] = value, value
        return words_of(pair)[0]

    def add_scaled(self, acc: cute.Tensor, part: cute.Tensor, scales: cute.Tensor):
        """Add the sums of 128 columns, times their rows' scales."""
        for i in range(cute.size(acc)):
            acc[i] = fma(part[i], scales[i // 2 % 2], acc[i])
