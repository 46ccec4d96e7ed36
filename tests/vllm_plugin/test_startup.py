# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine's configuration is made, and that nothing is where another backend is asked for."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import AttentionConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from dsl_backend import log
from dsl_backend.runtime import target as targets
from dsl_backend.vllm_plugin import hooks, startup, validation
from dsl_backend.vllm_plugin.enum_members import ensure_member
from tests.vllm_plugin.conftest import engine_config

Make = Callable[..., VllmConfig]
WRONG = "DSL_BACKEND_SAMPLER='2' is not accepted: use 0 or 1"


@pytest.fixture
def make(model_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Make:
    """An engine's configuration, of a llama with DSL by default."""
    monkeypatch.setattr(hooks, "failures", {})

    def configured(model: str = "llama", backend: str | None = "dsl", **arguments: Any) -> VllmConfig:
        return engine_config(model_folders[model], attention_backend=backend, **arguments)

    return configured


def refusal(make: Make, **arguments: Any) -> list[str]:
    """The lines of the one error."""
    with pytest.raises(ValueError) as raised:
        make(**arguments)
    assert type(raised.value) is ValueError, "vLLM's own error"
    return str(raised.value).splitlines()


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_what_is_right_passes(make: Make, model: str) -> None:
    config = make(model, additional_config={"dsl": {"mla_latent_queries": 64}})
    assert config.attention_config.backend is ensure_member()


def test_a_wrong_variable(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_SAMPLER", "2")
    assert refusal(make) == ["attention backend dsl does not serve these options:", f"  - {WRONG}"]


def test_all_that_is_wrong_is_said_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_SAMPLER", "2")
    monkeypatch.setenv("DSL_BACKEND_SAMLPER", "1")
    lines = refusal(make, additional_config={"dsl": {"attention_kernel": "fastest", "kernel": 1}})
    assert lines[1].startswith("  - DSL_BACKEND_SAMLPER is not a variable of dsl-backend")
    assert lines[2] == f"  - {WRONG}"
    assert (
        "attention_kernel: 'fastest' is not one of cute, cute-fp8, triton, reference; kernel: unknown key" in lines[3]
    )
    assert len(lines) == 4


@pytest.mark.parametrize("backend", [None, "CPU_ATTN"])
def test_another_backend_is_never_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str | None
) -> None:
    """One line of the log says what is wrong."""
    monkeypatch.setenv("DSL_BACKEND_SAMPLER", "2")
    monkeypatch.setitem(hooks.failures, "attention_member", "ImportError: no such module")
    make(backend=backend, additional_config={"dsl": {"no such": "option"}}, kv_cache_dtype="auto")
    ours = [record for record in caplog.records if record.name.startswith("vllm.dsl_backend")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert ours[0].getMessage() == f"ignored, since --attention-backend dsl is not asked for: {WRONG}"


def test_another_backend_without_problems_says_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(backend=None)
    assert not [record for record in caplog.records if record.name.startswith("vllm.dsl_backend")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"kv_cache_dtype": "int8_per_token_head"},
            ["--kv-cache-dtype int8_per_token_head is not served: use one of auto, float16"],
        ),
        (
            {"additional_config": {"dsl": {"attention_kernel": "triton"}}, "dtype": "float32"},
            ["dense-decode triton", "dtype float32 is not one of float16, bfloat16"],
        ),
        (
            {"model": "deepseek", "additional_config": {"dsl": {"attention_kernel": "cute"}}},
            ["mla-decode sm90: serves"],
        ),
    ],
    ids=["cache dtype", "kernel", "MLA"],
)
def test_what_no_kernel_serves(make: Make, arguments: dict[str, Any], words: list[str]) -> None:
    lines = refusal(make, **arguments)
    assert lines[0] == "attention backend dsl does not serve this configuration:"
    for word in words:
        assert sum(word in line for line in lines) == 1, lines


def test_an_unusual_model_is_left_to_workers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(self: ModelConfig) -> int:
        raise NotImplementedError("no head size")

    monkeypatch.setattr(ModelConfig, "get_head_size", unknown)
    config = make()
    assert startup.unserved(config) == []


def test_an_architecture_that_the_gpu_is_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "current_target", lambda: targets.from_arch("sm_90a"))
    monkeypatch.setenv("DSL_BACKEND_ARCH", "sm_100a")
    assert "DSL_BACKEND_ARCH='sm_100a' is not accepted on a sm_90a: use" in refusal(make)[1]


class TestVersion:
    def test_too_old(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm, "__version__", "0.25.1")
        assert refusal(make) == [
            "attention backend dsl does not serve this vLLM:",
            "  - vLLM 0.25.1 is older than 0.26, the oldest that is supported",
        ]

    @pytest.mark.parametrize("version", ["0.26.0", "0.33.0", "1.0.0", "0.1.dev1+g123", "dev"])
    def test_others(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        monkeypatch.setattr(hooks, "failures", {})
        monkeypatch.setattr(vllm, "__version__", version)
        assert startup.unsupported_vllm() == []

    def test_newer_than_tested(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Served, with one line that names what was tested."""
        log.warning_once.cache_clear()
        monkeypatch.setattr(vllm, "__version__", "0.34.1")
        for _ in range(2):
            make()
        said = [record.getMessage() for record in caplog.records if "tested" in record.getMessage()]
        assert said == ["vLLM 0.34.1 is newer than 0.33: dsl was tested with 0.26 to 0.33"]

    @pytest.mark.parametrize("version", ["0.26.0", "0.33.0", "0.33.1+cpu", "0.1.dev1+g123", "dev"])
    def test_what_was_tested_is_not_spoken_of(self, version: str) -> None:
        assert startup.too_new(version) is None

    def test_a_hook_that_failed(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(hooks.failures, "attention_member", "ImportError: no such module")
        (_, reason) = refusal(make)
        assert reason.endswith(f"vLLM {vllm.__version__}: hook attention_member failed: ImportError: no such module")


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_backend": "dsl"},
        {"attention_backend": "Dsl"},
        {"attention_backend": ensure_member()},
        {"attention_config": {"backend": "DSL"}},
        {"attention_config": AttentionConfig(backend="dsl")},
        {"attention_config": AttentionConfig(backend_per_kind={"sliding_window": "dsl"})},
    ],
    ids=["name", "any case", "member", "dict", "config", "kind"],
)
def test_every_way_to_ask(arguments: dict[str, Any]) -> None:
    assert startup.asked_for(SimpleNamespace(**arguments))
    assert not startup.asked_for(SimpleNamespace(attention_backend="FLASH_ATTN", attention_config=AttentionConfig()))
    assert not startup.asked_for(SimpleNamespace())


def test_it_is_installed_once() -> None:
    wrapped = EngineArgs.create_engine_config
    startup.install()
    assert EngineArgs.create_engine_config is wrapped
    assert AsyncEngineArgs.create_engine_config is wrapped
    assert not hasattr(wrapped.__wrapped__, "wrapped_by_dsl")


def test_a_worker_makes_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process does not import what would."""
    monkeypatch.delitem(sys.modules, startup.ENGINE_ARGUMENTS)
    startup.install()
    assert startup.ENGINE_ARGUMENTS not in sys.modules
