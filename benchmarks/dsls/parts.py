# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that are not rows: compile times, lines of code, and what was not measured."""

from collections.abc import Callable, Iterator, Sequence

from .. import document
from ..document import text
from ..measured import COMPARED, Record, gather
from . import code_lines, compile_times, tables

# The kind of a line about a row that was not measured.
LEFT = "left"

COMPILED = (
    "Seconds from the request until the kernel's first result, imports of the DSL included: with empty caches, and in "
    "a new process with the caches that the first one left."
)
LEAVES = "What of the comparison has no figure on this page: tables, rows, columns and compile times, and why."
NOT_ASKED = "no run of this page asked for it"
WRITTEN = "Without blank lines, comments and docstrings; what kernels share and the host's code are not counted."


def of(records: Sequence[Record]) -> list[str]:
    """The parts for which there are records."""
    devices = by_device(records)
    made = [part(records, code_lines.KIND, "Lines of code", WRITTEN, ["lines", "files"], lines_cells)]
    for device, mine in devices.items():
        title = f"Compile times on {device}" if len(devices) > 1 else "Compile times"
        made.append(part(mine, compile_times.KIND, title, COMPILED, ["cold, s", "warm, s"], seconds_cells))
    return [one for one in (*made, not_measured(records)) if one]


def by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of runs on each device, an environment before those of its run."""
    devices: dict[str, list[Record]] = {}
    mine: list[Record] = []
    for record in records:
        if record["kind"] == "environment":
            mine = devices.setdefault(record["device"], [])
        mine.append(record)
    return devices


def not_measured(records: Sequence[Record]) -> str:
    """A table of what the comparison lacks, for each device; empty if nothing lacks or this is no comparison."""
    lines = []
    for device, mine in by_device(records).items():
        if any(record["kind"] in COMPARED for record in mine):
            lines += list(gaps(device, mine))
    if not lines:
        return ""
    return "<h2>Not measured</h2>" + document.table(LEAVES, ["device", "table"], ["what", "why"], lines)


def gaps(device: str, records: Sequence[Record]) -> Iterator[str]:
    """The lines of `not_measured` for one device."""
    sections = {section.operator: section for section in gather(records)[1]}
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for one in records:
        done = sections[one["operator"]].rows if one.get("operator") in sections else {}
        if one["kind"] == LEFT and one["id"] not in done:
            reasons.setdefault((one["operator"], one["message"]), {})[one["id"]] = None
    found = [(name, document.listed(list(ids)), why) for (name, why), ids in reasons.items()]
    there = sections.keys() | {name for name, _ in reasons}
    for table in tables.TABLES:
        if table.operator not in there:
            found.append((table.operator, "all", NOT_ASKED))
        elif table.operator in sections:
            found += columns_without_times(table, list(sections[table.operator].rows.values()))
    found += kernels_without_compile_times(records)
    for index, (name, rows, why) in enumerate(found):
        cells = f"<td>{text(rows)}</td><td>{text(why)}</td></tr>"
        yield document.labelled(device, name, index == 0) + cells


def columns_without_times(table: tables.Table, rows: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """The table's columns that have no time in some of its rows: operator, which, and why."""
    reasons: dict[str, dict[str, int]] = {}
    for peer in table.peers:
        for row in rows:
            cell = next((cell for cell in row["cells"] if cell["provider"] == peer), {"message": NOT_ASKED})
            if "median_us" not in cell:
                missing = reasons.setdefault(cell.get("message") or cell["status"], {})
                missing[peer] = missing.get(peer, 0) + 1
    for why, missing in reasons.items():
        for count in dict.fromkeys(missing.values()):
            whose = ", ".join(peer for peer, rows_of_peer in missing.items() if rows_of_peer == count)
            yield table.operator, f"{whose} in {count} of {len(rows)} rows", why


def kernels_without_compile_times(records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """The tables' kernels without a compile time: the name of that part, whose, and why."""
    found = latest([one for one in records if one["kind"] == compile_times.KIND])
    if not found:
        yield tables.COMPILE, "all", NOT_ASKED
        return
    known = {(operator, provider): one for (operator, _, provider), one in found.items()}
    reasons: dict[str, list[str]] = {}
    for table in tables.TABLES:
        for peer in table.peers:
            one = known.get((table.operator, peer), {"status": "skipped", "message": NOT_ASKED})
            if one["status"] != "ok":
                reasons.setdefault(one["message"], []).append(f"{table.operator} {peer}")
    for why, whose in reasons.items():
        yield tables.COMPILE, document.listed(whose), why


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


def latest(records: Sequence[Record]) -> dict[tuple[str, str, str], Record]:
    """(operator, row, provider) -> what was recorded last; figures are not replaced by reasons for having none."""
    found: dict[tuple[str, str, str], Record] = {}
    for one in records:
        key = (one["operator"], one.get("id", ""), one["provider"])
        if one["status"] == "ok" or key not in found or found[key]["status"] != "ok":
            found[key] = one
    return found


def labelled(records: Sequence[Record], cells: Callable[[Record], list[str]]) -> Iterator[str]:
    """Rows by operator."""
    before = ""
    for (operator, row, provider), record in sorted(latest(records).items(), key=lambda pair: pair[0][:2]):
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
