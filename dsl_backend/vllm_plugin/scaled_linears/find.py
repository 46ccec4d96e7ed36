# SPDX-License-Identifier: Apache-2.0
"""Finds the fp8 linear layers of a model that this package serves. `block_scaled` finds those in NVFP4 and MXFP8."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear.scaled import dispatch, tuned
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, MXFP8, ROW_SCALED, TENSOR_SCALED, ScaledFormat
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import options
from dsl_backend.vllm_plugin.options import ServedBy
from dsl_backend.vllm_plugin.projections.find import against_linear_layers
from dsl_backend.vllm_plugin.scaled_linears.operands import block_scale

# By vLLM's group shapes; -1 is all rows or all columns.
X_FORMATS = {(-1, -1): TENSOR_SCALED, (1, -1): ROW_SCALED, (1, 128): GROUP_SCALED}
WEIGHT_FORMATS = {(-1, -1): TENSOR_SCALED, (-1, 1): ROW_SCALED, (1, -1): ROW_SCALED, (128, 128): BLOCK_SCALED}
KERNEL = "fp8_linear"
NOTHING_MEASURED = (
    "nothing measured says that dsl is faster: "
    """--additional-config '{"dsl": {"scaled_linears": "dsl"}}' has dsl serve them"""
)


class Service(NamedTuple):
    """How layers are served.

    Attributes:
        kernel: the name of the kernels that serve; None is the best one that does.
        measured: they serve the numbers of rows for which they were measured to be faster, and vLLM's kernels others.
        powers_of_two: the checkpoint says that the scales of its blocks are powers of two, whatever their dtype.
    """

    kernel: str | None
    measured: bool
    powers_of_two: bool = False


def service_of(vllm_config: Any, target: Target) -> Service:
    asked = options.of(vllm_config)
    measured = asked.scaled_linears is ServedBy.MEASURED
    recorded = tuned.KERNELS.get(target.kernel_arch or "") if measured else None
    return Service(asked.scaled_linears_kernel or recorded, measured, says_powers_of_two(vllm_config))


def says_powers_of_two(vllm_config: Any) -> bool:
    """Whether a checkpoint's config.json has `scale_fmt: ue8m0`, as DeepSeek-V3.1's."""
    hf_config = getattr(getattr(vllm_config, "model_config", None), "hf_config", None)
    quantization = getattr(hf_config, "quantization_config", None)
    return isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0"


def is_recorded(service: Service, target: Target) -> bool:
    """Whether tuning records are of the kernels that serve; they are of a kernel of some GPUs."""
    return target.gpu is not None and service.kernel == tuned.KERNELS.get(target.kernel_arch or "", "")


def reasons_against_engine(vllm_config: Any) -> str:
    """Why no fp8 layer of an engine is served, whatever its model; empty where nothing is against it."""
    invariant = "batch invariance (VLLM_BATCH_INVARIANT) bypasses kernels that vLLM does not know"
    return against_linear_layers(vllm_config, "scaled_linears", invariant=invariant)


def holder_of(layer: Any) -> Any:
    """What has a layer's kernel as `fp8_linear`: its method, or the scheme of a compressed-tensors layer; None."""
    for one in (layer.quant_method, getattr(layer, "scheme", None)):
        if hasattr(getattr(one, KERNEL, None), "config"):
            return one
    return None


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers of a model whose weights are e4m3, with their names; a module of several names comes once."""
    from vllm.model_executor.layers.linear import LinearBase

    from dsl_backend.vllm_plugin.scaled_linears.kernels import ServedByDsl

    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        weight, holder = getattr(module, "weight", None), holder_of(module)
        if getattr(weight, "dtype", None) != torch.float8_e4m3fn:
            continue
        if holder is None or not isinstance(getattr(holder, KERNEL), ServedByDsl):
            yield name, module


def formats_of(config: Any) -> tuple[ScaledFormat, ScaledFormat] | str:
    """Formats of x and of the weight of a kernel's configuration, or why there are none."""
    found = []
    for what, key, known in (
        ("inputs", config.activation_quant_key, X_FORMATS),
        ("weights", config.weight_quant_key, WEIGHT_FORMATS),
    ):
        shape = (key.scale.group_shape.row, key.scale.group_shape.col)
        if key.dtype != torch.float8_e4m3fn or shape not in known:
            return f"{what} of {key.dtype} with scales of {shape[0]}x{shape[1]} are not known"
        found.append(known[shape])
    return found[0], found[1]


def judge(layer: Any, target: Target, service: Service) -> ScaledLinearSpec | str:
    """The spec of a layer that is served, without an activation; or why it stays vLLM's."""
    from dsl_backend.vllm_plugin.scaled_linears.measured import of_quantised

    if service.measured and not is_recorded(service, target):
        return NOTHING_MEASURED
    if is_pre_processed():
        return "its weights were loaded as another kernel had processed them"
    holder = holder_of(layer)
    if holder is None:
        return f"{type(layer.quant_method).__name__} has no kernel that can be replaced"
    if "forward" in vars(layer):
        return f"another forward was put into {type(layer).__name__}"
    theirs = getattr(holder, KERNEL)
    if service.measured and of_quantised(theirs) is None:
        return f"{type(theirs).__name__} has weights or inputs of its own form, which dsl's kernels cannot share"
    config = theirs.config
    formats = formats_of(config)
    if isinstance(formats, str):
        return formats
    found = block_scale(layer)
    scales = torch.float32 if found is None else found[1].dtype
    as_stored = scales == MXFP8.scales
    if scales != torch.float32 and (not as_stored or service.measured):
        return f"scales of the weight are {scales}: float32 is needed"
    n, k = layer.weight.shape
    facts: dict[str, Any] = {"dtype": config.out_dtype or torch.bfloat16, "bias": layer.bias is not None}
    if formats[1] == BLOCK_SCALED and (as_stored or service.powers_of_two) and not service.measured:
        spec = servable(n, k, MXFP8, MXFP8, target, service, **facts)
        if not isinstance(spec, str):
            return spec
    return servable(n, k, *formats, target, service, **facts)


def servable(
    n: int, k: int, x: ScaledFormat, weight: ScaledFormat, target: Target, service: Service, **facts: Any
) -> ScaledLinearSpec | str:
    """The spec of a layer of these formats, or why no kernel serves it."""
    try:
        spec = spec_of(n, k, x, weight, **facts)
        dispatch.choose(spec, target, service.kernel)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return spec


def spec_of(n: int, k: int, x: ScaledFormat, weight: ScaledFormat, **facts: Any) -> ScaledLinearSpec:
    return ScaledLinearSpec(n=n, k=k, x=x, weight=weight, column_major=x.blocked and not x.swizzled, **facts)


def is_pre_processed() -> bool:
    """Whether vLLM loads weights that were exported after a kernel processed them; older versions never do."""
    from vllm.model_executor import utils

    asked = getattr(utils, "is_weights_pre_processed", None)
    return bool(asked()) if asked is not None else False
