# SPDX-License-Identifier: Apache-2.0
"""The `forward` of an attention module whose norms, rotation and cache write are one launch of this package."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import attention as vllm_attention

from dsl_backend.attention import rope
from dsl_backend.attention.rope_spec import RopeSpec, RopeTensors
from dsl_backend.runtime.op import register_op
from dsl_backend.vllm_plugin.rope.find import Rotation, SpecT
from dsl_backend.vllm_plugin.rope.forward_source import Form

NAME = "rope_write_kv_layer"


def rope_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    out: torch.Tensor,
    layer_name: str,
) -> None:
    """Rotated queries to out [tokens, heads, head_size]; keys and values go to the cache of the layer of that name.

    The cache and the slots are those of vLLM's forward context, as for its own operator that writes the cache. Without
    slots (vLLM's profiling run) queries stay as they are.

    It makes no tensor. vLLM cuts graphs at this operator, and what it captures behind it would read tensors where they
    were when it was captured. `out` comes from the graph in front and stays there.
    """
    _, layer, cache, slots = vllm_attention.get_attention_context(layer_name)
    rotation: Rotation[Form, RopeSpec] = layer.dsl_rotation
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    q, key, value = qkv.view(qkv.shape[0], -1, layer.head_size).split_with_sizes(heads, 1)
    if slots is None or cache.numel() == 0:
        out.copy_(q)
        return
    keys, values = layer.impl.split(cache)
    fp8 = rotation.spec.layer.is_fp8_kv
    tensors = RopeTensors(
        q, key, value, positions, cos_sin, q_weight, k_weight, out, keys, values, slots,
        layer._k_scale if fp8 else None, layer._v_scale if fp8 else None,
    )  # fmt: skip
    writer_of(layer, keys.shape[1], slots.device)(tensors, rotation.eps)


def rope_write_kv_fake(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    out: torch.Tensor,
    layer_name: str,
) -> None:
    return


ROPE_WRITE_KV = register_op(NAME, rope_write_kv, fake=rope_write_kv_fake, mutates=("out",))


def with_page_size(spec: SpecT, page_size: int) -> SpecT:
    return spec if spec.layer.page_size == page_size else replace(spec, layer=replace(spec.layer, page_size=page_size))


def writer_of(layer: Any, page_size: int, device: torch.device) -> rope.RopeWriter:
    """What writes the cache of a served attention layer, whose pages have that size; found once for a layer."""
    found: tuple[int, rope.RopeWriter] | None = getattr(layer, "dsl_rope_writer", None)
    if found is None or found[0] != page_size:
        rotation: Rotation[Any, Any] = layer.dsl_rotation
        writer = rope.writer(with_page_size(rotation.spec, page_size), device, rotation.kernel)
        found = layer.dsl_rope_writer = page_size, writer
    return found[1]


def prepare(layer: Any, page_size: int, device: torch.device) -> None:
    """Compile what a served attention layer needs with a cache of that page size."""
    writer_of(layer, page_size, device).prepare()


def forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The module's own `forward`, in the common form."""
    form: Form = module.dsl_form
    given = dict(zip(form.arguments, args, strict=False)) | kwargs
    qkv, _ = getattr(module, form.projection)(given[form.hidden])
    attention = getattr(module, form.attention)
    weights = [None, None] if form.norms is None else [getattr(module, name).weight.data for name in form.norms]
    q = qkv.new_empty((qkv.shape[0], attention.num_heads, attention.head_size))
    attend = prepared(attention, q) if torch.compiler.is_compiling() else partial(attention, q, None, None)
    ROPE_WRITE_KV(
        qkv,
        given[form.positions],
        getattr(module, form.rotary).cos_sin_cache,
        *weights,
        q,
        attention.layer_name,
    )
    output, _ = getattr(module, form.output)(attend())
    return output


def prepared(attention: Any, q: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What attends, as vLLM's `Attention.forward` without keys and values does; its tensors are made at once.

    vLLM cuts graphs at the operator that writes the cache and at attention, and runs both as one piece where no other
    node is between them. With the views and the output that `Attention.forward` makes there, each layer had a piece
    more: an empty CUDA graph to replay, or a compiled function to call that does nothing.
    """
    rows = q.shape[0]
    out = q.new_empty((rows, attention.num_heads, attention.head_size_v))
    name = encoded_name(attention.layer_name)

    def attend() -> torch.Tensor:
        if attention.use_direct_call:
            vllm_attention.unified_attention_with_output(q, None, None, out, attention.layer_name)
        else:
            torch.ops.vllm.unified_attention_with_output(q, None, None, out, name)
        # With its number of rows, by which vLLM's pass knows attention in front of a quantisation.
        return out.view(rows, attention.num_heads * attention.head_size_v)

    return attend


def encoded_name(layer_name: str) -> Any:
    """A layer's name as vLLM's operators take it: by a hash, in versions that hide it from compiled graphs."""
    encode = getattr(vllm_attention, "_encode_layer_name", None)
    return layer_name if encode is None else encode(layer_name)
