# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.clock`: the emulator's clock beside rows that a GPU was timed on.

`--chip B200` takes kernels of others and the figures that they published. `--configs` has configurations of one kernel
for some shapes, and says what the clock's choice costs.

Simulating takes minutes a row; `--keep FOLDER` keeps what the warps did, so that another run with other constants
(`--set hbm_efficiency=0.9`) takes seconds.
"""

import argparse
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import emulator
from dsl_backend.verify import CHECKS
from emulator.clock import machine, report
from emulator.clock.chips import CHIPS
from emulator.clock.constants import ChipClock
from emulator.clock.machine import ClockMachine, LaunchTime, Recorded

from ..command import operators as benchmark_operators
from . import softmax_configs
from .configs import Ranking, Timed, timed
from .measured import ROWS, UNTIMED, Measured
from .peers import FAULTY, OF_EXAMPLES, RUNS, Run
from .predictions import of_chip
from .problems import OURS, run_of, target_of
from .stand_in import EXAMPLES, PEERS, pretend

# Clusters that are simulated of the rows of `--predict`. Causal rows have CTAs of many lengths, and the sampler's work
# depends on logits.
SAMPLES = {"prefill": 8, "mla-prefill": 8, "decode": 2, "mla-decode": 3, "linear": 2, "softmax": 1, "sampling": 16}


def recorded(row: Measured, keep: Path | None, *, ours: bool | None = None) -> list[Recorded]:
    """What a row's launches did, simulated anew or kept from an earlier run.

    Args:
        ours: this package's kernels, for a row of others as well; where not given, the kernels that were timed.
    """
    ours = row.operator not in RUNS if ours is None else ours
    file = None if keep is None else keep / kept_name(row, ours)
    chip = CHIPS[row.chip]

    def prepared() -> Run:
        if not ours:
            pretend(f"{chip.arch}a", PEERS, chip.sms)
        return run_of(row.operator, row.row, chip, ours=ours)

    samples = row.samples if ours else row.samples or 1
    return simulated(prepared, chip, samples, file, faulty=not ours and row.operator in FAULTY)


def simulated(
    prepared: Callable[[], Run], chip: ChipClock, samples: int, file: Path | None, *, faulty: bool = False
) -> list[Recorded]:
    """What launches did, simulated anew or read from a file that an earlier call wrote.

    Args:
        prepared: returns what launches on the active device.
        samples: clusters of a grid that run.
        faulty: the emulator finds mistakes in them, and they are timed all the same.
    """
    if file is not None and file.exists():
        kept: list[Recorded] = pickle.loads(file.read_bytes())
        return kept
    arch = f"{chip.arch}a"
    clock = ClockMachine(arch, chip.sms, chip=chip.name, samples=samples, faulty=faulty, timed=False)
    with emulator.device(arch, sms=chip.sms, schedule="clock", machine=clock, keep_findings=faulty):
        prepared()()
    found = [light(one) for one in clock.recorded]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(found))
    return found


def kept_name(row: Measured, ours: bool | None) -> str:
    beside = "-dsl" if ours and row.operator in RUNS else ""
    # Hopper's chips run the same kernels in the same way. Blackwell's differ in SMs, or in what kernels choose.
    chip = "" if CHIPS[row.chip].arch == "sm_90" else f"-{row.chip}"
    return f"{row.operator}-{row.row}{chip}{beside}.pickle"


def light(one: Recorded) -> Recorded:
    """Without the tensors and the text of the kernel."""
    regions = tuple(replace(region, owner=None) for region in one.launch.regions)
    return replace(one, launch=replace(one.launch, ptx="", regions=regions))


def bound_us(times: Sequence[LaunchTime]) -> float:
    """The longest unit of each launch, at public rates and without latencies: what the profile's model says."""
    total = 0.0
    for one in times:
        busiest = {name: part * one.cycles for name, part in report.utilisation(one).items()}
        busiest["HBM"] *= one.chip["hbm_efficiency"]
        total += one.chip.microseconds(max(busiest.values()))
    return total


def clocked(one: Sequence[Recorded], chip: ChipClock) -> list[LaunchTime]:
    return machine.stream_of(one, chip)


def lines(rows: Sequence[Measured], keep: Path | None, chip: ChipClock) -> Iterator[str]:
    yield f"| row | {chip.name} us | clock us | error | longest unit us | error | bound by |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    errors: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for row in rows:
        started = time.monotonic()
        times = clocked(recorded(row, keep), chip)
        print(f"{row.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        ours, unit = sum(one.microseconds for one in times), bound_us(times)
        error, other = ours / row.microseconds - 1, unit / row.microseconds - 1
        errors[row.fitted].append((error, other))
        what = report.bound(max(times, key=lambda one: one.microseconds)).partition(",")[0].partition(":")[0]
        name = f"{row.name} (fitted)" if row.fitted else row.name
        yield f"| {name} | {row.microseconds} | {ours:.1f} | {error:+.0%} | {unit:.1f} | {other:+.0%} | {what} |"
    for fitted, group in ((False, "held out"), (True, "fitted")):
        if found := errors[fitted]:
            yield f"| mean, worst of {len(found)} {group} | | | {spread(found, 0)} | | {spread(found, 1)} | |"


def beside(rows: Sequence[Measured], keep: Path | None, chip: ChipClock) -> Iterator[str]:
    """This package's kernels and others' on the same clock, for others' rows."""
    yield f"| row, {chip.name} by the clock | theirs us | dsl us | dsl over theirs | dsl bound by |"
    yield "|---|---:|---:|---:|---|"
    # Ours first: afterwards the process believes that it has a GPU.
    pairs = [[clocked(recorded(row, keep, ours=which), chip) for row in rows] for which in (True, False)]
    for row, ours, theirs in zip(rows, *pairs, strict=True):
        mine, other = (sum(one.microseconds for one in times) for times in (ours, theirs))
        what = report.bound(max(ours, key=lambda one: one.microseconds)).partition(",")[0].partition(":")[0]
        yield f"| {row.name} | {other:.1f} | {mine:.1f} | {mine / other:.2f} | {what} |"


def in_a_row(launched: Sequence[Recorded], times: int, chip: ChipClock) -> float:
    """Microseconds of launches that follow each other so many times: the mean of the second half of them.

    Three times are enough where the last clusters wait for the first ones to end: each launch finds the same then.
    """
    every = clocked([*launched] * min(times, 3), chip)
    if any(one.layout.clusters == one.layout.first_turn for one in every):
        every = clocked([*launched] * times, chip)
    counted = (len(every) // len(launched) + 1) // 2
    return sum(one.microseconds for one in every[-counted * len(launched) :]) / counted


def configs(pattern: str, keep: Path | None, chip: ChipClock, *, kept: bool) -> Iterator[str]:
    """Whether the clock chooses the configuration that the chip found fastest, for shapes whose names match."""
    target = target_of(chip)
    yield f"| shape | configurations | {chip.name}'s best | us | the clock's | its us | costs | ranks | error |"
    yield "|---|---:|---|---:|---|---:|---:|---:|---:|"
    found: list[Ranking] = []
    everything: list[Timed] = [*timed(), *softmax_configs.timed()]
    for row, group in groupby(everything, key=lambda one: one.row):
        every = [one for one in group if not kept or (keep is not None and (keep / one.file).exists())]
        if not every or not re.search(pattern, row):
            continue
        times = []
        for one in every:
            started = time.monotonic()
            file = None if keep is None else keep / one.file
            launched = simulated(partial(one.prepared, target), chip, one.samples(target), file)
            times.append(in_a_row(launched, one.in_a_row, chip))
            told = f"{one.microseconds:8.1f} us, {times[-1]:8.1f} by the clock"
            print(f"{row:28} {one.name:32} {told}, {time.monotonic() - started:.0f} s", file=sys.stderr)
        chip_times, spilled = [one.microseconds for one in every], [one.spilled for one in every]
        found.append(Ranking(row, [one.name for one in every], chip_times, times, spilled))
        yield str(found[-1])
    if found:
        costs = [one.cost for one in found]
        yield f"| mean, worst of {len(found)} | | | | | | {sum(costs) / len(costs):.1%}, {max(costs):.1%} | | |"


def verified() -> Iterator[Measured]:
    """The rows that `dsl-backend verify` times, of operators that the clock knows."""
    operators = dict(benchmark_operators())
    for benchmark in (one for check in CHECKS.values() for one in check.benchmarks if one.op in OURS):
        for case in operators[benchmark.op].cases():
            if re.search(benchmark.rows, case.id):
                yield Measured(benchmark.op, case.id, 0.0, SAMPLES[benchmark.op], source="nobody")


def predictions(rows: Sequence[Measured], keep: Path | None, chip: ChipClock) -> Iterator[str]:
    """Lines of predictions.jsonl."""
    for row in rows:
        started = time.monotonic()
        try:
            times = clocked(recorded(replace(row, chip=chip.name), keep), chip)
        except emulator.EmulatorError as error:
            print(f"{row.name}: {error}", file=sys.stderr)
            continue
        print(f"{row.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        us = sum(one.microseconds for one in times)
        yield of_chip(row.operator, row.row, us, chip.name, chip.arch).line()


def spread(errors: Sequence[tuple[float, float]], which: int) -> str:
    found = [abs(one[which]) for one in errors]
    return f"{sum(found) / len(found):.0%}, {max(found):.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clock", description=__doc__)
    parser.add_argument("--chip", default="H200", choices=tuple(CHIPS), help="that took the times")
    parser.add_argument("--rows", default="", metavar="REGEX", help="which rows, by operator and name (default: all)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for what the warps did")
    parser.add_argument("--kept", action="store_true", help="only the rows that are in the folder of --keep")
    parser.add_argument("--beside", action="store_true", help="this package's kernels beside others' on the same clock")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another constant of the chip")
    parser.add_argument("--configs", action="store_true", help="configurations of one kernel for some shapes")
    parser.add_argument("--predict", action="store_true", help="lines of predictions.jsonl, for `dsl-backend verify`")
    asked = parser.parse_args()
    values = {name: float(value) for name, value in (one.split("=") for one in asked.set)}
    chip = CHIPS[asked.chip].with_values(**values)
    if asked.predict:
        for line in predictions([row for row in verified() if re.search(asked.rows, row.name)], asked.keep, chip):
            print(line, flush=True)
        return 0
    if asked.configs:
        for line in configs(asked.rows, asked.keep, chip, kept=asked.kept):
            print(line, flush=True)
        return 0
    every = ROWS + (UNTIMED if asked.beside else ())
    rows = [row for row in every if row.chip == asked.chip and re.search(asked.rows, row.name)]
    if asked.kept:
        wanted = (True, False) if asked.beside else (None,)
        rows = [row for row in rows if all((asked.keep / kept_name(row, ours)).exists() for ours in wanted)]
    if not asked.kept and not (PEERS / EXAMPLES).exists():
        left_out = [row for row in rows if row.operator in OF_EXAMPLES]
        rows = [row for row in rows if row not in left_out]
        for row in left_out:
            print(f"{row.name} is left out: {PEERS / EXAMPLES} is missing", file=sys.stderr)
    table = beside if asked.beside else lines
    for line in table(rows, asked.keep, chip):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
