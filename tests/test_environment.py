# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend env`: what a bug report needs is there, and nothing that is secret."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsl_backend import __version__, cli, environment


def invoke(*words: str) -> Result:
    result = CliRunner().invoke(cli.app, ["env", *words])
    assert result.exit_code == 0, result.output
    return result


def facts() -> dict[str, Any]:
    return json.loads(invoke("--json").stdout)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache below the user's own folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_both_forms_say_the_same() -> None:
    found, text = facts(), invoke().stdout
    assert found["schema_version"] == environment.SCHEMA_VERSION
    assert found["versions"]["dsl-backend"] == __version__
    for fact in (found["python"], found["platform"], *(text for text in found["versions"].values() if text)):
        assert fact in text
    assert set(found["versions"]) == set(environment.DISTRIBUTIONS)
    assert found["problems"] == []


def test_the_cache(folder: Path) -> None:
    empty = {"folder": "~/cache/kernels", "state": "on", "entries": 0, "size_bytes": 0}
    assert facts()["cache"] == empty
    folder.mkdir(parents=True, mode=0o700)
    (folder / f"{'0' * 32}.o").write_bytes(b"x" * 2048)
    (folder / f"{'0' * 32}.lock").touch()
    assert facts()["cache"] == empty | {"entries": 1, "size_bytes": 2048}
    assert "~/cache/kernels: on, 1 kernels, 2 KiB" in invoke().stdout
    folder.chmod(0o755)
    assert facts()["cache"]["state"].startswith("not used: its mode is 0755")


def test_a_cache_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    assert facts()["cache"]["state"] == "off: DSL_BACKEND_CACHE"


def test_variables_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "swordfish"
    for name in environment.envs.OTHERS:
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_TOKEN", "VLLM_API_KEY", "DSL_BACKEND_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("DSL_BACKEND_SAMPLER", "2")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    found = facts()
    assert found["variables"] == {
        "DSL_BACKEND_CACHE_DIR": str(Path.home() / "cache"),
        "DSL_BACKEND_SAMPLER": "2",
        "VLLM_PLUGINS": "",
    }
    unknown, wrong = found["problems"]
    assert unknown.startswith("DSL_BACKEND_API_KEY is not a variable of dsl-backend")
    assert wrong == "DSL_BACKEND_SAMPLER='2' is not accepted: use 0 or 1"
    text = invoke().stdout
    assert wrong in text
    assert secret not in text + json.dumps(found)


class TestGpus:
    def answer(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        def run(command: tuple[str, ...], **options: Any) -> Any:
            assert command[0] == "nvidia-smi"
            return subprocess.CompletedProcess(command, 0, stdout=text)

        monkeypatch.setattr(environment.subprocess, "run", run)

    def test_what_the_driver_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer(monkeypatch, "NVIDIA H200, 9.0, 143771 MiB, 580.95.05\nNVIDIA B200, 10.0, 183359 MiB, 580.95.05\n")
        first, second = facts()["gpus"]
        assert first == {"name": "NVIDIA H200", "capability": "9.0", "memory": "143771 MiB", "driver": "580.95.05"}
        assert second["name"] == "NVIDIA B200"
        assert "NVIDIA B200, capability 10.0, 183359 MiB, driver 580.95.05" in invoke().stdout

    def test_what_is_no_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer(monkeypatch, "No devices were found\n")
        assert facts()["gpus"] == []

    def test_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*arguments: Any, **options: Any) -> Any:
            raise FileNotFoundError("nvidia-smi")

        monkeypatch.setattr(environment.subprocess, "run", run)
        assert facts()["gpus"] == []
