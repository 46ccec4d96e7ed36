# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels the experts of a model need, for compiling them before it is served."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsl_backend.checks import short
from dsl_backend.errors import InvalidInput, Unsupported, by_reason
from dsl_backend.experts import block_scaled_configs, dispatch, scaled_configs, weight_only_configs
from dsl_backend.experts.configs import Kind, candidates
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.gemm.sizes import ceil_div
from dsl_backend.gemm.spec import DTYPES
from dsl_backend.quant.format import BLOCK_SCALED, GROUP, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED, ScaledFormat
from dsl_backend.runtime.model import ModelShape, text_of
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target

LAYER = "routed experts"
# Names of the number of experts, of an expert's columns, and of a token's experts, in models' configurations.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
TOPK = ("num_experts_per_tok", "moe_topk", "top_k")
# By the names of transformers. A model whose configuration names none has SiLU.
ACTIVATIONS: Mapping[Any, Activation] = {"gelu": Geglu(), "gelu_pytorch_tanh": Geglu(tanh=True)}


# Formats whose kernels serve where they are named: by the architecture of the kernels, and the format.
NAMED: Mapping[str, Mapping[ScaledFormat, str]] = {
    "sm90": {MXFP4: "cute-weight-only"},
    "sm100": dict.fromkeys((MXFP8, MXFP4, NVFP4), "cute-block-scaled"),
}


def first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these entries that is a positive number."""
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def weight_of(config: Mapping[str, Any]) -> ScaledFormat | str | None:
    """The format of the experts' weights of a model, None in 16 bits; a text says that no kernel has it."""
    found = config.get("quantization_config") or text_of(config).get("quantization_config")
    if found is None:
        return None
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == "fp8" and block == [GROUP, GROUP]:
        return BLOCK_SCALED
    if method == "mxfp4":
        return MXFP4
    served: ScaledFormat | None = None
    if method == "modelopt":
        served = {"NVFP4": NVFP4, "MXFP8": MXFP8}.get(str(found.get("quant_algo")).upper())
    elif method == "compressed-tensors":
        served = of_groups(found.get("config_groups") or {})
    return served or (
        f"quantization_config {method!r} is not served: e4m3 with scales of {GROUP}x{GROUP} blocks or of channels, "
        f"MXFP8, MXFP4 and NVFP4 are"
    )


def of_groups(groups: Mapping[str, Mapping[str, Any]]) -> ScaledFormat | None:
    """The format of all of compressed-tensors' groups; None where kernels have none of it, or there are several."""
    found = {of_group(group) for group in groups.values()}
    return found.pop() if len(found) == 1 else None


def of_group(group: Mapping[str, Any]) -> ScaledFormat | None:
    """The format of a group's weights; None where kernels have none of it."""
    weights = group.get("weights") or {}
    size = weights.get("group_size")
    kind = tuple(map(weights.get, ("type", "num_bits", "strategy")))
    if kind == ("float", 8, "channel"):
        return ROW_SCALED
    if kind == ("float", 8, "block") and weights.get("block_structure") == [GROUP, GROUP]:
        return BLOCK_SCALED
    if kind == ("float", 8, "group") and size == MXFP8.block_columns and "uint8" in str(weights.get("scale_dtype")):
        return MXFP8
    # Without a format of the inputs, these stay in 16 bits.
    if kind == ("float", 4, "tensor_group") and size == NVFP4.block_columns and group.get("input_activations"):
        return NVFP4
    return None


def spec_of(model: ModelShape) -> ExpertsSpec | str | None:
    """The experts of a model as the first rank has them; a text says why they are no spec.

    None where the model has no experts.
    """
    text, dtype = text_of(model.config), getattr(torch, model.dtype)
    experts, width, topk = (first(text, names) for names in (EXPERTS, WIDTHS, TOPK))
    weight = weight_of(model.config)
    if experts is None or topk is None:
        return None
    if isinstance(weight, str):
        return weight
    if weight == MXFP4 and model.experts_kernel == NAMED["sm90"][MXFP4]:
        weight = MXFP4_TILED
    if width is None:
        return "the model's configuration does not say how wide they are"
    if dtype not in DTYPES:
        return f"dtype {model.dtype} is not one of {', '.join(map(short, DTYPES))}"
    ranks, columns = model.expert_parallel, 1 if model.expert_parallel > 1 else model.tensor_parallel
    is_gpt_oss = text.get("model_type") == "gpt_oss"
    activation = ACTIVATIONS.get(text.get("hidden_activation") or text.get("hidden_act"), Swiglu())
    try:
        return ExpertsSpec(
            # Where they cannot be shared evenly, vLLM's first ranks have one more.
            num_experts=ceil_div(experts, ranks),
            hidden_size=model.hidden_size,
            intermediate_size=width // columns,
            topk=topk,
            dtype=dtype,
            activation=SWIGLU_OAI if is_gpt_oss else activation,
            interleaved=is_gpt_oss,
            w13_bias=is_gpt_oss,
            w2_bias=is_gpt_oss,
            global_experts=experts if ranks > 1 else None,
            weight=weight,
        )
    except InvalidInput as error:
        return str(error)


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    """The kernels of a model's experts, for any number of tokens."""
    spec = spec_of(model)
    if isinstance(spec, ExpertsSpec):
        yield from precompile_specs_of(spec, target, model.experts_kernel)


def precompile_specs_of(spec: ExpertsSpec, target: Target, kernel: str | None = None) -> Iterator[PrecompileSpec]:
    """The kernels of a layer, for any number of tokens; none where no CuTe DSL kernel serves it.

    Args:
        kernel: a name from the dispatch table; by default the best that serves.
    """
    try:
        name = dispatch.choose(spec, target, kernel).name
    except Unsupported:
        return
    if not name.startswith("cute"):
        return
    # Imports CuTe DSL.
    from dsl_backend.experts.cute import block_scaled_host, host, scaled_host, weight_only_host

    if name == "cute-block-scaled":
        for config in block_scaled_configs.candidates(spec, target):
            key = block_scaled_host.key_of(spec, config)
            yield PrecompileSpec("experts", block_scaled_host.build, key, target)
    elif name == "cute-weight-only":
        for few in weight_only_configs.candidates(spec, target):
            yield PrecompileSpec("experts", weight_only_host.build, weight_only_host.key_of(spec, few), target)
    elif name in dispatch.SCALED:
        for_few = name == "cute-scaled-decode"
        found = (scaled_configs.decode_candidates if for_few else scaled_configs.candidates)(spec, target)
        for scaled_config in found:
            yield PrecompileSpec("experts", scaled_host.build, scaled_host.key_of(spec, scaled_config), target)
    else:
        kind = next((one for one in Kind if name == f"cute-{one.value}"), None)
        for any_config in candidates(spec, target, kind):
            yield PrecompileSpec("experts", host.build, host.key_of(spec, any_config), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """Layer -> why CuTe DSL's kernels do not serve it."""
    spec = spec_of(model)
    if spec is None:
        return {}
    if isinstance(spec, str):
        return {LAYER: [spec]}
    reasons = reasons_against(spec, target, model.experts_kernel)
    return {LAYER: reasons} if reasons else {}


def reasons_against(spec: ExpertsSpec, target: Target, kernel: str | None) -> list[str]:
    """Why no CuTe DSL kernel, or not the one that is named, serves a layer; empty where one does."""
    if kernel is not None:
        try:
            dispatch.choose(spec, target, kernel)
        except Unsupported as error:
            return list(by_reason(error.objections))
        return []
    named = NAMED.get(target.kernel_arch or "", {}).get(spec.weight) if spec.weight is not None else None
    if named is not None:
        return [f"weights in {spec.weight} need the kernel's name: --experts-kernel {named}"]
    if spec.mma_scaled:
        return dispatch.cute_block_scaled(spec, target)
    return (dispatch.cute if spec.weight is None else dispatch.cute_scaled)(spec, target)
