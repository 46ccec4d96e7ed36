# SPDX-License-Identifier: Apache-2.0
"""One door to the environment: who reads it, what it accepts, and where that is written."""

import ast
import os
from pathlib import Path

import pytest

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target, detect

ROOT = Path(__file__).resolve().parent.parent


def readers(source: str) -> list[int]:
    """Lines that touch os.environ, os.getenv or os.putenv."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in names for alias in node.names))
    ]


def test_nobody_else_reads_it() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / "dsl_backend").rglob("*.py"))
        # testing/ makes the environments of subprocesses.
        if file != Path(envs.__file__) and "testing" not in file.parts
        for line in readers(file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("line", ["os.environ['A']", "import os as o\no.getenv('A')", "from os import environ"])
def test_a_reader_is_found(line: str) -> None:
    assert readers(line)


def test_all_are_documented() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    for variable in envs.OURS:
        assert f"`{variable.name}`" in text
        assert variable.meaning in text


@pytest.mark.parametrize(
    ("text", "value"), [("", True), ("1", True), ("on", True), ("0", False), ("False", False), ("no", False)]
)
def test_switch(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE", text)
    assert envs.CACHE.read() is value
    monkeypatch.delenv("DSL_BACKEND_CACHE")
    assert envs.CACHE.read() is True


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", "~/cache")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.CACHE_DIR.read() == Path("/home/somebody/cache")
    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", "cache")
    with pytest.raises(InvalidInput, match="DSL_BACKEND_CACHE_DIR='cache' is not accepted: use an absolute path"):
        envs.CACHE_DIR.read()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("DSL_BACKEND_SAMPLER", "2", "use 0 or 1"),
        ("DSL_BACKEND_LINEAR", "maybe", "use 0 or 1"),
        ("DSL_BACKEND_CACHE", "7", "use 0 or 1"),
        ("DSL_BACKEND_CACHE_DIR", "cache", "use an absolute path"),
        ("DSL_BACKEND_TUNED_CONFIGS", "./tuned.json", "use an absolute path"),
        ("DSL_BACKEND_ARCH", "foo", "use the GPU's own architecture or one below sm_90, such as sm_80"),
        ("DSL_BACKEND_ARCH", "sm_999", "use the GPU's own architecture or one below sm_90, such as sm_80"),
    ],
)
def test_wrong_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str) -> None:
    assert envs.problems() == []
    monkeypatch.setenv(name, value)
    assert envs.problems() == [f"{name}={value!r} is not accepted: {accepted}"]


def test_every_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.OURS:
        monkeypatch.setenv(variable.name, "a wrong value")
    assert len(envs.problems()) == len(envs.OURS)


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_SAMLPER", "1")
    monkeypatch.setenv("DSL_BACKEND_XYZZY", "1")
    near, far = envs.problems()
    assert near == "DSL_BACKEND_SAMLPER is not a variable of dsl-backend: do you mean DSL_BACKEND_SAMPLER?"
    assert far.startswith("DSL_BACKEND_XYZZY is not a variable of dsl-backend: its variables are DSL_BACKEND_CACHE, ")


def test_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_OF_A_TEST_B", "2")
    monkeypatch.setenv("DSL_OF_A_TEST_A", "1")
    assert list(envs.starting_with("DSL_OF_A_TEST_").items()) == [("DSL_OF_A_TEST_A", "1"), ("DSL_OF_A_TEST_B", "2")]


def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    envs.hide_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["CUTE_DSL_ARCH"] == "sm_90a", "a user's choice is kept"
    monkeypatch.delenv("CUTE_DSL_ARCH")
    envs.hide_gpus()
    assert os.environ["CUTE_DSL_ARCH"] == "sm_100a"


class TestArch:
    HOPPER = Target(capability=(9, 0), sm_count=114, smem_bytes=227 * 1024)

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(targets, "_of_cuda_device", lambda index: self.HOPPER)
        monkeypatch.delenv("DSL_BACKEND_ARCH", raising=False)

    def found(self) -> Target:
        return detect(targets.torch.device("cuda", 0))

    def test_by_default_it_is_what_it_is(self) -> None:
        assert self.found() is self.HOPPER

    @pytest.mark.parametrize(("arch", "smem_kib"), [("sm_80", 163), ("sm_86", 99), ("sm_90a", 227)])
    def test_an_older_one(self, monkeypatch: pytest.MonkeyPatch, arch: str, smem_kib: int) -> None:
        """The chip keeps its SMs."""
        monkeypatch.setenv("DSL_BACKEND_ARCH", arch)
        found = self.found()
        assert (found.arch, found.smem_bytes, found.sm_count) == (arch, smem_kib * 1024, 114)

    @pytest.mark.parametrize("arch", ["sm_100a", "cpu", "sm_120"])
    def test_what_it_cannot_run(self, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
        monkeypatch.setenv("DSL_BACKEND_ARCH", arch)
        with pytest.raises(InvalidInput, match=f"DSL_BACKEND_ARCH='{arch}' is not accepted on a sm_90a: use"):
            self.found()

    def test_code_for_hopper_runs_on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(targets, "_of_cuda_device", lambda index: targets.from_arch("sm_100a"))
        monkeypatch.setenv("DSL_BACKEND_ARCH", "sm_90a")
        with pytest.raises(InvalidInput, match="DSL_BACKEND_ARCH='sm_90a' is not accepted on a sm_100a"):
            self.found()

    def test_a_cpu_stays_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DSL_BACKEND_ARCH", "sm_80")
        assert detect(targets.torch.device("cpu")).is_cpu
