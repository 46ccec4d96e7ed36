# SPDX-License-Identifier: Apache-2.0
"""The profile of a step: what it makes of a trace, and what it counts."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.engine.models import SHAPES
from benchmarks.step import command, worker
from benchmarks.step.trace import Launch, busy, layer, short, summarized
from benchmarks.step.worker import Job, Prompts, Requests, bytes_read


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


def test_a_cpu_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--model", "tiny"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
