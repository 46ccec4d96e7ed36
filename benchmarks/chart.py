# SPDX-License-Identifier: Apache-2.0
"""Draws one SVG chart of the results of `bench --json`: for each row, a bar for each provider.

    python -m benchmarks.chart docs/data/h200-*.jsonl --rows '^hd128' --out docs/images/attention.svg

The length of a bar is the provider's time divided by this package's time, so that rows of 10 us and of 4 ms fit one
chart. The times are printed beside the bars. A row in which a peer is faster is red. The chart has every row that
`--rows` selects and that has a time of this package and of a peer.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .document import COLOURS, FAINT, GRID, INK, text
from .measured import is_ours
from .report import microseconds

Record = dict[str, Any]

WIDTH, LEFT, RIGHT = 960, 370, 150  # pixels: the whole chart, names of rows, times
BAR, GAP, HEAD = 10, 7, 34  # height of a bar, between rows, above a panel
LONGEST = 2.0  # times this package's time; longer bars are cut, with the time printed beside them
LOSS = "#b3420a"
HOW_TO_READ = (
    "Length: time of a launch divided by dsl's, shorter is faster. Red: a peer is faster. "
    "32/8: query heads and key heads."
)
SHOWN = ("vllm", "torch", "nvidia-cutlass-dsl")  # versions in the line below the title
NAMES = {"dsl:cute": "dsl", "dsl": "dsl"}


def is_shorter(time: float, ours: float) -> bool:
    """Whether the ratio is below 1 after rounding to two digits, as it is printed."""
    return round(time / ours, 2) < 1


@dataclass(frozen=True)
class Row:
    """One problem: (provider, microseconds) of each timed provider, this package's first."""

    operator: str
    label: str
    times: tuple[tuple[str, float], ...]

    @property
    def ours(self) -> float:
        return self.times[0][1]

    @property
    def lost(self) -> bool:
        return any(is_shorter(time, self.ours) for _, time in self.times[1:])


def read(paths: Iterable[Path]) -> list[Record]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def rows_of(records: Iterable[Record], pattern: str) -> list[Row]:
    """The rows whose ids match and that have a time of this package and of a peer.

    Raises:
        ValueError: there is no such row.
    """
    found = []
    for record in records:
        if record["kind"] != "row" or not re.search(pattern, record["id"]):
            continue
        times = [(cell["provider"], float(cell["median_us"])) for cell in record["cells"] if "median_us" in cell]
        times.sort(key=lambda pair: not is_ours(pair[0]))
        if len(times) > 1 and is_ours(times[0][0]):
            found.append(Row(record["operator"], str(record.get("label") or record["id"]), tuple(times)))
    if not found:
        raise ValueError(f"no row whose id matches {pattern!r} has a time of dsl and of a peer")
    return found


def facts(records: Iterable[Record]) -> str:
    """The line below the title: devices, versions and dates of all runs."""
    environments = [record for record in records if record["kind"] == "environment"]
    devices = ", ".join(dict.fromkeys(str(facts["device"]) for facts in environments))
    dates = sorted({str(facts["date"])[:10] for facts in environments})
    versions = {name: sorted({facts["versions"].get(name) for facts in environments} - {None}) for name in SHOWN}
    shown = ", ".join(f"{name} {' and '.join(held)}" for name, held in versions.items() if held)
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    return "; ".join(part for part in (devices, shown, span) if part)


def words(x: float, y: float, content: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{text(content)}</text>'


def bar(y: float, length: float, colour: str) -> str:
    return f'<rect x="{LEFT}" y="{y:g}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'


def draw_row(row: Row, top: float, colours: dict[str, str]) -> list[str]:
    """The label and the bars of one row, `top` pixels below the top of the chart."""
    scale = (WIDTH - LEFT - RIGHT) / LONGEST
    middle = top + BAR * len(row.times) / 2 + 4
    parts = [words(LEFT - 8, middle, row.label, fill=LOSS if row.lost else INK, anchor="end")]
    for index, (provider, time) in enumerate(row.times):
        y, length = top + BAR * index, min(time / row.ours, LONGEST) * scale
        ratio = "" if index == 0 else f" ({time / row.ours:.2f}x)"
        parts.append(bar(y, length, colours[provider]))
        fill = LOSS if is_shorter(time, row.ours) else FAINT
        parts.append(words(LEFT + length + 5, y + BAR - 1, f"{microseconds(time)} us{ratio}", size=10, fill=fill))
    return parts


def legend(colours: dict[str, str], y: float) -> list[str]:
    parts, x = [], LEFT
    for provider, colour in colours.items():
        name = NAMES.get(provider, provider)
        parts.append(f'<rect x="{x}" y="{y - 9:g}" width="10" height="10" fill="{colour}"/>')
        parts.append(words(x + 14, y, name))
        x += 30 + 8 * len(name)
    return parts


def render(rows: Sequence[Row], title: str, below: str) -> str:
    """The SVG."""
    providers = dict.fromkeys(provider for row in rows for provider, _ in row.times)
    colours = dict(zip(providers, COLOURS, strict=False))
    parts = [words(16, 26, title, size=17), words(16, 44, below, size=11, fill=FAINT), *legend(colours, 66)]
    y, one = 78.0, LEFT + (WIDTH - LEFT - RIGHT) / LONGEST
    for operator in dict.fromkeys(row.operator for row in rows):
        parts.append(words(LEFT - 8, y + HEAD - 14, operator, size=14, anchor="end"))
        y += HEAD
        for row in (row for row in rows if row.operator == operator):
            parts += draw_row(row, y, colours)
            y += BAR * len(row.times) + GAP
    line = f'<line x1="{one:g}" y1="84" x2="{one:g}" y2="{y:g}" stroke="{GRID}" stroke-dasharray="3 3"/>'
    parts.append(words(16, y + 22, HOW_TO_READ, size=11, fill=FAINT))
    height = y + 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif">'
        f'<rect width="100%" height="100%" fill="#fff"/>{line}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="written by `dsl-backend bench OP --json FILE`"
    )
    parser.add_argument("--rows", default="", help="regular expression for row ids (default: all)")
    parser.add_argument("--title", default="Attention kernels beside their peers")
    parser.add_argument("--out", type=Path, required=True, help="the SVG")
    chosen = parser.parse_args(arguments)
    try:
        records = read(chosen.files)
        picture = render(rows_of(records, chosen.rows), chosen.title, facts(records))
    except (OSError, ValueError, KeyError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
