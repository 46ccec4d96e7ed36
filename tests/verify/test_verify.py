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
from dsl_backend.experts import dispatch
from dsl_backend.quant.format import BLOCK_SCALED, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import fuzz, tables, worker
from dsl_backend.testing.worker import Outcome, Status
from emulator.clock.chips import CHIPS

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
    """Each operator, by patterns that find rows of it, quick ones among the others."""
    operators = dict(BENCHMARKS.operators())
    del operators["launch"]  # times DSLs: it is of no family
    chosen = [benchmark for family in verify.CHECKS.values() for benchmark in family.benchmarks]
    assert {one.op for one in chosen} == set(operators)
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
    target = from_arch(arch)
    found = {(one.family, one.kernel): one for one in verify.tallies(target, tuple(verify.CHECKS), ())}
    assert {family for family, _ in found} == set(verify.CHECKS)
    for operation in (operation for layer in doctor.examine(arch).layers for operation in layer.operations):
        for name, check in verify.CHECKS.items():
            if check.operation == operation.operation:
                assert {one.name for one in operation.kernels} <= {kernel for family, kernel in found if family == name}
    for (_, kernel), tally in found.items():
        of_some = (
            "cute-scaled",
            "cute-scaled-decode",
            "cute-scaled-sm100",
            "cute-block-scaled",
            "cute-weight-only",
            "cute-sm90",
        )
        assert kernel in ("cute", "triton", "reference", *of_some)
        if kernel == "reference":
            assert bool(tally.reason) == (arch != "cpu")
    for family in ("decode", "linear"):
        assert bool(found[family, "cute"].reason) != (target.kernel_arch is not None)
    assert found["softmax", "cute"].chosen == (target.kernel_arch is not None)
    assert found["softmax", "triton"].chosen == (arch == "sm_80")


def test_some_kernels() -> None:
    found = verify.tallies(from_arch("sm_90a"), ("mla", "write_kv"), ("cute",))
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
    result = invoke(*words, "--families", "softmax,linear,weight_only_linear", "--kernels", "reference")
    assert result.exit_code == 0, result.output
    entries = read(path)
    kinds = [entry["kind"] for entry in entries]
    assert kinds[:3] == ["environment", "doctor", "verify"]
    assert kinds[-1] == "summary"
    checks = [entry for entry in entries if entry["kind"] == "check"]
    assert {entry["family"] for entry in checks} == {"softmax", "linear", "weight_only_linear"}
    assert all(entry["status"] == "right" for entry in checks)
    assert sum(entry["problem"] == "fuzz-0-0" for entry in checks) == 3
    rows = [entry for entry in entries if entry["kind"] == "row"]
    assert {row["operator"] for row in rows} == {"softmax", "linear", "weight-only-linear"}
    assert all(cell["status"] == "ok" for row in rows for cell in row["cells"])
    assert entries[-1] | {"seconds": 0} == {
        "kind": "summary",
        "all_right": True,
        "right": len(checks),
        "failed": 0,
        "unchecked": [],
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
        "block-default": "wrong",
        "block-ragged": "wrong",
        "cluster-default": "wrong",
        "cluster-default-even": "wrong",
        "cluster-default-f32": "wrong",
        "cluster-default-log": "wrong",
        "recompute-log": "crashed",
        "stream-exact": "crashed",
        "two-vectors": "wrong",
        "two-vectors-cluster": "wrong",
    }
    assert "gone" in status["recompute-log"]["message"]
    assert [entry for entry in entries if entry["kind"] == "row"] == []
    assert entries[-1]["failed"] == len(failed)
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


@pytest.mark.parametrize("random", [0, verify.RANDOM_QUICK])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "cpu"])
def test_every_kernel_of_experts_is_reached(arch: str, random: int) -> None:
    """Of the problems of a quick run, with and without random ones, each kernel that serves there has some."""
    target, reached = from_arch(arch), {}
    for tally in verify.tallies(target, tuple(fuzz.EXPERTS), ()):
        names = tables.names(tally.family, "cuda", quick=True, random=random, seed=0)
        cases = [tables.find(tally.family, name, "cuda") for name in names]
        entries = [entry for entry in dispatch.TABLE if entry.name == tally.kernel]
        served = sum(any(not entry.objections(case.spec, target) for entry in entries) for case in cases)
        assert bool(served) == (not tally.reason), (tally, served)
        if served:
            reached.setdefault(tally.kernel, []).append(tally.family)
    everything = list(fuzz.EXPERTS)
    assert (
        reached
        == {
            "sm_80": {"triton": everything[:2]},
            "sm_90a": {
                "cute": ["experts"],
                "cute-scaled": ["scaled_experts"],
                "triton": everything[:2],
                "cute-weight-only": ["weight_only_experts"],
            },
            "sm_100a": {
                "cute": ["experts"],
                "cute-scaled-sm100": ["scaled_experts"],
                "triton": everything[:2],
                "cute-block-scaled": ["block_scaled_experts"],
                "cute-weight-only": ["weight_only_experts"],
            },
            "cpu": dict.fromkeys(["reference"], everything),
        }[arch]
    )


def test_problems_of_experts_have_everything_that_layers_may() -> None:
    """Of each seed's random ones: both formats of a family, x quantised or not, shared experts, sums in any order."""

    def found(family: str, fact: str) -> set[Any]:
        names = tables.names(family, "cuda", quick=True, random=verify.RANDOM, seed=5)
        return {getattr(tables.find(family, name, "cuda"), fact) for name in names if tables.RANDOM.fullmatch(name)}

    assert found("experts", "shared") == {0, 1, 2}
    assert found("experts", "deterministic") == {True, False}
    assert found("experts", "weight") == {None}
    assert found("scaled_experts", "weight") == {BLOCK_SCALED, ROW_SCALED}
    assert found("scaled_experts", "x_given") == {True, False}
    assert found("block_scaled_experts", "weight") == {MXFP8, MXFP4, NVFP4}
    assert found("weight_only_experts", "weight") == {MXFP4_TILED}
    assert found("weight_only_experts", "interleaved") == {True, False}


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


def test_a_kernel_that_refuses_everything_is_not_all_right() -> None:
    shown = io.StringIO()
    screen = verify.Screen(Console(file=shown, width=150))
    lines = BENCHMARKS.report.JsonLines(None)
    for kernel, status in (("triton", Status.RIGHT), ("cute", Status.REFUSED)):
        tally = verify.Tally("experts", kernel, chosen=False, reason="", total=2)
        tally.counts[status] = 2
        screen.tallies.append(tally)
    screen.tallies.append(verify.Tally("experts", "cute-scaled", chosen=False, reason="serves other GPUs"))
    assert verify.conclude(screen, (), lines, 1.0) == 1
    assert lines.entries[-1]["unchecked"] == ["experts cute"]
    assert "NOT CHECKED experts cute: it serves this GPU, and refused every problem" in shown.getvalue()
    assert "REFUSED ALL" in shown.getvalue()
    screen.tallies[1].counts.update({Status.REFUSED: -1, Status.RIGHT: 1})
    assert verify.conclude(screen, (), lines, 1.0) == 0


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


@pytest.mark.parametrize("chip", ["B200", "GB300"])
@pytest.mark.parametrize(
    ("operator", "chosen"),
    [("prefill", True), ("mla-decode", True), ("softmax", True), ("decode", False), ("linear", False)],
)
def test_what_the_clock_chose_on_blackwell_is_marked(chip: str, operator: str, chosen: bool) -> None:
    """docs/decisions.md says how each was chosen. Hopper's configurations were timed."""
    predictions = importlib.import_module("benchmarks.clock.predictions")
    mark = predictions.MARK if chosen else ""
    assert predictions.of_chip(operator, "row", 1.0, chip, CHIPS[chip].arch).mark == mark
    assert predictions.of_chip(operator, "row", 1.0, "H200", CHIPS["H200"].arch).mark == ""


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
    for one in every:
        assert one == predictions.of_chip(one.operator, one.row, one.us, one.chip, CHIPS[one.chip].arch)
    assert {(one.operator, one.row) for one in every} <= timed
    assert len({(one.chip, one.operator, one.row) for one in every}) == len(every)
    assert predictions.of_device("NVIDIA B200")


def test_a_failure_says_how_to_repeat_it() -> None:
    tally = verify.Tally("mla", "cute", chosen=False, reason="")
    text = verify.failure(verify.Options(), tally, Outcome("real-mla-16", Status.HUNG, "not done after 300 s"))
    assert "hung: not done" in text
    assert text.endswith("dsl-backend verify --families mla --kernels cute --only real-mla-16")
