# SPDX-License-Identifier: Apache-2.0
"""Which kernels a model needs, and compiling them in other processes: all of them, whatever becomes of one."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsl_backend import cli, families
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache, precompile, toolkit
from dsl_backend.runtime import compile as compilation
from dsl_backend.runtime.compiles import Source, compiles
from dsl_backend.runtime.model import ModelShape, shape_of
from dsl_backend.runtime.precompile import Result as Became
from dsl_backend.runtime.precompile import Unit, register_family, run, units
from dsl_backend.runtime.target import Target, from_arch

pytest.importorskip("cutlass")

import self_test_kernels
from self_test_kernels import ScaleKey, build

CONFIG = {"num_attention_heads": 8, "hidden_size": 1024, "vocab_size": 1000, "torch_dtype": "bfloat16"}
SM90, SM100 = from_arch("sm_90a"), from_arch("sm_100a")


def unit(target: Target = SM90, build: Any = build, **config: Any) -> Unit:
    return Unit("self-test", build, ScaleKey(**config), target)


def die(key: Any, target: Target) -> None:
    os._exit(11)


def sees_gpus(key: Any, target: Target) -> None:
    raise ValueError(f"sees {os.environ['CUDA_VISIBLE_DEVICES']!r}")


class TestFamilies:
    def test_units(self) -> None:
        register_family("self-test", self_test_kernels.units)
        register_family("self-test", self_test_kernels.units)
        found = units(shape_of(CONFIG), SM90)
        assert [one.key.dtype for one in found] == ["bfloat16", "float32"]
        assert str(found[0]) == ("self-test: ScaleKey(dtype='bfloat16', threads=128, broken=False) for sm_90a")
        assert units(shape_of(CONFIG), SM90, ["self-test"]) == found
        assert precompile.families() == ("self-test",)

    def test_each_once(self) -> None:
        register_family("one", lambda model, target: [unit(), unit(threads=64), unit()])
        assert [one.key.threads for one in units(shape_of(CONFIG), SM90)] == [128, 64]

    def test_refusals(self) -> None:
        with pytest.raises(InvalidInput, match="family 'x' has no CuTe DSL kernels; families that have some: none"):
            units(shape_of(CONFIG), SM90, ["x"])
        register_family("self-test", self_test_kernels.units)
        with pytest.raises(
            InvalidInput, match="family 'x' has no CuTe DSL kernels; families that have some: self-test"
        ):
            units(shape_of(CONFIG), SM90, ["x"])
        with pytest.raises(InvalidInput, match="family 'self-test' is registered already"):
            register_family("self-test", lambda model, target: [])

    def test_rooms_register_themselves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        room = tmp_path / "linear"
        room.mkdir()
        (room / "__init__.py").touch()
        (room / "units.py").write_text(
            "from dsl_backend.runtime.precompile import register_family\nregister_family('linear', lambda *_: [])\n"
        )
        monkeypatch.setattr("dsl_backend.__path__", [str(tmp_path)])
        monkeypatch.setattr(families, "FAMILIES", ("linear", "not_there"))
        for name in ("dsl_backend.linear", "dsl_backend.linear.units"):
            monkeypatch.delitem(precompile.toolkit.sys.modules, name, raising=False)
        families.load_units()
        assert "linear" in precompile.families()
        for name in ("dsl_backend.linear", "dsl_backend.linear.units"):
            monkeypatch.delitem(precompile.toolkit.sys.modules, name)


@pytest.mark.usefixtures("unedited")
def test_other_processes_compile(folder: Path) -> None:
    """Two architectures, what is there already, one that fails, one that kills its process, one that cannot travel."""
    build(ScaleKey(threads=32), SM90)
    compilation.forget()
    todo = [
        unit(threads=32),
        unit(SM90),
        unit(build=die, threads=1),
        unit(SM100),
        unit(broken=True),
        unit(build=sees_gpus, threads=2),
        unit(build=lambda key, target: None, threads=3),
    ]
    outcomes = {outcome.unit: outcome for outcome in run(todo, 2)}
    assert list(map(outcomes.__contains__, todo)) == [True] * len(todo)
    became = [outcomes[one].result for one in todo]
    assert became == [Became.PRESENT, Became.COMPILED, Became.FAILED, Became.COMPILED, *[Became.FAILED] * 3]
    errors = [outcomes[one].error or "" for one in todo]
    assert errors[2] == "its process died while it compiled"
    assert "this kernel is broken" in errors[4]
    assert errors[5] == "ValueError: sees ''"
    assert errors[6].startswith("cannot be given to another process: ")
    assert all(outcomes[one].size_bytes > 1000 for one in (todo[0], todo[1], todo[3]))
    assert len(list(folder.glob("*.o"))) == 3
    before = len(compiles.events)
    build(ScaleKey(), SM100)
    assert [event.source for event in compiles.events[before:]] == [Source.DISK], "this process finds what others made"


def test_nothing_to_do() -> None:
    assert list(run([])) == []


def test_nowhere_to_keep_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    with pytest.raises(InvalidInput, match=r"nothing compiled could be kept in .*: DSL_BACKEND_CACHE switches it off"):
        list(run([unit()]))
    monkeypatch.setenv("DSL_BACKEND_CACHE", "1")
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with pytest.raises(InvalidInput, match="its mode is 0755"):
        list(run([unit()]))


class TestCommands:
    @pytest.fixture(autouse=True)
    def family(self) -> None:
        register_family("self-test", self_test_kernels.units)

    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(CONFIG))
        return path

    def invoke(self, *words: Any) -> Result:
        return CliRunner().invoke(cli.app, [str(word) for word in words])

    @pytest.mark.usefixtures("unedited")
    def test_compile_then_look(self, config: Path, folder: Path) -> None:
        words = ("compile", "--model", config, "--arch", "sm_90a", "--arch", "sm_100a", "--family", "self-test")
        done = self.invoke(*words)
        assert done.exit_code == 0, done.output
        assert "4 kernels: 4 compiled; " in done.stdout
        assert "4/4" in done.stderr, "a bar, and not among the results"
        again = json.loads(self.invoke(*words, "--json").stdout)
        assert [one["result"] for one in again["kernels"]] == ["present"] * 4
        assert {(one["arch"], one["key"].split("'")[1]) for one in again["kernels"]} == {
            (arch, dtype) for arch in ("sm_90a", "sm_100a") for dtype in ("bfloat16", "float32")
        }
        listed = json.loads(self.invoke("cache", "list", "--json").stdout)
        assert listed["folder"] == str(folder)
        assert {one["state"] for one in listed["kernels"]} == {"current"}
        assert listed["size_bytes"] == sum(path.stat().st_size for path in folder.glob("*.o"))
        shown = self.invoke("cache", "list").stdout
        assert shown.count("Scale ") == 4
        assert "4 kernels, " in shown
        assert self.invoke("cache", "verify").stdout.startswith("4 current, 0 stale, 0 broken in ")

    def test_dtype_and_ranks_arrive(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[ModelShape] = []

        def enumerate_units(model: ModelShape, target: Target) -> Iterator[Unit]:
            seen.append(model)
            yield from ()

        monkeypatch.setattr(precompile, "_families", {"spy": enumerate_units})
        done = self.invoke(
            "compile", "--model", config, "--arch", "sm_90a", "--tensor-parallel", 2, "--dtype", "float16"
        )
        assert done.exit_code == 0
        assert done.stdout == "nothing to compile: no operator has a CuTe DSL kernel for this model on sm_90a\n"
        assert seen == [
            dataclasses.replace(shape_of(CONFIG, dtype="float16"), heads_q=4, heads_kv=4, tensor_parallel=2)
        ]

    def test_a_kernel_that_fails(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(precompile, "_families", {"bad": lambda model, target: [unit(broken=True)]})
        done = self.invoke("compile", "--model", config, "--arch", "sm_90a", "--jobs", 1)
        assert done.exit_code == 1
        assert "failed: self-test: ScaleKey(dtype='float32', threads=128, broken=True) for sm_90a: " in done.stdout
        assert "this kernel is broken" in done.stdout

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--arch", "hopper"), "arch 'hopper' is not a CUDA architecture"),
            (("--arch", "cpu"), "arch 'cpu' has no compiled kernels: use a name such as sm_90a"),
            (("--arch", "sm_90a", "--family", "x"), "family 'x' has no CuTe DSL kernels"),
            (("--arch", "sm_90a", "--dtype", "int3"), "dtype 'int3' is not one of"),
            (("--arch", "sm_90a", "--tensor-parallel", "3"), "8 heads cannot be shared by 3 ranks"),
        ],
    )
    def test_refusals(self, config: Path, words: tuple[str, ...], message: str) -> None:
        done = self.invoke("compile", "--model", config, *words)
        assert done.exit_code == 2
        assert message in done.stderr
        assert done.stdout == ""

    def test_stale_and_broken(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build(ScaleKey(), SM90)
        with monkeypatch.context() as patch:
            patch.setattr(toolkit, "versions", lambda: ("nvidia_cutlass_dsl-9.9.9",))
            build(ScaleKey(threads=64), SM90)
        (folder / f"{'0' * 32}.o").write_bytes(b"not one")
        (folder / f"{'0' * 32}.o").chmod(0o600)
        done = self.invoke("cache", "verify")
        assert done.exit_code == 1
        assert f"broken: {'0' * 32}.o: it has 7 bytes" in done.stdout
        assert "1 current, 1 stale, 1 broken in " in done.stdout
        found = json.loads(self.invoke("cache", "verify", "--json").stdout)
        assert (found["current"], found["stale"], found["broken"]) == (1, 1, 1)
        listed = {
            one["state"]: one["why"] for one in json.loads(self.invoke("cache", "list", "--json").stdout)["kernels"]
        }
        assert listed == {"current": None, "stale": "made with nvidia_cutlass_dsl-9.9.9", "broken": "it has 7 bytes"}
        assert json.loads(self.invoke("cache", "clear", "--stale", "--json").stdout)["removed"] == 2
        assert self.invoke("cache", "verify").exit_code == 0
        compilation.forget()
        before = len(compiles.events)
        build(ScaleKey(), SM90)
        assert compiles.events[before].source is Source.DISK, "what is current stays"
        assert self.invoke("cache", "clear").stdout == "1 kernels removed\n"
        assert not list(folder.glob("*.o"))

    def test_other_sources_are_stale(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build(ScaleKey(), SM90)
        monkeypatch.setattr("dsl_backend.runtime.key.sources_of", lambda root: precompile_sources())
        (entry,) = json.loads(self.invoke("cache", "list", "--json").stdout)["kernels"]
        assert (entry["state"], entry["why"]) == ("stale", "made from other sources")

    def test_no_cache_yet(self, folder: Path) -> None:
        for words in (("list",), ("verify",), ("clear",)):
            done = self.invoke("cache", *words)
            assert done.exit_code == 0
            assert done.stdout.startswith("0 ")
        assert not folder.exists(), "looking makes nothing"

    def test_a_cache_of_somebody_else(self, folder: Path) -> None:
        cache.open_cache()
        folder.chmod(0o777)
        for words in (("list",), ("verify",), ("clear",)):
            done = self.invoke("cache", *words)
            assert done.exit_code == 2
            assert "is not used: its mode is 0777: chmod 700" in done.stderr


def precompile_sources() -> Any:
    from dsl_backend.runtime.key import Sources

    return Sources("other", 0.0)
