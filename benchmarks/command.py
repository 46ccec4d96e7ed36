# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks OP`, which is also `dsl-backend bench OP`."""

import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from . import attention, facts, linear, measured, report, runner, sampling, softmax
from .case import Case, Provider, select


def operators(page_size: int = 16) -> dict[str, Any]:
    """Every operator that has a benchmark, by name."""
    return {**attention.operators(page_size), **linear.operators(), **sampling.operators(), **softmax.operators()}


def choose_providers(available: Sequence[Provider], names: str | None, ours: Sequence[str]) -> list[Provider]:
    """Ours, and the peers in a comma-separated list: the usual ones by default; `all` and `none` are lists too.

    Raises:
        ValueError: no provider has one of the names.
    """
    peers = [provider for provider in available if provider.name not in ours]
    if names == "all":
        wanted = {provider.name for provider in peers}
    elif names is None:
        wanted = {provider.name for provider in peers if provider.default}
    else:
        by_lower = {provider.name.lower(): provider.name for provider in peers}
        asked = [name.strip().lower() for name in names.split(",") if name.strip().lower() not in ("", "none", "dsl")]
        unknown = [name for name in asked if name not in by_lower]
        if unknown:
            raise ValueError(f"no peer {', '.join(unknown)}: choose from {', '.join(by_lower.values())}, all, none")
        wanted = {by_lower[name] for name in asked}
    return [provider for provider in available if provider.name in ours or provider.name in wanted]


def run_rows(
    operator: Any,
    cases: Sequence[Case],
    providers: Sequence[Provider],
    device: torch.device,
    settings: runner.Settings,
    finished: Callable[[runner.Row], None],
) -> tuple[list[runner.Row], str | None]:
    """All rows, and why the run ended early if it did."""
    rows: list[runner.Row] = []
    for case in cases:
        try:
            row = runner.run_case(operator, case, providers, device, settings)
        except runner.DeviceLostError as error:
            return rows, f"{case.id}: the device no longer answers: {error}"
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append(row)
        finished(row)
    return rows, None


def main(
    op: str | Sequence[str],
    json_path: pathlib.Path | None = None,
    *,
    report_path: pathlib.Path | None = None,
    sources: Sequence[pathlib.Path] = (),
    rows: str | None = None,
    peers: str | None = None,
    kernels: str | None = None,
    page_size: int = 16,
    seconds: float = 0.3,
    prepare_seconds: float = 240.0,
    flush: bool = False,
    seed: int = 0,
    only_list: bool = False,
    device: str = "cuda",
    console: Console | None = None,
) -> int:
    """Measure operators against their peers.

    Args:
        op: an operator's name, or several; none for all, where a report or a list is asked for.
        json_path: takes one JSON object a line: the machine's facts first, then each row.
        report_path: takes a page with pictures of all rows; by default rows are then the table, the sweeps and the
            smallest ones.
        sources: files that earlier runs wrote to their `json_path`: the report is made of them and nothing is run.
        rows: regular expression that finds ids of rows, in any group; by default the rows of the table.
        peers: comma-separated names, `all` or `none`; by default those that need no compilation of their own.
        kernels: comma-separated names of our kernels, each a column; by default what dispatch chooses.
        page_size: tokens a page of the cache.
        seconds: of timing for each provider of each row.
        prepare_seconds: after which a provider that is not ready is given up.
        flush: overwrite the last-level cache before each replay.
        only_list: print the rows and providers, run nothing.
        device: `cuda`; or `cpu`, whose figures say nothing about a GPU.

    Returns:
        0 where ours ran and was right in every row it serves, else 1; 2 where an argument names nothing, or the device
        is not there.
    """
    console = console or Console()
    known = operators(page_size)
    names = [op] if isinstance(op, str) else list(op)
    try:
        require_known(names, known, report_path, sources, only_list)
        if report_path is not None and sources:
            records = [record for source in sources for record in measured.read(source)]
            kept = [r for r in records if r["kind"] == "environment" or not names or r["operator"] in names]
            write_page(kept, report_path, console)
            return 0
        own_kernels = [name.strip() for name in kernels.split(",") if name.strip()] if kernels else []
        chosen = [
            choose(known[name], rows, peers, own_kernels, pictured=report_path is not None) for name in names or known
        ]
        if only_list:
            for selection in chosen:
                selection.print(console)
            return 0
        place = place_of(device)
    except (OSError, ValueError) as error:
        report.say(console, str(error))
        return 2
    gathered = facts.gather(place)
    lines = report.JsonLines(json_path)
    lines.write({"kind": "environment", **gathered, "page_size": page_size, "seconds": seconds, "flush": flush})
    settings = runner.Settings(seconds=seconds, prepare_seconds=prepare_seconds, flush=flush, seed=seed)
    failed = False
    for selection in chosen:
        ended = measure(selection, place, settings, gathered, lines, console)
        failed |= selection.failed(lines) or ended
        if ended:
            break
    if report_path is not None:
        write_page(lines.entries, report_path, console)
    return 1 if failed else 0


def place_of(device: str) -> torch.device:
    """Where to run.

    Raises:
        ValueError: there is no such device here.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device {device!r} is not one of cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device: --device cpu runs on the CPU, whose figures say nothing about a GPU")
    return torch.device(device)


def require_known(
    names: Sequence[str],
    known: Mapping[str, Any],
    report_path: pathlib.Path | None,
    sources: Sequence[pathlib.Path],
    only_list: bool = False,
) -> None:
    """Refuse what asks for nothing.

    Raises:
        ValueError: what is wrong, and what would be accepted.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"no benchmark {name!r}: choose from {', '.join(known)}")
    if not names and report_path is None and not only_list:
        raise ValueError(f"no benchmark is named: choose from {', '.join(known)}")
    if sources and report_path is None:
        raise ValueError("--from is for --report: name the page that is to be made of these files")
    if report_path is not None and importlib.util.find_spec("plotly") is None:
        raise ValueError("a report needs plotly: pip install 'dsl-backend[bench]'")


def write_page(records: Sequence[measured.Record], path: pathlib.Path, console: Console) -> None:
    from . import page  # here, since only a report needs plotly

    page.write(records, path)
    report.say(console, str(path))


@dataclass(frozen=True)
class Selection:
    """What is run of an operator.

    Attributes:
        own: columns of this package.
        available: every column there is.
    """

    operator: Any
    cases: list[Case]
    providers: list[Provider]
    own: list[str]
    available: list[Provider]

    def print(self, console: Console) -> None:
        """The rows and providers that there are to choose from."""
        names = [f"{provider.name}{'' if provider.default else ' (by name only)'}" for provider in self.available]
        report.say(console, f"{self.operator.name}, providers: {', '.join(names)}")
        for case in self.operator.cases():
            report.say(console, f"{case.group:10} {case.id}")

    def failed(self, lines: report.JsonLines) -> bool:
        """Whether a column of ours raised or was wrong in some row."""
        return any(
            cell["status"] in ("error", "wrong")
            for entry in lines.entries
            if entry.get("operator") == self.operator.name
            for cell in entry["cells"]
            if cell["provider"] in self.own
        )


def choose(operator: Any, rows: str | None, peers: str | None, kernels: Sequence[str], pictured: bool) -> Selection:
    """Rows and columns of an operator.

    Raises:
        ValueError: an argument names nothing.
    """
    available = list(operator.providers(kernels))
    own = [provider.name for provider in available[: max(1, len(kernels))]]
    providers = choose_providers(available, peers, own)
    cases = select(operator.cases(), rows, pictured)
    if not cases:
        raise ValueError(f"no row of {operator.name} matches {rows!r}")
    return Selection(operator, cases, providers, own, available)


def measure(
    selection: Selection,
    device: torch.device,
    settings: runner.Settings,
    gathered: dict[str, Any],
    lines: report.JsonLines,
    console: Console,
) -> bool:
    """Run an operator's rows, write each as it is done, print the table; whether the run had to end early."""
    operator, own = selection.operator, selection.own[0]
    title = f"{operator.name} on {gathered['device']}, {len(selection.cases)} rows"
    with report.Progress(console, title, operator.unit, own) as progress:

        def finished(row: runner.Row) -> None:
            lines.write(report.to_json(row, operator.name, operator.unit, own))
            progress.add(row)

        done, ended = run_rows(operator, selection.cases, selection.providers, device, settings, finished)
    report.print_final(console, title, done, operator.unit, own, gathered, ended)
    return ended is not None
