# SPDX-License-Identifier: Apache-2.0
"""The providers of routed experts: this package, vLLM's Triton kernels, and FlashInfer's CUTLASS kernels."""

from functools import partial

import torch
from dsl_backend.experts import api, dispatch
from dsl_backend.providers import Run, provider
from dsl_backend.runtime import target as targets

from ..columns import missing, reasons
from .problems import Inputs, Problem


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec, targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """`api.run`, with a kernel from the dispatch table; by default the one that dispatch chooses."""
    plan = api.plan(problem.spec, inputs.layers[0].x.device, kernel=kernel)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.run(plan, layer.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids, out=layer.out)

    return run


def vllm_objections(problem: Problem) -> list[str]:
    return missing("vllm")


@provider("experts", name="vLLM Triton", objections=vllm_objections, package="vllm")
def vllm_triton(problem: Problem, inputs: Inputs) -> Run:
    """The Triton kernels of vLLM with its tuned configurations, and its own alignment of tokens and sum."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        made: torch.Tensor = fused_experts(layer.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids)
        return made

    return run


def flashinfer_objections(problem: Problem) -> list[str]:
    return missing("flashinfer", "flashinfer-python")


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
