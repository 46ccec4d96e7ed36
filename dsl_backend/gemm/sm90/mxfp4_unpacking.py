# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights in registers: packed words to wgmma's A operand, elements and scales as one exact product.

The layout is that of `quant/mxfp4_tiles.py`. Operands are 2^-LOWERED of the weights: sums are multiplied with
2^LOWERED in the end.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import torch
from cutlass import cute

from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.unpacking import pair_bits
from dsl_backend.primitives.accumulators import words_of
from dsl_backend.primitives.math import fma_f16x2, permute_bytes
from dsl_backend.quant.mxfp4_tiles import BLOCK_COLUMNS
from dsl_backend.quant.weight_only import TILE_COLUMNS

# Columns of a wgmma, of which a thread has a word.
STEP_COLUMNS = 16
# Words of a thread that one access reads.
WORDS = 4
# Columns that these words have.
PIECE_COLUMNS = WORDS * STEP_COLUMNS


def both(half: int) -> int:
    """A word of two equal halves, as a signed integer."""
    return int.from_bytes((half | half << 16).to_bytes(4, "little"), "little", signed=True)


# A sign, and the three other bits of an element: those that a shift brings there, and those of the fourth element.
ELEMENT, SIGN, EXPONENT, MANTISSA = both(0x81C0), both(0x8000), both(0x0180), both(0x0040)
# An exponent in the lowest bits of halves to bfloat16.
TO_EXPONENT = 7


class Mxfp4Unpacking:
    """What kernels of packed MXFP4 weights do in a consumer's registers, and which packed tiles they read."""

    parts: int
    row_tiles: int

    def packed_row(self, of_part: Any, n_tile: Any, i: int) -> Any:
        """The row of packed tiles of the i-th one of a stage: gate and up rows, or rows in order.

        Args:
            of_part: rows of packed tiles that gate rows have, or all. Past the last one it is that one again.
        """
        of_box = self.row_tiles // self.parts
        return i // of_box * of_part + cutlass.min(n_tile * of_box + i % of_box, of_part - 1)

    def unpack_tile(
        self, pieces: Sequence[cute.Pointer], exponents: cute.Pointer, thread: cutlass.Int32, tCrW: cute.Tensor
    ) -> None:
        """A thread's weights of a packed tile, as the A operand.

        Args:
            pieces: words of 64 columns each. exponents: a word of each row.
        """
        rows = cute.make_tensor(exponents, cute.make_layout(WARPGROUP))
        row = thread // 32 * 16 + thread % 32 // 4
        of_rows = [rows[row], rows[row + 8]]
        elements, at = words_of(tCrW), 0
        for step in range(TILE_COLUMNS // STEP_COLUMNS):
            if step % WORDS == 0:
                read = cute.make_rmem_tensor(WORDS, cutlass.Int32)
                source = pieces[step // WORDS] + thread * WORDS
                cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(WORDS)), read)
            if step * STEP_COLUMNS % BLOCK_COLUMNS == 0:
                block = step * STEP_COLUMNS // BLOCK_COLUMNS
                factors = [factor_of(word, block) for word in of_rows]
            for i, element in enumerate(elements_of(read[step % WORDS])):
                elements[at] = fma_f16x2(element, factors[i % 2], pair_bits(-0.0, torch.bfloat16), "bf16x2")
                at += 1


def factor_of(word: cutlass.Int32, block: int) -> cutlass.Int32:
    """The power of two whose exponent is a byte of a word, as a pair of bfloat16."""
    byte, zero = block, 4
    selector = byte | zero << 4 | byte << 8 | zero << 12
    return permute_bytes(word, cutlass.Int32(0), cutlass.Int32(selector)) << TO_EXPONENT


def elements_of(word: cutlass.Int32) -> list:
    """The four elements of each half of a word as bfloat16, 2^-126 too small: of rows 0 and 8, columns in order."""
    last = (word >> 6 & EXPONENT) | (word >> 4 & MANTISSA) | (word << 4 & SIGN)
    return [*((word << (3 * i) if i else word) & ELEMENT for i in range(3)), last]
