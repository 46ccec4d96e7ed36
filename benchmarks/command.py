# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks OP`, which is also `dsl-backend bench OP`."""

import importlib.util
import math
import pathlib
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsl_backend import providers
from rich.console import Console

from . import (
    attention,
    experts,
    facts,
    held_out,
    launch,
    linear,
    measured,
    norm,
    report,
    runner,
    sampling,
    scaled_linear,
    softmax,
    verification,
    weight_only,
)
from .case import Case, Provider, select
from .held_out import compile_ahead, random_rows, summary

# The share of `limit_seconds` that compiling ahead may take.
COMPILE_SHARE = 0.5
# Of the time that is left for an operator's rows, what a provider may take until it is ready.
PREPARE_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how.

    Attributes:
        report_path: the HTML page with charts to write. With it, the default rows also include the sweeps and the
            smallest rows.
        sources: `json_path` files of earlier runs. The page, or the summary of held-out rows, is made from them, and
            nothing is measured.
        rows: a regular expression that selects rows of any group by id; by default the rows of the group `table`.
        peers: comma-separated names, `all` or `none`; by default those that the provider did not exclude.
        files: Python files with further providers; those of the chosen operators run.
        kernels: comma-separated names of this package's kernels, each a column; by default what dispatch chooses.
        page_size: tokens of a page of the KV cache.
        seconds: seconds of timing for each provider in each row.
        prepare_seconds: a provider that is not ready after so many seconds is skipped.
        flush: overwrite the last-level cache before each replay.
        held_out: measure the held-out rows instead of the operators' own; without operators, those of all.
        held_out_seed: of the random held-out rows.
        limit_seconds: start no row after so many seconds. Every operator gets a share of them.
        commit: of the code, if it is not in a git checkout.
        only_list: print the rows and providers, and measure nothing.
        device: `cuda`; or `cpu`, whose times say nothing about a GPU.
    """

    report_path: pathlib.Path | None = None
    sources: Sequence[pathlib.Path] = ()
    rows: str | None = None
    peers: str | None = None
    files: Sequence[pathlib.Path] = ()
    kernels: str | None = None
    page_size: int = 16
    seconds: float = 0.3
    prepare_seconds: float = 240.0
    flush: bool = False
    seed: int = 0
    held_out: bool = False
    held_out_seed: int = random_rows.SEED
    limit_seconds: float | None = None
    commit: str | None = None
    only_list: bool = False
    device: str = "cuda"

    @property
    def kernel_names(self) -> list[str]:
        return [name.strip() for name in (self.kernels or "").split(",") if name.strip()]


DEFAULTS = Options()


def operators(page_size: int = 16) -> dict[str, Any]:
    """Every operator that has a benchmark, by name."""
    return {
        **attention.operators(page_size),
        **experts.operators(),
        **launch.operators(),
        **linear.operators(),
        **norm.operators(),
        **sampling.operators(),
        **scaled_linear.operators(),
        **softmax.operators(),
        **verification.operators(),
        **weight_only.operators(),
    }


def choose_providers(available: Sequence[Provider], names: str | None, ours: Sequence[str]) -> list[Provider]:
    """The providers that always run, and the chosen peers.

    Args:
        names: comma-separated names of peers, `all` or `none`; None for the default peers. Names of other operators'
            peers are ignored (`check_peers`).
        ours: the names of the providers that always run: this package's, and those of files that were named.
    """
    peers = [provider for provider in available if provider.name not in ours]
    if names == "all":
        wanted = {provider.name for provider in peers}
    elif names is None:
        wanted = {provider.name for provider in peers if provider.default}
    else:
        asked = asked_peers(names)
        wanted = {provider.name for provider in peers if provider.name.lower() in asked}
    return [provider for provider in available if provider.name in ours or provider.name in wanted]


def asked_peers(names: str) -> list[str]:
    """The names of a comma-separated list in lower case, without `dsl` and `none`."""
    return [name.strip().lower() for name in names.split(",") if name.strip().lower() not in ("", "none", "dsl")]


def check_peers(names: str | None, chosen: Sequence[Any]) -> None:
    """Raises ValueError if a peer is none of any chosen operator's."""
    if names is None or names == "all":
        return
    known = list(dict.fromkeys(provider.name for operator in chosen for provider in operator.providers([])[1:]))
    unknown = [name for name in asked_peers(names) if name not in map(str.lower, known)]
    if unknown:
        raise ValueError(f"no peer {', '.join(unknown)}: choose from {', '.join(known)}, all, none")


def check_rows(pattern: str | None) -> None:
    """Raises ValueError if the text of `--rows` is not a regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"--rows {pattern!r} is not a regular expression: {error}") from None


def check_matches(pattern: str | None, selections: Sequence["Selection"], named: bool) -> None:
    """Checks that a pattern of `--rows` selects something: a run that measures less than was asked is not right.

    Args:
        named: the operators were named, so that each of them must have a row; otherwise one of them.

    Raises:
        ValueError: there is no such row; the message has the rows that there are.
    """
    without = [one for one in selections if not one.cases]
    if without and (named or len(without) == len(selections)):
        rows = "; ".join(f"{one.operator.name} has {listed(one.known)}" for one in without)
        raise ValueError(f"no row of {', '.join(one.operator.name for one in without)} matches {pattern!r}: {rows}")


def listed(cases: Sequence[Case]) -> str:
    """The ids of rows."""
    return ", ".join(case.id for case in cases) or "none"


def check_kernels(names: Sequence[str], selections: Sequence["Selection"]) -> None:
    """Raises ValueError if a kernel of this package is in no dispatch table of the chosen operators."""
    for index, name in enumerate(names):
        reasons = [one.providers[index].objections(one.cases[0].problem) for one in selections]
        unknown = [why for found in reasons for why in found if f"has no kernel {name!r}" in why]
        if len(unknown) == len(selections):
            raise ValueError(unknown[0])


def of_files(chosen: Sequence[Any], files: Sequence[pathlib.Path]) -> dict[str, list[Provider]]:
    """Operator -> the providers of files.

    Raises:
        OSError: there is no such file.
        ValueError: a file has a provider of no chosen operator, or one whose name a column has already.
    """
    found: dict[str, list[Provider]] = {operator.name: [] for operator in chosen}
    for file in files:
        made = {operator.name: providers.of_file(file, operator.name) for operator in chosen}
        if not any(made.values()):
            raise ValueError(f"{file} has no provider of {', '.join(found)}")
        for operator in chosen:
            found[operator.name] += made[operator.name]
    for operator in chosen:
        names = [one.name for one in (*operator.providers([]), *found[operator.name])]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{operator.name} has more than one provider {', '.join(twice)}")
    return found


def run_rows(
    operator: Any,
    cases: Sequence[Case],
    providers: Sequence[Provider],
    device: torch.device,
    settings: runner.Settings,
    finished: Callable[[runner.Row], None],
    until: float | None = None,
) -> tuple[list[runner.Row], str | None]:
    """Measures the cases in turn; returns their rows, and why the run ended early, or None if it did not.

    Args:
        until: the `time.monotonic()` after which no further row is started. With it, a provider that was not ready in
            a part of the time that is left is not asked again: its compiler would take the time of all rows.
    """
    rows: list[runner.Row] = []
    for case in cases:
        limited = settings
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                break
            if rows:
                providers = without_slow(providers, rows[-1])
            limited = replace(settings, prepare_seconds=min(settings.prepare_seconds, PREPARE_SHARE * left))
        try:
            row = runner.run_case(operator, case, providers, device, limited)
        except runner.DeviceLostError as error:
            return rows, f"{case.id}: the device no longer answers: {error}"
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append(row)
        finished(row)
    return rows, None


def without_slow(asked: Sequence[Provider], row: runner.Row) -> list[Provider]:
    """The providers; those that were not ready in time in a row object to all others."""
    slow = {cell.provider: cell.message for cell in row.cells if cell.message.startswith(runner.NOT_READY)}
    return [
        replace(one, objections=providers.Always(f"{row.case.id}: {slow[one.name]}"))
        if isinstance(one, providers.Provider) and one.name in slow
        else one
        for one in asked
    ]


def main(
    op: str | Sequence[str],
    json_path: pathlib.Path | None = None,
    options: Options = DEFAULTS,
    console: Console | None = None,
) -> int:
    """Measures operators and their peers.

    Args:
        op: the name of one operator, or several names; none means all, which is accepted for a page, a list or the
            held-out rows.
        json_path: the file of results, one JSON object on each line: the machine's facts, then each row.

    Returns:
        0 if this package's providers were right in every row that they serve and all results were written, else 1; 2 if
        an argument is not valid or the device does not exist.
    """
    console = console or Console()
    names = [op] if isinstance(op, str) else list(op)
    known = operators(options.page_size)
    try:
        check_options(names, known, options)
        if options.held_out and not names:
            names = list(held_out.PEERS)
        chosen = [known[name] for name in names or known]
        added = of_files(chosen, options.files)
        check_peers(options.peers, chosen)
        selections = [select_columns(operator, options, added[operator.name]) for operator in chosen]
        check_matches(options.rows, selections, named=bool(names))
        selections = [selection for selection in selections if selection.cases]
        check_kernels(options.kernel_names, selections)
        if options.sources:
            records = [record for source in options.sources for record in measured.read(source)]
            kept = [r for r in records if r["kind"] == "environment" or not names or r["operator"] in names]
            show_results(kept, selections, options, console)
            return 0
        if options.only_list:
            for selection in selections:
                selection.print(console)
            return 0
        device = device_of(options.device)
        lines = report.JsonLines(json_path)
    except (OSError, ValueError) as error:
        report.say(console, str(error))
        return 2
    return measure_all(selections, device, options, lines, console)


def measure_all(
    selections: Sequence["Selection"],
    device: torch.device,
    options: Options,
    lines: report.JsonLines,
    console: Console,
) -> int:
    """Measures all selections and writes the page if one is asked for; returns the exit status."""
    until = None if options.limit_seconds is None else time.monotonic() + options.limit_seconds
    gathered = begin(selections, device, options, lines)
    if options.held_out:
        limit = math.inf if options.limit_seconds is None else COMPILE_SHARE * options.limit_seconds
        compile_all(selections, options, console, limit)
    failed = measure_selections(selections, device, options, lines, gathered, console, until)
    show_results(lines.entries, selections, options, console)
    if lines.failure:
        report.say(console, lines.failure)
    return 1 if failed or lines.failure else 0


def begin(
    selections: Sequence["Selection"], device: torch.device, options: Options, lines: report.JsonLines
) -> dict[str, Any]:
    """Gathers the facts of this machine and writes them as the first line."""
    gathered = facts.gather(device, options.commit)
    names = ("page_size", "seconds", "flush", "held_out", "held_out_seed", "limit_seconds")
    sources = {
        one.operator.name: {column.name: facts.source_of(column, gathered) for column in one.providers}
        for one in selections
    }
    lines.write(
        {"kind": "environment", **gathered, **{name: getattr(options, name) for name in names}, "providers": sources}
    )
    return gathered


def measure_selections(
    selections: Sequence["Selection"],
    device: torch.device,
    options: Options,
    lines: report.JsonLines,
    gathered: Mapping[str, Any],
    console: Console,
    until: float | None,
    seconds: Mapping[str, float] = types.MappingProxyType({}),
) -> bool:
    """Measures all selections in turn; returns whether this package failed in some row, or the run ended early.

    Args:
        until: the `time.monotonic()` after which no further row is started.
        seconds: operator -> its own time limit, instead of a share of what is left until then.
    """
    settings = runner.Settings(
        seconds=options.seconds, prepare_seconds=options.prepare_seconds, flush=options.flush, seed=options.seed
    )
    failed = False
    for index, selection in enumerate(selections):
        progress = progress_of(selection, gathered, console)
        own = seconds.get(selection.operator.name)
        end = share_of(selections[index:], until) if own is None else earlier(time.monotonic() + own, until)
        rows, ended = measure(selection, device, settings, lines, progress, end)
        if options.held_out:
            report.print_problems(console, rows, ended)
        else:
            report.say(console, report.sources(selection.providers, gathered))
            report.print_final(console, progress.title, rows, progress.unit, progress.ours, gathered, ended)
            if options.peers is None and (others := report.others(selection.available, selection.providers)):
                report.say(console, others)
        failed |= selection.failed(lines) or ended is not None
        if ended is not None:
            break
    return failed


def show_results(
    records: Sequence[measured.Record], selections: Sequence["Selection"], options: Options, console: Console
) -> None:
    """Prints the summary of held-out rows and writes the page, as far as they are asked for."""
    if options.held_out:
        listed = {selection.operator.name: selection.cases for selection in selections}
        environments, sections = measured.gather(records)
        for environment in {str(one["device"]): one for one in environments}.values():
            rows = [row for one in sections if one.device == environment["device"] for row in one.rows.values()]
            report.say(console, report.machine(f"held-out rows on {environment['device']}", environment))
            for line in summary.lines(listed, rows):
                report.say(console, line)
    if options.report_path is not None:
        write_page(records, options.report_path, console)


def earlier(time_s: float, until: float | None) -> float:
    return time_s if until is None else min(time_s, until)


def share_of(selections: Sequence["Selection"], until: float | None) -> float | None:
    """When the first selection must end, so that each one gets a time in proportion to its rows."""
    if until is None:
        return None
    rows = [len(selection.cases) for selection in selections]
    return time.monotonic() + (until - time.monotonic()) * rows[0] / sum(rows)


def compile_all(selections: Sequence["Selection"], options: Options, console: Console, limit: float) -> None:
    """Compiles the kernels of all rows and providers in parallel, for at most `limit` seconds."""
    tasks = [
        compile_ahead.Task(selection.operator, case, provider, options.device, options.prepare_seconds)
        for selection in selections
        for case in selection.cases
        for provider in selection.providers
    ]
    report.say(console, str(compile_ahead.run(tasks, limit)))


def device_of(name: str) -> torch.device:
    """The device to run on.

    Raises:
        ValueError: this machine has no such device.
    """
    if name not in ("cuda", "cpu"):
        raise ValueError(f"device {name!r} is not one of cuda, cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device: --device cpu runs on the CPU, whose times say nothing about a GPU")
    return torch.device(name)


def check_options(names: Sequence[str], known: Mapping[str, Any], options: Options) -> None:
    """Checks the names of operators and the options that depend on each other.

    Raises:
        ValueError: something is not valid; the message says what is accepted.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"no benchmark {name!r}: choose from {', '.join(known)}")
    check_rows(options.rows)
    without = [name for name in names if options.held_out and name not in held_out.PEERS]
    if without:
        raise ValueError(f"{', '.join(without)} has no held-out rows: choose from {', '.join(held_out.PEERS)}")
    if options.held_out_seed != random_rows.SEED and not options.held_out:
        raise ValueError("--held-out-seed draws rows for --held-out: name both")
    if not names and options.report_path is None and not options.only_list and not options.held_out:
        raise ValueError(f"no benchmark is named: choose from {', '.join(known)}")
    if options.sources and options.report_path is None and not options.held_out:
        raise ValueError("--from needs --report or --held-out: say what to make from these files")
    if options.report_path is not None and importlib.util.find_spec("plotly") is None:
        raise ValueError("a report needs plotly: pip install 'dsl-backend[bench]'")


def write_page(records: Sequence[measured.Record], path: pathlib.Path, console: Console) -> None:
    from . import page  # here because it imports plotly, which only a page needs

    page.write(records, path)
    report.say(console, str(path))


@dataclass(frozen=True)
class Selection:
    """The chosen rows and columns of an operator.

    Attributes:
        known: the rows that can be chosen.
        cases: the chosen rows.
        own: the names of this package's columns.
        available: all columns that the operator has.
    """

    operator: Any
    known: Sequence[Case]
    cases: list[Case]
    providers: list[Provider]
    own: list[str]
    available: list[Provider]

    def print(self, console: Console) -> None:
        """Prints all rows and providers that can be chosen."""
        names = [f"{provider.name}{'' if provider.default else ' (by name only)'}" for provider in self.available]
        report.say(console, f"{self.operator.name}, providers: {', '.join(names)}")
        for case in self.known:
            report.say(console, f"{case.group:10} {case.id}")

    def failed(self, lines: report.JsonLines) -> bool:
        """Whether one of this package's columns raised or was wrong in some row."""
        return any(
            cell["status"] in ("error", "wrong")
            for entry in lines.entries
            if entry["kind"] == "row" and entry["operator"] == self.operator.name
            for cell in entry["cells"]
            if cell["provider"] in self.own
        )


def select_columns(operator: Any, options: Options, added: Sequence[Provider] = ()) -> Selection:
    """The rows and columns of an operator that the options select; no row may match.

    Args:
        added: the providers of files.
    """
    available = [*operator.providers(options.kernel_names), *added]
    own = [provider.name for provider in available[: max(1, len(options.kernel_names))]]
    known, rows, peers = operator.cases(), options.rows, options.peers
    if options.held_out:
        known, rows = held_out.cases(operator.name, options.page_size, options.held_out_seed), rows or ""
        peers = peers or ",".join(held_out.PEERS[operator.name])
    cases = select(known, rows, with_sweeps=options.report_path is not None)
    always = [*own, *(provider.name for provider in added)]
    return Selection(operator, known, cases, choose_providers(available, peers, always), own, available)


def progress_of(selection: Selection, gathered: Mapping[str, Any], console: Console) -> report.Progress:
    operator = selection.operator
    title = f"{operator.name} on {gathered['device']}, {len(selection.cases)} rows"
    return report.Progress(console, title, operator.unit, selection.own[0])


def measure(
    selection: Selection,
    device: torch.device,
    settings: runner.Settings,
    lines: report.JsonLines,
    progress: report.Progress,
    until: float | None,
) -> tuple[list[runner.Row], str | None]:
    """Measures an operator's rows and writes each at once; returns them, and why the run ended early or None.

    Args:
        until: the `time.monotonic()` after which no further row is started.
    """
    operator = selection.operator

    def finished(row: runner.Row) -> None:
        lines.write(report.to_json(row, operator.name, operator.unit, selection.own[0]))
        progress.add(row)

    with progress:
        return run_rows(operator, selection.cases, selection.providers, device, settings, finished, until)
