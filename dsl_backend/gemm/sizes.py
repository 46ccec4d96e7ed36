# SPDX-License-Identifier: Apache-2.0
"""Sizes that configurations and kernels of all SMs agree on; needs no CuTe DSL."""

WARP = 32
WARPGROUP = 128
BLOCK_K = 64  # 128 bytes, the widest swizzle
ELEMENT_BYTES = 2
PIECE = 16  # rows of x that are copied at once where a tile has rows of nobody


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
