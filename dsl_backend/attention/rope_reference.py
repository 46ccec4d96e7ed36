# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary embedding and cache write in eager torch: the definition, and the kernel for CPUs."""

import torch

from dsl_backend.attention import reference
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeSpec, RopeStyle, RopeTensors, RopeWrites
from dsl_backend.checks import require


def normalised(
    rows: torch.Tensor, weight: torch.Tensor | None, offset: float, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """RMSNorm of rows [..., dim] by a weight plus an offset, in the given arithmetic and not rounded."""
    values = rows.to(dtype)
    if weight is None:
        return values
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * (weight.to(dtype) + offset) * factor


def rotated(values: torch.Tensor, table: torch.Tensor, style: RopeStyle) -> torch.Tensor:
    """Values [tokens, heads, dim] whose first rotary_dim elements are rotated in pairs.

    Args:
        table: [tokens, rotary_dim], cosines and sines, of the values' dtype.
    """
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    turned = values[..., : 2 * half]
    if style is RopeStyle.NEOX:
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(pair, -1) if style is RopeStyle.NEOX else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned, values[..., 2 * half :]), -1)


def table_rows(tensors: RopeTensors | MLARopeTensors, dtype: torch.dtype) -> torch.Tensor:
    """The row of the table of each token. Raises InvalidInput: a position is not in the table."""
    rows = tensors.cos_sin.shape[0]
    outside = tensors.positions[(tensors.positions < 0) | (tensors.positions >= rows)]
    first = int(outside[0]) if len(outside) else 0
    require(not len(outside), f"positions has {first}: cos_sin has positions 0 to {rows - 1}")
    return tensors.cos_sin[tensors.positions].to(dtype)


def exact(
    tensors: RopeTensors, spec: RopeSpec, eps: float, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads_q, head_dim] and keys [tokens, heads_kv, head_dim] before they are rounded or scaled.

    Raises:
        InvalidInput: a position is not in the table.
    """
    tokens, table = tensors.positions.shape[0], table_rows(tensors, dtype)
    pairs = ((tensors.q, tensors.q_weight), (tensors.key, tensors.k_weight))
    q, key = (
        rotated(normalised(rows[:tokens], weight, spec.weight_offset, eps, dtype), table, spec.style)
        for rows, weight in pairs
    )
    return q, key


def exact_mla(
    tensors: MLARopeTensors, spec: MLARopeSpec, eps: float, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads_q, rope_dim], latent and rope parts of keys [tokens, 1, dim], neither rounded nor scaled.

    Raises:
        InvalidInput: a position is not in the table.
    """
    tokens, table = tensors.positions.shape[0], table_rows(tensors, dtype)
    latent = normalised(tensors.latent[:tokens, None], tensors.weight, 0.0, eps, dtype)
    q, rope = (rotated(rows[:tokens].to(dtype), table, spec.style) for rows in (tensors.q, tensors.rope[:, None]))
    return q, latent, rope


class RopeWriteKV(RopeWrites[RopeSpec, RopeTensors]):
    """Computes in float32, as the kernels do."""

    def __call__(self, tensors: RopeTensors, eps: float) -> None:
        q, key = exact(tensors, self.spec, eps, torch.float32)
        given = (tensors.value, tensors.key_cache, tensors.value_cache, tensors.slots, tensors.k_scale, tensors.v_scale)
        reference.write_kv(key, *given)
        tensors.q_out[: len(q)] = q.to(self.spec.dtype)


class RopeWriteMLA(RopeWrites[MLARopeSpec, MLARopeTensors]):
    """Computes in float32, as the kernels do."""

    def __call__(self, tensors: MLARopeTensors, eps: float) -> None:
        q, latent, rope = exact_mla(tensors, self.spec, eps, torch.float32)
        keys = tensors.cache.unsqueeze(-2)
        latents, ropes = keys.split_with_sizes((self.spec.latent_dim, self.spec.rope_dim), -1)
        reference.write_kv(latent, rope, latents, ropes, tensors.slots, tensors.scale, tensors.scale)
        outputs = (
            (q, tensors.q_out),
            (latent.squeeze(1), tensors.latent_out),
            (rope.squeeze(1), tensors.rope_out),
        )
        for rows, out in outputs:
            out[: len(rows)] = rows.to(self.spec.dtype)
