# SPDX-License-Identifier: Apache-2.0
"""The numbers of rows that represent a width, where a kernel has one configuration for all of them."""

# From a decode step with one request to a prefill, and many norms of heads.
ROWS = (1, 16, 256, 4096, 65536)
# A matrix has at most so many elements: 4 GiB of float32.
MOST_ELEMENTS = 1 << 30


def rows_of(width: int) -> tuple[int, ...]:
    """The numbers of rows that represent a width; the first for the widest."""
    return tuple(rows for rows in ROWS if rows == ROWS[0] or rows * width <= MOST_ELEMENTS)
