# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM100 kernel of absorbed MLA."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dsl_backend.attention.cute.mla_configs import PARTS, ROWS, MlaTileConfig, row_tiles
from dsl_backend.attention.cute.sizes import MBARRIER_BYTES, WARPGROUP, WORK_TILE_SMEM_BYTES
from dsl_backend.attention.cute.sm100.dense_configs import TENSOR_COLUMNS, WARP
from dsl_backend.attention.spec import AttentionSpec

DV_TILE = 128  # columns of V of one PV MMA, in a CTA
S_STAGES = 2  # S of the next tile is computed while the softmax of this one runs
ROW_STATS = 2  # float32 of a row that warps exchange, and one more of a batch-invariant layer
TWO_CTA_STATS = 3  # float32 of half a row: a maximum for each S stage, and row_sum
# The first warp of each role behind the softmax warpgroup: single warps, and a warpgroup that dequantizes fp8.
MMA_WARP, LOAD_WARP, SCHEDULER_WARP, DEQUANT_WARP = 4, 5, 6, 8


@dataclass(frozen=True, kw_only=True)
class MlaConfig(MlaTileConfig):
    """Tiles and stages of the kernel whose CTAs each multiply alone."""

    @property
    def kept_chunks(self) -> int:
        """Those of 128 requests: one round trip to memory in place of up to eight."""
        return 4

    @property
    def even_splits(self) -> bool:
        return True

    @property
    def threads(self) -> int:
        return DEQUANT_WARP * WARP + (WARPGROUP if self.dequant_stages else 0)

    def tmem_columns(self, spec: AttentionSpec) -> int:
        """Columns of tensor memory: S stages, and O of each PV MMA."""
        return S_STAGES * self.tile_n + spec.head_dim_v // DV_TILE * ROWS

    def smem_bytes(self, spec: AttentionSpec) -> int:
        rows = ROWS * spec.head_dim + ROWS * self.tile_n
        q_and_p = spec.dtype.itemsize * rows + MBARRIER_BYTES * (2 + S_STAGES + 2)
        row_stats = ROW_STATS + spec.batch_invariant
        return q_and_p + self.key_bytes(spec) + 4 * ROWS * row_stats + WORK_TILE_SMEM_BYTES

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if self.tile_n not in (16, 32, 64, 128):
            reasons.append(f"tiles of {self.tile_n} keys: 16, 32, 64 or 128 fill accesses to tensor memory")
        if spec.head_dim_v % (2 * DV_TILE):
            reasons.append(f"values of {spec.head_dim_v} elements: a multiple of {2 * DV_TILE} is possible")
        if self.tmem_columns(spec) > TENSOR_COLUMNS:
            reasons.append(f"{self.tmem_columns(spec)} columns of tensor memory: there are {TENSOR_COLUMNS}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class TwoCtaMlaConfig(MlaConfig):
    """Tiles and stages of the kernel whose CTAs multiply in pairs (cta_group::2)."""

    tile_n: int = 128
    stages: int = 1
    cluster: int = 2
    min_split_tiles: int = 1

    @property
    def least_stages(self) -> int:
        """One: K and V have stages of their own, and each part of a stage has its own mbarriers."""
        return 1

    @property
    def idle_eighths(self) -> int:
        """One: MMAs of a key tile take 2176 cycles, its share of a B200's memory 2803 where all SMs are at work."""
        return 1

    @property
    def even_splits(self) -> bool:
        return False

    def tmem_columns(self, spec: AttentionSpec) -> int:
        """Columns of tensor memory, where a row is cut in two: half of those of S and O."""
        return (S_STAGES * self.tile_n + spec.head_dim_v) // 2

    def smem_bytes(self, spec: AttentionSpec) -> int:
        halves = self.stages * self.tile_n * (spec.head_dim + spec.head_dim_v) // 2
        rows = ROWS * (spec.head_dim + self.tile_n) + halves
        parts = PARTS + spec.head_dim_v // 2 // DV_TILE
        barriers = MBARRIER_BYTES * (2 + 2 * parts * self.stages + S_STAGES + 2)
        return spec.dtype.itemsize * rows + barriers + 4 * 2 * ROWS * TWO_CTA_STATS + WORK_TILE_SMEM_BYTES

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = super().own_objections(spec)
        if self.cluster != 2:
            reasons.append(f"clusters of {self.cluster} CTAs: a CTA pair is a cluster of 2")
        if self.dequant_stages:
            reasons.append("CTA pairs multiply 16-bit keys: fp8 keys are possible with MlaConfig")
        if self.tile_n < 32:
            reasons.append(f"tiles of {self.tile_n} keys for a CTA pair: 32 is the least")
        return reasons


def default_mla_config(spec: AttentionSpec) -> MlaConfig:
    """One row tile for each key tile is bound by memory, several are bound by MMAs (docs/decisions.md).

    With an fp8 cache, shared memory holds tiles of both widths and Q, as on SM90; CTA pairs do not serve it.
    """
    if spec.is_fp8_kv:
        return MlaConfig(tile_n=32 if spec.head_dim > 320 else 64, stages=2, dequant_stages=4)
    if row_tiles(spec) == 1:
        return MlaConfig(tile_n=32, stages=4 if spec.head_dim > 320 else 8)
    if row_tiles(spec) % 2 == 0 and spec.page_size is not None:
        return TwoCtaMlaConfig(stages=1 if spec.head_dim > 320 else 2)
    return MlaConfig(tile_n=64, stages=2 if spec.head_dim > 320 else 4)


TRIED_TILES = (32, 64, 128)
TRIED_STAGES = (1, 2, 3, 4, 6, 8)  # also of fp8 tiles


def mla_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[MlaConfig]:
    """Configurations worth a try that fit."""
    dequant_stages = TRIED_STAGES if spec.is_fp8_kv else (0,)
    for tile_n, stages, staged in itertools.product(TRIED_TILES, TRIED_STAGES, dequant_stages):
        made = [MlaConfig(tile_n=tile_n, stages=stages, dequant_stages=staged, cluster=cluster) for cluster in (1, 2)]
        made.append(TwoCtaMlaConfig(tile_n=tile_n, stages=stages))
        yield from (config for config in made if not config.objections(spec, smem_bytes))
