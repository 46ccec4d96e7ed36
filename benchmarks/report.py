# SPDX-License-Identifier: Apache-2.0
"""The output of a run: JSON lines, a table that grows on the terminal, and a short table at the end."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .case import Provider
from .facts import commit_of, source_of
from .runner import Cell, Row


def rate(row: Row, time_us: float, unit: str) -> float:
    """The rate in tera-units per second, of the work that the case needs (a provider may do more)."""
    return (row.case.traffic_bytes if unit == "TB/s" else row.case.flops) / time_us * 1e-6


def to_json(row: Row, operator: str, unit: str, ours: str) -> dict[str, Any]:
    """A row as JSON. Times are in microseconds; `speedup` is the provider's time divided by this package's."""
    own = row.time_us(ours)
    cells = []
    for cell in row.cells:
        entry: dict[str, Any] = {"provider": cell.provider, "status": cell.status}
        if cell.message:
            entry["message"] = cell.message
        if cell.time is not None and cell.error is not None:
            median = cell.time.median_us
            entry |= {
                "median_us": median,
                "p10_us": cell.time.p10_us,
                "p90_us": cell.time.p90_us,
                "samples": cell.time.samples,
                "error": cell.error.total,
                "worst_row_error": cell.error.row,
                "of_floor": median / row.floor_us if row.floor_us else None,
                "rate": rate(row, median, unit),
                "speedup": median / own if own else None,
                "launch_us": cell.launch_us,
            }
        cells.append(entry)
    return {
        "kind": "row",
        "operator": operator,
        "id": row.case.id,
        "group": row.case.group,
        "axis": row.case.axis,
        "parameters": dict(row.case.parameters),
        "traffic_bytes": row.case.traffic_bytes,
        "flops": row.case.flops,
        "floor_us": row.floor_us,
        "unit": unit,
        "layers": row.layers,
        "cells": cells,
    }


class JsonLines:
    """Appends JSON objects to a file at once, one on each line, so that an interrupted run keeps its results.

    Attributes:
        entries: all objects so far.
        failure: why the file does not have all of them; empty if it has. A full disk does not end a run.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self.failure = ""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def write(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        if self.path is None or self.failure:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            self.failure = f"{self.path} does not have all results: {error.strerror}"


def microseconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


def own_text(row: Row, cell: Cell, unit: str) -> list[str]:
    """This package's columns: time, time divided by the floor, rate."""
    if cell.time is None:
        return [cell.status, "", ""]
    median = cell.time.median_us
    spread = 100 * (cell.time.p90_us - cell.time.p10_us) / median
    of_floor = f"{median / row.floor_us:.2f}x" if row.floor_us else ""
    return [f"{microseconds(median)} ±{spread / 2:.1f}%", of_floor, f"{rate(row, median, unit):.3g}"]


def peer_text(cell: Cell, own: float | None) -> str:
    """A peer's time, and in brackets that time divided by this package's."""
    if cell.time is None:
        return "-" if cell.status == "skipped" else cell.status
    median = cell.time.median_us
    return f"{microseconds(median)} ({median / own:.2f}x)" if own else microseconds(median)


def headings(rows: Sequence[Row], unit: str, ours: str) -> list[str]:
    """The columns, without peers that ran in no row."""
    peers = [cell.provider for cell in rows[0].cells if cell.provider != ours] if rows else []
    kept = [name for name in peers if any(c.provider == name and c.status != "skipped" for r in rows for c in r.cells)]
    return ["row", "floor us", f"{ours} us", "of floor", unit, *(f"{name} us" for name in kept)]


def line(row: Row, columns: Sequence[str], unit: str, ours: str) -> list[str]:
    cells = {cell.provider: cell for cell in row.cells}
    own = row.time_us(ours)
    floor = microseconds(row.floor_us) if row.floor_us else ""
    peers = [peer_text(cells[name.removesuffix(" us")], own) for name in columns[5:]]
    return [row.case.id, floor, *own_text(row, cells[ours], unit), *peers]


def markdown(rows: Sequence[Row], unit: str, ours: str) -> str:
    """The final table. A peer's column has its time and, in brackets, that time divided by this package's."""
    if not rows:
        return "no rows"
    columns = headings(rows, unit, ours)
    body = [line(row, columns, unit, ours) for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *body, strict=True)]

    def join(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([join(columns), rule, *map(join, body)])


def problems(rows: Sequence[Row]) -> list[str]:
    """A line for each cell that raised or was wrong, and a line for each distinct reason to skip."""
    lines = [
        f"{row.case.id}: {cell.provider}: {cell.status}: {cell.message}"
        for row in rows
        for cell in row.cells
        if cell.status in ("error", "wrong")
    ]
    skipped = dict.fromkeys(
        f"{cell.provider} skipped: {cell.message}" for row in rows for cell in row.cells if cell.status == "skipped"
    )
    return lines + list(skipped)


class Progress:
    """Shows rows as they finish: a table that grows on a terminal, a line each in a log."""

    def __init__(self, console: Console, title: str, unit: str, ours: str) -> None:
        self.console, self.title, self.unit, self.ours = console, title, unit, ours
        self.rows: list[Row] = []
        self.live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self.live.start()
        else:
            say(self.console, self.title)
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.console.is_terminal:
            self.live.update(rich_table(self.title, self.rows, self.unit, self.ours), refresh=True)
            return
        cells = [f"{c.provider} {f'{microseconds(c.time.median_us)} us' if c.time else c.status}" for c in row.cells]
        say(self.console, f"{row.case.id}: {', '.join(cells)}")


def say(console: Console, text: str) -> None:
    """Prints a line without markup, colours or wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_problems(console: Console, rows: Sequence[Row], ended: str | None) -> None:
    """Prints what did not run or was wrong, and why the run ended early if it did."""
    for problem in problems(rows):
        say(console, problem)
    if ended:
        say(console, f"ended early: {ended}")


def machine(title: str, gathered: Mapping[str, Any]) -> str:
    """A title with the commit, the driver, the versions and the date of a run."""
    versions = ", ".join(f"{name} {version}" for name, version in gathered["versions"].items() if version)
    commit = commit_of(gathered) or "unknown"
    return f"{title}; commit {commit}; driver {gathered.get('driver')}; {versions}; {gathered['date']}"


def sources(providers: Sequence[Provider], gathered: Mapping[str, Any]) -> str:
    """What each column runs."""
    return f"Columns: {'; '.join(f'{one.name}: {source_of(one, gathered)}' for one in providers)}."


def others(available: Sequence[Provider], providers: Sequence[Provider]) -> str:
    """The columns that an operator has besides those that ran, and how to have them; empty if there are none."""
    ran = {one.name for one in providers}
    names = [one.name for one in available if one.name not in ran]
    return f"Not run by default: {', '.join(names)}. --peers all runs them, --peers NAME,... some." if names else ""


def print_final(
    console: Console,
    title: str,
    rows: Sequence[Row],
    unit: str,
    ours: str,
    gathered: Mapping[str, Any],
    ended: str | None,
) -> None:
    """Prints the end of the log: problems, the machine, the table."""
    print_problems(console, rows, ended)
    say(console, machine(title, gathered))
    say(console, f"Peers' columns: microseconds and, in brackets, that time divided by {ours}'s.")
    say(console, markdown(rows, unit, ours))


def rich_table(title: str, rows: Sequence[Row], unit: str, ours: str) -> Table:
    table = Table(title=title)
    if rows:
        columns = headings(rows, unit, ours)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*line(row, columns, unit, ours))
    return table
