# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of a projection's method and of the activation behind it once the two are one layer."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul, SiluAndMulWithClamp, SwigluOAIAndMul
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.utils.torch_utils import aux_stream

from dsl_backend.linear import api, ops
from dsl_backend.linear.spec import Activation, Geglu, LinearSpec, Swiglu
from dsl_backend.linear.tuned import fused_is_faster
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.op import register_op


def activation_of(module: nn.Module) -> tuple[Activation, bool] | None:
    """One of vLLM's activations as ours, and whether gate and up take turns in what it reads; None of others.

    Raises:
        InvalidInput: its parameters are not finite.
    """
    # Exactly these: what derives from one may compute something else.
    kind = type(module)
    made: Any = module
    if kind is SiluAndMul:
        return Swiglu(), False
    if kind is GeluAndMul:
        return Geglu(tanh=made.approximate == "tanh"), False
    if kind is SiluAndMulWithClamp:
        return Swiglu(alpha=made.alpha, beta=made.beta, limit=made.swiglu_limit), False
    if kind is SwigluOAIAndMul:
        return Swiglu(alpha=made.alpha, beta=1.0, limit=made.limit), True
    return None


# One SM of so many is left to the router where shared experts run beside it. The first of its kernels is one block of
# 150 KB, and waited for shared experts to end where they had all SMs: 5 us of each layer of DeepSeek-V2-Lite's, 4 % of
# a step with one request on an H200.
SPARED = 8

# vLLM's activation of each kind that is linked in this process, by what an operator is told of it.
_activations: dict[tuple[str, tuple[float, ...], bool], Any] = {}


def activated(activation: Any, both: torch.Tensor) -> torch.Tensor:
    """What vLLM's own kernel makes of [rows, 2 n], whatever is decided about its custom operators."""
    # In the shape that torch.compile takes apart, which is what vLLM may have chosen, it would be several kernels here.
    made: torch.Tensor = activation.forward_cuda(both) if both.is_cuda else activation.forward_native(both)
    return made


def on_second_stream(device: torch.device) -> bool:
    """Whether this is vLLM's second stream, on which a layer's shared experts run beside what routes to the others."""
    return device.type == "cuda" and aux_stream() == torch.cuda.current_stream(device)


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    """One kernel, or vLLM's two where they were measured to be faster for so many rows; [rows, n].

    An operator, since the number of rows is known here and not to torch.compile. A CUDA graph keeps what was chosen for
    its rows.
    """
    (rows, k), n = x.shape, weight.shape[0] // 2
    target = targets.detect(x.device)
    if not batch_invariant and not fused_is_faster(rows, n, k, x.dtype, target):
        return activated(
            _activations[activation, tuple(parameters), interleaved], nn.functional.linear(x, weight, bias)
        )
    return api.linear(
        x,
        weight,
        bias,
        activation=ops.decoded(activation, parameters),
        interleaved=interleaved,
        batch_invariant=batch_invariant,
        spare_sms=target.sm_count // SPARED if on_second_stream(x.device) else 0,
    )


def gated_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


GATED_LINEAR = register_op("gated_linear", gated_linear, fake=gated_linear_fake)


class GatedLinearMethod(UnquantizedLinearMethod):
    """A projection's method that returns what its activation would make of the product.

    The weight stays where and as vLLM has it, and is looked up at each call: it may have been reloaded.

    Args:
        spec: of the layer, as far as this rank has it.
        activation: vLLM's.
    """

    def __init__(self, spec: LinearSpec, activation: nn.Module) -> None:
        super().__init__()
        self.activation, self.parameters = ops.encoded(spec.activation)
        self.interleaved, self.batch_invariant = spec.interleaved, spec.batch_invariant
        _activations[self.activation, tuple(self.parameters), self.interleaved] = activation

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing; on a CPU vLLM would pack the weight and remove it."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of x [..., k]; [..., n], where the layer's weight is [2 n, k]."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out: torch.Tensor = GATED_LINEAR(
            rows, layer.weight, bias, self.activation, self.parameters, self.interleaved, self.batch_invariant
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class PassedOn(nn.Module):
    """In an activation's place: what the projection returns has been through it.

    Args:
        activation: vLLM's, for whatever else might be given to it.
        width: of what the projection returns.
    """

    def __init__(self, activation: nn.Module, width: int) -> None:
        super().__init__()
        self.activation, self.width = activation, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] == self.width else self.activation(x)
