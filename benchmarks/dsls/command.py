# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend bench dsls [TABLE ...]`: measures the tables within a time limit; writes one page and one JSON file."""

import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from .. import command, measured, report
from ..case import SMALLEST
from ..command import Options, Selection
from . import NAME, code_lines, compile_times, tables
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
            records = [record for source in options.sources for record in in_order(measured.read(source), known)]
            command.show_results(records, (), options, console)
            return 0
        selections = [
            found for table in chosen.tables if (found := selection(table, known[table.operator], options)).cases
        ]
        if not selections:
            raise ValueError(f"no row of {NAME} matches {options.rows!r}")
        if options.only_list:
            for one in selections:
                one.print(console)
            return 0
        device = command.device_of(options.device)
    except (OSError, ValueError) as error:
        report.say(console, str(error))
        return 2
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
    gathered = command.begin(selections, device, options, lines)
    for record in code_lines.records([one.operator.name for one in selections]):
        lines.write(record)
    failed = False
    if chosen.rows:
        if device.type == "cuda" and (limit is None or limit >= AHEAD_SECONDS):
            command.compile_all(selections, options, console, AHEAD_SHARE)
        share = ROWS_SHARE if chosen.compile else 1.0
        until = None if limit is None else start + share * limit
        failed = command.measure_selections(selections, device, options, lines, gathered, console, until)
    if chosen.compile:
        tasks = [task for one in selections for task in compile_tasks(one, chosen.tables)]
        for record in compile_times.run(tasks, device.type, None if limit is None else start + limit):
            lines.write(record)
            report.say(console, compile_line(record))
    known = {one.operator.name: one.operator for one in selections}
    command.show_results(in_order(lines.entries, known), selections, options, console)
    return 1 if failed else 0


def in_order(records: Sequence[measured.Record], known: Mapping[str, Any]) -> list[measured.Record]:
    """The lines of a run with its rows in the operators' order, which is not the one they were measured in."""
    ids = [("row", name, case.id) for name, operator in known.items() for case in operator.cases()]
    places = {one: place for place, one in enumerate(ids, 1)}

    def place(record: measured.Record) -> int:
        if record["kind"] == "environment":
            return 0
        return places.get((record["kind"], record.get("operator", ""), record.get("id", "")), len(places) + 1)

    return sorted(records, key=place)


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
    return f"{name} cold {record['cold_s']:.2f} s, warm {record['warm_s']:.2f} s"
