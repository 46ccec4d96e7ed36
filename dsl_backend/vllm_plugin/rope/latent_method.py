# SPDX-License-Identifier: Apache-2.0
"""The `forward` of an MLA layer whose norm, rotation and cache write are one launch of this package."""

from typing import Any

import torch

from dsl_backend.attention import rope
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.op import register_op
from dsl_backend.vllm_plugin.rope.find import Rotation
from dsl_backend.vllm_plugin.rope.latent_source import LatentForm
from dsl_backend.vllm_plugin.rope.method import with_page_size

NAME = "rope_write_mla_layer"


def rope_write_mla(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    layer_name: str,
) -> None:
    """Rotate the ends of query heads and keys, normalise latents, all in place, and write keys to the layer's cache.

    The cache and the slots are those of vLLM's forward context, as for its own operator that writes the cache. Without
    slots (vLLM's profiling run) all stays as it is.

    Args:
        q: [tokens, heads of nope + rope elements].
        keys: [tokens, latent + rope].
    """
    from vllm.model_executor.layers.attention.attention import get_attention_context

    _, layer, cache, slots = get_attention_context(layer_name)
    if slots is None or cache.numel() == 0:
        return
    rotation: Rotation[LatentForm, MLARopeSpec] = layer.dsl_rotation
    pages = layer.impl.split(cache)[0].squeeze(2)
    spec = with_page_size(rotation.spec, pages.shape[1])
    latent, rotated = keys.split_with_sizes((spec.latent_dim, spec.rope_dim), 1)
    ends = q.view(len(q), layer.num_heads, -1)[..., -spec.rope_dim :]
    scale = layer._k_scale if spec.layer.is_fp8_kv else None
    tensors = MLARopeTensors(
        ends, latent, rotated, positions, cos_sin, weight, ends, latent, rotated, pages, slots.flatten(), scale
    )
    rope.writer(spec, slots.device, rotation.kernel)(tensors, rotation.eps)


def rope_write_mla_fake(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    layer_name: str,
) -> None:
    return


ROPE_WRITE_MLA = register_op(NAME, rope_write_mla, fake=rope_write_mla_fake, mutates=("q", "keys"))


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
    q = getattr(module, form.queries)(latent)[0]
    attention = getattr(module, form.attention)
    ROPE_WRITE_MLA(
        q,
        keys,
        given[form.positions],
        getattr(module, form.rotary).cos_sin_cache,
        getattr(module, form.norm).weight.data,
        attention.layer_name,
    )
    kv, k_pe = keys.split(parts, dim=-1)
    attended = attention(
        q.view(-1, module.num_heads, module.qk_head_dim),
        kv,
        k_pe.unsqueeze(1),
        output_shape=(hidden.shape[0], module.num_heads * module.v_head_dim),
    )
    return getattr(module, form.output)(attended)[0]
