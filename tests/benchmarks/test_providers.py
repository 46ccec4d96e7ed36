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
from benchmarks import columns
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
