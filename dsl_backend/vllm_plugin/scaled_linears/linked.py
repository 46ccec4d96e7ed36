# SPDX-License-Identifier: Apache-2.0
"""Finds the MLPs whose quantised layers can be linked: gate and up projection, activation and down projection."""

from collections import Counter
from typing import Any

from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.gemm.activation import Activation
from dsl_backend.linear.scaled import dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import TENSOR_SCALED
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.fused_mlp import forward_source
from dsl_backend.vllm_plugin.fused_mlp.find import against_gate
from dsl_backend.vllm_plugin.scaled_linears import block_scaled
from dsl_backend.vllm_plugin.scaled_linears.find import KERNEL, NOTHING_MEASURED, holder_of, spec_of


def ours_of(layer: Any) -> Any:
    """This package's kernel of a quantised linear layer; None where vLLM has one, or it is no such layer."""
    from dsl_backend.vllm_plugin.scaled_linears.kernels import ServedByDsl

    if not hasattr(layer, "quant_method"):
        return None
    kernel = getattr(holder_of(layer), KERNEL, None)
    return kernel if isinstance(kernel, ServedByDsl) else block_scaled.kernel_of(layer)


def linked(
    parent: nn.Module, activation: str, owners: Counter[int], target: Target
) -> tuple[str, str | None, ScaledLinearSpec, tuple[Activation, bool]] | str:
    """(gate and up projection, down projection, spec of the former, its activation), or why they cannot be linked.

    The down projection is None where only the activation joins: something between them needs its 16-bit result.

    Args:
        activation: the name of its attribute.
        owners: id of a module -> number of modules that have it as a child.
    """
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    from dsl_backend.vllm_plugin.fused_mlp.method import activation_of
    from dsl_backend.vllm_plugin.scaled_linears.measured import Measured, ranges_of

    children: dict[str, Any] = dict(parent.named_children())
    served = {name: kernel for name, child in children.items() if (kernel := ours_of(child)) is not None}
    gates = [name for name in served if type(children[name]) is MergedColumnParallelLinear]
    if len(gates) != 1:
        return f"{type(parent).__name__} has {len(gates)} merged projections of dsl's: 1 is needed"
    (gate,) = gates
    if reasons := against_gate(parent, gate, activation, owners, (parent, getattr(parent, activation))):
        return "; ".join(reasons)
    known = activation_of(children[activation])
    if known is None:
        return f"{type(children[activation]).__name__} is not a known activation"
    kernel, layer = served[gate], children[gate]
    downs = [name for name in served if type(children[name]) is RowParallelLinear]
    down = next((name for name in downs if takes(parent, activation, name, children[name], kernel, owners)), None)
    rows, k = layer.output_size_per_partition, layer.input_size_per_partition
    facts = {"activation": known[0], "interleaved": known[1], "bias": layer.bias is not None}
    try:
        spec = spec_of(
            rows // 2,
            k,
            kernel.x_kind,
            kernel.weight_kind,
            out=None if down is None else kernel.x_kind,
            dtype=kernel.out_dtype,
            **facts,
        )
        dispatch.choose(spec, target, kernel.kernel)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    if isinstance(kernel, Measured) and not ranges_of(kernel.theirs, spec, target, handed=False):
        return NOTHING_MEASURED
    return gate, down, spec, known


def takes(parent: Any, activation: str, name: str, down: Any, kernel: Any, owners: Counter[int]) -> bool:
    """Whether a down projection can take what the gate and up projection quantises for it."""
    theirs = ours_of(down)
    kind: Any = type(parent)
    one_scale = theirs.x_kind == TENSOR_SCALED
    return (
        (theirs.x_kind, theirs.weight_kind) == (kernel.x_kind, kernel.weight_kind)
        # A computed scale of the whole tensor needs all rows.
        and (not one_scale or bool(theirs.config.activation_quant_key.scale.static))
        and getattr(down, "input_scale_ub", None) is None
        and down.input_is_parallel
        and owners[id(down)] == 1
        and not getattr(down, "requires_unquantized_input", False)
        and forward_source.objection(kind, activation, name) is None
    )
