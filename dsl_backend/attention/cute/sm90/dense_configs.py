# SPDX-License-Identifier: Apache-2.0
"""Configurations of the SM90 kernels, which say why they do not fit, and the defaults of a layer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.attention.cute.fixed_splits import against_early_dependents
from dsl_backend.attention.cute.sizes import (
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
    chunk,
    fold_workspace_size,
    padded,
    v_split_dim,
)
from dsl_backend.attention.spec import AttentionSpec

WGMMA_M = 64  # rows of a warpgroup's WGMMA
# Registers of a thread, (MMA warpgroups, load and scheduler warps), by the number of MMA warpgroups. All threads have
# 64 K together.
REGISTERS = {1: (240, 80), 2: (232, 40), 3: (160, 32)}
# The same with a dequantization warpgroup, whose registers come third, by MMA warpgroups and CTAs per SM.
DEQUANT_REGISTERS = {(1, 1): (240, 40, 128), (1, 2): (152, 24, 64), (2, 1): (208, 32, 64)}
SM_REGISTERS = 1 << 16
# ptxas refuses a WGMMA unless its accumulator and this many registers more are there at kernel launch (C7602).
WGMMA_SPARE_REGISTERS = 30
SMEM_FOLD_ROWS = 16  # the rows of one warp


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Tile shape and pipeline stages of the dense kernel.

    Attributes:
        groups: MMA warpgroups, each with 64 rows of a tile.
        tile_n: keys of a tile.
        stages: smem stages of K, and of V.
        query_stages: smem stages of Q.
        ctas_per_sm: CTAs per SM.
        min_split_tiles: fewest key tiles of a split. Combining shorter ones costs more than they save.
        ping_pong: warpgroups take turns at issuing MMAs, so that the softmax of one overlaps the MMAs of another.
        speculative_max: compute P of a tile with the row_max of the tiles before; see `speculative_softmax`.
        dequant_stages: smem stages of fp8 K, and of fp8 V, which one more warpgroup converts to 16 bits. 0 for a cache
            of 16 bits.
        fold_in_smem: a CTA keeps the splits of a batch-invariant layer that it has combined in shared memory, rather
            than in global memory.
        fold_few_rows: the same for work tiles of up to SMEM_FOLD_ROWS rows alone, beside a fold in global memory; of a
            split output tile, the splits that one CTA has from the last one on are folded too.
        early_dependents: the combine kernel lets the next kernel start before it ends.
        pair_row_tiles: the row tiles of causal prompts are split in pairs, of which each sees about as many keys.
    """

    groups: int
    tile_n: int
    stages: int
    query_stages: int = 1
    ctas_per_sm: int = 1
    min_split_tiles: int = 2
    ping_pong: bool = False
    speculative_max: bool = False
    dequant_stages: int = 0
    fold_in_smem: bool = False
    fold_few_rows: bool = False
    pair_row_tiles: bool = False
    early_dependents: bool = False

    @property
    def tile_m(self) -> int:
        return self.groups * WGMMA_M

    @property
    def smem_fold_rows(self) -> int:
        return SMEM_FOLD_ROWS if self.fold_few_rows else 0

    @property
    def threads(self) -> int:
        return (self.groups + 1 + (self.dequant_stages > 0)) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread of the MMA warpgroups, of the load and scheduler warps, and of the dequantization warpgroup."""
        if self.dequant_stages:
            return DEQUANT_REGISTERS[self.groups, self.ctas_per_sm]
        return (*REGISTERS[self.groups], 0) if self.ctas_per_sm == 1 else (216, 40, 0)

    @property
    def launch_registers(self) -> int:
        """Of every thread at launch, before setmaxnreg."""
        return SM_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a CTA."""
        dims, dims_v = padded(spec.head_dim), padded(v_split_dim(spec.head_dim_v))
        q_elements = self.query_stages * self.tile_m * max(dims, dims_v)
        kv_elements = self.stages * self.tile_n * (dims + dims_v)
        fp8_bytes = self.dequant_stages * self.tile_n * (dims + dims_v)
        mbarriers = MBARRIER_BYTES * 2 * (self.query_stages + 2 * self.stages + 2 * self.dequant_stages)
        folded_rows = self.tile_m if self.fold_in_smem else self.smem_fold_rows
        folded = 4 * fold_workspace_size(folded_rows, dims_v)
        tiles = spec.dtype.itemsize * (q_elements + kv_elements) + fp8_bytes + folded
        return tiles + mbarriers + WORK_TILE_SMEM_BYTES

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built with this configuration; empty if it can.

        Args:
            smem_bytes: the limit of a CTA.
        """
        reasons = []
        if self.groups not in REGISTERS:
            reasons.append(f"{self.groups} warpgroups: one of {sorted(REGISTERS)} is possible")
        elif self.dequant_stages and (self.groups, self.ctas_per_sm) not in DEQUANT_REGISTERS:
            reasons.append(
                f"{self.groups} warpgroups, {self.ctas_per_sm} CTAs per SM: with fp8 keys one of "
                f"{sorted(DEQUANT_REGISTERS)} is possible"
            )
        reasons += against_early_dependents(self.early_dependents, spec)
        if self.fold_few_rows and (self.fold_in_smem or not spec.batch_invariant):
            reasons.append("fold_few_rows: possible for a batch-invariant layer, without fold_in_smem")
        if spec.is_fp8_kv != (self.dequant_stages > 0) or self.dequant_stages == 1:
            reasons.append(f"{self.dequant_stages} fp8 stages: 2 or more are possible for fp8 keys, 0 for others")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 16 up to 256 is possible")
        if self.stages < 2 or self.query_stages < 1:
            reasons.append(f"{self.stages} K stages, {self.query_stages} Q stages: at least 2 and 1 are needed")
        columns = v_split_dim(spec.head_dim_v)
        needed = padded(columns) // 2 + (4 if self.speculative_max else 3) * self.tile_n // 4
        available = 0 if reasons else self.registers[0]
        if not reasons and needed > available:
            reasons.append(f"O, S and P take {needed} registers of a thread: it has {available}")
        accumulator = max(padded(columns), self.tile_n) // 2
        if accumulator + WGMMA_SPARE_REGISTERS > self.launch_registers:
            reasons.append(
                f"an accumulator of {accumulator} registers and {WGMMA_SPARE_REGISTERS} more do not fit the "
                f"{self.launch_registers} of a thread at launch, with {self.ctas_per_sm} CTAs of {self.threads} per SM"
            )
        smem_needed = self.smem_bytes(spec) * self.ctas_per_sm
        if smem_needed > smem_bytes:
            reasons.append(f"{self.ctas_per_sm} CTAs need {smem_needed} bytes of shared memory: there are {smem_bytes}")
        if chunk(spec.head_dim) != chunk(columns):
            reasons.append(
                f"values of {columns} elements and queries of {spec.head_dim} have different swizzles: their rows are "
                f"cut into chunks of {chunk(columns)} and {chunk(spec.head_dim)}"
            )
        return reasons


def default_config(spec: AttentionSpec) -> DenseConfig:
    """The default for long queries."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        if widest <= 128:
            return DenseConfig(groups=2, tile_n=128, stages=2, dequant_stages=2, ping_pong=True)
        if widest > 256:
            return DenseConfig(groups=1, tile_n=32, stages=2, dequant_stages=2)
        return DenseConfig(groups=2 if widest <= 192 else 1, tile_n=64, stages=2, dequant_stages=2)
    if widest > 256:
        # 128 rows of queries are more than half of shared memory.
        return DenseConfig(groups=2, tile_n=32, stages=2)
    if spec.head_dim_v <= 128:
        # speculative_max gains 2 to 9 % with heads of 128 and 7 % of (192, 128); it loses 2 to 11 % of 64 and 3 % of
        # 256 (H200; docs/decisions.md).
        tiles = DenseConfig(groups=2, tile_n=128, stages=2, ping_pong=True, speculative_max=True)
        if widest > 128:
            return tiles
        if spec.batch_invariant:
            # Room for the combined splits in place of a second stage of Q. In global memory, each split took 3 us more
            # (H100): warpgroups take turns, so that one that waits for memory stops both.
            return replace(tiles, stages=5 if widest <= 64 else 2, fold_in_smem=True)
        if widest <= 64:
            return replace(tiles, stages=6, query_stages=2, speculative_max=False)
        return replace(tiles, stages=3 if widest <= 96 else 2, query_stages=2)
    # Tiles of 80 keys leave no registers to fold splits with; those of 64 spill 24 bytes there (ptxas 13.0).
    return DenseConfig(groups=2, tile_n=64 if spec.batch_invariant else 80, stages=2)


# A batch with a query of this many tokens gets `long_query_config`, where the host does not know all lengths.
LONG_QUERY = 2048


def long_query_config(spec: AttentionSpec) -> DenseConfig | None:
    """The default for batches with a query of LONG_QUERY tokens or more; None if `default_config` is as good.

    Three warpgroups have 192 rows. With heads of 64 they take 4 to 8 % less time for 8 prompts of 1084 tokens and 4 of
    4096, and 18 % more for 16 of 1024, of which a larger part of the last tile lies beyond the prompt (H200). Where the
    host knows the lengths, an estimate chooses. Tiles of 96 keys leave room for a speculative row_max. Heads of 96 gain
    nothing. fp8 keys leave no registers: three warpgroups of 160 and the one that converts keys are too many. A
    batch-invariant layer has one kernel.
    """
    if spec.is_fp8_kv or spec.batch_invariant or max(spec.head_dim, spec.head_dim_v) > 64:
        return None
    return DenseConfig(groups=3, tile_n=96, stages=6, ping_pong=True, speculative_max=True)


def extend_config(spec: AttentionSpec) -> DenseConfig | None:
    """The default for batches whose query tiles are too few for the SMs: the tiles of long queries, with split keys.

    None for a batch-invariant layer, whose splits begin at fixed keys.
    """
    if spec.batch_invariant:
        return None
    if max(spec.head_dim, spec.head_dim_v) > 256:
        # Those of short queries: with 128 rows, the load warp's registers spill 8 bytes (ptxas 13.0).
        return default_split_config(spec)
    return replace(default_config(spec), pair_row_tiles=True)


def default_split_config(spec: AttentionSpec) -> DenseConfig:
    """The default for short queries over long key ranges (split-KV)."""
    if spec.batch_invariant:
        return batch_invariant_split_config(spec)
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        tile_n = 128 if widest <= 128 else 64 if widest <= 256 else 32
        return DenseConfig(groups=1, tile_n=tile_n, stages=2, dequant_stages=4 if widest <= 64 else 2)
    if widest <= 128:
        # Two CTAs per SM hide each other's softmax: 5 to 10 % faster if memory is busy, 8 % slower for one request.
        # speculative_max gains 1 % with heads of 64, and nothing with heads of 128.
        tile_n, speculative_max = (128, True) if widest <= 64 else (64, False)
        # An o projection of streamed weights behind it loads them early: 1.2 us less for one request (H200;
        # docs/decisions.md).
        return DenseConfig(
            groups=1, tile_n=tile_n, stages=2, ctas_per_sm=2, speculative_max=speculative_max, early_dependents=True
        )
    if widest > 256:
        return DenseConfig(groups=1, tile_n=48, stages=2)
    return DenseConfig(groups=1, tile_n=64, stages=2)


def batch_invariant_split_config(spec: AttentionSpec) -> DenseConfig:
    """The same with the key tiles of long queries, so that a row's bits do not depend on which kernel computes it.

    With heads of 128, whose rows are folded in shared memory where they are few, 64 requests of 8k keys took 517 us on
    an H200 and not 536, 8 of 8k 73.7 and not 74.9, 256 of 2k 511 and not 525. Other heads were not timed.
    """
    long = default_config(spec)
    if spec.is_fp8_kv:
        return replace(
            long, groups=1, ping_pong=False, dequant_stages=4 if long.tile_n * spec.head_dim <= 128 * 64 else 2
        )
    widest = max(spec.head_dim, spec.head_dim_v)
    stages, ctas_per_sm = (2, 2) if widest <= 64 else (3, 1) if spec.head_dim <= 128 else (2, 1)
    return DenseConfig(
        groups=1,
        tile_n=long.tile_n,
        stages=stages,
        ctas_per_sm=ctas_per_sm,
        speculative_max=long.speculative_max and widest <= 64,
        fold_few_rows=stages == 3,
    )


# What `dsl-backend tune` tries for long queries: (warpgroups, tile_n) by the widest head dimension.
TUNED_TILES = {
    64: ((3, 128), (3, 96), (2, 128), (2, 160), (2, 192)),
    128: ((2, 128), (2, 96), (2, 112), (2, 144), (2, 160), (2, 176)),
    192: ((2, 128), (2, 112), (2, 96), (2, 80), (2, 144)),
    256: ((2, 64), (2, 80), (2, 48), (1, 64), (1, 96)),
    512: ((2, 32), (2, 16), (1, 32), (1, 48)),
}
# For short queries, which have one warpgroup: tile_n.
TUNED_SPLIT_TILES = (32, 64, 96, 128)
# dequant_stages of an fp8 cache.
TUNED_DEQUANT_STAGES = (2, 3, 4, 6)
MAX_STAGES = 12


def deepest(tiles: DenseConfig, spec: AttentionSpec, smem_bytes: int, count: int = 1) -> list[DenseConfig]:
    """The configuration with the most stages that fit, and with up to count - 1 fewer; empty if none fits."""
    made = (replace(tiles, stages=stages) for stages in range(2, MAX_STAGES + 1))
    return [config for config in made if not config.objections(spec, smem_bytes)][-count:]


def variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """Configurations to tune for long queries, of those that fit."""
    tiles = TUNED_TILES[next(width for width in TUNED_TILES if width >= max(spec.head_dim, spec.head_dim_v))]
    dequant_stages = TUNED_DEQUANT_STAGES if spec.is_fp8_kv else (0,)
    choices = itertools.product(tiles, (1, 2), (False, True), (False, True), dequant_stages)
    for (groups, tile_n), query_stages, ping_pong, speculative_max, fp8_stages in choices:
        if groups > 1 or not ping_pong:
            made = DenseConfig(
                groups=groups,
                tile_n=tile_n,
                stages=2,
                query_stages=query_stages,
                ping_pong=ping_pong,
                speculative_max=speculative_max,
                dequant_stages=fp8_stages,
            )
            yield from deepest(made, spec, smem_bytes)


def split_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """The same for short queries over long key ranges."""
    dequant_stages = TUNED_DEQUANT_STAGES if spec.is_fp8_kv else (0,)
    for tile_n, ctas_per_sm, speculative_max, fp8_stages in itertools.product(
        TUNED_SPLIT_TILES, (1, 2), (False, True), dequant_stages
    ):
        made = DenseConfig(
            groups=1,
            tile_n=tile_n,
            stages=2,
            ctas_per_sm=ctas_per_sm,
            speculative_max=speculative_max,
            dequant_stages=fp8_stages,
        )
        yield from deepest(made, spec, smem_bytes, 2)
    early = replace(default_split_config(spec), early_dependents=True)
    if not early.objections(spec, smem_bytes):
        yield early
