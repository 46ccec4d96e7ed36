# SPDX-License-Identifier: Apache-2.0
"""vLLM's warm-up compiles our kernels, and what is compiled after it is counted."""

import dataclasses
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl_backend.families import NAMES
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import family as families
from dsl_backend.runtime import precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.compiles import Phase, Source, compiles
from dsl_backend.runtime.family import Family
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.vllm_plugin import compat, warm_up

pytest.importorskip("vllm")

from vllm.config.kernel import KernelConfig
from vllm.model_executor.warmup import cutedsl_warmup
from vllm.utils import jit_monitor

CONFIG = {"num_attention_heads": 8, "hidden_size": 1024, "vocab_size": 1000}
BUILT: list[Any] = []


@dataclasses.dataclass(frozen=True)
class Key:
    heads: int
    hidden_size: int
    dtype: str


def precompile_specs(model: Any, target: Any) -> list[PrecompileSpec]:
    return [PrecompileSpec("of-a-test", build, Key(model.heads_q, model.hidden_size, model.dtype), target)]


def build(key: Any, target: Any) -> None:
    BUILT.append((key, target.arch))


def vllm_config(jit_warmup: bool | None = None, **model: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: CONFIG | model)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, dtype="torch.float16"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        kernel_config=SimpleNamespace(**({} if jit_warmup is None else {"enable_jit_warmup": jit_warmup})),
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One family whose spec is its model's shape, a GPU, and a plugin that has taken part in nothing yet."""
    monkeypatch.setattr(families, "load_all", lambda: (Family(name="of-a-test", precompile_specs=precompile_specs),))
    monkeypatch.setattr(warm_up, "_provider", warm_up.Provider())
    # Other tests' providers are in it.
    monkeypatch.setattr(cutedsl_warmup, "_CUTEDSL_WARMUP_PROVIDERS", weakref.WeakSet())
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_90a"))
    BUILT.clear()
    compiles.clear()
    yield
    compiles.clear()


def ours() -> list[Any]:
    """What vLLM would compile, as it collects it."""
    found = cutedsl_warmup._collect_unique_compile_units(cutedsl_warmup._iter_cutedsl_warmup_compile_units())
    return [one for one in found if one.name == "dsl.of-a-test"]


def test_vllm_compiles_what_the_model_needs() -> None:
    warm_up.install(vllm_config())
    (one,) = ours()
    gc.collect()
    assert len(ours()) == 1, "vLLM's reference to a provider is weak"
    one.compile()
    assert [(Key(heads=4, hidden_size=1024, dtype="float16"), "sm_90a")] == BUILT


def test_what_vllm_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is compiled at another place."""
    monkeypatch.setattr(
        families,
        "load_all",
        lambda: tuple(dataclasses.replace(families.load(name), precompile_specs=precompile_specs) for name in NAMES),
    )
    warm_up.install(vllm_config())
    assert ours() == []


def test_every_layer_group_installs() -> None:
    config = vllm_config()
    for _ in range(3):
        warm_up.install(config)
    assert len(ours()) == 1
    draft = vllm_config(hidden_size=512)
    warm_up.install(draft)
    assert len(ours()) == 2, "a draft model has kernels of its own"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_fused_layers_are_compiled_for_the_kernel_that_serves_them(arch: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    spec = LinearSpec(n=14336, k=4096, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
    units = list(warm_up.linear_units(spec, targets.from_arch(arch)))
    modules = {unit.build.__module__ for unit in units}
    assert modules == {"dsl_backend.linear.triton.gemm" if arch == "sm_80" else "dsl_backend.gemm.host"}


def test_a_vllm_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "warm_up_registry", lambda: None)
    config = vllm_config()
    warm_up.install(config)
    warm_up.install(config)
    assert len(BUILT) == 1
    assert ours() == []


def test_a_model_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    warm_up.install(vllm_config(hidden_size=None))
    assert ours() == []
    assert "kernels are not compiled ahead of warm-up: the model's hidden_size is missing" in caplog.text


def test_a_configuration_without_a_model() -> None:
    config = vllm_config()
    config.model_config = None
    warm_up.install(config)
    assert ours() == []


def test_a_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "detect", targets.cpu_target)
    warm_up.install(vllm_config())
    assert ours() == []


def test_what_was_compiled_ahead_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """In warm-up; and nothing is compiled or loaded after it."""
    pytest.importorskip("cutlass")
    from dsl_backend.attention.cute import write_kv_host as write_launch
    from dsl_backend.attention.spec import AttentionSpec
    from dsl_backend.runtime import compile as compilation

    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", str(tmp_path))
    spec = AttentionSpec(
        heads_q=1,
        heads_kv=1,
        head_dim=64,
        head_dim_v=64,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        page_size=16,
        scale=1.0,
    )
    one = PrecompileSpec("of-a-test", write_launch.build, write_launch.key_of(spec), targets.from_arch("sm_90a"))
    monkeypatch.setattr(
        families, "load_all", lambda: (Family(name="of-a-test", precompile_specs=lambda model, target: [one]),)
    )
    compilation.forget()
    ahead = precompile.Ahead()
    assert ahead.add([one]) == 1
    ahead.wait()
    warm_up.install(vllm_config())
    (theirs,) = ours()
    theirs.compile()
    assert [event.source for event in compiles.events] == [Source.DISK]
    monkeypatch.setattr(jit_monitor, "_active", True)
    one.compile()
    assert compiles.phase is Phase.SERVING
    assert (compiles.after_warmup, compiles.loads_after_warmup) == (0, 0)
    compilation.forget()


@pytest.mark.parametrize("jit_warmup", [None, True])
def test_warm_up_ends_where_vllms_monitor_starts(monkeypatch: pytest.MonkeyPatch, jit_warmup: bool | None) -> None:
    """None is a vLLM without the switch."""
    warm_up.install(vllm_config(jit_warmup))
    monkeypatch.setattr(jit_monitor, "_active", False)
    assert compiles.phase is Phase.WARM_UP
    monkeypatch.setattr(jit_monitor, "_active", True)
    assert compiles.phase is Phase.SERVING


def test_warm_up_ends_without_a_monitor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """--enforce-eager."""
    warm_up.install(vllm_config(False))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    assert compiles.phase is Phase.WARM_UP
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 100_000)
    with caplog.at_level(logging.WARNING):
        compiles.record("Scale", "0123", Source.COMPILER, 1.0, 1)
    assert compiles.after_warmup == 1
    assert "after warm-up (key 0123)" in caplog.text


def test_what_this_relies_on() -> None:
    """The names and the switch are vLLM's own."""
    assert compat.warm_up_registry() is cutedsl_warmup.register_cutedsl_warmup_provider
    assert callable(jit_monitor.is_active)
    if compat._eager_is_not_monitored():
        assert KernelConfig().enable_jit_warmup is True
