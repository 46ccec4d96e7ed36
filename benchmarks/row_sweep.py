# SPDX-License-Identifier: Apache-2.0
"""Ways to spread a row over threads and CTAs, for the sweeps of kernels that hold rows in registers."""

import itertools
from collections.abc import Iterator, Sequence

from dsl_backend.rows import ceil_div, power_of_2

NARROW = 1024  # row width up to which a thread may have fewer elements
PART = 8192  # elements of one CTA of a cluster


def spreads(
    width: int, vector: int, threads: Sequence[int], fewest: int, most: int
) -> Iterator[tuple[int, int, int, int]]:
    """(vectors of a thread, threads of a row in a CTA, rows of a CTA, CTAs of a cluster) of rows of `width` elements.

    Args:
        vector: elements of an access.
        threads: of a row in a CTA, to choose among.
        fewest, most: elements of a thread.
    """
    count = width // vector
    least = fewest if width > NARROW else vector
    clusters = [cluster for cluster in (1, 2, 4, 8, 16) if cluster == 1 or power_of_2(width) >= PART * cluster]
    for row_threads, cluster in itertools.product(threads, clusters):
        vectors = ceil_div(count, row_threads * cluster)
        if not least <= vector * vectors <= most or row_threads > count or (row_threads < 128 and cluster > 1):
            continue
        yield vectors, row_threads, max(1, 128 // row_threads), cluster
