# SPDX-License-Identifier: Apache-2.0
"""The judge tells honest candidates from cheating ones, and says why."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judge_candidates import CHEATING, HONEST, RIGHT, Candidate
from rich.console import Console
from typer.testing import CliRunner

import benchmarks
from benchmarks import judge, timing
from benchmarks.case import SMALLEST
from benchmarks.command import operators as all_operators
from benchmarks.judge import child, command, process, registry, shared, times
from benchmarks.judge.watch import Watch
from dsl_backend import cli
from dsl_backend.providers import Launch

# In `make test`. `make test-rest` has all the others but those of the emulator and of Triton's interpreter. Each of its
# candidates takes 4 to 8 CPU seconds, most of them to import torch in a process of its own (2026-11-27).
QUICK_HONEST = ("eager",)
QUICK_CHEATING = ("cached-by-first-row", "computes-on-the-host")
# 18 to 66 CPU seconds each: in `make emulate-full`.
SLOW = ("triton",)
SEED = 20261125


def with_text(text: str) -> set[int]:
    """Processes with a text among their arguments or the variables that they were started with."""
    found = set()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def no_process_survives(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that a candidate starts knows its folder, which is in the test's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert with_text(str(tmp_path)) == set()


def judged(candidate: Candidate, folder: pathlib.Path, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and text."""
    file = folder / "candidate.py"
    file.write_text(candidate.source())
    console = Console(file=io.StringIO(), width=200)
    on_gpu = {"rows": smallest_rows(candidate.op), "peers": "none"} if torch.cuda.is_available() else {}
    chosen = judge.Options(**{"arch": candidate.arch, "seed": SEED, **on_gpu, **dict(candidate.options), **options})
    status = judge.main(file, candidate.op, folder / "verdict.json", chosen, console)
    assert isinstance(console.file, io.StringIO)
    return status, json.loads((folder / "verdict.json").read_text()), console.file.getvalue()


def smallest_rows(op: str) -> str:
    """The rows that are timed without a GPU: the table, with all peers, takes minutes."""
    rows = (case.id for case in all_operators()[op].cases() if case.group == SMALLEST)
    return f"^({'|'.join(map(re.escape, rows))})$"


def marks(name: str, candidate: Candidate, quick: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    if candidate.gpu:
        return [pytest.mark.gpu]
    only = [pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU")] if candidate.cpu else []
    if name in quick:
        return only
    slow = name in SLOW or (candidate.arch is not None and not candidate.quick)
    return [*only, pytest.mark.full if slow else pytest.mark.rest]


def marked(candidates: dict[str, Candidate], quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=marks(name, one, quick)) for name, one in candidates.items()]


@pytest.mark.parametrize("name", marked(HONEST, QUICK_HONEST))
def test_honest(name: str, tmp_path: pathlib.Path) -> None:
    status, verdict, text = judged(HONEST[name], tmp_path)
    assert (status, verdict["ok"], verdict["findings"]) == (0, True, []), text
    assert verdict["correct"]
    assert 0 <= verdict["error_over_budget"] <= 1
    assert text.rstrip().endswith("accepted")


@pytest.mark.parametrize("name", marked(CHEATING, QUICK_CHEATING))
def test_cheating(name: str, tmp_path: pathlib.Path) -> None:
    """It is rejected for the reason that it gives."""
    status, verdict, text = judged(CHEATING[name], tmp_path)
    assert (status, verdict["ok"]) == (1, False), text
    assert text.rstrip().endswith("rejected")
    failed = [f"{one['id']}: {one['message']}" for one in verdict["trials"] if one["status"] != "right"]
    assert CHEATING[name].said in "\n".join([*verdict["findings"], *failed]), text


def test_there_are_enough() -> None:
    """In `make test-rest` and `make test` alone, without a GPU."""
    for candidates, quick in ((HONEST, QUICK_HONEST), (CHEATING, QUICK_CHEATING)):
        kinds = [{mark.name for mark in marks(name, one, quick)} for name, one in candidates.items()]
        assert sum(kind <= {"rest", "skipif"} for kind in kinds) >= 20


@pytest.mark.parametrize(
    "name", [pytest.param("eager", marks=pytest.mark.rest), pytest.param("cute-sm90", marks=pytest.mark.full)]
)
def test_softmax_takes_less_than_a_minute_without_a_gpu(name: str, tmp_path: pathlib.Path) -> None:
    """Of a CPU's time, which does not depend on what else the machine runs; with all processes and imports."""
    (tmp_path / "candidate.py").write_text(HONEST[name].source())
    arch = ["--arch", HONEST[name].arch] if HONEST[name].arch else []
    command_line = [sys.executable, "-m", "dsl_backend.cli", "judge", "candidate.py", "--op", "softmax", *arch]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Also on a machine with a GPU.
    subprocess.run(command_line, cwd=tmp_path, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60


def test_a_block_is_long_beside_what_a_request_costs() -> None:
    """Layers of 4 MiB, as many as are allowed; of 256 MiB; of more than a block; with a cache that is larger still."""
    mib = 1 << 20
    cache = 50 * mib
    assert times.layers_of_block(4 * mib, cache) == times.MOST_LAYERS
    assert times.layers_of_block(256 * mib, cache) * 256 * mib == times.BLOCK_BYTES
    assert times.layers_of_block(2 * times.BLOCK_BYTES, cache) == 1
    assert times.layers_of_block(256 * mib, times.BLOCK_BYTES) * 256 * mib == timing.L2_MULTIPLE * times.BLOCK_BYTES


def test_what_single_requests_wait_for_does_not_count() -> None:
    """20 layers of 10 us; a request costs 100 us. In one block all wait, in another one the empty ones do."""
    quiet, cost = 300e-6, 100e-6
    blocks = [(quiet, [cost] * 3)] * 5 + [(quiet + 1e-3, [cost + 1e-3] * 3), (quiet, [cost + 1e-3] * 3)]
    found = times.times_of_launch(blocks, layers=20)
    assert found.median_us == pytest.approx(10.0)
    assert found.samples == 7


def test_the_same_seed_has_the_same_trials_and_another_seed_has_not() -> None:
    for operator in judge.OPERATORS:
        one, same, other = (
            [(trial.id, trial.problem) for trial in registry.judged(operator).trials(random.Random(seed), False)]
            for seed in (1, 1, 2)
        )
        assert one == same
        assert one != other
        assert len({name for name, _ in one}) == len(one)


@pytest.mark.parametrize("operator", judge.OPERATORS)
def test_every_nudge_changes_the_result(operator: str) -> None:
    """An answer to the call before is then wrong."""
    of_operator = registry.judged(operator)
    for trial in of_operator.trials(random.Random(3), True):
        inputs = of_operator.build(trial, torch.device("cpu"), 3)
        benchmarks.operators()[operator].providers(["reference"])[0].prepare(trial.problem, inputs).run(0)
        out, further = of_operator.outputs(inputs)[0], of_operator.further(inputs, 0)
        assert of_operator.error(trial, inputs, 0, out, *further) <= 1, trial
        of_operator.nudge(inputs, 0, random.Random(3))
        if operator == "sampling":
            # The token that was drawn may be the one that is certain now.
            out[-1] = (inputs.layers[0].logits[-1].argmax() + 1) % trial.problem.vocab
            with pytest.raises(AssertionError, match="1 of"):
                of_operator.error(trial, inputs, 0, out)
        elif further or out.dtype == torch.float8_e4m3fn:
            with pytest.raises(AssertionError, match=r"differs first|further from the oracle"):
                of_operator.error(trial, inputs, 0, out, *further)
        else:
            assert of_operator.error(trial, inputs, 0, out) > 1, trial


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gone.py", "softmax", {}), "No such file"),
        (("candidate.py", "rope", {}), "no operator 'rope' is judged: choose from softmax"),
        (("candidate.py", "softmax", {"arch": "sm_80"}), "choose from sm_90a, sm_100a"),
        (("candidate.py", "softmax", {"least_served": 2.0}), "least_served is 2: a share from 0 to 1 is needed"),
        (("candidate.py", "softmax", {"peers": "nobody"}), "no peer nobody"),
        (("candidate.py", "softmax", {"rows": "("}), "--rows '(' is not a regular expression: missing )"),
    ],
)
def test_a_wrong_use_is_refused(
    arguments: tuple[str, str, dict[str, Any]], message: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "candidate.py").write_text(HONEST["eager"].source())
    file, op, options = arguments
    console = Console(file=io.StringIO(), width=200)
    assert judge.main(tmp_path / file, op, None, judge.Options(**options), console) == 2
    assert isinstance(console.file, io.StringIO)
    assert message in console.file.getvalue()


@pytest.mark.rest
@pytest.mark.parametrize("count", [0, 2])
def test_a_file_has_one_provider_of_the_operator(count: int, tmp_path: pathlib.Path) -> None:
    source = HONEST["eager"].source()
    other = source.replace('"softmax", name="candidate"', '"softmax", name="other"')
    (tmp_path / "candidate.py").write_text(source + other if count else source.replace('("softmax"', '("linear"'))
    console = Console(file=io.StringIO(), width=200)
    assert judge.main(tmp_path / "candidate.py", "softmax", None, judge.Options(seed=1), console) == 1
    assert isinstance(console.file, io.StringIO)
    assert f"it has {count} providers of softmax" in console.file.getvalue()


# Writes only where it has no network, and shows how a connection fails.
ISOLATED = Candidate(
    "if cut_off:\n    out.copy_(softmax(x))\nreturn out",
    head="""
    import os, socket
    cut_off = "SECRET_OF_THE_JUDGE" not in os.environ and os.environ["HOME"].startswith(os.getcwd())
    cut_off = cut_off and {name for _, name in socket.if_nameindex()} <= {"lo"}
    """,
)
BLOCKED = Candidate(
    ISOLATED.run,
    head="""
    import socket
    try:
        socket.create_connection(("127.0.0.1", 9), 0.2)
    except PermissionError:
        cut_off = True
    """,
)


# What a machine has that permits no namespaces.
NOT_PERMITTED = process.Isolation((), "sockets blocked", "a parent process")
# Those that only their parents hold together, where a namespace does not.
LOOSE = [NOT_PERMITTED, process.isolation(on_gpu=True), process.isolation(on_gpu=False)]


def isolate_by(isolation: process.Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (process, command):
        monkeypatch.setattr(module, "isolation", lambda on_gpu: isolation)


@pytest.mark.rest
@pytest.mark.skipif(not process.isolation(on_gpu=True).command, reason="unshare is not permitted here")
def test_a_candidate_has_no_network_and_no_variables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_JUDGE", "1")
    status, verdict, text = judged(ISOLATED, tmp_path)
    kept_apart = process.isolation(torch.cuda.is_available())
    assert (status, verdict["network"], verdict["processes"]) == (0, kept_apart.network, kept_apart.processes), text


@pytest.mark.rest
def test_without_unshare_sockets_are_blocked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_by(NOT_PERMITTED, monkeypatch)
    status, verdict, text = judged(BLOCKED, tmp_path)
    assert (status, verdict["correct"], verdict["network"]) == (1, True, "sockets blocked"), text
    assert any("used the network" in one for one in verdict["findings"])


# Starts, in another session and without a parent, a process with or without the candidate's variables, which has so
# many MiB and sleeps. Then it sleeps itself, or ends.
STARTER = """
import os, subprocess, sys, time
mark, mib, clear, ends = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "clear", sys.argv[4]
if os.fork() == 0:
    os.setsid()
    code = f"kept = bytearray(b'1') * ({mib} << 20); print(len(kept), flush=True); import time; time.sleep(1000)"
    one = subprocess.Popen([sys.executable, "-c", code, mark], env={} if clear else None, stdout=subprocess.PIPE)
    one.stdout.readline()
    os._exit(0)
os.wait()
print("ready", flush=True)
if ends == "its-parent":
    os.kill(os.getppid(), 9)
if ends == "itself":
    os._exit(3)
time.sleep(1000)
"""


def run_instead(monkeypatch: pytest.MonkeyPatch, *program: str) -> None:
    """A program of Python's takes the place of a candidate."""
    made = process.command_of

    def command_of(requests: int, replies: int, limits: process.Limits) -> list[str]:
        usual = made(requests, replies, limits)
        return [*usual[: usual.index("-m")], "-c", *program]

    monkeypatch.setattr(process, "command_of", command_of)


def start_starter(
    folder: pathlib.Path, isolation: process.Isolation, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> process.Process:
    isolate_by(isolation, monkeypatch)
    run_instead(monkeypatch, STARTER, str(folder), *arguments)
    return process.Process(folder, process.Limits(30.0, 300 << 20))


@pytest.mark.parametrize("isolation", dict.fromkeys(LOOSE), ids=lambda one: f"{one.network}, {one.processes}")
@pytest.mark.parametrize("variables", ["keep", "clear"])
def test_a_process_in_another_session_counts_and_ends(
    variables: str, isolation: process.Isolation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_starter(tmp_path, isolation, monkeypatch, "400", variables, "never") as one:
        while "ready" not in one.log.read_text():
            time.sleep(0.01)
        with pytest.raises(process.Stopped, match=r"has 4\d\d MiB of memory; the limit is 300"):
            one.check_limits()
        assert with_text(str(tmp_path)) == set()


@pytest.mark.parametrize("isolation", dict.fromkeys(LOOSE), ids=lambda one: f"{one.network}, {one.processes}")
def test_what_a_process_leaves_ends_with_it(
    isolation: process.Isolation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        start_starter(tmp_path, isolation, monkeypatch, "1", "clear", "itself") as one,
        pytest.raises(process.Stopped, match="ended with exit status 3: ready"),
    ):
        one.ask("run", layers=[0])
    assert with_text(str(tmp_path)) == set()


@pytest.mark.parametrize("isolation", dict.fromkeys(LOOSE), ids=lambda one: f"{one.network}, {one.processes}")
def test_a_process_that_ends_its_parent_is_ended(
    isolation: process.Isolation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of a namespace cannot be ended from inside."""
    with start_starter(tmp_path, isolation, monkeypatch, "1", "keep", "its-parent") as one:
        if isolation.processes == "unshare --pid":
            one.limits = process.Limits(0.5, 300 << 20)
        with pytest.raises(process.Stopped, match=r"exit status -9|did not answer"):
            one.ask("run", layers=[0])
    assert with_text(str(tmp_path)) == set()


@pytest.mark.parametrize("isolation", dict.fromkeys(LOOSE), ids=lambda one: f"{one.network}, {one.processes}")
def test_a_judge_that_is_killed_leaves_no_process(
    isolation: process.Isolation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system closes its end of the pipe."""
    one = start_starter(tmp_path, isolation, monkeypatch, "1", "clear", "never")
    while "ready" not in one.log.read_text():
        time.sleep(0.01)
    assert len(with_text(str(tmp_path))) >= 3
    os.close(one._send)
    one.process.wait(30)
    assert with_text(str(tmp_path)) == set()
    os.close(one._receive)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["eats-memory-in-another-session", "works-on-in-another-session"])
def test_limits_hold_without_namespaces(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_by(NOT_PERMITTED, monkeypatch)
    test_cheating(name, tmp_path)


@pytest.mark.rest
def test_nothing_of_a_candidate_runs_beside_its_peers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that works while nobody asks, and says when."""
    beats = tmp_path / "beats"
    burns = Candidate(
        RIGHT,
        head=f"""
        import threading, time
        def burn():
            with open({str(beats)!r}, "w") as file:
                while True:
                    print(time.monotonic(), file=file, flush=True)
        threading.Thread(target=burn, daemon=True).start()
        """,
    )
    begun = []
    peer = command.Timing.peer

    def timed(self: command.Timing, row: times.Row, name: str) -> dict[str, Any]:
        begun.append(time.monotonic())
        return peer(self, row, name)

    monkeypatch.setattr(command.Timing, "peer", timed)
    _, verdict, text = judged(burns, tmp_path, peers="torch", rows="^tiny-3")
    assert {cell["status"] for cell in verdict["rows"][0]["cells"]} == {"ok"}, text
    assert float(beats.read_text().splitlines()[-1]) < min(begun)
    assert any("went on working after its last answer" in one for one in verdict["findings"]), text


def test_the_example_of_the_page_is_accepted(tmp_path: pathlib.Path) -> None:
    """docs/providers.md begins with it."""
    page = pathlib.Path(benchmarks.__file__).parents[1] / "docs/providers.md"
    file = tmp_path / "my_kernels.py"
    file.write_text(page.read_text().split("```python\n# my_kernels.py\n")[1].partition("```")[0])
    rows = {"rows": smallest_rows("softmax"), "peers": "none"}
    console = Console(file=io.StringIO(), width=200)
    assert judge.main(file, "softmax", None, judge.Options(seed=SEED, **rows), console) == 0, console.file


def test_every_option_is_one_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judge.Options(
        arch="sm_90a",
        seed=3,
        rows="^tiny",
        peers="torch",
        seconds=9.0,
        memory_mib=512,
        gpu_memory_mib=2048,
        least_served=0.7,
    )
    defaults = dataclasses.asdict(judge.Options())
    assert all(value != defaults[name] for name, value in dataclasses.asdict(asked).items())
    given: list[judge.Options] = []
    monkeypatch.setattr(judge, "main", lambda candidate, op, json_path, options: given.append(options) or 0)
    words = (
        "judge it.py --op softmax --arch sm_90a --seed 3 --rows ^tiny --peers torch --seconds 9 --memory 512 "
        "--gpu-memory 2048 --least-served 0.7"
    )
    result = CliRunner().invoke(cli.app, words.split())
    assert (result.exit_code, given) == (0, [asked]), result.output


@pytest.mark.rest
@pytest.mark.parametrize(("least", "status"), [(0.5, 0), (0.6, 1)])
def test_rows_that_are_refused_are_counted(least: float, status: int, tmp_path: pathlib.Path) -> None:
    refuses = Candidate(RIGHT, decorator=", objections=lambda p: ['is too wide'] if p.width == 4099 else []")
    found, verdict, text = judged(refuses, tmp_path, rows="^tiny", least_served=least)
    counts = {"trials": 14, "right": 14, "refused": 0, "rows": 2, "rows_timed": 1, "rows_refused": 1}
    assert (found, verdict["counts"], verdict["correct"]) == (status, counts, True), text
    assert "1 of 2 rows timed, 1 refused" in text
    assert verdict["findings"] == (
        ["it refused 1 of 2 timed rows; it must serve a share of 0.6 at least"] if status else []
    )


@pytest.mark.rest
@pytest.mark.parametrize("name", ["cute-sm90", "package-sm90"])
def test_a_candidate_without_its_gpu_is_told_of_the_emulator(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, verdict, text = judged(HONEST[name], tmp_path, arch=None)
    assert (status, verdict["findings"]) == (1, [command.NEEDS_GPU]), text
    assert "--arch sm_90a or --arch sm_100a" in command.NEEDS_GPU


@pytest.mark.parametrize(
    ("device", "error", "hint"),
    [
        ("cpu", "RuntimeError: Found no NVIDIA driver on your system.", True),
        ("cpu", "AssertionError: Torch not compiled with CUDA enabled", True),
        ("cpu", "RuntimeError: 0 active drivers ([]). There should only be one.", True),
        ("cpu", "ValueError: no", False),
        ("NVIDIA H200", "RuntimeError: CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_for_want_of_a_gpu(device: str, error: str, hint: bool) -> None:
    verdict = verdict_of("softmax", device)
    assert command.gpu_findings(verdict, [error]) == [command.NEEDS_GPU] * hint


def verdict_of(operator: str, device: str = "") -> command.Verdict:
    known: dict[str, Any] = {"network": "", "processes": "", "seed": 0, "limits": {}, "least_served": 0.5}
    return command.Verdict(candidate="", sha256="", operator=operator, device=device, **known)


class FakeStream:
    """Work that is done when the stream is waited for."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


@pytest.mark.parametrize("other", [False, True])
def test_only_the_current_stream_is_waited_for(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    current, aside, out = FakeStream(), FakeStream(), torch.zeros(1)
    monkeypatch.setattr(child, "CURRENT_STREAM", lambda: current)
    monkeypatch.setattr(child, "SYNCHRONIZE", FakeStream.synchronize)
    judged_one = child.Candidate(Watch(block=False))
    judged_one._on_gpu = True
    judged_one._launch = Launch(lambda layer: (aside if other else current).work.append(lambda: out.fill_(1)))
    judged_one.run([0])
    assert out.item() == (0 if other else 1)


def test_gpu_memory_of_a_process_has_a_limit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose other programs take 3 GiB more while a candidate answers, of which 1 GiB are the judge's tensors."""
    free, reserved = [70 << 30], [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved[0])
    run_instead(monkeypatch, "import time; time.sleep(60)")
    with process.Process(tmp_path, process.Limits(0.3, 1 << 40, 2 << 30)) as one:
        free[0], reserved[0] = 67 << 30, 1 << 30
        with pytest.raises(process.Stopped, match="did not answer"):
            one.ask("run", layers=[0])
    free[0], reserved[0] = 70 << 30, 0
    with process.Process(tmp_path, process.Limits(30.0, 1 << 40, (2 << 30) - 1)) as one:
        free[0], reserved[0] = 67 << 30, 1 << 30
        with pytest.raises(process.Stopped, match="has 2048 MiB of GPU memory; the limit is 2047"):
            one.ask("run", layers=[0])


def test_the_allocator_of_a_candidate_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    child.limit_gpu(20 << 30)
    child.limit_gpu(100 << 30)
    assert shares == [0.25, 1.0]


@pytest.mark.rest
def test_peers_are_timed_in_the_same_way(tmp_path: pathlib.Path) -> None:
    """A candidate that sleeps is as much slower, whatever its own clock says."""
    slow = Candidate(
        "waiting.wait(0.002)\n" + RIGHT,
        head="import threading, time\nwaiting = threading.Event()\ntime.perf_counter = lambda: 0.0",
    )
    status, verdict, text = judged(slow, tmp_path, peers="torch", rows="^tiny-3")
    assert status == 1
    assert verdict["findings"] == ["replaced time.perf_counter"]
    (row,) = verdict["rows"]
    times = {cell["provider"]: cell["median_us"] for cell in row["cells"]}
    assert set(times) == {"candidate", "dsl", "torch"}, text
    assert times["candidate"] > 2000 > 2 * times["torch"]
    assert verdict["ratio"] == pytest.approx(min(times["dsl"], times["torch"]) / times["candidate"])


@pytest.mark.parametrize("rows", [None, "^tiny"])
@pytest.mark.parametrize("operator", ["experts", "norm", "softmax"])
def test_timed_rows_are_of_the_operator_that_candidates_are_told_of(
    operator: str, rows: str | None, tmp_path: pathlib.Path
) -> None:
    """Experts in 8 bits have scales, of which no candidate knows."""
    verdict = verdict_of(operator)
    options, cpu = judge.Options(rows=rows), torch.device("cpu")
    timing = command.Timing(verdict, operator, options, tmp_path, cpu, process.Limits(1.0, 1))
    table = benchmarks.operators()[operator]
    known = {case.id: case.problem for case in table.cases() if case.group == SMALLEST}
    kept = {case.id for case in timing.cases(table)}
    assert kept == {name for name, problem in known.items() if getattr(problem, "weight", None) is None}
    assert (kept != set(known)) == (operator == "experts")


def test_shared_memory_keeps_views_and_sees_every_write(tmp_path: pathlib.Path) -> None:
    cache = torch.arange(24.0).view(4, 6)
    memory = shared.share(
        {"keys": cache[:, :3], "values": cache[:, 3:], "out": torch.zeros(4, 5)[:, :4]}, tmp_path, "a"
    )
    theirs = shared.opened(memory.payload)
    assert theirs["keys"].untyped_storage().data_ptr() == theirs["values"].untyped_storage().data_ptr()
    assert torch.equal(theirs["values"], cache[:, 3:])
    out, before = memory.thing["out"], memory.snapshot()
    theirs["out"].fill_(3)
    assert torch.equal(out, torch.full((4, 4), 3.0))
    assert memory.damage(before, memory.snapshot(), [out]) == []
    assert "to an input" in memory.damage(before, memory.snapshot(), [])[0]
    theirs["out"].as_strided((1,), (1,), theirs["out"].storage_offset() + 4).fill_(1.1)
    assert "beside an output, the first at byte 16" in memory.damage(before, memory.snapshot(), [out])[0]
    for step in (-1, 24):
        before = memory.snapshot()
        theirs["keys"].as_strided((1,), (1,), theirs["keys"].storage_offset() + step).fill_(1)
        assert f"to an input, the first at byte {4 * step}" in memory.damage(before, memory.snapshot(), [out])[0]
    assert torch.equal(memory.at(before)["keys"], cache[:, :3])
    memory.close()
    assert list(tmp_path.iterdir()) == []
