# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's and FA4's MLA decode are called as their documentation says, by functions that stand in for theirs."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

import benchmarks
from benchmarks import check
from benchmarks.attention import flash_attention_4, flashinfer_peers
from benchmarks.attention.problems import Problem, latent
from benchmarks.held_out import PEERS
from dsl_backend.runtime import target as targets

RANK, ROPE = 512, 64


def attend(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention over latents: q [requests, queries, heads, 576], cache [pages, page_size, 576]."""
    made = []
    for one, pages, length in zip(q, table, lengths.tolist(), strict=True):
        rows = cache[pages[: math.ceil(length / cache.shape[1])].long()].flatten(0, 1)[:length].double()
        scores = torch.einsum("qhd,kd->hqk", one.double(), rows) * scale
        later = torch.arange(length)[None] > torch.arange(length - len(one), length)[:, None]
        made.append(torch.einsum("hqk,kd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), rows[:, :RANK]))
    return torch.stack(made)


class FlashInfer:
    """What `flashinfer.decode` and `flashinfer.utils` have, as of 0.6.18."""

    def __init__(self) -> None:
        self.backends: list[str] = []

    def trtllm_batch_decode_with_kv_cache_mla(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        bmm1_scale: float,
        bmm2_scale: float,
        backend: str,
        multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
        **sizes: int,
    ) -> None:
        requests, queries, heads, dim = query.shape
        longest = sizes.pop("max_seq_len")
        assert sizes == {"qk_nope_head_dim": 128, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
        assert dim == RANK + ROPE
        assert kv_cache.shape[1:] == (64, dim)
        assert block_tables.shape[0] == requests
        assert block_tables.shape[1] % (128 // kv_cache.shape[1]) == 0
        assert not workspace_buffer.any()
        assert longest == seq_lens.max()
        assert out.shape == ((requests, heads, RANK) if backend == "xqa" else (requests, queries, heads, RANK))
        assert (multi_ctas_kv_counter_buffer is None) == (backend != "trtllm-gen")
        self.backends.append(backend)
        made = attend(query, kv_cache, block_tables, seq_lens, bmm1_scale) * bmm2_scale
        out.copy_(made.view(out.shape))

    def get_trtllm_gen_multi_ctas_kv_counter_bytes(self, requests: int, heads: int, sms: int) -> int:
        return 4 * requests * heads * sms

    def get_device_sm_count(self, device: torch.device) -> int:
        return 148


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, None]:
    """FA4's: `softmax(scale (q k + qv v)) v`, whose shared memory holds pages of 128."""
    assert causal
    assert k.shape[1:] == (128, 1, ROPE)
    assert v.shape[1:] == (128, 1, RANK)
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), seqused_k.max())
    requests = torch.cat([qv, q], -1).split(cu_seqlens_q.diff().tolist())
    cache = torch.cat([v, k], -1)[:, :, 0]
    parts = [
        attend(one[None], cache, page_table[index : index + 1], seqused_k[index : index + 1], softmax_scale)[0]
        for index, one in enumerate(requests)
    ]
    return torch.cat(parts).to(q.dtype), None


def error_of(name: str, problem: Problem) -> None:
    """Raises WrongResultError: a column's result is not the operator's."""
    operator = benchmarks.operators()["mla-decode"]
    inputs = operator.build(problem, 2, torch.device("cpu"), 3)
    (column,) = (one for one in operator.providers([]) if one.name == name)
    out = column.prepare(problem, inputs).run(1)
    check.require_right(out, operator.reference(problem, inputs, 1), problem.limits)


@pytest.mark.parametrize(
    ("name", "backend", "queries"),
    [("FlashInfer CuTe DSL", "cute-dsl", 2), ("trtllm-gen", "trtllm-gen", 2), ("XQA", "xqa", 1)],
)
def test_a_backend_of_flashinfer(name: str, backend: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an odd number of pages, of which the table has one more."""
    stand_in = FlashInfer()
    for module in ("decode", "utils"):
        monkeypatch.setitem(sys.modules, f"flashinfer.{module}", stand_in)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(decode=stand_in, utils=stand_in))
    monkeypatch.setattr(flashinfer_peers, "WORKSPACE_BYTES", 16)
    error_of(name, latent(4, [queries] * 3, [20, 150, 64]))
    assert stand_in.backends == [backend]


def test_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_4, "home_of", lambda latent: flash_attention_4.PACKAGE if latent else None)
    monkeypatch.setattr(flash_attention_4, "function_of", {flash_attention_4.PACKAGE: flash_attn_varlen_func}.get)
    error_of("FA4", latent(4, [1, 3, 2], [20, 150, 128]))


@pytest.mark.parametrize(
    ("arch", "served"),
    [
        ("sm_90a", set()),
        ("sm_100a", {"FlashInfer CuTe DSL", "trtllm-gen", "FA4"}),
        ("sm_120a", {"XQA"}),
    ],
)
def test_each_is_for_some_gpus(arch: str, served: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_peers, "missing", lambda *_: [])
    monkeypatch.setattr(flash_attention_4, "missing", lambda latent: [])
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch(arch))
    columns = {one.name: one for one in benchmarks.operators()["mla-decode"].providers([])}
    names = ("FlashInfer CuTe DSL", "trtllm-gen", "XQA", "FA4")
    problem = latent(16, [1, 1], [30, 40])
    assert {name for name in names if not columns[name].objections(problem)} == served
    for name in {*names} - served:
        (reason,) = columns[name].objections(problem)
        assert f"this is SM{arch[3:-1]}" in reason
    assert set(PEERS["mla-decode"]) >= {*names}
