# SPDX-License-Identifier: Apache-2.0
"""Finds the attention modules of a model whose norms, rotation and cache write can be one launch."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dsl_backend.attention import rope_dispatch
from dsl_backend.attention.rope_spec import MLARopeSpec, RopeSpec, RopeStyle
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat, options
from dsl_backend.vllm_plugin.enum_members import NAME
from dsl_backend.vllm_plugin.norms.serve import OFFSETS
from dsl_backend.vllm_plugin.rope.forward_source import Form, OtherForm, form_of

# What rotates, in vLLM's RotaryEmbedding; scaled embeddings have another table and these methods.
ROTATES = ("forward_native", "forward_static", "forward_cuda", "forward_cpu", "forward")


FormT = TypeVar("FormT")
SpecT = TypeVar("SpecT", RopeSpec, MLARopeSpec)


@dataclass(frozen=True)
class Rotation(Generic[FormT, SpecT]):
    """How a module is served.

    Attributes:
        form: what its `forward` does.
        spec: with the page size that the cache will probably have; the page is settled when there is a cache.
        eps: of the norms.
        kernel: that the user asked for by name.
    """

    form: FormT
    spec: SpecT
    eps: float
    kernel: str | None

    def __str__(self) -> str:
        return str(self.spec)


def reasons_against_engine(vllm_config: Any, target: Target) -> str:
    """Why no module of an engine is served, whatever its model; empty where nothing is against it."""
    reasons = [options.against_kernels(vllm_config, "rope", target)]
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        reasons.append("calculate_kv_scales reads the keys and values that a module hands to its attention")
    if not takes_queries_alone():
        reasons.append("this vLLM's Attention has to be given keys and values")
    return "; ".join(filter(None, reasons))


def takes_queries_alone() -> bool:
    """Whether vLLM's Attention writes no cache where it is given no keys and values, and attends by a known operator.

    `method.prepared` calls that operator as `Attention.forward` does.
    """
    from vllm.model_executor.layers.attention import attention

    source = inspect.getsource(attention.Attention.forward)
    known = ("get_attention_context", "unified_attention_with_output")
    return all(hasattr(attention, name) for name in known) and all(
        text in source for text in ("key is not None", "value is not None", *known[1:], "use_direct_call")
    )


def modules(model: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Each dense attention layer of ours: (its full name, (the module that has it, its attribute there))."""
    from vllm.model_executor.layers.attention.attention import Attention

    return attentions(model, Attention)


def attentions(model: nn.Module, kind: type[Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Each attention layer of ours of one kind that is not served yet, as `modules` gives them."""
    for name, parent in list(model.named_modules()):
        for attribute, child in list(parent.named_children()):
            ours = isinstance(child, kind) and child.attn_backend.get_name() == NAME
            if ours and not hasattr(child, "dsl_rotation"):
                yield f"{name}.{attribute}", (parent, attribute)


def judge(parent: Any, attribute: str, vllm_config: Any, target: Target) -> Rotation[Form, RopeSpec] | str:
    """How an attention module is served, or why it stays vLLM's."""
    attention = getattr(parent, attribute)
    if reason := against_attention(attention):
        return reason
    if "forward" in vars(parent):
        return f"another forward was put into {type(parent).__name__}"
    try:
        form = form_of(parent, attribute)
    except OtherForm as error:
        return str(error)
    rotary = getattr(parent, form.rotary)
    norms = [] if form.norms is None else [getattr(parent, name) for name in form.norms]
    expected = tuple(
        heads * attention.head_size for heads in (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    )
    if form.sizes != expected:
        return f"{type(parent).__name__} splits {form.sizes}: {expected} is needed for its attention's heads"
    if reason := against_rotary(rotary, attention.head_size) or against_norms(norms, attention.head_size):
        return reason
    try:
        spec = spec_of(attention, rotary, norms, vllm_config)
        kernel: str | None = attention.impl.write_kernel
        rope_dispatch.choose(spec, target, kernel)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return Rotation(form, spec, float(norms[0].variance_epsilon) if norms else 1e-6, kernel)


def against_attention(attention: Any) -> str:
    """Why the keys of an attention layer are not written in front of it; empty where they may be."""
    from vllm.v1.attention.backend import AttentionType

    kind = type(attention).__name__
    if attention.impl.attn_type != AttentionType.DECODER or attention.impl.packed:
        return f"{kind} of {attention.impl.attn_type} has no cache of its own tokens"
    if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
        return "layers that share another one's cache write none"
    if getattr(attention, "head_size_v", attention.head_size) != attention.head_size:
        return "keys and values of different sizes are not split in the common form"
    if getattr(attention, "query_quant", None) is not None:
        return "queries are quantised behind the rotation"
    return f"another forward was put into {kind}" if "forward" in vars(attention) else ""


def against_rotary(rotary: Any, head_size: int) -> str:
    """Why a rotary embedding is not one table for one position of a token; empty where it is."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    kind = type(rotary).__name__
    if getattr(rotary, "mrope_section", None) is not None or "mrope" in kind.lower() or "mrotary" in kind.lower():
        return f"{kind} is M-RoPE: a token has three positions, one is needed"
    if not isinstance(rotary, RotaryEmbedding):
        return f"{kind} is not vLLM's RotaryEmbedding"
    own = [name for name in ROTATES if getattr(type(rotary), name, None) is not getattr(RotaryEmbedding, name, None)]
    if own or "forward" in vars(rotary):
        return f"{kind} rotates in a way of its own ({', '.join(own or ['forward'])})"
    if rotary.head_size != head_size:
        return f"{kind} is for heads of {rotary.head_size}, the attention's have {head_size}"
    return ""


def against_norms(norms: list[Any], head_size: int) -> str:
    """Why norms are not RMSNorms of heads; empty where they are, or where there are none."""
    from vllm.model_executor.layers import layernorm

    kinds = tuple(getattr(layernorm, name) for name in OFFSETS)
    for norm in norms:
        kind = type(norm).__name__
        if type(norm) not in kinds or "forward" in vars(norm):
            return f"{kind} is not vLLM's RMSNorm or GemmaRMSNorm"
        if not isinstance(norm.weight, nn.Parameter) or getattr(norm, "variance_size_override", None) is not None:
            return f"{kind} has no weight, or the variance of a part of the head"
        if norm.weight.shape != (head_size,):
            return f"{kind} normalises {norm.weight.shape[0]} elements and not a head of {head_size}"
    if len({(type(norm), norm.variance_epsilon, norm.weight.dtype) for norm in norms}) > 1:
        return "the norms of queries and keys differ in more than their weights"
    return ""


def spec_of(attention: Any, rotary: Any, norms: list[Any], vllm_config: Any) -> RopeSpec:
    """The spec of a module. Raises InvalidInput: no kernel has such a layer."""
    impl = attention.impl
    page_size = compat.page_size(vllm_config, type(attention).get_attn_backend(attention))
    table: torch.Tensor = rotary.cos_sin_cache
    return RopeSpec(
        layer=impl.spec(page_size, impl.base_spec.causality, attention.head_size),
        rotary_dim=rotary.rotary_dim,
        style=RopeStyle.NEOX if rotary.is_neox_style else RopeStyle.GPTJ,
        table_dtype=table.dtype,
        norm_dtype=norms[0].weight.dtype if norms else None,
        weight_offset=OFFSETS[type(norms[0]).__name__] if norms else 0.0,
    )
