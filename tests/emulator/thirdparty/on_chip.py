# SPDX-License-Identifier: Apache-2.0
"""Runs others' kernels on this machine's GPU of SM90, with the emulator's inputs, and keeps its answers.

    python tests/emulator/thirdparty/on_chip.py OUT               on a chip
    python tests/emulator/thirdparty/on_chip.py OUT --emulate     the same file from the emulator, to try the rest

OUT/golden_sm90.npz goes to tests/emulator/golden/thirdparty/; OUT/golden_sm90.txt says what happened. It needs torch
for CUDA, CuTe DSL and the kernels' packages in .peers (or PEERS), and no network. Each case is a process of its own,
which compiles and launches; as many run at once as there are cores. A case that fails or takes too long is told and
left out, and the others go on.
"""

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT)]
# A process has one core.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import torch  # noqa: E402  after the number of threads
from cases_cutlass_mla import CUTLASS  # noqa: E402  with those of the other files
from cases_flash import FLASH  # noqa: E402
from cases_quack import QUACK  # noqa: E402
from peer_answers import FILE, Answer, Answers, Output  # noqa: E402
from peer_budgets import judge  # noqa: E402
from peer_cases import SM90, Case  # noqa: E402

from benchmarks.clock.stand_in import PEERS, SMS, pretend, ready  # noqa: E402

CASES: dict[str, Case] = {name: case for name, case in {**FLASH, **QUACK, **CUTLASS}.items() if SM90 in case.archs}
CALLS = 3  # of each case
LIMIT_S, TOTAL_S = 150, 225
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels")


class WrongValues(Exception):
    """The device's results are not what float64 gives."""


@contextlib.contextmanager
def device(emulate: bool) -> Iterator[str]:
    """The device that tensors go to."""
    if not emulate:
        ready(PEERS)
        yield "cuda"
        return
    pretend(SM90, PEERS)
    import emulator

    with emulator.device(SM90, sms=SMS, schedule="random", seed=2, keep_findings=True):
        yield "cpu"


def source(emulate: bool, commit: str) -> dict[str, str]:
    return {
        "gpu": "emulator" if emulate else f"{torch.cuda.get_device_name()}, CUDA driver {driver()}",
        **{package: version_of(package) for package in PACKAGES},
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
    }


def version_of(package: str) -> str:
    """The answers are worth keeping where a package has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def driver() -> int:
    found = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def answer(case: Case, where: str) -> Answer:
    """Raises WrongValues where a result is beyond the case's budget: such an answer would be no yardstick."""
    torch.manual_seed(0)
    problem = case.make(SM90)
    calls = []
    for _ in range(CALLS):
        outputs = {name: x.cpu() for name, x in problem.run(where).items()}
        calls.append({name: Output.of(x) for name, x in outputs.items()})
        for name, x in outputs.items():
            verdict = judge(x, problem.expected[name])
            if verdict.wrong:
                raise WrongValues(f"{name}: {verdict}")
    digests = [{name: one.digest for name, one in call.items()} for call in calls]
    return Answer(problem.digest(), calls[0], all(one == digests[0] for one in digests))


def work(name: str, path: Path, emulate: bool, commit: str) -> None:
    """Answer one case, in a process of its own."""
    with device(emulate) as where:
        one = answer(CASES[name], where)
        Answers(source(emulate, commit), {name: one}).save(path)


def attempt(name: str, folder: Path, options: argparse.Namespace, ends: float) -> tuple[Answers, str]:
    """Start a process for a case; returns its answer, if there is one, and what there is to say."""
    started = time.monotonic()
    path, log = folder / f"{name}.npz", folder / f"{name}.txt"
    command = [sys.executable, "-W", "ignore", __file__, str(path), "--case", name, "--commit", options.commit]
    limit = min(LIMIT_S, ends - started)
    if limit <= 0:
        return Answers(), f"{name}: NOT RUN: {TOTAL_S} s are over"
    try:
        with log.open("wb") as said:
            ended = subprocess.run(
                command + ["--emulate"] * options.emulate, stdout=said, stderr=said, timeout=limit, check=False
            )
        status = f"status {ended.returncode}" if ended.returncode else ""
    except subprocess.TimeoutExpired:
        status = f"not done in {limit:.0f} s"
    if status:
        lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return Answers(), "\n".join([f"{name}: FAILED: {status}: {lines[-1][:400]}", *(f"    {x}" for x in lines[-8:])])
    found = Answers.load(path)
    steady = "" if found.cases[name].steady else ", CALLS DIFFER"
    return found, f"{name}: {time.monotonic() - started:.1f} s{steady}"


def head() -> str:
    """The commit of this checkout; "unknown" outside of one."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def every(names: list[str], options: argparse.Namespace) -> None:
    started = time.monotonic()
    ends = started + TOTAL_S * (20 if options.emulate else 1)
    answers, lines = Answers(), []

    def say(line: str) -> None:
        lines.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        tasks = [pool.submit(attempt, name, Path(folder), options, ends) for name in names]
        for task in as_completed(tasks):
            found, line = task.result()
            answers.source = found.source or answers.source
            answers.cases.update(found.cases)
            say(line)
    answers.cases = {name: answers.cases[name] for name in names if name in answers.cases}
    path = options.out / FILE.name
    answers.save(path)
    say(str(answers.source))
    say(f"{len(answers.cases)} of {len(names)} cases, {path.stat().st_size} bytes, {time.monotonic() - started:.0f} s")
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    if len(answers.cases) < len(names):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help=f"folder for {FILE.name} and {FILE.stem}.txt")
    parser.add_argument("--emulate", action="store_true", help="ask the emulator, not a chip")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="cases, not all of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="cases at once")
    parser.add_argument("--commit", default=head(), help="what this checkout is of, where git does not tell")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        work(options.case, options.out, options.emulate, options.commit)
    else:
        every(options.only or list(CASES), options)


if __name__ == "__main__":
    main()
