# SPDX-License-Identifier: Apache-2.0
"""Steps that need a GPU, run by name: order, time limits, what a step leaves behind, the summary, exit status."""

import ast
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import benchmarks
from benchmarks import entry
from benchmarks.campaign import command, execution, findings, steps
from benchmarks.campaign.execution import Campaign, planned
from benchmarks.campaign.steps import PLANS, PYTHON, STEPS, Step, chosen, filled
from benchmarks.command import Options, check_kernels, check_matches, check_peers, select_columns
from benchmarks.dsls import command as dsls
from benchmarks.dsls import tables
from benchmarks.engine import command as engine
from benchmarks.engine.models import SHAPES
from benchmarks.engine.scenarios import choose
from benchmarks.step import command as profile
from tests.benchmarks import example_rows

ROOT = Path(benchmarks.__file__).parents[1]


def step(name: str, code: str, least_s: float = 0.1, most_s: float = 30, **more: Any) -> Step:
    return Step(name, ("-c", code), least_s, most_s, f"what {name} shows", **more)


def executed(out: Path, asked: Sequence[Step], gpus: tuple[str, ...] = ("0",), seconds: float = 60) -> Campaign:
    one = Campaign(out, gpus, time.monotonic() + seconds)
    one.execute(asked)
    return one


def outcomes(one: Campaign) -> dict[str, str]:
    return {run.step.name: run.outcome for run in one.runs}


class TestExecution:
    def test_each_step_sees_its_gpu_and_writes_its_log(self, tmp_path: Path) -> None:
        code = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
        one = executed(tmp_path, [step("a", code)], gpus=("3",))
        assert outcomes(one) == {"a": "ok"}
        assert one.complete
        assert (tmp_path / "a.log").read_text() == "sees 3\n"

    def test_a_step_of_two_gpus_starts_first_and_has_both(self, tmp_path: Path) -> None:
        code = "import os, time; time.sleep(0.3); print(os.environ['CUDA_VISIBLE_DEVICES'])"
        asked = [step("a", code), step("b", code), step("both", code, gpus=2), step("four", code, gpus=4)]
        one = executed(tmp_path, asked, gpus=("3", "5"))
        assert [run.step.name for run in one.runs] == ["both", "a", "b"]
        assert (tmp_path / "both.log").read_text() == "3,5\n"
        both, a, b = one.runs
        assert a.began >= both.began + both.seconds
        assert {a.gpus, b.gpus} == {("3",), ("5",)}
        assert [(left.name, why) for left, why in one.left] == [("four", "needs 4 GPUs")]

    def test_gpus_share_the_cores(self, tmp_path: Path) -> None:
        """Beside steps that take all cores, engines are slower."""
        code = "import os, time; time.sleep(0.3); print(sorted(os.sched_getaffinity(0)))"
        executed(tmp_path, [step("a", code), step("b", code)], gpus=("0", "1"))
        a, b = (set(json.loads((tmp_path / f"{name}.log").read_text())) for name in "ab")
        every = os.sched_getaffinity(0)
        assert a | b == every
        assert len(every) == 1 or not a & b

    def test_other_braces_of_an_argument_stay(self, tmp_path: Path) -> None:
        code = "import sys; print(sys.argv[1])"
        executed(tmp_path, [Step("a", ("-c", code, '{"x":{"seconds":{seconds}}}'), 1, 10, "")])
        assert (tmp_path / "a.log").read_text() == '{"x":{"seconds":9}}\n'

    def test_variables(self, tmp_path: Path) -> None:
        code = "import os; print(os.environ['SAMPLER'])"
        executed(tmp_path, [step("a", code, variables=(("SAMPLER", "0"),))])
        assert (tmp_path / "a.log").read_text() == "0\n"

    def test_two_gpus_run_two_steps_at_a_time(self, tmp_path: Path) -> None:
        asked = [step(name, "import time; time.sleep(0.5)") for name in "abc"]
        one = executed(tmp_path, asked, gpus=("0", "1"))
        assert outcomes(one) == dict.fromkeys("abc", "ok")
        assert {run.gpus for run in one.runs[:2]} == {("0",), ("1",)}
        first, second = one.runs[:2]
        assert second.began < first.began + first.seconds, "the second step waited for the first"

    def test_a_failed_step_is_named_and_the_next_one_runs(self, tmp_path: Path) -> None:
        one = executed(tmp_path, [step("bad", "raise SystemExit(3)"), step("good", "pass")])
        assert outcomes(one) == {"bad": "status 3", "good": "ok"}
        assert not one.complete

    def test_another_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It runs the interpreter; one that is missing is said, and the next step runs."""
        monkeypatch.setattr(execution, "TOOLS", tmp_path)
        tool = tmp_path / "some-sanitizer"
        tool.write_text('#!/bin/sh\necho "tool $1"\nshift\nexec "$@"\n')
        tool.chmod(0o755)
        with_tool = Step("a", ("--tool", PYTHON, "-c", "print('inside')"), 1, 10, "", program="some-sanitizer")
        missing = replace(with_tool, name="b", program="no-such-sanitizer")
        one = executed(tmp_path, [missing, with_tool])
        assert outcomes(one) == {"b": "no program no-such-sanitizer", "a": "ok"}
        assert (tmp_path / "a.log").read_text() == "tool --tool\ninside\n"
        assert "Not: b (no program no-such-sanitizer)" in findings.summary(one)

    def test_a_step_is_stopped_with_all_that_it_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(execution, "GRACE_S", 1.0)
        # The child ignores Ctrl-C: it must be killed.
        child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
        code = (
            f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            "print(child.pid, flush=True)\ntime.sleep(60)"
        )
        one = executed(tmp_path, [step("long", code, most_s=2)])
        assert outcomes(one) == {"long": "stopped"}
        pid = int((tmp_path / "long.log").read_text().split()[0])
        # A killed process is gone a moment later.
        until = time.monotonic() + 5
        while runs(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not runs(pid)

    def test_steps_without_time_are_left_out_by_name(self, tmp_path: Path) -> None:
        one = executed(tmp_path, [step("long", "pass", least_s=100), step("short", "pass")], seconds=20)
        assert [(left.name, why) for left, why in one.left] == [("long", "no time left")]
        assert outcomes(one) == {"short": "ok"}
        assert "Left out: long (no time left)" in findings.summary(one)
        assert not one.complete

    def test_seconds_and_results_are_given_to_the_step(self, tmp_path: Path) -> None:
        code = "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"
        one = executed(tmp_path, [Step("a", ("-c", code, "{seconds}", "{json}"), 1, 10, "")])
        assert outcomes(one) == {"a": "ok"}
        assert (tmp_path / "a.jsonl").read_text() == "9"


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except OSError:
        return False
    return state != "Z"


class TestPlan:
    def test_when_steps_would_run(self) -> None:
        asked = [
            step("a", "", most_s=30),
            step("b", "", most_s=20),
            step("both", "", most_s=40, gpus=2),
            step("c", "", most_s=50, least_s=10),
            step("d", "", least_s=25),
            step("e", "", most_s=5),
        ]
        found, left = planned(asked, 2, 40 + 50 + execution.GRACE_S)
        # d would have 20 seconds.
        assert [(one.step.name, one.begin_s, one.seconds) for one in found] == [
            ("both", 0, 40),
            ("a", 40, 30),
            ("b", 40, 20),
            ("c", 60, 30),
            ("e", 70, 5),
        ]
        assert [(one.name, why) for one, why in left] == [("d", "no time left")]

    @pytest.mark.parametrize("plan", PLANS)
    def test_a_plan_has_all_its_seconds(self, plan: str) -> None:
        """Also if each step ends two seconds later than it should."""
        gpus, limit_s = {"one-gpu": (1, 500), "tuning": (1, 2200)}.get(plan, (4, 560))
        asked = chosen(PLANS[plan])
        late = [replace(one, most_s=one.most_s + 2) for one in asked]
        found, left = planned(late, gpus, limit_s)
        assert left == []
        wanted = {one.name: one.most_s for one in asked}
        assert {one.step.name: one.seconds for one in found} == {name: most + 2 for name, most in wanted.items()}

    def test_every_step_is_in_a_plan(self) -> None:
        assert {step.name for plan in PLANS.values() for step in chosen(plan)} == {step.name for step in STEPS}

    def test_plans_of_four_gpus_have_a_step_once(self) -> None:
        plans = (plan for name, plan in PLANS.items() if name not in ("one-gpu", "tuning"))
        found = [step.name for plan in plans for step in chosen(plan)]
        assert len(found) == len(set(found))

    def test_steps_in_their_order_with_their_seconds(self) -> None:
        first, second, third = chosen("norm=40, llama decode=900")
        assert (first.name, second.name, third.name) == ("norm", "llama", "decode")
        known = {one.name: one for one in STEPS}
        assert first == replace(known["norm"], most_s=40)
        assert second == known["llama"]
        assert (third.least_s, third.most_s) == (known["decode"].least_s, 900)
        # With fewer seconds than a step wants it is started all the same: they were asked for.
        assert chosen("norm=3")[0].least_s == 3
        assert chosen(None) == list(STEPS)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("llama,lama", "no step lama: choose from tensor-parallel, "),
            (",", "no step in ',': choose from "),
            ("norm=soon", "norm=soon: a time limit is NAME=SECONDS with a number above 0"),
            ("norm=0", "norm=0: a time limit"),
            ("norm=inf", "norm=inf: a time limit"),
            ("norm,llama,norm=3", "norm: a step runs once"),
        ],
    )
    def test_names_are_checked(self, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--steps", text]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_failed_is_known_before_a_step_ends(tmp_path: Path, workers: str) -> None:
    """Once, with its message."""
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_wrong():\n    assert 1 == 2, 'so it is'\ndef test_long():\n    time.sleep(600)\n"
    )
    words = ("-m", "pytest", "-q", "-n", workers, "-p", "benchmarks.campaign.failures", "-p", "no:cacheprovider")
    log = tmp_path / "log"
    # This process may be a worker itself.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words, str(tmp_path / "test_it.py")],
            cwd=execution.ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 60
        while "so it is" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        found = log.read_text()
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert found.count("FAILED ") == 1
    assert "test_it.py::test_wrong (call)" in found
    assert "so it is" in found


class TestCommand:
    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            command.main(["--list", "--steps", "fp8=50 tensor-parallel", "--gpus", "0", "--limit-seconds", "60"]) == 0
        )
        head, fp8, left, used = capsys.readouterr().out.splitlines()
        assert head.startswith("1 GPU, 60 s")
        assert fp8.split()[:4] == ["0", "50", "1", "fp8"]
        assert left.split()[2:] == ["2", "tensor-parallel", "needs", "2", "GPUs"]
        assert used == "at most 50 GPU seconds"

    def test_without_a_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command, "visible_gpus", list)
        assert command.main(["--out", str(tmp_path / "out")]) == 2
        assert "there is no CUDA device" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_main_writes_the_summary(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        many = "for i in range(20): print('figure', i)"
        monkeypatch.setattr(steps, "STEPS", (step("a", many), step("b", "raise SystemExit(1)")))
        asked: list[bool] = []
        monkeypatch.setattr(command, "exit_on_sigterm", lambda: asked.append(True))
        assert command.main(["--out", str(tmp_path), "--gpus", "0,1", "--limit-seconds", "60"]) == 1
        assert asked == [True], "its steps would outlive it"
        said = capsys.readouterr().out
        for text in ((tmp_path / "summary.txt").read_text(), said):
            assert "1 of 2 steps succeeded" in text
            assert "Not: b (status 1)" in text
            # The end of a log without a table.
            assert "figure 19\n" in text
            assert "figure 11\n" not in text


def rows_of(operator: str, shares: dict[str, float], pattern: str = "") -> list[dict[str, Any]]:
    """Records of rows; providers do these shares of what the ceiling allows."""
    known = benchmarks.operators()[operator].cases()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example_rows, "SHARES", shares)
        return [example_rows.row(operator, case) for case in known if re.search(pattern, case.id)]


class TestFindings:
    def summary_of(self, tmp_path: Path, records: Sequence[dict[str, Any]], most: int | None = 11_000) -> list[str]:
        """The summary of a step that writes these records."""
        source = tmp_path / "source"
        source.write_text("".join(json.dumps(one) + "\n" for one in records))
        code = "import sys; print('the log'); open(sys.argv[1], 'w').write(open(sys.argv[2]).read())"
        one = executed(tmp_path, [Step("a", ("-c", code, "{json}", str(source)), 1, 10, "what it shows")])
        return findings.summary(one, most).splitlines()

    def test_rows_the_worst_first(self, tmp_path: Path) -> None:
        ahead = rows_of("softmax", {"dsl": 0.9, "quack": 0.8}, "grid-4096x4096")
        behind = rows_of("softmax", {"dsl": 0.8, "quack": 0.9, "Triton": 0.5}, "grid-4096x8192")
        head, step_line, tally, first, second, *rest = self.summary_of(tmp_path, [*ahead, *behind])
        assert head.startswith("1 of 1 steps succeeded")
        assert re.fullmatch(r"== a: ok, \d s; what it shows", step_line)
        assert tally.startswith("softmax: 2 of 2 rows compared, geometric mean ")
        assert "lowest 0.89x, 1 below 1, 1 below 0.97" in tally
        assert re.fullmatch(r" 0\.89x grid-4096x8192: [\d.]+ us, [\d.]+ of floor: quack 0.89, Triton 1\.\d\d", first)
        assert second.startswith(" 1.11x grid-4096x4096: ")
        # Columns without a time say why; the log is in its file.
        assert "no time of Liger: Liger is not installed" in rest
        assert "the log" not in rest

    def test_what_is_wrong_comes_before_what_is_slow(self, tmp_path: Path) -> None:
        (row,) = rows_of("softmax", {"dsl": 0.9, "quack": 0.8}, "grid-4096x4096")
        row["cells"][0] = {"provider": "dsl", "status": "wrong", "message": "error 0.5"}
        found = self.summary_of(tmp_path, [row])
        assert found[2] == "WRONG softmax grid-4096x4096 dsl: error 0.5"
        assert found[3] == "softmax: 1 rows, none with a time of ours and of a peer"
        assert found[4] == "     - grid-4096x4096: no time of ours"

    def test_engines(self, tmp_path: Path) -> None:
        def result(scenario: str, backend: str, value: float) -> dict[str, Any]:
            return {"kind": "result", "model": "llama-8b", "scenario": scenario, "backend": backend, "value": value}

        found = self.summary_of(
            tmp_path,
            [
                {"kind": "engine", "backend": "dsl", "ready_s": 61.0},
                result("b1", "dsl", 120.0),
                result("b1", "FLASH_ATTN", 100.0),
                result("b16", "dsl", 900.0),
                result("b16", "FLASH_ATTN", 1000.0),
                {
                    "kind": "error",
                    "model": "llama-8b",
                    "backend": "FLASH_ATTN",
                    "scenario": "b64",
                    "message": "no room",
                },
            ],
        )
        assert found[2:] == [
            "ERROR llama-8b FLASH_ATTN b64: no room",
            " 0.90x llama-8b b16: dsl 900.0, FLASH_ATTN 1000 tokens/s",
            " 1.20x llama-8b b1: dsl 120.0, FLASH_ATTN 100.0 tokens/s",
            "start: dsl 61 s",
        ]

    def test_a_profile(self, tmp_path: Path) -> None:
        kernels = [{"name": name, "launches": 32, "us": us} for name, us in (("gate_up", 1760.0), ("down", 1000.0))]
        one = {"kind": "step", "backend": "dsl", "step_us": 4000.0, "busy_us": 3900.0, "floor_us": 3400.0}
        assert self.summary_of(tmp_path, [{**one, "kernels": kernels}])[2:] == [
            "dsl: a step 4000 us, kernels 3900 of them, weights are read in 3400",
            "dsl:  1760.0 us, 32 of 55.00: gate_up",
            "dsl:  1000.0 us, 32 of 31.25: down",
        ]

    def test_parts_of_a_layer_and_the_host(self, tmp_path: Path) -> None:
        rows = [["part", "floor us", "dsl us"], ["qkv_proj", "10.49", "12.00"], ["behind qkv_proj", "", "1.50"]]
        span = {"name": "linear/api.py:linear", "calls": 3.0, "us": 40.0, "all_us": 90.0}
        made = {"packages": {"vllm": 860.0, "dsl_backend": 40.0}, "calls": 3.0, "entered_us": 90.0, "spans": [span]}
        host = {"kind": "host", "backend": "dsl", "step_us": 900.0, **made}
        assert self.summary_of(tmp_path, [{"kind": "parts", "rows": rows}, host])[2:] == [
            "part floor us dsl us",
            "qkv_proj 10.49 12.00",
            "behind qkv_proj - 1.50",
            "dsl: a step 900 us on the host: vllm 860, dsl_backend 40; 90 with what it calls",
            "dsl:    40.0 us, 3 calls: linear/api.py:linear",
        ]

    def test_a_sweep(self, tmp_path: Path) -> None:
        def line(row: str, us: float, chosen: bool, **config: int) -> dict[str, Any]:
            return {"row": row, "width": 8, "us": us, "chosen": chosen, "name": "NormConfig", **config}

        found = self.summary_of(
            tmp_path,
            [
                line("x", 10.0, True, threads=416, vectors=2),
                line("x", 12.0, False, threads=512, vectors=2),
                line("y", 10.0, True, threads=288, vectors=2),
                line("y", 8.0, False, threads=128, vectors=4),
                line("y", 14.0, False, threads=512, vectors=2),
            ],
        )
        assert found[2:] == [
            " 0.80x y: 10.00 us; 0.80 threads=128 vectors=4; 1.40 threads=512",
            " 1.20x x: 10.00 us; 1.20 threads=512",
        ]

    def test_an_unfinished_line_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"a": 1}\n{"b"')
        assert findings.json_records(path) == [{"a": 1}]
        path.write_text('{"a": 1}\n{"b": 2}')
        assert findings.json_records(path) == [{"a": 1}, {"b": 2}]
        assert findings.json_records(tmp_path / "none") == []
        # One object on many lines, as `tune` writes it.
        path.write_text(json.dumps({"a": [1, {"b": 2}]}, indent=1))
        assert findings.json_records(path) == []

    def test_an_earlier_campaign_in_the_folder_is_not_this_one(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps(rows_of("softmax", {"dsl": 0.9, "quack": 0.8})[0]) + "\n")
        (tmp_path / "b.log").write_text("figure 7\n")
        missing = Step("b", (), 1, 10, "", program="no-such-program")
        one = executed(tmp_path, [Step("a", ("-c", "print('the log')", "{json}"), 1, 10, ""), missing])
        text = findings.summary(one)
        assert "softmax" not in text
        assert "figure 7" not in text
        assert "the log" in text

    def test_tests_say_what_failed(self, tmp_path: Path) -> None:
        text = "..F\nE   assert 1 == 2\nmore\nFAILED tests/a.py::test_b - assert\n1 failed, 2 passed in 3.00s"
        one = executed(tmp_path, [Step("a", ("-c", f"print({text!r})", "pytest"), 1, 10, "")])
        assert findings.summary(one).splitlines()[2:] == [
            "E   assert 1 == 2",
            "FAILED tests/a.py::test_b - assert",
            "1 failed, 2 passed in 3.00s",
        ]

    def test_tests_that_were_all_skipped_show_nothing(self, tmp_path: Path) -> None:
        one = executed(tmp_path, [Step("a", ("-c", "print('6 skipped in 3.00s')", "pytest"), 1, 10, "")])
        assert findings.summary(one).splitlines()[2:] == ["no test passed", "6 skipped in 3.00s"]

    def test_a_step_that_prints_nothing_and_one_that_fails(self, tmp_path: Path) -> None:
        one = executed(tmp_path, [step("silent", "pass"), step("bad", "raise ValueError('no such thing')")])
        text = findings.summary(one)
        assert "Not: bad (status 1)" in text
        assert "ValueError: no such thing" in text
        assert text.splitlines()[-2:] == [text.splitlines()[-2], "it printed nothing"]
        assert text.splitlines()[-2].startswith("== silent: ok")
        # What failed comes first.
        assert text.index("== bad") < text.index("== silent")

    def test_all_fits_on_a_terminal_that_keeps_12000_characters(self, tmp_path: Path) -> None:
        """Each of many steps with many rows has its first lines, the worst rows; the file has all."""
        rows = rows_of("softmax", {"dsl": 0.8, "quack": 0.9})
        source = tmp_path / "source"
        source.write_text("".join(json.dumps(one) + "\n" for one in rows))
        code = "import sys; open(sys.argv[1], 'w').write(open(sys.argv[2]).read())"
        names = [f"step-{index}" for index in range(20)]
        asked = [Step(name, ("-c", code, "{json}", str(source)), 1, 10, "shows " * 30) for name in names]
        one = executed(tmp_path, asked)
        short, full = findings.summary(one), findings.summary(one, most=None)
        assert len(short) <= findings.MOST_CHARACTERS
        sections = short.split("== ")[1:]
        assert len(sections) == len(names)
        worst = next(line for line in full.splitlines() if re.match(r" [\d.]+x ", line))
        for section in sections:
            assert worst in section
            assert re.search(r"\.\.\. \d+ more lines: summary.txt", section)
        assert full.count("x grid-32768x32768: ") == len(names)


def words_of(one: Step) -> list[str]:
    given = {"seconds": "10", "json": os.devnull, "python": "python"}
    return [filled(word, given) for word in one.arguments]


def option(words: Sequence[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern: of `^(a|b)c` `^ac` and `^bc`, of `a|b` both."""
    inner = re.fullmatch(r"(.*)\((.*)\)(.*)", pattern)
    if inner:
        begin, middle, end = inner.groups()
        return [f"{begin}{one}{end}" for one in middle.split("|")]
    return pattern.split("|")


def check_bench(words: list[str]) -> None:
    """The arguments of a bench of operators: its own parser and checks, and each alternative of its pattern."""
    given = vars(entry.parse(words))
    names, _ = given.pop("op"), given.pop("json_path")
    options = Options(**given)
    known = benchmarks.operators()
    if names[0] == "dsls":
        choice = tables.chosen(names[1:])
        dsls.check(choice.tables, known, options)
        selections = [dsls.selection(table, known[table.operator], options) for table in choice.tables]
    else:
        benchmarks.command.check_options(names, known, options)
        check_peers(options.peers, [known[name] for name in names])
        selections = [select_columns(known[name], options) for name in names]
        check_kernels(options.kernel_names, selections)
    check_matches(options.rows, selections, named=True)
    assert all(one.cases for one in selections)
    ids = [case.id for one in selections for case in one.cases]
    for part in alternatives(options.rows or ""):
        assert any(re.search(part, one) for one in ids), f"{part} matches no row"


def check_engine(words: list[str]) -> None:
    options = engine.parse(words)
    assert set(options.model.split(",")) <= set(SHAPES)
    choose(options.scenarios, small=False, quick=options.quick)
    drafts = options.engine.get("speculative_config", {})
    assert drafts.get("model", "llama-draft") in SHAPES
    assert engine.graph_sizes(options.engine)
    if "additional_config" in options.engine:
        pytest.importorskip("pydantic")
        from dsl_backend.vllm_plugin.options import Options as PluginOptions

        PluginOptions(**options.engine["additional_config"]["dsl"])


def check_tests(words: list[str]) -> None:
    """Files exist, and functions that are named in them."""
    named = [word for word in words if word.startswith(("tests", "integration"))]
    assert named
    for one in named:
        file, _, rest = one.partition("::")
        assert (ROOT / file).exists()
        if rest:
            found = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
            assert rest.partition("[")[0] in found


def check_module(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of another module: a sweep as far as its rows, the package's commands as far as their help."""
    if name == "dsl_backend.cli":
        from dsl_backend.cli import app

        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
        return
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    assert path.exists()
    assert all(word in path.read_text() for word in words if word.startswith("--") and word not in ("--json", "--best"))
    if name.endswith(".sweep"):

        class Reached(Exception):
            pass

        def reached() -> None:
            raise Reached

        found = importlib.import_module(name)
        monkeypatch.setattr(found.targets, "detect", reached)
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(Reached):
            found.main()


@pytest.mark.parametrize("one", STEPS, ids=lambda one: one.name)
def test_the_arguments_of_a_step_are_accepted(one: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its command's own parser, and every pattern and name in them means something."""
    words = words_of(one)
    if one.program != PYTHON:
        words = words[words.index("python") + 1 :]
    assert words[0] == "-m"
    match words[1:]:
        case ["benchmarks", "engine", *rest]:
            check_engine(rest)
        case ["benchmarks", "step", *rest]:
            assert profile.parse(rest).limit_seconds == 10
        case ["benchmarks", *rest]:
            check_bench(rest)
        case ["pytest", *rest]:
            check_tests(rest)
        case [name, *rest]:
            check_module(name, rest, monkeypatch)
    assert 0 < one.least_s <= one.most_s
    assert one.shows


@pytest.mark.parametrize(
    "arguments",
    [
        "decode --rows 'fp8|no-such-row'",
        "decode softmax --rows ^fp8",
        "decode --rows '^(fp8|no-such)-hd'",
        "softmax --peers quack,no-such-peer",
        "experts --kernels no-such-kernel",
        "softmax --no-such-option",
        "dsls softmax no-such-table",
        "sampling --held-out --rows ^no-such",
    ],
)
def test_what_means_nothing_is_seen(arguments: str) -> None:
    wrong = steps.bench("a", arguments, 1, 2, "nothing")
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check_bench(words_of(wrong)[2:])


def test_names_are_unique_and_plans_are_of_them() -> None:
    names = [one.name for one in STEPS]
    assert len(set(names)) == len(names)
    for plan in PLANS.values():
        assert all("=" in part for part in plan.split())
        assert chosen(plan)


def test_pages_name_steps_that_exist() -> None:
    """Those of the table of pages, and of single tables; every measurement is on some page."""
    names = {one.name for one in STEPS}
    overview = (ROOT / "docs/performance.md").read_text()
    rows = re.findall(r"^\| \[[^|]*\.md\) \| (`.*) \|$", overview, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(rows) == len(list((ROOT / "docs/performance").glob("*.md")))
    assert listed <= names
    measured = {one.name for one in STEPS if "benchmarks" in one.arguments}
    assert measured <= listed
    for page in (ROOT / "docs/performance").glob("*.md"):
        for found in re.findall(r"\b[Ss]teps? ((?:`[\w.-]+`(?:, | and )?)+)", page.read_text()):
            assert set(re.findall(r"`([^`]+)`", found)) <= names, page.name


@pytest.mark.rest
def test_node_ids_of_a_sanitizer_are_tests() -> None:
    """As pytest collects them, with the marker that needs a GPU or without."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *steps.SANITIZED]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    found = set(itertools.takewhile(bool, done.stdout.splitlines()))
    assert set(steps.SANITIZED) <= found
