# SPDX-License-Identifier: Apache-2.0
"""Writes one self-contained HTML page of the results of operators' benchmarks."""

from collections.abc import Sequence
from pathlib import Path

from . import charts, document
from .case import TABLE
from .document import facts_line, text
from .dsls import parts as dsls_parts
from .measured import Comparison, Record, Section, axis_of, compare, differing, gather, measured, order, panels, tally
from .report import microseconds

MEANING = {
    "rate": "the bytes or operations that the problem needs, divided by the median time of a launch. Error bars: p10 "
    "to p90. Launches are replayed from a CUDA graph, with cold L2 data.",
    "ceiling": "the rate of a row at its roofline time: the longer of its bytes at the device's measured bandwidth "
    "and its operations at the measured rate of bf16 products. A device that was never measured has none.",
    "best peer": "the fastest of the row's other columns, which may be another kernel of this package. Above 1 dsl is "
    "faster. Coloured if the ranges p10 to p90 do not overlap.",
    "smallest problem": "consecutive launches in a CUDA graph: the cost of a kernel that has almost no work.",
    "host": "the host time of a launch without a graph, until the call returns: median of single calls.",
}


def write(records: Sequence[Record], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(render(records), path)


def render(records: Sequence[Record]) -> str:
    """The page.

    Args:
        records: the lines of `bench --json` of one or several runs, concatenated.

    Raises:
        ValueError: the records have no row.
    """
    environments, sections = gather(records)
    comparison = dsls_parts.of(records)
    if not sections and not comparison:
        raise ValueError("no row was measured: there is nothing to show")
    devices = list(dict.fromkeys(facts["device"] for facts in environments))
    title = f"Kernels on {', '.join(devices)}"
    parts = [f"<h1>{text(title)}</h1>", *map(facts_line, header(environments)), document.notes(complaints(records))]
    titles = [section.name if len(devices) > 1 else section.operator for section in sections]
    parts.append(summary(sections, titles))
    parts += [section_part(section, name, environments) for section, name in zip(sections, titles, strict=True)]
    parts += [latencies(sections, device) for device in devices]
    parts += comparison
    parts.append(document.words(MEANING))
    return document.document(title, parts)


def header(environments: Sequence[Record]) -> list[str]:
    """The device and versions of the runs. Runs with the same facts are listed once."""
    lines: dict[tuple[str, str], str] = {}
    for facts in environments:
        driver = [f"driver {facts['driver']}"] if facts.get("driver") else []
        flush = ["cache overwritten before each sample"] if facts.get("flush") else []
        parts = [facts["device"], *driver, document.commit_of(facts), f"pages of {facts['page_size']} tokens", *flush]
        lines.setdefault((", ".join(parts), document.versions_of(facts)), facts["date"].replace("T", " "))
    return [line for (machine, versions), date in lines.items() for line in (f"{machine}; {date}", versions)]


def complaints(records: Sequence[Record]) -> list[str]:
    """Warnings about the results."""
    environments, sections = gather(records)
    found = []
    if any(facts["device"] == "cpu" for facts in environments):
        found.append("This ran on a CPU: it shows that the kernels run, and says nothing about speed on a GPU.")
    if len({facts.get("commit") for facts in environments}) > 1:
        found.append("The results come from several commits.")
    without = sorted(
        {section.device for section in sections if not any(charts.ceiling(r) for r in section.rows.values())}
    )
    found += [
        f"{name}: no ceiling, because the peak rates of this device are not known" for name in without if name != "cpu"
    ]
    failures: dict[str, dict[str, None]] = {}
    for row in records:
        for cell in row["cells"] if row["kind"] == "row" else ():
            if cell["status"] in ("wrong", "error"):
                what = f"{row['operator']}: {cell['provider']}: {cell['status']}: {cell.get('message', '')}"
                failures.setdefault(what, {})[row["id"]] = None
    found += [f"{what} (in {document.listed(list(ids))})" for what, ids in failures.items()]
    return found


def summary(sections: Sequence[Section], titles: Sequence[str]) -> str:
    """This package compared with the best peer, by operator and group."""
    rows = []
    for section, title in zip(sections, titles, strict=True):
        first = True
        for group, members in section.groups.items():
            found = tally(members)
            if found is None:
                continue
            cells = f"<td>{found.rows}</td><td>{found.middle:.2f}×</td>"
            cells += f"<td>{found.lowest:.2f}–{found.highest:.2f}</td>"
            cells += f'<td class="{"better" if found.ahead else ""}">{found.ahead}</td>'
            cells += f'<td class="{"worse" if found.behind else ""}">{found.behind}</td></tr>'
            rows.append(document.labelled(title, heading(group), first) + cells)
            first = False
    if not rows:
        return ""
    caption = (
        "The best peer's time divided by dsl's: above 1 dsl is faster. "
        "Ahead and behind: the number of rows whose ranges p10 to p90 do not overlap."
    )
    heads = ["rows", "geometric mean", "lowest to highest", "ahead", "behind"]
    return "<h2>dsl and the best peer</h2>" + document.table(caption, ["operator", "rows"], heads, rows)


def latencies(sections: Sequence[Section], device: str) -> str:
    """The cost of launches with almost no work."""
    rows = [(one.operator, row) for one in sections if one.device == device for row in one.smallest]
    if not rows:
        return ""
    lines = []
    for operator, row in rows:
        # If no provider was measured, show the status of each.
        for index, cell in enumerate(measured(row) or row["cells"]):
            label = f"{operator}, {row['id']}"
            host = microseconds(cell["launch_us"]) if "launch_us" in cell else "-"
            shown = microseconds(cell["median_us"]) if "median_us" in cell else text(cell["status"])
            lines.append(
                document.labelled(label, cell["provider"], index == 0) + f"<td>{shown}</td><td>{host}</td></tr>"
            )
    table = document.table("Microseconds.", ["operator, row", "provider"], ["a launch, us", "host, us"], lines)
    smallest: dict[str, Record] = {}
    for operator, row in rows:
        if measured(row):
            smallest.setdefault(operator, row)
    picture = document.charts([charts.latency_chart(smallest)], wide=True) if smallest else ""
    return f"<h2>Launches on {text(device)}</h2>{picture}{table}"


def section_part(section: Section, title: str, environments: Sequence[Record]) -> str:
    rows = [row for members in section.groups.values() for row in members]
    if not rows:
        return ""
    names = order(rows)
    parts = [f"<h2>{text(title)}</h2>"]
    for group, members in section.groups.items():
        parts.append(f"<h3>{text(heading(group))}</h3>{facts_line(common(members))}")
        parts.append(pictures(members, names))
    parts.append(rows_table(section, rows, names))
    parts.append(facts_line(what_ran(section, names, environments)))
    parts += map(facts_line, left_out(rows, names))
    return "".join(parts)


def what_ran(section: Section, names: Sequence[str], environments: Sequence[Record]) -> str:
    """Each column's distribution or file with its version; several where runs had several."""
    found: dict[str, dict[str, None]] = {name: {} for name in names}
    for facts in environments:
        sources = facts.get("providers", {}).get(section.operator, {})
        if facts["device"] == section.device:
            for name in names:
                found[name] |= dict.fromkeys([sources[name]] if name in sources else [])
    columns = [f"{name}: {' or '.join(one) or 'version unknown'}" for name, one in found.items()]
    return f"Columns: {'; '.join(columns)}."


def left_out(rows: Sequence[Record], names: Sequence[str]) -> list[str]:
    """A line for each provider that was not run in some row that says why."""
    reasons: dict[str, dict[str, int]] = {}
    for row in rows:
        for cell in row["cells"]:
            if cell["provider"] not in names or cell["status"] == "skipped":
                found = reasons.setdefault(cell["provider"], {})
                why = cell.get("message") or cell["status"]
                found[why] = found.get(why, 0) + 1
    return [f"{name} was not run{in_rows(found, len(rows))}" for name, found in reasons.items()]


def in_rows(reasons: dict[str, int], rows: int) -> str:
    """The reasons; with the number of rows of each if there are rows without one."""
    if sum(reasons.values()) == rows:
        return f": {'; '.join(reasons)}"
    return f" in {'; '.join(f'{count} of {rows} rows: {why}' for why, count in reasons.items())}"


def heading(group: str) -> str:
    """A group's name for the reader of the page."""
    return "usual shapes" if group == TABLE else group


def pictures(rows: Sequence[Record], names: Sequence[str]) -> str:
    """A chart for each panel of a sweep, or one bar chart."""
    shown = [row for row in rows if measured(row)]
    if not shown:
        return "<p>No provider was measured.</p>"
    axis = axis_of(shown)
    if axis is None:
        return document.charts([charts.bar_chart(shown, names)], wide=True)
    figures = [charts.line_chart(m, names, axis, parameters(apart)) for apart, m in panels(shown, axis)]
    charts.level(figures)
    return document.charts(figures, wide=len(figures) == 1)


def parameters(values: dict[str, object]) -> str:
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def common(rows: Sequence[Record]) -> str:
    """The parameters that all rows of a group share, without those that are None (a feature that is off)."""
    apart = differing(rows)
    shared = {name: value for name, value in rows[0]["parameters"].items() if name not in apart}
    return parameters({name: value for name, value in shared.items() if value not in (None, False)})


def rows_table(section: Section, rows: Sequence[Record], names: Sequence[str]) -> str:
    """A table of every row with all times and the comparison with the best peer."""
    lines = []
    groups = [heading(row["group"]) for row in rows]
    for index, row in enumerate(rows):
        floor = microseconds(row["floor_us"]) if row["floor_us"] else "-"
        cells = [f"<td>{floor}</td>", *(time_cell(row, name) for name in names), *peer_cells(compare(row))]
        first = index == 0 or groups[index] != groups[index - 1]
        lines.append(document.labelled(groups[index], row["id"], first) + "".join(cells) + "</tr>")
    caption = (
        "Median microseconds of a launch, ± half of the range p10 to p90, and for dsl the rate. "
        "The fastest is bold. - means not run; move the pointer over it to see the reason."
    )
    if any("beside" in cell for row in rows for cell in row["cells"]):
        caption += " * is of an earlier run than the row's other times, and compared with dsl's time in its own run."
    heads = ["floor", *names, "best peer", "its time / dsl's"]
    return document.table(caption, ["rows", "row"], heads, lines)


def time_cell(row: Record, name: str) -> str:
    cell = next((cell for cell in row["cells"] if cell["provider"] == name), None)
    if cell is None:
        return "<td>-</td>"
    if "median_us" not in cell:
        shown, kind = ("-", "") if cell["status"] == "skipped" else (cell["status"], "worse")
        return f'<td class="{kind}" title="{text(cell.get("message", ""))}">{text(shown)}</td>'
    median = cell["median_us"]
    spread = 50 * (cell["p90_us"] - cell["p10_us"]) / median
    fastest = median == min(one["median_us"] for one in measured(row))
    value = f"<b>{microseconds(median)}</b>" if fastest else microseconds(median)
    rate = f", {cell['rate']:.3g} {row['unit']}" if cell is row["cells"][0] else ""
    run = "*" if "beside" in cell else ""
    return f'<td>{value}{run} <span class="range">±{spread:.1f}%{text(rate)}</span></td>'


def peer_cells(found: Comparison | None) -> list[str]:
    if found is None:
        return ["<td>-</td>", "<td>-</td>"]
    return [f"<td>{text(found.peer)}</td>", f'<td class="{found.verdict}">{found.ratio:.2f}×</td>']
