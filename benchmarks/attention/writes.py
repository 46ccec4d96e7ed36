# SPDX-License-Identifier: Apache-2.0
"""The tensors and exact results of cache writes."""

from dataclasses import dataclass

import torch
from dsl_backend.attention import reference as exact

from ..case import Reference
from .inputs import movable, normal
from .problems import WriteProblem

PAGES_SPARE = 4  # slots for each token, so that the written slots are scattered


@dataclass(frozen=True)
class WriteLayer:
    """One layer's tensors.

    Attributes:
        key, value: [tokens, heads_kv, dim]; for MLA the latent and the rope part.
        cache: the cache in its memory layout, [pages, page_size, heads_kv, 2 * head_dim] or [pages, page_size, 576].
        key_cache, value_cache: views of the cache, [pages, page_size, heads_kv, dim].
    """

    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor


@dataclass(frozen=True)
class WriteInputs:
    """The layers, and the slots [tokens] int64 on the device that they share."""

    slots: torch.Tensor
    layers: tuple[WriteLayer, ...]
    one: torch.Tensor

    def written(self, cache: torch.Tensor) -> torch.Tensor:
        """The rows of a cache at the slots, [tokens, ...]; fp8 is converted to float32."""
        page_size = cache.shape[1]
        rows = movable(cache)[self.slots // page_size, self.slots % page_size].view(cache.dtype)
        return rows.float() if cache.dtype == torch.float8_e4m3fn else rows


def build(problem: WriteProblem, layers: int, device: torch.device, seed: int = 0) -> WriteInputs:
    pages = -(-problem.tokens * PAGES_SPARE // problem.page_size)
    order = torch.randperm(pages * problem.page_size, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator(device).manual_seed(seed)
    width = problem.head_dim + problem.head_dim_v

    def layer() -> WriteLayer:
        key = normal((problem.tokens, problem.heads_kv, problem.head_dim), problem.dtype, generator)
        value = normal((problem.tokens, problem.heads_kv, problem.head_dim_v), problem.dtype, generator)
        shape = (width,) if problem.mla else (problem.heads_kv, width)
        cache = torch.zeros(pages, problem.page_size, *shape, device=device).to(problem.kv_dtype)
        by_head = cache.unsqueeze(2) if problem.mla else cache
        keys, values = by_head[..., : problem.head_dim], by_head[..., problem.head_dim :]
        return WriteLayer(key, value, cache, keys, values)

    one = torch.ones(1, dtype=torch.float32, device=device)
    return WriteInputs(order[: problem.tokens].to(device), tuple(layer() for _ in range(layers)), one)


def poison(inputs: WriteInputs) -> None:
    for layer in inputs.layers:
        if layer.cache.dtype == torch.float8_e4m3fn:
            movable(layer.cache).fill_(0x7F)  # e4m3's NaN
        else:
            layer.cache.fill_(torch.nan)


def reference(problem: WriteProblem, inputs: WriteInputs, layer: int, seed: int = 0) -> Reference:
    """The expected content of all written rows, whatever the seed; it must be bitwise equal."""
    tensors = inputs.layers[layer]
    stored = [exact.quantize(rows, problem.kv_dtype, inputs.one).float() for rows in (tensors.key, tensors.value)]
    values = torch.cat(stored, dim=-1).double()
    rows = torch.arange(problem.tokens, device=values.device)
    return Reference(rows, values.squeeze(1) if problem.mla else values)
