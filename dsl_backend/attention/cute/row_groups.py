# SPDX-License-Identifier: Apache-2.0
"""Row groups of MLA: how many CTAs process row tiles of a request side by side. An estimate; needs no CuTe DSL.

A request of several queries has several row tiles, which need the same keys. Balanced split-KV gives them to CTAs that
reach a key at different times: where a batch has more keys than L2 holds, memory delivers each key once for each row
tile. The clusters of a row group (scheduler/balanced.py) reach it at the same time.
"""

from dataclasses import dataclass
from functools import cache

from dsl_backend.attention.cute.extend import WGMMA_FLOPS
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.chip import Chip

# Of the products' rate at the highest clock, what the kernel reaches: 64 keys of 576 take 1.9 us (H200, 128 heads).
UTILISATION = 0.57
# Of the memory's rate, what kernels reach.
MEMORY_UTILISATION = 0.9
# Row tiles of a request beyond which there are no row groups, and clusters of a row group at most: where requests have
# more queries, products limit, and the scheduler pairs row tiles.
MOST_ROW_TILES, MOST_CLUSTERS = 16, 8


@dataclass(frozen=True)
class RowGroup:
    """Clusters of a row group, and percent of the iterations without row groups that a CTA may have with them."""

    clusters: int
    iters: int


NO_ROW_GROUP = RowGroup(1, 100)


def tile_us(spec: AttentionSpec, tile_n: int, chip: Chip) -> float:
    """Time of a row tile against a key tile where products limit."""
    flops = 2 * ROWS * tile_n * (spec.head_dim + spec.head_dim_v)
    return flops / (WGMMA_FLOPS * UTILISATION * chip.clock_mhz)


def load_us(spec: AttentionSpec, tile_n: int, chip: Chip, num_clusters: int) -> float:
    """Time in which memory delivers a key tile to each cluster."""
    key_bytes = spec.head_dim * spec.kv_dtype.itemsize
    return num_clusters * tile_n * key_bytes / (MEMORY_UTILISATION * chip.memory_gb_s * 1e3)


@cache
def row_group(spec: AttentionSpec, tile_n: int, chip: Chip, num_clusters: int, row_tiles: int) -> RowGroup:
    """The fastest row group for requests of so many row tiles.

    Args:
        tile_n: keys of a key tile.
        num_clusters: of the grid.
        row_tiles: of the request with the most queries; clusters take this many in turns, a row tile at a time.
    """
    if not 1 < row_tiles <= MOST_ROW_TILES:
        return NO_ROW_GROUP
    computed, loaded = tile_us(spec, tile_n, chip), load_us(spec, tile_n, chip, num_clusters)

    def iteration_us(clusters: int) -> float:
        return max(computed, loaded / clusters)

    def request_us(clusters: int) -> float:
        """Of all row tiles against a key tile: idle clusters, of a row group or left over, count."""
        in_turns = -(-row_tiles // clusters) * clusters / row_tiles
        return in_turns * num_clusters / (num_clusters // clusters * clusters) * iteration_us(clusters)

    alone = request_us(1)
    # Of row groups that take equally long, the largest: it leaves the memory most time.
    fastest = min(range(1, min(MOST_CLUSTERS, row_tiles, num_clusters) + 1), key=lambda n: (request_us(n), -n))
    if request_us(fastest) >= alone:
        return NO_ROW_GROUP
    return RowGroup(fastest, int(100 * iteration_us(1) / iteration_us(fastest)))
