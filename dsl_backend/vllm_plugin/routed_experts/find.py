# SPDX-License-Identifier: Apache-2.0
"""Finds the routed experts of a model that this package serves, or why it does not."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import dispatch, tuned
from dsl_backend.experts.spec import MAX_TOKENS, ExpertsSpec, RouterWeights
from dsl_backend.quant.format import BLOCK_SCALED, GROUP, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED, ScaledFormat
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat, options
from dsl_backend.vllm_plugin.options import ServedBy

# What is asked for by `--moe-backend` and is still served here, if `experts` is dsl.
SAME_WEIGHTS = ("auto", "triton")
# vLLM's methods whose weights are served: in 16 bits, and in e4m3.
UNQUANTISED = "UnquantizedFusedMoEMethod"
SCALED = ("Fp8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")
# Those of weights whose scales are factors of SM100's matrix products.
MMA_SCALED = {
    "GptOssMxfp4MoEMethod": MXFP4,
    "Mxfp4MoEMethod": MXFP4,
    "ModelOptMxFp8FusedMoE": MXFP8,
    "CompressedTensorsW8A8Mxfp8MoEMethod": MXFP8,
    "ModelOptNvFp4FusedMoE": NVFP4,
    "CompressedTensorsW4A4Nvfp4MoEMethod": NVFP4,
}
# SM100's kernels of these, which have not run on a GPU.
MMA_SCALED_KERNEL = "cute-block-scaled"
# Kernels of MXFP4 under tokens in 16 bits: SM90's are slow for many of them, SM100's have not run on a GPU.
WEIGHT_ONLY_KERNEL = "cute-weight-only"
# Where methods have vLLM's choice of kernels.
BACKENDS = ("unquantized_backend", "fp8_backend")


class Service(NamedTuple):
    """How a layer is served.

    Attributes:
        spec: of the layer, with this rank's sizes.
        kernels: the class that vLLM makes for it.
        ranges: of tokens that it serves; empty are all.
        kernel: the name of this package's kernels that serve; None is the best one that does.
    """

    spec: ExpertsSpec
    kernels: type
    ranges: tuple[tuned.ProblemShape, ...] = ()
    kernel: str | None = None


def reasons_against_engine(vllm_config: Any) -> str:
    """Why no layer of an engine is served, whatever its model; empty where nothing is against it."""
    reasons = []
    if options.of(vllm_config).experts is ServedBy.VLLM:
        reasons.append("additional_config['dsl']['experts'] is vllm")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA (lora_config) adds to what both products return")
    if compat.weights_are_processed():
        reasons.append("the weights were laid out by another process, for kernels that are not known here")
    return "; ".join(reasons)


def routed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of routed experts of a model, with their names; none of those that are served already."""
    if not compat.has_routed_experts():
        return
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from dsl_backend.vllm_plugin.routed_experts.kernels import DSLExperts

    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            kernels = getattr(module.quant_method, "experts_cls", None)
            if not (isinstance(kernels, type) and issubclass(kernels, DSLExperts)):
                yield name, module


def judge(layer: Any, vllm_config: Any, target: Target) -> Service | str:
    """How a layer is served, or why it stays vLLM's."""
    try:
        return judged(layer, vllm_config, target)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    except AttributeError as error:  # a version of vLLM whose layers are others than those that are known
        return f"vLLM's layer is not as it was expected: {error}"


def judged(layer: Any, vllm_config: Any, target: Target) -> Service | str:
    """As `judge`. Raises InvalidInput, Unsupported: no kernel has such a layer."""
    from dsl_backend.vllm_plugin.routed_experts.kernels import scheme_of

    method, moe = layer.quant_method, layer.moe_config
    weight = format_of(layer)
    if isinstance(weight, str):
        return weight
    made = method.moe_kernel is not None or has_no_kernels(method)
    if made or (name_of(method) not in MMA_SCALED and has_kernels_elsewhere(method)):
        return "vLLM has no kernels to replace, or has made them already"
    served_by, kernel = options.of(vllm_config).experts, options.of(vllm_config).experts_kernel
    if reason := reason_against_request(moe, served_by):
        return reason
    if weight == MXFP4 and kernel == WEIGHT_ONLY_KERNEL:
        weight = MXFP4_TILED
        # There it is the reference's format too.
        kernel = None if target.is_cpu else kernel
    kernels = kernels_of(method.experts_cls, weight)
    if isinstance(kernels, str):
        return kernels
    supported, reason = kernels.is_supported_config(kernels, moe, *scheme_of(weight), kernels.activation_format())
    if not supported:
        return str(reason)
    if reason := reason_against_rows(kernels, vllm_config, layer):
        return reason
    spec = spec_of(layer, kernels, weight)
    if spec.mma_scaled and kernel is None and target.kernel_arch == "sm100":
        names = (MMA_SCALED_KERNEL, *([WEIGHT_ONLY_KERNEL] if spec.weight == MXFP4 else []))
        named = " or ".join(map(repr, names))
        return f"{spec.weight} needs experts_kernel {named}: these kernels have not run on a GPU"
    if spec.weight == MXFP4 and kernel is None and target.kernel_arch == "sm90":
        return f"{spec.weight} needs experts_kernel {WEIGHT_ONLY_KERNEL!r}: these kernels are slow for many tokens"
    dispatch.choose(spec, target, kernel)
    service = Service(spec, kernels, kernel=kernel)
    return service if served_by is ServedBy.DSL else measured(service, method, target)


def format_of(layer: Any) -> ScaledFormat | str | None:
    """The format of a layer's weights as they are loaded, None of 16 bits; or why they are not served."""
    method, name = layer.quant_method, name_of(layer.quant_method)
    if not type(method).__module__.startswith("vllm.") or name not in (UNQUANTISED, *SCALED, *MMA_SCALED):
        return (
            f"{name} is not vLLM's method of 16-bit weights, or of e4m3 with scales of blocks or of channels, or of "
            f"MXFP8, MXFP4 or NVFP4"
        )
    if name == UNQUANTISED:
        return None
    if name in MMA_SCALED:
        return "its inputs are not quantised" if getattr(method, "use_a16", False) else MMA_SCALED[name]
    if method.weight_block_size is not None:
        block = list(getattr(method, "moe_block_shape", None) or method.weight_block_size)
        blocks = f"weights have scales of {'x'.join(map(str, block))} blocks: {GROUP}x{GROUP} are served"
        return BLOCK_SCALED if block == [GROUP, GROUP] else blocks
    experts, rows, _ = layer.w13_weight.shape
    if tuple(layer.w13_weight_scale.shape) == (experts, rows, 1):
        return ROW_SCALED
    return "weights have one scale for each expert: 128x128 blocks and channels are served"


def name_of(method: Any) -> str:
    return type(method).__name__


def scales_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of w13 and w2 of a layer with weights in 8 bits."""
    ending = "weight_scale_inv" if hasattr(layer, "w13_weight_scale_inv") else "weight_scale"
    return getattr(layer, f"w13_{ending}"), getattr(layer, f"w2_{ending}")


def backend_name(method: Any) -> str:
    """The attribute of a method that has vLLM's choice of kernels. Raises AttributeError where it has none."""
    for name in BACKENDS:
        if hasattr(method, name):
            return name
    raise AttributeError(f"{type(method).__name__} has none of {', '.join(BACKENDS)}")


def has_no_kernels(method: Any) -> bool:
    """Whether vLLM chose none where others may not be put. Of weights in 8 bits it has none on a CPU without AMX."""
    return method.experts_cls is None and type(method).__name__ == UNQUANTISED


def has_kernels_elsewhere(method: Any) -> bool:
    """Whether a method has its kernels outside of vLLM's classes for them, as 0.26's has them on a CPU."""
    return bool(getattr(method, backend_name(method)).name == "CPU" and method.is_monolithic)


def kernels_of(theirs: Any, weight: ScaledFormat | None) -> Any:
    """This package's class for the format of tokens that vLLM's kernels take; a text says why there is none."""
    from dsl_backend.vllm_plugin.routed_experts import kernels

    batched = theirs is not None and theirs.activation_format() is kernels.Format.BatchedExperts
    if weight is None:
        return kernels.BatchedDSLExperts if batched else kernels.DSLExperts
    if batched:
        return f"weights in {weight} with tokens in vLLM's batched format"
    if weight.tiled:
        return kernels.WeightOnlyDSLExperts
    return kernels.BlockScaledDSLExperts if weight.swizzled else kernels.ScaledDSLExperts


def reason_against_request(moe: Any, served_by: ServedBy) -> str:
    """Why what the user asks for leaves a layer to vLLM; empty where it does not."""
    asked = getattr(moe, "moe_backend", "auto")
    if asked != "auto" and (served_by is ServedBy.MEASURED or asked not in SAME_WEIGHTS):
        return f"--moe-backend {asked} asks for vLLM's kernels"
    if getattr(moe, "_defer_moe_finalize", False):
        return "the model adds up a token's experts itself"
    return ""


def reason_against_rows(kernels: Any, vllm_config: Any, layer: Any) -> str:
    """Why a step may have more rows than kernels take; empty where it may not."""
    ranks = vllm_config.parallel_config.data_parallel_size
    rows = ranks * vllm_config.scheduler_config.max_num_batched_tokens
    if kernels.activation_format().name == "BatchedExperts":
        parallel = layer.moe_config.moe_parallel_config
        rows = layer.moe_config.max_num_tokens * parallel.ep_size * layer.local_num_experts
    return "" if rows <= MAX_TOKENS else f"a step may have {rows} rows: {MAX_TOKENS} are the most"


def spec_of(layer: Any, kernels: Any, weight: ScaledFormat | None) -> ExpertsSpec:
    """The spec of a layer as it is loaded, with weights of a format.

    Raises:
        InvalidInput: its weights do not lie as kernels need them, or no kernel has such a layer.
    """
    from dsl_backend.vllm_plugin.routed_experts.kernels import activation_of

    moe = layer.moe_config
    activation, interleaved = activation_of(moe, constants_of(layer, weight))
    hidden, width = sizes_of(layer, weight)
    batched = kernels.activation_format().name == "BatchedExperts"
    on_input = bool(layer.apply_router_weight_on_input)
    mapped = layer.expert_map is not None and not batched
    return ExpertsSpec(
        num_experts=layer.local_num_experts,
        hidden_size=hidden,
        intermediate_size=width,
        topk=1 if batched else moe.experts_per_token,
        dtype=moe.in_dtype,
        activation=activation,
        interleaved=interleaved,
        w13_bias=hasattr(layer, "w13_bias"),
        w2_bias=hasattr(layer, "w2_bias"),
        router_weights=RouterWeights.NONE if batched or on_input else RouterWeights.OUTPUT,
        global_experts=layer.expert_map.shape[0] if mapped else None,
        ids_dtype=torch.int32 if batched else compat.expert_ids_dtype(moe.moe_parallel_config),
        weight=weight,
    )


def sizes_of(layer: Any, weight: ScaledFormat | None) -> tuple[int, int]:
    """H and I of a layer as it is loaded. Raises InvalidInput: its weights do not lie as kernels need them."""
    if weight is not None and (weight.swizzled or weight.tiled):
        from dsl_backend.vllm_plugin.routed_experts import block_scaled

        return block_scaled.sizes_of(layer, weight)
    moe, w13, w2 = layer.moe_config, layer.w13_weight, layer.w2_weight
    check_weights(moe, layer.local_num_experts, w13, w2, moe.in_dtype if weight is None else weight.values)
    if weight is not None:
        check_scales(layer, weight)
    return w13.shape[2], w2.shape[2]


def constants_of(layer: Any, weight: ScaledFormat | None) -> Any:
    """What has a layer's constants of SwiGLU as `kernels.clamps` reads them.

    With weights in 8 bits vLLM's configuration depends on the kernels that it chose, and making it may register
    parameters or need scales that these weights have not.
    """
    if weight is None:
        return layer.quant_method.get_fused_moe_quant_config(layer)
    return SimpleNamespace(
        gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        gemm1_alpha=getattr(layer, "swiglu_alpha", None),
        gemm1_beta=getattr(layer, "swiglu_beta", None),
    )


def check_scales(layer: Any, weight: ScaledFormat) -> None:
    """Raises InvalidInput unless the scales of a layer's weights are float32 and lie as kernels need them."""
    for name, values, scale in zip(("w13", "w2"), (layer.w13_weight, layer.w2_weight), scales_of(layer), strict=True):
        experts, rows, columns = values.shape
        shape = (experts, *weight.scale_shape(rows, columns), *(() if weight.blocked else (1,)))
        if tuple(scale.shape) != shape or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise InvalidInput(
                f"scales of {name} are {scale.dtype} of shape {tuple(scale.shape)} and strides {scale.stride()}: "
                f"packed float32 {list(shape)} is needed"
            )


def check_weights(moe: Any, experts: int, w13: torch.Tensor, w2: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises InvalidInput unless w13 is [experts, 2 I, H] and w2 [experts, H, I], as the model has I and H."""
    sizes = (moe.hidden_dim, moe.intermediate_size_per_partition)
    hidden, width = unpadded = (
        getattr(moe, "hidden_dim_unpadded", None) or sizes[0],
        getattr(moe, "intermediate_size_per_partition_unpadded", None) or sizes[1],
    )
    if sizes != unpadded:
        raise InvalidInput(
            f"vLLM has padded the sizes {unpadded} to {sizes} for other kernels: use --moe-backend triton"
        )
    for name, tensor, shape in (("w13", w13, (experts, 2 * width, hidden)), ("w2", w2, (experts, hidden, width))):
        if tuple(tensor.shape) != shape or tensor.dim() != 3 or not tensor.is_contiguous():
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: packed {list(shape)} is needed"
            )
        if tensor.dtype != dtype:
            raise InvalidInput(f"{name} is {tensor.dtype}: {dtype} is needed with tokens of {moe.in_dtype}")


def measured(service: Service, method: Any, target: Target) -> Service | str:
    """The service for the tokens that it was measured to be faster for; a reason where there are none.

    Measurements compare with vLLM's Triton kernels, and say nothing where vLLM has others, as on SM100.
    """
    from dsl_backend.vllm_plugin.routed_experts import kernels

    classes: dict[type, type] = {
        kernels.DSLExperts: kernels.MeasuredExperts,
        kernels.ScaledDSLExperts: kernels.MeasuredScaledExperts,
    }
    ranges = tuple(tuned.faster(service.spec, target)) if service.kernels in classes else ()
    if not ranges:
        return (
            f"nothing measured says that dsl is faster for {service.spec}: "
            """--additional-config '{"dsl": {"experts": "dsl"}}' has dsl serve them"""
        )
    if getattr(method, backend_name(method)).name != "TRITON":
        return f"dsl was measured to be faster than vLLM's Triton kernels, and not than {method.experts_cls.__name__}"
    return Service(service.spec, classes[service.kernels], ranges)
