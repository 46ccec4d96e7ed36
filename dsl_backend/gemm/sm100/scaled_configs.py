# SPDX-License-Identifier: Apache-2.0
"""Which GEMM of quantised operands SM100 has for a problem, and its tiles."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

from dsl_backend.gemm.cost import COSTS, GEMM, Costs
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

ConfigT = TypeVar("ConfigT", bound=GemmConfig | ScaledSmallMConfig)
MOST_STAGES = 12
# Of an output that is quantised.
OUTPUTS = (TENSOR_SCALED, MXFP8, NVFP4)
# Arithmetic, none of it timed.
BLOCK_SCALED_GEMMS = tuple(
    BlockScaledConfig(box_n=box_n, two_cta=two_cta)
    for box_n, two_cta in ((128, True), (64, True), (128, False), (64, False))
)
SCALED_SMALL_M = tuple(ScaledSmallMConfig(tokens=tokens) for tokens in (16, 32, 64, 128))
PROMOTED_SMALL_M = tuple(PromotedSmallMConfig(tokens=tokens) for tokens in (16, 32, 64))
# What a k tile of the persistent GEMM takes whose epilogue promotes each of them: the emulator's clock, a model, has
# 30.7 us with 7168 columns and 10.6 with 2048 (B200, 64 x 4096, one CTA), and 29.8 and 11.7 with two.
PROMOTED = replace(COSTS, gemm=replace(GEMM, step_ns=502.0, cluster_step_ns=452.0))
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
    """The tiles that fit a problem, each with as many stages as fit.

    Where no tiles for many rows do, there are none for few either: many rows would take those.
    """
    if spec.out is not None and spec.out not in OUTPUTS:
        return []
    many: list[GemmConfig | ScaledSmallMConfig] = list(deepest(tiles_of(spec), spec, smem_bytes))
    # Where stream-K splits a sum depends on the number of tiles.
    if not many or spec.batch_invariant:
        return many
    return [*deepest(small_tiles_of(spec), spec, smem_bytes), *many]


def deepest(every: Iterable[ConfigT], spec: ScaledGemmSpec, smem_bytes: int) -> Iterator[ConfigT]:
    """Those that fit."""
    for tiles in every:
        tried = (replace(tiles, stages=stages) for stages in range(MOST_STAGES, 1, -1))
        yield from [config for config in tried if not config.objections(spec, smem_bytes)][:1]


def small_tiles_of(spec: ScaledGemmSpec) -> tuple[ScaledSmallMConfig, ...]:
    """Tiles of a problem's kernel for few rows."""
    return PROMOTED_SMALL_M if spec.promoted else SCALED_SMALL_M


def costs(config: object) -> Costs:
    """Of a configuration's kernel, for the cost model."""
    return PROMOTED if isinstance(config, PromotedConfig) else COSTS


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
