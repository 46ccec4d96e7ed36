# SPDX-License-Identifier: Apache-2.0
"""Plotly charts of an operator's rows: rates with the device's ceiling, and the cost of a launch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from .document import COLOURS, FAINT, bars, dress, escaped, look
from .measured import Record, is_ours, measured

K = 1024
CEILING = "ceiling"
OTHERS = "#b8c0c8"
LABEL_SHARE = 0.1  # the share of an axis that a label takes, in the narrowest charts
# The long row names are below a bar chart, so its legend is above.
ABOVE = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}


def short(value: float) -> str:
    """8192 as `8k`, on an axis."""
    return f"{value / K:g}k" if value >= K and value % K == 0 else f"{value:g}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels of a logarithmic axis, or of a linear one if it contains zero. A label that would overlap is blank."""
    xs = [math.log(tick) if ticks[0] > 0 else tick for tick in ticks]
    least = LABEL_SHARE * (xs[-1] - xs[0])
    labels, last = [], -math.inf
    for tick, x in zip(ticks, xs, strict=True):
        labels.append(short(tick) if x - last >= least else "")
        last = x if labels[-1] else last
    return labels


def rates(cell: Record) -> tuple[float, float, float]:
    """(median, low, high) of a timed cell in the row's unit."""
    work = cell["rate"] * cell["median_us"]
    return cell["rate"], work / cell["p90_us"], work / cell["p10_us"]


def ceiling(row: Record) -> float | None:
    """The row's rate if it took exactly its floor time."""
    if not row["floor_us"]:
        return None
    work = row["traffic_bytes"] if row["unit"] == "TB/s" else row["flops"]
    return float(work / row["floor_us"] * 1e-6)


def line_chart(rows: Sequence[Record], names: Sequence[str], axis: str, title: str) -> Any:
    """Rates over one parameter. The dotted line is the highest rate that the device allows for each row.

    Args:
        names: all providers of the operator, so that each has the same colour in all charts.
    """
    figure = go.Figure()
    ordered = sorted(rows, key=lambda row: row["parameters"][axis])
    xs = [row["parameters"][axis] for row in ordered]
    draw_ceiling(figure, xs, ordered, "linear")
    for name in names:
        found = [(x, rates(cell)) for x, row in zip(xs, ordered, strict=True) for cell in timed(row, name)]
        if not found:
            continue
        shown = look(names.index(name))
        middle, low, high = zip(*(values for _, values in found), strict=True)
        figure.add_scatter(
            x=[x for x, _ in found],
            y=middle,
            name=escaped(name),
            mode="lines+markers",
            line={"color": shown["color"], "width": 3 if is_ours(name) else 1.5},
            marker={"size": 8, "symbol": shown["symbol"]},
            error_y=bars(middle, low, high, shown["color"]),
            hovertemplate=f"{axis} %{{x}}: %{{y:.3g}} {ordered[0]['unit']}<extra>{escaped(name)}</extra>",
        )
    figure = dress(figure, title, axis, ordered[0]["unit"])
    figure.update_layout(title_font_size=13)
    if min(xs) > 0:
        figure.update_xaxes(type="log")
    ticks = sorted(set(xs))
    figure.update_xaxes(tickvals=ticks, ticktext=tick_labels(ticks), tickangle=0)
    return figure.update_yaxes(rangemode="tozero")


def bar_chart(rows: Sequence[Record], names: Sequence[str]) -> Any:
    """Rates of rows that are not a sweep, a bar for each provider."""
    figure = go.Figure()
    ids = [row["id"] for row in rows]
    for name in names:
        found = [(row["id"], rates(cell)) for row in rows for cell in timed(row, name)]
        if not found:
            continue
        middle, low, high = zip(*(values for _, values in found), strict=True)
        figure.add_bar(
            x=[x for x, _ in found],
            y=middle,
            name=escaped(name),
            marker={"color": look(names.index(name))["color"]},
            error_y=bars(middle, low, high, FAINT),
            hovertemplate=f"%{{x}}: %{{y:.3g}} {rows[0]['unit']}<extra>{escaped(name)}</extra>",
        )
    draw_ceiling(figure, ids, rows, "hvh")
    figure.update_layout(barmode="group", bargroupgap=0.08, bargap=0.25)
    figure = dress(figure, "", "", rows[0]["unit"])
    figure.update_layout(legend=ABOVE)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=ids, showgrid=False, automargin=True)
    return figure.update_yaxes(rangemode="tozero")


def draw_ceiling(figure: Any, xs: Sequence[object], rows: Sequence[Record], shape: str) -> None:
    heights = [ceiling(row) for row in rows]
    if any(heights):
        figure.add_scatter(
            x=list(xs),
            y=heights,
            name=CEILING,
            mode="lines",
            line={"color": FAINT, "width": 1.5, "dash": "dot", "shape": shape},
            hovertemplate=f"%{{y:.3g}} {rows[0]['unit']}<extra>{CEILING}</extra>",
        )


def timed(row: Record, name: str) -> list[Record]:
    """The provider's cell in a list if it has a time, else an empty list."""
    return [cell for cell in measured(row) if cell["provider"] == name]


def level(figures: Sequence[Any]) -> None:
    """Gives adjacent charts the same y axis, so that they can be compared."""
    highest = max((value for figure in figures for trace in figure.data for value in trace.y if value), default=0)
    for figure in figures:
        figure.update_yaxes(range=[0, 1.06 * highest])


def latency_chart(rows: Mapping[str, Record]) -> Any:
    """The time of each operator's smallest problem, with this package's bars highlighted.

    Args:
        rows: operator -> its row with the least traffic.
    """
    figure = go.Figure()
    cells = [(operator, cell) for operator, row in rows.items() for cell in measured(row)]
    middle = [cell["median_us"] for _, cell in cells]
    figure.add_bar(
        x=[[operator for operator, _ in cells], [escaped(cell["provider"]) for _, cell in cells]],
        y=middle,
        marker={"color": [COLOURS[0] if is_ours(cell["provider"]) else OTHERS for _, cell in cells]},
        error_y=bars(middle, [c["p10_us"] for _, c in cells], [c["p90_us"] for _, c in cells], FAINT),
        hovertemplate="%{x}: %{y:.2f} µs<extra></extra>",
    )
    figure.update_layout(bargap=0.3)
    figure = dress(figure, "", "", "µs a launch")
    figure.update_xaxes(showgrid=False, automargin=True)
    return figure.update_yaxes(rangemode="tozero")
