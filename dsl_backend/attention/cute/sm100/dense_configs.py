# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM100 kernels: frozen, and able to say why they do not fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsl_backend.attention.cute.sizes import (
    CLC_RESPONSE_BYTES,
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
    chunk,
    packed_gqa_heads,
    padded,
    v_split_dim,
)
from dsl_backend.attention.spec import AttentionSpec

WARP = 32
ROWS = 128  # of one product
TENSOR_COLUMNS = 512
SHARED_PLACES = 3  # of a ring that keys and values share: values, the keys behind them, and the values behind those
# Warps by role: two softmax warpgroups, a correction warpgroup, then single warps; and a warpgroup that widens fp8.
SOFTMAX, CORRECT, MULTIPLY, LOAD, SCHEDULE, WIDEN = (0, 4), 8, 13, 14, 15, 16


class Registers(NamedTuple):
    """Of a thread, by its role."""

    softmax: int
    correct: int
    other: int
    widen: int = 0


PAIR = 2  # blocks that multiply together; and places of their scores
# Warps of such a block by role.
PAIR_CORRECT, PAIR_MULTIPLY, PAIR_LOAD, PAIR_SCHEDULE, PAIR_WARPS = 4, 8, 9, 10, 12

# Times the roles' threads, the 64 K of an SM.
REGISTERS = Registers(softmax=200, correct=64, other=48)
# One half leaves a warpgroup without work: heads of 512 spilled 8 bytes with what there is room for beside two.
ONE_HALF_REGISTERS = Registers(softmax=200, correct=96, other=80)
# 640 threads start with 96 each, since registers come in eights. Fewest bytes spilled (ptxas 13.0, heads of 128).
WIDENING_REGISTERS = Registers(softmax=144, correct=80, other=48, widen=64)

# 384 threads start with 168 each.
PAIR_REGISTERS = Registers(softmax=240, correct=152, other=112)

# Warps where operands are swapped, by role: two softmax warpgroups come before them.
SWAPPED_MULTIPLY, SWAPPED_LOAD, SWAPPED_SCHEDULE, SWAPPED_WARPS = 8, 9, 10, 12
SWAPPED_REGISTERS = Registers(softmax=208, correct=0, other=88)
# Numbers that are told of a query row by each half: one of each warp's, its reference, and what sums are multiplied by.
SWAPPED_TOLD = 7
# Query rows of a tile there, which are a product's columns; and rows of a product for sums: columns of values.
SWAPPED_ROWS, SWAPPED_VALUES = (16, 32), (64, 128)


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Tiles and buffers of the forward kernel.

    Attributes:
        halves: products of 128 query rows each that take turns.
        pair: two blocks with one product each multiply as one; each has half of a tile's keys, and half of the columns
            of its values; see pair.py.
        alternate: the halves have the same query rows and every other key tile, rather than the same key tiles and
            rows of their own; for few queries over many keys.
        swapped: query rows of a tile where keys are a product's rows, and query rows its columns; see swapped.py. 0
            where query rows are its rows.
        tile_n: keys of a tile.
        stages: key tiles, and value tiles, in flight.
        shared_ring: keys and values go through three places in turn rather than `stages` each, and what keys are wider
            through two; see places.py.
        query_stages: query tiles in flight; an output leaves through its query tile's place.
        least_share: key tiles that a block takes at least where ranges are split.
        polynomial: of each 16 exponentials, those that the FMA pipe computes rather than the special unit.
        patience: base-2 growth of a row's largest score up to which sums are left at the old scale.
        launch_control: query tiles are taken off the grid (cluster launch control) rather than claimed by counters.
        staging: fp8 key tiles, and value tiles, in flight; one more warpgroup turns them into tiles of 16 bits. 0 where
            keys and values have 16 bits.
    """

    halves: int = 2
    two_cta: bool = False
    alternate: bool = False
    swap_ab: int = 0
    tile_n: int = 128
    stages: int = 2
    query_stages: int = 1
    shared_ring: bool = False
    min_split_tiles: int = 2
    ex2_emulation: int = 4
    rescale_threshold: float = 8.0
    ctas_per_sm: int = 1
    use_clc: bool = False
    dequant_stages: int = 0

    @property
    def tile_m(self) -> int:
        """Query rows of a block."""
        if self.swap_ab:
            return self.swap_ab
        return ROWS if self.alternate else self.halves * ROWS

    @property
    def threads(self) -> int:
        if self.two_cta:
            return PAIR_WARPS * WARP
        if self.swap_ab:
            return SWAPPED_WARPS * WARP
        return (WIDEN * WARP) + (WARPGROUP if self.dequant_stages else 0)

    @property
    def registers(self) -> Registers:
        if self.two_cta:
            return PAIR_REGISTERS
        if self.swap_ab:
            return SWAPPED_REGISTERS
        if self.dequant_stages:
            return WIDENING_REGISTERS
        return REGISTERS if self.halves > 1 else ONE_HALF_REGISTERS

    def columns(self, spec: AttentionSpec) -> int:
        """Of tensor memory: scores, whose place weights take, and sums."""
        if self.swap_ab:
            return 2 * self.halves * self.swap_ab
        columns = padded(v_split_dim(spec.head_dim_v))
        return PAIR * self.tile_n + columns if self.two_cta else self.halves * (self.tile_n + columns)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a block."""
        dims, dims_v = padded(spec.head_dim), padded(v_split_dim(spec.head_dim_v))
        queries = self.query_stages * self.tile_m * max(dims, dims_v)
        columns = self.stages * (dims + dims_v)
        if self.shared_ring:
            columns = SHARED_PLACES * dims_v + self.stages * (dims - dims_v)
        keys = self.tile_n * columns // (PAIR if self.two_cta else 1)
        staged = self.dequant_stages * self.tile_n * (dims + dims_v)
        rings = self.query_stages + 2 * self.stages + 2 * self.dequant_stages
        places = PAIR if self.two_cta else self.halves
        barriers = MBARRIER_BYTES * (2 * rings + 4 * places + 1)
        statistics = 2 * 4 * places * ROWS
        if self.swap_ab:
            # What warps tell each other of each query row, and the weights of a tile of each half.
            statistics = 4 * self.halves * self.swap_ab * SWAPPED_TOLD
            queries += self.halves * self.tile_n * self.swap_ab
        control = 2 * CLC_RESPONSE_BYTES if self.use_clc or self.two_cta else 0  # aligned, with its barriers
        return spec.dtype.itemsize * (queries + keys) + staged + barriers + statistics + control + WORK_TILE_SMEM_BYTES

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can."""
        reasons = []
        if self.halves not in (1, 2):
            reasons.append(f"{self.halves} products of 128 rows: 1 or 2 are possible")
        if self.tile_n % 32 or not 32 <= self.tile_n <= 128:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 32 up to 128 is possible")
        if self.stages < 2 or self.query_stages < 1:
            reasons.append(f"{self.stages} key stages, {self.query_stages} query stages: at least 2 and 1 are needed")
        if spec.is_fp8_kv != (self.dequant_stages > 0) or self.dequant_stages == 1:
            reasons.append(
                f"{self.dequant_stages} fp8 tiles in flight: 2 or more for fp8 keys, 0 for others, are possible"
            )
        if self.shared_ring:
            reasons += self.objections_to_sharing(spec)
        if self.two_cta:
            reasons += self.objections_to_pairs(spec)
        if self.swap_ab:
            reasons += self.objections_to_swapping(spec)
        if self.columns(spec) > TENSOR_COLUMNS:
            reasons.append(f"{self.columns(spec)} columns of tensor memory: there are {TENSOR_COLUMNS}")
        if self.alternate and self.halves != 2:
            reasons.append("one product cannot alternate")
        if self.use_clc and self.alternate:
            reasons.append("launch control hands out whole query tiles: halves alternate where key ranges are split")
        needed = self.smem_bytes(spec)
        if needed > smem_bytes:
            reasons.append(f"a block needs {needed} bytes of shared memory: there are {smem_bytes}")
        columns = v_split_dim(spec.head_dim_v)
        if chunk(spec.head_dim) != chunk(columns):
            reasons.append(
                f"values of {columns} elements and queries of {spec.head_dim} have different swizzles: their rows are "
                f"cut into chunks of {chunk(columns)} and {chunk(spec.head_dim)}"
            )
        return reasons

    def objections_to_sharing(self, spec: AttentionSpec) -> list[str]:
        """Why keys and values cannot share a ring."""
        reasons = []
        dims, columns = spec.head_dim, v_split_dim(spec.head_dim_v)
        if self.stages != 2:
            reasons.append(f"a ring that keys and values share, and {self.stages} stages: it has those of 2")
        if self.alternate or self.dequant_stages:
            reasons.append("keys and values do not share a ring where halves alternate or keys are fp8")
        if padded(dims) <= padded(columns):
            reasons.append(f"keys of {dims} elements and values of {columns} do not share a ring: keys must be wider")
        return reasons

    def objections_to_pairs(self, spec: AttentionSpec) -> list[str]:
        """Why two blocks cannot multiply as one."""
        reasons = []
        if self.halves != 1:
            reasons.append(f"{self.halves} products of a block of a pair: it has 1")
        if self.shared_ring or self.dequant_stages or self.use_clc:
            reasons.append("pairs of blocks have no shared ring, no fp8 keys and no launch control")
        columns = padded(v_split_dim(spec.head_dim_v))
        if columns % (PAIR * 16):
            reasons.append(f"values of {columns} elements: a pair's blocks have half each, a multiple of 16")
        return reasons

    def objections_to_swapping(self, spec: AttentionSpec) -> list[str]:
        """Why query rows cannot be a product's columns."""
        reasons = []
        if self.swap_ab not in SWAPPED_ROWS:
            reasons.append(f"{self.swap_ab} query rows as a product's columns: {SWAPPED_ROWS} are possible")
        if not self.alternate or self.tile_n != ROWS:
            reasons.append("where operands are swapped halves alternate, with tiles of 128 keys")
        if self.two_cta or self.shared_ring or self.dequant_stages or self.ex2_emulation:
            reasons.append("swapped operands have no pairs, no shared ring, no fp8 keys and no polynomials")
        if padded(spec.head_dim_v) not in SWAPPED_VALUES:
            reasons.append(f"values of {spec.head_dim_v} elements: {SWAPPED_VALUES} are a product's rows")
        return reasons


def default_config(spec: AttentionSpec) -> DenseConfig:
    """For long queries."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        halves = 1 if widest > 256 or spec.head_dim_v > 128 else 2
        if widest <= 64:
            return DenseConfig(tile_n=128, dequant_stages=4)
        # Both rings and 256 rows of queries are in shared memory.
        tile_n = 96 if widest <= 128 else 64 if widest <= 192 else 32
        return DenseConfig(halves=halves, tile_n=tile_n, dequant_stages=2)
    if widest > 256:
        # 128 rows of queries are more than half of shared memory.
        return DenseConfig(halves=1, tile_n=32, stages=2)
    if widest <= 96:
        return DenseConfig(stages=2)
    # Products of wider heads take longer than seven eighths of the exponentials.
    if widest <= 128:
        return DenseConfig(stages=2, ex2_emulation=2)
    if spec.head_dim_v <= 128:
        if widest > 192:
            # 256 rows of queries leave no room for three places and the rest.
            return DenseConfig(tile_n=96, stages=2, ex2_emulation=2)
        # Products of 256 columns in all take as long as all exponentials.
        return DenseConfig(shared_ring=True, ex2_emulation=0 if spec.head_dim + spec.head_dim_v > 256 else 2)
    if padded(spec.head_dim_v) % (PAIR * 16) == 0:
        return DenseConfig(halves=1, two_cta=True)
    return DenseConfig(halves=1, tile_n=64, stages=2)


def default_split_config(spec: AttentionSpec) -> DenseConfig:
    """For short queries over long key ranges: memory bounds them, and leaves the special unit time for all weights."""
    return replace(tiles_per_split(spec), ex2_emulation=0)


def few_rows_config(spec: AttentionSpec, smem_bytes: int) -> DenseConfig | None:
    """For batches whose requests have few query rows; None where the tiles of 128 rows serve them.

    A tile of 32 KB of queries is one of 4 KB, which leaves room for a third tile of keys and values of 128 on its way;
    and a score is a thread's of its own, where 8 heads of one token leave 120 of 128 threads without.
    """
    if spec.is_fp8_kv or spec.batch_invariant:
        # A batch-invariant layer has one kernel.
        return None
    pack_gqa = packed_gqa_heads(spec.group)
    for rows in SWAPPED_ROWS:
        if pack_gqa <= rows:
            tiles = DenseConfig(alternate=True, swap_ab=rows, ex2_emulation=0)
            return next(iter(deepest(tiles, spec, smem_bytes)), None)
    return None


def tiles_per_split(spec: AttentionSpec) -> DenseConfig:
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        if widest > 256 or spec.head_dim_v > 128:
            return DenseConfig(halves=1, tile_n=64 if widest <= 192 else 32, dequant_stages=2)
        # What is on its way from memory is what is staged: small tiles, and many.
        if widest <= 64:
            return DenseConfig(alternate=True, tile_n=128, dequant_stages=6)
        return DenseConfig(alternate=True, tile_n=64, dequant_stages=6 if widest <= 128 else 4 if widest <= 192 else 2)
    if widest > 256:
        return DenseConfig(halves=1, tile_n=32, stages=2)
    if spec.head_dim_v > 128:
        return DenseConfig(halves=1, tile_n=64, stages=2)
    tile_n = 128 if widest <= 128 else 64
    return DenseConfig(alternate=True, tile_n=tile_n, stages=4 if widest <= 64 else 2)


TRIED_TILES = (32, 64, 96, 128)
TRIED_POLYNOMIAL = (0, 2, 4, 8)
# fp8 tiles in flight; none of 16 bits.
TRIED_STAGING = (2, 4, 6)
MOST_STAGES = 8


def deepest(tiles: DenseConfig, spec: AttentionSpec, smem_bytes: int) -> list[DenseConfig]:
    """With the most stages that fit; empty where nothing fits."""
    made = (replace(tiles, stages=stages) for stages in range(2, MOST_STAGES + 1))
    return [config for config in made if not config.objections(spec, smem_bytes)][-1:]


def variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """Configurations for long queries that are worth a try and fit."""
    tiles, dequant_stages = itertools.product((1, 2), TRIED_TILES), TRIED_STAGING if spec.is_fp8_kv else (0,)
    rings = (False, True) if spec.head_dim > spec.head_dim_v else (False,)
    shapes = itertools.product(tiles, (1, 2), TRIED_POLYNOMIAL, dequant_stages, rings)
    for (halves, tile_n), query_stages, ex2_emulation, staged, shared in shapes:
        made = DenseConfig(
            halves=halves,
            tile_n=tile_n,
            shared_ring=shared,
            query_stages=query_stages,
            ex2_emulation=ex2_emulation,
            dequant_stages=staged,
        )
        yield from deepest(made, spec, smem_bytes)
    # Blocks alone read narrower values no slower than products take.
    pairs = TRIED_TILES if v_split_dim(spec.head_dim_v) > 128 else ()
    for tile_n, ex2_emulation in itertools.product(pairs, TRIED_POLYNOMIAL):
        yield from deepest(
            DenseConfig(halves=1, two_cta=True, tile_n=tile_n, ex2_emulation=ex2_emulation), spec, smem_bytes
        )
    controlled = replace(default_config(spec), use_clc=True)
    if not controlled.objections(spec, smem_bytes):
        yield controlled


def split_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """The same for short queries over long key ranges."""
    dequant_stages = TRIED_STAGING if spec.is_fp8_kv else (0,)
    for halves, tile_n, min_split_tiles, staged in itertools.product((1, 2), TRIED_TILES, (1, 2, 4), dequant_stages):
        made = DenseConfig(
            halves=halves,
            alternate=halves == 2,
            tile_n=tile_n,
            min_split_tiles=min_split_tiles,
            ex2_emulation=0,
            dequant_stages=staged,
        )
        yield from deepest(made, spec, smem_bytes)
