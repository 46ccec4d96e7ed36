# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of earlier runs from their JSON lines and sorts them by operator, device and group."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .case import SMALLEST

Record = dict[str, Any]
OURS = "dsl"
# The kinds of other lines that `dsl-backend verify` writes.
VERIFIED = {"doctor", "verify", "check", "summary"}
# The kinds of other lines that `dsl-backend bench dsls` writes.
COMPARED = {"compile", "code", "left"}


def is_ours(provider: str) -> bool:
    """Whether a column is this package's: the kernel that dispatch chose, or a named one."""
    return provider == OURS or provider.startswith(f"{OURS}:")


def read(path: Path) -> list[Record]:
    """The environments, rows and comparisons of a file of `bench --json` or `verify --json`.

    An unfinished last line is skipped.

    Raises:
        ValueError: the file is not one of these.
    """
    try:
        records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    except (UnicodeDecodeError, json.JSONDecodeError):
        records = []
    if not records or not isinstance(records[0], dict) or records[0].get("kind") != "environment":
        raise ValueError(f"{path} was not written by `bench OP --json`: its first line is not of kind `environment`")
    strange = {str(record.get("kind")) for record in records} - {"environment", "row"} - VERIFIED - COMPARED
    if strange:
        raise ValueError(f"{path}: lines of kind {', '.join(sorted(strange))}: only rows of `bench OP` are accepted")
    return [record for record in records if record["kind"] not in VERIFIED]


@dataclass
class Section:
    """The rows of an operator on a device.

    Attributes:
        rows: id -> row. Of a row that several runs measured, `merged`.
    """

    operator: str
    device: str
    rows: dict[str, Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.operator} on {self.device}"

    @property
    def groups(self) -> dict[str, list[Record]]:
        """Group -> rows, without the smallest rows, whose rates mean nothing."""
        found: dict[str, list[Record]] = {}
        for row in self.rows.values():
            if row["group"] != SMALLEST:
                found.setdefault(row["group"], []).append(row)
        return found

    @property
    def smallest(self) -> list[Record]:
        """The rows that show the cost of a launch, the one with the least traffic first."""
        found = [row for row in self.rows.values() if row["group"] == SMALLEST]
        return sorted(found, key=lambda row: row["traffic_bytes"])


def gather(records: Sequence[Record]) -> tuple[list[Record], list[Section]]:
    """The environments, and the sections by operator and device in the order of their first rows."""
    environments: list[Record] = []
    sections: dict[tuple[str, str], Section] = {}
    for record in records:
        if record["kind"] == "environment":
            environments.append(record)
            continue
        if record["kind"] in COMPARED:
            continue
        key = (record["operator"], environments[-1]["device"])
        rows = sections.setdefault(key, Section(*key)).rows
        rows[record["id"]] = merged(rows[record["id"]], record) if record["id"] in rows else record
    return environments, list(sections.values())


def merged(earlier: Record, later: Record) -> Record:
    """A row of two runs: the later one, with the times of columns that only the earlier one measured.

    Such a cell keeps this package's cell of its own run as `beside`, to compare it with: clocks, cards and versions
    differ between runs. A column whose result was wrong in the later run has no time.
    """
    own = this_package(earlier)
    kept = {cell["provider"]: {"beside": own, **cell} if "median_us" in cell else cell for cell in earlier["cells"]}
    for cell in later["cells"]:
        if "median_us" in cell or cell["status"] == "wrong" or "median_us" not in kept.get(cell["provider"], {}):
            kept.pop(cell["provider"], None)
    cells = [kept.pop(cell["provider"], cell) for cell in later["cells"]]
    return {**later, "cells": [*cells, *kept.values()]}


def measured(row: Record) -> list[Record]:
    """The cells that have a time."""
    return [cell for cell in row["cells"] if "median_us" in cell]


def this_package(row: Record) -> Record | None:
    """This package's first cell that has a time."""
    return next((cell for cell in measured(row) if is_ours(cell["provider"])), None)


def order(rows: Sequence[Record]) -> list[str]:
    """The providers that were measured in some row, this package's first."""
    names = dict.fromkeys(cell["provider"] for row in rows for cell in measured(row))
    return sorted(names, key=lambda name: not is_ours(name))


@dataclass(frozen=True)
class Comparison:
    """This package compared with the fastest peer of a row.

    Attributes:
        ratio: the peer's time divided by this package's; above 1 this package is faster.
        verdict: `better` or `worse` if the ranges p10 to p90 of the samples do not overlap, else `open`.
    """

    peer: str
    ratio: float
    verdict: str


def compare(row: Record) -> Comparison | None:
    """Compares this package's first measured column with the fastest peer; None if no run measured both.

    A peer's time is divided by that of this package in the peer's own run (see `merged`).
    """
    ours = this_package(row)
    last = None if ours is None or "beside" in ours else ours
    pairs: list[tuple[Record, Record]] = []
    for cell in measured(row):
        own = cell.get("beside", last)
        if own is not None and not is_ours(cell["provider"]):
            pairs.append((cell, own))
    if not pairs:
        return None
    best, own = min(pairs, key=lambda pair: float(pair[0]["median_us"] / pair[1]["median_us"]))
    verdict = "better" if own["p90_us"] < best["p10_us"] else "worse" if own["p10_us"] > best["p90_us"] else "open"
    return Comparison(best["provider"], best["median_us"] / own["median_us"], verdict)


@dataclass(frozen=True)
class Tally:
    """A summary of the comparisons of a group of rows.

    Attributes:
        rows: the number of rows that could be compared.
        middle: geometric mean of the ratios.
        ahead, behind: the number of rows with the verdict `better` and `worse`.
    """

    rows: int
    middle: float
    lowest: float
    highest: float
    ahead: int
    behind: int


def tally(rows: Sequence[Record]) -> Tally | None:
    found = [one for row in rows if (one := compare(row))]
    if not found:
        return None
    ratios = [one.ratio for one in found]
    return Tally(
        rows=len(found),
        middle=statistics.geometric_mean(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        ahead=sum(one.verdict == "better" for one in found),
        behind=sum(one.verdict == "worse" for one in found),
    )


def axis_of(rows: Sequence[Record]) -> str | None:
    """The parameter that varies in a sweep; None if the rows are not one sweep."""
    axes = {row.get("axis") for row in rows}
    return axes.pop() if len(axes) == 1 else None


def differing(rows: Sequence[Record]) -> list[str]:
    """Parameters that are not the same in all rows."""
    return [name for name in rows[0]["parameters"] if len({str(row["parameters"].get(name)) for row in rows}) > 1]


def panels(rows: Sequence[Record], axis: str) -> Iterator[tuple[dict[str, object], list[Record]]]:
    """Splits a sweep into panels, whose rows differ only in the axis. Yields each panel's own parameters and its rows.

    A parameter that depends only on the axis (a batch that shrinks as the length grows) does not split the rows.
    Neither does a parameter that always equals another one.
    """

    def decided(name: str) -> bool:
        seen: dict[object, object] = {}
        return all(
            seen.setdefault(row["parameters"][axis], row["parameters"][name]) == row["parameters"][name] for row in rows
        )

    names: list[str] = []
    for name in differing(rows):
        twin = any(all(row["parameters"][name] == row["parameters"][kept] for row in rows) for kept in names)
        if name != axis and not decided(name) and not twin:
            names.append(name)
    found: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row["parameters"][name] for name in names), []).append(row)
    for values, members in found.items():
        yield dict(zip(names, values, strict=True)), members
