# SPDX-License-Identifier: Apache-2.0
"""`python -m emulator KERNEL.py::case`: run one case of a file on an emulated device.

A case is a function of no arguments. It is called with the device active, and compiles, calls and checks as it likes.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from emulator.errors import EmulatorError, HostError
from emulator.host.chips import CHIPS
from emulator.host.device import DEFAULT_SMS, SCHEDULES, device


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    made.add_argument("case", metavar="FILE::CASE", help="a Python file, and a function of no arguments in it")
    made.add_argument("--arch", choices=tuple(CHIPS), default="sm_100a")
    made.add_argument("--sms", type=int, help=f"that host code sees (default: {DEFAULT_SMS}; with --clock the chip's)")
    made.add_argument(
        "--schedule", choices=SCHEDULES, default="lazy", help="of asynchronous work (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, default=0, help="of the random schedule")
    made.add_argument("--profile", action="store_true", help="show what the kernels did, and the cycle model")
    made.add_argument("--tiles", type=int, help="that the kernels made in all: the profile is then per tile")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the profile there")
    made.add_argument("--clock", action="store_true", help="say how long a chip takes (docs/emulator-clock.md)")
    made.add_argument("--chip", help="of --clock: H100, H200, B200, GB200, B300 or GB300; by default the arch's")
    made.add_argument(
        "--samples", type=int, help="clusters of a grid that --clock simulates (default: 3); 0 for all of them"
    )
    made.add_argument("--trace", type=Path, metavar="FILE", help="with --clock: write a timeline for Perfetto there")
    made.add_argument(
        "--picture", type=Path, metavar="FILE", help="with --clock: draw the longest launch there, as SVG"
    )
    made.add_argument("--window", type=window, metavar="FIRST:LAST", help="of --picture, in microseconds")
    return made


def window(text: str) -> tuple[float, float]:
    """FIRST:LAST as two numbers."""
    first, _, last = text.partition(":")
    return float(first), float(last)


def load(case: str) -> Callable[[], Any]:
    """The function that FILE::CASE names."""
    file, separator, name = case.rpartition("::")
    if not separator or not name.isidentifier():
        raise HostError(f"{case!r} is not FILE::CASE")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise HostError(f"there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    # CuTe DSL reads the sources of functions by their modules, and the file may import its neighbours.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise HostError(f"{file} has no function {name}")
    function: Callable[[], Any] = found
    return function


def show_profile(profile: Any, tiles: int | None, file: Path | None) -> None:
    """Print the summary of a profile, or write it to a file."""
    from emulator.profile import summary

    if profile is None:
        raise HostError("this machine keeps no profile")
    if tiles is not None and tiles < 1:
        raise HostError(f"{tiles} tiles: a kernel makes at least one")
    made = summary(profile, tiles=tiles)
    if file is not None:
        file.write_text(made.to_json())
    else:
        print(made.table())


def clock_machine(asked: argparse.Namespace) -> Any:
    """The machine of --clock; None without it."""
    if not asked.clock:
        if asked.chip or asked.trace or asked.picture or asked.samples is not None:
            raise HostError("--chip, --samples, --trace and --picture are of --clock")
        return None
    from emulator.clock.chips import chip_of
    from emulator.clock.machine import SAMPLES, ClockMachine

    sms = asked.sms or chip_of(asked.arch, asked.chip).sms
    samples = SAMPLES if asked.samples is None else asked.samples
    return ClockMachine(asked.arch, sms, chip=asked.chip, samples=samples)


def show_times(machine: Any, asked: argparse.Namespace) -> None:
    """Print what the clock found, and write the timeline and the picture."""
    from emulator.clock import picture, report, timeline

    print(report.text(machine.times))
    if asked.trace is not None:
        timeline.write(machine.times, asked.trace)
    if asked.picture is not None:
        if not machine.times:
            raise HostError("there is no launch to draw")
        picture.write(max(machine.times, key=lambda one: one.cycles), asked.picture, asked.window)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        machine = clock_machine(asked)
        sms = asked.sms or (machine.sms if machine else DEFAULT_SMS)
        schedule = "clock" if machine else asked.schedule
        with device(
            asked.arch, sms=sms, schedule=schedule, seed=asked.seed, keep_findings=True, machine=machine
        ) as emulated:
            # Inside, so that what the file compiles when it is imported is compiled for the device.
            load(asked.case)()
        if asked.profile or asked.json:
            show_profile(emulated.profile, asked.tiles, asked.json)
        if machine:
            show_times(machine, asked)
    except EmulatorError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"{asked.case}: {emulated.launches} launches on {emulated.arch}, {len(emulated.findings)} findings")
    for finding in emulated.findings:
        print(finding)
    return 1 if emulated.findings else 0


if __name__ == "__main__":
    sys.exit(main())
