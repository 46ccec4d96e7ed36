# SPDX-License-Identifier: Apache-2.0
"""What is compiled ahead is what the engine needs later, and nothing that goes wrong there ends an engine."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dsl_backend.attention import api
from dsl_backend.attention.cute import host as launch
from dsl_backend.gemm.activation import Geglu, Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.precompile import layer_specs as linear_specs
from dsl_backend.linear.precompile import precompile_specs_of
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import compile as compilation
from dsl_backend.runtime import model, precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.key import Identity
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.vllm_plugin import ahead, compat, validation
from dsl_backend.vllm_plugin.dense import DSLAttentionImpl, DSLMetadataBuilder
from tests.vllm_plugin import test_mla
from tests.vllm_plugin.conftest import engine_config

SM90 = targets.from_arch("sm_90a")
HEADS, HEADS_KV, DIM = 4, 2, 64


class Recorder:
    """Stands in for `precompile.ahead`."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[PrecompileSpec], int, str]] = []

    def add(self, todo: Iterable[PrecompileSpec], spare: int, beside: str) -> int:
        self.calls.append((list(todo), spare, beside))
        return len(self.calls[-1][0])

    def families(self) -> set[str]:
        return {one.family for specs, _, _ in self.calls for one in specs}

    def digests(self, family: str) -> set[str]:
        specs = [one for specs, _, _ in self.calls for one in specs if one.family == family]
        return {one.digest for spec in specs for one in compilation.identities(spec.compile)}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What is begun on an H100, in a process in which nothing was."""
    recorder = Recorder()
    monkeypatch.setattr(precompile, "ahead", recorder)
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(targets, "detect", lambda *_: SM90)
    monkeypatch.setattr(validation, "current_target", lambda: SM90)
    return recorder


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The digests of all that is compiled, which is nothing here."""
    found: set[str] = set()

    def made(identity: Identity, _: Any) -> Any:
        found.add(identity.digest)
        return compilation.not_compiled

    def clear() -> None:
        compilation.forget()
        launch.function_of.cache_clear()
        api.writer.cache_clear()

    clear()
    monkeypatch.setattr(compilation, "made", made)
    yield found
    clear()


@pytest.fixture(autouse=True)
def bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def config(model_folders: dict[str, Path]) -> Iterator[VllmConfig]:
    made = engine_config(model_folders["llama"], attention_backend="dsl", dtype="bfloat16")
    made.cache_config.block_size, made.cache_config.user_specified_block_size = 16, True
    with set_current_vllm_config(made):
        yield made


def make_impl(**facts: Any) -> DSLAttentionImpl:
    return DSLAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_KV, **facts)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.zeros(HEADS)},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=["plain", "window", "softcap", "sinks", "fp8"],
)
def test_attention_is_known_to_the_letter(
    config: VllmConfig, begun: Recorder, needed: set[str], facts: dict[str, Any]
) -> None:
    """The same kernels as the metadata builder prepares when the cache is there."""
    impl = make_impl(**facts)
    layer = SimpleNamespace(impl=impl, head_size_v=DIM)
    config.compilation_config.static_forward_context["layer"] = layer
    spec = FullAttentionSpec(block_size=16, num_kv_heads=HEADS_KV, head_size=DIM, dtype=torch.bfloat16)
    DSLMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    assert len(needed) >= 3, "short queries, long ones, writes"
    assert begun.digests("attention") == needed


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_mla_is_known_to_the_letter(
    model_folders: dict[str, Path], begun: Recorder, needed: set[str], kv_cache_dtype: str
) -> None:
    config = engine_config(model_folders["deepseek"], attention_backend="dsl", dtype="bfloat16")
    config.cache_config.block_size, config.cache_config.user_specified_block_size = test_mla.PAGE, True
    with set_current_vllm_config(config):
        test_mla.make_builder(test_mla.make_layer(kv_cache_dtype), config)
    assert needed
    assert begun.digests("attention") == needed


def test_a_page_that_the_backend_chooses(config: VllmConfig, begun: Recorder) -> None:
    """VLLM settles it when the model is loaded."""
    config.cache_config.user_specified_block_size = False
    config.cache_config.block_size = 12
    make_impl()
    (specs, *_), *_ = begun.calls
    assert {one.key.page_size for one in specs if one.family == "attention"} == {16}


def test_one_kind_of_layer_is_begun_once(config: VllmConfig, begun: Recorder) -> None:
    for _ in range(3):
        make_impl()
    assert len(begun.calls) == 1
    assert begun.families() == {"attention", "linear", "sampling"}
    assert begun.calls[0][1:] == (1, "while weights load")
    make_impl(sliding_window=64)
    assert len(begun.calls) == 2
    assert {one.family for one in begun.calls[1][0]} == {"attention"}


def test_linear_layers_are_predicted(config: VllmConfig, begun: Recorder) -> None:
    """As they are fused: each kernel that warm-up asks for was begun before."""
    make_impl()
    spec = LinearSpec(n=512, k=256, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
    assert {str(one) for one in precompile_specs_of(spec, SM90)} == {
        str(one) for one in begun.calls[0][0] if one.family == "linear"
    }


@pytest.mark.parametrize(("name", "tanh"), [("gelu", False), ("gelu_pytorch_tanh", True)])
def test_gelu_is_predicted(name: str, tanh: bool) -> None:
    config = {"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 64, "intermediate_size": 128}
    (spec,) = linear_specs(model.shape_of(config | {"hidden_act": name}), batch_invariant=True)
    assert (spec.activation, spec.batch_invariant) == (Geglu(tanh=tanh), True)


def test_what_the_engine_will_not_use(config: VllmConfig, begun: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_SAMPLER", "0")
    monkeypatch.setenv("DSL_BACKEND_LINEAR", "0")
    make_impl()
    assert begun.families() == {"attention"}
    ahead._begun.clear()
    monkeypatch.delenv("DSL_BACKEND_LINEAR")
    monkeypatch.setattr(config, "quant_config", object())
    begun.calls.clear()
    make_impl()
    assert begun.families() == {"attention"}


def test_the_kernel_that_was_asked_for(config: VllmConfig, begun: Recorder) -> None:
    """Triton's are not compiled so; CuTe DSL's of other operators are, cache writes too."""
    config.additional_config = {"dsl": {"attention_kernel": "triton"}}
    make_impl()
    kinds = {type(one.key).__name__ for one in begun.calls[0][0] if one.family == "attention"}
    assert kinds <= {"WriteKey"}


@pytest.mark.parametrize("rank", [1, 7])
def test_one_worker_of_a_node(config: VllmConfig, begun: Recorder, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(compat, "local_rank", lambda: rank)
    make_impl()
    assert begun.calls == []


def test_a_cpu(config: VllmConfig, begun: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "detect", targets.cpu_target)
    make_impl()
    assert begun.calls == []


def test_without_a_model(plain_config: VllmConfig, begun: Recorder) -> None:
    make_impl()
    assert begun.calls == []


def test_what_goes_wrong_is_a_warning(
    config: VllmConfig, begun: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise RuntimeError("no luck")

    monkeypatch.setattr(begun, "add", fail)
    make_impl()
    assert "kernels are not compiled ahead of their use: RuntimeError: no luck" in caplog.text


def test_what_is_fused_is_added(config: VllmConfig, begun: Recorder) -> None:
    """Whatever was predicted."""
    spec = LinearSpec(n=512, k=256, dtypes=Dtypes.of(torch.bfloat16), activation=Geglu(), bias=True)
    ahead.compile_linear(config, [spec, spec])
    ((specs, _, beside),) = begun.calls
    assert {str(one) for one in specs} == {str(one) for one in precompile_specs_of(spec, SM90)}
    assert beside == "while the engine starts"
