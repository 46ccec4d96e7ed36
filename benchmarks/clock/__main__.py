# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.clock`: the emulator's clock beside rows that a GPU was timed on.

`--chip B200` takes kernels of others and the figures that they published.

Simulating takes minutes a row; `--keep FOLDER` keeps what the warps did, so that another run with other constants
(`--set hbm_efficiency=0.9`) takes seconds.
"""

import argparse
import pickle
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import emulator
from emulator.clock import machine, report
from emulator.clock.chips import CHIPS
from emulator.clock.constants import ChipClock
from emulator.clock.machine import ClockMachine, LaunchTime, Recorded

from .measured import ROWS, UNTIMED, Measured
from .peers import RUNS
from .problems import run_of
from .stand_in import PEERS, pretend


def recorded(row: Measured, keep: Path | None, *, ours: bool | None = None) -> list[Recorded]:
    """What a row's launches did, simulated anew or kept from an earlier run.

    Args:
        ours: this package's kernels, for a row of others as well; where not given, the kernels that were timed.
    """
    ours = row.operator not in RUNS if ours is None else ours
    file = None if keep is None else keep / kept_name(row, ours)
    if file is not None and file.exists():
        kept: list[Recorded] = pickle.loads(file.read_bytes())
        return kept
    chip = CHIPS[row.chip]
    arch = f"{chip.arch}a"
    if not ours:
        pretend(arch, PEERS, chip.sms)
    clock = ClockMachine(arch, chip.sms, chip=row.chip, samples=row.samples)
    with emulator.device(arch, sms=chip.sms, schedule="clock", machine=clock):
        run_of(row.operator, row.row, chip, ours=ours)()
    found = [light(one) for one in clock.recorded]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(found))
    return found


def kept_name(row: Measured, ours: bool | None) -> str:
    beside = "-dsl" if ours and row.operator in RUNS else ""
    return f"{row.operator}-{row.row}{beside}.pickle"


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
    return [machine.time_of(launch, chip) for launch in one]


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


def spread(errors: Sequence[tuple[float, float]], which: int) -> str:
    found = [abs(one[which]) for one in errors]
    return f"{sum(found) / len(found):.0%}, {max(found):.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clock", description=__doc__)
    parser.add_argument(
        "--chip", default="H200", choices=sorted({row.chip for row in ROWS}), help="that took the times"
    )
    parser.add_argument("--rows", default="", metavar="REGEX", help="which rows, by operator and name (default: all)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for what the warps did")
    parser.add_argument("--kept", action="store_true", help="only the rows that are in the folder of --keep")
    parser.add_argument("--beside", action="store_true", help="this package's kernels beside others' on the same clock")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another constant of the chip")
    asked = parser.parse_args()
    every = ROWS + (UNTIMED if asked.beside else ())
    rows = [row for row in every if row.chip == asked.chip and re.search(asked.rows, row.name)]
    if asked.kept:
        wanted = (True, False) if asked.beside else (None,)
        rows = [row for row in rows if all((asked.keep / kept_name(row, ours)).exists() for ours in wanted)]
    values = {name: float(value) for name, value in (one.split("=") for one in asked.set)}
    table = beside if asked.beside else lines
    for line in table(rows, asked.keep, CHIPS[asked.chip].with_values(**values)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
