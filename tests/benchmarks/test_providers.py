# SPDX-License-Identifier: Apache-2.0
"""Providers of users: from a file, from an entry point, and those that cannot be imported."""

import json
import pathlib
import pickle
from importlib import metadata

import pytest
import torch
from test_bench_command import bench

import benchmarks
import dsl_backend
from benchmarks import columns, facts
from benchmarks.held_out import compile_ahead
from dsl_backend import providers

MINE = """
import torch
from dsl_backend.providers import provider

@provider("softmax", name="mine", objections=lambda problem: ["has no odd widths"] if problem.width % 2 else [])
def mine(problem, inputs):
    def run(layer):
        tensors = inputs.layers[layer]
        return torch.softmax(tensors.x, -1, out=tensors.out)
    return run
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_file_is_a_column(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Beside the others; a row that it does not serve says why, and the file says what it is."""
    status, text = bench("softmax", tmp_path / "rows.jsonl", peers="none", files=(file,))
    assert status == 0
    environment, *rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    cells = {row["id"]: {cell["provider"]: cell["status"] for cell in row["cells"]} for row in rows}
    assert cells["tiny-3x40"] == {"dsl:reference": "ok", "mine": "ok"}
    assert cells["tiny-2x4099"] == {"dsl:reference": "ok", "mine": "skipped"}
    assert "mine skipped: has no odd widths" in text
    (source,) = (text for name, text in environment["providers"]["softmax"].items() if name == "mine")
    assert source.startswith("mine.py sha256:")
    assert environment["providers"]["softmax"]["dsl:reference"].startswith("dsl-backend ")
    assert f"mine: {source}" in text


def test_a_source_is_the_distribution_and_every_file(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("__global__ void one() {}")
    file.write_text(MINE.replace('name="mine",', 'name="mine", package="torch", code=["kernel.cu", "gone.cu"],'))
    (mine,) = providers.of_file(file, "softmax")
    package, module, first, gone = mine.source.split(", ", 3)
    assert package == f"torch {metadata.version('torch')}"
    assert module.startswith("mine.py sha256:")
    assert first.startswith("kernel.cu sha256:")
    assert gone == "gone.cu, not found"
    kernel.write_text("__global__ void two() {}")
    changed = mine.source.split(", ", 3)
    assert [old == new for old, new in zip((package, module, first, gone), changed, strict=True)] == [1, 1, 0, 1]


def built_in() -> list[providers.Provider]:
    return [one for operator in benchmarks.operators().values() for one in operator.providers([])]


@pytest.mark.parametrize("name", ["Gluon", "Helion", "TileLang", "cuTile", "Triton"])
def test_a_kernel_of_this_repository_is_shown_with_its_file(name: str) -> None:
    found = [one for one in built_in() if one.name == name]
    assert found
    for one in found:
        assert one.code, one.operator
        assert all(path.is_file() for path in one.code), one.operator
        assert one.source.count(" sha256:") == len(one.code)
        assert not one.source.startswith("unknown")


def test_every_distribution_of_a_column_is_in_the_record() -> None:
    assert {one.package for one in built_in() if one.package} <= {*facts.PACKAGES}
    assert {"liger-kernel", "helion", "tilelang", "cuda-tile", "flash-attn-4"} <= {*facts.PACKAGES}


def test_this_package_is_shown_with_its_version_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another version of the distribution is installed, or none."""
    ours, *_, peer = benchmarks.operators()["softmax"].providers([])[:3]
    gathered = {"commit": "0123456789abcdef", "modified": True}
    monkeypatch.setattr(metadata, "version", lambda package: "0")
    assert ours.source == f"dsl-backend {dsl_backend.__version__}"
    assert facts.source_of(ours, gathered) == f"{ours.source}, commit 012345678+"
    assert facts.source_of(ours, {**gathered, "modified": False}) == f"{ours.source}, commit 012345678"
    assert facts.source_of(ours, {"commit": None, "modified": True}) == ours.source
    assert facts.source_of(peer, gathered) == peer.source


def test_a_wrong_result_of_a_file_is_said_and_does_not_fail_the_command(file: pathlib.Path) -> None:
    file.write_text(MINE.replace("-1, out", "0, out"))
    status, text = bench("softmax", peers="none", files=(file,), rows="^tiny-3")
    assert status == 0
    assert "mine: wrong: WrongResultError" in text


def test_a_file_that_cannot_be_imported_says_why(file: pathlib.Path) -> None:
    file.write_text("import no_such_dsl\n" + MINE)
    status, text = bench("softmax", peers="none", files=(file,), rows="^tiny-3")
    assert status == 0
    assert "mine skipped: cannot be imported: ModuleNotFoundError: No module named 'no_such_dsl'" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_text(MINE.replace('"softmax"', '"decode"')), "has no provider of softmax"),
        (lambda file: file.write_text(MINE.replace('"mine"', '"quack"')), "more than one provider quack"),
    ],
)
def test_a_file_that_means_nothing_here_is_refused(file: pathlib.Path, change: object, message: str) -> None:
    change(file)  # type: ignore[operator]
    status, text = bench("softmax", files=(file,))
    assert status == 2
    assert message in text


def test_another_process_loads_the_file_again(file: pathlib.Path) -> None:
    (mine,) = providers.of_file(file, "softmax")
    operator = benchmarks.operators()["softmax"]
    (case,) = [case for case in operator.cases() if case.id == "tiny-3x40"]
    task = compile_ahead.Task(operator, case, mine, "cpu", 60.0)
    again = pickle.loads(pickle.dumps(task))
    assert (again.provider.name, again.provider.file) == ("mine", file)
    assert compile_ahead.launch_once(again) is None


@pytest.mark.parametrize("operator", benchmarks.operators())
def test_every_built_in_provider_goes_to_another_process(operator: str) -> None:
    for one in benchmarks.operators()[operator].providers(["reference"]):
        assert pickle.loads(pickle.dumps(one)).name == one.name


def test_an_entry_point_is_a_column(
    file: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed_kernels.py").write_text(MINE.replace('"mine"', '"installed"'))
    (tmp_path / "broken_kernels.py").write_text("import no_such_dsl")
    monkeypatch.syspath_prepend(tmp_path)
    points = [metadata.EntryPoint(name, f"{name}_kernels", providers.GROUP) for name in ("installed", "broken")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == providers.GROUP else [])
    for _ in range(2):
        found = {one.name: one for one in benchmarks.operators()["softmax"].providers([])}
        assert not found["installed"].objections(benchmarks.operators()["softmax"].cases()[0].problem)
        assert "no_such_dsl" in found["broken"].objections(None)[0]
    assert "installed" not in {one.name for one in benchmarks.operators()["decode"].providers([])}


def test_reasons_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert columns.missing("torch") == ["needs a CUDA device"]
    assert columns.missing("no_such_dsl", "no-such-dsl") == ["no-such-dsl is not installed", "needs a CUDA device"]
