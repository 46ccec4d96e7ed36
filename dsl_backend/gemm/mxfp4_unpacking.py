# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights in registers: packed words to wgmma's A fragment, elements and scales as one exact product.

The layout is that of `quant/mxfp4_tiles.py`. Operands are 2^-LOWERED of the weights: sums are multiplied with
2^LOWERED in the end.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.primitives.accumulators import words_of
from dsl_backend.primitives.math import fma_f16x2, permute_bytes
from dsl_backend.quant.mxfp4_tiles import BLOCK_COLUMNS

# Columns of a matrix product, of which a thread has a word.
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
# What is added to products: nothing, whatever their signs are.
MINUS_ZEROS = SIGN
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
        rows, elements = self.exponents_of(exponents, thread), words_of(tCrW)
        for i, piece in enumerate(pieces):
            steps = self.unpack_piece(piece, rows, thread, i * (PIECE_COLUMNS // BLOCK_COLUMNS))
            for at, element in enumerate(element for step in steps for element in step):
                elements[i * (PIECE_COLUMNS // 4) + at] = element

    def exponents_of(self, exponents: cute.Pointer, thread: cutlass.Int32) -> list[cutlass.Int32]:
        """The words of a thread's two rows."""
        rows = cute.make_tensor(exponents, cute.make_layout(WARPGROUP))
        row = thread // 32 * 16 + thread % 32 // 4
        return [rows[row], rows[row + 8]]

    def unpack_piece(
        self, piece: cute.Pointer, exponents: Sequence[cutlass.Int32], thread: cutlass.Int32, first_block: int = 0
    ) -> list[list[cutlass.Int32]]:
        """A thread's weights of 64 columns as pairs: of each 16 columns four, of rows 0 and 8, columns in order.

        Args:
            exponents: words of both rows. first_block: of the columns, which of a word's bytes it is.
        """
        read = cute.make_rmem_tensor(WORDS, cutlass.Int32)
        cute.autovec_copy(cute.make_tensor((piece + thread * WORDS).align(16), cute.make_layout(WORDS)), read)
        found = []
        for step in range(WORDS):
            if step * STEP_COLUMNS % BLOCK_COLUMNS == 0:
                block = first_block + step * STEP_COLUMNS // BLOCK_COLUMNS
                factors = [factor_of(word, block) for word in exponents]
            found.append(
                [
                    fma_f16x2(element, factors[i % 2], MINUS_ZEROS, "bf16x2")
                    for i, element in enumerate(elements_of(read[step]))
                ]
            )
        return found


def factor_of(word: cutlass.Int32, block: int) -> cutlass.Int32:
    """The power of two whose exponent is a byte of a word, as a pair of bfloat16."""
    byte, zero = block, 4
    selector = byte | zero << 4 | byte << 8 | zero << 12
    return permute_bytes(word, cutlass.Int32(0), cutlass.Int32(selector)) << TO_EXPONENT


def elements_of(word: cutlass.Int32) -> list:
    """The four elements of each half of a word as bfloat16, 2^-126 too small: of rows 0 and 8, columns in order."""
    last = (word >> 6 & EXPONENT) | (word >> 4 & MANTISSA) | (word << 4 & SIGN)
    return [*((word << (3 * i) if i else word) & ELEMENT for i in range(3)), last]
