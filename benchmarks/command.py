# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks OP`, which is also `dsl-backend bench OP`."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from . import attention, facts, report, runner, softmax
from .case import Case, Provider


def operators(page_size: int = 16) -> dict[str, Any]:
    """Every operator that has a benchmark, by name."""
    return {**attention.operators(page_size), **softmax.operators()}


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
    op: str,
    json_path: pathlib.Path | None = None,
    *,
    rows: str | None = None,
    peers: str | None = None,
    kernels: str | None = None,
    page_size: int = 16,
    seconds: float = 0.3,
    prepare_seconds: float = 240.0,
    flush: bool = False,
    seed: int = 0,
    only_list: bool = False,
    console: Console | None = None,
) -> int:
    """Measure an operator against its peers.

    Args:
        op: an operator's name.
        json_path: takes one JSON object a line: the machine's facts first, then each row.
        rows: regular expression that finds ids of rows, in any group; by default the rows of the table.
        peers: comma-separated names, `all` or `none`; by default those that need no compilation of their own.
        kernels: comma-separated names of our kernels, each a column; by default what dispatch chooses.
        page_size: tokens a page of the cache.
        seconds: of timing for each provider of each row.
        prepare_seconds: after which a provider that is not ready is given up.
        flush: overwrite the last-level cache before each replay.
        only_list: print the rows and providers, run nothing.

    Returns:
        0 where ours ran and was right in every row it serves, else 1; 2 where an argument names nothing.
    """
    console = console or Console()
    known = operators(page_size)
    if op not in known:
        report.say(console, f"no benchmark {op!r}: choose from {', '.join(known)}")
        return 2
    operator = known[op]
    own_kernels = [name.strip() for name in kernels.split(",") if name.strip()] if kernels else []
    available = operator.providers(own_kernels)
    own = [provider.name for provider in available[: max(1, len(own_kernels))]]
    cases = attention.rows.select(operator.cases(), rows)
    try:
        providers = choose_providers(available, peers, own)
    except ValueError as error:
        report.say(console, str(error))
        return 2
    if only_list:
        names = [f"{provider.name}{'' if provider.default else ' (by name only)'}" for provider in available]
        report.say(console, f"providers: {', '.join(names)}")
        for case in operator.cases():
            report.say(console, f"{case.group:10} {case.id}")
        return 0
    if not cases:
        report.say(console, f"no row of {op} matches {rows!r}")
        return 2

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gathered = facts.gather(device)
    lines = report.JsonLines(json_path)
    lines.write({"kind": "environment", **gathered, "page_size": page_size, "seconds": seconds, "flush": flush})
    settings = runner.Settings(seconds=seconds, prepare_seconds=prepare_seconds, flush=flush, seed=seed)
    title = f"{op} on {gathered['device']}, {len(cases)} rows"
    with report.Progress(console, title, operator.unit, own[0]) as progress:

        def finished(row: runner.Row) -> None:
            lines.write(report.to_json(row, op, operator.unit, own[0]))
            progress.add(row)

        done, ended = run_rows(operator, cases, providers, device, settings, finished)
    report.print_final(console, title, done, operator.unit, own[0], gathered, ended)
    failed = any(cell.status in ("error", "wrong") for row in done for cell in row.cells if cell.provider in own)
    return 1 if failed or ended else 0
