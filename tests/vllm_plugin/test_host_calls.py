# SPDX-License-Identifier: Apache-2.0
"""What a layer costs the host: how many functions a call of each of the plugin's operators runs, launches left out.

In steps that no CUDA graph covers every layer makes these calls. The number is the same on every machine, as time is
not: on one core of a CPU at 2 GHz a function takes about 0.2 us.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from dsl_backend.attention import rope
from dsl_backend.attention.rope_spec import RopeSpec, RopeStyle
from dsl_backend.attention.spec import Causality
from dsl_backend.gemm.activation import Swiglu, encoded
from dsl_backend.linear import eager
from dsl_backend.norm import launch
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import workspace_of
from dsl_backend.sampling import dispatch
from dsl_backend.sampling import plan as sampling_plan
from dsl_backend.vllm_plugin import dense, metadata, validation
from dsl_backend.vllm_plugin.fused_mlp.method import GATED_LINEAR
from dsl_backend.vllm_plugin.norms.method import ADD_NORM, NORM
from dsl_backend.vllm_plugin.projections.method import PROJECTION, EmbeddingMethod
from dsl_backend.vllm_plugin.rope import method
from dsl_backend.vllm_plugin.rope.find import Rotation
from dsl_backend.vllm_plugin.rope.method import ROPE_WRITE_KV
from dsl_backend.vllm_plugin.sampler.row_sampler import RowSampler
from tests.vllm_plugin.test_dense import make_builder, make_step

# A GPU that no other test has: what is cached for it are functions that launch nothing.
GPU: Target = replace(targets.from_arch("sm_90a"), gpu="NVIDIA H200", sm_count=131)
BF16 = torch.bfloat16
REQUESTS, QUERIES, HEADS, HEADS_KV, DIM, PAGE, WIDTH = 16, 5, 32, 8, 128, 16, 4096
ROWS = REQUESTS * QUERIES
GREEDY, SAMPLED = "tokens of greedy rows", "tokens of rows with top-k and top-p"
PASS, LATER_PASS = "metadata and plan of a step", "metadata and plan of a later pass of a draft model"


# The most functions of a call. Before they were counted (2026-11-27) there were 176, 237, 90, 68, 54, 18 and 57; in
# each pass of a draft model 134 for its metadata and its plan (2026-11-28). Tokens took 106 and 104 (2026-11-29).
MOST = {
    "norm": 42,
    "add and norm": 53,
    "rotation and cache write": 50,
    "attention": 65,
    "projection": 52,
    "projection by cuBLAS": 14,
    "gate and up": 55,
    "logits": 58,
    GREEDY: 72,
    SAMPLED: 80,
    "metadata of a decode step": 10,
    PASS: 96,
    LATER_PASS: 34,
}


def calls_of(run: Callable[[], Any]) -> int:
    """Functions, of Python and of C, that a call runs once its layouts are known."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(2):
        run()
    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def nothing(*_: Any) -> None:
    """Stands for a compiled function."""


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch, plain_config: Any) -> Iterator[dict[str, Callable[[], Any]]]:
    """A call of each operator that a layer of Llama-8B's makes, on a GPU that is not there."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from dsl_backend.attention.cute import host, rope_host
    from dsl_backend.gemm import host as gemm_host
    from dsl_backend.norm.cute import host as norm_host

    # As `detect`, which looks at DSL_BACKEND_ARCH each time.
    monkeypatch.setattr(targets, "detect", lambda device=None: targets.overridden(GPU))
    monkeypatch.setattr(validation, "current_target", lambda: GPU)
    monkeypatch.setattr(host, "function_of", lambda *_: nothing)
    for module in (rope_host, gemm_host, norm_host):
        monkeypatch.setattr(module, "compile_kernel", lambda *_, **facts: nothing)
    for module in (launch, eager):
        monkeypatch.setattr(module, "_known", {})
    rope.writer.cache_clear()
    # Other tests zero these counters, which is an error where they are made in inference mode.
    workspace_of(torch.device("cpu"), 0).flags(1 << 16)
    with torch.inference_mode():
        yield {**of_rows(), **of_attention(monkeypatch), **of_step(plain_config), **of_sampling(monkeypatch)}
    rope.writer.cache_clear()


def of_rows() -> dict[str, Callable[[], Any]]:
    x, residual, few = (torch.zeros(rows, WIDTH, dtype=BF16) for rows in (ROWS, ROWS, 8))
    weight, square = torch.zeros(WIDTH, dtype=BF16), torch.zeros(WIDTH, WIDTH, dtype=BF16)
    narrow = torch.zeros(8, 8, dtype=BF16)
    activation = encoded(Swiglu())
    return {
        "norm": lambda: NORM(x, weight, 1e-6, 0.0),
        "add and norm": lambda: ADD_NORM(x, residual, weight, 1e-6, 0.0),
        "projection": lambda: PROJECTION(few, square, None, True, False),
        "projection by cuBLAS": lambda: PROJECTION(x[:40, :8], narrow, None, True, False),
        "gate and up": lambda: GATED_LINEAR(x, square, None, *activation, False, False),
    }


def of_attention(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    torch.set_default_dtype(BF16)
    try:
        impl = dense.DSLAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_KV)
    finally:
        torch.set_default_dtype(torch.float32)
    step = dense.DSLMetadata(
        num_actual_tokens=ROWS,
        max_query_len=QUERIES,
        max_seq_len=256,
        query_start_loc=torch.arange(0, ROWS + 1, QUERIES, dtype=torch.int32),
        seq_lens=torch.full((REQUESTS,), 200, dtype=torch.int32),
        block_table=torch.zeros(REQUESTS, PAGE, dtype=torch.int32),
        slot_mapping=torch.zeros(ROWS, dtype=torch.int64),
        causal=True,
        planners=metadata.Planners(torch.device("cpu")),
    )
    layer = SimpleNamespace(impl=impl, head_size=DIM, num_heads=HEADS, num_kv_heads=HEADS_KV)
    of_layer = impl.spec(PAGE, Causality.CAUSAL, DIM)
    spec = RopeSpec(layer=of_layer, rotary_dim=DIM, style=RopeStyle.NEOX, table_dtype=BF16)
    layer.dsl_rotation = Rotation(None, spec, 1e-6, None)
    cache = torch.zeros(4, HEADS_KV, PAGE, 2 * DIM, dtype=BF16)
    found = SimpleNamespace(get_attention_context=lambda name: (step, layer, cache, step.slot_mapping))
    monkeypatch.setattr(method, "vllm_attention", found)
    q, out = (torch.zeros(ROWS, HEADS, DIM, dtype=BF16) for _ in range(2))
    qkv, table = torch.zeros(ROWS, (HEADS + 2 * HEADS_KV) * DIM, dtype=BF16), torch.zeros(64, DIM, dtype=BF16)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    return {
        "rotation and cache write": lambda: ROPE_WRITE_KV(qkv, positions, table, None, None, out, "a"),
        "attention": lambda: impl.forward(layer, q, None, None, cache, step, out),
    }


def of_step(config: Any) -> dict[str, Callable[[], Any]]:
    """What is called once a step, outside of its graph too."""
    head = SimpleNamespace(weight=nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=BF16)))
    x = torch.zeros(1, WIDTH, dtype=BF16)
    logits = EmbeddingMethod(measured=True, batch_invariant=False)
    builder = make_builder(config, BF16)
    builder.launches_by_lengths = True
    common = make_step([1] * REQUESTS, [200] * REQUESTS, PAGE).common
    torch.set_default_dtype(BF16)
    try:
        spec = dense.DSLAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_KV).spec(PAGE, Causality.CAUSAL, DIM)
    finally:
        torch.set_default_dtype(torch.float32)
    # Drafts and the token in front of them: as in its first pass, which has other tensors each time.
    first, later = (make_step([queries] * REQUESTS, [200] * REQUESTS, PAGE).common for queries in (QUERIES + 1, 1))
    lengths = [first.seq_lens.clone(), first.seq_lens.clone()]

    def first_pass() -> None:
        first.seq_lens = lengths[0]
        lengths.reverse()
        builder.build_for_drafting(first, 0).plan(spec)

    def later_pass() -> None:
        later.max_seq_len += 1
        builder.build_for_drafting(later, 1).plan(spec)

    return {
        "logits": lambda: logits.apply(head, x),
        "metadata of a decode step": lambda: builder.build(0, common),
        PASS: first_pass,
        LATER_PASS: later_pass,
    }


def of_sampling(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """A step's tokens, as the sampler of the V2 runner asks for them."""
    from dsl_backend.sampling.cute.host import CuteSampler

    monkeypatch.setattr(CuteSampler, "function", lambda self, key: nothing)
    kernel = SimpleNamespace(title="none", load=lambda: lambda spec, _, *sizes: CuteSampler(spec, GPU, *sizes))
    monkeypatch.setattr(dispatch, "choose", lambda *_: kernel)
    sampler = RowSampler(REQUESTS, torch.device("cpu"))
    logits, positions = torch.zeros(REQUESTS, WIDTH, dtype=BF16), torch.zeros(REQUESTS, dtype=torch.int64)
    ones, top_k = torch.ones(REQUESTS), torch.ones(REQUESTS, dtype=torch.int32)
    filters = {"temperature": ones, "top_k": top_k, "top_p": ones}
    return {
        GREEDY: lambda: sampler.draw(logits, **vars(sampler.greedy_parameters(positions)), new_tokens=True),
        SAMPLED: lambda: sampler.draw(logits, positions, positions, **filters, new_tokens=True),
    }


def counted(operators: dict[str, Callable[[], Any]]) -> dict[str, int]:
    return {name: calls_of(run) for name, run in operators.items()}


def test_a_layer_runs_few_functions(operators: dict[str, Callable[[], Any]]) -> None:
    found = counted(operators)
    assert {name: count for name, count in found.items() if count > MOST[name]} == {}, found


class Forgetful(dict[Any, Any]):
    """A cache that finds nothing."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


def norms_are_looked_at_each_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launch, "_known", Forgetful())


def projections_are_looked_at_each_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eager, "_known", Forgetful())


def rotations_are_looked_at_each_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rope, "facts_of", lambda tensors: object())


def the_environment_is_read_each_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(targets, "of_device", lambda device: targets.detect(device))


def writers_are_found_by_their_specs(patch: pytest.MonkeyPatch) -> None:
    def writer_of(layer: Any, page_size: int, device: torch.device) -> rope.RopeWriter:
        spec = replace(layer.dsl_rotation.spec)
        return rope.writer(spec, device, None)

    patch.setattr(method, "writer_of", writer_of)


def lengths_are_copied_each_time(patch: pytest.MonkeyPatch) -> None:
    build = dense.DSLMetadataBuilder.build

    def copying(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return replace(build(self, 0, common_attn_metadata), host_lengths=dense.host_lengths(common_attn_metadata))

    patch.setattr(dense.DSLMetadataBuilder, "build", copying)


def short_steps_copy_lengths(patch: pytest.MonkeyPatch) -> None:
    build = dense.DSLMetadataBuilder.build

    def copying(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        found = build(self, 0, common_attn_metadata)
        if found.max_query_len > 1:
            dense.host_lengths(common_attn_metadata)
        return found

    patch.setattr(dense.DSLMetadataBuilder, "build", copying)


def every_pass_is_planned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dense.DSLMetadata, "place", lambda self: None)


def views_are_made_each_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampling_plan, "cache", lambda function: function)


@pytest.mark.parametrize(
    ("mistake", "seen_in"),
    [
        (norms_are_looked_at_each_time, {"norm", "add and norm"}),
        (projections_are_looked_at_each_time, {"projection", "gate and up", "logits"}),
        (rotations_are_looked_at_each_time, {"rotation and cache write"}),
        (lengths_are_copied_each_time, {"metadata of a decode step", PASS, LATER_PASS}),
        (short_steps_copy_lengths, {PASS}),
        (every_pass_is_planned, {LATER_PASS}),
        (views_are_made_each_time, {GREEDY, SAMPLED}),
        (writers_are_found_by_their_specs, {"rotation and cache write"}),
        (the_environment_is_read_each_time, {"projection", "projection by cuBLAS", "gate and up", "logits"}),
    ],
)
def test_mistakes_are_seen(
    mistake: Callable[[pytest.MonkeyPatch], None],
    seen_in: set[str],
    operators: dict[str, Callable[[], Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    found = counted(operators)
    assert {name for name, count in found.items() if count > MOST[name]} == seen_in, found
