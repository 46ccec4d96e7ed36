# SPDX-License-Identifier: Apache-2.0
"""Bytes, operations, floors and rows of the benchmarks."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import benchmarks
from benchmarks.attention import flashinfer_peers, ours, rows, torch_sdpa, vllm_dense, vllm_mla
from benchmarks.attention.problems import WriteProblem, dense, keys_seen, latent, packed, twice_pairs
from benchmarks.case import TABLE, Case, select
from benchmarks.devices import CEILINGS, floor_us
from dsl_backend.runtime import target as targets

K = 1024


def a_case(traffic_bytes: int, flops: int) -> Case[None]:
    return Case(id="x", group=TABLE, problem=None, parameters={}, traffic_bytes=traffic_bytes, flops=flops)


def test_decode_reads_every_key_and_value_once() -> None:
    problem = dense(128, 32, 8, [1] * 8, [8 * K] * 8)
    cache = 8 * 8 * K * 8 * (128 + 128) * 2
    queries_and_outputs = 8 * 32 * (128 + 128) * 2
    assert problem.traffic_bytes == cache + queries_and_outputs


def test_fp8_halves_the_cache_and_nothing_else() -> None:
    wide = dense(128, 32, 8, [1], [8 * K])
    narrow = dense(128, 32, 8, [1], [8 * K], kv_dtype=torch.float8_e4m3fn)
    assert wide.traffic_bytes - narrow.traffic_bytes == 8 * K * 8 * 256


def test_latent_rows_are_read_once_for_all_heads() -> None:
    assert latent(128, [1], [4 * K]).traffic_bytes == 4 * K * 576 * 2 + 128 * (576 + 512) * 2


def test_a_causal_square_counts_as_half() -> None:
    n = 4 * K
    assert dense(128, 32, 8, [n], [n]).flops == 4 * n * n * 128 * 32 // 2
    assert packed(16, [n]).flops == 2 * n * n * (192 + 128) * 16 // 2


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window"), [*itertools.product((1, 2, 9), (9, 20), (None, 0, 1, 5, 8, 18, 19, 40))]
)
def test_pairs_and_keys_match_the_mask(q_len: int, kv_len: int, window: int | None) -> None:
    visible = [
        [j <= p and (window is None or p - j <= window) for j in range(kv_len)] for p in range(kv_len - q_len, kv_len)
    ]
    pairs = sum(map(sum, visible))
    # the convention takes half of the diagonal of the new tokens' square: q_len / 2 pairs less
    assert twice_pairs(q_len, kv_len, window) == 2 * pairs - q_len
    assert keys_seen(q_len, kv_len, window) == sum(map(any, zip(*visible, strict=True)))


def test_writes_count_reads_and_stores() -> None:
    problem = WriteProblem(tokens=10, heads_kv=8, head_dim=128, head_dim_v=128)
    assert problem.traffic_bytes == 10 * 8 * 256 * 2 * 2 + 10 * 8


def test_floor_is_the_larger_of_the_two_times() -> None:
    h200 = CEILINGS["NVIDIA H200"]
    assert floor_us(a_case(int(4.4e12), 1), "NVIDIA H200") == pytest.approx(1e6)
    assert floor_us(a_case(1, int(h200.flops_per_second)), "NVIDIA H200") == pytest.approx(1e6)
    assert floor_us(a_case(1, 1), "an unknown device") is None


def test_zipf_lengths_are_within_bounds_skewed_and_the_same_each_time() -> None:
    lengths = rows.zipf_lengths(4000, seed=5)
    assert lengths == rows.zipf_lengths(4000, seed=5) != rows.zipf_lengths(4000, seed=6)
    assert min(lengths) >= 16
    assert max(lengths) <= 32 * K
    # frequency ∝ 1/length puts the median at the geometric mean of the bounds
    assert sorted(lengths)[2000] == pytest.approx(math.sqrt(16 * 32 * K), rel=0.15)


DECODE = [
    f"{heads}-b{batch}-k{keys}"
    for heads in ("hd128-h32x8", "hd64-h64x8", "hd128-h8x1")
    for batch, keys in ((1, "8k"), (1, "128k"), (8, "8k"), (64, "1k"), (64, "8k"), (256, "2k"))
]
PREFILL = [
    f"{heads}-{shape}" for heads in ("hd128-h32x8", "hd64-h64x8", "hd256-h16x2") for shape in ("16x1k", "4x4k", "1x16k")
]
LATENT = [
    f"h{heads}-b{batch}-k{keys}-q{q}"
    for heads in (16, 128)
    for batch, keys in ((1, "8k"), (8, "8k"), (64, "4k"), (128, "4k"))
    for q in (1, 2)
]
PACKED = ["h16-16x1k", "h16-4x4k", "h16-1x16k"]


@pytest.mark.parametrize(
    ("operator", "ids"),
    [("decode", DECODE), ("prefill", PREFILL), ("mla-decode", LATENT), ("mla-prefill", PACKED)],
)
def test_the_table_has_its_rows(operator: str, ids: list[str]) -> None:
    cases = benchmarks.operators()[operator].cases()
    assert sorted(case.id for case in select(cases, None)) == sorted(ids)


@pytest.mark.parametrize("operator", ["decode", "prefill", "mla-decode", "mla-prefill", "write-kv"])
def test_ids_are_unique_and_every_operator_has_a_tiny_row(operator: str) -> None:
    cases = benchmarks.operators()[operator].cases()
    ids = [case.id for case in cases]
    assert len(set(ids)) == len(ids)
    assert [case.group for case in select(cases, "^tiny")] == ["tiny"]
    assert all(case.traffic_bytes > 0 for case in cases)
    assert all(case.problem.spec.page_size in (16, None) for case in cases)


def test_further_groups_cover_ragged_windows_fp8_and_short_queries() -> None:
    groups = {case.group for case in benchmarks.operators()["decode"].cases()}
    assert {"ragged", "window128", "window4k", "fp8", "q1", "q2", "q4", "q8", "tiny", TABLE} <= groups


@pytest.mark.parametrize("operator", ["decode", "prefill", "mla-decode"])
def test_fp8_rows_have_both_formats(operator: str) -> None:
    chosen = select(benchmarks.operators()[operator].cases(), "fp8")
    found = {case.group: case.problem.kv_dtype for case in chosen}
    assert found == {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
    assert all(case.problem.is_fp8_kv for case in chosen)


# FlashInfer's MLA decode by the backends of one function.
FLASHINFER_LATENT = {"FlashInfer CuTe DSL", "trtllm-gen", "XQA"}


@pytest.mark.parametrize("operator", ["decode", "prefill", "mla-decode"])
def test_a_peer_that_cannot_read_fp8_keys_says_why(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vllm_dense, vllm_mla, flashinfer_peers, torch_sdpa):
        monkeypatch.setattr(module, "missing", lambda *_: ["needs a CUDA device"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_100a"))
    cases = select(benchmarks.operators()[operator].cases(), "fp8")
    said = {}
    # Ours by other names have no such reason.
    own = ("by bounds", "e4m3", "ordinary", "Triton")
    peers = [peer for peer in benchmarks.operators()[operator].providers([])[1:] if peer.name not in own]
    for case in cases:
        for peer in peers:
            reasons = [reason for reason in peer.objections(case.problem) if "fp8" in reason]
            said.setdefault(peer.name, {})[case.group] = reasons
    for name, by_group in said.items():
        if name == "FLASHINFER":
            assert by_group == {"fp8": [], "fp8-e5m2": []}
        else:
            assert by_group["fp8-e5m2"], name
    served = {name for name, by_group in said.items() if not by_group["fp8"]}
    dense = {"TRITON_ATTN", "FA3", "FLASHINFER", "FlashInfer CuTe DSL", "XQA" if operator == "decode" else "cuDNN"}
    latent = {"TRITON_MLA", "FLASHMLA", *FLASHINFER_LATENT}
    assert served == (latent if operator == "mla-decode" else dense)


def test_default_peers_of_attention() -> None:
    found = {
        name: {one.name for one in benchmarks.operators()[name].providers([])[1:] if one.default}
        for name in ("decode", "prefill", "mla-decode", "mla-prefill")
    }
    assert found["decode"] == {"TRITON_ATTN", "FA3", "FA4", "FLASHINFER", "FlashInfer CuTe DSL", "XQA"}
    assert found["prefill"] == {"TRITON_ATTN", "FA3", "FA4", "FLASHINFER", "FlashInfer CuTe DSL", "cuDNN"}
    vllms = {"TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA"}
    assert found["mla-decode"] == {*vllms, "FA4", "FLASHINFER_MLA", *FLASHINFER_LATENT}
    assert found["mla-prefill"] == {"FA3", "FA4", "FLASHINFER", "cuDNN"}


def test_the_page_size_reaches_the_problems() -> None:
    cases = benchmarks.operators(page_size=64)["decode"].cases()
    assert {case.problem.page_size for case in cases} == {64}


@pytest.mark.parametrize("operator", ["decode", "prefill", "mla-decode"])
def test_rows_of_batch_invariant_mode_have_the_ordinary_kernel_beside(operator: str) -> None:
    """By name, and in these rows alone: it is what the mode is held against."""
    table = benchmarks.operators()[operator]
    provider = next(one for one in table.providers([]) if one.name == "ordinary")
    assert not provider.default
    cases = table.cases()
    invariant = select(cases, "invariant")
    assert invariant
    assert all(case.problem.batch_invariant for case in invariant)
    assert not ours.ordinary(invariant[0].problem).batch_invariant
    for case in cases:
        refused = "not of batch-invariant mode" in " ".join(provider.objections(case.problem))
        assert refused != case.problem.batch_invariant, case.id


def test_peers_split_no_keys_in_batch_invariant_mode() -> None:
    """As vLLM's builders with VLLM_BATCH_INVARIANT=1."""
    problem = dense(128, 32, 8, [1] * 8, [8 * K] * 8)
    assert vllm_dense.flash_splits(problem) == vllm_dense.FLASH_SPLITS_IN_GRAPHS
    assert vllm_dense.flash_splits(problem, 2) == 0
    assert vllm_dense.flash_splits(replace(problem, batch_invariant=True)) == 1
