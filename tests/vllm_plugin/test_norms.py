# SPDX-License-Identifier: Apache-2.0
"""Norms of vLLM's that this package serves: which do, what comes out, and what the log says."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import ahead, warm_up
from dsl_backend.vllm_plugin.norms import method, serve
from tests.vllm_plugin.test_fused_mlp import BF16, engine

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH = 64
BY_DSL = {"additional_config": {"dsl": {"norms": "dsl"}}}
MODEL = {"model_config": SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=BF16)}


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, and the reference serves: kernels are compared with it elsewhere."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.no_grad():
        yield


class Own(RMSNorm):
    """Of somebody else's."""


def norm_of(kind: type = RMSNorm, width: int = WIDTH, **options: Any) -> Any:
    with set_current_vllm_config(VllmConfig()):
        made = kind(width, eps=1e-5, **options)
    made.to(BF16)
    if isinstance(made.weight, nn.Parameter):
        made.weight.data.copy_(torch.randn(width, generator=torch.Generator().manual_seed(1)))
    return made


def is_served(module: Any) -> bool:
    return getattr(module._forward_method, "__func__", None) is method.forward


def values(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Serves a model; what the log says then."""

    def function(model: nn.Module, **changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            serve.serve_norms(model, engine(**MODEL | BY_DSL | changes))
        return [record.getMessage() for record in caplog.records if " norms" in record.getMessage()]

    return function


@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 3)])
@pytest.mark.parametrize("residual", [False, True])
def test_results(kind: type, shape: tuple[int, ...], residual: bool, served: Any) -> None:
    """As vLLM's, and x and the residual stay what they were."""
    norm = norm_of(kind)
    x, added = values(*shape), values(*shape, seed=3) if residual else None
    theirs = norm.forward_native(x.clone(), None if added is None else added.clone())
    (line,) = served(nn.ModuleList([norm]))
    assert line.startswith(f"dsl serves 1 norms, RMSNorm of {WIDTH} bfloat16, with residual")
    kept = x.clone(), None if added is None else added.clone()
    ours = norm(x) if added is None else norm(x, added)
    assert torch.equal(x, kept[0])
    z = x
    if added is not None:
        assert torch.equal(added, kept[1])
        ours, z_of_ours = ours
        theirs, z_of_theirs = theirs
        assert torch.equal(z_of_ours, z_of_theirs)
        z = z_of_ours
    weight = norm.weight.double() + (kind is GemmaRMSNorm)
    exact = z.double() * weight / (z.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert ours.shape == x.shape
    assert_within_budget(ours.reshape(-1, WIDTH), exact.reshape(-1, WIDTH), theirs.reshape(-1, WIDTH))


def test_the_package_computes(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = norm_of()
    served(nn.ModuleList([norm]))
    seen: list[Any] = []
    run = method.launch.run
    monkeypatch.setattr(method.launch, "run", lambda tensors, *rest: (seen.append(tensors), run(tensors, *rest))[1])
    norm(values(3))
    norm(values(4), values(4))
    assert [(len(one.x), one.residual is not None) for one in seen] == [(3, False), (4, True)]


def test_reloaded_weights_are_used(served: Any) -> None:
    norm = norm_of()
    served(nn.ModuleList([norm]))
    before = norm(values(3))
    norm.weight.data = norm.weight.data * 2
    torch.testing.assert_close(norm(values(3)), before * 2)


def test_torch_compile_sees_one_node(served: Any) -> None:
    norm = norm_of()
    served(nn.ModuleList([norm]))
    compiled = torch.compile(lambda x, residual: norm(x, residual), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 3):
        x, residual = values(rows), values(rows, seed=3)
        for found, expected in zip(compiled(x, residual), norm(x, residual), strict=True):
            assert torch.equal(found, expected)


def test_a_second_time_changes_nothing(served: Any) -> None:
    model = nn.ModuleList([norm_of()])
    served(model)
    assert served(model) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"additional_config": {}}, "models that dsl serves were measured on sm_90a, and not on cpu"),
        ({"additional_config": {"dsl": {"norms": "vllm"}}}, "additional_config['dsl']['norms'] is vllm"),
        ({"quant_config": object()}, "the model is quantised"),
        (
            {
                "parallel_config": SimpleNamespace(tensor_parallel_size=2),
                "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=True)),
            },
            "vLLM fuses norms with the all-reduce in front of them (fuse_allreduce_rms)",
        ),
        (
            {
                "parallel_config": SimpleNamespace(tensor_parallel_size=2),
                "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True)),
            },
            "sequence parallelism (enable_sp) communicates within vLLM's own products",
        ),
    ],
)
def test_engines_that_are_left_alone(served: Any, changes: Any, says: str) -> None:
    norm = norm_of()
    (line,) = served(nn.ModuleList([norm]), **changes)
    assert line.startswith(f"vLLM serves 1 norms: {says}")
    assert not is_served(norm)


@pytest.mark.parametrize(("arch", "ours"), [("sm_90a", True), ("sm_100a", False), ("sm_80", False)])
def test_default_is_what_was_measured(arch: str, ours: bool, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: from_arch(arch))
    monkeypatch.setattr(ahead, "begin", lambda *given, **more: None)
    norm = norm_of()
    (line,) = served(nn.ModuleList([norm]), additional_config={})
    assert is_served(norm) is ours
    assert ours or f"were measured on sm_90a, and not on {arch}: --additional-config" in line


def test_another_backend_is_left_alone(served: Any) -> None:
    norm = norm_of()
    assert served(nn.ModuleList([norm]), attention_config=SimpleNamespace(backend=None)) == []
    assert not is_served(norm)


def test_norms_that_are_left_alone(served: Any) -> None:
    """Of heads, of a part of the row, without a weight, of another class, and with another forward."""
    own, narrow, part, bare, changed = (
        norm_of(Own),
        norm_of(width=WIDTH // 2),
        norm_of(var_hidden_size=WIDTH // 2),
        norm_of(has_weight=False),
        norm_of(),
    )
    changed.forward = changed.forward
    lines = served(nn.ModuleList([own, narrow, part, bare, changed]))
    assert not any(is_served(one) for one in (own, narrow, part, bare, changed))
    assert lines == [
        "vLLM serves 2 norms: RMSNorm has no weight, or the variance of a part of the row",
        "vLLM serves 1 norms: another forward was put into RMSNorm",
    ]


def test_what_is_served_is_compiled_ahead(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    target = from_arch("sm_90a")
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: begun.extend(units(target)))
    served(nn.ModuleList([norm_of(), norm_of(GemmaRMSNorm)]))
    assert len(serve.served_specs()) == 2
    assert warm_up.norm_specs() == serve.served_specs()
    assert serve.compilation_key().count("RMSNorm of") == 2
    assert {unit.key for unit in begun} == {
        serve_key(replace(spec, residual=residual)) for spec in serve.served_specs() for residual in (False, True)
    }


def serve_key(spec: Any) -> Any:
    from dsl_backend.norm.configs import default_config
    from dsl_backend.norm.cute import host

    return host.key_of(spec, default_config(spec))
