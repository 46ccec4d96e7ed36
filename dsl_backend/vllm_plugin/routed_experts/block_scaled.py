# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP8, MXFP4 and NVFP4: their parameters as vLLM loads them, and as this package's kernels read them.

vLLM lays such weights out for the kernels that it chose. That step is replaced as a whole. Results are parameters of
the same names, so that reloading copies new values to where graphs read them, and rebalancing moves them.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.utils import replace_parameter

from dsl_backend.errors import InvalidInput
from dsl_backend.experts.block_scaled_configs import UNPACKED_BYTES
from dsl_backend.experts.scales import mma_scales
from dsl_backend.experts.spec import MMA_MULTIPLE, ExpertsSpec
from dsl_backend.quant.format import MXFP4, NVFP4, ScaledFormat
from dsl_backend.quant.mxfp4_tiles import exponents_of, pack_experts

# What vLLM marks a layer with that was processed, and deletes when it reloads one.
PROCESSED = "_already_called_process_weights_after_loading"
# Weights of compressed-tensors have these names until they are processed.
PACKED = "_packed"
# The exchange of tokens between ranks that takes any number of columns.
GATHERS = "allgather_reducescatter"
# Scales of whole matrices: of ModelOpt, and of compressed-tensors, which stores what they divide by.
WHOLE, INVERSE = ("weight_scale_2", "input_scale"), ("weight_global_scale", "input_global_scale")


def weight_of(layer: Any, name: str) -> torch.Tensor:
    """W13 or w2 as it is loaded."""
    found: torch.Tensor = getattr(layer, f"{name}_weight{PACKED if hasattr(layer, f'{name}_weight{PACKED}') else ''}")
    return found


def sizes_of(layer: Any, kind: ScaledFormat) -> tuple[int, int]:
    """H and I of a layer, without what vLLM has padded them by for kernels of its own.

    Raises:
        InvalidInput: its parameters are not those of a checkpoint, or something else needs them as they are.
    """
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    padded = (moe.hidden_dim, moe.intermediate_size_per_partition)
    hidden = getattr(moe, "hidden_dim_unpadded", None) or padded[0]
    width = getattr(moe, "intermediate_size_per_partition_unpadded", None) or padded[1]
    # A rank's share of columns is a whole number of blocks.
    width = min(padded[1], -(-width // MMA_MULTIPLE) * MMA_MULTIPLE)
    if width != padded[1] and moe.activation.name != "SWIGLUOAI":
        raise InvalidInput(f"vLLM has padded {width} columns to {padded[1]} for other kernels: up rows lie apart")
    if hidden != padded[0]:
        if not hasattr(layer.quant_method, "skip_forward_padding"):
            raise InvalidInput(f"this version of vLLM pads tokens of {hidden} columns to {padded[0]}")
        if parallel.use_all2all_kernels and parallel.all2all_backend != GATHERS:
            raise InvalidInput(f"vLLM has padded {hidden} columns to {padded[0]}, as {parallel.all2all_backend} wants")
    loaded = MXFP4 if kind.tiled else kind
    check_parameters(layer, loaded, *padded)
    if kind.tiled:
        check_scales(layer, hidden, width)
        return hidden, width
    apart = padded != (hidden, width) or (kind == MXFP4 and any(n // 2 % UNPACKED_BYTES for n in (hidden, width)))
    if apart and parallel.enable_eplb:
        raise InvalidInput(f"rebalancing of experts (EPLB) needs packed rows, and those of {hidden} or {width} are not")
    return hidden, width


def check_parameters(layer: Any, kind: ScaledFormat, hidden: int, width: int) -> None:
    """Raises InvalidInput unless weights, scales and biases are those of a checkpoint of these sizes."""
    scales = (kind.scales, torch.uint8) if kind.scales == MXFP4.scales else (kind.scales,)
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        for what, tensor, count, dtypes in (
            (name, weight_of(layer, name), columns // kind.packed, (kind.values,)),
            (f"scales of {name}", getattr(layer, f"{name}_weight_scale"), columns // block(kind), scales),
        ):
            wanted = (layer.local_num_experts, rows, count)
            if tuple(tensor.shape) != wanted or not tensor.is_contiguous() or tensor.dtype not in dtypes:
                raise InvalidInput(
                    f"{what}: {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}, where "
                    f"packed {dtypes[0]} {list(wanted)} is needed"
                )
        bias, dtype = getattr(layer, f"{name}_bias", None), layer.moe_config.in_dtype
        if bias is not None and bias.dtype != dtype:
            raise InvalidInput(f"{name}_bias is {bias.dtype}: {dtype} is needed with tokens of {dtype}")


def check_scales(layer: Any, hidden: int, width: int) -> None:
    """Raises InvalidInput where no kernel under 16 bits has a scale of a layer in MXFP4."""
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        for of_expert in zip(*loaded_mxfp4(layer, name, rows, columns), strict=True):
            exponents_of(*of_expert)


def loaded_mxfp4(layer: Any, name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of w13 or w2 in MXFP4 as they are loaded, without what vLLM has padded."""
    weight, scale = weight_of(layer, name).data, getattr(layer, f"{name}_weight_scale").data
    return weight[:, :rows, : columns // MXFP4.packed], scale[:, :rows, : columns // block(MXFP4)]


def block(kind: ScaledFormat) -> int:
    """Columns of a block."""
    assert kind.block_columns is not None
    return kind.block_columns


def lay_out(layer: Any, spec: ExpertsSpec) -> None:
    """Replace a layer's parameters, as they are loaded, by what the kernels read."""
    kind = spec.weight
    assert kind is not None
    rows = {"w13": 2 * spec.intermediate_size, "w2": spec.hidden_size}
    columns = {"w13": spec.hidden_size, "w2": spec.intermediate_size}
    for name, count in rows.items():
        if hasattr(layer, f"{name}_bias"):
            replace_parameter(layer, f"{name}_bias", getattr(layer, f"{name}_bias").data[:, :count].contiguous())
        parts = 2 if name == "w13" else 1
        if kind.tiled:
            packed = pack_experts(
                *loaded_mxfp4(layer, name, count, columns[name]), parts=parts, interleaved=spec.interleaved
            )
            replace_parameter(layer, f"{name}_weight", packed)
            delattr(layer, f"{name}_weight_scale")
            continue
        weight = weight_of(layer, name).data[:, :count, : columns[name] // kind.packed]
        replace_parameter(layer, f"{name}_weight", aligned(weight) if kind == MXFP4 else weight)
        if hasattr(layer, f"{name}_weight{PACKED}"):
            delattr(layer, f"{name}_weight{PACKED}")
        scale = getattr(layer, f"{name}_weight_scale").data[:, :count, : columns[name] // block(kind)]
        if kind == NVFP4:
            scale = with_whole(layer, name, scale)
        replace_parameter(layer, f"{name}_weight_scale", mma_scales(scale, parts=parts, interleaved=spec.interleaved))


def aligned(weight: torch.Tensor) -> torch.Tensor:
    """MXFP4 weights whose rows start where TMA can unpack them: a copy if they do not."""
    width = weight.shape[-1]
    if all(stride % UNPACKED_BYTES == 0 for stride in weight.stride()[:-1]):
        return weight
    return nn.functional.pad(weight, (0, -width % UNPACKED_BYTES))[..., :width]


def with_whole(layer: Any, name: str, scale: torch.Tensor) -> torch.Tensor:
    """Replace the scales of whole matrices of w13 or w2; returns the blocks' scales that go with them.

    Gate and up rows may have scales of their own. Then both get the larger one, and the other one's blocks smaller
    scales. All experts quantise x by one scale, the largest.
    """
    inverse = hasattr(layer, f"{name}_{INVERSE[0]}")
    weights, inputs = (getattr(layer, f"{name}_{ending}").data.float() for ending in (INVERSE if inverse else WHOLE))
    if inverse:
        weights, inputs = 1 / weights, 1 / inputs
    if weights.dim() == 2:
        largest = weights.amax(1, keepdim=True)
        shares = (weights / largest).repeat_interleave(scale.shape[1] // weights.shape[1], 1)
        scale, weights = (scale.float() * shares[..., None]).to(scale.dtype), largest.squeeze(1)
    replace_parameter(layer, f"{name}_{WHOLE[0]}", weights.contiguous())
    replace_parameter(layer, f"{name}_{WHOLE[1]}", inputs.max().view(1))
    return scale


class BlockScaledMethod:
    """In front of one of vLLM's methods: weights are laid out here, and tokens come in 16 bits, without padding.

    Attributes:
        spec: of the layer.
    """

    spec: ExpertsSpec
    skip_forward_padding = True
    has_unpadded_output = True
    # Of vLLM's method.
    moe: Any
    experts_cls: Any
    moe_quant_config: Any
    moe_kernel: Any

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, PROCESSED, False):
            return
        setattr(layer, PROCESSED, True)
        lay_out(layer, self.spec)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        exchange = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
        )
        assert exchange is not None
        kernels = self.experts_cls(self.moe, self.moe_quant_config, layer=layer, spec=self.spec)
        self.moe_kernel = modular_kernel.FusedMoEKernel(exchange, kernels)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """As of weights in 16 bits: nothing is quantised between ranks."""
        constants = {
            f"gemm1_{of_quant}": getattr(layer, f"swiglu_{of_layer}", None)
            for of_quant, of_layer in (("clamp_limit", "limit"), ("alpha", "alpha"), ("beta", "beta"))
        }
        biases = (getattr(layer, f"{name}_bias", None) for name in ("w13", "w2"))
        return FusedMoEQuantConfig.make(**dict(zip(("w1_bias", "w2_bias"), biases, strict=True)), **constants)


@cache
def served_class(theirs: type) -> type:
    """One of vLLM's methods behind `BlockScaledMethod`; one class for all layers."""
    return type(theirs.__name__, (BlockScaledMethod, theirs), {})


def take_over(layer: Any, spec: ExpertsSpec) -> None:
    """Have a layer's weights laid out here instead of by vLLM's method."""
    theirs = layer.quant_method
    kind: Any = type(theirs)
    made: Any = object.__new__(served_class(kind))
    vars(made).update(vars(theirs), spec=spec)
    layer.quant_method = made
