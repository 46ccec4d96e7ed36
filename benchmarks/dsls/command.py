# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend bench dsls [TABLE[=SECONDS] ...]`: measures tables within time limits; writes a page and a JSON file."""

import math
import pathlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from .. import command, measured, report
from ..case import SMALLEST
from ..command import Options, Selection
from ..processes import exit_on_sigterm
from . import NAME, code_lines, compile_times, parts, tables
from .tables import Choice, Table

# Of the time limit: until when kernels are compiled ahead, and until when rows are measured if compile times follow.
AHEAD_SHARE, ROWS_SHARE = 0.3, 0.6
# With less time nothing is compiled ahead: 15 processes beside an H100 took 32 s for 26 of 130 launches, most of it to
# import torch 2.14.
AHEAD_SECONDS = 120.0


def main(names: Sequence[str], json_path: pathlib.Path | None, options: Options, console: Console) -> int:
    """Measures tables.

    Args:
        names: as `tables.chosen`.

    Returns:
        0 if this package's kernels were right in every row, else 1; 2 if an argument is not valid.
    """
    try:
        chosen = tables.chosen(names)
        known = command.operators(options.page_size)
        check(chosen.tables, known, options)
        if options.sources:
            records = [record for source in options.sources for record in measured.read(source)]
            command.show_results(in_order(records, known), (), options, console)
            return 0
        selections = [selection(table, known[table.operator], options) for table in chosen.tables]
        command.check_matches(options.rows, selections, named=bool(names))
        selections = [one for one in selections if one.cases]
        if options.only_list:
            for one in selections:
                one.print(console)
            return 0
        device = command.device_of(options.device)
    except (OSError, ValueError) as error:
        report.say(console, str(error))
        return 2
    exit_on_sigterm()
    return measure(chosen, selections, device, options, report.JsonLines(json_path), console)


def check(chosen: Sequence[Table], known: dict[str, Any], options: Options) -> None:
    """Raises ValueError: options do not fit."""
    if options.held_out or options.files or options.kernels:
        raise ValueError(f"{NAME} has its own rows and columns: --held-out, --with and --kernels are for one operator")
    operators = [table.operator for table in chosen]
    command.check_options(operators, known, options)
    command.check_peers(options.peers, [known[name] for name in operators])


def selection(table: Table, operator: Any, options: Options) -> Selection:
    """A table's rows and columns. On a CPU they are the operator's smallest rows."""
    groups = table.groups if options.device == "cuda" else (SMALLEST,)
    known = [case for case in operator.cases() if case.group in groups]
    cases = [case for case in tables.spread(known) if re.search(options.rows or "", case.id)]
    available = operator.providers([])
    own = [available[0].name]
    peers = ",".join(table.peers) if options.peers is None else options.peers
    return Selection(operator, known, cases, command.choose_providers(available, peers, own), own, available)


def measure(
    chosen: Choice,
    selections: Sequence[Selection],
    device: torch.device,
    options: Options,
    lines: report.JsonLines,
    console: Console,
) -> int:
    """Measures everything and writes the page; returns the exit status."""
    start, limit = time.monotonic(), options.limit_seconds
    until = None if limit is None else start + limit
    gathered = command.begin(selections, device, options, lines)
    for record in code_lines.records([one.operator.name for one in selections]):
        lines.write(record)
    failed = False
    if chosen.rows:
        compile_ahead(chosen, selections, device, options, console)
        share = ROWS_SHARE if chosen.compile and tables.COMPILE not in chosen.seconds else 1.0
        rows_until = None if limit is None else start + share * limit
        failed = command.measure_selections(
            selections, device, options, lines, gathered, console, rows_until, chosen.seconds
        )
        for record in left_out(chosen, selections, lines.entries, options):
            lines.write(record)
    if chosen.compile:
        own = chosen.seconds.get(tables.COMPILE)
        tasks = [task for one in selections for task in compile_tasks(one, chosen.tables)]
        end = until if own is None else command.earlier(time.monotonic() + own, until)
        for record in compile_times.run(tasks, device.type, end):
            lines.write(record)
            report.say(console, compile_line(record))
    known = {one.operator.name: one.operator for one in selections}
    command.show_results(in_order(lines.entries, known), selections, options, console)
    return 1 if failed else 0


def compile_ahead(
    chosen: Choice, selections: Sequence[Selection], device: torch.device, options: Options, console: Console
) -> None:
    """Compiles the kernels of all rows in parallel, on a GPU and if there is time for it."""
    limit, own = options.limit_seconds, chosen.seconds.get(tables.AHEAD)
    if device.type != "cuda" or own == 0 or (own is None and limit is not None and limit < AHEAD_SECONDS):
        return
    seconds = math.inf if limit is None else AHEAD_SHARE * limit
    command.compile_all(selections, options, console, seconds if own is None else own)


def left_out(
    chosen: Choice, selections: Sequence[Selection], records: Sequence[measured.Record], options: Options
) -> Iterator[dict[str, Any]]:
    """A line for each row of the tables that was not measured: of kind `parts.LEFT`, with a message that says why."""
    done = {(one["operator"], one["id"]) for one in records if one["kind"] == "row"}
    for one in selections:
        name, asked = one.operator.name, {case.id for case in one.cases}
        own = chosen.seconds.get(name)
        limits = [f"{name}={own:g}"] if own is not None else []
        limits += [f"--limit-seconds {options.limit_seconds:g}"] if options.limit_seconds is not None else []
        late = f"no time was left ({', '.join(limits)})" if limits else "the run ended early"
        for case in one.known:
            if (name, case.id) not in done:
                why = late if case.id in asked else f"--rows {options.rows} leaves it out"
                yield {"kind": parts.LEFT, "operator": name, "id": case.id, "message": why}


def in_order(records: Sequence[measured.Record], known: Mapping[str, Any]) -> list[measured.Record]:
    """The lines of runs by device, with the rows in the operators' order, which is not the one they were measured in.

    Lines about the same row stay in the order of their runs.
    """
    ids = [("row", name, case.id) for name, operator in known.items() for case in operator.cases()]
    places = {one: place for place, one in enumerate(ids, 1)}

    def place(record: measured.Record) -> int:
        if record["kind"] == "environment":
            return 0
        return places.get((record["kind"], record.get("operator", ""), record.get("id", "")), len(places) + 1)

    return [record for mine in parts.by_device(records).values() for record in sorted(mine, key=place)]


def compile_tasks(one: Selection, chosen: Sequence[Table]) -> list[compile_times.Task]:
    """The kernels of one row of a table: the one that the table names, or else the first."""
    (name,) = (table.compiled for table in chosen if table.operator == one.operator.name)
    case = next((case for case in one.known if case.id == name), one.known[0])
    return [compile_times.Task(one.operator.name, case, provider) for provider in one.providers]


def compile_line(record: dict[str, Any]) -> str:
    """A record of `compile_times` for the log."""
    name = f"compile {record['operator']} {record['id']}: {record['provider']}"
    if record["status"] != "ok":
        return f"{name} {record['status']}: {record['message']}"
    warm = record["message"] if record["warm_s"] is None else f"warm {record['warm_s']:.2f} s"
    return f"{name} cold {record['cold_s']:.2f} s, {warm}"
