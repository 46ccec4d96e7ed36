# SPDX-License-Identifier: Apache-2.0
"""Configurations of the SM90 kernel of absorbed MLA whose products are in 8 bits. Needs no CuTe DSL."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsl_backend.attention.cute.fixed_splits import against_early_dependents
from dsl_backend.attention.cute.mla_configs import (
    ROWS,
    MlaTileConfig,
    fp8_tile_objections,
    row_tiles,
    without_fp8_products,
)
from dsl_backend.attention.cute.sizes import (
    MAX_P_EXPONENT,
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
)
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS, OTHER_REGISTERS, REGISTERS
from dsl_backend.attention.spec import AttentionSpec

ZEROS_BYTES = 16
VALUE_PART = 64  # columns of P V that are computed at once, where O has two levels: registers have room for no more


@dataclass(frozen=True, kw_only=True)
class Fp8MlaConfig(MlaTileConfig):
    """Tiles and stages of the kernel: `stages` of V transposed, `dequant_stages` of K as TMA fills them.

    Attributes:
        scores_first: a warpgroup issues QK of its tile before PV of the other one's tile before it, so that PV runs
            during its softmax.
        value_parts: P V of a tile is computed for so many parts of a warpgroup's columns, one after another in the same
            registers, and added to O in float32. 0: tensor cores add up all tiles of a split, with about 14 bits.
        combine_many_rows, combine_by_tasks, early_dependents: as in `MlaConfig`.
        p_offset: as in `Fp8Config`.
    """

    dequant_stages: int = 3
    scores_first: bool = False
    value_parts: int = 0
    combine_many_rows: bool = False
    combine_by_tasks: bool = False
    early_dependents: bool = False
    p_offset: float = 8.0

    @property
    def threads(self) -> int:
        return (GROUPS + 1) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread of the MMA warpgroups, and of the load, scheduler and transposition warps; no dequantization."""
        return REGISTERS

    @property
    def rescale_threshold(self) -> float:
        """How far a score may exceed row_max, in base 2, before O is rescaled."""
        return MAX_P_EXPONENT - self.p_offset

    def key_bytes(self, spec: AttentionSpec) -> int:
        tiles = self.tile_n * (spec.head_dim * self.dequant_stages + spec.head_dim_v * self.stages)
        return tiles + MBARRIER_BYTES * 2 * (self.stages + self.dequant_stages)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        q_and_p = ROWS * (spec.head_dim + self.tile_n)
        # Of each row, in float32: row_max, acc_scale, the scale of Q, and the warpgroups' row_sum of two work tiles.
        stats = 4 * ROWS * (3 + 2 * GROUPS) + ZEROS_BYTES
        return q_and_p + self.key_bytes(spec) + stats + WORK_TILE_SMEM_BYTES

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        reasons = without_fp8_products(spec)
        reasons += fp8_tile_objections(self.tile_n, self.p_offset)
        reasons += against_early_dependents(self.early_dependents, spec)
        if self.value_parts < 0 or (self.value_parts and spec.head_dim_v % (8 * GROUPS * self.value_parts)):
            columns = spec.head_dim_v // GROUPS
            return [*reasons, f"{self.value_parts} parts of {columns} columns: a part has a multiple of 8"]
        needed, most = self.registers_needed(spec), self.registers[0]
        if needed > most:
            reasons.append(f"O, S and P take {needed} registers: a thread has {most}")
        return reasons

    def registers_needed(self, spec: AttentionSpec) -> int:
        """Registers of an MMA thread that hold O, a part of P V, S and P, and the others."""
        part = spec.head_dim_v // 4 // self.value_parts if self.value_parts else 0
        return spec.head_dim_v // 4 + part + self.tile_n // 2 + self.tile_n // 8 + OTHER_REGISTERS


def default_fp8_mla_config(spec: AttentionSpec) -> Fp8MlaConfig:
    """The default, as measured on an H200. With rows of 576, three stages of K and two of V fill shared memory.

    The combine kernel for many rows took 29.6 us and not 35.3 with 16 heads, 8 requests of 4 queries and 8k keys, and
    as long in the other rows of 16 heads; with 128 heads up to 1.4 % longer.

    O has two levels with one row tile, which memory bounds. By the emulator's clock 64 requests of 16 heads and 4k keys
    then take 1.5 % longer, and of 128 heads 27 %. Neither was timed on a GPU.
    """
    head_blocks = row_tiles(spec)
    cluster = 2 if head_blocks % 2 == 0 and spec.page_size is not None else 1
    stages = 2 if spec.head_dim > 320 else 4
    return Fp8MlaConfig(
        stages=stages,
        dequant_stages=stages + 1,
        scores_first=True,
        value_parts=two_levels(spec) if head_blocks == 1 else 0,
        cluster=cluster,
        min_split_tiles=4 if head_blocks > 1 else 2,
        combine_many_rows=head_blocks == 1,
    )


def two_levels(spec: AttentionSpec) -> int:
    """`value_parts` of sums in two levels."""
    return spec.head_dim_v // GROUPS // VALUE_PART


TRIED_TILES = ((64, 2, 3), (64, 2, 2), (32, 4, 6), (96, 2, 2), (128, 2, 3))  # keys, stages of V, and of K


def fp8_mla_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[Fp8MlaConfig]:
    """Configurations worth a try that fit. None is less exact than the default."""
    default = default_fp8_mla_config(spec)
    shapes = itertools.product(TRIED_TILES, (True, False), (1, 2), (2, 4))
    for (tile_n, stages, dequant_stages), scores_first, cluster, min_split_tiles in shapes:
        config = Fp8MlaConfig(
            tile_n=tile_n,
            stages=stages,
            dequant_stages=dequant_stages,
            scores_first=scores_first,
            value_parts=default.value_parts,
            cluster=cluster,
            min_split_tiles=min_split_tiles,
        )
        if not config.objections(spec, smem_bytes):
            yield config
    changes: tuple[dict[str, Any], ...] = (
        {"combine_many_rows": True},
        {"short_splits": True},
        {"early_dependents": True},
        {"value_parts": two_levels(spec)},
    )
    for config in (replace(default, **change) for change in changes):
        if config != default and not config.objections(spec, smem_bytes):
            yield config
