# SPDX-License-Identifier: Apache-2.0
"""A picture of a launch's timeline as SVG: warps and engines of one CTA as rows, waits by what they wait for."""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from emulator.clock.machine import LaunchTime, time_of
from emulator.clock.replay import ENGINES, REASONS
from emulator.errors import HostError

WIDTH, LEFT, RIGHT, HEAD, FOOT = 1000, 108, 12, 62, 30  # pixels; legend above, axis below
ROW, BAR = 17, 13
SHORTEST = 8  # cycles: shorter waits are not drawn
INK, FAINT, BASE, ENGINE = "#1c2733", "#5f6b7a", "#e9edf2", "#1c2733"
# A warp that does not wait has the colour of its row.
COLOURS = {
    "an mbarrier": "#D55E00",
    "wgmma": "#0072B2",
    "tensor memory": "#56B4E9",
    "a barrier of the CTA": "#CC79A7",
    "a barrier of the cluster": "#CC79A7",
    "a special function": "#E69F00",
    "global memory": "#8c2d04",
    "shared memory": "#009E73",
    "a busy unit": "#F0E442",
    "another warp's turn": "#a3adb8",
}
OTHER = "#c9b8a8"
TICKS = 8


@dataclass(frozen=True)
class Bar:
    """A wait of a warp, or the work of an engine.

    Attributes:
        row: the warp's number; for an engine -1 minus its number.
        first, last: cycles.
        name: what is waited for, or the engine.
    """

    row: int
    first: float
    last: float
    name: str


def bars(time: LaunchTime, window: tuple[float, float]) -> list[Bar]:
    """Those of the first simulated CTA, as far as they lie in a window of cycles; ordered by row and time."""
    drawn = time_of(time.recorded, time.chip, shortest=SHORTEST, before=time.before).replayed
    warps = len(time.recorded.classes[0][0])
    found = []
    for start, stop, _, where, reason, engine in drawn.segments.tolist():
        cta, warp = divmod(where, warps)
        first, last = max(start, window[0]), min(stop, window[1])
        if cta == 0 and first < last:
            found.append(Bar(-1 - engine if engine else warp, first, last, ENGINES[engine] or REASONS[reason]))
    return sorted(found, key=lambda bar: (bar.row < 0, abs(bar.row), bar.first))


def merged(found: list[Bar], gap: float) -> Iterator[Bar]:
    """Bars of a row with one name and no more than a gap between them are one."""
    for _, of_row in groupby(found, key=lambda bar: bar.row):
        last: Bar | None = None
        for bar in of_row:
            if last is not None and last.name == bar.name and bar.first - last.last <= gap:
                last = Bar(last.row, last.first, max(last.last, bar.last), last.name)
                continue
            if last is not None:
                yield last
            last = bar
        if last is not None:
            yield last


def draw(time: LaunchTime, window: tuple[float, float] | None = None) -> str:
    """The SVG of a launch.

    Args:
        window: in microseconds from the first instruction on; all of the simulated clusters if not given.

    Raises:
        HostError: nothing happens in the window.
    """
    chip = time.chip
    cycles = chip.gigahertz * 1e3
    first, last = (0.0, float(time.replayed.cycles)) if window is None else (at * cycles for at in window)
    found = bars(time, (first, last)) if first < last else []
    if not found:
        raise HostError(f"nothing happens from {first / cycles:g} to {last / cycles:g} us")
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    rows = [*range(len(time.recorded.classes[0][0])), *sorted({bar.row for bar in found if bar.row < 0}, reverse=True)]
    tops = {row: HEAD + index * ROW + (6 if row < 0 else 0) for index, row in enumerate(rows)}
    height = max(tops.values()) + ROW + FOOT
    title = f"{time.recorded.launch.kernel[:60]}: a CTA on an {chip.name}, by the emulator's clock"
    parts = [_text(LEFT, 18, title, size=13), *_legend(found)]
    for row, top in tops.items():
        label = f"warp {row}" if row >= 0 else ENGINES[-1 - row]
        parts.append(_text(LEFT - 6, top + BAR - 3, label, anchor="end"))
        parts.append(_rect(LEFT, top, WIDTH - LEFT - RIGHT, BASE if row >= 0 else "#ffffff"))
    for bar in merged(found, 0.5 / scale):
        x, width = LEFT + (bar.first - first) * scale, (bar.last - bar.first) * scale
        parts.append(_rect(x, tops[bar.row], max(width, 0.3), ENGINE if bar.row < 0 else COLOURS.get(bar.name, OTHER)))
    bottom = max(tops.values()) + ROW
    for tick in range(TICKS + 1):
        x, at = LEFT + tick * (WIDTH - LEFT - RIGHT) / TICKS, (first + (last - first) * tick / TICKS) / cycles
        parts.append(f'<path d="M{x:.1f} {HEAD}V{bottom}" stroke="{FAINT}" stroke-width=".3"/>')
        parts.append(_text(x, bottom + 14, f"{at:.2f}" + (" us" if tick == TICKS else ""), anchor="middle"))
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    style = "font-family=\"system-ui, 'DejaVu Sans', sans-serif\""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>", ""])


def _legend(found: list[Bar]) -> Iterator[str]:
    """What the colours of waits mean, as far as there are such waits."""
    names = {bar.name for bar in found if bar.row >= 0}
    entries = [(f"waits for {name}", colour) for name, colour in COLOURS.items() if name in names]
    entries += [("waits for something else", OTHER)] if names - COLOURS.keys() else []
    entries += [("at work, or at its end", BASE)]
    x, y = float(LEFT), 36
    for name, colour in entries:
        width = 22 + 6.4 * len(name)
        if x + width > WIDTH:
            x, y = float(LEFT), y + 16
        yield f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 14, y, name)
        x += width


def _text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start") -> str:
    escaped = html.escape(words)
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{escaped}</text>'


def _rect(x: float, y: int, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def write(time: LaunchTime, file: Path, window: tuple[float, float] | None = None) -> None:
    file.write_text(draw(time, window))
