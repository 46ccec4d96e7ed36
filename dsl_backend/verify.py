# SPDX-License-Identifier: Apache-2.0
"""What `dsl-backend verify` does: check and time every operator on this machine's GPU, and write one file of results.

This module only coordinates. `dsl_backend.testing` has the problems, their reference results and the processes that run
them; `dsl-backend bench` times. The file has one JSON object on each line: `environment` (machine, versions, commit),
`doctor`, `verify` (the options), a `check` for each problem, a `row` for each timing as `bench` writes it, and at the
end a `summary`.
"""

import contextlib
import importlib
import json
import pathlib
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dsl_backend import doctor, envs
from dsl_backend.doctor import Report
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import family as families
from dsl_backend.runtime.dispatch import Entry, judge
from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target
from dsl_backend.testing import tables, worker
from dsl_backend.testing.worker import Outcome, Status

SCHEMA_VERSION = 1
# The number of random problems of each kernel: by default, and with --quick.
RANDOM, RANDOM_QUICK = 60, 12
# Seconds without a new row after which a benchmark is stopped; peers may compile for minutes.
ROW_SECONDS = 900.0
POLL_SECONDS = 0.5
# Seconds of timing for each cell. A CPU's times are not meaningful, so they are kept short.
SECONDS, SECONDS_CPU = 0.3, 0.01
TINY_ROWS = "^tiny-"
# Some benchmarks have this second column for this package's Triton kernel.
OWN_TRITON = "Triton"
LOG_WIDTH = 130


# A name that --families accepts -> what is checked and timed.
CHECKS: Mapping[str, Check] = MappingProxyType(
    {name: check for family in families.load_all() for name, check in family.checks.items()}
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `dsl-backend verify`.

    Attributes:
        device: `cuda`; or `cpu`, which only shows that the command works.
        families: names in CHECKS.
        kernels: names from the dispatch tables; empty for all kernels that serve.
        only: the one problem to check, without timings; None for all problems.
        random: the number of random problems for each kernel and family.
        peers: the `--peers` of `dsl-backend bench`.
        times: whether to time the kernels too.
    """

    device: str = "cuda"
    families: tuple[str, ...] = tuple(CHECKS)
    kernels: tuple[str, ...] = ()
    only: str | None = None
    quick: bool = False
    random: int = RANDOM
    seed: int = 0
    peers: str | None = None
    times: bool = True


@dataclass
class Tally:
    """The results of one kernel in one family.

    Attributes:
        chosen: whether dispatch chooses the kernel for some typical layer.
        reason: why the kernel serves nothing on this machine; empty if it serves something.
    """

    family: str
    kernel: str
    chosen: bool
    reason: str
    total: int = 0
    counts: Counter[Status] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def failures(self) -> int:
        return sum(count for status, count in self.counts.items() if status.failed)

    @property
    def proven(self) -> bool:
        """Whether at least one problem was right and none failed."""
        return not self.failures and self.counts[Status.RIGHT] > 0

    @property
    def refused_all(self) -> bool:
        """Whether the kernel, which serves some layers here, refused every problem: nothing of it was checked."""
        return self.total > 0 and self.counts[Status.REFUSED] == self.total

    @property
    def verdict(self) -> str:
        if self.reason:
            return "not here"
        if not self.total or sum(self.counts.values()) < self.total:
            return "..."
        if self.failures:
            return "WRONG"
        return "REFUSED ALL" if self.refused_all else "right"

    @property
    def cells(self) -> list[str]:
        counts = (self.counts[Status.RIGHT], self.failures, self.counts[Status.REFUSED], self.total)
        numbers = [*map(str, counts), f"{self.seconds:.0f}"] if self.total else [""] * 5
        return [self.family, self.kernel, "yes" if self.chosen else "", *numbers, self.verdict]


class Screen:
    """The output: on a terminal a table that is updated, in a log a line for each kernel and for each failure."""

    def __init__(self, console: Console) -> None:
        self.console = console
        if not console.is_terminal:
            console.width = max(console.width, LOG_WIDTH)
        self.tallies: list[Tally] = []

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self) -> Table:
        table = Table(title="Checked against the reference", title_justify="left", box=box.SIMPLE_HEAD)
        names = ("family", "kernel", "default", "right", "failed", "refused", "of", "s", "")
        for index, name in enumerate(names):
            table.add_column(name, justify="right" if 3 <= index <= 7 else "left", overflow="fold")
        for tally in self.tallies:
            table.add_row(*tally.cells)
        return table

    @contextlib.contextmanager
    def live(self) -> Iterator[Live | None]:
        if not self.console.is_terminal:
            yield None
            return
        with Live(console=self.console, get_renderable=self.table, refresh_per_second=4) as live:
            yield live

    def finished(self, tally: Tally) -> None:
        if self.console.is_terminal:
            return
        counts = f"{tally.counts[Status.RIGHT]} right, {tally.failures} failed, {tally.counts[Status.REFUSED]} refused"
        self.say(f"{tally.family} {tally.kernel}: {tally.reason or f'{counts}, {tally.seconds:.0f} s'}")

    def final(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints the final tables. A terminal has already shown the first one."""
        if not self.console.is_terminal:
            self.console.print(self.table())
        for tally in self.tallies:
            if tally.reason:
                self.say(f"{tally.family} {tally.kernel} is not available here: {tally.reason}")
        if rows:
            self.console.print(times(rows))

    def timed(self, row: Mapping[str, Any]) -> None:
        cells = [
            f"{one['provider']} {one['median_us']:.1f}"
            + (f" (clock {one['clock_us']:.1f})" if "clock_us" in one else "")
            for one in row["cells"]
            if one["status"] == "ok"
        ]
        self.say(f"{row['operator']} {row['id']}, us: {', '.join(cells) or 'nothing ran'}")


def usable(options: Options) -> tuple[Report, Target]:
    """Checks the options against this machine; returns the doctor's report and the target.

    Raises:
        InvalidInput: an option is not valid.
    """
    if options.device not in ("cuda", "cpu"):
        raise InvalidInput(f"device {options.device!r} is not accepted: use cuda, or cpu")
    if options.device == "cpu":
        envs.hide_gpus()
        envs.interpret_triton()
    elif not torch.cuda.is_available():
        raise InvalidInput("verify needs an NVIDIA GPU, but found none; --device cpu tries the command without one")
    unknown = [name for name in options.families if name not in CHECKS]
    if unknown:
        raise InvalidInput(f"no family {', '.join(map(repr, unknown))}: choose from {', '.join(CHECKS)}")
    report, target = doctor.examine(), doctor.target_of(None, [])
    known = {one.kernel for one in tallies(target, options.families, ())}
    strange = [name for name in options.kernels if name not in known]
    if strange:
        raise InvalidInput(f"no kernel {', '.join(map(repr, strange))}: choose from {', '.join(sorted(known))}")
    if options.only is not None:
        if len(options.families) != 1:
            raise InvalidInput("--only needs exactly one family: name it with --families")
        tables.find(options.families[0], options.only, options.device)
    return report, target


def tallies(target: Target, names: Sequence[str], kernels: Sequence[str]) -> list[Tally]:
    """An empty tally for each kernel of each family of these names; of `kernels` alone if any are named.

    Of kernels that are taken by name alone, those that a `Check` names.
    """
    made = []
    for family in families.load_all():
        for name, check in family.checks.items():
            if name not in names:
                continue
            specs = check.layers(target) if check.layers is not None else typical_specs(family, check, target)
            entries = [
                entry
                for entry in family.tables[check.operation]
                if (not entry.by_name or entry.name in check.by_name) and (not kernels or entry.name in kernels)
            ]
            by_default = {id(serving(family.tables[check.operation], spec, target)) for spec in specs}
            for kernel in dict.fromkeys(entry.name for entry in entries):
                objections = [
                    entry.objections(spec, target) for spec in specs for entry in entries if entry.name == kernel
                ]
                made.append(
                    Tally(
                        name,
                        kernel,
                        chosen=any(id(entry) in by_default for entry in entries if entry.name == kernel),
                        reason=min(objections, key=len)[0] if all(objections) else "",
                    )
                )
    return sorted(made, key=lambda tally: names.index(tally.family))


def typical_specs(family: Family, check: Check, target: Target) -> list[Any]:
    """The family's typical layers that have the operation of a check."""
    return [spec for spec in family.typical_layers(target).values() if check.operation in family.operations_of(spec)]


def serving(table: Sequence[Entry[Any]], spec: Any, target: Target) -> Entry[Any] | None:
    """The entry that dispatch takes by itself; None where none serves."""
    return next((entry for entry, reasons in judge(table, spec, target) if not reasons), None)


def repeat(options: Options, family: str, kernel: str, problem: str) -> str:
    """The command that runs a problem again."""
    words = ["--families", family, "--kernels", kernel, "--only", problem]
    words += [] if options.device == "cuda" else ["--device", options.device]
    return "dsl-backend verify " + shlex.join(words)


def check(options: Options, tally: Tally, lines: Any, screen: Screen) -> None:
    """Checks all problems of a kernel."""
    if tally.reason:
        screen.finished(tally)
        return
    names = (
        [options.only]
        if options.only is not None
        else tables.names(tally.family, options.device, quick=options.quick, random=options.random, seed=options.seed)
    )
    tally.total = len(names)
    for outcome in worker.checks(tally.family, tally.kernel, names, options.device):
        tally.counts[outcome.status] += 1
        tally.seconds += outcome.seconds
        lines.write(
            {
                "kind": "check",
                "family": tally.family,
                "kernel": tally.kernel,
                "problem": outcome.name,
                "status": outcome.status.value,
                "message": outcome.message,
                "seconds": round(outcome.seconds, 3),
                "repeat": repeat(options, tally.family, tally.kernel, outcome.name),
            }
        )
        if outcome.status.failed:
            screen.say(failure(options, tally, outcome))
    screen.finished(tally)


def failure(options: Options, tally: Tally, outcome: Outcome) -> str:
    """The message about a problem that failed, with the command that repeats it."""
    what = f"FAILED {tally.family} {tally.kernel} {outcome.name}: {outcome.status.value}: {outcome.message}"
    return f"{what}\n  again: {repeat(options, tally.family, tally.kernel, outcome.name)}"


def measure(
    options: Options, benchmark: Benchmark, kernels: Sequence[str], benchmarks: Any, lines: Any, screen: Screen
) -> list[str]:
    """Times an operator's rows with this package's kernels and the peers; returns what failed of this package."""
    pattern = TINY_ROWS if options.device == "cpu" else benchmark.quick if options.quick else benchmark.rows
    settings = {
        "rows": pattern,
        "kernels": ",".join(kernels),
        "peers": options.peers,
        "device": options.device,
        "seconds": SECONDS_CPU if options.device == "cpu" else SECONDS,
    }
    problems: list[str] = []
    predictions = importlib.import_module(f"{benchmarks.__name__}.clock.predictions")
    predicted = predictions.of_device(lines.entries[0]["device"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows"
        with worker.Child(worker.time_rows, benchmarks.__name__, benchmark.op, path, settings) as child:
            for row in rows_of(child, path, problems):
                add_clock(row, predicted, predictions.KERNEL)
                lines.write(row)
                screen.timed(row)
                problems += wrong_cells(row)
    again = f"dsl-backend bench {benchmark.op} --rows {shlex.quote(pattern)} --kernels {','.join(kernels)}"
    found = [f"FAILED {benchmark.op}: {problem}\n  again: {again}" for problem in problems]
    for text in found:
        screen.say(text)
    return found


def rows_of(child: worker.Child, path: pathlib.Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yields rows as a benchmark writes them.

    Args:
        problems: if the benchmark fails and this list is still empty, the reason is appended.
    """
    seen, last, ended = 0, time.monotonic(), None
    while ended is None:
        try:
            status = child.receive(POLL_SECONDS)
            ended = "" if status == 0 else f"exit status {status}: {child.last_words()}"
        except TimeoutError:
            if time.monotonic() - last > ROW_SECONDS:
                ended = f"no row for {ROW_SECONDS:.0f} s"
        except EOFError as error:
            ended = str(error)
        # The last line may be half written.
        written = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in written[seen:]:
            last = time.monotonic()
            row = json.loads(line)
            if row["kind"] == "row":
                yield row
        seen = len(written)
    if ended and not problems:
        problems.append(ended)


def wrong_cells(row: Mapping[str, Any]) -> list[str]:
    """A message for each of this package's kernels that was wrong or raised in a row."""
    return [
        f"{row['id']} {cell['provider']}: {cell['status']}: {cell.get('message', '')}"
        for cell in row["cells"]
        if cell["provider"].startswith("dsl") and cell["status"] in ("wrong", "error")
    ]


def add_clock(row: dict[str, Any], predicted: Mapping[tuple[str, str], Any], kernel: str) -> None:
    """Put what the emulator's clock predicted for a kernel into its cell, if the row has a prediction."""
    found = predicted.get((row["operator"], row["id"]))
    for cell in row["cells"]:
        if found is not None and cell["provider"] in ("dsl", f"dsl:{kernel}"):
            cell["clock_us"], cell["config"] = found.us, found.mark


def clock_text(cell: Mapping[str, Any]) -> str:
    """The clock's figure, over the measured one, and whether the clock chose the configuration; empty without one."""
    if "clock_us" not in cell:
        return ""
    mark = f", config {cell['config']}" if cell["config"] else ""
    return f"{cell['clock_us']:.1f} ({cell['clock_us'] / cell['median_us']:.2f}x){mark}"


def times(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with one line for each of this package's kernels in each row, and the fastest peer.

    Where the emulator's clock predicted times for this GPU (docs/emulator-clock.md), they are in a last column.
    """
    table = Table(title="Timed", title_justify="left", box=box.SIMPLE_HEAD)
    columns = ["operator", "row", "kernel", "us", "of floor", "rate", "fastest peer, us (over ours)"]
    if any("clock_us" in cell for row in rows for cell in row["cells"]):
        columns.append("emulator's clock, us (over ours)")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if 3 <= index <= 5 else "left", overflow="fold")
    for row in rows:
        done = [cell for cell in row["cells"] if cell["status"] == "ok"]
        peers = [cell for cell in done if not cell["provider"].startswith("dsl") and cell["provider"] != OWN_TRITON]
        best = min(peers, key=lambda cell: cell["median_us"], default=None)
        for cell in row["cells"]:
            if not cell["provider"].startswith("dsl") or cell["status"] == "skipped":
                continue
            labels = [row["operator"], row["id"], cell["provider"].removeprefix("dsl:")]
            if cell["status"] != "ok":
                table.add_row(*labels, cell["status"])
                continue
            ours = cell["median_us"]
            floor = f"{cell['of_floor']:.2f}x" if cell["of_floor"] else ""
            fastest = f"{best['provider']} {best['median_us']:.1f} ({best['median_us'] / ours:.2f}x)" if best else ""
            texts = [*labels, f"{ours:.1f}", floor, f"{cell['rate']:.3g} {row['unit']}", fastest, clock_text(cell)]
            table.add_row(*texts[: len(columns)])
    return table


def opened(path: pathlib.Path | None, options: Options, report: Report, benchmarks: Any) -> Any:
    """Opens the JSON lines and writes the first ones: environment, doctor and options.

    Raises:
        InvalidInput: the file cannot be written.
    """
    try:
        lines = benchmarks.report.JsonLines(path)
    except OSError as error:
        raise InvalidInput(f"--json {path} cannot be written: {error.strerror}") from None
    seconds = SECONDS_CPU if options.device == "cpu" else SECONDS
    environment = benchmarks.facts.gather(torch.device(options.device))
    lines.write({"kind": "environment", **environment, "page_size": 16, "seconds": seconds, "flush": False})
    lines.write({"kind": "doctor", **report.model_dump()})
    lines.write({"kind": "verify", "schema_version": SCHEMA_VERSION, **vars(options)})
    return lines


def run(options: Options, json_path: pathlib.Path | None, benchmarks: Any, console: Console) -> int:
    """Checks and times; returns the exit status, 0 if everything is right, else 1.

    Args:
        json_path: the file of results; each JSON object is written as soon as it is known.
        benchmarks: the package of the benchmarks.

    Raises:
        InvalidInput: an option is not valid on this machine.
    """
    began, (report, target), screen = time.monotonic(), usable(options), Screen(console)
    lines = opened(json_path, options, report, benchmarks)
    machine = lines.entries[0]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    screen.say(f"{machine['device']} ({report.target.arch}); commit {machine['commit']}; {versions}")

    screen.tallies = tallies(target, options.families, options.kernels)
    with screen.live():
        for tally in screen.tallies:
            check(options, tally, lines, screen)
    problems: list[str] = []
    if options.times and options.only is None:
        for name in options.families:
            proven = [tally.kernel for tally in screen.tallies if tally.family == name and tally.proven]
            for benchmark in CHECKS[name].benchmarks if proven else ():
                problems += measure(options, benchmark, proven, benchmarks, lines, screen)
    status = conclude(screen, problems, lines, time.monotonic() - began)
    if json_path is not None:
        screen.say(f"All results are in {json_path}: please attach this file to an issue.")
    return status


def conclude(screen: Screen, problems: Sequence[str], lines: Any, seconds: float) -> int:
    """Prints the tables, all failures again, and the verdict; returns the exit status."""
    right = sum(tally.counts[Status.RIGHT] for tally in screen.tallies)
    failed = sum(tally.failures for tally in screen.tallies)
    rows = [entry for entry in lines.entries if entry["kind"] == "row"]
    unchecked = [f"{tally.family} {tally.kernel}" for tally in screen.tallies if tally.refused_all]
    all_right = right > 0 and not failed and not problems and not unchecked
    lines.write(
        {
            "kind": "summary",
            "all_right": all_right,
            "right": right,
            "failed": failed,
            "unchecked": unchecked,
            "rows": len(rows),
            "row_failures": list(problems),
            "seconds": round(seconds, 1),
        }
    )
    screen.final(rows)
    for entry in lines.entries:
        if entry["kind"] == "check" and Status(entry["status"]).failed:
            screen.say(f"FAILED ({entry['status']}): {entry['repeat']}")
    for name in unchecked:
        screen.say(f"NOT CHECKED {name}: it serves this GPU, and refused every problem: ask for more with --problems")
    for text in problems:
        screen.say(text)
    screen.say(
        f"{'All right' if all_right else 'NOT all right'}: {right} problems right, {failed} failed; {len(rows)} rows "
        f"timed, {len(problems)} failed there; {seconds:.0f} s"
    )
    return 0 if all_right else 1
