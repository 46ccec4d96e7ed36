# SPDX-License-Identifier: Apache-2.0
"""The command: which rows and providers it runs, the lines it writes and the table it prints last."""

import ast
import dataclasses
import importlib
import io
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import benchmarks
from benchmarks import check, report, runner, timing
from benchmarks.attention import rows
from benchmarks.attention.problems import dense
from benchmarks.case import case_of
from benchmarks.entry import parse

PACKAGE = pathlib.Path(benchmarks.__file__).parent
ROW_KEYS = {
    "kind", "operator", "id", "group", "axis", "parameters", "traffic_bytes", "flops", "floor_us", "unit", "layers",
    "cells",
}  # fmt: skip
TIMED_KEYS = {
    "provider", "status", "median_us", "p10_us", "p90_us", "samples", "error", "worst_row_error", "of_floor", "rate",
    "speedup", "launch_us",
}  # fmt: skip


def bench(op: str | list[str], json_path: pathlib.Path | None = None, **options: object) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=80)
    options = {"kernels": "reference", "rows": "^tiny", "seconds": 0.01, "device": "cpu", **options}
    status = benchmarks.main(op, json_path, benchmarks.Options(**options), console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


@pytest.mark.parametrize("op", ["decode", "mla-decode", "write-kv"])
def test_tiny_rows_run_on_a_cpu(op: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "folder" / "out.jsonl"
    status, text = bench(op, path)
    environment, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert environment["kind"] == "environment"
    assert {"date", "device", "commit", "versions", "page_size", "seconds"} <= set(environment)
    assert {"torch", "triton", "vllm", "flashinfer-python", "dsl-backend"} <= set(environment["versions"])
    assert len(rows) == 1
    assert set(rows[0]) == ROW_KEYS
    assert (rows[0]["operator"], rows[0]["group"]) == (op, "tiny")
    ours = rows[0]["cells"][0]
    assert set(ours) == TIMED_KEYS
    assert (ours["provider"], ours["status"], ours["speedup"]) == ("dsl:reference", "ok", 1.0)
    assert status == 0
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[-1].startswith(f"| {rows[0]['id']}")


def test_columns_that_were_not_asked_for_are_named_below_the_table() -> None:
    """In one line, which says how to ask for them; a user who asked for columns needs no such line."""
    *_, table, others = bench("softmax")[1].rstrip().splitlines()
    assert table.startswith("| tiny")
    assert others == (
        "Not run by default: FlashInfer, Gluon, Helion, TileLang, cuTile. --peers all runs them, --peers NAME,... some."
    )
    for peers in ("none", "torch,Gluon", "all"):
        assert "Not run by default" not in bench("softmax", peers=peers)[1]


@pytest.mark.parametrize("op", ["prefill", "mla-prefill"])
def test_prefill_asks_the_table_by_name(op: str) -> None:
    status, text = bench(op)
    assert status == 0
    assert "dsl:reference us" in text


def test_a_kernel_of_one_operator_is_an_objection_in_another() -> None:
    status, text = bench(["write-kv", "decode"], kernels="cute-fp8")
    assert status == 0
    assert "has no kernel 'cute-fp8'" in text


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("decoed", {}, "choose from decode"),
        ("decode", {"rows": "no such row"}, "no row of decode matches 'no such row': decode has hd128-h32x8-b1-k8k, "),
        (
            ["softmax", "norm"],
            {"rows": "^wide", "only_list": True},
            "no row of softmax matches '^wide': softmax has 64x128256, ",
        ),
        ([], {"rows": "^wid3", "only_list": True}, "softmax has 64x128256, "),
        ("decode", {"rows": "("}, "--rows '(' is not a regular expression: missing )"),
        ("decode", {"peers": "FA3,nobody"}, "no peer nobody"),
        ("decode", {"kernels": "cute,no-such-kernel"}, "has no kernel 'no-such-kernel': choose one of cute"),
        ("decode", {"device": "tpu"}, "device 'tpu' is not one of cuda, cpu"),
    ],
)
def test_a_name_that_means_nothing_is_refused(op: str | list[str], options: dict[str, object], message: str) -> None:
    status, text = bench(op, None, **options)
    assert status == 2
    assert message in text


@pytest.mark.parametrize("name", ["attention", "scaled_linear"])
def test_a_sweep_without_a_row_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = importlib.import_module(f"benchmarks.{name}.sweep")
    words = ["sweep", *(["decode"] if name == "attention" else []), "--rows", "no such row"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no row matches 'no such row': choose from " in said
    assert {"scaled_linear": "gate-up-blocks-1,", "attention": "hd128-h32x8-b1-k8k,"}[name] in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "typo"], "--shapes has 'typo': NxK and llama-8b, qwen3-32b, seed, "),
        (["--rows", "1,none"], "--rows has 'none', which is not a number of rows"),
        (["--rows", "0"], "--rows has '0'"),
    ],
)
def test_a_sweep_of_no_layer_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = importlib.import_module("benchmarks.linear.sweep")
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_operators_without_names_need_one_row_of_all() -> None:
    status, text = bench([], rows="^uneven", only_list=True)
    assert status == 0
    assert "softmax, providers" in text
    assert "norm, providers" not in text


def test_a_file_that_cannot_be_made_is_refused_before_anything_runs(tmp_path: pathlib.Path) -> None:
    assert bench("decode", tmp_path) == (2, f"[Errno 21] Is a directory: '{tmp_path}'\n")


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_no_success_and_loses_no_row() -> None:
    status, text = bench("decode", pathlib.Path("/dev/full"), peers="none")
    assert status == 1
    *_, row, failure = text.splitlines()
    assert row.startswith("| tiny-hd64-h4x2 |")
    assert failure == "/dev/full does not have all results: No space left on device"


def test_a_machine_without_a_gpu_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; nothing is run and no file is written over."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "rows.jsonl"
    path.write_text("earlier")
    status, text = bench("softmax", path, device="cuda")
    assert status == 2
    assert text == ("there is no CUDA device: --device cpu runs on the CPU, whose times say nothing about a GPU\n")
    assert path.read_text() == "earlier"


def test_a_list_of_everything() -> None:
    """Without an operator and without a device."""
    status, text = bench([], rows=None, device="cuda", only_list=True)
    assert status == 0
    for name, operator in benchmarks.operators().items():
        assert f"{name}, providers: dsl:reference, " in text
        for one in operator.cases():
            assert f" {one.id}\n" in text


def test_units_and_every_row() -> None:
    status, text = bench("softmax", rows="^tiny", peers="torch")
    assert status == 0
    lines = text.splitlines()
    for row in ("tiny-3x40", "tiny-2x4099"):
        assert [line for line in lines if line.startswith(f"{row}: dsl:reference ") and line.count(" us") == 2]
        assert [line for line in lines if line.startswith(f"| {row} ")]
    (head,) = [line for line in lines if line.startswith("| row ")]
    assert [column.strip() for column in head.split("|")[1:-1]] == [
        "row", "floor us", "dsl:reference us", "of floor", "TB/s", "torch us",
    ]  # fmt: skip


def test_peers_by_name() -> None:
    from benchmarks.command import choose_providers

    available = benchmarks.operators()["decode"].providers([])

    def names(peers: str | None) -> list[str]:
        return [provider.name for provider in choose_providers(available, peers, ["dsl"])]

    assert names(None) == ["dsl", "TRITON_ATTN", "FA3", "FA4", "FLASHINFER", "FlashInfer CuTe DSL", "XQA"]
    assert names("none") == ["dsl"]
    assert names("fa3, xqa") == ["dsl", "FA3", "XQA"]
    assert names("all") == [provider.name for provider in available]


def test_a_wrong_result_of_ours_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.attention import problems

    monkeypatch.setattr(problems, "BF16_LIMITS", check.EXACT)
    status, text = bench("decode")
    assert status == 1
    assert "dsl:reference: wrong: WrongResultError" in text


def test_a_lost_device_ends_the_run_and_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    run_case, calls = runner.run_case, 0

    def lose_it(*arguments: object) -> runner.Row:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise runner.DeviceLostError("illegal address")
        return run_case(*arguments)  # type: ignore[arg-type]

    tiny = case_of("one", dense(64, 4, 2, [1], [5]), "tiny")
    monkeypatch.setattr(rows, "decode_cases", lambda page_size: [tiny, case_of("two", tiny.problem, "tiny")])
    monkeypatch.setattr(runner, "run_case", lose_it)
    status, text = bench("decode")
    assert status == 1
    assert "ended early: tiny-two: the device no longer answers: illegal address" in text
    assert "| tiny-one" in text


def rows_of_a_run() -> list[runner.Row]:
    error = check.Error(1e-3, 2e-3)

    def timed(provider: str, median: float) -> runner.Cell:
        return runner.Cell(
            provider=provider, status="ok", error=error, time=timing.Summary(median, median * 0.98, median * 1.02, 9)
        )

    problem = dense(128, 32, 8, [1], [8192])
    skipped = runner.Cell(provider="never", status="skipped", message="is elsewhere")
    broken = runner.Cell(provider="sometimes", status="error", message="ValueError: broke")
    return [
        runner.Row(
            case=case_of("a", problem),
            floor_us=8.0,
            layers=6,
            cells=(timed("dsl", 10.0), timed("slow", 25.0), skipped, broken),
        ),
        runner.Row(
            case=case_of("b", problem),
            floor_us=None,
            layers=1,
            cells=(timed("dsl", 123.4), timed("slow", 61.7), skipped, timed("sometimes", 12345.0)),
        ),
    ]


def test_the_last_table_has_ratios_and_only_peers_that_ran() -> None:
    lines = report.markdown(rows_of_a_run(), "TB/s", "dsl").splitlines()
    cells = [[text.strip() for text in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["row", "floor us", "dsl us", "of floor", "TB/s", "slow us", "sometimes us"]
    assert set(lines[1]) == {"|", "-"}
    assert cells[2] == ["a", "8.00", "10.00 ±2.0%", "1.25x", "3.36", "25.00 (2.50x)", "error"]
    assert cells[3] == ["b", "", "123.4 ±2.0%", "", "0.272", "61.70 (0.50x)", "12345 (100.04x)"]
    assert len({len(line) for line in lines}) == 1


def test_problems_are_listed_once() -> None:
    assert report.problems(rows_of_a_run()) == ["a: sometimes: error: ValueError: broke", "never skipped: is elsewhere"]


def test_progress_on_a_terminal_and_in_a_log() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=140)
        with report.Progress(console, "title", "TB/s", "dsl") as progress:
            for row in rows_of_a_run():
                progress.add(row)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert "title" in text
        assert "123.4" in text


def test_tables_do_not_wrap_in_a_narrow_log() -> None:
    console = Console(file=io.StringIO(), width=40)
    report.print_final(console, "t", rows_of_a_run(), "TB/s", "dsl", {"versions": {}, "date": "today"}, None)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].startswith("| b ")
    assert console.file.getvalue().splitlines()[-1].endswith("|")


def test_the_module_is_a_command() -> None:
    command = [sys.executable, "-m", "benchmarks", "decode", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert "providers: dsl, TRITON_ATTN, FA3, FA2 (by name only)" in done.stdout
    assert "hd128-h32x8-b1-k128k" in done.stdout


def test_every_option_has_an_argument_of_the_command() -> None:
    chosen = vars(parse(["decode", "--json", "x.jsonl", "--rows", "tiny", "--flush"]))
    assert chosen["json_path"] == pathlib.Path("x.jsonl")
    assert set(chosen) - {"op", "json_path"} == {field.name for field in dataclasses.fields(benchmarks.Options)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_works_under_another_name(path: pathlib.Path) -> None:
    """A wheel carries it as dsl_backend._benchmarks: it must import itself relatively, and peers only when asked."""
    tree = ast.parse(path.read_text())
    absolute = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    absolute += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in absolute if name and name.partition(".")[0] == "benchmarks"]
    at_import = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    at_import += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    if path.parent.name == "kernels":
        return
    # Modules of these kernels import their DSL, so they count as one.
    peers = ("vllm", "flashinfer", "cutlass", "triton", "kernels")
    assert not [name for name in at_import if name.partition(".")[0] in peers]
