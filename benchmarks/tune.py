# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend tune`: finds configurations that are faster than the heuristics' on this GPU, and writes them to a file.

A class of problems has one configuration and is represented by one or several rows. A candidate wins if its geometric
mean over the rows is better than the heuristic's by more than the scatter of the times, and if no row is slower. The
fastest of many is partly fast by chance: it is kept if it wins a second measurement too, against the heuristic's alone.
"""

import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import dsl_backend
import torch
from dsl_backend.errors import InvalidInput
from dsl_backend.linear.tuned import Unfused
from dsl_backend.runtime import family as families
from dsl_backend.runtime import model as models
from dsl_backend.runtime import precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.tuned import TuningRecord
from rich import box
from rich.console import Console
from rich.table import Table

from . import facts, sweep, timing
from .held_out import compile_ahead
from .runner import DeviceLostError
from .sweep import Class, Contest

# A smaller gain is never kept, even if the times scatter less.
LEAST_GAIN = 0.02
# That launch others' kernels beforehand: each has memory of the GPU.
PROCESSES = 16


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A configuration compared with a baseline, by the geometric means of their microseconds.

    Attributes:
        us: the configuration's microseconds.
        baseline_us: the baseline's microseconds.
        wins: whether it is faster by more than the scatter, and slower in no row.
    """

    config: Any
    us: float
    baseline_us: float
    wins: bool

    @property
    def gain(self) -> float:
        return self.baseline_us / self.us - 1


Rows = Sequence[Mapping[Any, timing.Summary]]

Classes = Callable[[Target, torch.device, ModelShape | None], Sequence[Class]]


def tuners() -> dict[str, Classes]:
    """Family of records -> the function that lists its classes of problems."""
    names = [one.family for family in families.load_all() for one in family.tuned_configs]
    return {name: importlib.import_module(f".{name.replace('-', '_')}.tune", __package__).classes for name in names}


def mean_us(rows: Rows, config: Any) -> float:
    """The geometric mean of a configuration's median times."""
    return math.exp(sum(math.log(row[config].median_us) for row in rows) / len(rows))


def scatter(*summaries: timing.Summary) -> float:
    """The relative uncertainty of a time: half of the range p10 to p90 divided by the median, of the worst summary."""
    return max(LEAST_GAIN, *((one.p90_us - one.p10_us) / (2 * one.median_us) for one in summaries))


def verdict(rows: Rows, config: Any, baseline: Any) -> Verdict:
    """Compares a configuration that ran in all rows with a baseline."""
    gains = [row[baseline].median_us / row[config].median_us - 1 for row in rows]
    noise = [scatter(row[baseline], row[config]) for row in rows]
    us, baseline_us = mean_us(rows, config), mean_us(rows, baseline)
    wins = baseline_us / us - 1 > sum(noise) / len(noise) and all(
        gain > -off for gain, off in zip(gains, noise, strict=True)
    )
    return Verdict(config, us, baseline_us, wins)


def best(rows: Rows, configs: Sequence[Any], baseline: Any) -> Verdict | None:
    """The fastest configuration that wins, or the fastest of all if none wins; None if none ran in every row."""
    ran = [verdict(rows, config, baseline) for config in configs if all(config in row for row in rows)]
    return min(ran, key=lambda one: (not one.wins, one.us), default=None)


def verdicts(rows: Rows, configs: Sequence[Any]) -> list[Verdict]:
    """The best kernel configuration compared with the heuristic's (the first); then the unfused one with the winner."""
    default = configs[0]
    ours = best(rows, [config for config in configs[1:] if not isinstance(config, Unfused)], default)
    leading = ours.config if ours is not None and ours.wins else default
    theirs = best(rows, [config for config in configs if isinstance(config, Unfused)], leading)
    return [one for one in (ours, theirs) if one is not None]


def changes(config: Any, default: Any) -> str:
    """The fields in which a configuration differs from the heuristic's; all fields if it is of another type."""
    fields = dataclasses.asdict(config)
    if type(config) is type(default):
        fields = {name: value for name, value in fields.items() if value != getattr(default, name)}
    text = ", ".join(f"{name}={value}" for name, value in fields.items())
    return text if type(config) is type(default) else f"{type(config).__name__}({text})"


def times_of(
    contests: Sequence[Contest], seconds: float, make_timer: sweep.MakeTimer, console: Console
) -> list[dict[Any, timing.Summary]]:
    """The times of the configurations in each row.

    Raises:
        InvalidInput: the heuristic's configuration does not run, or its result is wrong.
    """
    rows: list[dict[Any, timing.Summary]] = []
    for contest in contests:
        try:
            found = sweep.timed(contest, seconds, make_timer)
        except DeviceLostError:
            raise
        except Exception as error:  # compilers may raise anything
            raise InvalidInput(f"{contest.name}: the heuristic's {contest.configs[0]}: {error}") from None
        for failed in found:
            if failed.summary is None:
                console.print(f"{contest.name}: {failed.config}: {failed.error}", markup=False, soft_wrap=True)
        rows.append({timed.config: timed.summary for timed in found if timed.summary is not None})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def confirmed(found: Sequence[Verdict], rows: Rows, default: Any) -> list[Verdict]:
    """The verdicts, where one won that of a second measurement.

    Args:
        found: of `verdicts`, by the first measurement.
    """
    leading, again = default, []
    for first in found:
        one = dataclasses.replace(first, wins=False)
        if first.wins and all(first.config in row for row in rows):
            one = verdict(rows, first.config, leading)
        if one.wins and not isinstance(one.config, Unfused):
            leading = one.config
        again.append(one)
    return again


def write_times(one: Class, rows: Rows, file: TextIO) -> None:
    """The median times of a class's configurations, one JSON object on each line, as sweeps write them."""
    for contest, row in zip(one.contests, rows, strict=True):
        for config, summary in row.items():
            line = sweep.line(contest, config, summary.median_us)
            file.write(json.dumps({**line, "row": f"{one.name} {contest.name}"}) + "\n")
    file.flush()


def measure(
    one: Class, seconds: float, make_timer: sweep.MakeTimer, console: Console, times: TextIO | None = None
) -> list[Verdict]:
    """Times a class's configurations in all of its rows, and those that win a second time.

    Args:
        times: a file for the first measurement, one JSON object on each line.

    Raises:
        InvalidInput: as `times_of`.
    """
    rows = times_of(one.contests, seconds, make_timer, console)
    if times is not None:
        write_times(one, rows, times)
    default = one.contests[0].configs[0]
    found = verdicts(rows, one.contests[0].configs)
    winners = [one.config for one in found if one.wins]
    if not winners:
        return found
    again = [dataclasses.replace(contest, configs=(default, *winners)) for contest in one.contests]
    return confirmed(found, times_of(again, seconds, make_timer, console), default)


def entries(one: Class, found: Sequence[Verdict], shared: Mapping[str, Any]) -> list[TuningRecord[Any]]:
    """The tuning records of a class.

    Args:
        shared: the fields of `TuningRecord` that all records of a run share.
    """
    rows = tuple(contest.name for contest in one.contests)
    return [
        one.tuned_configs.record(
            one.problem,
            verdict.config,
            us=round(verdict.us, 3),
            default_us=round(verdict.baseline_us, 3),
            rows=rows,
            **shared,
        )
        for verdict in found
        if verdict.wins
    ]


def summary_of(one: Class, found: Verdict) -> str:
    """A line for a class that was timed: the table of all comes at the end, and a run may be stopped before."""
    kept = ", kept" if found.wins else ""
    what = changes(found.config, one.contests[0].configs[0])
    return f"{one.name}: {found.baseline_us:.2f} us, best {found.us:.2f} ({100 * found.gain:+.1f} %){kept}: {what}"


def table_of(results: Sequence[tuple[Class, Sequence[Verdict]]]) -> Table:
    table = Table(title="Compared with the heuristics' configurations", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("class", "us", "best us", "gain", "", "configuration, where it differs"):
        table.add_column(name, justify="right" if name in ("us", "best us", "gain") else "left", overflow="fold")
    for one, found in results:
        for index, verdict in enumerate(found):
            table.add_row(
                one.name if index == 0 else "",
                f"{verdict.baseline_us:.2f}",
                f"{verdict.us:.2f}",
                f"{100 * verdict.gain:+.1f} %",
                "kept" if verdict.wins else "",
                changes(verdict.config, one.contests[0].configs[0]),
            )
    return table


def tune(
    classes: Sequence[Class],
    target: Target,
    shared: Mapping[str, Any],
    path: pathlib.Path | None,
    console: Console,
    seconds: float = sweep.SECONDS,
    make_timer: sweep.MakeTimer = timing.make_timer,
    times: TextIO | None = None,
) -> int:
    """Tunes the classes in turn and writes each one's records before the next one starts. Returns the exit status.

    Args:
        shared: as in `entries`.
        path: the file to merge records into; None writes none.
        times: as in `measure`.

    Raises:
        InvalidInput: the file cannot be read or written.
    """
    results: list[tuple[Class, list[Verdict]]] = []
    problems = []
    for index, one in enumerate(classes):
        count, rows = len(one.contests[0].configs), len(one.contests)
        console.print(f"{index + 1} of {len(classes)}: {one.name}, {count} configurations, {rows} rows", markup=False)
        try:
            found = measure(one, seconds, make_timer, console, times)
        except InvalidInput as error:
            problems.append(f"{one.name}: {error}")
            continue
        except DeviceLostError as error:
            problems.append(f"{one.name}: the device no longer answers: {error}")
            break
        results.append((one, found))
        for verdict in found:
            console.print(summary_of(one, verdict), markup=False, soft_wrap=True)
        if path is not None:
            one.tuned_configs.save(path, target, [one.problem], entries(one, found, shared))
    console.print(table_of(results))
    for problem in problems:
        console.print(f"FAILED {problem}", markup=False, soft_wrap=True)
    kept = sum(verdict.wins for _, found in results for verdict in found)
    where = f"written to {path}" if path is not None else "not written: use --json FILE"
    console.print(f"{kept} tuned configurations, {where}", markup=False, soft_wrap=True)
    return 1 if problems else 0


def shared_facts(target: Target, device: torch.device) -> dict[str, Any]:
    """The fields that all tuning records of a run share."""
    found = facts.gather(device)
    versions = {"driver": found.get("driver"), **{name: found["versions"][name] for name in facts.COMPILERS}}
    commit = found["commit"] or f"dsl-backend {dsl_backend.__version__}"
    return {
        "gpu": target.gpu,
        "arch": target.arch,
        "chip": target.chip,
        "date": datetime.datetime.now(datetime.timezone.utc).date(),
        "commit": commit + ("+" if found["modified"] else ""),
        "versions": {name: version for name, version in versions.items() if version},
    }


def chosen(classes: Sequence[Class], pattern: str | None) -> list[Class]:
    """The classes whose names match a regular expression.

    Raises:
        InvalidInput: there are no classes, no name matches, or the expression is not valid.
    """
    if not classes:
        raise InvalidInput("nothing can be tuned: no CuTe DSL kernel serves this GPU")
    try:
        found = [one for one in classes if re.search(pattern or "", one.name)]
    except re.error as error:
        raise InvalidInput(f"--classes {pattern!r} is not a regular expression: {error}") from None
    if not found:
        known = "\n  ".join(one.name for one in classes)
        raise InvalidInput(f"--classes {pattern!r} matches none of\n  {known}")
    return found


@contextlib.contextmanager
def written(path: pathlib.Path | None) -> Iterator[TextIO | None]:
    """The file, open for writing; None without one. Raises InvalidInput: it cannot be written."""
    try:
        file = None if path is None else path.open("w")
    except OSError as error:
        raise InvalidInput(f"--times {path} cannot be written: {error.strerror}") from None
    with file or contextlib.nullcontext() as times:
        yield times


def main(
    family: str | None = None,
    pattern: str | None = None,
    path: pathlib.Path | None = None,
    *,
    model: pathlib.Path | None = None,
    tensor_parallel: int = 1,
    seconds: float = sweep.SECONDS,
    only_list: bool = False,
    candidates: bool = False,
    arch: str | None = None,
    times_path: pathlib.Path | None = None,
    console: Console | None = None,
) -> int:
    """Tunes the kernels for this machine's GPU, or lists what there is to tune.

    Args:
        family: a family that has tuned configurations; by default all of them.
        pattern: a regular expression that selects classes by name.
        path: the file to merge records into; None writes none.
        model: a config.json whose layers are tuned, instead of the benchmarks' rows.
        seconds: seconds of timing for each configuration in each row.
        only_list: print the classes and time nothing.
        candidates: print their configurations too.
        arch: list the classes of this architecture's usual GPU, such as sm_90a, and not of this machine's.
        times_path: a file for the times of all configurations, one JSON object on each line.

    Raises:
        InvalidInput: an argument is not valid, or there is no GPU with CuTe DSL kernels.
    """
    known = tuners()
    if family is not None and family not in known:
        raise InvalidInput(f"family {family!r} has nothing to tune: choose from {', '.join(known)}")
    for option, given in (("--arch", arch is not None), ("--candidates", candidates)):
        if given and not only_list:
            raise InvalidInput(f"{option} is given without --list: it changes the list alone")
    if arch is None and not torch.cuda.is_available():
        raise InvalidInput("tune needs an NVIDIA GPU, but found none; --list --arch sm_90a lists what it would time")
    if seconds <= 0:
        raise InvalidInput(f"--seconds {seconds}: more than 0 is needed")
    target, device = targets.detect() if arch is None else targets.from_arch(arch), torch.device("cuda")
    if arch is None and target.gpu is None:
        raise InvalidInput("tune needs the GPU's own architecture: unset DSL_BACKEND_ARCH")
    shape = None if model is None else models.read(model, tensor_parallel=tensor_parallel)
    names = [family] if family is not None else list(known)
    classes = [one for name in names for one in known[name](target, device, shape)]
    classes = chosen(classes, pattern)
    console = console or Console()
    if only_list:
        for one in classes:
            rows = ", ".join(contest.name for contest in one.contests)
            configs = one.contests[0].configs
            console.print(f"{one.name}: {len(configs)} configurations; {rows}", markup=False)
            for config in configs if candidates else ():
                what = f"default {config}" if config == configs[0] else changes(config, configs[0])
                console.print(f"  {what}", markup=False, soft_wrap=True)
        return 0
    if path is not None:
        # Fail now, before the timing, if the file cannot be written.
        for tuned_configs in {one.tuned_configs.family: one.tuned_configs for one in classes}.values():
            tuned_configs.save(path, target, [], [])
    with written(times_path) as times:
        sweep.compile_all(contest for one in classes for contest in one.contests)
        if tasks := [task for one in classes for task in one.launches]:
            console.print(str(compile_ahead.run(tasks, processes=min(PROCESSES, precompile.processes(len(tasks))))))
        with timing.alone():
            return tune(classes, target, shared_facts(target, device), path, console, seconds, times=times)
