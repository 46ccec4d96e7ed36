# SPDX-License-Identifier: Apache-2.0
"""Inputs lie in memory as vLLM's do, and the exact results agree with the package's reference."""

import pytest
import torch

import benchmarks
from benchmarks.attention import inputs, oracle, ours, writes
from benchmarks.attention.problems import Problem, WriteProblem, dense, latent, packed
from dsl_backend.attention import api, reference
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
PROBLEMS = {
    "decode": dense(64, 4, 2, [1, 1, 1], [5, 16, 40]),
    "one key head": dense(64, 4, 1, [1, 1], [17, 3]),
    "prefill": dense(64, 4, 2, [7, 33], [7, 40]),
    "window": dense(64, 4, 2, [1, 9], [40, 30], window_left=6),
    "fp8": dense(64, 4, 2, [1, 4], [40, 30], kv_dtype=FP8),
    "fp8 e5m2": dense(64, 4, 2, [1, 4], [40, 30], kv_dtype=torch.float8_e5m2),
    "values of another size": dense(64, 4, 2, [1, 9], [40, 30], head_dim_v=32),
    "latent": latent(4, [1, 2], [20, 40]),
    "latent fp8": latent(4, [1, 2], [20, 40], kv_dtype=FP8),
    "packed": packed(2, [7, 33]),
    "page 64": dense(64, 4, 2, [1, 2], [100, 65], page_size=64),
}


@pytest.fixture(params=PROBLEMS, ids=str)
def problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]


def test_the_dense_cache_has_a_heads_key_and_value_side_by_side() -> None:
    layer = inputs.build(dense(64, 4, 2, [1], [40]), 1, CPU).layers[0]
    assert layer.cache.shape == (3, 16, 2, 128)
    assert layer.cache.is_contiguous()
    assert layer.keys.shape == layer.values.shape == (3, 16, 2, 64)
    assert layer.keys.stride() == layer.values.stride() == (16 * 2 * 128, 2 * 128, 128, 1)
    assert layer.values.data_ptr() - layer.keys.data_ptr() == 64 * 2
    # [pages, heads, page, 2 * head_dim], as vLLM sees it, transposed and split is the same
    logical = layer.cache.transpose(1, 2)
    keys, values = logical.transpose(1, 2).split(64, dim=-1)  # type: ignore[no-untyped-call]
    assert keys.stride() == layer.keys.stride()
    assert values.data_ptr() == layer.values.data_ptr()


def test_the_latent_cache_has_rows_of_576() -> None:
    layer = inputs.build(latent(4, [1], [40]), 1, CPU).layers[0]
    assert layer.cache.shape == (3, 16, 576)
    assert layer.keys.shape == (3, 16, 1, 576)
    assert layer.values.shape == (3, 16, 1, 512)
    assert layer.values.data_ptr() == layer.keys.data_ptr()


def test_pages_are_shuffled_and_each_is_used_once() -> None:
    lens = (500, 16, 1, 333)
    table, pages = inputs.shuffled_table(lens, 16, torch.Generator().manual_seed(0))
    counts = [-(-length // 16) for length in lens]
    used = torch.cat([table[request, :count] for request, count in enumerate(counts)])
    assert pages == sum(counts)
    assert sorted(used.tolist()) == list(range(pages))
    assert (used[1:] - used[:-1] == 1).float().mean() < 0.2


def test_every_layer_has_data_of_its_own(problem: Problem) -> None:
    built = inputs.build(problem, 3, CPU)
    first, second, _ = built.layers
    assert not torch.equal(first.q, second.q)
    assert not torch.equal(inputs.movable(first.cache), inputs.movable(second.cache))


def test_the_batch_passes_the_interfaces_checks(problem: Problem) -> None:
    built = inputs.build(problem, 1, CPU)
    api.check_batch(problem.spec, built.batch)


def unpaged(problem: Problem, built: inputs.Inputs) -> tuple[AttentionSpec, Batch, torch.Tensor, torch.Tensor]:
    """The same problem with its keys packed."""
    import dataclasses

    layer = built.layers[0]
    requests = range(problem.requests)
    keys = torch.cat([inputs.tokens_of(problem, built, layer.keys, request) for request in requests])
    values = torch.cat([inputs.tokens_of(problem, built, layer.values, request) for request in requests])
    spec = dataclasses.replace(problem.spec, page_size=None)
    batch = dataclasses.replace(
        built.batch, block_table=None, kv_start_loc=inputs.starts_of(problem.kv_lens, built.batch.seq_lens.device)
    )
    return spec, batch, keys, values


def test_paged_keys_give_the_same_attention_as_packed_ones(problem: Problem) -> None:
    built = inputs.build(problem, 1, CPU)
    layer = built.layers[0]
    paged, _ = reference.attention(problem.spec, built.batch, layer.q, layer.keys, layer.values)
    spec, batch, keys, values = unpaged(problem, built)
    flat, _ = reference.attention(spec, batch, layer.q, keys, values)
    torch.testing.assert_close(paged, flat)


def test_the_oracle_is_the_packages_reference_in_float64(problem: Problem) -> None:
    built = inputs.build(problem, 2, CPU)
    for index, layer in enumerate(built.layers):
        exact, _ = reference.attention(
            problem.spec, built.batch, layer.q, layer.keys, layer.values, compute_dtype=torch.float64
        )
        sampled = oracle.reference(problem, built, index)
        torch.testing.assert_close(sampled.values, exact[sampled.rows], rtol=1e-12, atol=1e-12)


def test_the_oracle_samples_long_queries_with_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "ROWS", 16)
    problem = dense(64, 4, 2, [100, 60], [100, 60])
    sampled = oracle.reference(problem, inputs.build(problem, 1, CPU), 0)
    assert sampled.rows.numel() == 16
    assert {0, 99, 100, 159} <= set(sampled.rows.tolist())


@pytest.mark.parametrize("page_size", [16, 64])
def test_repaging_keeps_every_token(page_size: int) -> None:
    problem = latent(4, [1, 1], [20, 140])
    built = inputs.build(problem, 2, CPU)
    table, caches = inputs.repage(problem, built, page_size)
    for layer, cache in zip(built.layers, caches, strict=True):
        assert cache.shape[1:] == (page_size, 576)
        for request, kv_len in enumerate(problem.kv_lens):
            pages = table[request, : inputs.pages_of(kv_len, page_size)].long()
            rows = cache[pages].flatten(0, 1)[:kv_len]
            assert torch.equal(rows, inputs.tokens_of(problem, built, layer.cache, request))


@pytest.mark.parametrize("latent_cache", [False, True])
def test_written_rows_are_the_references(latent_cache: bool) -> None:
    heads, head_dim = (1, 512) if latent_cache else (2, 64)
    problem = WriteProblem(tokens=9, mla=latent_cache, heads_kv=heads, head_dim=head_dim, head_dim_v=64)
    built = writes.build(problem, 1, CPU)
    writes.poison(built)
    layer = built.layers[0]
    reference.write_kv(layer.key, layer.value, layer.key_cache, layer.value_cache, built.slots)
    exact = writes.reference(problem, built, 0)
    assert torch.equal(built.written(layer.cache).double(), exact.values)


def test_poison_reaches_every_output() -> None:
    operator = benchmarks.operators()["decode"]
    built = inputs.build(PROBLEMS["decode"], 2, CPU)
    operator.poison(built)
    assert all(layer.out.isnan().all() for layer in built.layers)


@pytest.mark.parametrize(("arch", "knows"), [("sm_90", True), ("sm_100", False), ("sm_80", False)])
def test_plans_know_the_lengths_that_vllm_gives_them(arch: str, knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a batch of prompts has a launch for short queries too, which finds none."""
    target = from_arch(arch)
    monkeypatch.setattr(targets, "detect", lambda device: target)
    prompts = PROBLEMS["prefill"]
    batch = inputs.build(prompts, 1, CPU).batch
    found = ours.with_lengths(prompts, batch)
    assert (found.host_lengths is not None) == knows
    if found.host_lengths is not None:
        assert found.host_lengths.queries.tolist() == [7, 33]
        assert found.host_lengths.keys.tolist() == [7, 40]
    for name in ("latent", "packed"):
        other = inputs.build(PROBLEMS[name], 1, CPU).batch
        assert ours.with_lengths(PROBLEMS[name], other) is other


def test_prompts_have_one_launch_where_lengths_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    target = from_arch("sm_90")
    monkeypatch.setattr(targets, "detect", lambda device=CPU: target)
    prompts = dense(128, 2, 2, [220] * 70, [220] * 70)
    batch = inputs.build(prompts, 1, CPU).batch
    planner = Planner(prompts.spec, target, Workspace(CPU))
    parts = [len(planner.plan(one).parts) for one in (ours.with_lengths(prompts, batch), batch)]
    assert parts == [1, 2]
