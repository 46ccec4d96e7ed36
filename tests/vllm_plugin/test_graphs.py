# SPDX-License-Identifier: Apache-2.0
"""Graphs of mixed batches: what is captured at a size must be right for every batch that vLLM may replay in it.

On a GPU a CUDA graph is captured and replayed. On a CPU the plan that was bound at capture is launched again on the
same tensors, which is what a graph does with it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dsl_backend.attention import reference
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin.dense import DSLAttentionImpl, DSLMetadata, DSLMetadataBuilder

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
HEADS, HEADS_KV, DIM, PAGE = (8, 2, 128, 16) if ON_GPU else (4, 2, 64, 16)
MOST_REQUESTS = 16 if ON_GPU else 4
LONGEST = 640 if ON_GPU else 96
SIZES = (1, 2, 8, 24, 64, 512) if ON_GPU else (1, 2, 4, 24)
PAGES = 1 + MOST_REQUESTS * (LONGEST // PAGE)


@dataclass
class Lengths:
    """New tokens and all tokens of each request of a replayed batch."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


def adversarial(tokens: int, requests: int) -> list[Lengths]:
    """Batches that a graph of so many tokens and requests may be replayed for."""
    context = min(37, LONGEST - tokens)
    batches = [
        # One prompt with all tokens; behind cached context; one that does not fill the graph.
        Lengths((tokens,), (tokens,)),
        Lengths((tokens,), (tokens + context,)),
        Lengths((max(1, tokens - 3),), (max(1, tokens - 3) + 1,)),
        # As many decodes as there are requests, of very different lengths.
        Lengths((1,) * requests, tuple(1 + (LONGEST - 1) * i // max(1, requests) for i in range(requests))),
        Lengths((1,), (LONGEST,)),
    ]
    if requests > 1 and tokens > requests:
        # One long prompt among decodes, in the middle and at the end.
        rest = tokens - requests + 1
        for at in (requests // 2, requests - 1):
            q_lens = tuple(rest if i == at else 1 for i in range(requests))
            batches.append(Lengths(q_lens, tuple(q + 11 * i for i, q in enumerate(q_lens))))
        # Ragged prompts.
        share = tokens // requests
        batches.append(Lengths((share,) * requests, tuple(share + 5 * i for i in range(requests))))
    return batches


class Buffers:
    """What vLLM's runner keeps for a graph, with room for its tokens and requests."""

    def __init__(self, tokens: int, requests: int, device: torch.device) -> None:
        self.tokens, self.requests = tokens, requests
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        self.table = torch.zeros(requests, LONGEST // PAGE, dtype=torch.int32, device=device)
        self.causal = torch.ones(requests, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(3)
        self.query = torch.randn(tokens, HEADS, DIM, generator=generator).to(device, torch.bfloat16)
        # [pages, heads_kv, page size, both dims]
        self.cache = torch.randn(PAGES, HEADS_KV, PAGE, 2 * DIM, generator=generator).to(device, torch.bfloat16)
        self.order = torch.randperm(PAGES - 1, generator=generator).to(device, torch.int32) + 1
        self.output = torch.empty(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device)

    def fill(self, batch: Lengths) -> None:
        """As the runner does before a replay: padding requests have no token and no key."""
        served, device = len(batch.q_lens), self.lengths.device
        ends = torch.tensor(batch.q_lens, device=device).cumsum(0).int()
        self.starts.zero_()
        self.starts[1 : served + 1] = ends
        self.starts[served + 1 :] = ends[-1]
        self.lengths.zero_()
        self.lengths[:served] = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
        self.table.zero_()
        used = 0
        for request, kv_len in enumerate(batch.kv_lens):
            pages = -(-kv_len // PAGE)
            self.table[request, :pages] = self.order[used : used + pages]
            used += pages
        self.output.fill_(math.nan)

    def common(self, max_query_len: int, causal: Any) -> CommonAttentionMetadata:
        # On the host for both, as vLLM's are when it captures.
        host = torch.arange(self.requests + 1, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=host,
            seq_lens=self.lengths,
            num_reqs=self.requests,
            num_actual_tokens=self.tokens,
            max_query_len=max_query_len,
            max_seq_len=LONGEST,
            block_table_tensor=self.table,
            slot_mapping=torch.full((self.tokens,), -1, device=self.lengths.device),
            causal=causal,
            seq_lens_cpu_upper_bound=host[1:],
        )


def captured(
    impl: DSLAttentionImpl, metadata: DSLMetadata, buffers: Buffers, layer: torch.nn.Module
) -> Callable[[], None]:
    """One layer's attention, as a graph; a call replays it."""

    def attend() -> None:
        query, cache = buffers.query, buffers.cache
        impl.forward(layer, query, query, query, cache, metadata, buffers.output)

    attend()
    if not ON_GPU:
        return attend
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    return graph.replay


def check_rows(impl: DSLAttentionImpl, buffers: Buffers, batch: Lengths, causal: list[bool]) -> None:
    """All rows of the batch against float64; rows beyond them are left as they were."""
    cache = buffers.cache.cpu().transpose(1, 2)
    spec = AttentionSpec(
        heads_q=HEADS,
        heads_kv=HEADS_KV,
        head_dim=DIM,
        head_dim_v=DIM,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        page_size=PAGE,
        scale=impl.scale,
        causality=Causality.PER_REQUEST,
        window_left=impl.base_spec.window_left,
        window_right=impl.base_spec.window_left,
    )
    served, rows = len(batch.q_lens), sum(batch.q_lens)
    step = Batch(
        query_start_loc=buffers.starts[: served + 1].cpu(),
        seq_lens=buffers.lengths[:served].cpu(),
        num_tokens=rows,
        max_query_len=max(batch.q_lens),
        max_seq_len=max(batch.kv_lens),
        block_table=buffers.table[:served].cpu(),
        causal=torch.tensor(causal),
    )
    exact, naive = (
        reference.attention(
            spec, step, buffers.query[:rows].cpu(), cache[..., :DIM], cache[..., DIM:], compute_dtype=dtype
        )[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    output = buffers.output.cpu()
    assert not output[:rows].isnan().any(), "rows that no kernel wrote"
    assert_within_budget(output[:rows], exact, naive)
    assert output[rows:].isnan().all(), "rows that belong to no request were written"


@pytest.fixture
def bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def graphs_config() -> VllmConfig:
    """A config that captures whole steps. Set as vLLM leaves it: on a CPU it would turn graphs off."""
    config = VllmConfig()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    return config


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize(
    "facts", [{}, {"sliding_window": 19}, {"causal": True}], ids=["plain", "window", "per-request"]
)
def test_replays_are_right_for_every_batch(tokens: int, facts: dict[str, Any], device: torch.device) -> None:
    config = graphs_config()
    per_request = facts.get("causal", False)
    requests = min(tokens, MOST_REQUESTS)
    with set_current_vllm_config(config):
        impl = DSLAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_KV, sliding_window=facts.get("sliding_window"))
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=DIM, dtype=torch.bfloat16)
        builder = DSLMetadataBuilder(spec, [], config, device)
    buffers = Buffers(tokens, requests, device)
    # As vLLM 0.26 to 0.30 capture: each request one token, which is also what they say of the longest one.
    buffers.fill(Lengths((1,) * requests, (1,) * requests))
    common = buffers.common(max_query_len=1, causal=buffers.causal if per_request else True)
    replay = captured(impl, builder.build_for_cudagraph_capture(common), buffers, torch.nn.Module())
    for batch in adversarial(tokens, requests):
        served = len(batch.q_lens)
        causal = [request % 2 == 0 if per_request else True for request in range(served)]
        buffers.fill(batch)
        buffers.causal[:served] = torch.tensor(causal, dtype=torch.int32, device=device)
        replay()
        check_rows(impl, buffers, batch, causal)


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        (CUDAGraphMode.FULL, 24),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 1),
        (CUDAGraphMode.FULL_DECODE_ONLY, 1),
        (CUDAGraphMode.PIECEWISE, 1),
        (CUDAGraphMode.NONE, 1),
    ],
    ids=str,
)
def test_only_graphs_of_mixed_batches_are_bound_by_their_tokens(mode: CUDAGraphMode, bound: int) -> None:
    """Graphs of decodes keep the bound that vLLM gives: they need no kernel for prompts."""
    config = graphs_config()
    config.compilation_config.cudagraph_mode = mode
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=DIM, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        builder = DSLMetadataBuilder(spec, [], config, torch.device("cpu"))
    common = Buffers(24, 4, torch.device("cpu")).common(max_query_len=1, causal=True)
    assert builder.build_for_cudagraph_capture(common).max_query_len == bound
    assert builder.build(0, common).max_query_len == 1
