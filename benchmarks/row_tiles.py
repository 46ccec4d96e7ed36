# SPDX-License-Identifier: Apache-2.0
"""Sizes of kernels in other DSLs that keep a row of a matrix in the registers of a CTA."""

from dsl_backend.rows import power_of_2

# 64 float32 elements for each of 1024 threads.
MOST = 64 * 1024
SMALLEST = 256
ELEMENTS_PER_WARP, MOST_WARPS = 1024, 32
# Of TileLang's fragments, which are spread evenly: its threads are a power of two, and have 4 elements side by side.
TILELANG_MULTIPLE = 1024


def block_of(width: int) -> int:
    """The elements of a row's tile, a power of two."""
    return max(power_of_2(width), SMALLEST)


def warps_of(width: int) -> int:
    return min(max(block_of(width) // ELEMENTS_PER_WARP, 1), MOST_WARPS)


def too_wide(width: int) -> list[str]:
    return [f"keeps a row in registers: at most {MOST} columns"] if width > MOST else []


def uneven(width: int) -> list[str]:
    """Why TileLang's kernels do not serve a width."""
    found = [f"serves multiples of {TILELANG_MULTIPLE} columns"] if width % TILELANG_MULTIPLE else []
    return too_wide(width) + found


def part_of(width: int) -> int | None:
    """The columns of a step of Helion's reductions; None if a row stays in registers."""
    return None if width <= MOST else MOST // 8
