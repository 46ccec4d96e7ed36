# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that are not rows: compile times, lines of code, and what was not measured."""

from collections.abc import Callable, Iterator, Sequence

from .. import document
from ..document import text
from ..measured import COMPARED, Record
from . import code_lines, compile_times, tables

# The kind of a line about a row that was not measured.
LEFT = "left"
# So many ids are listed of the rows that were left out for one reason.
LISTED = 4

COMPILED = (
    "Seconds from the request until the kernel's first result, imports of the DSL included: with empty caches, and in "
    "a new process with the caches that the first one left."
)
LEAVES = "Rows and tables of the comparison without a figure on this page, and why."
NOT_ASKED = "no run of this page asked for it"
WRITTEN = "Without blank lines, comments and docstrings; what kernels share and the host's code are not counted."


def of(records: Sequence[Record]) -> list[str]:
    """The parts for which there are records."""
    made = (
        part(records, code_lines.KIND, "Lines of code", WRITTEN, ["lines", "files"], lines_cells),
        part(records, compile_times.KIND, "Compile times", COMPILED, ["cold, s", "warm, s"], seconds_cells),
    )
    return [one for one in (*made, not_measured(records)) if one]


def not_measured(records: Sequence[Record]) -> str:
    """A table of what the comparison lacks, for each device; empty if nothing lacks or this is no comparison."""
    devices: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "environment":
            mine = devices.setdefault(record["device"], [])
        else:
            mine.append(record)
    lines = []
    for device, mine in devices.items():
        if any(record["kind"] in COMPARED for record in mine):
            lines += list(gaps(device, mine))
    if not lines:
        return ""
    return "<h2>Not measured</h2>" + document.table(LEAVES, ["device", "table"], ["rows", "why"], lines)


def gaps(device: str, records: Sequence[Record]) -> Iterator[str]:
    """The lines of `not_measured` for one device."""
    done = {(one["operator"], one["id"]) for one in records if one["kind"] == "row"}
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for one in records:
        if one["kind"] == LEFT and (one["operator"], one["id"]) not in done:
            reasons.setdefault((one["operator"], one["message"]), {})[one["id"]] = None
    found = [(name, listed(list(ids)), why) for (name, why), ids in reasons.items()]
    there = {name for name, _ in done} | {name for name, _ in reasons}
    found += [(table.operator, "all", NOT_ASKED) for table in tables.TABLES if table.operator not in there]
    if not any(one["kind"] == compile_times.KIND for one in records):
        found.append((tables.COMPILE, "all", NOT_ASKED))
    for index, (name, rows, why) in enumerate(found):
        cells = f"<td>{text(rows)}</td><td>{text(why)}</td></tr>"
        yield document.labelled(device, name, index == 0) + cells


def listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return f"{len(ids)}: {', '.join(ids[:LISTED])}{more}"


def part(
    records: Sequence[Record],
    kind: str,
    title: str,
    caption: str,
    heads: Sequence[str],
    cells: Callable[[Record], list[str]],
) -> str:
    found = [record for record in records if record["kind"] == kind]
    if not found:
        return ""
    lines = list(labelled(found, cells))
    return f"<h2>{text(title)}</h2>" + document.table(caption, ["operator", "provider"], heads, lines)


def labelled(records: Sequence[Record], cells: Callable[[Record], list[str]]) -> Iterator[str]:
    """Rows by operator. If something was recorded twice, the later one counts."""
    latest = {(one["operator"], one.get("id", ""), one["provider"]): one for one in records}
    before = ""
    for (operator, row, provider), record in sorted(latest.items(), key=lambda pair: pair[0][:2]):
        name = f"{operator}, {row}" if row else operator
        values = cells(record) if record["status"] == "ok" else [f"{record['status']}: {record['message']}", ""]
        shown = "".join(f"<td>{text(value)}</td>" for value in values)
        yield document.labelled(name, provider, name != before) + shown + "</tr>"
        before = name


def lines_cells(record: Record) -> list[str]:
    return [str(record["lines"]), ", ".join(record["files"])]


def seconds_cells(record: Record) -> list[str]:
    warm = record["message"] if record["warm_s"] is None else f"{record['warm_s']:.2f}"
    return [f"{record['cold_s']:.2f}", warm]
