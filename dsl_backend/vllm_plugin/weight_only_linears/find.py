# SPDX-License-Identifier: Apache-2.0
"""Finds the linear layers of a model with weights of 4 or 8 bits that this package serves.

GPTQ's, AWQ's and compressed-tensors' methods have a kernel of mixed precision, which vLLM chooses when it makes a layer
and uses for the first time when weights are processed: until then it can be replaced.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from dsl_backend.checks import short
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear.weight_only import dispatch
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import options, served_layers
from dsl_backend.vllm_plugin.projections.find import against_linear_layers
from dsl_backend.vllm_plugin.scaled_linears.find import is_pre_processed

OPTION = "weight_only_linears"
SLOWER = f"dsl's kernels take longer than vLLM's with many rows: {options.asked(OPTION)}"
# By the names of vLLM's types: (bits, whether groups have zero points).
WEIGHT_TYPES = {"uint4b8": (4, False), "uint8b128": (8, False), "uint4": (4, True)}


def reasons_against_engine(vllm_config: Any) -> str:
    """Why no such layer of an engine is served, whatever its model; empty where nothing is against it."""
    invariant = "batch invariance (VLLM_BATCH_INVARIANT): the split of a sum depends on the number of rows"
    return against_linear_layers(vllm_config, OPTION, invariant=invariant, measured=SLOWER)


def kernels_base() -> Any:
    """VLLM's base class of kernels of mixed precision; None in versions without one."""
    try:
        from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    except ImportError:
        return None
    return MPLinearKernel


def holder_of(layer: Any) -> Any:
    """What has a layer's kernel; None: it has none of mixed precision."""
    return served_layers.holder_of(layer, kernels_base())


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers of a model that have a kernel of mixed precision, with their names."""
    if kernels_base() is None:
        return iter(())
    # Derives from vLLM's class.
    from dsl_backend.vllm_plugin.weight_only_linears.kernel import WeightOnlyKernel

    return served_layers.layers_of(model, kernels_base(), WeightOnlyKernel)


def kind_of(config: Any) -> WeightOnlyFormat | str:
    """The format of the weights of a kernel's configuration, or why it is none of ours."""
    weight_type = str(config.weight_type)
    if weight_type not in WEIGHT_TYPES:
        return f"weights of {weight_type}: one of {', '.join(WEIGHT_TYPES)} is needed"
    bits, zero_points = WEIGHT_TYPES[weight_type]
    if bool(config.zero_points) != zero_points:
        return f"weights of {weight_type} {'with' if config.zero_points else 'without'} zero points are not known"
    try:
        group = None if config.group_size == -1 else config.group_size
        return WeightOnlyFormat(bits=bits, group=group, zero_points=zero_points)
    except InvalidInput as error:
        return str(error)


def judge(layer: Any, target: Target) -> WeightOnlyGemmSpec | str:
    """The spec of a layer that is served; or why it stays vLLM's."""
    if is_pre_processed():
        return "its weights were loaded as another kernel had processed them"
    if "forward" in vars(layer):
        return f"another forward was put into {type(layer).__name__}"
    holder = holder_of(layer)
    config = holder.kernel.config
    if getattr(config, "has_g_idx", False) or getattr(getattr(holder, "quant_config", None), "desc_act", False):
        return "columns are ordered by activation (act-order, desc_act): groups of neighbouring columns are needed"
    if config.act_type != layer.params_dtype:
        return f"activations of {short(config.act_type)} with scales of {short(layer.params_dtype)}: one is needed"
    kind = kind_of(config)
    if isinstance(kind, str):
        return kind
    k, n = config.partition_weight_shape
    if kind.group is None and config.full_weight_shape[0] != k and kind.zero_points:
        return "zero points of rows that are divided among ranks are not known"
    try:
        spec = WeightOnlyGemmSpec(n=n, k=k, dtype=config.act_type, kind=kind, bias=layer.bias is not None)
        dispatch.choose(spec, target)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return spec
