# SPDX-License-Identifier: Apache-2.0
"""Sizes that configurations and kernels agree on; needs no CuTe DSL."""

WARPGROUP = 128
MBARRIER_BYTES = 8
# Of a row's sums: 128 registers of a thread on SM90, and half of tensor memory on SM100.
MOST_COLUMNS = 256
WORK_TILE_SMEM_BYTES = 256  # of scheduler/work_tile.py: two items, their barriers, room to align them
CLC_RESPONSE_BYTES = 16


def padded(dim: int) -> int:
    """A head size as shared memory holds it: wgmma takes 16 elements at a time."""
    return -(-dim // 16) * 16


def chunk(dim: int) -> int:
    """Elements of a row of 128, 64 or 32 bytes that the swizzle permutes: the widest that divide a padded head size."""
    return next(width for width in (64, 32, 16) if padded(dim) % width == 0)


def fp8_chunk(dim: int) -> int:
    """Elements of an fp8 row that one tensor copy takes: the widest of 128 bytes or less that divide it."""
    return next(width for width in (128, 64, 32, 16) if padded(dim) % width == 0)


def v_splits(dim_v: int) -> int:
    """Slices of equal width into which a value row is cut, so that a block has room for the sums of one."""
    return -(-dim_v // MOST_COLUMNS)


def v_split_dim(dim_v: int) -> int:
    """Elements of a slice of a value row."""
    return dim_v // v_splits(dim_v)


def packed_gqa_heads(group: int, most: int = 64) -> int:
    """Query heads that share a tile's rows: the group, or where it is wider than the rows a part of it."""
    return next(pack_gqa for pack_gqa in range(min(group, most), 0, -1) if group % pack_gqa == 0)
