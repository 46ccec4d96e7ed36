# SPDX-License-Identifier: Apache-2.0
"""The `forward` of an MLA layer whose norm, rotation and cache write are one launch of this package."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import attention as vllm_attention
from vllm.model_executor.layers.attention import mla_attention

from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.op import register_op
from dsl_backend.vllm_plugin.rope.find import Rotation
from dsl_backend.vllm_plugin.rope.latent_source import LatentForm
from dsl_backend.vllm_plugin.rope.method import encoded_name, writer_of

NAME = "rope_write_mla_layer"
# Whether vLLM's MLA attends by an operator that is known, and another one in front of it writes the cache.
KNOWN = all(
    hasattr(mla_attention, name) and name in inspect.getsource(mla_attention.MLAAttention.forward)
    for name in ("unified_mla_kv_cache_update", "unified_mla_attention_with_output")
)


def rope_write_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    layer_name: str,
) -> None:
    """Rotate the ends of query heads and keys, normalise latents, all in place, and write keys to the layer's cache.

    The cache and the slots are those of vLLM's forward context, as for its own operator that writes the cache. Without
    slots (vLLM's profiling run) all stays as it is. It takes what attention takes: see `prepared`.

    Args:
        q: [tokens, heads, nope + rope elements].
        latent: [tokens, latent].
        rotated: [tokens, 1, rope].
    """
    _, layer, cache, slots = vllm_attention.get_attention_context(layer_name)
    if slots is None or cache.numel() == 0:
        return
    rotation: Rotation[LatentForm, MLARopeSpec] = layer.dsl_rotation
    pages = layer.impl.split(cache)[0].squeeze(2)
    spec, rope = rotation.spec, rotated.squeeze(1)
    ends = q[..., -spec.rope_dim :]
    scale = layer._k_scale if spec.layer.is_fp8_kv else None
    tensors = MLARopeTensors(
        ends, latent, rope, positions, cos_sin, weight, ends, latent, rope, pages, slots.flatten(), scale
    )
    writer_of(layer, pages.shape[1], slots.device)(tensors, rotation.eps)


def rope_write_mla_fake(
    q: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    layer_name: str,
) -> None:
    return


ROPE_WRITE_MLA = register_op(NAME, rope_write_mla, fake=rope_write_mla_fake, mutates=("q", "latent", "rotated"))


def forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The module's own `forward`, in the common form.

    Raises:
        InvalidInput: an argument is given that the common form leaves out.
    """
    form: LatentForm = module.dsl_form
    given = dict(zip(form.arguments, args, strict=False)) | kwargs
    for name, value in given.items():
        if value is not None and name not in (form.positions, form.hidden):
            raise InvalidInput(f"{name} is given to {type(module).__name__}, which dsl serves without it")
    hidden = given[form.hidden]
    parts = [module.kv_lora_rank, module.qk_rope_head_dim]
    keys = getattr(module, form.keys)(hidden)[0]
    latent = hidden
    if form.q_norm is not None:
        latent, keys = keys.split([module.q_lora_rank, sum(parts)], dim=-1)
        latent = getattr(module, form.q_norm)(latent)
    q = getattr(module, form.queries)(latent)[0].view(-1, module.num_heads, module.qk_head_dim)
    latent, rotated = keys.split(parts, dim=-1)
    rotated = rotated.unsqueeze(1)
    attention = getattr(module, form.attention)
    shape = (hidden.shape[0], module.num_heads * module.v_head_dim)
    attend: Callable[[], torch.Tensor] = partial(attention, q, latent, rotated, output_shape=shape)
    if torch.compiler.is_compiling() and KNOWN:
        attend = prepared(attention, q, latent, rotated, shape)
    ROPE_WRITE_MLA(
        q,
        latent,
        rotated,
        given[form.positions],
        getattr(module, form.rotary).cos_sin_cache,
        getattr(module, form.norm).weight.data,
        attention.layer_name,
    )
    return getattr(module, form.output)(attend())[0]


def prepared(
    attention: Any, q: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, shape: tuple[int, int]
) -> Callable[[], torch.Tensor]:
    """What attends, as vLLM's `MLAAttention.forward` does for keys that are in the cache; its output is made at once.

    No other node lies between our operator and attention then, and vLLM runs both as one piece: see `method.prepared`.
    vLLM's own operator that writes the cache is left out, since it would do nothing.
    """
    out = q.new_empty(shape)
    name = encoded_name(attention.layer_name)

    def attend() -> torch.Tensor:
        if attention.use_direct_call:
            mla_attention.unified_mla_attention_with_output(q, latent, rotated, out, attention.layer_name)
        else:
            torch.ops.vllm.unified_mla_attention_with_output(q, latent, rotated, out, name)
        return out

    return attend
