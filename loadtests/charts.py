# SPDX-License-Identifier: Apache-2.0
"""The charts of a comparison, as plotly figures."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from benchmarks import document
from benchmarks.document import FAINT, INK, dress, escaped, look
from loadtests.figures import BINS, PERCENTS, frontier
from loadtests.results import PER_DEVICE, PER_USER, Cell, Metric, Results, Value, percentile_of
from loadtests.scenario import Level, Scenario


def style(results: Results, backend: str) -> dict[str, str]:
    """The colour and symbol of a backend, the same in all charts."""
    place = ([results.ours] if results.ours else []) + results.peers
    return look(place.index(backend))


def device_word(results: Results) -> str:
    if results.environment.get("urls"):
        return "server"
    return "GPU" if results.environment["on_gpu"] else "CPU"


def frontier_chart(results: Results, scenario: Scenario) -> Any:
    """Tokens/s of a device over tokens/s of a user. The line is the backend's Pareto front over its levels."""
    figure = go.Figure()
    for backend in results.backends:
        found = []
        for level in results.levels(scenario.name):
            cell = results.cells.get((scenario.name, level, backend), Cell())
            # Without a time between tokens there are no tokens/s of a user, so the level is not drawn.
            per_user, per_device = cell.value(PER_USER.of), cell.value(PER_DEVICE.of)
            if per_user and per_device:
                found.append((level, per_user, per_device))
        if not found:
            continue
        shown = style(results, backend)
        line = frontier([(x.median, y.median) for _, x, y in found])
        figure.add_scatter(
            x=[x for x, _ in line],
            y=[y for _, y in line],
            mode="lines",
            line={"color": shown["color"], "width": 2},
            legendgroup=backend,
            showlegend=False,
            hoverinfo="skip",
        )
        first = backend == (results.ours or results.backends[0])
        figure.add_scatter(
            x=[x.median for _, x, _ in found],
            y=[y.median for _, _, y in found],
            name=backend,
            legendgroup=backend,
            mode="markers+text" if first else "markers",
            text=[short(level) for level, _, _ in found],
            textposition="top right",
            textfont={"size": 11, "color": shown["color"]},
            marker={"size": 9, "color": shown["color"], "symbol": shown["symbol"]},
            error_x=bars([x for _, x, _ in found], shown["color"]),
            error_y=bars([y for _, _, y in found], shown["color"]),
            hovertemplate="%{text}: %{y:.1f} tokens/s, %{x:.1f} a user<extra>" + escaped(backend) + "</extra>",
        )
    figure = dress(figure, "Throughput over speed for a user", "tokens/s/user", f"tokens/s/{device_word(results)}")
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(rangemode="tozero")


def bars(values: Sequence[Value], colour: str) -> dict[str, Any] | None:
    """Error bars from the lowest round to the highest; None if there was only one round."""
    if all(value.rounds == 1 for value in values):
        return None
    middle, low, high = zip(*((value.median, value.low, value.high) for value in values), strict=True)
    return document.bars(middle, low, high, colour)


def short(level: Level) -> str:
    return f"{level.rate:g}/s" if level.rate else str(level.users)


def latency_chart(results: Results, scenario: Scenario, name: str, title: str, limits: str) -> Any:
    """Percentiles of a latency at every level: the symbol is p50, the error bar ends at p90, the dash is p99.

    Args:
        name: `ttft` or `tpot`.
        limits: the attribute of the scenario's limits to draw as lines.
    """
    figure = go.Figure()
    levels = results.levels(scenario.name)
    count = len(results.backends)
    for index, backend in enumerate(results.backends):
        shown = style(results, backend)
        places, values, symbols = [], [], []
        for place, level in enumerate(levels):
            cell = results.cells.get((scenario.name, level, backend), Cell())
            found = [cell.value(percentile_of(name, percent)) for percent in PERCENTS]
            if all(found):
                places.append(place + (index - (count - 1) / 2) * 0.6 / count)
                values.append([value.median for value in found if value])
                symbols.append(shown["symbol"] + "-open" * cell.limited)
        if not values:
            continue
        figure.add_scatter(
            x=places,
            y=[row[0] for row in values],
            name=backend,
            mode="markers",
            marker={"size": 9, "color": shown["color"], "symbol": symbols},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [row[1] - row[0] for row in values],
                "arrayminus": [0] * len(values),
                "thickness": 2,
                "width": 0,
                "color": shown["color"],
            },
            customdata=values,
            legendgroup=backend,
            hovertemplate="p50 %{customdata[0]:.3g}, p90 %{customdata[1]:.3g}, p99 %{customdata[2]:.3g} ms<extra>"
            + escaped(backend)
            + "</extra>",
        )
        figure.add_scatter(
            x=places,
            y=[row[2] for row in values],
            mode="markers",
            marker={"symbol": "line-ew", "size": 11, "line": {"width": 2, "color": shown["color"]}},
            legendgroup=backend,
            showlegend=False,
            hoverinfo="skip",
        )
    highest = max((value for trace in figure.data for value in trace.y), default=0)
    for one in scenario.limits:
        limit = getattr(one, limits)
        if highest and limit < 1.25 * highest:
            note = f"{escaped(one.name)} {limit:g} ms"
            figure.add_hline(
                y=limit,
                line={"color": FAINT, "width": 1, "dash": "dot"},
                annotation={"text": note, "font": {"size": 10, "color": FAINT}},
                annotation_position="top left",
            )
    figure = dress(figure, title, "load", "ms")
    figure.update_xaxes(tickvals=list(range(len(levels))), ticktext=[level.label for level in levels], showgrid=False)
    figure.update_xaxes(range=[-0.5, max(len(levels), 1) - 0.5])
    return figure.update_yaxes(rangemode="tozero")


def rate_chart(results: Results, scenario: Scenario, metric: Metric) -> Any:
    """A rate at every level, a line for each backend."""
    figure = go.Figure()
    levels = results.levels(scenario.name)
    for backend in results.backends:
        cells = [results.cells.get((scenario.name, level, backend), Cell()) for level in levels]
        found = [
            (level, cell, value) for level, cell in zip(levels, cells, strict=True) if (value := cell.value(metric.of))
        ]
        if not found:
            continue
        shown = style(results, backend)
        figure.add_scatter(
            x=[level.label for level, _, _ in found],
            y=[value.median for _, _, value in found],
            name=backend,
            mode="lines+markers",
            line={"color": shown["color"], "width": 1},
            marker={
                "size": 9,
                "color": shown["color"],
                "symbol": [shown["symbol"] + "-open" * cell.limited for _, cell, _ in found],
            },
            error_y=bars([value for _, _, value in found], shown["color"]),
        )
    return dress(figure, metric.name[0].upper() + metric.name[1:], "load", metric.name).update_yaxes(rangemode="tozero")


def distribution_chart(results: Results, scenario: Scenario, name: str, title: str) -> Any:
    """The distribution of a latency, a line for each backend. A menu selects the level.

    Args:
        name: the name of the histogram in the figures.
    """
    figure = go.Figure()
    drawn: list[Level] = []
    for level in results.levels(scenario.name):
        for backend in results.backends:
            counts = results.cells.get((scenario.name, level, backend), Cell()).histogram(name)
            if not counts:
                continue
            places = range(min(counts) - 1, max(counts) + 2)
            total = sum(counts.values())
            drawn.append(level)
            figure.add_scatter(
                x=[10 ** ((place + 0.5) / BINS) for place in places],
                y=[100 * counts.get(place, 0) / total for place in places],
                name=backend,
                mode="lines",
                line={"color": style(results, backend)["color"], "width": 2, "shape": "hvh"},
                visible=level == drawn[0],
                hovertemplate="%{x:.3g} ms: %{y:.1f}%<extra>" + escaped(backend) + "</extra>",
            )
    figure = dress(figure, title, "ms", "% of values")
    ticks = [step * 10.0**power for power in range(-3, 7) for step in (1, 2, 5)]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    buttons = [
        {"label": level.label, "method": "restyle", "args": [{"visible": [one == level for one in drawn]}]}
        for level in dict.fromkeys(drawn)
    ]
    if not buttons:
        note = {
            "text": "not resolved at this level",
            "xref": "paper",
            "yref": "paper",
            "x": 0.5,
            "y": 0.5,
            "showarrow": False,
        }
        return figure.add_annotation(**note)
    menu = {"buttons": buttons, "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}}
    return figure.update_layout(updatemenus=[menu])


def batch_chart(results: Results, scenario: Scenario) -> Any:
    """Tokens/s of engines without servers, a bar for each backend and batch."""
    figure = go.Figure()
    levels = results.levels(scenario.name)
    for backend in results.backends:
        found = [results.cells.get((scenario.name, level, backend), Cell()).value(PER_DEVICE.of) for level in levels]
        kept = [(level, value) for level, value in zip(levels, found, strict=True) if value]
        if kept:
            shown = style(results, backend)
            figure.add_bar(
                x=[f"batch of {level.users}" for level, _ in kept],
                y=[value.median for _, value in kept],
                name=backend,
                marker={"color": shown["color"]},
                error_y=bars([value for _, value in kept], INK),
            )
    figure.update_layout(barmode="group", bargroupgap=0.1)
    return dress(figure, "Engines without servers", "", f"tokens/s/{device_word(results)}")
