# SPDX-License-Identifier: Apache-2.0
"""What is done with a model between the loading and the processing of its weights, and what caches know of it."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import envs as vllm_envs
from vllm.config import VllmConfig, set_current_vllm_config

from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.vllm_plugin import compat, loaded_models
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.fused_mlp import fuse
from dsl_backend.vllm_plugin.routed_experts import serve
from dsl_backend.vllm_plugin.routed_experts.find import Service
from tests.vllm_plugin.test_fused_mlp import MLP, engine, is_fused, model_of

pytestmark = pytest.mark.usefixtures("one_rank")

SERVICE = Service(
    ExpertsSpec(num_experts=4, hidden_size=64, intermediate_size=32, topk=2, dtype=torch.bfloat16), object
)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is changed yet, and the reference serves."""
    monkeypatch.setattr(fuse, "_fused", [])
    monkeypatch.setattr(serve, "_served", [])
    name = loaded_models.envs.LINEAR.name
    others = {key: read for key, read in vllm_envs.environment_variables.items() if key != name}
    monkeypatch.setattr(vllm_envs, "environment_variables", others)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.no_grad():
        yield


def fused(model: Any) -> None:
    fuse.fuse_model(model, engine())


def test_compiled_graphs_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM makes the keys of its compilation cache of: with and without, other layers, another version."""

    def factors() -> Any:
        return vllm_envs.compile_factors().get("DSL_BACKEND_LINEAR")

    keys = [factors()]
    for _ in range(2):
        loaded_models.extend_compilation_keys()
    fused(model_of(MLP()))
    keys.append(factors())
    with monkeypatch.context() as patch:
        patch.setattr(loaded_models, "__version__", "another")
        keys.append(factors())
    monkeypatch.setattr(fuse, "_fused", [])
    fused(model_of(MLP(), MLP()))
    keys.append(factors())
    monkeypatch.setenv("DSL_BACKEND_LINEAR", "0")
    fused(model_of(MLP(), MLP()))
    keys.append(factors())
    monkeypatch.setattr(serve, "_served", [{"a": SERVICE}])
    keys.append(factors())
    monkeypatch.setattr(serve, "_served", [{"a": SERVICE._replace(kernels=str)}])
    keys.append(factors())
    assert keys[0] is None
    assert None not in keys[1:]
    assert len(set(keys)) == len(keys), keys


def loader_module(monkeypatch: pytest.MonkeyPatch, name: str, served: list[Any]) -> tuple[ModuleType, list[Any]]:
    """One of vLLM's loader modules as 0.26 and 0.32 have them, as far as this is concerned."""
    module, seen = ModuleType(name), []

    def process_weights_after_loading(model: Any, model_config: Any, target_device: Any) -> str:
        changed = is_fused(model["layers"][0]), model in served
        seen.append((model, model_config, target_device, *changed))
        return "done"

    module.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]
    monkeypatch.setitem(loaded_models.sys.modules, name, module)
    return module, seen


@pytest.mark.parametrize("present", [loaded_models.LOADERS[:1], loaded_models.LOADERS], ids=["0.26", "0.32"])
def test_install(present: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loader changes a model before it processes weights, and calls vLLM's function with what it was given."""
    for name in loaded_models.LOADERS:
        monkeypatch.delitem(loaded_models.sys.modules, name, raising=False)
    served: list[Any] = []
    monkeypatch.setattr(serve, "serve_experts", lambda model, vllm_config: served.append(model))
    loaders = [loader_module(monkeypatch, name, served) for name in present]
    loaded_models.install()
    once = [loader.process_weights_after_loading for loader, _ in loaders]
    loaded_models.install()
    assert once == [loader.process_weights_after_loading for loader, _ in loaders], "wrapped once"
    config = VllmConfig()
    config.attention_config.backend = ensure_member()  # type: ignore[assignment]
    with set_current_vllm_config(config):
        for loader, seen in loaders:
            model = model_of(MLP())
            assert loader.process_weights_after_loading(model, "config", target_device="device") == "done"
            assert seen == [(model, "config", "device", True, True)]


def test_install_where_the_function_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A later vLLM serves on, with its own layers."""
    monkeypatch.setitem(loaded_models.sys.modules, loaded_models.LOADERS[0], ModuleType(loaded_models.LOADERS[0]))
    loaded_models.install()
    assert "base_loader has no process_weights_after_loading" in caplog.text


def test_what_this_relies_on() -> None:
    """Loaders call the function by its name in their module, once weights are loaded."""
    base = importlib.import_module(loaded_models.LOADERS[0])
    assert callable(getattr(base, loaded_models.LOADED))
    assert compat.loaders_process_by_name()
    assert compat.compilations_are_keyed_by_environment()
