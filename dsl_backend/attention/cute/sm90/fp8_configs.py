# SPDX-License-Identifier: Apache-2.0
"""Configurations of the SM90 kernel whose products are in 8 bits. Needs no CuTe DSL."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from dsl_backend.attention.cute.sizes import (
    FP8_K_BLOCK,
    MAX_P_EXPONENT,
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
    has_many_rows,
    p_offset_objections,
)
from dsl_backend.attention.cute.sm90.dense_configs import MAX_STAGES, REGISTERS, WGMMA_M
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.quant.format import E4M3

# Keys whose P V the tensor cores add up, at most, in configurations to tune.
TUNED_SUMS = (128, 256, 512)
# Registers of an MMA thread besides O, S, P and Q: addresses, the state of the softmax, the loop's.
OTHER_REGISTERS = 44
# The same where S and P V share registers; and where Q is in shared memory as well.
FEWER_OTHER_REGISTERS, FEWEST_OTHER_REGISTERS = 40, 32
MOST_DIM = 256  # O of wider values takes more than half of a thread's registers
VALUE_PART = 64  # columns of P V of wide heads that are computed at once
WIDE_TILES = (64, 96, 128)


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Tile shape and pipeline stages of the kernel with e4m3 products.

    Attributes:
        groups: MMA warpgroups, each with 64 rows of a tile.
        tile_n: keys of a tile.
        stages: smem stages of K, of V as it is stored, and of V transposed.
        query_stages: smem stages of Q.
        ctas_per_sm: CTAs per SM.
        ping_pong: warpgroups take turns at issuing MMAs.
        accumulate_period: key tiles whose P V the tensor cores add up before float32 additions take over: their own
            accumulator keeps about 14 bits. 0: all tiles of a row.
        intra_warpgroup_overlap: a warpgroup's softmax overlaps its own MMAs, as in FlashAttention-3; with ping_pong the
            other's too. Else S and P V of a tile share registers, which leaves room for longer tiles; each tile's P V
            is then added in float32 (accumulate_period is 1).
        value_parts: P V of a tile is computed for so many parts of the columns, one after another, which share
            registers. Without intra_warpgroup_overlap.
        shared_q: MMAs read Q in e4m3 from shared memory, and not from registers. MMA warps load it from global memory,
            and quantize it, unless it arrives in e4m3.
        p_offset: P is 2^p_offset where a score is the row's maximum, so that small P are normal numbers of e4m3. What
            is left below 448 is how far a score may exceed row_max before O is rescaled.
        min_split_tiles: fewest key tiles of a split, where keys are split.
    """

    pair_row_tiles: ClassVar[bool] = False
    early_dependents: ClassVar[bool] = False

    groups: int
    tile_n: int
    stages: int
    query_stages: int = 1
    ctas_per_sm: int = 1
    ping_pong: bool = False
    accumulate_period: int = 4
    intra_warpgroup_overlap: bool = True
    value_parts: int = 1
    shared_q: bool = False
    p_offset: float = 8.0
    min_split_tiles: int = 2

    @property
    def tile_m(self) -> int:
        return self.groups * WGMMA_M

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread of the MMA warpgroups, and of the load, scheduler and transposition warps; no dequantization."""
        if self.groups > 1 and not self.intra_warpgroup_overlap:
            # With 48 or fewer of the other warps, the transposition of long tiles spills 16 to 32 bytes (ptxas 13.0).
            return {2: 224, 3: 152}[self.groups], 56, 0
        return (*REGISTERS[self.groups], 0)

    @property
    def dequant_stages(self) -> int:
        """The stages that TMA fills."""
        return self.stages

    @property
    def rescale_threshold(self) -> float:
        """How far a score may exceed row_max, in base 2, before O is rescaled."""
        return MAX_P_EXPONENT - self.p_offset

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a CTA."""
        q_bytes = self.query_stages * self.tile_m * spec.head_dim
        if self.shared_q and not spec.is_fp8_q:
            q_bytes += 4 * self.tile_m  # scales of rows
        elif not spec.is_fp8_q:
            q_bytes = spec.dtype.itemsize * self.query_stages * self.tile_m * max(spec.head_dim, spec.head_dim_v)
        kv_bytes = self.stages * self.tile_n * (spec.head_dim + 2 * spec.head_dim_v)
        return q_bytes + kv_bytes + MBARRIER_BYTES * 2 * (self.query_stages + 3 * self.stages) + WORK_TILE_SMEM_BYTES

    def registers_needed(self, spec: AttentionSpec) -> int:
        """Registers of an MMA thread that hold O, in one level or two, S, P and Q, and the others."""
        if not self.intra_warpgroup_overlap:
            shared = max(self.tile_n // 2, spec.head_dim_v // self.value_parts // 2 + self.tile_n // 8)
            others = FEWEST_OTHER_REGISTERS if self.shared_q else spec.head_dim // 8 + FEWER_OTHER_REGISTERS
            return spec.head_dim_v // 2 + shared + others
        levels = 2 if self.accumulate_period else 1
        return levels * spec.head_dim_v // 2 + self.tile_n // 2 + (self.tile_n + spec.head_dim) // 8 + OTHER_REGISTERS

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built with this configuration; empty if it can.

        Args:
            smem_bytes: the limit of a CTA.
        """
        reasons = unserved(spec)
        if self.groups not in REGISTERS:
            reasons.append(f"{self.groups} warpgroups: one of {sorted(REGISTERS)} is possible")
        if self.tile_n % FP8_K_BLOCK or not FP8_K_BLOCK <= self.tile_n <= 256:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of {FP8_K_BLOCK} up to 256 is possible")
        if self.stages < 2 or self.query_stages < 1:
            reasons.append(f"{self.stages} K stages, {self.query_stages} Q stages: at least 2 and 1 are needed")
        reasons += p_offset_objections(self.p_offset)
        if self.accumulate_period < 0:
            reasons.append(f"sums of {self.accumulate_period} tiles: 1 or more are possible, or 0 for all")
        elif not self.intra_warpgroup_overlap and self.accumulate_period != 1:
            reasons.append("S and P V share registers: each tile's P V is added in float32 (accumulate_period=1)")
        if self.value_parts > 1 and self.intra_warpgroup_overlap:
            reasons.append(f"{self.value_parts} parts of P V: possible where S and P V share registers")
        if spec.head_dim_v % (8 * self.value_parts):
            reasons.append(f"{self.value_parts} parts of {spec.head_dim_v} columns: a part has a multiple of 8")
        if self.shared_q and (self.query_stages > 1 or self.intra_warpgroup_overlap):
            reasons.append("Q in shared memory has one stage, and S and P V share registers")
        if reasons:
            return reasons
        available = self.registers[0]
        if self.registers_needed(spec) > available:
            reasons.append(f"O, S, P and Q take {self.registers_needed(spec)} registers: a thread has {available}")
        smem_needed = self.smem_bytes(spec) * self.ctas_per_sm
        if smem_needed > smem_bytes:
            reasons.append(f"{self.ctas_per_sm} CTAs need {smem_needed} bytes of shared memory: there are {smem_bytes}")
        return reasons


def unserved(spec: AttentionSpec) -> list[str]:
    """What no configuration serves."""
    reasons = []
    if spec.kv != E4M3:
        reasons.append(f"keys of {spec.kv.name}: its products are of {E4M3.name}")
    for name, dim in (("head size", spec.head_dim), ("value head size", spec.head_dim_v)):
        if dim % FP8_K_BLOCK or not 64 <= dim <= MOST_DIM:
            reasons.append(f"{name} {dim} is not a multiple of {FP8_K_BLOCK} from 64 to {MOST_DIM}: O fills registers")
    if spec.batch_invariant:
        # Decode converts the cache to 16 bits: a row's bits would depend on how many queries its request has.
        reasons.append("batch invariance: short queries have other products than long ones")
    return reasons


# Batches with a query of this many tokens get `long_query_fp8_config`.
FP8_LONG_QUERY = 4096


def default_fp8_config(spec: AttentionSpec) -> Fp8Config:
    """The default for queries below FP8_LONG_QUERY tokens; with heads above 128 for all."""
    if is_wide(spec):
        # Tiles of 128 keys fill 225 of 227 KB of shared memory, and registers. Not measured on a GPU.
        return wide(spec, WIDE_TILES[-1])
    if spec.head_dim_v <= 64:
        return Fp8Config(groups=2, tile_n=128, stages=4, query_stages=2, ping_pong=True)
    if spec.head_dim <= 128 and spec.head_dim_v <= 128:
        # Against tiles of 192 keys: 6 % faster for prompts of 1k, 3 % slower for 4k, 8 % for 16k (H200).
        return in_turn(2, 128, stages=3)
    # By the emulator's clock 0.62 of the time of tiles of 32 keys whose softmax overlaps, with which (192, 128) took
    # 1.27 times FlashAttention-3's time on an H200. Tiles of 160 keys are as fast. Not measured on a GPU.
    return in_turn(2, 128, stages=2)


def long_query_fp8_config(spec: AttentionSpec) -> Fp8Config | None:
    """The default for batches with a query of FP8_LONG_QUERY tokens or more; None if `default_fp8_config` is it."""
    if max(spec.head_dim, spec.head_dim_v) <= 64:
        # 11 % faster than `default_fp8_config` for prompts of 4k (H200).
        return in_turn(3, 128, stages=4)
    if spec.head_dim_v > 64 and max(spec.head_dim, spec.head_dim_v) <= 128:
        return in_turn(2, 192, stages=2)
    return None


def many_rows_config(spec: AttentionSpec) -> Fp8Config | None:
    """For short queries whose rows are many, with keys split; None for a layer that has no such queries."""
    return packed_config(spec) if has_many_rows(spec.group) else None


def packed_config(spec: AttentionSpec) -> Fp8Config:
    """For packed heads, with keys split.

    The tiles of prefill: 128 rows, which are the heads of a group times the tokens. With heads of 64, prefill's spill 8
    bytes beside a window, softcap and sinks (ptxas 13.0). Other tiles were not measured.
    """
    return in_turn(2, 128, stages=4) if max(spec.head_dim, spec.head_dim_v) <= 64 else default_fp8_config(spec)


def in_turn(groups: int, tile_n: int, stages: int, *, ping_pong: bool = True) -> Fp8Config:
    """Warpgroups whose own softmax and MMAs do not overlap."""
    return Fp8Config(
        groups=groups,
        tile_n=tile_n,
        stages=stages,
        ping_pong=ping_pong,
        intra_warpgroup_overlap=False,
        accumulate_period=1,
    )


def is_wide(spec: AttentionSpec) -> bool:
    """Whether registers have no room for Q and for a second accumulator of all columns."""
    return spec.head_dim > 192 or spec.head_dim_v > 128


def wide(spec: AttentionSpec, tile_n: int, ping_pong: bool = True) -> Fp8Config:
    """Of wide heads: parts of up to VALUE_PART columns of P V, and Q in shared memory."""
    parts = next(parts for parts in range(-(-spec.head_dim_v // VALUE_PART), 9) if spec.head_dim_v % (8 * parts) == 0)
    return replace(in_turn(2, tile_n, stages=2, ping_pong=ping_pong), value_parts=parts, shared_q=True)


def fp8_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[Fp8Config]:
    """Configurations to tune, each with the most stages that fit.

    All are about as exact: sums of more keys and smaller offsets are not, which random numbers do not show
    (docs/attention-fp8.md).
    """
    tiles = []
    for tile_n, ping_pong, keys in itertools.product((32, 64, 96, 128, 160, 192), (False, True), TUNED_SUMS):
        if period := keys // tile_n:
            tiles.append(Fp8Config(groups=2, tile_n=tile_n, stages=2, ping_pong=ping_pong, accumulate_period=period))
    for groups, tile_n, ping_pong in itertools.product((2, 3), (96, 128, 160, 192, 224, 256), (False, True)):
        tiles.append(in_turn(groups, tile_n, 2, ping_pong=ping_pong))
    if is_wide(spec):
        tiles += [wide(spec, *one) for one in itertools.product(WIDE_TILES, (False, True))]
    for one in tiles:
        fitting = [replace(one, stages=stages) for stages in range(2, MAX_STAGES + 1)]
        yield from [config for config in fitting if not config.objections(spec, smem_bytes)][-1:]
