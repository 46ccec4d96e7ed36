# SPDX-License-Identifier: Apache-2.0
"""Sizes that configurations and kernels agree on; needs no CuTe DSL."""

WARPGROUP = 128
MBARRIER_BYTES = 8
MAILBOX_BYTES = 256  # of parts/work.py: two items, their barriers, room to align them


def padded(dim: int) -> int:
    """A head size as shared memory holds it: wgmma takes 16 elements at a time."""
    return -(-dim // 16) * 16


def chunk(dim: int) -> int:
    """Elements of a row of 128, 64 or 32 bytes that the swizzle permutes: the widest that divide a padded head size."""
    return next(width for width in (64, 32, 16) if padded(dim) % width == 0)


def fp8_chunk(dim: int) -> int:
    """Elements of an fp8 row that one tensor copy takes: the widest of 128 bytes or less that divide it."""
    return next(width for width in (128, 64, 32, 16) if padded(dim) % width == 0)


def packed_heads(group: int, most: int = 64) -> int:
    """Query heads that share a tile's rows: the group, or where it is wider than the rows a part of it."""
    return next(pack for pack in range(min(group, most), 0, -1) if group % pack == 0)
