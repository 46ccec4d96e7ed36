# SPDX-License-Identifier: Apache-2.0
"""Finds the MLA layers of a model whose norm, rotation and cache write can be one launch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dsl_backend.attention import rope_dispatch
from dsl_backend.attention.rope_spec import MLARopeSpec, RopeStyle
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat, options
from dsl_backend.vllm_plugin.norms.serve import OFFSETS
from dsl_backend.vllm_plugin.rope.find import Rotation, against_norms, against_rotary, attentions
from dsl_backend.vllm_plugin.rope.forward_source import OtherForm
from dsl_backend.vllm_plugin.rope.latent_source import LatentForm, latent_form_of


def reasons_against_engine(vllm_config: Any, target: Target) -> str:
    """Why no MLA layer of an engine is served, whatever its model; empty where nothing is against it."""
    reasons = [options.against_kernels(vllm_config, "rope", target)]
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        reasons.append("calculate_kv_scales reads the keys that a layer hands to its attention")
    if getattr(getattr(vllm_config.model_config, "hf_text_config", None), "llama_4_scaling", None) is not None:
        reasons.append("queries are scaled by their positions (llama_4_scaling)")
    return "; ".join(filter(None, reasons))


def modules(model: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Each MLA attention of ours: (its full name, (the module that has it, its attribute there))."""
    from vllm.model_executor.layers.attention import MLAAttention

    return attentions(model, MLAAttention)


def judge(parent: Any, attribute: str, vllm_config: Any, target: Target) -> Rotation[LatentForm, MLARopeSpec] | str:
    """How an MLA layer is served, or why it stays vLLM's."""
    attention = getattr(parent, attribute)
    if reason := against_attention(attention):
        return reason
    if "forward" in vars(parent):
        return f"another forward was put into {type(parent).__name__}"
    try:
        form = latent_form_of(parent, attribute)
    except OtherForm as error:
        return str(error)
    rotary, norm = getattr(parent, form.rotary), getattr(parent, form.norm)
    rope_dim = attention.qk_rope_head_dim
    reason = against_latent_rotary(rotary, rope_dim) or against_norms([norm], attention.kv_lora_rank)
    if reason:
        return reason
    if OFFSETS[type(norm).__name__]:
        return f"{type(norm).__name__} adds {OFFSETS[type(norm).__name__]:g} to its weight"
    try:
        spec = spec_of(attention, rotary, norm, vllm_config)
        kernel: str | None = attention.impl.write_kernel
        rope_dispatch.choose(spec, target, kernel)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return Rotation(form, spec, float(norm.variance_epsilon), kernel)


def against_attention(attention: Any) -> str:
    """Why the keys of an MLA attention are not written in front of it; empty where they may be."""
    kind = type(attention).__name__
    for name in ("hisparse_cache", "use_pcp", "use_sparse"):
        if getattr(attention, name, None):
            return f"{kind} has {name}"
    return f"another forward was put into {kind}" if "forward" in vars(attention) else ""


def against_latent_rotary(rotary: Any, rope_dim: int) -> str:
    """Why a rotary embedding is not one table for all elements of rope parts; empty where it is."""
    from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

    scaled = type(rotary) is DeepseekScalingRotaryEmbedding and "forward" not in vars(rotary)
    if not scaled and (reason := against_rotary(rotary, rope_dim)):
        return reason
    if rotary.rotary_dim != rope_dim:
        return f"{type(rotary).__name__} rotates {rotary.rotary_dim} elements of {rope_dim}"
    return ""


def spec_of(attention: Any, rotary: Any, norm: Any, vllm_config: Any) -> MLARopeSpec:
    """The spec of a layer. Raises InvalidInput: no kernel has such a layer."""
    impl = attention.impl
    table: torch.Tensor = rotary.cos_sin_cache
    return MLARopeSpec(
        layer=impl.spec(compat.page_size(vllm_config, attention.attn_backend), impl.base_spec.causality),
        style=RopeStyle.NEOX if rotary.is_neox_style else RopeStyle.GPTJ,
        table_dtype=table.dtype,
        norm_dtype=norm.weight.dtype,
    )
