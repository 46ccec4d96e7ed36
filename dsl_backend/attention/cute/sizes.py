# SPDX-License-Identifier: Apache-2.0
"""Sizes shared by configurations and kernels. Does not import CuTe DSL."""

import math
from typing import Any

from dsl_backend.quant.format import KV_BLOCK, KVFormat

WARPGROUP = 128
MBARRIER_BYTES = 8
# Columns of O that a CTA has room for: 128 registers of a thread on SM90, half of tensor memory on SM100.
MAX_O_COLUMNS = 256
WORK_TILE_SMEM_BYTES = 256  # of scheduler/work_tile.py: two items, their barriers, room to align them
CLC_RESPONSE_BYTES = 16
FP8_K_BLOCK = 32  # elements of a row that one MMA of 8 bits takes
TMA_BOX_ALIGNMENT = 128  # bytes: of a box in shared memory
# Bytes of keys and values whose requests are processed together: half an H200's L2.
L2_SECTION_BYTES = 25 << 20
# Of short queries of a request, the tokens; and the rows, heads of a group times tokens, up to which memory bounds the
# time of a kernel with 16-bit products of an fp8 cache, by counting (docs/decisions.md).
SHORT_QUERY, WIDENED_ROWS = 16, 64
MOST_PACKED_HEADS = 128  # of a tile with products in 8 bits
MAX_P_EXPONENT = 8.8  # of P in e4m3: at most 2^8.8 = 445.7, and e4m3 holds 448


def padded(dim: int) -> int:
    """A head dimension padded to the 16 elements of a k-block, as it lies in shared memory."""
    return -(-dim // 16) * 16


def chunk(dim: int) -> int:
    """Elements of a swizzled row of 128, 64 or 32 bytes: the widest that divides a padded head dimension."""
    return next(width for width in (64, 32, 16) if padded(dim) % width == 0)


def fp8_chunk(dim: int) -> int:
    """Elements of an fp8 row in one TMA box: the widest of up to 128 bytes that divides a padded head dimension."""
    return next(width for width in (128, 64, 32, 16) if padded(dim) % width == 0)


def scale_box_bytes(dim: int, box: int) -> int:
    """Bytes from one TMA box of NVFP4 scales to the next one in shared memory: those of `box` rows, aligned."""
    return -(-box * dim // (KV_BLOCK * TMA_BOX_ALIGNMENT)) * TMA_BOX_ALIGNMENT


def dequant_stage_bytes(kv: KVFormat, dim: int, tile_n: int, page_size: int | None) -> int:
    """Bytes of a stage of K or V as a quantized cache stores them."""
    if not kv.nvfp4:
        return tile_n * kv.row_bytes(dim)
    box = math.gcd(page_size or tile_n, tile_n)
    return tile_n * dim // 2 + tile_n // box * scale_box_bytes(dim, box)


def v_splits(dim_v: int) -> int:
    """Splits of head_dim_v, of equal width, so that a CTA has room for O of one."""
    return -(-dim_v // MAX_O_COLUMNS)


def v_split_dim(dim_v: int) -> int:
    """Elements of a split of head_dim_v."""
    return dim_v // v_splits(dim_v)


def packed_gqa_heads(group: int, most: int = 64) -> int:
    """Query heads that share a tile's rows: a GQA group, or a part of it if it has more than `most` heads."""
    return next(pack_gqa for pack_gqa in range(min(group, most), 0, -1) if group % pack_gqa == 0)


def widened_tokens(group: int) -> int:
    """Tokens of the longest queries whose rows are at most WIDENED_ROWS; group: query heads of a key head."""
    return WIDENED_ROWS // group


def has_many_rows(group: int) -> bool:
    """Whether short queries may have more rows than that."""
    return widened_tokens(group) < SHORT_QUERY


def section_keys(key_bytes: int) -> int:
    """Keys of requests that are processed together; key_bytes: of a key and its value, for all heads."""
    return max(L2_SECTION_BYTES // key_bytes, 1)


def partial_size(rows: Any, columns: int) -> Any:
    """float32 elements of a partial result: O [rows, columns], row_max [rows] of base-2 scores, row_sum [rows]."""
    return rows * columns + (2 * rows + 3) // 4 * 4


def fold_workspace_size(rows: int, columns: int) -> int:
    """float32 elements in which a CTA keeps the splits of a row tile that it has combined: O, row_max and row_sum."""
    return rows * (columns + 4)


def p_offset_objections(p_offset: float) -> list[str]:
    """Why P cannot be multiplied by 2^p_offset in e4m3; empty where it can."""
    return [] if 0 <= p_offset <= 8 else [f"P times 2^{p_offset:g}: an exponent from 0 to 8 is possible"]
