# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM100 kernels: frozen, and able to say why they do not fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsl_backend.attention.cute.sizes import (
    MAILBOX_BYTES,
    MBARRIER_BYTES,
    WARPGROUP,
    chunk,
    packed_heads,
    padded,
    slice_columns,
)
from dsl_backend.attention.spec import AttentionSpec

WARP = 32
ROWS = 128  # of one product
TENSOR_COLUMNS = 512
RESPONSE_BYTES = 16  # of cluster launch control
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
class ForwardConfig:
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
    pair: bool = False
    alternate: bool = False
    swapped: int = 0
    tile_n: int = 128
    stages: int = 2
    query_stages: int = 1
    shared_ring: bool = False
    least_share: int = 2
    polynomial: int = 4
    patience: float = 8.0
    resident: int = 1
    launch_control: bool = False
    staging: int = 0

    @property
    def tile_m(self) -> int:
        """Query rows of a block."""
        if self.swapped:
            return self.swapped
        return ROWS if self.alternate else self.halves * ROWS

    @property
    def threads(self) -> int:
        if self.pair:
            return PAIR_WARPS * WARP
        if self.swapped:
            return SWAPPED_WARPS * WARP
        return (WIDEN * WARP) + (WARPGROUP if self.staging else 0)

    @property
    def registers(self) -> Registers:
        if self.pair:
            return PAIR_REGISTERS
        if self.swapped:
            return SWAPPED_REGISTERS
        if self.staging:
            return WIDENING_REGISTERS
        return REGISTERS if self.halves > 1 else ONE_HALF_REGISTERS

    def columns(self, spec: AttentionSpec) -> int:
        """Of tensor memory: scores, whose place weights take, and sums."""
        if self.swapped:
            return 2 * self.halves * self.swapped
        columns = padded(slice_columns(spec.head_dim_v))
        return PAIR * self.tile_n + columns if self.pair else self.halves * (self.tile_n + columns)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a block."""
        dims, dims_v = padded(spec.head_dim), padded(slice_columns(spec.head_dim_v))
        queries = self.query_stages * self.tile_m * max(dims, dims_v)
        columns = self.stages * (dims + dims_v)
        if self.shared_ring:
            columns = SHARED_PLACES * dims_v + self.stages * (dims - dims_v)
        keys = self.tile_n * columns // (PAIR if self.pair else 1)
        staged = self.staging * self.tile_n * (dims + dims_v)
        rings = self.query_stages + 2 * self.stages + 2 * self.staging
        places = PAIR if self.pair else self.halves
        barriers = MBARRIER_BYTES * (2 * rings + 4 * places + 1)
        statistics = 2 * 4 * places * ROWS
        if self.swapped:
            # What warps tell each other of each query row, and the weights of a tile of each half.
            statistics = 4 * self.halves * self.swapped * SWAPPED_TOLD
            queries += self.halves * self.tile_n * self.swapped
        control = 2 * RESPONSE_BYTES if self.launch_control or self.pair else 0  # aligned, with its barriers
        return spec.dtype.itemsize * (queries + keys) + staged + barriers + statistics + control + MAILBOX_BYTES

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can."""
        reasons = []
        if self.halves not in (1, 2):
            reasons.append(f"{self.halves} products of 128 rows: 1 or 2 are possible")
        if self.tile_n % 32 or not 32 <= self.tile_n <= 128:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 32 up to 128 is possible")
        if self.stages < 2 or self.query_stages < 1:
            reasons.append(f"{self.stages} key stages, {self.query_stages} query stages: at least 2 and 1 are needed")
        if spec.is_fp8_kv != (self.staging > 0) or self.staging == 1:
            reasons.append(f"{self.staging} fp8 tiles in flight: 2 or more for fp8 keys, 0 for others, are possible")
        if self.shared_ring:
            reasons += self.objections_to_sharing(spec)
        if self.pair:
            reasons += self.objections_to_pairs(spec)
        if self.swapped:
            reasons += self.objections_to_swapping(spec)
        if self.columns(spec) > TENSOR_COLUMNS:
            reasons.append(f"{self.columns(spec)} columns of tensor memory: there are {TENSOR_COLUMNS}")
        if self.alternate and self.halves != 2:
            reasons.append("one product cannot alternate")
        if self.launch_control and self.alternate:
            reasons.append("launch control hands out whole query tiles: halves alternate where key ranges are split")
        needed = self.smem_bytes(spec)
        if needed > smem_bytes:
            reasons.append(f"a block needs {needed} bytes of shared memory: there are {smem_bytes}")
        columns = slice_columns(spec.head_dim_v)
        if chunk(spec.head_dim) != chunk(columns):
            reasons.append(
                f"outputs of {columns} elements do not fit the place of queries of {spec.head_dim}: their rows are cut "
                f"into pieces of {chunk(columns)} and {chunk(spec.head_dim)}"
            )
        return reasons

    def objections_to_sharing(self, spec: AttentionSpec) -> list[str]:
        """Why keys and values cannot share a ring."""
        reasons = []
        dims, columns = spec.head_dim, slice_columns(spec.head_dim_v)
        if self.stages != 2:
            reasons.append(f"a ring that keys and values share, and {self.stages} stages: it has those of 2")
        if self.alternate or self.staging:
            reasons.append("keys and values do not share a ring where halves alternate or keys are fp8")
        if padded(dims) <= padded(columns):
            reasons.append(f"keys of {dims} elements and values of {columns} do not share a ring: keys must be wider")
        return reasons

    def objections_to_pairs(self, spec: AttentionSpec) -> list[str]:
        """Why two blocks cannot multiply as one."""
        reasons = []
        if self.halves != 1:
            reasons.append(f"{self.halves} products of a block of a pair: it has 1")
        if self.shared_ring or self.staging or self.launch_control:
            reasons.append("pairs of blocks have no shared ring, no fp8 keys and no launch control")
        columns = padded(slice_columns(spec.head_dim_v))
        if columns % (PAIR * 16):
            reasons.append(f"values of {columns} elements: a pair's blocks have half each, a multiple of 16")
        return reasons

    def objections_to_swapping(self, spec: AttentionSpec) -> list[str]:
        """Why query rows cannot be a product's columns."""
        reasons = []
        if self.swapped not in SWAPPED_ROWS:
            reasons.append(f"{self.swapped} query rows as a product's columns: {SWAPPED_ROWS} are possible")
        if not self.alternate or self.tile_n != ROWS:
            reasons.append("where operands are swapped halves alternate, with tiles of 128 keys")
        if self.pair or self.shared_ring or self.staging or self.polynomial:
            reasons.append("swapped operands have no pairs, no shared ring, no fp8 keys and no polynomials")
        if padded(spec.head_dim_v) not in SWAPPED_VALUES:
            reasons.append(f"values of {spec.head_dim_v} elements: {SWAPPED_VALUES} are a product's rows")
        return reasons


def default_config(spec: AttentionSpec) -> ForwardConfig:
    """For long queries."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        halves = 1 if widest > 256 or spec.head_dim_v > 128 else 2
        if widest <= 64:
            return ForwardConfig(tile_n=128, staging=4)
        # Both rings and 256 rows of queries are in shared memory.
        tile_n = 96 if widest <= 128 else 64 if widest <= 192 else 32
        return ForwardConfig(halves=halves, tile_n=tile_n, staging=2)
    if widest > 256:
        # 128 rows of queries are more than half of shared memory.
        return ForwardConfig(halves=1, tile_n=32, stages=2)
    if widest <= 96:
        return ForwardConfig(stages=2)
    # Products of wider heads take longer than seven eighths of the exponentials.
    if widest <= 128:
        return ForwardConfig(stages=2, polynomial=2)
    if spec.head_dim_v <= 128:
        if widest > 192:
            # 256 rows of queries leave no room for three places and the rest.
            return ForwardConfig(tile_n=96, stages=2, polynomial=2)
        # Products of 256 columns in all take as long as all exponentials.
        return ForwardConfig(shared_ring=True, polynomial=0 if spec.head_dim + spec.head_dim_v > 256 else 2)
    if padded(spec.head_dim_v) % (PAIR * 16) == 0:
        return ForwardConfig(halves=1, pair=True)
    return ForwardConfig(halves=1, tile_n=64, stages=2)


def default_split_config(spec: AttentionSpec) -> ForwardConfig:
    """For short queries over long key ranges: memory bounds them, and leaves the special unit time for all weights."""
    return replace(split_tiles(spec), polynomial=0)


def few_rows_config(spec: AttentionSpec, smem_bytes: int) -> ForwardConfig | None:
    """For batches whose requests have few query rows; None where the tiles of 128 rows serve them.

    A tile of 32 KB of queries is one of 4 KB, which leaves room for a third tile of keys and values of 128 on its way;
    and a score is a thread's of its own, where 8 heads of one token leave 120 of 128 threads without.
    """
    if spec.is_fp8_kv or spec.batch_invariant:
        # A batch-invariant layer has one kernel.
        return None
    pack = packed_heads(spec.group)
    for rows in SWAPPED_ROWS:
        if pack <= rows:
            tiles = ForwardConfig(alternate=True, swapped=rows, polynomial=0)
            return next(iter(deepest(tiles, spec, smem_bytes)), None)
    return None


def split_tiles(spec: AttentionSpec) -> ForwardConfig:
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_fp8_kv:
        if widest > 256 or spec.head_dim_v > 128:
            return ForwardConfig(halves=1, tile_n=64 if widest <= 192 else 32, staging=2)
        # What is on its way from memory is what is staged: small tiles, and many.
        if widest <= 64:
            return ForwardConfig(alternate=True, tile_n=128, staging=6)
        return ForwardConfig(alternate=True, tile_n=64, staging=6 if widest <= 128 else 4 if widest <= 192 else 2)
    if widest > 256:
        return ForwardConfig(halves=1, tile_n=32, stages=2)
    if spec.head_dim_v > 128:
        return ForwardConfig(halves=1, tile_n=64, stages=2)
    tile_n = 128 if widest <= 128 else 64
    return ForwardConfig(alternate=True, tile_n=tile_n, stages=4 if widest <= 64 else 2)


TRIED_TILES = (32, 64, 96, 128)
TRIED_POLYNOMIAL = (0, 2, 4, 8)
# fp8 tiles in flight; none of 16 bits.
TRIED_STAGING = (2, 4, 6)
MOST_STAGES = 8


def deepest(tiles: ForwardConfig, spec: AttentionSpec, smem_bytes: int) -> list[ForwardConfig]:
    """With the most stages that fit; empty where nothing fits."""
    made = (replace(tiles, stages=stages) for stages in range(2, MOST_STAGES + 1))
    return [config for config in made if not config.objections(spec, smem_bytes)][-1:]


def variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[ForwardConfig]:
    """Configurations for long queries that are worth a try and fit."""
    tiles, staging = itertools.product((1, 2), TRIED_TILES), TRIED_STAGING if spec.is_fp8_kv else (0,)
    rings = (False, True) if spec.head_dim > spec.head_dim_v else (False,)
    shapes = itertools.product(tiles, (1, 2), TRIED_POLYNOMIAL, staging, rings)
    for (halves, tile_n), query_stages, polynomial, staged, shared in shapes:
        made = ForwardConfig(
            halves=halves,
            tile_n=tile_n,
            shared_ring=shared,
            query_stages=query_stages,
            polynomial=polynomial,
            staging=staged,
        )
        yield from deepest(made, spec, smem_bytes)
    # Blocks alone read narrower values no slower than products take.
    pairs = TRIED_TILES if slice_columns(spec.head_dim_v) > 128 else ()
    for tile_n, polynomial in itertools.product(pairs, TRIED_POLYNOMIAL):
        yield from deepest(ForwardConfig(halves=1, pair=True, tile_n=tile_n, polynomial=polynomial), spec, smem_bytes)
    controlled = replace(default_config(spec), launch_control=True)
    if not controlled.objections(spec, smem_bytes):
        yield controlled


def split_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[ForwardConfig]:
    """The same for short queries over long key ranges."""
    staging = TRIED_STAGING if spec.is_fp8_kv else (0,)
    for halves, tile_n, least_share, staged in itertools.product((1, 2), TRIED_TILES, (1, 2, 4), staging):
        made = ForwardConfig(
            halves=halves,
            alternate=halves == 2,
            tile_n=tile_n,
            least_share=least_share,
            polynomial=0,
            staging=staged,
        )
        yield from deepest(made, spec, smem_bytes)
