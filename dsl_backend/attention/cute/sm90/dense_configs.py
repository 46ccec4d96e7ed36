# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM90 kernels: frozen, and able to say why they do not fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.attention.cute.sizes import MBARRIER_BYTES, WARPGROUP, WORK_TILE_SMEM_BYTES, chunk, padded, v_split_dim
from dsl_backend.attention.spec import AttentionSpec

WGMMA_M = 64  # of a warpgroup's wgmma
# Registers of a thread by the number of math warpgroups, as (math, other): together they are the SM's 64 K at most.
REGISTERS = {1: (240, 80), 2: (232, 40), 3: (160, 32)}
# The same with a warpgroup that widens fp8 tiles, and that one's, by math warpgroups and blocks on an SM.
WIDENING_REGISTERS = {(1, 1): (240, 40, 128), (1, 2): (152, 24, 64), (2, 1): (208, 32, 64)}
SM_REGISTERS = 1 << 16
# ptxas refuses a product whose accumulator and so many registers more are not there when the kernel starts (C7602).
WGMMA_SPARE_REGISTERS = 30
# A batch-invariant layer of MLA.
SPECULATIVE_MAX_VARIES = "guesses are not batch-invariant: whether one holds depends on all rows of a warp"


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Tiles and buffers of the forward kernel.

    Attributes:
        groups: warpgroups that multiply, each with 64 rows of a tile.
        tile_n: keys of a tile.
        stages: key tiles, and value tiles, in flight.
        query_stages: query tiles in flight.
        resident: blocks on an SM side by side.
        least_share: key tiles that a block takes at least where ranges are split: below it, merging costs more.
        take_turns: the warpgroups' products alternate, so that one's softmax runs beside the other's products.
        guesses: a tile's weights are taken by the largest scores before it, which costs no maximum; only where one of
            them exceeds those by far, the tile's own are found.
        staging: fp8 key tiles, and value tiles, in flight; one more warpgroup turns them into tiles of 16 bits. 0 where
            keys and values have 16 bits.
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

    @property
    def tile_m(self) -> int:
        return self.groups * WGMMA_M

    @property
    def threads(self) -> int:
        return (self.groups + 1 + (self.dequant_stages > 0)) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread that multiplies, that loads or schedules, and that widens."""
        if self.dequant_stages:
            return WIDENING_REGISTERS[self.groups, self.ctas_per_sm]
        return (*REGISTERS[self.groups], 0) if self.ctas_per_sm == 1 else (216, 40, 0)

    @property
    def first_registers(self) -> int:
        """Of every thread when the kernel starts, before roles give and take."""
        return SM_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a block."""
        dims, dims_v = padded(spec.head_dim), padded(v_split_dim(spec.head_dim_v))
        queries = self.query_stages * self.tile_m * max(dims, dims_v)
        keys = self.stages * self.tile_n * (dims + dims_v)
        staged = self.dequant_stages * self.tile_n * (dims + dims_v)
        barriers = MBARRIER_BYTES * 2 * (self.query_stages + 2 * self.stages + 2 * self.dequant_stages)
        return spec.dtype.itemsize * (queries + keys) + staged + barriers + WORK_TILE_SMEM_BYTES

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if self.groups not in REGISTERS:
            reasons.append(f"{self.groups} warpgroups: one of {sorted(REGISTERS)} is possible")
        elif self.dequant_stages and (self.groups, self.ctas_per_sm) not in WIDENING_REGISTERS:
            reasons.append(
                f"{self.groups} warpgroups, {self.ctas_per_sm} blocks on an SM: with fp8 keys one of "
                f"{sorted(WIDENING_REGISTERS)} is possible"
            )
        if spec.is_fp8_kv != (self.dequant_stages > 0) or self.dequant_stages == 1:
            reasons.append(
                f"{self.dequant_stages} fp8 tiles in flight: 2 or more for fp8 keys, 0 for others, are possible"
            )
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 16 up to 256 is possible")
        if self.stages < 2 or self.query_stages < 1:
            reasons.append(f"{self.stages} key stages, {self.query_stages} query stages: at least 2 and 1 are needed")
        columns = v_split_dim(spec.head_dim_v)
        held = padded(columns) // 2 + (4 if self.speculative_max else 3) * self.tile_n // 4
        most = 0 if reasons else self.registers[0]
        if not reasons and held > most:
            reasons.append(f"sums, scores and weights take {held} registers of a thread: it has {most}")
        accumulator = max(padded(columns), self.tile_n) // 2
        if accumulator + WGMMA_SPARE_REGISTERS > self.first_registers:
            reasons.append(
                f"an accumulator of {accumulator} registers and {WGMMA_SPARE_REGISTERS} more do not fit the "
                f"{self.first_registers} of a thread with which {self.ctas_per_sm} blocks of {self.threads} start"
            )
        needed = self.smem_bytes(spec) * self.ctas_per_sm
        if needed > smem_bytes:
            reasons.append(f"{self.ctas_per_sm} blocks need {needed} bytes of shared memory: there are {smem_bytes}")
        if chunk(spec.head_dim) != chunk(columns):
            reasons.append(
                f"outputs of {columns} elements do not fit the place of queries of {spec.head_dim}: their rows are cut "
                f"into pieces of {chunk(columns)} and {chunk(spec.head_dim)}"
            )
        return reasons


def default_config(spec: AttentionSpec) -> DenseConfig:
    """For long queries."""
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
        # Guesses: 2 to 9 % with heads of 128, 1 to 6 % of 64 and up to 7 % of (192, 128); of 256 they cost 3 %.
        tiles = DenseConfig(groups=2, tile_n=128, stages=2, ping_pong=True, speculative_max=True)
        if widest > 128:
            return tiles
        return replace(tiles, stages=6 if widest <= 64 else 2, query_stages=2)
    # 80 keys leave no registers to fold splits with, and 64 spill 24 bytes there (ptxas 13.0).
    return DenseConfig(groups=2, tile_n=64 if spec.batch_invariant else 80, stages=2)


# Tokens of the longest query from which on a batch gets other tiles, where there are some for it.
LONG_QUERY = 8192


def long_query_config(spec: AttentionSpec) -> DenseConfig | None:
    """For batches with a query of LONG_QUERY tokens or more; None where the tiles of shorter ones are as good.

    Three warpgroups have 192 rows: 5 % faster at prompts of 16k with heads of 64, even at 4k, and 13 % slower at 1k,
    since a prompt's last tile has rows of nobody. A batch-invariant layer has one kernel.
    """
    if spec.is_fp8_kv or spec.batch_invariant or max(spec.head_dim, spec.head_dim_v) > 64:
        return None
    return DenseConfig(groups=3, tile_n=128, stages=4, ping_pong=True)


def default_split_config(spec: AttentionSpec) -> DenseConfig:
    """For short queries over long key ranges."""
    if spec.batch_invariant:
        return batch_invariant_split_config(spec)
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        tile_n = 128 if widest <= 128 else 64 if widest <= 256 else 32
        return DenseConfig(groups=1, tile_n=tile_n, stages=2, dequant_stages=4 if widest <= 64 else 2)
    if widest <= 128:
        # Two blocks an SM hide each other's softmax: 5 to 10 % where memory is busy, and 8 % the other way for one
        # request. Guesses are worth 1 % with heads of 64, and nothing with those of 128.
        tile_n, speculative_max = (128, True) if widest <= 64 else (64, False)
        return DenseConfig(groups=1, tile_n=tile_n, stages=2, ctas_per_sm=2, speculative_max=speculative_max)
    if widest > 256:
        return DenseConfig(groups=1, tile_n=48, stages=2)
    return DenseConfig(groups=1, tile_n=64, stages=2)


def batch_invariant_split_config(spec: AttentionSpec) -> DenseConfig:
    """The same with the key tiles of long queries, so that a row's sums do not depend on which kernel makes them."""
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
    )


# Keys of a split in batch-invariant mode. With 8 key heads of 128, splits of 512, 1024 and 2048 keys took on an H100:
# decode of one request behind 8k keys 17.9, 18.2 and 24.6 us, of 64 requests 747, 733 and 726, four prompts of 4k 1118,
# 1053 and 1028. The ordinary kernels take 17.3, 721 and 971.
SPLIT_KEYS_PER_HEAD, LEAST_SPLIT_KEYS, MOST_SPLIT_KEYS = 128, 256, 2048


def tiles_per_split(spec: AttentionSpec, tile_n: int) -> int:
    """Key tiles of a split in batch-invariant mode: by the layer alone, so that no batch and no GPU changes them."""
    keys = min(max(SPLIT_KEYS_PER_HEAD * spec.heads_kv, LEAST_SPLIT_KEYS), MOST_SPLIT_KEYS)
    return max(1, keys // tile_n)


# Warpgroups and keys of a tile worth a try for long queries, by the widest head; for short ones one warpgroup.
TRIED_TILES = {
    64: ((3, 128), (3, 96), (2, 128), (2, 160), (2, 192)),
    128: ((2, 128), (2, 96), (2, 112), (2, 144), (2, 160), (2, 176)),
    192: ((2, 128), (2, 112), (2, 96), (2, 80), (2, 144)),
    256: ((2, 64), (2, 80), (2, 48), (1, 64), (1, 96)),
    512: ((2, 32), (2, 16), (1, 32), (1, 48)),
}
TRIED_SPLIT_TILES = (32, 64, 96, 128)
# fp8 tiles in flight; none of 16 bits.
TRIED_STAGING = (2, 3, 4, 6)
MOST_STAGES = 12


def deepest(tiles: DenseConfig, spec: AttentionSpec, smem_bytes: int, count: int = 1) -> list[DenseConfig]:
    """With the most stages that fit, and up to count - 1 fewer; empty where nothing fits."""
    made = (replace(tiles, stages=stages) for stages in range(2, MOST_STAGES + 1))
    return [config for config in made if not config.objections(spec, smem_bytes)][-count:]


def variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """Configurations for long queries that are worth a try and fit."""
    tiles = TRIED_TILES[next(width for width in TRIED_TILES if width >= max(spec.head_dim, spec.head_dim_v))]
    dequant_stages = TRIED_STAGING if spec.is_fp8_kv else (0,)
    choices = itertools.product(tiles, (1, 2), (False, True), (False, True), dequant_stages)
    for (groups, tile_n), query_stages, turns, speculative_max, staged in choices:
        if groups > 1 or not turns:
            made = DenseConfig(
                groups=groups,
                tile_n=tile_n,
                stages=2,
                query_stages=query_stages,
                ping_pong=turns,
                speculative_max=speculative_max,
                dequant_stages=staged,
            )
            yield from deepest(made, spec, smem_bytes)


def split_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """The same for short queries over long key ranges."""
    dequant_stages = TRIED_STAGING if spec.is_fp8_kv else (0,)
    for tile_n, ctas_per_sm, speculative_max, staged in itertools.product(
        TRIED_SPLIT_TILES, (1, 2), (False, True), dequant_stages
    ):
        made = DenseConfig(
            groups=1,
            tile_n=tile_n,
            stages=2,
            ctas_per_sm=ctas_per_sm,
            speculative_max=speculative_max,
            dequant_stages=staged,
        )
        yield from deepest(made, spec, smem_bytes, 2)
