# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of heads, rotary embedding and cache write in eager torch: the definition, and the kernel for CPUs."""

import torch

from dsl_backend.attention import reference
from dsl_backend.attention.rope_spec import RopeSpec, RopeStyle, RopeTensors, RopeWrites
from dsl_backend.checks import require


def normalised(
    rows: torch.Tensor, weight: torch.Tensor | None, spec: RopeSpec, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """RMSNorm of each head of rows [tokens, heads, dim], in the given arithmetic and not rounded."""
    values = rows.to(dtype)
    if weight is None:
        return values
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * (weight.to(dtype) + spec.weight_offset) * factor


def rotated(values: torch.Tensor, table: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Values [tokens, heads, dim] whose first rotary_dim elements are rotated in pairs.

    Args:
        table: [tokens, rotary_dim], cosines and sines, of the values' dtype.
    """
    half = spec.rotary_dim // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    turned = values[..., : spec.rotary_dim]
    if spec.style is RopeStyle.NEOX:
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(pair, -1) if spec.style is RopeStyle.NEOX else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned, values[..., spec.rotary_dim :]), -1)


def exact(
    tensors: RopeTensors, spec: RopeSpec, eps: float, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads_q, head_dim] and keys [tokens, heads_kv, head_dim] before they are rounded or scaled.

    Raises:
        InvalidInput: a position is not in the table.
    """
    tokens, rows = tensors.positions.shape[0], tensors.cos_sin.shape[0]
    outside = tensors.positions[(tensors.positions < 0) | (tensors.positions >= rows)]
    first = int(outside[0]) if len(outside) else 0
    require(not len(outside), f"positions has {first}: cos_sin has positions 0 to {rows - 1}")
    table = tensors.cos_sin[tensors.positions].to(dtype)
    pairs = ((tensors.q, tensors.q_weight), (tensors.key, tensors.k_weight))
    q, key = (rotated(normalised(rows[:tokens], weight, spec, eps, dtype), table, spec) for rows, weight in pairs)
    return q, key


class RopeWriteKV(RopeWrites):
    """Computes in float32, as the kernels do."""

    def __call__(self, tensors: RopeTensors, eps: float) -> None:
        q, key = exact(tensors, self.spec, eps, torch.float32)
        given = (tensors.value, tensors.key_cache, tensors.value_cache, tensors.slots, tensors.k_scale, tensors.v_scale)
        reference.write_kv(key, *given)
        tensors.q_out[: len(q)] = q.to(self.spec.dtype)
