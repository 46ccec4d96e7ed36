# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.clock.on_chip`: times kernels of others on this machine's Hopper GPU.

The rows are those of measured.ON_HOPPER. Each is compiled and timed in a process of its own, so that one that fails
costs no other. Compilers run side by side, and timings one by one. Launches are replayed in a CUDA graph over operands
that L2 does not hold. The lines go to docs/data/hopper-peers.jsonl, which the clock is compared with.

`--mutants` times this package's kernels with changes that make them slower (kernels/mutants.py), beside the clock's
times of the same launches.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from dsl_backend.providers import Launch
from emulator.clock.chips import CHIPS as CLOCKS

from .. import timing
from .measured import ON_HOPPER
from .peers import OF_EXAMPLES, RUNS, Run
from .stand_in import EXAMPLES, PEERS, ready

CHIPS = ("H100", "H200")
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels")
LEAST_SAMPLES = 5
IN_A_ROW = 20  # launches of a mutant on the clock, of which the second half counts
MUTANT = "mutant"  # the operator of the rows of kernels/mutants.py
NOTHING = torch.empty(0)


def chip_of(device: str) -> str:
    """The chip of a GPU's name.

    Raises:
        KeyError: it is none of Hopper's.
    """
    found = [chip for chip in CHIPS if re.search(rf"\b{chip}\b", device)]
    if len(found) != 1:
        raise KeyError(device)
    return found[0]


def timed(operator: str, row: str, seconds: float, device: torch.device) -> dict[str, Any]:
    """A row's time on a device."""
    prepared = maker(operator)
    with device:
        before = allocated(device)
        runs: list[Run] = [prepared(row)]
        layers = timing.layers_needed(allocated(device) - before, timing.l2_bytes(device))
        runs += [prepared(row) for _ in range(layers - 1)]
        for run in runs:
            run()
        timing.synchronize(device)
        with timing.alone():
            samples = sampled(timing.make_timer(Launch(partial(launch, runs)), layers, device), seconds)
    found = timing.summarize(samples)
    times = {"us": found.median_us, "p10_us": found.p10_us, "p90_us": found.p90_us}
    rounded = {name: round(us, 2) for name, us in times.items()}
    return {"operator": operator, "row": row, **rounded, "layers": layers, "samples": found.samples}


def maker(operator: str) -> Callable[[str], Run]:
    """What prepares an operator's rows."""
    if operator != MUTANT:
        return RUNS[operator]
    from .kernels.mutants import run_of  # compiles with CuTe DSL, which rows of others need not

    return run_of


def clocked(row: str, chip: str) -> dict[str, Any]:
    """A mutant's row by the clock of a chip, in launches one behind the other as they are timed."""
    from .__main__ import in_a_row, simulated

    one = CLOCKS[chip]
    launched = simulated(partial(maker(MUTANT), row), one, 1, None)
    return {"operator": MUTANT, "row": row, "clock_us": round(in_a_row(launched, IN_A_ROW, one), 2)}


def launch(runs: Sequence[Run], layer: int) -> torch.Tensor:
    """Launches a layer. The timer wants a result, which the packages' functions keep to themselves."""
    runs[layer]()
    return NOTHING


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def sampled(timer: timing.Timer, seconds: float) -> list[float]:
    """Samples of that many seconds, after as many that are not counted: the chip's clock rate settles in them."""
    samples: list[float] = []
    for _ in range(2):
        samples, ends = [], time.monotonic() + seconds
        while len(samples) < LEAST_SAMPLES or time.monotonic() < ends:
            samples.append(timer.sample())
    return samples


def environment() -> dict[str, Any]:
    def version_of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown"

    device = torch.cuda.get_device_name()
    return {
        "kind": "environment",
        "date": datetime.now(UTC).date().isoformat(),
        "chip": chip_of(device),
        "device": device,
        "versions": {package: version_of(package) for package in PACKAGES},
        "unit": "us",
    }


def attempt(operator: str, row: str, options: argparse.Namespace, clock: str = "") -> tuple[str, str]:
    """A row's line of JSON, or none and the reason.

    Args:
        clock: the chip whose clock takes the time; else this machine's GPU does.
    """
    name = f"{operator} {row}"
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.on_chip", "--one", name]
    try:
        done = subprocess.run(
            [*command, "--seconds", str(options.seconds), *(["--clock", clock] if clock else [])],
            capture_output=True,
            text=True,
            timeout=options.limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"{name}: not done in {options.limit_seconds} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return "", f"{name}: failed with status {done.returncode}: {said[:300]}"
    return lines[-1], ""


def every(rows: list[tuple[str, str]], options: argparse.Namespace) -> Iterator[str]:
    """Lines of JSON as they come; what fails is told on stderr."""
    yield json.dumps(environment())
    with ThreadPoolExecutor(options.processes) as pool:
        for task in as_completed([pool.submit(attempt, operator, row, options) for operator, row in rows]):
            line, failure = task.result()
            if failure:
                print(failure, file=sys.stderr, flush=True)
            else:
                yield line


def mutants(rows: Sequence[str], options: argparse.Namespace) -> Iterator[str]:
    """Lines of JSON: rows of mutants on this GPU and by its clock, then each mutant beside its usual kernel."""
    from .kernels.mutants import MUTANTS

    about = environment()
    yield json.dumps(about)
    times: dict[str, dict[str, float]] = {"us": {}, "clock_us": {}}
    with ThreadPoolExecutor(options.processes) as pool:
        # The GPU's first: where time is short, the clock's can be had elsewhere.
        tasks = [pool.submit(attempt, MUTANT, row, options, clock) for clock in ("", about["chip"]) for row in rows]
        for task in as_completed(tasks):
            line, failure = task.result()
            if failure:
                print(failure, file=sys.stderr, flush=True)
                continue
            found = json.loads(line)
            for which in times.keys() & found.keys():
                times[which][found["row"]] = found[which]
            yield line
    for one in MUTANTS:
        if one.row in rows:
            ratios = {f"{which}_ratio": ratio(times[which], one.row, one.usual) for which in times}
            yield json.dumps({"kind": MUTANT, "row": one.row, **ratios, "usual": one.usual, "change": one.change})


def ratio(us: Mapping[str, float], row: str, usual: str) -> float | None:
    """A row's time over another's; None where one has none."""
    return round(us[row] / us[usual], 3) if row in us and usual in us else None


def rows_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The rows that are asked for, by operator and name."""
    if options.mutants:
        from .kernels import mutants as of_mutants

        every_row = [(MUTANT, row) for row in of_mutants.RUNS]
    else:
        there = (PEERS / EXAMPLES).exists()
        every_row = [(operator, row) for operator, row, _ in ON_HOPPER if there or operator not in OF_EXAMPLES]
    return [(operator, row) for operator, row in every_row if re.search(options.rows, f"{operator} {row}")]


def one_row(options: argparse.Namespace) -> dict[str, Any]:
    """The time of the row of `--one`."""
    operator, row = options.one.split(" ")
    if options.clock:
        return {"chip": options.clock, **clocked(row, options.clock)}
    found = timed(operator, row, options.seconds, torch.device("cuda"))
    return {"chip": chip_of(torch.cuda.get_device_name()), **found}


def main() -> int:
    """Returns 1 if a row has no time, 2 if the arguments or the GPU are missing."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.on_chip", description=__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="which rows, by operator and name (default: all)")
    parser.add_argument(
        "--mutants", action="store_true", help="this package's kernels, made slower, in place of others"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="of samples of a row (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=180, help="for a row's process (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="rows at once (default: one a core)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines there as well")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--clock", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ready(PEERS)
    # Outputs are not filled first: that would be timed too.
    torch.use_deterministic_algorithms(False)
    if options.one:
        print(json.dumps(one_row(options)))
        return 0
    rows = rows_of(options)
    if not rows:
        print(f"no row matches {options.rows!r}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing can be timed", file=sys.stderr)
        return 2
    timed_rows = 0
    for line in mutants([row for _, row in rows], options) if options.mutants else every(rows, options):
        timed_rows += '"us": ' in line
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(line + "\n")
    return int(timed_rows < len(rows))


if __name__ == "__main__":
    sys.exit(main())
