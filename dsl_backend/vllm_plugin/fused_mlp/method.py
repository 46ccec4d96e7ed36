# SPDX-License-Identifier: Apache-2.0
"""The method of a fused gate/up projection, and the module that replaces the activation behind it."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul, SiluAndMulWithClamp, SwigluOAIAndMul
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.utils.torch_utils import aux_stream

from dsl_backend.gemm.activation import Activation, Geglu, Swiglu, decoded, encoded
from dsl_backend.linear import api
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import fused_is_faster
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.op import register_op
from dsl_backend.runtime.workspace import stream_handle


def activation_of(module: nn.Module) -> tuple[Activation, bool] | None:
    """The spec of one of vLLM's activations, and whether its input interleaves gate and up; None for others.

    Raises:
        InvalidInput: its parameters are not finite.
    """
    # Exactly these classes: a derived one may compute something else.
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


# One SM in SPARED is left free for the router of a mixture of experts while shared experts run beside it. The router's
# first kernel is one CTA with 150 KB of shared memory. With all SMs taken it waited for the shared experts to end: 5 us
# of each layer of DeepSeek-V2-Lite, 4 % of a step with one request on an H200.
SPARED = 8

# vLLM's activation of each kind that is fused in this process, by the operator's arguments for it.
_activations: dict[tuple[str, tuple[float, ...], bool], Any] = {}


def activated(activation: Any, both: torch.Tensor) -> torch.Tensor:
    """Call vLLM's own activation kernel on [rows, 2 n], whatever vLLM's setting for custom operators is."""
    # vLLM may have chosen the form for torch.compile; outside of a compiled graph that is several kernels.
    made: torch.Tensor = activation.forward_cuda(both) if both.is_cuda else activation.forward_native(both)
    return made


def on_second_stream(device: torch.device) -> bool:
    """Whether the current stream is vLLM's second one, on which shared experts run beside the router."""
    second = aux_stream() if device.type == "cuda" else None
    return second is not None and second.cuda_stream == stream_handle(device)


def spare_sms(device: torch.device) -> int:
    """SMs that a linear layer leaves to kernels on another stream."""
    return targets.of_device(device).sm_count // SPARED if on_second_stream(device) else 0


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    """Projection and activation as one kernel, or as vLLM's two where those were measured to be faster; [rows, n].

    It is a registered operator because the number of rows is known here and not to torch.compile. A CUDA graph keeps
    the choice that was made for its number of rows.
    """
    (rows, k), n = x.shape, weight.shape[0] // 2
    if not batch_invariant and not fused_is_faster(rows, n, k, x.dtype, targets.of_device(x.device)):
        return activated(
            _activations[activation, tuple(parameters), interleaved], nn.functional.linear(x, weight, bias)
        )
    return api.linear(
        x,
        weight,
        bias,
        activation=decoded(activation, parameters),
        interleaved=interleaved,
        batch_invariant=batch_invariant,
        spare_sms=spare_sms(x.device),
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
    """The method of a projection that applies the activation too.

    The weight stays vLLM's parameter in vLLM's layout. It is looked up at each call, since it may have been reloaded.

    Args:
        spec: of the layer, with this rank's sizes.
        activation: vLLM's.
    """

    def __init__(self, spec: LinearSpec, activation: nn.Module) -> None:
        super().__init__()
        self.activation, self.parameters = encoded(spec.activation)
        self.interleaved, self.batch_invariant = spec.interleaved, spec.batch_invariant
        _activations[self.activation, tuple(self.parameters), self.interleaved] = activation

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Does nothing. On a CPU vLLM's method would pack the weight and remove it."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [..., k] to [..., n]; the layer's weight is [2 n, k]."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out: torch.Tensor = GATED_LINEAR(
            rows, layer.weight, bias, self.activation, self.parameters, self.interleaved, self.batch_invariant
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class FusedActivation(nn.Module):
    """Replaces an activation whose projection applies it already: returns its input.

    Args:
        activation: vLLM's, applied to inputs of another width.
        width: of what the fused projection returns.
    """

    def __init__(self, activation: nn.Module, width: int) -> None:
        super().__init__()
        self.activation, self.width = activation, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] == self.width else self.activation(x)
