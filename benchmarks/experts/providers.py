# SPDX-License-Identifier: Apache-2.0
"""The providers of routed experts: this package, vLLM's Triton kernels, and FlashInfer's CUTLASS kernels."""

from functools import partial
from typing import Any

import torch
from dsl_backend.experts import api, dispatch
from dsl_backend.providers import Run, provider
from dsl_backend.quant.format import GROUP
from dsl_backend.runtime import target as targets

from ..columns import missing, reasons
from .problems import Inputs, Layer, Problem


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec, targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """`api.run`, with a kernel from the dispatch table; by default the one that dispatch chooses."""
    plan = api.plan(problem.spec, inputs.layers[0].x.device, kernel=kernel)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        given = (layer.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids)
        return api.run(plan, *given, out=layer.out, scales=layer.scales)

    return run


def vllm_objections(problem: Problem) -> list[str]:
    return missing("vllm")


def vllm_scheme(problem: Problem, layer: Layer) -> Any:
    """VLLM's configuration of weights in 8 bits; None of 16 bits."""
    if problem.weight is None:
        return None
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    w13, w2 = layer.scales.w13, layer.scales.w2
    assert w13 is not None
    assert w2 is not None
    if problem.weight.blocked:
        return fp8_w8a8_moe_quant_config(w1_scale=w13, w2_scale=w2, block_shape=[GROUP, GROUP])
    scales = {"w1_scale": w13[..., None], "w2_scale": w2[..., None]}
    return fp8_w8a8_moe_quant_config(**scales, per_act_token_quant=True, per_out_ch_quant=True)


@provider("experts", name="vLLM Triton", objections=vllm_objections, package="vllm")
def vllm_triton(problem: Problem, inputs: Inputs) -> Run:
    """The Triton kernels of vLLM with its tuned configurations, and its own alignment of tokens and sum."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    configs = [vllm_scheme(problem, layer) for layer in inputs.layers]

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        given = (layer.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids)
        made: torch.Tensor = fused_experts(*given, quant_config=configs[index])
        return made

    return run


def flashinfer_objections(problem: Problem) -> list[str]:
    eight_bit = [] if problem.weight is None else ["weights in 8 bits are not timed with it"]
    return eight_bit + missing("flashinfer", "flashinfer-python")


@provider("experts", name="FlashInfer CUTLASS", objections=flashinfer_objections, package="flashinfer-python")
def flashinfer_cutlass(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's CUTLASS kernels, autotuned. They need up rows first: the weights are repacked before the timing."""
    from flashinfer.autotuner import autotune
    from flashinfer.fused_moe import cutlass_fused_moe

    turned = [torch.cat(layer.w13.chunk(2, 1)[::-1], 1) for layer in inputs.layers]

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        cutlass_fused_moe(
            layer.x,
            layer.topk_ids,
            layer.topk_weights,
            turned[index],
            layer.w2,
            problem.dtype,
            quant_scales=[],
            output=layer.out,
        )
        return layer.out

    with autotune(True):
        run(0)
    return run


provider("experts", name="Triton", objections=partial(objections, kernel="triton"), package="dsl-backend")(
    partial(ours, kernel="triton")
)
