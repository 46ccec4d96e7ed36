# SPDX-License-Identifier: Apache-2.0
"""Outputs in NVFP4 (SM100): e2m1 in pairs, and an e4m3 scale for each 16 columns, as SM100's matrix products take them.

Outputs are already multiplied by `out_scale`, in the factor that normalizes them.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.primitives.copy import store_vector
from dsl_backend.primitives.math import e4m3_of, f32_to_e2m1, fmax_nan, tree_reduce
from dsl_backend.quant.format import E2M1_MAX, NVFP4, SWIZZLED_ROWS

BLOCK = 16  # columns that share a scale
PAIR = 2 * BLOCK  # columns whose elements are 16 bytes
WORD = 8  # elements of 32 bits
assert NVFP4.block_columns == BLOCK


@cute.jit
def scale_offset(key: cutlass.Constexpr, token: cutlass.Int32, head: cutlass.Int32, column: cutlass.Int32):
    """Where the scale of a block lies, in bytes: `quant.reference.swizzled` has the order. `key` is a LayerKey."""
    atoms = cutlass.const_expr(key.heads_q * key.head_dim_v // (4 * BLOCK))  # of 128 rows and 4 blocks
    block = (head * key.head_dim_v + column) // BLOCK
    atom = token // SWIZZLED_ROWS * atoms + block // 4
    within = token % 32 * 16 + token % SWIZZLED_ROWS // 32 * 4 + block % 4
    return cutlass.Int64(atom) * (4 * SWIZZLED_ROWS) + within


def magnitude(values: Sequence[cutlass.Float32]) -> cutlass.Float32:
    """The largest magnitude; NaN if there is one."""
    return tree_reduce([cute.math.absf(value) for value in values], fmax_nan)


def block_scale(largest: cutlass.Float32) -> Any:
    """(the code of a block's scale, what its values are multiplied by)."""
    return e4m3_of(largest * (1 / E2M1_MAX), cutlass.Float32(1.0))


@cute.jit
def quantize_block(values: Sequence[cutlass.Float32], words: cute.Tensor):
    """Store the elements of a block in two words; return the code of its scale."""
    code, inverse = block_scale(magnitude(values))
    for i in cutlass.range_constexpr(BLOCK // WORD):
        words[i] = f32_to_e2m1(*(values[WORD * i + j] * inverse for j in range(WORD)))
    return code


@cute.jit
def store_pair(
    blocks: cutlass.Constexpr,
    key: cutlass.Constexpr,
    out: cute.Tensor,
    scales: cute.Tensor,
    token: cutlass.Int32,
    head: cutlass.Int32,
    column: cutlass.Int32,
    inside: cutlass.Boolean,
):
    """Store two blocks of a row, from a column on that is a multiple of PAIR: 16 bytes, and two scales.

    Args:
        blocks: two lists of BLOCK float32.
        key: a LayerKey.
        out: (total_q, head_q, head_dim_v / 2), bytes.
        scales: (rows, blocks of a row), bytes.
    """
    words = cute.make_rmem_tensor((BLOCK // WORD, 2), cutlass.Int32)
    codes = cute.make_rmem_tensor(2, cutlass.Uint8)
    for i in cutlass.range_constexpr(2):
        codes[i] = cutlass.Uint8(quantize_block(blocks[i], words[None, i]))
    if inside:
        elements = cute.recast_tensor(cute.make_tensor(words.iterator, cute.make_layout(4)), cutlass.Uint8)
        store_vector(elements, out.iterator, row_of(out, token, head) + column // 2)
        store_vector(codes, scales.iterator, scale_offset(key, token, head, column))


@cute.jit
def store_by_lanes(
    values: cutlass.Constexpr,
    key: cutlass.Constexpr,
    out: cute.Tensor,
    scales: cute.Tensor,
    token: cutlass.Int32,
    head: cutlass.Int32,
    column: cutlass.Int32,
    inside: cutlass.Boolean,
):
    """Store blocks of a row of which neighbouring lanes have one, two or four columns each; by all lanes of a warp.

    Args:
        values: the lane's columns, float32, from `column` on. Lanes' columns begin at multiples of BLOCK in lanes that
            begin a block. `inside` is the same in all lanes of a block.
    """
    count = cutlass.const_expr(len(values))
    lane = cute.arch.lane_idx()
    largest = magnitude(values)
    for bit in cutlass.range_constexpr((BLOCK // count).bit_length() - 1):
        largest = fmax_nan(largest, cute.arch.shuffle_sync_bfly(largest, 1 << bit))
    code, inverse = block_scale(largest)
    # A whole word: its other elements are the same ones again (see `primitives.accumulators.round_to`).
    quotients = [value * inverse for value in values] * (WORD // count)
    word = f32_to_e2m1(*quotients) & ((1 << 4 * count) - 1)
    sharing = cutlass.const_expr(WORD // count)  # lanes whose elements are a word
    word = word << lane % sharing * (4 * count)
    for bit in cutlass.range_constexpr(sharing.bit_length() - 1):
        word = word | cute.arch.shuffle_sync_bfly(word, 1 << bit)
    if inside and lane % sharing == 0:
        address = out.iterator.toint() + row_of(out, token, head) + column // 2
        target = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(target, cute.make_layout(1))[0] = word
    if inside and lane % (BLOCK // count) == 0:
        bytes_of = cute.make_tensor(scales.iterator, cute.make_layout(cute.size(scales)))
        bytes_of[scale_offset(key, token, head, column)] = cutlass.Uint8(code)


def row_of(out: cute.Tensor, token: cutlass.Int32, head: cutlass.Int32) -> cutlass.Int64:
    """Where a row of a head begins, in bytes."""
    return cutlass.Int64(token) * out.stride[0] + head * out.stride[1]
