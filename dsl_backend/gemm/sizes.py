# SPDX-License-Identifier: Apache-2.0
"""Sizes that configurations and kernels of all SMs agree on; needs no CuTe DSL."""

WARP = 32
WARPGROUP = 128
BLOCK_BYTES = 128  # of k in a stage: the widest swizzle
BLOCK_K = 64  # elements of 16 bits in them
TAIL_ROWS = 16  # rows of the TMA boxes of x that fill a tile with rows beyond the end of x


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
