# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM100 kernel of absorbed MLA."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dsl_backend.attention.cute.mla_configs import PARTS, ROWS, MlaTileConfig, row_tiles
from dsl_backend.attention.cute.sizes import MBARRIER_BYTES, WARPGROUP, WORK_TILE_SMEM_BYTES
from dsl_backend.attention.cute.sm100.dense_configs import TENSOR_COLUMNS, WARP
from dsl_backend.attention.spec import AttentionSpec

BLOCK = 128  # value columns of one product
SCORES = 2  # places of scores: the next tile's are made beside this one's softmax
STATISTICS = 2  # float32 that warps tell each other of a row
PAIR_STATISTICS = 3  # of half a row: two tiles' largest scores, and the item's total
# Warps by role: a warpgroup of softmax and sums, then single warps; and a warpgroup that widens fp8.
WEIGH, MULTIPLY, LOAD, SCHEDULE, WIDEN = 0, 4, 5, 6, 8


@dataclass(frozen=True, kw_only=True)
class MlaConfig(MlaTileConfig):
    """Tiles and buffers of the kernel whose blocks multiply each for itself."""

    @property
    def threads(self) -> int:
        return WIDEN * WARP + (WARPGROUP if self.dequant_stages else 0)

    def columns(self, spec: AttentionSpec) -> int:
        """Of tensor memory: scores, and sums of 128 value columns side by side."""
        return SCORES * self.tile_n + spec.head_dim_v // BLOCK * ROWS

    def smem_bytes(self, spec: AttentionSpec) -> int:
        rows = ROWS * spec.head_dim + ROWS * self.tile_n
        queries = spec.dtype.itemsize * rows + MBARRIER_BYTES * (2 + SCORES + 2)
        return queries + self.key_bytes(spec) + 4 * ROWS * STATISTICS + WORK_TILE_SMEM_BYTES

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if self.tile_n not in (16, 32, 64, 128):
            reasons.append(f"tiles of {self.tile_n} keys: 16, 32, 64 or 128 fill accesses to tensor memory")
        if spec.head_dim_v % (2 * BLOCK):
            reasons.append(f"values of {spec.head_dim_v} elements: a multiple of {2 * BLOCK} is possible")
        if self.columns(spec) > TENSOR_COLUMNS:
            reasons.append(f"{self.columns(spec)} columns of tensor memory: there are {TENSOR_COLUMNS}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class TwoCtaMlaConfig(MlaConfig):
    """Tiles and buffers of the kernel whose blocks multiply in pairs."""

    tile_n: int = 128
    stages: int = 1
    cluster: int = 2
    min_split_tiles: int = 1

    @property
    def least_stages(self) -> int:
        """Keys and values have a place each, and each part of a place barriers of its own."""
        return 1

    def columns(self, spec: AttentionSpec) -> int:
        """Of tensor memory, where a row is cut in two: half of the scores and sums."""
        return (SCORES * self.tile_n + spec.head_dim_v) // 2

    def smem_bytes(self, spec: AttentionSpec) -> int:
        halves = self.stages * self.tile_n * (spec.head_dim + spec.head_dim_v) // 2
        rows = ROWS * (spec.head_dim + self.tile_n) + halves
        parts = PARTS + spec.head_dim_v // 2 // BLOCK
        barriers = MBARRIER_BYTES * (2 + 2 * parts * self.stages + SCORES + 2)
        return spec.dtype.itemsize * rows + barriers + 4 * 2 * ROWS * PAIR_STATISTICS + WORK_TILE_SMEM_BYTES

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = super().own_objections(spec)
        if self.cluster != 2:
            reasons.append(f"a pair in clusters of {self.cluster} blocks: it is one of 2")
        if self.dequant_stages:
            reasons.append("pairs of blocks multiply keys of 16 bits: fp8 ones are possible with LatentConfig")
        if self.tile_n < 32:
            reasons.append(f"a pair's tiles of {self.tile_n} keys: 32 are the least")
        return reasons


def default_mla_config(spec: AttentionSpec) -> MlaConfig:
    """By whether one or several row tiles use a key tile: bound by memory or by products (docs/decisions.md).

    fp8: as on SM90, tiles of both widths and queries must be there at once, and pairs are not served.
    """
    if spec.is_fp8_kv:
        return MlaConfig(tile_n=32 if spec.head_dim > 320 else 64, stages=2, dequant_stages=4)
    if row_tiles(spec) == 1:
        return MlaConfig(tile_n=32, stages=4 if spec.head_dim > 320 else 8)
    if row_tiles(spec) % 2 == 0 and spec.page_size is not None:
        return TwoCtaMlaConfig(stages=1 if spec.head_dim > 320 else 2)
    return MlaConfig(tile_n=64, stages=2 if spec.head_dim > 320 else 4)


TRIED_TILES = (32, 64, 128)
TRIED_STAGES = (1, 2, 3, 4, 6, 8)  # and of fp8 tiles in flight


def mla_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[MlaConfig]:
    """Configurations worth a try that fit."""
    dequant_stages = TRIED_STAGES if spec.is_fp8_kv else (0,)
    for tile_n, stages, staged in itertools.product(TRIED_TILES, TRIED_STAGES, dequant_stages):
        made = [MlaConfig(tile_n=tile_n, stages=stages, dequant_stages=staged, cluster=cluster) for cluster in (1, 2)]
        made.append(TwoCtaMlaConfig(tile_n=tile_n, stages=stages))
        yield from (config for config in made if not config.objections(spec, smem_bytes))
