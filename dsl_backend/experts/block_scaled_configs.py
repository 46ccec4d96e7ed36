# SPDX-License-Identifier: Apache-2.0
"""Tiles of SM100's kernels of experts whose scales are factors of matrix products; needs no CuTe DSL."""

from dataclasses import dataclass
from functools import cache

from dsl_backend.experts.configs import ExpertsConfig
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.scaled import ScaledGemmSpec
from dsl_backend.gemm.sizes import ceil_div
from dsl_backend.gemm.sm100.configs import BlockScaledConfig
from dsl_backend.quant.format import SWIZZLED_ROWS
from dsl_backend.runtime.target import Target

# Rows of weights of a box of the second product, widest first; the first one's boxes have 128 rows, whose factors lie
# together. Arithmetic, none of it timed.
SECOND_BOXES = (128, 64)
# Rows of MXFP4 weights start at multiples of so many bytes: TMA unpacks 128 elements at a time, those behind a row's
# last one are part of its padding.
UNPACKED_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class GroupedBlockScaledConfig(BlockScaledConfig):
    """Epilogue threads store their rows from registers."""

    def epilogue_elements(self, parts: int) -> int:
        return 0


@cache
def products(spec: ExpertsSpec) -> tuple[ScaledGemmSpec, ScaledGemmSpec]:
    """Both products as GEMMs, the first one's columns padded as its scale factors are.

    MXFP4 weights are MXFP8 ones here: in shared memory TMA gives each element a byte.
    """
    kind, hidden = spec.activations, spec.hidden_size
    assert kind is not None
    width = ceil_div(spec.intermediate_size, SWIZZLED_ROWS) * SWIZZLED_ROWS
    first = ScaledGemmSpec(
        n=width,
        k=hidden,
        x=kind,
        weight=kind,
        dtype=spec.dtype,
        out=kind,
        activation=spec.activation,
        bias=spec.w13_bias,
    )
    second = ScaledGemmSpec(
        n=hidden, k=spec.intermediate_size, x=kind, weight=kind, dtype=spec.dtype, bias=spec.w2_bias
    )
    return first, second


@cache
def candidates(spec: ExpertsSpec, target: Target) -> tuple[ExpertsConfig, ...]:
    """The kernels of a layer for any number of tokens, widest first. None where nothing fits."""
    first_gemm, second_gemm = products(spec)
    first = deepest(GroupedBlockScaledConfig(), first_gemm, target.smem_bytes)
    found = []
    for box_n in SECOND_BOXES:
        second = deepest(GroupedBlockScaledConfig(box_n=box_n), second_gemm, target.smem_bytes)
        if isinstance(first, BlockScaledConfig) and isinstance(second, BlockScaledConfig):
            found.append(ExpertsConfig(first=first, second=second, prefetches=True))
    return tuple(found)


def objections(spec: ExpertsSpec, target: Target) -> list[str]:
    """Why no configuration serves a layer."""
    if not spec.mma_scaled:
        return [f"weights in {spec.weight or '16 bits'}: this one's are in mxfp8, mxfp4 or nvfp4"]
    if spec.router_weights is RouterWeights.INPUT:
        return ["router weights on the input"]
    if not candidates(spec, target):
        return [f"{target.smem_bytes} bytes of shared memory are too few for every tile"]
    return []


def choose(spec: ExpertsSpec, tokens: int, target: Target) -> ExpertsConfig:
    """The kernels for so many tokens: the widest whose second product has a tile for most SMs."""
    found = candidates(spec, target.sparing(0))
    filling = (one for one in found if 4 * one.ctas(spec, tokens, target)[2] >= 3 * target.used_sms)
    return next(filling, found[-1])
