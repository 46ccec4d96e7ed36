# SPDX-License-Identifier: Apache-2.0
"""cuDNN's fp8 attention as a peer: what it is given, with a stand-in for its frontend that computes in float64."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attention import inputs, oracle, torch_sdpa
from benchmarks.attention.problems import dense
from benchmarks.check import FP8_LIMITS

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn


class Node:
    """A tensor of a graph."""

    def __init__(self, given: torch.Tensor | None = None) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("set_"), name
        return lambda _: self


class Graph:
    """Records `sdpa_fp8`, and computes it when it is executed."""

    def __init__(self, **_: Any) -> None:
        self.steps: list[str] = []

    def tensor_like(self, given: torch.Tensor) -> Node:
        return Node(given)

    def sdpa_fp8(self, **given: Any) -> tuple[Node, ...]:
        self.given, self.out = given, Node()
        return self.out, Node(), Node(), Node()

    def __getattr__(self, name: str) -> Any:
        assert name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
        return lambda *_: self.steps.append(name)

    def get_workspace_size(self) -> int:
        return 8

    def execute(self, pack: dict[Node, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        assert self.steps[-1] == "build_plans"
        assert workspace.numel() == 8
        of = {name: pack[node].double() for name, node in self.given.items() if isinstance(node, Node)}
        group = of["q"].shape[1] // of["k"].shape[1]
        k, v = (of[name].repeat_interleave(group, 1) for name in "kv")
        scores = of["q"] @ k.mT * self.given["attn_scale"] * of["descale_q"] * of["descale_k"]
        assert self.given["use_causal_mask"]
        weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        p = (weights - weights.amax(-1, keepdim=True)).exp()
        rounded = (p * of["scale_s"]).to(FP8).double() * of["descale_s"]
        out = rounded @ v / p.sum(-1, keepdim=True) * of["descale_v"] * of["scale_o"]
        pack[self.out].copy_(out.to(FP8))


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"FP8_E4M3": "e4m3", "FLOAT": "float"}
    stand_in = SimpleNamespace(
        pygraph=Graph,
        create_handle=object,
        set_stream=lambda handle, stream: None,
        data_type=SimpleNamespace(**facts),
        heur_mode=SimpleNamespace(A="a", FALLBACK="b"),
    )
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


def test_its_result_is_that_of_the_problem() -> None:
    problem = dense(64, 4, 2, [40, 40], [40, 40], kv_dtype=FP8)
    given = inputs.build(problem, 2, CPU)
    launch = torch_sdpa.cudnn(problem, given)
    for index in (1, 0):
        expected = oracle.reference(problem, given, index)
        found, exact = launch.view(launch.run(index)).double()[expected.rows], expected.values.double()
        assert found.shape == exact.shape
        errors = (found - exact).norm(dim=-1)
        assert errors.norm() / exact.norm() < FP8_LIMITS.total / 2
        assert (errors / exact.norm(dim=-1)).max() < FP8_LIMITS.row / 2


def test_it_says_what_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cudnn")
    assert "nvidia-cudnn-frontend is not installed" in torch_sdpa.cudnn_objections(
        dense(64, 4, 2, [4], [4], kv_dtype=FP8)
    )
