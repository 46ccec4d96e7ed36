# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend compile` says what it does not compile, and ends in one line; `cache list` has a line an entry."""

import contextlib
import importlib.abc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import dsl_backend
from dsl_backend import cli, kernel_commands
from dsl_backend.families import NAMES
from dsl_backend.runtime import cache, compile_process, precompile, toolkit
from dsl_backend.runtime import family as families
from dsl_backend.runtime.key import Identity
from dsl_backend.runtime.precompile import Outcome, PrecompileSpec

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
needs_cute = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", str(tmp_path))
    return tmp_path / cache.FOLDER


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@needs_cute
def test_kernels_of_experts_are_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in MXFP4 has kernels by name alone, and the line that says so names them."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(MODEL | experts))
    todo: list[PrecompileSpec] = []
    monkeypatch.setattr(kernel_commands, "followed", lambda units, jobs, quiet: todo.extend(units) or [])
    words = ("compile", "--model", config, "--arch", "sm_90a", "--family", "experts")
    done = invoke(*words)
    assert "weights in mxfp4 need the kernel's name: --experts-kernel cute-weight-only" in done.stdout
    assert not todo
    done = invoke(*words, "--experts-kernel", "cute-weight-only", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["without"] == []
    assert {unit.family for unit in todo} == {"experts"}
    done = invoke(*words, "--experts-kernel", "fast")
    assert done.exit_code == 2
    assert "experts has no kernel 'fast': choose one of cute" in done.stderr
    # Also where the model has none.
    config.write_text(json.dumps(MODEL))
    done = invoke(*words, "--experts-kernel", "fast")
    assert (done.exit_code, "experts has no kernel 'fast'" in done.stderr) == (2, True)


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_without_cute_dsl(config: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]) -> None:
    monkeypatch.setattr(toolkit, "missing", lambda: ["nvidia-cutlass-dsl is not installed: install it"])
    done = invoke("compile", "--model", config, "--arch", "sm_90a", *form)
    assert done.exit_code == 1
    assert done.stderr == "dsl-backend: nothing is compiled: nvidia-cutlass-dsl is not installed: install it\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("name", "value"), [("DSL_BACKEND_CACHE_DIR", "here"), ("DSL_BACKEND_CACHE", "7"), ("DSL_BACKEND_SAMPLER", "2")]
)
def test_a_wrong_variable_is_refused_before_anything_is_compiled(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    done = invoke("compile", "--model", config, "--arch", "sm_90a")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"dsl-backend: {name}={value!r} is not accepted: use ")
    assert len(done.stderr.splitlines()) == 1, "no progress bar"


@needs_cute
class TestWhatOthersServe:
    def test_float32(self, config: Path) -> None:
        words = ("compile", "--model", config, "--arch", "sm_90a", "--dtype", "float32", "--family", "attention")
        words += ("--family", "linear")
        done = invoke(*words)
        attention, linear, nothing = done.stdout.splitlines()
        assert attention == (
            "no CuTe DSL kernel: attention on sm_90a: 8/2 heads of 64, float32, page 16, causal: dense-prefill sm90, "
            "dense-decode sm90, write-kv sm90/sm100: dtype float32 is not one of float16, bfloat16"
        )
        assert linear == (
            "no CuTe DSL kernel: linear on sm_90a: gate and up projections: dtype float32 is not one of float16, "
            "bfloat16"
        )
        assert nothing.startswith("nothing to compile: ")
        without = json.loads(invoke(*words, "--json").stdout)["without"]
        assert [(one["family"], one["arch"]) for one in without] == [("attention", "sm_90a"), ("linear", "sm_90a")]
        assert attention.endswith(without[0]["why"])

    @pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
    def test_another_gpu(self, config: Path, arch: str) -> None:
        """Every family says so, and each reason once."""
        done = invoke("compile", "--model", config, "--arch", arch)
        lines = done.stdout.splitlines()
        for family in set(NAMES) - {"experts"}:  # the model has none
            assert [line for line in lines if line.startswith(f"no CuTe DSL kernel: {family} on {arch}: ")]
        assert lines[-1] == f"nothing to compile: no operator has a CuTe DSL kernel for this model on {arch}"
        reasons = [line.rpartition(": ")[2] for line in lines if " softmax on " in line]
        assert len(reasons) == len(set(reasons)) == 1

    def test_a_model_that_is_served_says_nothing(self) -> None:
        from dsl_backend.runtime.model import shape_of
        from dsl_backend.runtime.target import from_arch

        for family in families.load_all():
            for arch in ("sm_90a", "sm_100a"):
                assert families.served_by_others(family, shape_of(MODEL), from_arch(arch)) == [], family.name

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"intermediate_size": None}, "the model's configuration names none"),
            ({"intermediate_size": 1028}, "gate and up projections of 1028: not a multiple of 8"),
        ],
    )
    def test_mlps(self, config: Path, change: dict[str, Any], why: str) -> None:
        config.write_text(json.dumps(MODEL | change))
        done = invoke("compile", "--model", config, "--arch", "sm_90a", "--family", "linear")
        assert why in done.stdout


class TestInterrupted:
    def test_status_and_line(self, config: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = []

        def run(todo: list[PrecompileSpec], jobs: int | None) -> Iterator[Outcome]:
            try:
                yield Outcome(todo[0], compile_process.Result.COMPILED, size_bytes=2048)
                raise KeyboardInterrupt
            finally:
                closed.append(True)

        monkeypatch.setattr(toolkit, "missing", list)
        spec = PrecompileSpec("any", print, 1, None)  # type: ignore[arg-type]
        monkeypatch.setattr(families, "precompile_specs", lambda model, target, only: [spec] * 3)
        monkeypatch.setattr(precompile, "run", run)
        monkeypatch.setattr(families, "served_by_others", lambda family, model, target: [])
        monkeypatch.setattr(PrecompileSpec, "__str__", lambda self: "spec")
        done = invoke("compile", "--model", config, "--arch", "sm_90a", "--json")
        assert done.exit_code == 130
        assert done.stderr == f"dsl-backend: interrupted: 1 of 3 kernels: 1 compiled; 2 KiB in {folder}\n"
        assert done.stdout == ""
        assert closed, "its processes have ended"

    @needs_cute
    def test_ctrl_c(self, config: Path) -> None:
        """A real one, while processes compile."""
        command = [sys.executable, "-m", "dsl_backend.cli", "compile", "--model", str(config), "--arch", "sm_90a"]
        process = subprocess.Popen(
            [*command, "--family", "sampling", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell that runs the tests in the background lets them ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        deadline = time.monotonic() + 120
        # Imports start processes too.
        while not any("compile_process" in command for command in children_of(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # As a terminal does it: to all of the group.
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=60)
        assert process.returncode == 130
        assert out == ""
        assert error.startswith("dsl-backend: interrupted: 0 of ")
        assert error.count("\n") == 1

    def test_before_the_command_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A subcommand imports for seconds; its line comes then too."""

        class Imports(importlib.abc.MetaPathFinder):
            def find_spec(self, fullname: str, path: object, target: object = None) -> None:
                if fullname == "dsl_backend.kernel_commands":
                    raise KeyboardInterrupt

        monkeypatch.delitem(sys.modules, "dsl_backend.kernel_commands", raising=False)
        monkeypatch.delattr(dsl_backend, "kernel_commands", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Imports(), *sys.meta_path])
        done = invoke("cache", "list")
        assert done.exit_code == 130
        assert done.stderr == "dsl-backend: interrupted\n"


def children_of(pid: int) -> list[str]:
    """The command lines of the processes that a main thread started."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{child}/cmdline").read_text())
    return found


def test_a_line_for_an_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the terminal is narrow and the key long."""
    monkeypatch.setenv("COLUMNS", "40")
    disk = cache.open_cache()
    long = f"Key(tiles={'128, ' * 60})"
    for number in range(3):
        parts = {"kernel": f"module.Kernel{number}", "arch": "sm_90a", "key": long, "format": -1}
        disk.store(Identity(f"module.Kernel{number}", long, "sm_90a", parts), b"x" * 3000, 1.5)
    (folder / f"{'0' * 32}.o").write_bytes(b"not one")
    done = invoke("cache", "list")
    assert done.exit_code == 0
    head, *entries, last = done.stdout.splitlines()
    assert head.split() == ["KiB", "seconds", "made", "arch", "state", "kernel"]
    assert len(entries) == 4
    assert last.startswith("4 kernels, ")
    for number in range(3):
        (line,) = [entry for entry in entries if f"Kernel{number} " in entry]
        assert line.endswith(f"Kernel{number} {long}")
        assert line.startswith("3    1.50     ")
    (broken,) = [entry for entry in entries if "broken: it " in entry]
    assert broken.endswith(f"{'0' * 32}.o")
