# SPDX-License-Identifier: Apache-2.0
"""The held-out rows: the lists, compiling ahead, the time limit, and what is printed at the end."""

import collections
import io
import json
import pathlib
import time
from typing import Any

import example_rows
import pytest
import torch
from rich.console import Console

import benchmarks
from benchmarks import command, held_out, runner, timing
from benchmarks.case import Case, case_of
from benchmarks.check import Error
from benchmarks.held_out import compile_ahead, random_rows, summary
from benchmarks.held_out.draw import Draw
from benchmarks.report import to_json
from benchmarks.softmax.problems import Problem as SoftmaxProblem
from dsl_backend.linear.scaled import dispatch
from dsl_backend.providers import Launch
from dsl_backend.runtime.target import from_arch

FIRST = {
    "mla-decode": ["00-h16-b27-q8-k993", "01-h16-b4-q7-k14344", "02-h16-b2-q2-k65495"],
    "prefill": ["00-hd64-h16x16-2x5934", "01-hd64-h5x1-7x255to5346", "02-hd64-h4x2-3x93to788-k1871to7779"],
    "linear": ["00-159x16384x5120", "01-67x12800x5120", "02-272x14336x4096"],
    "scaled-linear": [
        "00-channels-gated-56x9728x2560",
        "01-channels-plain-11x3584x18944",
        "02-blocks-gated-17x9472x3584",
    ],
    "softmax": ["00-574x50257-f32", "01-8x81784-f32", "02-12x26240"],
    "norm": ["00-4x896-residual", "01-3828x5376-residual-fp8-tensor", "02-50x96"],
}
LAST = {
    "mla-decode": "59-h128-b47-q1to5-k32to31018",
    "prefill": "59-hd128-h2x2-8x1+3x166to2326-k217to22358",
    "linear": "99-33x3224x1928",
    "scaled-linear": "59-blocks-plain-4113x1152x2384",
    "softmax": "29-11346x12055",
    "norm": "39-1031x21315-residual",
}


def names(operator: str, group: str) -> list[str]:
    return [case.id.removeprefix(f"{group}-") for case in held_out.cases(operator, 16) if case.group == group]


def problems(operator: str) -> list[Any]:
    return [case.problem for case in held_out.cases(operator, 16) if case.group == "random"]


@pytest.mark.parametrize("operator", FIRST)
def test_the_random_list_is_fixed(operator: str) -> None:
    """Results of different commits are compared by it."""
    found = names(operator, "random")
    assert found[:3] == FIRST[operator]
    assert found[-1] == LAST[operator]
    assert len(found) == random_rows.COUNTS[operator]


def test_the_lengths_of_ragged_rows_are_fixed() -> None:
    """The name has only the shortest and the longest."""
    problem = problems("mla-decode")[5]
    assert (problem.q_lens[:4], problem.kv_lens[:4]) == ((3, 1, 2, 3), (16940, 376, 439, 2116))
    for operator, tokens, keys in (("mla-decode", 6694, 8955980), ("prefill", 372656, 2003337)):
        found = problems(operator)
        assert sum(problem.tokens for problem in found) == tokens
        assert sum(sum(problem.kv_lens) for problem in found) == keys


def test_rows_of_the_issue() -> None:
    assert {operator: len(names(operator, "lost")) for operator in held_out.PEERS} == {
        "mla-decode": 6, "prefill": 5, "linear": 5, "scaled-linear": 0, "softmax": 2, "sampling": 5, "norm": 0,
    }  # fmt: skip
    assert names("linear", "lost")[:2] == ["320x3584x8192", "320x32768x5120"]
    assert names("sampling", "lost")[-1] == "p-512x201088"


@pytest.mark.parametrize("operator", held_out.PEERS)
def test_ids_and_peers_exist(operator: str) -> None:
    cases = held_out.cases(operator, 16)
    assert len({case.id for case in cases}) == len(cases)
    assert set(held_out.PEERS[operator]) <= {peer.name for peer in benchmarks.operators()[operator].providers([])}


@pytest.mark.parametrize("operator", random_rows.COUNTS)
def test_another_seed_draws_other_rows(operator: str) -> None:
    first, other = names(operator, "random"), [case.id for case in held_out.cases(operator, 16, 29)]
    assert len(other) == random_rows.COUNTS[operator]
    assert all(name.startswith("random-29-") for name in other)
    shapes = {name.removeprefix("random-29-").partition("-")[2] for name in other}
    assert len(shapes - {name.partition("-")[2] for name in first}) > len(shapes) / 2


def test_a_seed_without_held_out_rows_is_refused() -> None:
    console = Console(file=io.StringIO())
    assert command.main("softmax", options=command.Options(held_out_seed=29), console=console) == 2
    assert "--held-out-seed draws rows for --held-out: name both" in console.file.getvalue()  # type: ignore[attr-defined]


def test_mla_rows() -> None:
    found = problems("mla-decode")
    assert {problem.heads_q for problem in found} == {16, 32, 64, 128}
    assert {max(problem.q_lens) for problem in found} == set(range(1, 9))
    assert max(sum(problem.kv_lens) for problem in found) <= random_rows.MOST_LATENT_KEYS
    assert sum(not problem.uniform for problem in found) == 10


def test_prefill_rows() -> None:
    found = problems("prefill")
    assert {problem.head_dim for problem in found} == {64, 96, 128, 256}
    assert {problem.heads_q for problem in found} >= set(range(1, 9))
    assert sum(problem.heads_q <= 8 for problem in found) > len(found) / 2
    assert all(q <= kv for problem in found for q, kv in zip(problem.q_lens, problem.kv_lens, strict=True))
    assert all(problem.heads_q % problem.heads_kv == 0 for problem in found)
    mixed = [problem for problem in found if 1 in problem.q_lens]
    cached = [problem for problem in found if problem.q_lens != problem.kv_lens]
    assert (len(mixed), len(cached)) == (15, 30)


def test_linear_rows() -> None:
    found = problems("linear")
    of_rows = collections.Counter(
        "few" if 65 <= one.m <= 512 else "2000" if 1600 <= one.m <= 2400 else "" for one in found
    )
    assert of_rows["few"] >= 50
    assert of_rows["2000"] >= 20
    assert all(problem.n % 8 == problem.k % 8 == 0 and 1 <= problem.m <= 8192 for problem in found)


def test_scaled_linear_rows() -> None:
    found = problems("scaled-linear")
    kinds = collections.Counter((one.scheme, one.gated) for one in found)
    assert kinds == dict.fromkeys(((scheme, gated) for scheme in ("channels", "blocks") for gated in (True, False)), 15)
    assert sum(one.m <= 64 for one in found) >= 20
    # Each is one that SM90's kernels serve.
    target = from_arch("sm_90a")
    assert {dispatch.choose(one.spec, target).name for one in found} == {"cute-sm90"}
    assert sum(one.n % 128 > 0 or one.k % 128 > 0 for one in found) >= 9


def test_softmax_rows_fit_in_memory() -> None:
    found = problems("softmax")
    assert max(problem.rows * problem.width for problem in found) <= 1 << 28
    assert {problem.dtype for problem in found} == {torch.bfloat16, torch.float32}


def test_draws_stay_in_their_ranges() -> None:
    draw = Draw(0, "x", 0)
    assert {draw.between(2, 4) for _ in range(200)} == {2, 3, 4}
    assert {draw.log_between(2, 4) for _ in range(200)} == {2, 3, 4}
    assert {draw.one_of("ab") for _ in range(50)} == {"a", "b"}
    assert Draw(0, "x", 1).lengths(3, 1, 1000) != Draw(0, "x", 2).lengths(3, 1, 1000)


def test_lengths_are_limited_in_sum() -> None:
    assert random_rows.limited([5, 5, 5], 14) == [5, 5]
    assert random_rows.limited([5, 5, 5], 15) == [5, 5, 5]
    assert random_rows.limited([50, 5], 15) == [50]


SMALL = "random-(07-4x336|20-6x864)$"


def bench(path: pathlib.Path | None = None, op: tuple[str, ...] = ("softmax",), **options: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=80)
    usual = {"kernels": "reference", "rows": SMALL, "peers": "torch", "seconds": 0.01, "device": "cpu"}
    status = benchmarks.main(op, path, benchmarks.Options(held_out=True, **usual | options), console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_a_run(tmp_path: pathlib.Path) -> None:
    """Every provider of both rows is launched once by another process, then timed by this one."""
    path = tmp_path / "rows.jsonl"
    status, text = bench(path, commit="abc")
    environment, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (environment["held_out"], environment["limit_seconds"]) == (True, None)
    assert environment["commit"] == "abc"
    assert [(row["operator"], row["id"]) for row in rows] == [
        ("softmax", "random-07-4x336"),
        ("softmax", "random-20-6x864"),
    ]
    assert status == 0
    assert ": 4 of 4 launches ran\n" in text
    assert "softmax random     2 of 2 rows, geometric mean " in text
    assert text.index("Slower than the best peer: ") < text.index("The best peer's time divided by dsl's")


def test_the_summary_is_made_again_from_a_file(tmp_path: pathlib.Path) -> None:
    """Of a run that did not finish, too; nothing is measured."""
    path = tmp_path / "rows.jsonl"
    measured = row("softmax", "07-4x336", dsl=10.0, quack=5.0)
    path.write_text("".join(json.dumps(one) + "\n" for one in (example_rows.environment(), measured)))
    status, text = bench(sources=[path], device="cuda")
    assert status == 0
    assert text.splitlines()[0].startswith("held-out rows on NVIDIA H200; commit 012345678; driver 580.1; torch 2.11.0")
    assert " 0.50x  softmax random-07-4x336: 10.00 us, quack 5.00 us\n" in text
    assert "softmax: 1 rows were not measured in time: random-20-6x864 to random-20-6x864" in text


def without_compiling(monkeypatch: pytest.MonkeyPatch) -> list[compile_ahead.Task]:
    tasks: list[compile_ahead.Task] = []

    def run(given: list[compile_ahead.Task], limit_seconds: float) -> str:
        tasks.extend(given)
        return f"limit {limit_seconds:g}"

    monkeypatch.setattr(compile_ahead, "run", run)
    return tasks


def test_no_row_starts_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = without_compiling(monkeypatch)
    status, text = bench(limit_seconds=0.0)
    assert status == 0
    assert len(tasks) == 4
    assert "softmax random     0 of 2 rows have a time" in text
    assert "softmax: 2 rows were not measured in time: random-07-4x336 to random-20-6x864" in text


def test_compiling_ahead_has_half_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiling(monkeypatch)
    assert bench(limit_seconds=120.0)[1].startswith("limit 60\n")
    assert bench()[1].startswith("limit inf\n")


def test_without_operators_all_held_out_rows_are_listed() -> None:
    status, text = bench(op=(), rows=None, peers=None, only_list=True, device="cuda")
    assert status == 0
    for operator in held_out.PEERS:
        for case in held_out.cases(operator, 16):
            assert f" {case.id}\n" in text


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (("decode",), {}, "decode has no held-out rows: choose from mla-decode, prefill"),
        (("softmax",), {"peers": "FA3"}, "no peer fa3: choose from quack"),
        (("softmax", "linear"), {"rows": "^none"}, "no row of softmax, linear matches '^none'"),
    ],
)
def test_what_has_no_rows_is_refused(op: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    status, text = bench(op=op, **options)
    assert status == 2
    assert message in text


def test_a_peer_of_one_operator_is_none_of_another() -> None:
    assert bench(op=("softmax", "prefill"), peers="fa3,quack", rows=None, only_list=True)[0] == 0
    chosen = command.select_columns(benchmarks.operators()["prefill"], benchmarks.Options(peers="fa3,quack"))
    assert [provider.name for provider in chosen.providers] == ["dsl", "FA3"]


def test_operators_share_the_time_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def selection(rows: int) -> command.Selection:
        return command.Selection(None, [], [None] * rows, [], [], [])  # type: ignore[list-item]

    assert command.share_of([selection(1), selection(3)], 180.0) == 120.0
    assert command.share_of([selection(3)], 180.0) == 180.0
    assert command.share_of([selection(3)], None) is None


class Broken:
    """A provider that does not run."""

    name = "broken"
    default = True

    def __init__(self, reasons: tuple[str, ...] = ()) -> None:
        self.reasons = reasons

    def objections(self, problem: Any) -> list[str]:
        return list(self.reasons)

    def prepare(self, problem: Any, inputs: Any) -> Launch:
        raise ValueError("broke")


def task(provider: Any) -> compile_ahead.Task:
    (case,) = [case for case in held_out.cases("softmax", 16) if case.id == "random-07-4x336"]
    return compile_ahead.Task(benchmarks.operators()["softmax"], case, provider, "cpu", 60.0)


def test_a_provider_that_does_not_run_is_reported_and_stops_nothing() -> None:
    ours, *_ = benchmarks.operators()["softmax"].providers(["reference"])
    assert compile_ahead.launch_once(task(ours)) is None
    assert compile_ahead.launch_once(task(Broken())) == "ValueError: broke"
    assert compile_ahead.launch_once(task(Broken(("is elsewhere",)))) == "is elsewhere"


def test_a_process_without_a_device_leaves_tasks_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("illegal address")

    slept: list[float] = []
    monkeypatch.setattr(timing, "synchronize", lost)
    monkeypatch.setattr(time, "sleep", slept.append)
    ours, *_ = benchmarks.operators()["softmax"].providers(["reference"])
    assert compile_ahead.launch_once(task(ours)) == "the device no longer answers this process"
    assert slept == [compile_ahead.LOST_SECONDS]


def row(operator: str, name: str, **times: float) -> dict[str, Any]:
    """A measured row; the samples scatter by 1 %."""
    problem = SoftmaxProblem(rows=1, width=8)
    case: Case[Any] = case_of(name, problem, "random")
    cells = tuple(
        runner.Cell(
            provider=provider,
            status="ok",
            time=timing.Summary(time_us, 0.99 * time_us, 1.01 * time_us, 9),
            error=Error(0.0, 0.0),
            launch_us=1.0,
        )
        for provider, time_us in times.items()
    )
    return to_json(runner.Row(case=case, floor_us=None, layers=1, cells=cells), operator, "TB/s", "dsl")


def test_the_worst_row_is_printed_first_and_groups_have_their_means() -> None:
    records = [
        row("softmax", "a", dsl=10.0, quack=9.9, torch=30.0),
        row("softmax", "b", dsl=10.0, quack=40.0),
        row("linear", "c", dsl=10.0, quack=5.0),
        row("linear", "d", dsl=10.0),
    ]
    cases = {
        name: [case_of(key, SoftmaxProblem(rows=1, width=8), "random") for key in keys]
        for name, keys in (("softmax", "ab"), ("linear", "cde"))
    }
    assert list(summary.lines(cases, records)) == [
        "Slower than the best peer: 2 of 3 rows (the peer's time divided by dsl's)",
        " 0.50x  linear random-c: 10.00 us, quack 5.00 us",
        " 0.99x  softmax random-a: 10.00 us, quack 9.90 us; within the scatter of the samples",
        "The best peer's time divided by dsl's",
        "softmax random     2 of 2 rows, geometric mean 1.990x, lowest 0.99x; 1 below 1x, 0 below 0.97x",
        "linear random      1 of 3 rows, geometric mean 0.500x, lowest 0.50x; 1 below 1x, 1 below 0.97x",
        "linear: 1 rows were not measured in time: random-e to random-e",
    ]
