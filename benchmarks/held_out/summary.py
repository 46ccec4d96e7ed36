# SPDX-License-Identifier: Apache-2.0
"""The end of a held-out run: the rows that are slower than the best peer, then a line for each operator and group."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..case import Case
from ..measured import Record, compare, is_ours, measured, tally
from ..report import microseconds

# A peer that is up to 3 % faster is within what two runs of the same kernel differ.
TOLERATED = 0.97


def slower(rows: Sequence[Record]) -> list[Record]:
    """The rows in which a peer is faster, the worst first."""
    ratios = {id(row): found.ratio for row in rows if (found := compare(row))}
    return sorted((row for row in rows if ratios.get(id(row), 1.0) < 1), key=lambda row: ratios[id(row)])


def slower_line(row: Record) -> str:
    found = compare(row)
    assert found is not None
    times = {cell["provider"]: float(cell["median_us"]) for cell in measured(row)}
    ours = next(time for name, time in times.items() if is_ours(name))
    times_us = f"{microseconds(ours)} us, {found.peer} {microseconds(times[found.peer])} us"
    note = "" if found.verdict == "worse" else "; within the scatter of the samples"
    return f"{found.ratio:5.2f}x  {row['operator']} {row['id']}: {times_us}{note}"


def group_line(operator: str, group: str, cases: Sequence[Case[Any]], rows: Sequence[Record]) -> str:
    """Geometric mean and lowest ratio of the rows of a group, and how many rows have which ratio."""
    found, name = tally(rows), f"{operator} {group}"
    if found is None:
        return f"{name:18} 0 of {len(cases)} rows have a time of this package and of a peer"
    ratios = [one.ratio for row in rows if (one := compare(row))]
    below = {limit: sum(ratio < limit for ratio in ratios) for limit in (1, TOLERATED)}
    return (
        f"{name:18} {found.rows} of {len(cases)} rows, geometric mean {found.middle:.3f}x, lowest {found.lowest:.2f}x; "
        f"{below[1]} below 1x, {below[TOLERATED]} below {TOLERATED}x"
    )


def lines(listed: Mapping[str, Sequence[Case[Any]]], records: Sequence[Record]) -> Iterator[str]:
    """The lines to print.

    Args:
        listed: operator -> the rows that were to be measured.
        records: the rows that were measured, as JSON.
    """
    behind, compared = slower(records), [row for row in records if compare(row)]
    yield f"Slower than the best peer: {len(behind)} of {len(compared)} rows (the peer's time divided by dsl's)"
    yield from map(slower_line, behind)
    yield "The best peer's time divided by dsl's"
    for operator, cases in listed.items():
        for group in dict.fromkeys(case.group for case in cases):
            of_group = [row for row in records if row["operator"] == operator and row["group"] == group]
            yield group_line(operator, group, [case for case in cases if case.group == group], of_group)
    for operator, cases in listed.items():
        done = {row["id"] for row in records if row["operator"] == operator}
        if missing := [case.id for case in cases if case.id not in done]:
            yield f"{operator}: {len(missing)} rows were not measured in time: {missing[0]} to {missing[-1]}"
