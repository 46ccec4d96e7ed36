# SPDX-License-Identifier: Apache-2.0
"""The parts of all HTML pages of results: one self-contained file, tables, and the style of charts."""

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can distinguish; the symbols differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5b5b5b")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
GRID, INK, FAINT = "#e6e8eb", "#1c2733", "#5f6b7a"
HEIGHT = 400
# So many of the rows are named that share one fact.
LISTED = 4
STYLE = """
:root { --ink: #1c2733; --faint: #5f6b7a; --line: #e1e5ea; --good: #00704a; --bad: #b3420a; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1440px; padding: 32px 32px 64px; color: var(--ink); background: #fff;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 48px 0 4px; padding-top: 20px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 24px 0 8px; }
p { margin: 4px 0 12px; max-width: 900px; }
.faint, caption { color: var(--faint); }
.facts { color: var(--faint); font-size: 13px; margin: 0 0 6px; max-width: none; }
code { font: 12.5px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.notes { border-left: 4px solid var(--bad); background: #fdf5ef; padding: 10px 16px; margin: 20px 0; }
.notes ul { margin: 4px 0; padding-left: 20px; }
.charts { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 12px; margin: 12px 0; }
.charts .wide { grid-column: 1 / -1; }
@media (max-width: 1050px) { .charts { grid-template-columns: 1fr; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: 6px; font-size: 13px; }
th, td { padding: 4px 12px 4px 0; text-align: right; white-space: nowrap; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid #9aa4af; vertical-align: bottom; }
.figures th { white-space: normal; max-width: 105px; }
td { border-top: 1px solid transparent; }
tr.first td { border-top-color: var(--line); }
th.group { text-align: center; border-bottom: 0; color: var(--faint); font-weight: 400; }
tbody tr:last-child td { border-bottom: 1px solid var(--line); }
th.name, td.name { text-align: left; }
.better { color: var(--good); font-weight: 600; }
.worse { color: var(--bad); font-weight: 600; }
.range { color: var(--faint); font-weight: 400; }
.again { visibility: hidden; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; max-width: 1000px; font-size: 13px; }
dt { font-weight: 600; } dd { margin: 0; }
@media (max-width: 700px) {
  body { padding: 16px 12px 40px; }
  h1 { font-size: 22px; }
  p, .facts, caption { overflow-wrap: anywhere; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: 8px; }
  /* A row becomes a card: its cells one below another, each with the head of its column. */
  thead { display: none; }
  table, caption, tbody, tr, td { display: block; width: 100%; }
  tr { border-top: 1px solid var(--line); padding: 6px 0; }
  td, tr.first td, tbody tr:last-child td { display: flex; justify-content: space-between; gap: 12px; border: 0;
    padding: 2px 0; text-align: right; white-space: normal; overflow-wrap: anywhere; }
  td::before { content: attr(data-label); color: var(--faint); text-align: left; flex: none; max-width: 50%; }
  .again { visibility: visible; }
}
"""


def text(value: object) -> str:
    """A value as HTML."""
    return html.escape(str(value))


def listed(ids: Sequence[str]) -> str:
    """How many, and the first of them."""
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return f"{len(ids)}: {', '.join(ids[:LISTED])}{more}"


def write(markup: str, path: Path) -> None:
    """Writes a page atomically: a reader sees either the old page or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(markup)
    os.replace(part, path)


def document(title: str, parts: Sequence[str]) -> str:
    """The page, with the script that draws its charts."""
    from plotly.offline import get_plotlyjs

    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def facts_line(line: str) -> str:
    return f'<p class="facts">{text(line)}</p>'


def commit_of(facts: dict[str, Any]) -> str:
    """The commit from `facts.gather`, as text."""
    changed = ", with changes that are not committed" if facts.get("modified") else ""
    return f"commit {facts['commit'][:12]}{changed}" if facts.get("commit") else "commit unknown"


def versions_of(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)


def notes(found: Sequence[str]) -> str:
    """A box with warnings about the results; empty if there are none."""
    if not found:
        return ""
    items = "".join(f"<li>{text(one)}</li>" for one in found)
    return f'<div class="notes"><b>Warnings</b><ul>{items}</ul></div>'


def words(meaning: dict[str, str]) -> str:
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(sense)}</dd>" for name, sense in meaning.items())
    return f"<h2>What the words mean</h2><dl>{rows}</dl>"


def table(caption: str, names: Sequence[str], heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table whose first columns are names."""
    top = "".join(f'<th class="name">{text(name)}</th>' for name in names)
    top += "".join(f"<th>{text(name)}</th>" for name in heads)
    return (
        f'<div class="scroll"><table class="figures"><caption>{text(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(cards(rows, [*names, *heads]))}</tbody></table></div>"
    )


def cards(rows: Sequence[str], heads: Sequence[str]) -> list[str]:
    """The rows, with the head of the column in each cell; a narrow page shows it beside the cell."""
    labelled_rows = []
    for row in rows:
        first, *cells = row.split("<td")
        pairs = zip(heads, cells, strict=True)
        labelled_rows.append(first + "".join(f'<td data-label="{text(head)}"{cell}' for head, cell in pairs))
    return labelled_rows


def labelled(group: str, row: str, first: bool) -> str:
    """The first cells of a row. Only the first row of a group shows the group's name."""
    start = '<tr class="first">' if first else "<tr>"
    # On a narrow page each row is a card of its own, which shows the name again.
    name = text(group) if first else f'<span class="again">{text(group)}</span>'
    return f'{start}<td class="name">{name}</td><td class="name">{text(row)}</td>'


def charts(figures: Sequence[Any], wide: bool = False) -> str:
    """Plotly's figures next to each other, or each as wide as the page."""
    options = {"full_html": False, "include_plotlyjs": False, "config": {"responsive": True, "displayModeBar": False}}
    kind = ' class="wide"' if wide else ""
    drawn = "".join(f"<div{kind}>{figure.to_html(**options)}</div>" for figure in figures)
    return f'<div class="charts">{drawn}</div>'


def escaped(label: str) -> str:
    """A label for plotly, which interprets some HTML in its texts."""
    return label.replace("&", "&amp;").replace("<", "&lt;")


def look(index: int) -> dict[str, str]:
    """The colour and symbol of the index-th compared item of a page."""
    return {"color": COLOURS[index % len(COLOURS)], "symbol": SYMBOLS[(index + index // len(COLOURS)) % len(SYMBOLS)]}


def bars(middle: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> dict[str, Any]:
    """Error bars from the lowest to the highest value."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [top - value for top, value in zip(high, middle, strict=True)],
        "arrayminus": [value - bottom for bottom, value in zip(low, middle, strict=True)],
        "thickness": 1,
        "width": 3,
        "color": colour,
    }


def dress(figure: Any, title: str, x: str, y: str) -> Any:
    """Sets a figure's title and axis names, and the common style."""
    figure.update_layout(
        title={"text": title, "font": {"size": 15, "color": INK}, "x": 0, "xref": "paper", "y": 0.97},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        height=HEIGHT,
        margin={"l": 64, "r": 16, "t": 48, "b": 88},
        legend={"orientation": "h", "y": -0.22, "x": 0, "title": None},
        hoverlabel={"font": {"size": 12}},
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": "#b8c0c8", "ticks": "outside", "tickcolor": "#b8c0c8"}
    figure.update_xaxes(title={"text": x, "font": {"color": FAINT}}, **axis)
    figure.update_yaxes(title={"text": y, "font": {"color": FAINT}}, **axis)
    return figure
