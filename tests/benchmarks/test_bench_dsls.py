# SPDX-License-Identifier: Apache-2.0
"""`bench dsls`: its rows, their order, its lines, compile times in processes of their own, and its page."""

import io
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import example_rows
import pytest
import torch
from rich.console import Console

import benchmarks
from benchmarks import measured, page
from benchmarks.dsls import NAME, code_lines, compile_child, compile_times, parts, tables
from benchmarks.dsls import command as compare
from benchmarks.launch import providers as launch
from dsl_backend.runtime.target import triton_interpreted
from integration import browser

Record = dict[str, Any]


def run(*names: str, json_path: Path | None = None, **options: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=80)
    chosen = benchmarks.Options(**{"device": "cpu", "seconds": 0.01, **options})
    status = benchmarks.main([NAME, *names], json_path, chosen, console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def selections(**options: Any) -> dict[str, Any]:
    known = benchmarks.operators()
    chosen = benchmarks.Options(**options)
    return {one.operator: compare.selection(one, known[one.operator], chosen) for one in tables.TABLES}


def test_the_tables() -> None:
    found = selections()
    ids = {name: {case.id for case in one.cases} for name, one in found.items()}
    assert {case.id for case in found["softmax"].operator.cases() if case.group == "grid"} == ids["softmax"]
    assert len(ids["softmax"]) == 28
    depths = {case.problem.k for case in found["linear"].cases if not case.problem.gated}
    assert (min(depths), max(depths)) == (2048, 16384)
    for case in found["linear"].cases:
        assert case.problem.m == 8192
        # 5.3 d rows of weights, d columns
        assert not case.problem.gated or case.problem.spec.weight_rows / case.problem.k == pytest.approx(5.3, abs=0.02)
    assert all(case.problem.tokens == 16384 for case in found["prefill"].cases)
    for table in tables.TABLES:
        # Named peers exist: a name of none would be a column less.
        assert {one.name for one in found[table.operator].providers} == {"dsl", *table.peers}
        assert table.compiled in ids[table.operator]


def test_a_cut_off_keeps_the_whole_range() -> None:
    cases = selections()["softmax"].known
    found = tables.spread(cases)
    assert sorted(map(id, found)) == sorted(map(id, cases))
    assert {cases.index(case) for case in found[:3]} == {0, 13, 27}
    gaps = sorted(cases.index(case) for case in found[:9])
    assert max(after - before for before, after in itertools.pairwise(gaps)) <= 4
    assert [tables.spread(cases[:n]) for n in (0, 1)] == [[], cases[:1]]


def test_a_run(tmp_path: Path) -> None:
    lines, path = tmp_path / "rows.jsonl", tmp_path / "page.html"
    status, text = run("softmax", "compile", json_path=lines, report_path=path, rows="3x40", peers="FlashInfer")
    assert status == 0
    environment, *records = map(json.loads, lines.read_text().splitlines())
    assert environment["kind"] == "environment"
    (row,) = (one for one in records if one["kind"] == "row")
    assert [(one["provider"], one["status"]) for one in row["cells"]] == [("dsl", "ok"), ("FlashInfer", "skipped")]
    times = {one["provider"]: one for one in records if one["kind"] == compile_times.KIND}
    assert times["dsl"]["cold_s"] > 0
    assert times["dsl"]["warm_s"] > 0
    assert "flashinfer-python is not installed" in times["FlashInfer"]["message"]
    assert "compile softmax tiny-3x40: dsl cold " in text
    code = {one["provider"]: one for one in records if one["kind"] == code_lines.KIND}
    assert code["dsl"]["lines"] > code["Triton"]["lines"] > 20
    body = path.read_text()
    assert "<h2>Compile times</h2>" in body
    assert "<h2>Lines of code</h2>" in body
    # The same page from the file.
    again = tmp_path / "again.html"
    assert run(report_path=again, sources=(lines,))[0] == 0
    ids = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}")
    assert ids.sub("", again.read_text()) == ids.sub("", body)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("launches",), {}, "choose from launch, softmax, norm, linear, prefill, compile, ahead"),
        (("softmax=soon",), {}, "softmax=soon: a time limit is softmax=SECONDS with a number of at least 0"),
        (("compile=-1",), {}, "compile=-1: a time limit"),
        (("ahead", "launch"), {}, "ahead: a time limit is ahead=SECONDS"),
        ((), {"held_out": True}, "has its own rows and columns"),
        ((), {"kernels": "cute"}, "has its own rows and columns"),
        ((), {"rows": "nothing"}, "linear, prefill matches 'nothing': launch has tiny-add-40; softmax has tiny-3x40, "),
        ((), {"peers": "nobody"}, "no peer nobody"),
        ((), {"device": "tpu"}, "device 'tpu' is not one of cuda, cpu"),
    ],
)
def test_what_means_nothing_is_refused(names: tuple[str, ...], options: Record, message: str) -> None:
    status, text = run(*names, **options)
    assert status == 2
    assert message in text


def test_rows_and_compile_times_are_chosen_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile times alone are of all tables; a page of them alone is one."""
    monkeypatch.setattr(compile_times, "asked", lambda *arguments: {"seconds": 1.5})
    assert tables.chosen([]) == tables.Choice(tables.TABLES, rows=True, compile=True)
    found = {}
    for names in (("compile",), ("launch",)):
        lines, path = tmp_path / "rows.jsonl", tmp_path / "page.html"
        assert run(*names, json_path=lines, report_path=path)[0] == 0
        records = [json.loads(line) for line in lines.read_text().splitlines()]
        found[names[0]] = {(one["kind"], one["operator"]) for one in records if one["kind"] in ("row", "compile")}
        assert ("<h2>Compile times</h2>" in path.read_text()) == ("compile" in names)
    assert found == {"compile": {("compile", table.operator) for table in tables.TABLES}, "launch": {("row", "launch")}}


def test_parts_have_time_limits_of_their_own() -> None:
    found = tables.chosen(["ahead=20", "norm", "softmax=7.5", "compile=0"])
    assert [table.operator for table in found.tables] == ["softmax", "norm"]
    assert found.seconds == {"ahead": 20, "softmax": 7.5, "compile": 0}
    assert (found.rows, found.compile) == (True, True)
    assert tables.chosen(["ahead=5"]) == tables.Choice(tables.TABLES, rows=True, compile=True, seconds={"ahead": 5})


def test_a_part_without_time_is_left_out_with_a_reason(tmp_path: Path) -> None:
    """Softmax has no time at all, RMSNorm all it needs; a later run of softmax fills the page."""
    first, second, path = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "page.html"
    chosen = {"rows": "3x40", "peers": "none"}
    assert run("softmax=0", "norm", "compile=0", json_path=first, report_path=path, **chosen)[0] == 0
    records = [json.loads(line) for line in first.read_text().splitlines()]
    rows = {(one["operator"], one["id"]) for one in records if one["kind"] == "row"}
    assert rows == {("norm", "tiny-3x40")}
    left = {(one["operator"], one["id"]): one["message"] for one in records if one["kind"] == parts.LEFT}
    other = "--rows 3x40 leaves it out"
    assert left == {
        ("softmax", "tiny-3x40"): "no time was left (softmax=0)",
        ("softmax", "tiny-2x4099"): other,
        ("norm", "tiny-2x4099"): other,
    }
    assert {one["message"] for one in records if one["kind"] == "compile"} == {"no time was left"}
    body = path.read_text()
    assert "<h2>Not measured</h2>" in body
    assert "no time was left (softmax=0)" in body
    # Three tables, the columns of norm, and their compile times.
    assert body.count(parts.NOT_ASKED) == len({"launch", "linear", "prefill"}) + 2
    assert run("softmax", json_path=second, **chosen)[0] == 0
    assert run(report_path=path, sources=(first, second))[0] == 0
    merged = path.read_text()
    assert "no time was left (softmax=0)" not in merged
    assert merged.count(other) == 2


def test_what_a_page_lacks_is_listed_for_each_device() -> None:
    ids = [f"grid-{rows}x4096" for rows in (512, 1024, 2048, 4096, 8192, 16384)]
    timed = time_of("norm", ids[0], dsl=2.0, torch=3.0)
    timed["cells"].append({"provider": "quack", "status": "error", "message": "no compiler"})
    left = [{"kind": parts.LEFT, "operator": "norm", "id": one, "message": "no time"} for one in ids]
    first, other = ({"kind": "environment", "device": name} for name in ("first", "other"))
    body = parts.not_measured([first, timed, *left, *compile_lines("stopped"), other, timed])
    cells = re.findall(r"<td[^>]*>([^<]*)", body)
    assert "5: grid-1024x4096, grid-2048x4096, grid-4096x4096, grid-8192x4096 and 1 more" in cells
    assert cells.count("no time") == 1
    # Columns without a time.
    at = cells.index("quack in 1 of 1 rows")
    assert cells[at + 1] == "no compiler"
    assert f"torch.compile, Triton, Liger, FlashInfer, vLLM, {', '.join(tables.OTHER_DSLS)} in 1 of 1 rows" in cells
    assert not any(cell.startswith("torch in ") for cell in cells)
    # Kernels without a compile time.
    at = cells.index("1: softmax torch")
    assert cells[at + 1] == "not ready"
    # Rows without anything of a comparison are a page of another benchmark.
    assert "other" not in body
    assert parts.not_measured([other, timed]) == ""


def time_of(operator: str, row: str, /, **medians: float) -> Record:
    cells = [
        {"provider": name, "status": "ok", "median_us": us, "p10_us": 0.99 * us, "p90_us": 1.01 * us}
        for name, us in medians.items()
    ]
    return {"kind": "row", "operator": operator, "id": row, "group": "grid", "cells": cells}


def compile_lines(status: str, seconds: float = 1.0) -> list[Record]:
    """A time of dsl's, and torch's one or why there is none."""
    found = {"cold_s": seconds, "warm_s": seconds} if status == "ok" else {"message": "not ready"}
    line = {"kind": "compile", "operator": "softmax", "id": "grid-512x4096"}
    return [
        {**line, "provider": "dsl", "status": "ok", "cold_s": seconds, "warm_s": seconds},
        {**line, "provider": "torch", "status": status, **found},
    ]


def test_a_row_of_several_runs_has_all_columns() -> None:
    """Each peer is compared with dsl's time in its own run."""
    runs = [
        time_of("norm", "one", dsl=10.0, torch=20.0, quack=11.0, Liger=30.0),
        time_of("norm", "one", dsl=5.0, torch=6.0),
        time_of("norm", "one", dsl=8.0),
    ]
    runs[1]["cells"] += [
        {"provider": "quack", "status": "skipped", "message": "not installed"},
        {"provider": "Liger", "status": "wrong", "message": "far off"},
        {"provider": "vLLM", "status": "skipped", "message": "not installed"},
    ]
    environment = {"kind": "environment", "device": "one"}
    _, (section,) = measured.gather([line for run in runs for line in (environment, run)])
    row = section.rows["one"]
    found = {cell["provider"]: cell for cell in row["cells"]}
    assert {name: cell.get("median_us") for name, cell in found.items()} == {
        "dsl": 8.0,
        "torch": 6.0,
        "quack": 11.0,
        "Liger": None,
        "vLLM": None,
    }
    assert (found["Liger"]["status"], found["vLLM"]["message"]) == ("wrong", "not installed")
    best = measured.compare(row)
    assert best == measured.Comparison("quack", 1.1, "better")
    # Without a time of dsl's in the peer's run there is no ratio: neither of a run before nor of a later one.
    alone = {**runs[0], "cells": runs[0]["cells"][1:]}
    assert measured.compare(measured.merged(alone, runs[2])) is None
    assert measured.compare(measured.merged(runs[2], alone)) is None


def test_devices_have_compile_times_of_their_own() -> None:
    """And a time stays where a later run has none."""
    one, other = ({"kind": "environment", "device": name} for name in ("one", "other"))
    lines = [one, *compile_lines("ok", 1.5), other, *compile_lines("ok", 2.5), one, *compile_lines("stopped", 3.5)]
    body = "".join(parts.of(lines))
    times = {}
    for device in ("one", "other"):
        table = body[body.index(f"<h2>Compile times on {device}</h2>") :]
        times[device] = re.findall(r"<td[^>]*>(\d[^<]*)</td>", table[: table.index("</table>")])
    assert times == {"one": ["3.50", "3.50", "1.50", "1.50"], "other": ["2.50"] * 4}


def test_runs_of_two_devices_in_one_file_are_told_apart(tmp_path: Path) -> None:
    """And rows are in the operators' order, also where a second run has those that the first one lacks."""
    ids = [case.id for case in benchmarks.operators()["norm"].cases() if case.group == "grid"][:2]
    environments = [{"kind": "environment", "device": name} for name in ("one", "other", "one")]
    first, second, third = (time_of("norm", ids[index], dsl=1.0) for index in (1, 0, 0))
    lines = [environments[0], first, environments[1], second, environments[2], third]
    found = compare.in_order(lines, benchmarks.operators())
    _, sections = measured.gather(found)
    assert {section.device: list(section.rows) for section in sections} == {"one": ids, "other": ids[:1]}


def test_a_first_run_is_kept_without_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"seconds": 2.0}, {"status": "stopped", "message": "it was not ready in time"}])
    monkeypatch.setattr(compile_times, "asked", lambda *arguments: next(answers))
    found = compiled()
    assert (found["status"], found["cold_s"], found["warm_s"]) == ("ok", 2.0, None)
    assert parts.seconds_cells(found) == ["2.00", "warm: it was not ready in time"]
    assert compare.compile_line(found).endswith("cold 2.00 s, warm: it was not ready in time")


def test_a_list() -> None:
    status, text = run("linear", device="cuda", only_list=True)
    assert status == 0
    assert "swiglu     swiglu-8192x10880x4096" in text


def compiled(until: float | None = None) -> Record:
    operator = benchmarks.operators()["softmax"]
    (case,) = (case for case in operator.cases() if case.id == "tiny-3x40")
    (torch_s,) = (one for one in operator.providers([]) if one.name == "torch")
    (record,) = compile_times.run([compile_times.Task("softmax", case, torch_s)], "cpu", until)
    return record


def test_a_provider_that_raises_has_a_message() -> None:
    found = compile_child.main(["launch", "tiny-add-40", "cuTile", "cpu"])
    assert found["status"] == "error"
    assert "No module named 'cuda.tile'" in found["message"]


def test_a_process_that_dies_has_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert compiled()["status"] == "error"
    assert "its process ended with status 1" in compiled()["message"]


def test_a_provider_that_is_too_slow_is_stopped() -> None:
    began = time.monotonic()
    assert compiled(began)["message"] == "no time was left"
    assert compiled(began + 0.5)["message"] == "it was not ready in time"
    assert time.monotonic() - began < 15


def test_caches_are_empty_once_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process finds what the first one left; the next task finds nothing."""
    seen = []

    def asked(task: object, device: str, folder: Path, until: float | None) -> Record:
        seen.append((folder, sorted(one.name for one in folder.iterdir())))
        (folder / f"left-{len(seen)}").touch()
        return {"seconds": float(len(seen))}

    monkeypatch.setattr(compile_times, "asked", asked)
    assert compiled()["warm_s"] == 2
    assert compiled()["cold_s"] == 3
    folders, contents = zip(*seen, strict=True)
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert contents == ([], ["left-1"], [], ["left-3"])


def test_a_child_has_this_process_variables_and_its_own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some installations of torch start only with libraries that the user preloads."""
    shown = tmp_path / "show"
    shown.write_text('#!/bin/sh\necho "{\\"seconds\\": 1, \\"seen\\": \\"$MINE:$TRITON_CACHE_DIR\\"}"\n')
    shown.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(shown))
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    operator = benchmarks.operators()["softmax"]
    task = compile_times.Task("softmax", operator.cases()[0], operator.providers([])[0])
    assert compile_times.asked(task, "cpu", tmp_path, None)["seen"] == f"kept:{tmp_path}/cache/triton"


PYTHON = '''
"""A module's docstring,
of two lines."""

import torch  # a comment


@torch.no_grad()
def one(x):
    """A docstring."""
    # A comment.
    return (
        x
        + 1
    )


class Two:
    text = """no
    docstring"""
'''


def test_lines_of_code() -> None:
    assert code_lines.count(PYTHON) == 1 + 6 + 3
    assert code_lines.count(PYTHON, ["one"]) == 6
    with pytest.raises(ValueError, match="there is no three"):
        code_lines.count(PYTHON, ["three"])


def test_every_kernel_of_this_repository_has_lines() -> None:
    for operator, sources in code_lines.SOURCES.items():
        for name, source in sources.items():
            record = code_lines.record(operator, name, source)
            ours = source.package in (None, "dsl_backend")
            assert record["status"] == "ok" or not ours, record


def test_a_package_with_other_files_says_so() -> None:
    source = code_lines.Source("dsl_backend", ("softmax/gone.py",))
    assert "this version has other files" in code_lines.record("softmax", "dsl", source)["message"]


SLOW = """
import time
from dsl_backend.providers import provider

@provider("softmax", name="slow")
def slow(problem, inputs):
    time.sleep(30)
"""


def test_a_slow_compiler_does_not_take_the_time_of_every_row(tmp_path: Path) -> None:
    """Without a time limit it is asked in every row."""
    (tmp_path / "slow.py").write_text(SLOW)
    options = {"files": (tmp_path / "slow.py",), "prepare_seconds": 0.3, "peers": "none", "kernels": "reference"}
    messages = []
    for limit in (20.0, None):
        lines = tmp_path / "rows.jsonl"
        chosen = benchmarks.Options(device="cpu", seconds=0.01, rows="^tiny", limit_seconds=limit, **options)
        assert benchmarks.main("softmax", lines, chosen, Console(file=io.StringIO())) == 0
        rows = [json.loads(line) for line in lines.read_text().splitlines()][1:]
        messages.append([row["cells"][-1]["message"] for row in rows])
        assert [row["cells"][0]["status"] for row in rows] == ["ok", "ok"]
    late = "TimeoutError: not ready after 0.3 s"
    assert messages == [[late, f"tiny-3x40: {late}"], [late, late]]


def test_a_slow_compiler_leaves_time_for_the_rows(tmp_path: Path) -> None:
    """Also if a provider may take longer than the whole run."""
    (tmp_path / "slow.py").write_text(SLOW)
    lines = tmp_path / "rows.jsonl"
    options = {"files": (tmp_path / "slow.py",), "peers": "none", "kernels": "reference", "seconds": 0.01}
    chosen = benchmarks.Options(device="cpu", rows="^tiny", limit_seconds=5.0, **options)
    assert benchmarks.main("softmax", lines, chosen, Console(file=io.StringIO())) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()][1:]
    assert [[cell["status"] for cell in row["cells"]] for row in rows] == [["ok", "error"], ["ok", "skipped"]]


def test_rows_are_shown_in_the_operators_order() -> None:
    found = selections()["softmax"]
    rows = [{"kind": "row", "operator": "softmax", "id": case.id} for case in found.cases]
    compiled = {"kind": "compile", "operator": "softmax", "id": found.known[0].id}
    shown = compare.in_order([{"kind": "environment", "device": "one"}, *rows, compiled], {"softmax": found.operator})
    assert [one.get("id") for one in shown] == [None, *(case.id for case in found.known), compiled["id"]]
    assert shown[0]["kind"] == "environment"


def records() -> list[Record]:
    """A run that nobody made: all rows, two compile times, lines of code."""
    rows = [
        example_rows.row(name, case) for name, one in selections().items() for case in one.cases if name != "launch"
    ]
    facts = {"kind": "compile", "operator": "softmax", "id": "grid-4096x8192"}
    times = [
        {**facts, "provider": "dsl", "status": "ok", "cold_s": 1.234, "warm_s": 0.5},
        {**facts, "provider": "Liger", "status": "skipped", "message": "liger-kernel is <not> installed"},
    ]
    return [example_rows.environment(), *rows, *times, *code_lines.records(["softmax"])]


def test_the_page_says_why_a_provider_has_no_column() -> None:
    body = page.render(records())
    assert "Liger was not run: Liger is not installed" in body
    assert "skipped: liger-kernel is &lt;not&gt; installed" in body
    assert ">1.23</td>" in body


def test_the_file_is_read_with_other_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records()))
    environments, sections = measured.gather(measured.read(path))
    assert len(environments) == 1
    assert {one.operator for one in sections} == {"softmax", "norm", "linear", "prefill"}


@browser.needs_chromium
def test_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(records(), path)
    # softmax and RMSNorm: four widths each; linear: plain products and layers; prefill: one.
    shown = browser.require_shown(path, tmp_path / "page.png", 4 + 4 + 2 + 1)
    assert "Compile times" in shown.body


def test_the_cute_kernel_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as this package does it, and as CuTe DSL's examples do."""
    emulator = pytest.importorskip("emulator")
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from benchmarks.launch import problems, providers
    from dsl_backend.runtime import target

    class Stream:
        cuda_stream = 0

    problem = problems.Problem(elements=40)
    inputs = problems.build(problem, 2, torch.device("cpu"), 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    for make in (
        lambda: providers.with_tvm_ffi(inputs, target.from_arch("sm_90a")),
        lambda: providers.plain_cute(problem, inputs),
    ):
        inputs.layers[1].out.fill_(torch.nan)
        with emulator.device(arch="sm_90a", sms=2):
            assert torch.equal(make()(1), inputs.layers[1].x + 1)


GLUON = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.launch.kernels.gluon_kernel import add_one
from benchmarks.launch.problems import THREADS

signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "elements": "i32", "BLOCK": "constexpr"}
source = GluonASTSource(add_one, signature=signature, constexprs={"BLOCK": THREADS})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_gluon_compiles(server_environment: dict[str, str]) -> None:
    """In a process of its own: Triton's interpreter, which other tests start, would be asked to compile it."""
    pytest.importorskip("triton.experimental.gluon._runtime", reason="this Triton has no Gluon")
    found = subprocess.run([sys.executable, "-c", GLUON], env=server_environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "st.global" in found.stdout


def test_launches_of_triton_and_torch(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    chosen = benchmarks.Options(
        device="cpu", seconds=0.01, rows="^tiny|^add", peers="Triton,torch", kernels="reference"
    )
    assert benchmarks.main("launch", lines, chosen, Console(file=io.StringIO())) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()][1:]
    assert [row["parameters"]["elements"] for row in rows] == [256, 40]
    for row in rows:
        statuses = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert statuses == {"dsl:reference": "ok", "torch": "ok", "Triton": "ok" if triton_interpreted() else "skipped"}


def test_a_launch_has_no_other_kernel() -> None:
    problem = benchmarks.operators()["launch"].cases()[0].problem
    assert launch.objections(problem, "reference") == []
    assert "launch has no kernel 'sm90'" in launch.objections(problem, "sm90")[0]
