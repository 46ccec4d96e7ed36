# SPDX-License-Identifier: Apache-2.0
"""Tiles of the SM90 kernels whose operands are quantised."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.scaled import ScaledGemmSpec
from dsl_backend.gemm.sm90.configs import GemmConfig
from dsl_backend.quant.format import GROUP, ROW_SCALED, ScaledFormat

# wgmma keeps 14 bits of a sum of 8-bit products and drops what a term has below: of 16 instructions, 512 columns, each
# drops up to 2^-13 of the sum. More than that would exceed what rounding the output to bfloat16 costs.
MOST_PROMOTION = 4
# Two sets of accumulators, and one of outputs that wait for the rest of their group. What is left of 232 registers is
# for addresses, scales and the epilogue.
SCALED_SPARE_REGISTERS = 40
# With two scales of weights for a box 40 spilled 8 bytes.
TWO_BLOCKS_REGISTERS = 8


def blocked_objections(spec: ScaledGemmSpec) -> list[str]:
    """What the kernels need where a weight has a scale for each block."""
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
    """

    tile_m: int = 128
    box_n: int = 64
    promotion: int = 1

    def tiles_of_group(self, out: ScaledFormat | None, parts: int) -> int:
        """Tiles side by side that a CTA finishes together, so that a group of the output's columns is complete."""
        return 1 if out is None or not out.blocked else GROUP // self.columns(parts)

    def held(self, out: ScaledFormat | None, parts: int) -> int:
        """Registers of a thread for outputs that wait for the rest of their group."""
        waiting = self.tiles_of_group(out, parts) - 1
        return waiting * self.accumulators // parts

    def objections(self, spec: ScaledGemmSpec, smem_bytes: int) -> list[str]:  # type: ignore[override]
        reasons = blocked_objections(spec)
        if self.pingpong:
            reasons.append("ping-pong: consumers promote their sums while the other's products run")
        most = 1 if spec.weight.blocked else MOST_PROMOTION
        if not 1 <= self.promotion <= most:
            reasons.append(f"promotion {self.promotion}: 1 to {most} blocks of k are possible with {spec.weight}")
        reasons += float32_objections(spec)
        if spec.out == ROW_SCALED:
            reasons.append(f"out {spec.out}: a tile has a part of a row, whose scale needs all of it")
        elif spec.out is not None:
            reasons += self.out_objections(spec, spec.out)
        needed = 2 * self.accumulators + self.held(spec.out, spec.parts)
        needed += TWO_BLOCKS_REGISTERS if spec.weight.blocked and GROUP % self.box_n else 0
        if needed > (most := self.consumer_registers - SCALED_SPARE_REGISTERS):
            reasons.append(f"{needed} registers for sums and outputs: {most} are the most")
        return reasons + super().objections(spec, smem_bytes)

    def out_objections(self, spec: ScaledGemmSpec, out: ScaledFormat) -> list[str]:
        """What an output in e4m3 needs."""
        columns = self.columns(spec.parts)
        if columns % 16:
            return [f"{columns} columns of a tile: an output in 8 bits needs a multiple of 16"]
        if out.blocked and (GROUP % columns or columns > GROUP):
            return [f"{columns} columns of a tile do not divide the {GROUP} of a group of the output"]
        return []


# Tiles, with as many stages as fit. Wider ones than 192 columns leave no registers for two sets of accumulators.
SCALED_GEMMS = tuple(
    ScaledGemmConfig(box_n=box_n, cluster=cluster, promotion=promotion)
    for box_n in (96, 88, 80, 64, 48, 32)
    for cluster in (1, 2)
    for promotion in (1, MOST_PROMOTION)
)


def fitting(spec: ScaledGemmSpec, smem_bytes: int) -> list[ScaledGemmConfig]:
    """The configurations that fit a problem, each with as many stages as fit."""
    found = (deepest(tiles, spec, smem_bytes) for tiles in SCALED_GEMMS)
    return [config for config in found if isinstance(config, ScaledGemmConfig)]


def objections(spec: ScaledGemmSpec, smem_bytes: int) -> list[str]:
    """Why no kernel serves a problem, by the configuration that comes closest; empty where one does."""
    if fitting(spec, smem_bytes):
        return []
    return min((tiles.objections(spec, smem_bytes) for tiles in SCALED_GEMMS), key=len)


def kernel(config: ScaledGemmConfig) -> Any:
    """The class of a configuration's kernel. Imports CuTe DSL."""
    return import_module("dsl_backend.gemm.sm90.scaled_gemm").ScaledGemm
