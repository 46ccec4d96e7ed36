# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM90 kernel of absorbed MLA."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.attention.cute.fixed_splits import against_early_dependents
from dsl_backend.attention.cute.mla_configs import ROWS, MlaTileConfig, row_tiles
from dsl_backend.attention.cute.sizes import MBARRIER_BYTES, WARPGROUP, WORK_TILE_SMEM_BYTES, packed_gqa_heads
from dsl_backend.attention.spec import AttentionSpec

GROUPS = 2  # MMA warpgroups, each for half of V's columns
# Registers of a thread of the MMA warpgroups, of the load and scheduler warps (32 spill in the scheduler), and of the
# dequantization warpgroup.
REGISTERS, DEQUANT_REGISTERS = (232, 40, 0), (200, 48, 64)
# Columns of a WGMMA of PV: the registers that a thread has at launch limit them (WGMMA_SPARE_REGISTERS).
COLUMNS, DEQUANT_COLUMNS = 256, 128
OTHER_REGISTERS = 32  # of an MMA thread, for addresses and row statistics
SMEM_FOLD_ROWS = 16  # of a box of Q, where packed heads divide it: one warp of each warpgroup has them


@dataclass(frozen=True, kw_only=True)
class MlaConfig(MlaTileConfig):
    """Tiles and stages of the kernel.

    Attributes:
        scores_first: the second warpgroup issues QK of its tile before PV of the first one's tile, so that PV runs
            during its softmax. Otherwise after it, and the first tile's stage is empty sooner.
        speculative_max: as in `DenseConfig`.
        combine_many_rows, combine_by_tasks: as `many_rows` and `by_tasks` of SplitKVCombine.
        early_dependents: as in `DenseConfig`. No default has it: it was not timed.
        fold_in_smem: a CTA folds the splits of a batch-invariant layer in shared memory where a work tile has up to
            SMEM_FOLD_ROWS rows, whose Q leaves room for them; of a split output tile, those from its last split on.
    """

    scores_first: bool = False
    speculative_max: bool = False
    combine_many_rows: bool = False
    combine_by_tasks: bool = False
    early_dependents: bool = False
    fold_in_smem: bool = False

    @property
    def smem_fold_rows(self) -> int:
        return SMEM_FOLD_ROWS if self.fold_in_smem else 0

    @property
    def threads(self) -> int:
        return (GROUPS + 1 + (self.dequant_stages > 0)) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread of the MMA warpgroups, of the load and scheduler warps, and of the dequantization warpgroup."""
        return DEQUANT_REGISTERS if self.dequant_stages else REGISTERS

    def columns(self, head_dim_v: int) -> int:
        """Columns of a WGMMA of PV, of those that a warpgroup has."""
        return min(head_dim_v // GROUPS, DEQUANT_COLUMNS if self.dequant_stages else COLUMNS)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        rows = ROWS * spec.head_dim + ROWS * self.tile_n
        # Of each row, in float32: row_max, acc_scale, and the warpgroups' row_sum of two work tiles.
        stats = 4 * ROWS * (2 + 2 * GROUPS)
        q_and_p = spec.dtype.itemsize * rows + MBARRIER_BYTES * 2
        return q_and_p + self.key_bytes(spec) + stats + WORK_TILE_SMEM_BYTES

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        needed = spec.head_dim_v // 4 + 3 * self.tile_n // 4
        most = self.registers[0] - OTHER_REGISTERS
        reasons = [f"O, S and P need {needed} registers of a thread: it has {most} for them"] if needed > most else []
        reasons += against_early_dependents(self.early_dependents, spec)
        packed = packed_gqa_heads(spec.group)
        if self.fold_in_smem and not folds_in_smem(spec):
            reasons.append(
                f"a fold in shared memory, {packed} packed heads, batch_invariant={spec.batch_invariant}: a "
                f"batch-invariant layer whose packed heads divide {SMEM_FOLD_ROWS} is possible"
            )
        return reasons


def folds_in_smem(spec: AttentionSpec) -> bool:
    """Whether a layer has fixed splits, and work tiles of few rows whose Q leaves room for their fold."""
    return spec.batch_invariant and SMEM_FOLD_ROWS % packed_gqa_heads(spec.group) == 0


def default_mla_config(spec: AttentionSpec) -> MlaConfig:
    """Two stages of rows of 576, four of smaller ones; the rest by whether one or several CTAs use a key tile.

    scores_first and speculative_max together are worth 5 % with 16 heads and many requests, 10 to 14 % with 128 heads.
    Several row tiles leave many partial results, and longer splits leave fewer: up to 4 % with one request of 128
    heads, and as much the other way with 64.

    Row groups and the combine kernel for many rows together took 0.75 to 1.03 of the time without them on an H200
    (docs/performance/mla.md). With 16 heads the combine kernel for many rows took 0.87 and 0.91 of the time with 4
    queries and 8k or 23k keys, and as long in six other rows. Short splits took 0.61 to 1.00 in 21 rows.

    Keys of a batch-invariant layer are evicted from L2 first, so that what CTAs fold stays there: on an H100 128
    requests of 16 heads took 264 us and not 304, of 128 heads 312 us and not 360. Its combine kernel has warps for 128
    columns where rows are many: 8 requests of 128 heads took 68.3 us and not 71.3, but of 16 heads 45.9 and not 43.0.
    Where Q leaves room, its CTAs fold splits in shared memory: on an H200 128 requests of 16 heads and 4k keys took 161
    us and not 209, 64 took 105 and not 112, 8 of 8k keys 32.5 and not 32.1.

    With an fp8 cache, shared memory holds an fp8 tile and two tiles of 16 bits: with 576 elements, 64 keys need 108 KB
    for one stage of each, and Q needs 72 KB.
    """
    head_blocks = row_tiles(spec)
    stages = 2 if spec.head_dim > 320 else 4
    cluster = 2 if head_blocks % 2 == 0 and spec.page_size is not None else 1
    if spec.is_fp8_kv:
        tile_n = 32 if spec.head_dim > 320 else 64
        return MlaConfig(tile_n=tile_n, stages=2, dequant_stages=4, scores_first=head_blocks > 1, cluster=cluster)
    return MlaConfig(
        stages=stages,
        scores_first=True,
        speculative_max=True,
        cluster=cluster,
        min_split_tiles=4 if head_blocks > 1 else 2,
        short_splits=not spec.batch_invariant,
        evict_first=spec.batch_invariant,
        row_groups=not spec.batch_invariant,
        combine_many_rows=head_blocks > 1 or not spec.batch_invariant,
        combine_by_tasks=head_blocks == 1 and spec.batch_invariant,
        fold_in_smem=folds_in_smem(spec),
    )


TRIED_TILES = ((64, 2), (64, 4), (32, 4), (32, 8))  # keys, and stages
TRIED_DEQUANT_TILES = ((64, 2, 2), (64, 2, 4), (32, 2, 4), (32, 3, 2), (32, 2, 2), (48, 2, 2))  # and fp8 stages


def mla_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[MlaConfig]:
    """Configurations worth a try that fit."""
    tiles = TRIED_DEQUANT_TILES if spec.is_fp8_kv else [(*tile, 0) for tile in TRIED_TILES]
    shapes = itertools.product(tiles, (False, True), (False, True), (1, 2), (2, 4))
    for (tile_n, stages, dequant_stages), first, speculative_max, cluster, min_split_tiles in shapes:
        config = MlaConfig(
            tile_n=tile_n,
            stages=stages,
            dequant_stages=dequant_stages,
            scores_first=first,
            speculative_max=speculative_max,
            cluster=cluster,
            min_split_tiles=min_split_tiles,
        )
        if not config.objections(spec, smem_bytes):
            yield config
    default = default_mla_config(spec)
    for row_groups, many_rows in ((True, False), (False, True), (True, True)):
        config = replace(default, row_groups=row_groups, combine_many_rows=many_rows)
        if not config.objections(spec, smem_bytes):
            yield config
    yield replace(default, evict_first=not spec.batch_invariant)
    if not spec.batch_invariant:
        yield replace(default, short_splits=not default.short_splits)
        yield replace(default, early_dependents=True)
    if folds_in_smem(spec):
        yield replace(default, fold_in_smem=not default.fold_in_smem)
