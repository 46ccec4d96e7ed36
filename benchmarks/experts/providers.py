# SPDX-License-Identifier: Apache-2.0
"""The providers of routed experts: this package, vLLM's Triton and DeepGEMM kernels, FlashInfer's CUTLASS kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from dsl_backend.experts import api, dispatch
from dsl_backend.providers import Run, provider
from dsl_backend.quant.format import BLOCK_SCALED, GROUP
from dsl_backend.runtime import target as targets

from ..columns import missing, own_triton, reasons
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
    four_bit = ["weights in 4 bits are not timed with it"] if problem.spec.weight_only else []
    return four_bit + missing("vllm")


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


def up_first(rows: torch.Tensor) -> torch.Tensor:
    """Weights or scales of gate and up rows, in their other order."""
    return torch.cat([half.view(torch.uint8) for half in rows.chunk(2, 1)[::-1]], 1).view(rows.dtype)


def flashinfer_objections(problem: Problem) -> list[str]:
    served = problem.weight in (None, BLOCK_SCALED)
    found = [] if served else ["weights in 8 and 4 bits are timed with it in 128x128 blocks alone"]
    return found + missing("flashinfer", "flashinfer-python")


@provider("experts", name="FlashInfer CUTLASS", objections=flashinfer_objections, package="flashinfer-python")
def flashinfer_cutlass(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's CUTLASS kernels, autotuned. They need up rows first: the weights are repacked before the timing.

    Of weights in 128x128 blocks they get x in 16 bits, and quantise it themselves, as vLLM calls them.
    """
    from flashinfer.autotuner import autotune
    from flashinfer.fused_moe import cutlass_fused_moe

    turned = [up_first(layer.w13) for layer in inputs.layers]
    scales: list[list[torch.Tensor]] = [[] for _ in inputs.layers]
    options = {} if problem.weight is None else {"use_deepseek_fp8_block_scale": True}
    if problem.weight is not None:
        for found, layer in zip(scales, inputs.layers, strict=True):
            assert layer.scales.w13 is not None
            assert layer.scales.w2 is not None
            found += [up_first(layer.scales.w13), layer.scales.w2]

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        cutlass_fused_moe(
            layer.x,
            layer.topk_ids,
            layer.topk_weights,
            turned[index],
            layer.w2,
            problem.dtype,
            quant_scales=scales[index],
            output=layer.out,
            **options,
        )
        return layer.out

    with autotune(True):
        run(0)
    return run


def deep_gemm_objections(problem: Problem) -> list[str]:
    if problem.weight != BLOCK_SCALED:
        return ["weights that are not in e4m3 with scales of 128x128 blocks"]
    if reasons := missing("vllm"):
        return reasons
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    return [] if is_deep_gemm_supported() else ["vLLM finds no DeepGEMM for this GPU"]


def deep_gemm_kernels(problem: Problem, layers: Sequence[Layer], device: torch.device) -> list[Any]:
    """A kernel of vLLM's for each layer: its quantisation of x, its permutation, DeepGEMM, and its sum."""
    from vllm.model_executor.layers.fused_moe import config, modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    facts = config.FusedMoEConfig(
        num_experts=problem.experts,
        experts_per_token=problem.topk,
        hidden_dim=problem.hidden,
        intermediate_size=problem.width,
        num_local_experts=problem.experts,
        num_logical_experts=problem.experts,
        activation=MoEActivation.SILU,
        device=device,
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=problem.dtype,
    )
    return [
        modular_kernel.FusedMoEKernel(
            MoEPrepareAndFinalizeNoDPEPModular(), DeepGemmExperts(facts, vllm_scheme(problem, layer))
        )
        for layer in layers
    ]


@provider("experts", name="vLLM DeepGEMM", objections=deep_gemm_objections, package="vllm")
def vllm_deep_gemm(problem: Problem, inputs: Inputs) -> Run:
    """DeepGEMM's grouped products as vLLM calls them: x is quantised and gathered before them, in the timing."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    device = inputs.layers[0].x.device
    if not is_workspace_manager_initialized():
        init_workspace_manager(device)
    kernels = deep_gemm_kernels(problem, inputs.layers, device)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        made: torch.Tensor = kernels[index].apply(
            hidden_states=layer.x,
            w1=layer.w13,
            w2=layer.w2,
            topk_weights=layer.topk_weights,
            topk_ids=layer.topk_ids,
            activation=MoEActivation.SILU,
            global_num_experts=problem.experts,
            expert_map=None,
            apply_router_weight_on_input=False,
        )
        return made

    return run


own_triton("experts", ours, objections, "experts/triton/kernels.py", "experts/triton/scaled.py")
