# SPDX-License-Identifier: Apache-2.0
"""Which GEMM of quantised operands SM100 has for a problem, and its tiles."""

from dataclasses import replace
from importlib import import_module
from typing import Any

from dsl_backend.gemm.scaled import MULTIPLE, ScaledGemmSpec
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sm100.configs import (
    GEMMS,
    BlockScaledConfig,
    GemmConfig,
    PromotedConfig,
    PromotedSmallMConfig,
    ScaledSmallMConfig,
)
from dsl_backend.quant.format import MXFP8, NVFP4, TENSOR_SCALED

MOST_STAGES = 12
# Of an output that is quantised.
OUTPUTS = (TENSOR_SCALED, MXFP8, NVFP4)
# Arithmetic, none of it timed.
BLOCK_SCALED_GEMMS = tuple(
    BlockScaledConfig(box_n=box_n, two_cta=two_cta)
    for box_n, two_cta in ((128, True), (64, True), (128, False), (64, False))
)
SCALED_SMALL_M = tuple(ScaledSmallMConfig(tokens=tokens) for tokens in (16, 32, 64, 128))
PROMOTED_SMALL_M = tuple(PromotedSmallMConfig(tokens=tokens) for tokens in (16, 32, 64, 128))
PROMOTED_GEMMS = tuple(PromotedConfig(two_cta=two_cta) for two_cta in (True, False))


def objections(spec: ScaledGemmSpec, smem_bytes: int) -> list[str]:
    """Why no kernel serves a problem; empty where one does."""
    reasons = []
    if spec.k % (MULTIPLE * spec.x.packed):
        reasons.append(f"k {spec.k} is not a multiple of {MULTIPLE * spec.x.packed}: TMA needs rows of whole 16 bytes")
    if spec.out is not None and spec.out not in OUTPUTS:
        wanted = ", ".join(map(str, OUTPUTS))
        reasons.append(f"out is {spec.out}: float16, bfloat16, {wanted} are possible")
    if spec.out is not None and spec.n % (MULTIPLE * spec.out.packed):
        reasons.append(
            f"n {spec.n} is not a multiple of {MULTIPLE * spec.out.packed}: TMA needs rows of whole 16 bytes"
        )
    if not reasons and not fitting(spec, smem_bytes):
        reasons += tiles_of(spec)[0].objections(spec, smem_bytes)
    return reasons


def fitting(spec: ScaledGemmSpec, smem_bytes: int) -> list[GemmConfig | ScaledSmallMConfig]:
    """The tiles that fit a problem, each with as many stages as fit."""
    if spec.out is not None and spec.out not in OUTPUTS:
        return []
    found: list[GemmConfig | ScaledSmallMConfig] = []
    every: list[GemmConfig | ScaledSmallMConfig] = [*tiles_of(spec)]
    if not spec.batch_invariant:  # where stream-K splits a sum depends on the number of tiles
        every = [*(PROMOTED_SMALL_M if spec.promoted else SCALED_SMALL_M), *every]
    for tiles in every:
        tried = (replace(tiles, stages=stages) for stages in range(MOST_STAGES, 1, -1))
        found += [config for config in tried if not config.objections(spec, smem_bytes)][:1]
    return found


def tiles_of(spec: ScaledGemmSpec) -> tuple[GemmConfig, ...]:
    """Tiles of a problem's kernel."""
    if spec.x.swizzled:
        return BLOCK_SCALED_GEMMS
    return PROMOTED_GEMMS if spec.promoted else GEMMS


def kernel(key: ScaledKey[Any]) -> Any:
    """The class of a key's kernel. Imports CuTe DSL."""
    module, name = "scaled_gemm", "ScaledGemm"
    if isinstance(key.config, PromotedSmallMConfig):
        return import_module("dsl_backend.gemm.sm100.promoted_small_m").PromotedSmallMGemm
    if isinstance(key.config, ScaledSmallMConfig):
        return import_module("dsl_backend.gemm.sm100.scaled_small_m").ScaledSmallMGemm
    if key.x.blocked:
        module, name = "promoted_gemm", "PromotedGemm"
    if key.x.swizzled:
        module, name = "block_scaled_gemm", "BlockScaledGemm"
    return getattr(import_module(f"dsl_backend.gemm.sm100.{module}"), name)
