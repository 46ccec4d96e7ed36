# SPDX-License-Identifier: Apache-2.0
"""Configurations of the SM100 kernel of absorbed MLA whose products are in 8 bits. Needs no CuTe DSL."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dsl_backend.attention.cute.mla_configs import PARTS, ROWS, fp8_tile_objections, row_tiles, without_fp8_products
from dsl_backend.attention.cute.sizes import (
    MAX_P_EXPONENT,
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
)
from dsl_backend.attention.cute.sm100.dense_configs import WARP
from dsl_backend.attention.cute.sm100.mla_configs import DEQUANT_WARP, ROW_STATS, S_STAGES, MlaConfig
from dsl_backend.attention.spec import AttentionSpec

Q_SCALE_STAGES = 2  # the scales of Q of a work tile are read while those of the next one are written
QUERY_WARP = DEQUANT_WARP  # the first of the warpgroup that quantizes Q, where others have one that dequantizes K


@dataclass(frozen=True, kw_only=True)
class Fp8MlaConfig(MlaConfig):
    """Tiles and stages of the kernel: `stages` of K, as TMA fills them, of which V is a part. Nothing is dequantized.

    Attributes:
        p_offset: P is 2^p_offset where a score is the row's maximum, so that small P are normal numbers of e4m3. What
            is left below 448 is how far a score may exceed row_max before O is rescaled.
    """

    stages: int = 4
    p_offset: float = 8.0

    @property
    def threads(self) -> int:
        return QUERY_WARP * WARP + WARPGROUP

    @property
    def rescale_threshold(self) -> float:
        """How far a score may exceed row_max, in base 2, before O is rescaled."""
        return MAX_P_EXPONENT - self.p_offset

    def key_bytes(self, spec: AttentionSpec) -> int:
        return self.stages * (self.tile_n * spec.head_dim + MBARRIER_BYTES * 2 * PARTS)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        barriers = MBARRIER_BYTES * (2 + Q_SCALE_STAGES + S_STAGES + 2)
        stats = 4 * ROWS * (ROW_STATS + Q_SCALE_STAGES)
        return ROWS * (spec.head_dim + self.tile_n) + self.key_bytes(spec) + barriers + stats + WORK_TILE_SMEM_BYTES

    def stage_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if self.stages < self.least_stages:
            reasons.append(f"{self.stages} stages of K: at least {self.least_stages} are needed")
        if self.dequant_stages:
            reasons.append(f"{self.dequant_stages} stages to dequantize: 0 are possible, as K is multiplied as it is")
        return reasons

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = without_fp8_products(spec) + super().own_objections(spec)
        reasons += fp8_tile_objections(self.tile_n, self.p_offset)
        return reasons


def default_fp8_mla_config(spec: AttentionSpec) -> Fp8MlaConfig:
    """The default: not measured on a GPU. On the emulator's clock two tiles of 128 keys, which fit too, are slower."""
    head_blocks = row_tiles(spec)
    cluster = 2 if head_blocks % 2 == 0 and spec.page_size is not None else 1
    return Fp8MlaConfig(stages=4 if spec.head_dim > 320 else 8, cluster=cluster)


TRIED_SHAPES = ((64, 4), (64, 3), (128, 2), (64, 8), (128, 4), (32, 8))  # keys, stages


def fp8_mla_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[Fp8MlaConfig]:
    """Configurations worth a try that fit."""
    for (tile_n, stages), cluster, p_offset in itertools.product(TRIED_SHAPES, (1, 2), (8.0, 4.0)):
        config = Fp8MlaConfig(tile_n=tile_n, stages=stages, cluster=cluster, p_offset=p_offset)
        if not config.objections(spec, smem_bytes):
            yield config
