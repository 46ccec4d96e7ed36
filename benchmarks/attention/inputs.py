# SPDX-License-Identifier: Apache-2.0
"""Tensors of a problem, laid out as vLLM 0.26 hands them to an attention backend.

A dense cache is [pages, page_size, heads_kv, 2 * head_dim] in memory: a head's key and value side by side. An MLA
cache is [pages, page_size, 576]. The pages of a request are at random positions in the cache.
"""

from dataclasses import dataclass

import torch
from dsl_backend.attention.spec import Batch
from dsl_backend.quant.format import is_fp8

from .problems import Problem


@dataclass(frozen=True)
class Layer:
    """One layer's tensors.

    Attributes:
        q: [tokens, heads_q, head_dim].
        cache: the KV cache in its memory layout; for packed keys [tokens, heads, head_dim + head_dim_v].
        keys, values: views of the cache, [pages, page_size, heads_kv, dim] or packed [tokens, heads_kv, dim].
        out: [tokens, heads_q, head_dim_v].
    """

    q: torch.Tensor
    cache: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs of a step: the batch, and the layers that share it. `one` is a float32 scale of 1 on the device."""

    batch: Batch
    layers: tuple[Layer, ...]
    one: torch.Tensor


def pages_of(kv_len: int, page_size: int) -> int:
    return -(-kv_len // page_size)


def shuffled_table(kv_lens: tuple[int, ...], page_size: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """A block table with randomly permuted pages, [requests, most pages] int32 on the CPU; and the number of pages."""
    counts = [pages_of(kv_len, page_size) for kv_len in kv_lens]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    first = 0
    for request, count in enumerate(counts):
        table[request, :count] = order[first : first + count]
        first += count
    return table, sum(counts)


def starts_of(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[requests + 1] int32: where each request's tokens begin."""
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values of any dtype. Fp8 is made in slices, because it is rounded from a wider tensor."""
    if not is_fp8(dtype):
        return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
    result = torch.empty(shape, dtype=dtype, device=generator.device)
    step = max(1, shape[0] // 16)
    for first in range(0, shape[0], step):
        part = result[first : first + step]
        wide = torch.randn(part.shape, dtype=torch.bfloat16, device=generator.device, generator=generator)
        part.copy_(wide.to(dtype))
    return result


def build(problem: Problem, layers: int, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs of `layers` layers."""
    on_host = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    table, pages = None, 0
    if problem.page_size is not None:
        host_table, pages = shuffled_table(problem.kv_lens, problem.page_size, on_host)
        table = host_table.to(device)
    batch = Batch(
        query_start_loc=starts_of(problem.q_lens, device),
        seq_lens=torch.tensor(problem.kv_lens, dtype=torch.int32, device=device),
        num_tokens=problem.tokens,
        max_query_len=max(problem.q_lens),
        max_seq_len=max(problem.kv_lens),
        block_table=table,
        kv_start_loc=starts_of(problem.kv_lens, device) if table is None else None,
    )

    def layer() -> Layer:
        q = normal((problem.tokens, problem.heads_q, problem.head_dim), problem.dtype, generator)
        cache = normal(cache_shape(problem, pages), problem.kv_dtype, generator)
        out = torch.empty(problem.tokens, problem.heads_q, problem.head_dim_v, dtype=problem.dtype, device=device)
        return Layer(q, cache, *split(problem, cache), out)

    one = torch.ones(1, dtype=torch.float32, device=device)
    return Inputs(batch, tuple(layer() for _ in range(layers)), one)


def cache_shape(problem: Problem, pages: int) -> tuple[int, ...]:
    if problem.page_size is None:
        return sum(problem.kv_lens), problem.heads_kv, problem.head_dim + problem.head_dim_v
    if problem.mla:
        return pages, problem.page_size, problem.head_dim
    return pages, problem.page_size, problem.heads_kv, problem.head_dim + problem.head_dim_v


def split(problem: Problem, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a cache."""
    if problem.mla:
        keys = cache.unsqueeze(2)
        return keys, keys[..., : problem.head_dim_v]
    keys, values = cache[..., : problem.head_dim], cache[..., problem.head_dim :]
    # vLLM concatenates MLA's prefill keys anew; its values stay a view of the up-projection's output.
    return (keys.contiguous(), values) if problem.page_size is None else (keys, values)


def movable(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that torch can index."""
    return rows.view(torch.uint8) if is_fp8(rows.dtype) else rows


def tokens_of(problem: Problem, inputs: Inputs, rows: torch.Tensor, request: int) -> torch.Tensor:
    """Rows of one request in order, out of pages [pages, page_size, ...] or packed [tokens, ...]."""
    kv_len = problem.kv_lens[request]
    if problem.page_size is None:
        first = sum(problem.kv_lens[:request])
        return rows[first : first + kv_len]
    assert inputs.batch.block_table is not None
    pages = inputs.batch.block_table[request, : pages_of(kv_len, problem.page_size)].long()
    return movable(rows)[pages].view(rows.dtype).flatten(0, 1)[:kv_len]


def repage(problem: Problem, inputs: Inputs, page_size: int, seed: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same keys in pages of another size, for a peer that supports only that size.

    Returns:
        block table [requests, pages] int32, and each layer's cache [pages, page_size, ...]; tokens past a request's
        length are 0.
    """
    device = inputs.batch.seq_lens.device
    table, pages = shuffled_table(problem.kv_lens, page_size, torch.Generator().manual_seed(seed))
    caches = []
    for layer in inputs.layers:
        shape = layer.cache.shape[2:]
        cache = torch.zeros(pages, page_size, *shape, dtype=layer.cache.dtype, device=device)
        for request, kv_len in enumerate(problem.kv_lens):
            count = pages_of(kv_len, page_size)
            rows = torch.zeros(count * page_size, *shape, dtype=layer.cache.dtype, device=device)
            rows[:kv_len] = tokens_of(problem, inputs, layer.cache, request)
            movable(cache)[table[request, :count].long().to(device)] = movable(rows).view(count, page_size, *shape)
        caches.append(cache)
    return table.to(device), caches
