# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend verify`: what it goes through, what it writes, and what it ends with."""

import importlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import verify_children
from rich.console import Console
from typer.testing import CliRunner, Result

from dsl_backend import cli, doctor, verify
from dsl_backend.experts.configs import Kind
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import fuzz, worker
from dsl_backend.testing.worker import Outcome, Status

BENCHMARKS = importlib.import_module("benchmarks")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does to the environment ends with the test."""
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["verify", *words])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_families_are_those_of_the_fuzzer() -> None:
    assert set(verify.CHECKS) == set(fuzz.FAMILIES)


def test_every_benchmark_is_timed() -> None:
    """Each operator in one family, by patterns that find rows of it, quick ones among the others."""
    operators = dict(BENCHMARKS.operators())
    del operators["launch"]  # times DSLs: it is of no family
    chosen = [benchmark for family in verify.CHECKS.values() for benchmark in family.benchmarks]
    assert sorted(one.op for one in chosen) == sorted(operators)
    for benchmark in chosen:
        ids = [case.id for case in operators[benchmark.op].cases()]
        rows, quick, tiny = (
            {id for id in ids if re.search(pattern, id)}
            for pattern in (benchmark.rows, benchmark.quick, verify.TINY_ROWS)
        )
        assert quick < rows
        assert 1 <= len(quick) <= 2
        assert 3 <= len(rows) <= 12, benchmark.op
        assert tiny


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "sm_100a"])
def test_kernels_are_those_of_the_doctor(arch: str) -> None:
    found = {(one.family, one.kernel): one for one in verify.tallies(doctor.examine(arch), tuple(verify.CHECKS), ())}
    assert {family for family, _ in found} == set(verify.CHECKS)
    for (_, kernel), tally in found.items():
        of_some = (
            "cute-scaled",
            "cute-scaled-sm100",
            "cute-block-scaled",
            "cute-sm90",
            *(f"cute-{kind.value}" for kind in Kind),
        )
        assert kernel in ("cute", "triton", "reference", *of_some)
        if kernel == "reference":
            assert bool(tally.reason) == (arch != "cpu")
    target = from_arch(arch)
    for family in ("decode", "linear"):
        assert bool(found[family, "cute"].reason) != (target.kernel_arch is not None)
    assert found["softmax", "cute"].chosen == (target.kernel_arch is not None)
    assert found["softmax", "triton"].chosen == (arch == "sm_80")


def test_some_kernels() -> None:
    found = verify.tallies(doctor.examine("sm_90a"), ("mla", "write_kv"), ("cute",))
    assert [(one.family, one.kernel) for one in found] == [("mla", "cute"), ("write_kv", "cute")]


class TestWrongUse:
    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        result = invoke()
        assert result.exit_code == 2
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert "needs an NVIDIA GPU" in line

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["--families", "decode,pool"], "no family 'pool': choose from prefill, decode"),
            (["--families", "write_kv", "--kernels", "cuda"], "no kernel 'cuda': choose from cute, reference, triton"),
            (["--only", "warp"], "name it with --families"),
            (["--families", "softmax", "--only", "wrap"], "softmax has no problem 'wrap'"),
            (["--device", "tpu"], "device 'tpu' is not accepted"),
            (["--json", "/dev/null/file"], "--json /dev/null/file cannot be written"),
        ],
    )
    def test_arguments(self, words: list[str], says: str) -> None:
        result = invoke(*(words if "--device" in words else ["--device", "cpu", *words]))
        assert result.exit_code == 2
        assert says in result.stderr


def test_on_a_cpu(tmp_path: Path) -> None:
    """The command itself from end to end, and a page made of what it wrote."""
    path = tmp_path / "all.json"
    words = ("--device", "cpu", "--quick", "--problems", "1", "--peers", "none", "--json", str(path))
    result = invoke(*words, "--families", "softmax,linear", "--kernels", "reference")
    assert result.exit_code == 0, result.output
    entries = read(path)
    kinds = [entry["kind"] for entry in entries]
    assert kinds[:3] == ["environment", "doctor", "verify"]
    assert kinds[-1] == "summary"
    checks = [entry for entry in entries if entry["kind"] == "check"]
    assert {entry["family"] for entry in checks} == {"softmax", "linear"}
    assert all(entry["status"] == "right" for entry in checks)
    assert sum(entry["problem"] == "fuzz-0-0" for entry in checks) == 2
    rows = [entry for entry in entries if entry["kind"] == "row"]
    assert {row["operator"] for row in rows} == {"softmax", "linear"}
    assert all(cell["status"] == "ok" for row in rows for cell in row["cells"])
    assert entries[-1] | {"seconds": 0} == {
        "kind": "summary",
        "all_right": True,
        "right": len(checks),
        "failed": 0,
        "rows": len(rows),
        "row_failures": [],
        "seconds": 0,
    }
    assert entries[1]["target"]["arch"] == "cpu"
    assert "All right" in result.stdout
    assert str(path) in result.stdout
    measured = importlib.import_module("benchmarks.measured")
    assert measured.read(path) == [entries[0], *rows]


def test_what_is_wrong_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that is wrong at some rows, and ends its process at others: the rest is still checked."""
    monkeypatch.setattr(worker, "check_all", verify_children.check_all_wrongly)
    path = tmp_path / "all.json"
    words = ("--device", "cpu", "--problems", "0", "--families", "softmax", "--kernels", "reference")
    result = invoke(*words, "--json", str(path))
    assert result.exit_code == 1
    entries = read(path)
    status = {entry["problem"]: entry for entry in entries if entry["kind"] == "check"}
    failed = {name: entry["status"] for name, entry in status.items() if entry["status"] != "right"}
    assert failed == {
        "block": "wrong",
        "block-ragged": "wrong",
        "cluster-default": "wrong",
        "recompute-log": "crashed",
        "stream-exact": "crashed",
        "two-vectors": "wrong",
        "two-vectors-cluster": "wrong",
    }
    assert "gone" in status["recompute-log"]["message"]
    assert [entry for entry in entries if entry["kind"] == "row"] == []
    assert entries[-1]["failed"] == 7
    assert not entries[-1]["all_right"]
    assert "NOT all right" in result.stdout
    for name in failed:
        assert status[name]["repeat"] in result.stdout
    # The command that repeats one of them, with the kernel as it is.
    monkeypatch.undo()
    program, verb, *words = shlex.split(status["block"]["repeat"])
    assert (program, verb) == ("dsl-backend", "verify")
    again = invoke(*words)
    assert again.exit_code == 0, again.output
    assert "1 problems right" in again.stdout


def concluded(*counts: tuple[Status, int], problems: tuple[str, ...] = ()) -> int:
    screen = verify.Screen(Console(file=io.StringIO()))
    tally = verify.Tally("decode", "cute", chosen=False, reason="", total=sum(n for _, n in counts))
    tally.counts.update(dict(counts))
    screen.tallies = [tally]
    return verify.conclude(screen, problems, BENCHMARKS.report.JsonLines(None), 1.0)


def test_exit_status() -> None:
    assert concluded((Status.RIGHT, 3), (Status.REFUSED, 2)) == 0
    assert concluded((Status.REFUSED, 2)) == 1, "nothing was checked"
    assert concluded((Status.RIGHT, 3), problems=("a row",)) == 1
    for status in Status:
        assert concluded((Status.RIGHT, 3), (status, 1)) == int(status.failed)


class FakeChild:
    """A benchmark that writes a line of JSON each time it is asked, then says what it is told to."""

    def __init__(self, path: Path, lines: list[dict[str, Any]], end: int | Exception) -> None:
        self.path, self.lines, self.end = path, lines, end

    def receive(self, seconds: float) -> int:
        if not self.lines:
            if isinstance(self.end, Exception):
                raise self.end
            return self.end
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines.pop(0)) + "\n")
        raise TimeoutError

    def last_words(self) -> str:
        return "said"


def row(status: str, provider: str = "dsl:cute") -> dict[str, Any]:
    return {"kind": "row", "id": "b1", "cells": [{"provider": provider, "status": status, "message": "off"}]}


@pytest.mark.parametrize(
    ("cells", "end", "problems"),
    [
        ([row("ok")], 0, []),
        ([row("error", "FA3")], 0, []),
        ([row("wrong"), row("ok")], 1, ["b1 dsl:cute: wrong: off"]),
        ([row("ok")], 1, ["exit status 1: said"]),
        ([], 2, ["exit status 2: said"]),
        ([row("ok")], EOFError("exit status -6: abort"), ["exit status -6: abort"]),
        ([row("ok")], TimeoutError(), ["no row for 0 s"]),
    ],
)
def test_how_a_benchmark_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cells: list[dict[str, Any]],
    end: int | Exception,
    problems: list[str],
) -> None:
    monkeypatch.setattr(verify, "ROW_SECONDS", 0.0 if isinstance(end, TimeoutError) else 60.0)
    count, found = len(cells), []
    child = FakeChild(tmp_path / "rows", [{"kind": "environment"}, *cells], end)
    rows = []
    for one in verify.rows_of(child, tmp_path / "rows", found):  # type: ignore[arg-type]
        rows.append(one)
        found += verify.wrong_cells(one)
    assert found == problems
    assert len(rows) == (0 if isinstance(end, TimeoutError) else count)


def test_times_name_the_fastest_peer() -> None:
    def cell(provider: str, time: float) -> dict[str, Any]:
        return {"provider": provider, "status": "ok", "median_us": time, "of_floor": 1.25, "rate": 3.0}

    cells = [cell("dsl:cute", 10), cell("FA3", 30), cell("FA2", 20), cell("Triton", 5)]
    shown = io.StringIO()
    table = verify.times([{"operator": "decode", "id": "b1", "unit": "TB/s", "cells": cells}])
    Console(file=shown, width=150).print(table)
    (line,) = [line for line in shown.getvalue().splitlines() if "b1" in line]
    assert line.split() == ["decode", "b1", "cute", "10.0", "1.25x", "3", "TB/s", "FA2", "20.0", "(2.00x)"]


def test_times_have_the_clocks_figures_beside_them(tmp_path: Path) -> None:
    """Of the chip, the row and the kernel that it predicted, and marked where it chose the configuration."""
    predictions = importlib.import_module("benchmarks.clock.predictions")
    file = tmp_path / "predictions.jsonl"
    some = [
        predictions.of_chip("prefill", "16x1k", 12.04, "B200", "sm_100"),
        predictions.of_chip("prefill", "16x1k", 99.0, "GB200", "sm_100"),
        predictions.of_chip("decode", "b1", 5.0, "B200", "sm_100"),
    ]
    file.write_text("".join(f"{one.line()}\n" for one in some))
    assert predictions.of_device("NVIDIA H200", file) == {}
    predicted = predictions.of_device("NVIDIA B200", file)
    assert [one.mark for one in predicted.values()] == ["by the clock", ""]

    def row(operator: str, id: str) -> dict[str, Any]:
        cells = [
            {"provider": provider, "status": "ok", "median_us": 10.0, "of_floor": None, "rate": 3.0}
            for provider in ("dsl:cute", "dsl:triton", "FA3")
        ]
        return {"operator": operator, "id": id, "unit": "TB/s", "cells": cells}

    rows = [row("prefill", "16x1k"), row("decode", "b1"), row("decode", "b8")]
    for one in rows:
        verify.add_clock(one, predicted, predictions.KERNEL)
    shown = io.StringIO()
    console = Console(file=shown, width=170)
    console.print(verify.times(rows))
    lines = [line.split("(1.00x)")[-1].strip() for line in shown.getvalue().splitlines() if "10.0" in line]
    assert lines == ["12.0 (1.20x), config by the clock", "", "5.0 (0.50x)", "", "", ""]
    assert rows[0]["cells"][0]["clock_us"] == 12.0
    verify.Screen(console).timed(rows[0])
    assert "dsl:cute 10.0 (clock 12.0), dsl:triton 10.0, FA3 10.0" in shown.getvalue()


def test_predictions_are_of_rows_that_are_timed() -> None:
    predictions = importlib.import_module("benchmarks.clock.predictions")
    operators = dict(BENCHMARKS.operators())
    timed = {
        (benchmark.op, case.id)
        for check in verify.CHECKS.values()
        for benchmark in check.benchmarks
        for case in operators[benchmark.op].cases()
        if re.search(benchmark.rows, case.id)
    }
    every = predictions.everything()
    assert {(one.operator, one.row) for one in every} <= timed
    assert len({(one.chip, one.operator, one.row) for one in every}) == len(every)
    assert predictions.of_device("NVIDIA B200")


def test_a_failure_says_how_to_repeat_it() -> None:
    tally = verify.Tally("mla", "cute", chosen=False, reason="")
    text = verify.failure(verify.Options(), tally, Outcome("real-mla-16", Status.HUNG, "not done after 300 s"))
    assert "hung: not done" in text
    assert text.endswith("dsl-backend verify --families mla --kernels cute --only real-mla-16")
