# SPDX-License-Identifier: Apache-2.0
"""The profile of a step: what it makes of a trace, and what it counts."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.engine.models import SHAPES
from benchmarks.step import command, host, worker
from benchmarks.step.parts import parts
from benchmarks.step.trace import Launch, busy, layer, short, summarized
from benchmarks.step.worker import Job, Prompts, Requests, bytes_read, layer_products


def kernel(name: str, begin: float, us: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": us}


def test_kernels_of_a_step() -> None:
    """Two steps: a is launched twice in each, b once, beside the second a."""
    trace = [{"cat": "cpu_op", "name": "a", "ts": 0, "dur": 1000}]
    for begin in (0, 100):
        trace += [kernel("a", begin, 10), kernel("a", begin + 20, 12), kernel("void b<1>(int)", begin + 25, 30)]
    step = summarized(trace, 2)
    assert [(one.name, one.launches, one.us, one.each_us) for one in step.kernels] == [
        ("b<1>(int)", 1, 30, 30),
        ("a", 2, 22, 11),
    ]
    assert step.sum_us == 52
    assert step.busy_us == 45
    lines = command.table(step, 1).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["b<1>(int)", "1", "30.00", "30.0"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["1 others", "2", "11.00", "22.0"]


def test_launches_of_a_layer() -> None:
    """Two steps of three layers. b starts while a runs, and waits for it; a sampler is behind the last layer."""
    trace = []
    for step in (0, 1000):
        for number in range(3):
            begin = step + 100 * number + 1
            trace += [kernel("b", begin + 5, 26), kernel("a", begin, 20), kernel("c", begin + 40, 4)]
        trace.append(kernel("sample", step + 500, 7))
    # The first layer begins behind nothing, or the step before; the others 56 us behind c's end.
    assert layer(trace, 2, 3) == [Launch("a", 20, 76), Launch("b", 26, 11), Launch("c", 4, 13)]
    assert layer(trace, 2, 4) == []
    *_, total = command.layer_table(layer(trace, 2, 3)).splitlines()
    assert [cell.strip() for cell in total.split("|")[1:-1]] == ["all", "", "100.00"]


# A layer of Llama's, as the libraries name their kernels: (name, us), in their order from the first norm on.
OURS = "kernel_cutlass_kernel_dsl_backend"
BY_DSL = (
    (f"{OURS}normcutekernelRMSNorm_object_at__Tensorgmem", 2.0),
    (f"{OURS}gemmsm90small_mSmallMGemm_object_at__Tensorgmem_qkv", 12.0),
    (f"{OURS}attentioncuteropeRopeWriteKV_object_at__Tensorgmem", 1.5),
    (f"{OURS}attentioncutesm90dense_kernelDenseKernel_object_at__Tensorgmem", 4.0),
    (f"{OURS}attentioncutecombineCombine_object_at__Tensorgmem", 1.0),
    (f"{OURS}gemmsm90small_mSmallMGemm_object_at__Tensorgmem_o", 8.0),
    (f"{OURS}normcutekernelRMSNorm_object_at__Tensorgmem", 2.0),
    (f"{OURS}gemmsm90small_mSmallMGemm_object_at__Tensorgmem_gate", 50.0),
    (f"{OURS}gemmsm90small_mSmallMGemm_object_at__Tensorgmem_down", 27.0),
)
BY_VLLM = (
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 2.0),
    ("nvjet_tst_64x8_64x16_2x1_v_bz_TNT", 15.0),
    ("triton_poi_fused_cat_1", 2.0),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(int)", 2.0),
    ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd", 7.0),
    ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128> >, 7, 256>", 2.0),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 10.0),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(int)", 2.0),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", 2.0),
    ("void gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>(int)", 56.0),
    ("triton_poi_fused_mul_silu_slice_3", 2.0),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(int)", 30.0),
)
LLAMA = SHAPES["llama-8b"]
PRODUCTS = {
    "qkv_proj": 6144 * 4096 * 2,
    "o_proj": 4096 * 4096 * 2,
    "gate_up_proj": 28672 * 4096 * 2,
    "down_proj": 4096 * 14336 * 2,
}
STEPS, LAYERS = 3, LLAMA.config["num_hidden_layers"]


def profile_of(launches: Sequence[tuple[str, float]]) -> tuple[Any, list[Launch], dict[str, Any]]:
    """What a profile of steps of Llama-8B makes of a layer's launches, which start as soon as the one before ends."""
    trace, at = [], 0.0
    for _ in range(STEPS):
        for name, us in (("embed", 3.0), *launches * LAYERS, ("nvjet_tst_head", 240.0), ("sample", 7.0)):
            trace.append(kernel(name, at, us))
            at += us
    read = LAYERS * sum(PRODUCTS.values()) + 128256 * 4096 * 2
    result = {"step_us": 5000.0, "bytes_read": read, "layer_products": PRODUCTS}
    return summarized(trace, STEPS), layer(trace, STEPS, LAYERS), result


def test_parts_of_a_step_of_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches of a step are in the table once; floors are of what a part reads."""
    chip = SimpleNamespace(memory_gb_s=4800)
    monkeypatch.setattr(command.targets, "detect", lambda device: SimpleNamespace(chip=chip))
    found = {"dsl": profile_of(BY_DSL), "FLASH_ATTN": profile_of(BY_VLLM)}
    options = command.parse(["--model", "llama-8b", "--prompt", "512"])
    head, *rows = command.report_parts(found, LLAMA, options)
    assert head == ["part", "floor us", "dsl us", "launches", "by floor", "FLASH_ATTN us", "launches", "by floor"]
    assert rows == [
        ["qkv_proj", "10.49", "12.00", "1", "1.14x", "15.00", "1", "1.43x"],
        ["behind qkv_proj", "", "1.50", "1", "", "4.00", "2", ""],
        ["attention", "0.48", "5.00", "2", "10.32x", "9.00", "2", "18.57x"],
        ["o_proj", "6.99", "8.00", "1", "1.14x", "12.00", "2", "1.72x"],
        ["behind o_proj", "", "2.00", "1", "", "2.00", "1", ""],
        ["gate_up_proj", "48.93", "50.00", "1", "1.02x", "56.00", "1", "1.14x"],
        ["behind gate_up_proj", "", "", "", "", "2.00", "1", ""],
        ["down_proj", "24.47", "27.00", "1", "1.10x", "30.00", "1", "1.23x"],
        ["behind down_proj", "", "2.00", "1", "", "2.00", "1", ""],
        ["a layer", "91.36", "107.50", "9", "1.18x", "132.00", "12", "1.44x"],
        ["32 layers", "2923.56", "3440.00", "288", "1.18x", "4224.00", "384", "1.44x"],
        ["outside of layers", "218.89", "250.00", "3", "1.14x", "250.00", "3", "1.14x"],
        ["a step", "3142.45", "3690.00", "291", "1.17x", "4474.00", "387", "1.42x"],
    ]


@pytest.mark.parametrize("first", range(len(BY_VLLM)))
def test_a_layer_may_be_seen_from_any_launch_on(first: int) -> None:
    launches = [Launch(name, us, us) for name, us in (*BY_VLLM[first:], *BY_VLLM[:first])]
    found = [(part.name, part.us) for part in parts(launches, list(PRODUCTS))]
    assert found[:4] == [("qkv_proj", 15), ("behind qkv_proj", 4), ("attention", 9), ("o_proj", 12)]
    assert found[-1] == ("behind down_proj", 2)


def test_a_layer_of_another_form_has_no_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is said of the engine, and the table has the others."""
    step, sequence, result = profile_of(BY_DSL)
    for launches, message in (
        (sequence[:1], "no launch whose name is known as attention's"),
        (sequence[:-1], "a layer has 3 products, and not qkv_proj, o_proj"),
        ([*sequence[:5], sequence[1], *sequence[5:]], "attention comes behind o_proj, and not qkv_proj"),
        ([], "no kernel is once in a layer"),
    ):
        found = {"PEER": (step, launches, result)}
        assert command.report_parts(found, LLAMA, command.parse(["--model", "llama-8b"])) == []
        assert message in capsys.readouterr().out
    found = {"PEER": (step, sequence, result | {"layer_products": {}})}
    assert command.report_parts(found, LLAMA, command.parse(["--model", "llama-8b"])) == []
    assert "PEER: no parts of a layer: its layers are not those of a dense decoder" in capsys.readouterr().out


class Layers(nn.Module):
    """A model whose layers have matrices by these names, and norms."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Module() for _ in range(2)])
        for one in self.model.layers:
            for name in (*names, "self_attn.q_norm", "input_layernorm"):
                *parents, last = name.split(".")
                parent: Any = one
                for inner in parents:
                    if not hasattr(parent, inner):
                        parent.add_module(inner, nn.Module())
                    parent = getattr(parent, inner)
                made = nn.LayerNorm(4) if "norm" in name else nn.Linear(4, 8, bias="qkv" in name, dtype=torch.bfloat16)
                parent.add_module(last, made)


def test_products_of_a_layer() -> None:
    dense = [f"self_attn.{name}" for name in ("qkv_proj", "o_proj")] + ["mlp.gate_up_proj", "mlp.down_proj"]
    sizes = dict.fromkeys(PRODUCTS, 64)
    assert layer_products(Layers(*dense)) == sizes
    assert layer_products(Layers(*dense, "mlp.experts.gate")) == {}
    assert layer_products(Layers("self_attn.kv_a_proj", *dense)) == {}
    assert layer_products(Layers(*dense[:3])) == {}


def test_no_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="recorded no kernel"):
        summarized([{"cat": "cpu_op", "name": "a", "ts": 0, "dur": 1}], 1)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(0, 1), (2, 4)], 3), ([(0, 10), (2, 4), (5, 12)], 12), ([(5, 6), (0, 5)], 6), ([(0, 2), (0, 1)], 2)],
)
def test_busy(intervals: Sequence[tuple[float, float]], length: float) -> None:
    assert busy(intervals) == length


def test_long_names_are_cut() -> None:
    assert short("void f<(anonymous namespace)::g>(int)") == "f<g>(int)"
    assert len(short("k" * 500)) < 80


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.embed_tokens = nn.Embedding(10, 4, dtype=torch.bfloat16)  # 80 bytes
        self.down_proj = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)  # 64
        self.experts = nn.ModuleList([nn.Linear(8, 8, bias=False)])  # 256


class Wrapped(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.model = Model(**config)
        self.config = self.model.config


@pytest.mark.parametrize(
    ("config", "batch", "expected"),
    [
        ({}, 1, 64 + 256),
        ({"tie_word_embeddings": True}, 1, 80 + 64 + 256),
        ({"num_experts": 8, "num_experts_per_tok": 2}, 1, 64 + 64),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2}, 3, 64 + 192),
        ({"num_experts": 8, "num_experts_per_tok": 2}, 9, 64 + 256),
    ],
)
def test_bytes_read(config: dict[str, Any], batch: int, expected: int) -> None:
    assert bytes_read(Wrapped(**config), batch) == expected


class Engine:
    """Answers each request with a token a step, the second request from the third step on."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert len(prompt["prompt_token_ids"]) == 5
        self.requests[name], self.most = 0, sampling.max_tokens

    def step(self) -> list[Any]:
        self.steps += 1
        for number, name in enumerate(self.requests):
            self.requests[name] += self.steps > 2 * number
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * count)])
            for name, count in self.requests.items()
            if count
        ]


def test_requests_decode_together() -> None:
    """Steps are counted by the request that is behind, and all of them fit into what is asked for."""
    pytest.importorskip("vllm")
    engine = Engine()
    job = Job(backend="dsl", engine={}, vocabulary=100, batch=2, prompt=5, steps=3)
    requests = Requests(engine, job)
    requests.decode(worker.WARM_STEPS)
    assert engine.steps == worker.WARM_STEPS + 2
    for _ in range(2):
        requests.decode(job.steps)
    assert engine.steps == worker.WARM_STEPS + 2 + 2 * job.steps
    assert max(engine.requests.values()) < engine.most


class Prefiller(Engine):
    """Computes one prompt in a step, and answers it then."""

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        self.steps += 1
        assert self.most == 1
        del self.requests[next(iter(self.requests))]
        return []


def test_prompts_are_computed_in_every_step() -> None:
    """And nothing is decoded behind them."""
    pytest.importorskip("vllm")
    engine = Prefiller()
    prompts = Prompts(engine, Job(backend="dsl", engine={}, vocabulary=100, batch=2, prompt=5, steps=3, prefill=True))
    prompts.compute(3)
    assert (engine.steps, prompts.made, engine.requests) == (6, 6, {})


def test_prompts_of_a_step_are_one_batch() -> None:
    words = ["--model", "tiny", "--batch", "3", "--prompt", "700"]
    made = command.engine_arguments(SHAPES["tiny"], command.parse([*words, "--prefill"]))
    assert made["max_num_batched_tokens"] == 2100
    assert made["kv_cache_memory_bytes"] >= 2100 * SHAPES["tiny"].token_bytes
    assert "max_num_batched_tokens" not in command.engine_arguments(SHAPES["tiny"], command.parse(words))


def test_engine_has_room_for_what_is_asked() -> None:
    options = command.parse(["--model", "tiny", "--batch", "300", "--prompt", "50", "--engine", '{"dtype": "float16"}'])
    made = command.engine_arguments(SHAPES["tiny"], options)
    tokens = 300 * (50 + 2 * worker.WARM_STEPS + 3 * options.steps)
    assert made["kv_cache_memory_bytes"] >= tokens * SHAPES["tiny"].token_bytes
    assert made["max_model_len"] >= 50 + 2 * worker.WARM_STEPS + 3 * options.steps
    assert made["max_num_seqs"] >= 300
    assert 300 in made["compilation_config"]["cudagraph_capture_sizes"]
    assert made["dtype"] == "float16"


def test_backends_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def profiled(*words: Any) -> Any:
        given.append(words[-1])
        raise RuntimeError("ended early")

    monkeypatch.setattr(command, "profiled", profiled)
    monkeypatch.setattr(command.facts, "gather", lambda device, commit: {})
    words = ["--model", "tiny", "--backends", "a,b,c"]
    assert command.run(command.parse([*words, "--limit-seconds", "90"])) == 1
    # Each one ended at once, and left its time to the others.
    assert [round(seconds) for seconds in given] == [30, 45, 90]
    given.clear()
    command.run(command.parse(words))
    assert given == [600, 600, 600]


# What the host does.


def test_the_host_s_part_of_a_step() -> None:
    """Of vLLM's `step`, which calls our `plan` twice, which calls a function in C and torch's `empty`."""
    step = ("/x/site-packages/vllm/core.py", 1, "step")
    plan = ("/x/dsl_backend/vllm_plugin/plan.py", 2, "plan")
    inner = ("/x/dsl_backend/linear/api.py", 3, "inner")
    empty, in_c = ("/x/site-packages/torch/a.py", 4, "empty"), ("~", 0, "<len>")
    stats: dict[Any, Any] = {
        step: (1, 1, 4.0, 10.0, {}),
        plan: (2, 2, 1.0, 6.0, {step: (2, 2, 1.0, 6.0)}),
        inner: (2, 2, 1.5, 2.0, {plan: (2, 2, 1.5, 2.0)}),
        empty: (2, 2, 2.0, 2.0, {plan: (2, 2, 2.0, 2.0)}),
        in_c: (9, 9, 1.5, 1.5, {plan: (4, 4, 1.0, 1.0), inner: (5, 5, 0.5, 0.5)}),
    }
    found = host.summarized(stats, 2, 1000.0)
    assert found.packages == {"dsl_backend": 400.0, "vllm": 400.0, "torch": 200.0}
    assert found.calls == 2
    assert found.entered_us == 600.0, "what our functions call of each other counts once"
    assert [(one.name, one.calls, one.us, one.all_us) for one in found.spans] == [
        ("vllm_plugin/plan.py:plan", 1, 200.0, 600.0),
        ("linear/api.py:inner", 1, 200.0, 200.0),
    ]
    rows = host.rows_of(found, 4, 1)
    assert rows[1:] == [
        ["vllm", "", "400.0", "100.00"],
        ["dsl_backend", "2", "400.0", "100.00"],
        ["torch", "", "200.0", "50.00"],
        ["dsl_backend and what it calls", "", "600.0", "150.00"],
        ["vllm_plugin/plan.py:plan", "1", "200.0", "50.00"],
    ]
    with pytest.raises(ValueError, match="the profile has no function"):
        host.summarized({}, 1, 1.0)


def test_a_profile_of_this_thread() -> None:
    """All of it belongs to some package, and adds up to the step."""
    asked = []
    found = host.profiled(asked.append, 3, 500.0)
    assert asked == [3]
    assert sum(found.packages.values()) == pytest.approx(500.0)


def test_the_hosts_profile_is_printed_and_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also without a GPU."""
    spans = [{"name": "linear/api.py:linear", "calls": 3.0, "us": 40.0, "all_us": 90.0}]
    made = {"step_us": 900.0, "packages": {"vllm": 860.0, "dsl_backend": 40.0}, "calls": 3.0, "entered_us": 90.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command.facts, "gather", lambda device, commit: {})
    monkeypatch.setattr(command, "executed", lambda *words: {"step_us": 900.0, "host": {**made, "spans": spans}})
    asked: list[bool] = []
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: asked.append(True))
    path = tmp_path / "out.jsonl"
    assert command.main(["--model", "tiny", "--host", "--backends", "dsl", "--json", str(path)]) == 0
    assert asked == [True], "its worker would outlive it"
    text = capsys.readouterr().out
    assert "a step takes 900 us on the host" in text
    assert re.search(r"\| linear/api.py:linear +\| 3 +\| 40.0 +\| 20.00 +\|", text)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["environment", "host"]


def test_a_cpu_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--model", "tiny"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
