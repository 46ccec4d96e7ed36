# SPDX-License-Identifier: Apache-2.0
"""Attention problems made of random numbers, surrounded by garbage that no kernel may let through.

What a kernel must not use is filled with NaN or huge values: tokens past a request's length, pages that
no request owns, page numbers past a request's pages, rows of q past the last request.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsl_backend.attention import reference
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.quant.format import NVFP4_KV, is_fp8

# What the rest of an `out` or `lse` tensor holds before a launch, to see that it is left alone.
SENTINEL = -96.0
# The same of bytes, which are two e2m1, or a scale in e4m3 that no block has: it is negative.
SENTINEL_BYTE = 0xA5
K_SCALE, V_SCALE, Q_SCALE = 0.043, 0.071, 0.017
# Of outputs: those of a few standard normal values are larger than 448 of it, those of many are subnormal.
OUT_SCALE = 0.0031
# Of those in NVFP4, which are multiplied by it: some blocks have scales that saturate, and others subnormal ones.
NVFP4_OUT_SCALE = 900.0
# Page numbers that fault or read nonsense when they are followed.
BAD_PAGES = (-1, 2**31 - 1, -(2**31), 2**30)


class Layout(enum.Enum):
    """How a cache's keys and values lie in memory."""

    SIDE_BY_SIDE = "side_by_side"  # [pages, page, heads, k | v]: vLLM's
    HEADS_FIRST = "heads_first"  # [pages, heads, page, k | v]
    SEPARATE = "separate"  # keys [pages, page, heads, k], values a tensor of their own
    PADDED = "padded"  # vLLM's, with room between neighbouring tokens and neighbouring pages


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What lies around a problem's data, none of which may change a result.

    Attributes:
        layout: of the cache, or of packed keys and values.
        padding_tokens: rows of q that `num_tokens` counts and no request owns, as in a padded CUDA graph.
        spare_rows: rows of q past `num_tokens`.
        spare_pages: pages that no request owns.
        stale: keys that no row of a request sees, those in front of its first row's window, are garbage too: vLLM gives
            their pages to other requests.
        fused_q: q is a slice of wider rows, as the output of a fused qkv projection is.
        max_query_len, max_seq_len: upper bounds to promise, where they shall exceed the truth.
    """

    layout: Layout = Layout.SIDE_BY_SIDE
    padding_tokens: int = 3
    spare_rows: int = 2
    spare_pages: int = 3
    stale: bool = False
    fused_q: bool = False
    sinks_dtype: torch.dtype = torch.float32
    max_query_len: int = 0
    max_seq_len: int = 0


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a problem's results are judged by. Rows are q's; `owned` says which belong to a request.

    Attributes:
        out: [rows, heads_q, head_dim_v] float64 oracle, not quantised.
        naive: the same in q's dtype, every intermediate included.
        lse: [rows, heads_q] float64 oracle.
        lse_single: the same in float32.
        owned: [rows] bool.
    """

    out: torch.Tensor
    naive: torch.Tensor
    lse: torch.Tensor
    lse_single: torch.Tensor
    owned: torch.Tensor


@dataclass(kw_only=True)
class Problem:
    """A spec, a batch and the tensors that `api.run` takes; see there for shapes."""

    spec: AttentionSpec
    batch: Batch
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    stale: bool = False
    q_lens: tuple[int, ...] = ()
    kv_lens: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def extras(self) -> dict[str, Any]:
        """The keyword arguments of `api.run` that are not its results."""
        return self.scoring | {"out_scale": self.out_scale}

    @property
    def scoring(self) -> dict[str, Any]:
        """The keyword arguments that `api.run` and `reference.attention` share."""
        return {
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "q_scale": self.q_scale,
        }

    @property
    def split_q(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of absorbed MLA's q, each a tensor of its own."""
        latent = self.spec.head_dim_v
        return self.q[..., :latent].contiguous(), self.q[..., latent:].contiguous()

    def first_key(self, q_len: int, kv_len: int) -> int:
        """The first of a request's keys that is none of the stale ones."""
        if not self.stale or self.spec.window_left is None:
            return 0
        return min(max(kv_len - q_len - self.spec.window_left, 0), kv_len)

    def owned(self) -> torch.Tensor:
        """[rows] bool: rows of q that belong to a request."""
        return torch.arange(self.q.shape[0], device=self.device) < sum(self.q_lens)

    def score_magnitude(self) -> torch.Tensor:
        """[rows] bound on the size of what is summed up to a score, times the root of the number of terms."""
        spec, magnitude = self.spec, torch.zeros(self.q.shape[0], dtype=torch.float64, device=self.device)
        k_scale = 1.0 if self.k_scale is None else float(self.k_scale.max())
        first = 0
        for request, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            rows, first = slice(first, first + q_len), first + q_len
            if not (q_len and kv_len):
                continue
            keys = reference.gather_keys(self.keys, spec, self.batch, request, kv_len).float()
            keys = keys[self.first_key(q_len, kv_len) :]
            if not len(keys):
                continue
            largest_key = keys.norm(dim=-1).amax() * k_scale
            queries = self.q[rows].float().nan_to_num(0, 0, 0)  # other heads of a NaN's row still have a budget
            if self.q_scale is not None:
                queries = queries * self.q_scale.max()
            magnitude[rows] = (queries.norm(dim=-1).amax(-1) * largest_key).double()
            magnitude[rows] *= abs(spec.scale) * math.sqrt(spec.head_dim)
            if self.alibi_slopes is not None:
                magnitude[rows] += float(self.alibi_slopes.max()) * max(q_len, kv_len)
            magnitude[rows] += spec.softcap
        return magnitude

    def expected(self) -> Expected:
        """The oracle and its rougher relatives."""

        def compute(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            return reference.attention(
                self.spec, self.batch, self.q, self.keys, self.values, compute_dtype=dtype, **self.scoring
            )

        out, lse = compute(torch.float64)
        return Expected(
            out=out,
            naive=compute(self.spec.dtype)[0],
            lse=lse,
            lse_single=compute(torch.float32)[1],
            owned=self.owned(),
        )

    def fill(self, q_lens: Sequence[int], kv_lens: Sequence[int], seed: int) -> None:
        """New lengths and new numbers, in place: what a captured CUDA graph finds at its next replay.

        Fewer requests than the batch has are followed by padding requests. Bounds, shapes and addresses stay.
        """
        spec, batch = self.spec, self.batch
        requests = batch.num_requests
        assert len(q_lens) == len(kv_lens) <= requests, f"{len(q_lens)} requests do not fit {requests}"
        padding = (0,) * (requests - len(q_lens))
        self.q_lens, self.kv_lens = (*q_lens, *padding), (*kv_lens, *padding)
        assert sum(self.q_lens) <= batch.num_tokens, f"{sum(self.q_lens)} queries exceed {batch.num_tokens=}"
        assert max(self.q_lens, default=0) <= batch.max_query_len
        assert max(self.kv_lens, default=0) <= batch.max_seq_len
        random = torch.Generator(self.device).manual_seed(seed)
        batch.query_start_loc.copy_(offsets(self.q_lens))
        batch.seq_lens.copy_(torch.tensor(self.kv_lens, dtype=torch.int32))

        pollute(self.q)
        rows = sum(self.q_lens)
        self.fill_queries(normal((rows, *self.q.shape[1:]), random).to(spec.dtype))
        pollute(self.keys)
        if not spec.mla:
            pollute(self.values)
        if spec.page_size is None:
            assert batch.kv_start_loc is not None
            batch.kv_start_loc.copy_(offsets(self.kv_lens))
            where: tuple[torch.Tensor, ...] = (torch.arange(sum(self.kv_lens), device=self.device),)
        else:
            where = self._deal_pages(spec.page_size, random)
        fresh = [torch.arange(n) >= self.first_key(q, n) for q, n in zip(self.q_lens, self.kv_lens, strict=True)]
        kept = torch.cat([torch.zeros(0, dtype=torch.bool), *fresh]).to(self.device)
        where = tuple(places[kept] for places in where)
        stores = ((self.keys, spec.head_dim, self.k_scale), (self.values, spec.head_dim_v, self.v_scale))
        for tensor, dim, scale in stores[:1] if spec.mla else stores:
            stored = normal((sum(self.kv_lens), spec.heads_kv, dim), random)[kept].to(spec.dtype)
            if spec.scales_by_request:
                assert scale is not None
                lengths = torch.tensor(self.kv_lens, device=self.device)
                stored, scale = stored.float() / scale.repeat_interleave(lengths, 0)[kept][..., None], None
            reference.store(tensor, where, stored, scale)

    def fill_queries(self, numbers: torch.Tensor) -> None:
        """Store the first queries, [rows, heads_q, head_dim] in the spec's dtype: quantised where they are so."""
        scale = self.q_scale
        if scale is not None:
            if self.spec.scales_by_request:
                lengths = torch.tensor(self.q_lens, device=self.device)
                scale = scale.repeat_interleave(lengths, 0)
            of_heads = scale.expand(*scale.shape[:-1], self.spec.heads_kv).repeat_interleave(self.spec.group, -1)
            numbers = reference.quantize(numbers.float() / of_heads[..., None], self.spec.query_dtype, None)
        reference.indexable(self.q)[: len(numbers)] = reference.indexable(numbers)

    def _deal_pages(self, page_size: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Give every request pages in no order, and return the page and the token in it of every key."""
        table = self.batch.block_table
        assert table is not None
        counts = [-(-kv_len // page_size) for kv_len in self.kv_lens]
        total = self.keys.shape[0]
        assert sum(counts) <= total, f"{sum(counts)} pages do not fit {total}"
        order = torch.randperm(total, generator=random, device=self.device)
        # The last page has the largest address: it must be among those in use.
        order = torch.cat([order[order == total - 1], order[order != total - 1]])
        bad = torch.tensor(BAD_PAGES, dtype=torch.int32, device=self.device)
        spread = torch.arange(table.numel(), device=self.device).view(table.shape) % len(BAD_PAGES)
        table.copy_(bad[spread])
        pages, tokens, first = [order[:0]], [order[:0]], 0
        for request, (kv_len, count) in enumerate(zip(self.kv_lens, counts, strict=True)):
            mine, first = order[first : first + count], first + count
            table[request, :count] = mine.int()
            token = torch.arange(kv_len, device=self.device)
            pages.append(mine[token // page_size])
            tokens.append(token % page_size)
        return torch.cat(pages), torch.cat(tokens)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """[n + 1] int32: where each of n consecutive ranges starts, and where the last one ends."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def normal(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Standard normal float32 numbers on the generator's device."""
    return torch.randn(shape, generator=random, device=random.device)


def not_a_number(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN, in a float of any width: all bits set are NaN in each."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(255)
    return tensor


def pollute(tensor: torch.Tensor) -> None:
    """NaN in every other row of the next to last dimensions, huge numbers of both signs in the others."""
    if tensor.dtype == NVFP4_KV.dtype:
        elements, scales = (part.transpose(0, 1) for part in NVFP4_KV.parts(tensor))
        elements[0::2], elements[1::4], elements[3::4] = 0xFF, 0x77, 0xFF
        scales[0::2], scales[1::2] = 0x7F, 0x7E  # NaN, 448
        return
    huge = torch.finfo(tensor.dtype).max
    rows = tensor if tensor.dim() < 4 else tensor.transpose(0, 1)  # paged: alternate within a page
    for start, value in ((0, math.nan), (1, huge), (2, math.nan), (3, -huge)):
        part = rows[start::4]
        if is_fp8(tensor.dtype):
            reference.indexable(part).fill_(int(torch.tensor(value).to(tensor.dtype).view(torch.uint8)))
        else:
            part.fill_(value)


def empty_like_cache(
    spec: AttentionSpec, lead: tuple[int, ...], layout: Layout, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN keys [*lead, heads_kv, head_dim] and values [*lead, heads_kv, head_dim_v] in a memory layout.

    Absorbed MLA's are [*lead, 1, head_dim], and values their first head_dim_v elements.
    """
    dim, dim_v, heads = spec.head_dim, spec.head_dim_v, spec.heads_kv
    if spec.kv.nvfp4:
        return empty_nvfp4_cache(spec, lead, layout, device)

    def empty(*shape: int) -> torch.Tensor:
        return not_a_number(shape, spec.kv_dtype, device)

    if spec.mla:
        cache = empty(lead[0], lead[1] + 1, dim + 16)[:, :-1, :dim] if layout is Layout.PADDED else empty(*lead, dim)
        return cache.unsqueeze(-2), cache.unsqueeze(-2)[..., :dim_v]
    if layout is Layout.SEPARATE:
        return empty(*lead, heads, dim), empty(*lead, heads, dim_v)
    if layout is Layout.HEADS_FIRST:
        both = empty(*lead[:-1], heads, lead[-1], dim + dim_v).transpose(-3, -2)
    elif layout is Layout.PADDED:
        both = empty(lead[0] + 1, *(n + 1 for n in lead[1:]), heads + 1, dim + dim_v + 16)
        both = both[tuple(slice(n) for n in lead)][..., :heads, : dim + dim_v]
    else:
        both = empty(*lead, heads, dim + dim_v)
    return both[..., :dim], both[..., dim:]


def empty_nvfp4_cache(
    spec: AttentionSpec, lead: tuple[int, ...], layout: Layout, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for NVFP4: a page of keys, then a page of values, each dense."""
    pages, tokens = lead
    heads, apart = spec.heads_kv, layout is Layout.SEPARATE
    heads_first = layout is not Layout.SIDE_BY_SIDE
    widths = [spec.kv.width(dim) for dim in (spec.head_dim, spec.head_dim_v)]
    sizes = [tokens * heads * width for width in widths]
    room = 32 if layout is Layout.PADDED else 0

    def view(storage: torch.Tensor, first: int, width: int) -> torch.Tensor:
        shape = (pages, heads, tokens, width) if heads_first else (pages, tokens, heads, width)
        strides = (storage.shape[1], shape[2] * width, width, 1)
        found = storage.as_strided(shape, strides, first)
        return (found.transpose(1, 2) if heads_first else found).view(spec.kv_dtype)

    if apart:
        keys, values = (not_a_number((pages, size), torch.uint8, device) for size in sizes)
        return view(keys, 0, widths[0]), view(values, 0, widths[1])
    both = not_a_number((pages, sum(sizes) + room), torch.uint8, device)
    return view(both, 0, widths[0]), view(both, sizes[0], widths[1])


def alibi_slopes(heads: int) -> torch.Tensor:
    """[heads] float32: the geometric slopes of Press et al. (2022)."""
    return torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])


def scale_of(spec: AttentionSpec, scale: float, by_head: bool, requests: int = 1) -> torch.Tensor:
    """A scale of fp8 keys or values: [1] float32; by_head: [heads_kv], each twice that of the head before.

    With `spec.scales_by_request` [requests, heads_kv] of a wider tensor, each request's half that of the one before.
    """
    if spec.scales_by_request:
        halves = 2.0 ** -torch.arange(requests).remainder(3)
        of_heads = scale_of(replace(spec, scales_by_request=False), scale, by_head).expand(spec.heads_kv)
        wider = torch.full((requests, spec.heads_kv + 1), float("nan"))
        wider[:, 1:] = halves[:, None] * of_heads
        return wider[:, 1:]
    return scale * 2.0 ** torch.arange(spec.heads_kv if by_head else 1).remainder(4)


def out_scale_of(spec: AttentionSpec, device: torch.device | str) -> torch.Tensor | None:
    if not spec.is_quantized_out:
        return None
    return torch.full((1,), NVFP4_OUT_SCALE if spec.is_nvfp4_out else OUT_SCALE, device=device)


def make_problem(
    spec: AttentionSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    causal: Sequence[bool] | None = None,
    around: Surroundings | None = None,
    scales_by_head: bool = False,
) -> Problem:
    """A problem with these lengths.

    Args:
        q_lens, kv_lens: tokens of each request; (0, 0) is a padding request.
        causal: of each request, where spec.causality is PER_REQUEST.
        scales_by_head: each key head has fp8 scales of its own.
    """
    around = around or Surroundings()
    device = torch.device(device)
    requests = len(q_lens)
    assert len(kv_lens) == requests, f"{len(q_lens)=} and {len(kv_lens)=} differ"
    num_tokens = sum(q_lens) + around.padding_tokens
    max_seq_len = max(around.max_seq_len, *kv_lens, 0)

    width = spec.heads_q * spec.head_dim
    q_shape = (num_tokens + around.spare_rows, width * (3 if around.fused_q else 1))
    q_rows = not_a_number(q_shape, spec.query_dtype, device)
    q = q_rows[:, :width].view(-1, spec.heads_q, spec.head_dim)

    block_table = kv_start_loc = None
    if spec.page_size is None:
        lead: tuple[int, ...] = (sum(kv_lens) + 5,)
        kv_start_loc = torch.zeros(requests + 1, dtype=torch.int32, device=device)
    else:
        lead = (sum(-(-kv_len // spec.page_size) for kv_len in kv_lens) + around.spare_pages, spec.page_size)
        columns = -(-max_seq_len // spec.page_size)
        block_table = torch.zeros(requests + 1, columns + 3, dtype=torch.int32, device=device)[:requests, :columns]
    keys, values = empty_like_cache(spec, lead, around.layout, device)

    random = torch.Generator(device).manual_seed(seed)
    batch = Batch(
        query_start_loc=torch.zeros(requests + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(requests, dtype=torch.int32, device=device),
        num_tokens=num_tokens,
        max_query_len=max(around.max_query_len, *q_lens, 0),
        max_seq_len=max_seq_len,
        block_table=block_table,
        kv_start_loc=kv_start_loc,
        causal=None if causal is None else torch.tensor(list(causal), dtype=torch.bool, device=device),
    )
    problem = Problem(
        spec=spec,
        batch=batch,
        q=q,
        keys=keys,
        values=values,
        sinks=(normal((spec.heads_q,), random) * 2).to(around.sinks_dtype) if spec.sinks else None,
        alibi_slopes=alibi_slopes(spec.heads_q).to(device) if spec.alibi else None,
        k_scale=scale_of(spec, K_SCALE, scales_by_head, requests).to(device) if spec.is_quantized_kv else None,
        v_scale=scale_of(spec, V_SCALE, scales_by_head, requests).to(device) if spec.is_quantized_kv else None,
        q_scale=scale_of(spec, Q_SCALE, scales_by_head, requests).to(device) if spec.is_fp8_q else None,
        out_scale=out_scale_of(spec, device),
        stale=around.stale,
    )
    assert (causal is not None) == (spec.causality is Causality.PER_REQUEST)
    problem.fill(q_lens, kv_lens, seed)
    return problem
