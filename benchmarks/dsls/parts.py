# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that are not rows: compile times and lines of code."""

from collections.abc import Callable, Iterator, Sequence

from .. import document
from ..document import text
from ..measured import Record
from . import code_lines, compile_times

COMPILED = (
    "Seconds from the request until the kernel's first result, imports of the DSL included: with empty caches, and in "
    "a new process with the caches that the first one left."
)
WRITTEN = "Without blank lines, comments and docstrings; what kernels share and the host's code are not counted."


def of(records: Sequence[Record]) -> list[str]:
    """The parts for which there are records."""
    made = (
        part(records, code_lines.KIND, "Lines of code", WRITTEN, ["lines", "files"], lines_cells),
        part(records, compile_times.KIND, "Compile times", COMPILED, ["cold, s", "warm, s"], seconds_cells),
    )
    return [one for one in made if one]


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
    return [f"{record['cold_s']:.2f}", f"{record['warm_s']:.2f}"]
