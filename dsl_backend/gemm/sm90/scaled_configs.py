# SPDX-License-Identifier: Apache-2.0
"""Tiles of the SM90 kernels whose operands are quantised."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.cost import COSTS, GEMM, Costs
from dsl_backend.gemm.scaled import ScaledGemmSpec
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M, GemmConfig, SmallMConfig
from dsl_backend.gemm.tiles import ALIGNMENT_BYTES
from dsl_backend.quant.format import GROUP, ROW_SCALED, TENSOR_SCALED, ScaledFormat

# wgmma keeps 14 bits of a sum of 8-bit products and drops what a term has below: of 16 instructions, 512 columns, each
# drops up to 2^-13 of the sum. More than that would exceed what rounding the output to bfloat16 costs.
MOST_PROMOTION = 4
# Two sets of accumulators, and one of outputs that wait for the rest of their group. What is left of 232 registers is
# for addresses, scales and the epilogue.
SCALED_SPARE_REGISTERS = 40

SCALE_ALIGNMENT = 128  # of TMA's copies


def blocked_objections(spec: ScaledGemmSpec) -> list[str]:
    """Requirements of the kernels if a weight has a scale for each block."""
    if not spec.weight.blocked or spec.activation is None:
        return []
    reasons = []
    if spec.n % GROUP:
        reasons.append(f"n {spec.n} with an activation and {spec.weight}: a multiple of {GROUP} is needed")
    if spec.interleaved:
        reasons.append(f"alternating gate and up rows with {spec.weight}: halves are needed")
    return reasons


def float32_objections(spec: ScaledGemmSpec) -> list[str]:
    """What the kernels need of scales."""
    kinds = {"x": spec.x, "the weight": spec.weight, "out": spec.out}
    return [
        f"{name} is {kind}: scales in float32 are needed"
        for name, kind in kinds.items()
        if kind is not None and kind.scales != torch.float32
    ]


@dataclass(frozen=True, kw_only=True)
class ScaledGemmConfig(GemmConfig):
    """The persistent GEMM of e4m3 operands: sums of a few blocks of k are added to a second set of accumulators.

    Attributes:
        promotion: blocks of 128 columns of k between these additions; 1 where each block has scales.
        turns: 1 where a wgmma has both boxes of weights; 2 where they take turns in one set of accumulators, which is
            half as large: a tile can be wider.
        splits: 2 where a cluster's CTAs have halves of a tile's k, and finish a consumer's rows each.
        overlap: there are two sets of accumulators of a turn: one is added while the other one's products run.
    """

    tile_m: int = 128
    box_n: int = 64
    promotion: int = 1
    turns: int = 1
    overlap: bool = False
    splits: int = 1

    @property
    def k_parts(self) -> int:
        return self.splits

    def stored_columns(self, parts: int) -> int:
        """Columns of the output that a consumer stores at once: a box's where boxes take turns."""
        return self.columns(parts) if self.turns == 1 else self.box_n

    def epilogue_elements(self, parts: int) -> int:
        return CONSUMERS * MMA_M * self.stored_columns(parts)

    def tiles_of_group(self, out: ScaledFormat | None, parts: int) -> int:
        """Tiles side by side that a CTA finishes together, so that a group of the output's columns is complete."""
        return 1 if out is None or not out.blocked else GROUP // self.columns(parts)

    def tiles_together(self, spec: ScaledGemmSpec) -> int:  # type: ignore[override]
        return self.tiles_of_group(spec.out, spec.parts)

    def held(self, out: ScaledFormat | None, parts: int) -> int:
        """Registers of a thread for outputs that wait for the rest of their group."""
        waiting = self.tiles_of_group(out, parts) - 1
        return waiting * self.accumulators // parts

    def smem_bytes(self, spec: ScaledGemmSpec) -> int:  # type: ignore[override]
        staged = self.epilogue_elements(spec.parts) * spec.dtypes.out.itemsize
        # Stages and buffers are multiples of what they are aligned to.
        scales = self.scale_bytes(spec) + SCALE_ALIGNMENT - ALIGNMENT_BYTES
        # Sums of a consumer's rows, and their barrier.
        received = MMA_M * self.weight_rows * 4 + SCALE_ALIGNMENT if self.splits > 1 else 0
        return super().smem_bytes(spec) + scales + received - (staged if spec.wide else 0)

    def scale_bytes(self, spec: ScaledGemmSpec) -> int:
        """Of x's scales of a stage's groups, or of a tile's rows of weights, for each consumer."""
        if spec.weight.blocked:
            return self.stages * self.tile_m * 4 if spec.copies_scales else 0
        return CONSUMERS * self.weight_rows * 4 if spec.weight.block_rows == 1 else 0

    def objections(self, spec: ScaledGemmSpec, smem_bytes: int) -> list[str]:  # type: ignore[override]
        reasons = blocked_objections(spec)
        if self.pingpong:
            reasons.append("ping-pong: consumers promote their sums while the other's products run")
        most = 1 if spec.weight.blocked or self.turns > 1 or self.overlap else MOST_PROMOTION
        if self.overlap and spec.weight.blocked and not spec.copies_scales:
            reasons.append("overlap: x's scales of groups must be column-major")
        if not 1 <= self.promotion <= most:
            reasons.append(f"promotion {self.promotion}: 1 to {most} blocks of k are possible with {spec.weight}")
        reasons += float32_objections(spec)
        if spec.out == ROW_SCALED:
            reasons.append(f"out {spec.out}: a tile has a part of a row, whose scale needs all of it")
        elif spec.out is not None:
            reasons += self.out_objections(spec, spec.out)
        if self.splits not in (1, 2):
            reasons.append(f"{self.splits} splits: 1 or 2 are possible")
        elif self.splits > 1:
            reasons += self.split_objections(spec)
        if self.turns not in (1, 2):
            reasons.append(f"{self.turns} turns: 1 or 2 are possible")
        sets = 2 if self.overlap else 1
        needed = self.accumulators + sets * self.accumulators // self.turns + self.held(spec.out, spec.parts)
        if needed > (most := self.consumer_registers - SCALED_SPARE_REGISTERS):
            reasons.append(f"{needed} registers for sums and outputs: {most} are the most")
        return reasons + super().objections(spec, smem_bytes)

    def split_objections(self, spec: ScaledGemmSpec) -> list[str]:
        """What halves of k need."""
        reasons = []
        if self.cluster > 1:
            reasons.append("splits: the cluster shares a tile, and no weights")
        if spec.batch_invariant or (spec.out is not None and spec.out.blocked):
            reasons.append(f"splits: {spec} needs whole sums of several tiles, or the same for any number of rows")
        if spec.weight.blocked and not spec.copies_scales:
            reasons.append("splits: x's scales of groups must be column-major")
        if spec.k <= self.splits * GROUP // 2:
            reasons.append(f"splits: {spec.k} columns of k are one block")
        return reasons

    def out_objections(self, spec: ScaledGemmSpec, out: ScaledFormat) -> list[str]:
        """What an output in e4m3 needs."""
        columns = self.columns(spec.parts)
        if columns % 16:
            return [f"{columns} columns of a tile: an output in 8 bits needs a multiple of 16"]
        if out.blocked and (GROUP % columns or columns > GROUP or self.stored_columns(spec.parts) < columns):
            return [f"{columns} columns of a tile do not divide the {GROUP} of a group of the output"]
        return []


# Columns of k in a row of shared memory in the widest swizzle.
BLOCK_K = 128
# Two sets of accumulators of as many registers a thread, and their scales.
MOST_TOKENS = 64
# Of two consumers, whose threads have 168 registers: with scales of blocks 48 spilled 8 bytes.
MOST_TOKENS_OF_TWO = 32


@dataclass(frozen=True, kw_only=True)
class ScaledSmallMConfig(SmallMConfig):
    """The GEMM of e4m3 operands for few rows: sums of a k tile are added to a second set of accumulators."""

    tile_k: int = BLOCK_K

    @property
    def promotion(self) -> int:
        """Blocks of 128 columns of k between these additions."""
        return self.tile_k // BLOCK_K

    def objections(self, spec: ScaledGemmSpec, smem_bytes: int) -> list[str]:  # type: ignore[override]
        reasons = blocked_objections(spec) + float32_objections(spec)
        most = BLOCK_K if spec.weight.blocked else MOST_PROMOTION * BLOCK_K
        if self.tile_k % BLOCK_K or self.tile_k > most:
            reasons.append(f"tile_k {self.tile_k} is not a multiple of {BLOCK_K} up to {most}, with {spec.weight}")
        crowded = spec.weight.blocked and self.groups > 1
        most = MOST_TOKENS_OF_TWO if crowded else MOST_TOKENS
        if self.tokens > most:
            reasons.append(f"{self.tokens} tokens of {self.groups} consumers with {spec.weight}: {most} are the most")
        if spec.out is not None and spec.out != TENSOR_SCALED:
            reasons.append(f"out {spec.out}: threads have parts of a row, whose scales need all of them")
        return reasons + super().objections(spec, smem_bytes)


# Tiles, with as many stages as fit. Wider ones than 192 columns leave no registers for two sets of accumulators, unless
# boxes take turns: with scales of blocks 256 are the fastest ones from 256 rows on (docs/scaled-gemm-sm90.md).
SCALED_GEMMS = (
    *(ScaledGemmConfig(box_n=128, cluster=cluster, turns=2) for cluster in (1, 2)),
    *(
        ScaledGemmConfig(box_n=box_n, cluster=cluster, promotion=promotion)
        for box_n in (96, 88, 80, 64, 48, 32)
        for cluster in (1, 2)
        for promotion in (1, MOST_PROMOTION)
    ),
    *(
        ScaledGemmConfig(box_n=box_n, cluster=cluster, turns=2, overlap=True)
        for box_n in (96, 80)
        for cluster in (1, 2)
    ),
    *(ScaledGemmConfig(box_n=box_n, cluster=cluster, overlap=True) for box_n in (64, 32) for cluster in (1, 2)),
)
# A cluster for each tile, for about as many tiles as half of the SMs.
HALVED_GEMMS = (
    ScaledGemmConfig(box_n=96, turns=2, overlap=True, splits=2),
    ScaledGemmConfig(box_n=64, overlap=True, splits=2),
    ScaledGemmConfig(box_n=64, splits=2),
)

# The first of those that the cost model finds equal is chosen: two consumers with 32 tokens each took 0.93 to 0.98 of
# the time of one with 64 (docs/performance/scaled-linear.md).
SCALED_SMALL_M = (
    *(ScaledSmallMConfig(tokens=tokens, groups=2, split_tokens=True) for tokens in (24, 32, 48, 64)),
    *(ScaledSmallMConfig(tokens=tokens, tile_k=256) for tokens in (8, 16, 32)),
    *(ScaledSmallMConfig(tokens=tokens) for tokens in (8, 16, 32, 64)),
)
# For products without an activation.
SCALED_SPLIT_K = tuple(
    ScaledSmallMConfig(tokens=tokens, tile_k=tile_k, num_splits=num_splits)
    for tokens in (8, 16, 32, 64)
    for tile_k in (256, 128)
    for num_splits in (2, 4, 8)
)
ScaledConfig = ScaledGemmConfig | ScaledSmallMConfig
# Rows from which boxes in turns were timed, and those of gated layers with scales of blocks; halves of k; additions
# beside products.
TURNS_FROM, TURNS_OF_GATED_BLOCKS_FROM, HALVES_FROM, OVERLAP_FROM = 256, 64, 128, 64
WIDE_BOXES_TO = 64


def was_timed(spec: ScaledGemmSpec, config: object, rows: int) -> bool:
    """Whether a configuration may be chosen for so many rows, without being asked for."""
    if not isinstance(config, ScaledGemmConfig):
        return True
    if config.splits > 1:
        return rows >= HALVES_FROM and spec.activation is None and (config.overlap or spec.weight.blocked)
    if config.overlap:
        return rows >= OVERLAP_FROM
    if config.turns > 1:
        gated_blocks = spec.weight.blocked and spec.activation is not None
        return rows >= (TURNS_OF_GATED_BLOCKS_FROM if gated_blocks else TURNS_FROM)
    # Sums of four blocks of k in a wgmma took 0.66 to 0.97 of the time (docs/performance/scaled-linear.md).
    if not spec.weight.blocked:
        return config.promotion == MOST_PROMOTION
    # Wide boxes that may lie in two blocks overlap.
    return GROUP % config.box_n == 0 or config.box_n < 64 or (config.box_n <= 80 and rows <= WIDE_BOXES_TO)


def costs_of(flops: float, step_ns: float, cluster_step_ns: float, launch_ns: float, handed_ns: float = 0.0) -> Costs:
    """What the persistent GEMM reaches."""
    gemm = replace(
        GEMM,
        flops=flops,
        step_ns=step_ns,
        cluster_step_ns=cluster_step_ns,
        launch_ns=launch_ns,
        handed_ns=handed_ns,
    )
    return replace(COSTS, gemm=gemm)


# Fitted to 391 timings of 9 layers with 64 to 8192 rows on an H200, of which the best ones count most: 3 to 7 % off;
# what is chosen takes 1 % longer than the best on average (docs/performance/scaled-linear.md). With scales of blocks:
# boxes that lie in one of them, those that may lie in two, boxes in turns; additions beside products of other blocks of
# k, and of the other turn.
ONE_SCALE = costs_of(0.882, 331.0, 335.0, 1007.0, 571.0)
TWO_SCALES = costs_of(0.866, 381.0, 410.0, 1511.0)
IN_TURNS = costs_of(0.889, 52.0, 872.0, 1004.0)
BLOCKS_OVERLAP = costs_of(0.909, 280.0, 319.0, 1238.0, 998.0)
TURNS_OVERLAP = costs_of(0.849, 408.0, 449.0, 1004.0, 1233.0)
# With other scales.
PROMOTED = costs_of(0.945, 24.0, 260.0, 1000.0)
PROMOTED_IN_TURNS = costs_of(0.838, 67.0, 54.0, 1001.0)
PROMOTED_BLOCKS_OVERLAP = costs_of(1.0, 110.0, 204.0, 1137.0, 1413.0)
PROMOTED_TURNS_OVERLAP = costs_of(0.98, 75.0, 286.0, 1004.0, 1773.0)


def costs(spec: ScaledGemmSpec, config: object) -> Costs:
    """Of a configuration's kernel, for the cost model."""
    if not isinstance(config, ScaledGemmConfig):
        return COSTS
    blocked = spec.weight.blocked
    if config.overlap and config.turns == 1:
        return BLOCKS_OVERLAP if blocked else PROMOTED_BLOCKS_OVERLAP
    if config.overlap:
        return TURNS_OVERLAP if blocked else PROMOTED_TURNS_OVERLAP
    if config.turns > 1:
        return IN_TURNS if blocked else PROMOTED_IN_TURNS
    if not blocked:
        return PROMOTED
    return TWO_SCALES if GROUP % config.box_n else ONE_SCALE


def tiles_of(spec: ScaledGemmSpec) -> tuple[ScaledConfig, ...]:
    """Tiles that may serve a problem. Where stream-K splits a sum depends on the number of tiles."""
    if spec.batch_invariant:
        return SCALED_GEMMS
    return (*SCALED_SMALL_M, *(SCALED_SPLIT_K if spec.parts == 1 else ()), *SCALED_GEMMS, *HALVED_GEMMS)


def fitting(spec: ScaledGemmSpec, smem_bytes: int) -> list[ScaledConfig]:
    """The configurations that fit a problem, each with as many stages as fit."""
    found = (deepest(tiles, spec, smem_bytes) for tiles in tiles_of(spec))
    return [config for config in found if isinstance(config, ScaledConfig)]


def objections(spec: ScaledGemmSpec, smem_bytes: int) -> list[str]:
    """Why no kernel serves a problem, by the configuration that comes closest; empty where one does."""
    if fitting(spec, smem_bytes):
        return []
    return min((tiles.objections(spec, smem_bytes) for tiles in tiles_of(spec)), key=len)


def kernel(key: ScaledKey[Any]) -> Any:
    """The class of a key's kernel. Imports CuTe DSL."""
    module, name = "scaled_gemm", "ScaledGemm"
    if isinstance(key.config, ScaledSmallMConfig):
        module, name = "scaled_small_m", "ScaledSmallMGemm"
    return getattr(import_module(f"dsl_backend.gemm.sm90.{module}"), name)
