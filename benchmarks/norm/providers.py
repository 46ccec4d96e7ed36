# SPDX-License-Identifier: Apache-2.0
"""The providers of RMSNorm: this package and its Triton kernel, quack, Liger, vLLM, FlashInfer and torch."""

from collections.abc import Callable

import torch
from dsl_backend.norm import api, dispatch
from dsl_backend.norm.spec import FP8, FP8_MAX, MIN_SCALE, NormTensors, Scaling
from dsl_backend.providers import Launch, Run, provider
from dsl_backend.quant.format import GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP
from dsl_backend.runtime import target as targets

from ..columns import missing, needs_gpu, own_triton, reasons
from .problems import EPS, Inputs, Problem


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec(), targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """`api.rms_norm`, with a kernel from the dispatch table; by default the one that dispatch chooses."""

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.rms_norm(
            layer.x,
            layer.weight,
            layer.out,
            residual=layer.residual,
            residual_out=layer.residual_out,
            eps=EPS,
            scale=layer.scale,
            scale_out=layer.scale_out,
            kernel=kernel,
        )

    return run


def in_place(function: Callable[[NormTensors], torch.Tensor], inputs: Inputs) -> Launch:
    """A launch of what overwrites its inputs, on copies of them.

    The first results are checked: later launches normalise what the ones before have left.
    """
    layers, first = [], {}
    for given in inputs.layers:
        assert given.residual is not None
        layer = given._replace(x=given.x.clone(), residual=given.residual.clone())
        result = function(layer)
        first[result.data_ptr()] = result.float()
        layers.append(layer)
    return Launch(lambda index: function(layers[index]), lambda result: first[result.data_ptr()])


def of_16_or_32_bits(problem: Problem) -> list[str]:
    return [] if problem.scaling is Scaling.NONE else ["has no 8-bit output"]


def quack_objections(problem: Problem) -> list[str]:
    return missing("quack", "quack-kernels") + of_16_or_32_bits(problem)


@provider("norm", name="quack", objections=quack_objections, package="quack-kernels")
def quack(problem: Problem, inputs: Inputs) -> Run:
    """Quack's CuTe DSL kernel, called without its autograd wrapper and with preallocated outputs."""
    from quack.rmsnorm import _rmsnorm_fwd

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        _rmsnorm_fwd(
            layer.x, layer.weight, layer.out, residual=layer.residual, residual_out=layer.residual_out, eps=EPS
        )
        return layer.out

    return run


# Liger's name for arithmetic in float32 that is rounded once.
LIGER_CASTING = "gemma"


def liger_objections(problem: Problem) -> list[str]:
    return missing("liger_kernel", "liger-kernel") + of_16_or_32_bits(problem)


@provider("norm", name="Liger", objections=liger_objections, package="liger-kernel")
def liger(problem: Problem, inputs: Inputs) -> Run:
    """Liger's Triton kernels, without their autograd functions; they allocate the outputs."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        if layer.residual is not None:
            made = fused_add_rms_norm_forward(layer.x, layer.residual, layer.weight, EPS, 0.0, LIGER_CASTING)
        else:
            made = rms_norm_forward(layer.x, layer.weight, EPS, 0.0, LIGER_CASTING, None)
        result: torch.Tensor = made[0]
        return result

    return run


def vllm_objections(problem: Problem) -> list[str]:
    if found := missing("vllm"):
        return found
    import vllm._custom_ops  # noqa: F401

    return [] if hasattr(torch.ops._C, "rms_norm") else ["this vLLM has no CUDA kernels"]


@provider("norm", name="vLLM", objections=vllm_objections, package="vllm")
def vllm(problem: Problem, inputs: Inputs) -> Launch | Run:
    """VLLM's CUDA kernels. Those with a residual overwrite it, and those without a scale x too."""
    import vllm._custom_ops  # noqa: F401

    ops = torch.ops._C

    def launch(layer: NormTensors) -> torch.Tensor:
        x, residual, weight, scale, out, _, scale_out = layer
        if problem.scaling is Scaling.GROUP:
            ops.rms_norm_per_block_quant(out, x, weight, scale_out, EPS, None, residual, GROUP, True)
        elif scale_out is not None:
            ops.rms_norm_dynamic_per_token_quant(out, x, weight, scale_out, EPS, None, residual)
        elif scale is not None and residual is not None:
            ops.fused_add_rms_norm_static_fp8_quant(out, x, residual, weight, scale, EPS)
        elif scale is not None:
            ops.rms_norm_static_fp8_quant(out, x, weight, scale, EPS)
        elif residual is not None:
            ops.fused_add_rms_norm(x, residual, weight, EPS)
            return x
        else:
            ops.rms_norm(out, x, weight, EPS)
        return out

    return in_place(launch, inputs) if problem.residual else lambda index: launch(inputs.layers[index])


def flashinfer_objections(problem: Problem) -> list[str]:
    found = missing("flashinfer", "flashinfer-python")
    found += [] if problem.scaling is Scaling.NONE else ["is measured without 8-bit outputs"]
    return found + ([] if problem.dtype != torch.float32 else ["has no float32"])


@provider("norm", name="FlashInfer", objections=flashinfer_objections, package="flashinfer-python")
def flashinfer(problem: Problem, inputs: Inputs) -> Launch | Run:
    """FlashInfer's kernels. The one with a residual overwrites it and x."""
    from flashinfer import norm

    def fused(layer: NormTensors) -> torch.Tensor:
        norm.fused_add_rmsnorm(layer.x, layer.residual, layer.weight, EPS)
        return layer.x

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        norm.rmsnorm(layer.x, layer.weight, EPS, out=layer.out)
        return layer.out

    return in_place(fused, inputs) if problem.residual else run


@provider("norm", name="torch", package="torch")
def eager(problem: Problem, inputs: Inputs) -> Run:
    """Eager torch: an addition, a norm, and a quantization."""

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        x = layer.x
        if layer.residual is not None:
            x = torch.add(x, layer.residual, out=layer.residual_out)
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], layer.weight, EPS)
        if layer.scale is not None:
            return (y.float() / layer.scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        if layer.scale_out is None:
            return y
        wide = y.float()
        if problem.scaling is Scaling.GROUP:
            groups = wide.unflatten(-1, (-1, GROUP))
            layer.scale_out.copy_(groups.abs().amax(-1).clamp(min=LEAST_OF_GROUP) / FP8_MAX)
            return (groups / layer.scale_out.unsqueeze(-1)).flatten(-2).to(FP8)
        torch.clamp(wide.abs().amax(-1, keepdim=True) / FP8_MAX, min=MIN_SCALE, out=layer.scale_out)
        return (wide / layer.scale_out).to(FP8)

    return run


@provider("norm", name="torch.compile", objections=needs_gpu, package="torch")
def compiled(problem: Problem, inputs: Inputs) -> Run:
    """The kernel that torch.compile makes for the exact shape, from the definition in float32."""
    # After a few shapes torch.compile silently falls back to eager mode.
    torch.compiler.reset()

    def norm(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        z = x if residual is None else x + residual
        wide = z.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        y = y if weight is None else y * weight.float()
        kept = () if residual is None else (z,)
        if scale is not None:
            return (y * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), *kept
        if problem.scaling is Scaling.GROUP:
            groups = y.unflatten(-1, (-1, GROUP))
            found = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_OF_GROUP) / FP8_MAX
            scaled = (groups * found.reciprocal()).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8)
            return scaled, found.squeeze(-1).t().contiguous(), *kept
        if problem.scaling is Scaling.TOKEN:
            found = (y.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=MIN_SCALE)
            return (y * found.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), found, *kept
        return y.to(x.dtype), *kept

    made = torch.compile(norm, dynamic=False, mode="max-autotune-no-cudagraphs")

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        result: torch.Tensor = made(layer.x, layer.residual, layer.weight, layer.scale)[0]
        return result

    return run


own_triton("norm", ours, objections, "norm/triton/kernel.py")
