# SPDX-License-Identifier: Apache-2.0
"""Steps that need a GPU, run on GPUs by name: order, time limits, what a step leaves behind, exit status."""

import json
import os
import time
from pathlib import Path

import pytest

from benchmarks import campaign
from benchmarks.campaign import Campaign, Step


def step(name: str, code: str, least_s: float = 0.1, most_s: float = 30) -> Step:
    return Step(name, ("-c", code), least_s, most_s, f"what {name} shows")


def executed(out: Path, steps: list[Step], gpus: tuple[str, ...] = ("0",), seconds: float = 60) -> Campaign:
    one = Campaign(out, gpus, time.monotonic() + seconds)
    one.execute(steps)
    return one


def outcomes(one: Campaign) -> dict[str, str]:
    return {run.step.name: run.outcome for run in one.runs}


def test_each_step_sees_its_gpu_and_writes_its_log(tmp_path: Path) -> None:
    code = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    one = executed(tmp_path, [step("a", code)], gpus=("3",))
    assert outcomes(one) == {"a": "ok"}
    assert one.complete
    assert (tmp_path / "a.log").read_text() == "sees 3\n"
    assert "what a shows" in one.summary()
    assert "sees 3" in one.summary()


def test_gpus_share_the_cores(tmp_path: Path) -> None:
    """Beside steps that take all cores, engines are slower."""
    code = "import os, time; time.sleep(0.3); print(sorted(os.sched_getaffinity(0)))"
    executed(tmp_path, [step("a", code), step("b", code)], gpus=("0", "1"))
    a, b = (set(json.loads((tmp_path / f"{name}.log").read_text())) for name in "ab")
    every = os.sched_getaffinity(0)
    assert a | b == every
    assert len(every) == 1 or not a & b


def test_other_braces_of_an_argument_stay(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1])"
    executed(tmp_path, [Step("a", ("-c", code, '{"x":{"seconds":{seconds}}}'), 1, 10, "")])
    assert (tmp_path / "a.log").read_text() == '{"x":{"seconds":9}}\n'


def test_two_gpus_run_two_steps_at_a_time(tmp_path: Path) -> None:
    steps = [step(name, "import time; time.sleep(0.5)") for name in "abc"]
    one = executed(tmp_path, steps, gpus=("0", "1"))
    assert outcomes(one) == dict.fromkeys("abc", "ok")
    assert {run.gpu for run in one.runs[:2]} == {"0", "1"}
    assert one.runs[1].began < one.runs[0].began + 0.5, "the second step waited for the first"


def test_a_failed_step_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    one = executed(tmp_path, [step("bad", "raise SystemExit(3)"), step("good", "pass")])
    assert outcomes(one) == {"bad": "status 3", "good": "ok"}
    assert not one.complete


def test_a_step_is_stopped_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "GRACE_S", 1.0)
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


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_steps_without_time_are_left_out_by_name(tmp_path: Path) -> None:
    one = executed(tmp_path, [step("long", "pass", least_s=100), step("short", "pass")], seconds=20)
    assert [left.name for left in one.left] == ["long"]
    assert outcomes(one) == {"short": "ok"}
    assert "no time left" in one.summary()
    assert not one.complete


def test_seconds_and_results_are_given_to_the_step(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"
    one = executed(tmp_path, [Step("a", ("-c", code, "{seconds}", "{json}"), 1, 10, "")])
    assert outcomes(one) == {"a": "ok"}
    assert (tmp_path / "a.jsonl").read_text() == "9"


def test_names_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--only", "llama,lama"]) == 2
    error = capsys.readouterr().err
    assert "no step lama" in error
    assert "deepseek" in error
    assert campaign.main(["--only", ","]) == 2


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--list", "--only", "fp8"]) == 0
    assert "fp8 caches" in capsys.readouterr().out


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(campaign, "visible_gpus", list)
    assert campaign.main(["--out", str(tmp_path / "out")]) == 2
    assert "there is no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_writes_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "STEPS", (step("a", "print('figure 7')"), step("b", "raise SystemExit(1)")))
    assert campaign.main(["--out", str(tmp_path), "--gpus", "0,1", "--limit-seconds", "60"]) == 1
    assert "figure 7" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize("one", campaign.STEPS, ids=lambda one: one.name)
def test_the_steps_name_what_exists(one: Step) -> None:
    words = [campaign.filled(word, {"seconds": "10", "json": os.devnull}) for word in one.arguments]
    if words[1] == "benchmarks":
        # Each option is known to the command's parser.
        from benchmarks.engine import command as engine
        from benchmarks.entry import parse

        assert engine.parse(words[3:]) if words[2] == "engine" else parse(words[2:])
    elif words[1] == "pytest":
        paths = [word for word in words[2:] if "/" in word or word == "tests"]
        assert paths
        assert all(Path(path).exists() for path in paths)
    else:
        assert Path(*words[1].split(".")).with_suffix(".py").exists()
