# SPDX-License-Identifier: Apache-2.0
"""Pictures of layouts as SVG: a table of offsets, or of the threads and values that own a tile's elements."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dsl_backend.errors import InvalidInput
from dsl_backend.layouts import Layout

MAX_CELLS = 8192
HEIGHT, CHARACTER, MARGIN, GAP = 22, 7.2, 8, 14
# Eight light colours that are told apart in grey as well, by their order.
COLOURS = ("#f4f4f4", "#d6e6f4", "#fbe3c4", "#d5eccd", "#f6d5d5", "#e3d8ee", "#c9e7e4", "#efe6a8")


@dataclass(frozen=True)
class Cell:
    text: str
    colour: int


@dataclass(frozen=True)
class Panel:
    """A table of cells [row][column] with a title, which may be empty."""

    title: str
    cells: Sequence[Sequence[Cell]]


def draw(layout: Layout, *, tile: tuple[int, int] | None = None, chunk: int = 1) -> str:
    """The SVG of a layout.

    Args:
        layout: the first mode counts rows, the second one columns, the others tables. With `tile`: from (thread, value)
            to the offset of an element in a column-major tile.
        tile: rows and columns of that tile; cells then show T(thread) V(value), a colour for each of eight threads.
        chunk: consecutive offsets of one colour, such as the elements of 16 bytes.

    Raises:
        InvalidInput: it is too large, or does not fit the tile.
    """
    if chunk < 1:
        raise InvalidInput(f"chunk is {chunk}: at least 1 is needed")
    cells = layout.size if tile is None else tile[0] * tile[1]
    if cells > MAX_CELLS:
        raise InvalidInput(f"{cells} cells: {MAX_CELLS} are the most that a picture has")
    return rendered(str(layout), owners(layout, tile) if tile else offsets(layout, chunk))


def tile_of(text: str | None) -> tuple[int, int] | None:
    """Rows and columns of `MxN`. Raises InvalidInput: the text is none."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise InvalidInput(f"tile is {text!r}: rows and columns such as 64x8 are needed")
    return int(found[1]), int(found[2])


def offsets(layout: Layout, chunk: int) -> list[Panel]:
    """The tables of a layout's offsets."""
    sizes = [mode.size for mode in layout.modes]
    single = isinstance(layout.shape, int) or len(sizes) == 1
    rows, columns, rest = (1, layout.size, []) if single else (sizes[0], sizes[1], sizes[2:])

    def cell(row: int, column: int, others: tuple[int, ...]) -> Cell:
        offset = layout(column) if single else layout((row, column, *others))
        return Cell(str(offset), offset // chunk % len(COLOURS))

    panels, count = [], 1
    for size in rest:
        count *= size
    for index in range(count):
        others, left = [], index
        for size in rest:
            others.append(left % size)
            left //= size
        title = f"(:,:,{','.join(map(str, others))})" if others else ""
        table = [[cell(row, column, tuple(others)) for column in range(columns)] for row in range(rows)]
        panels.append(Panel(title, table))
    return panels


def owners(layout: Layout, tile: tuple[int, int]) -> list[Panel]:
    """The table of the threads and values that own the elements of a tile."""
    if len(layout.modes) != 2:
        raise InvalidInput(f"layout {layout} has {len(layout.modes)} modes: a tile needs two, (thread, value)")
    rows, columns = tile
    found: dict[int, tuple[int, int]] = {}
    threads, values = (mode.size for mode in layout.modes)
    for thread in range(threads):
        for value in range(values):
            offset = layout((thread, value))
            if offset >= rows * columns:
                raise InvalidInput(
                    f"thread {thread}, value {value} is element {offset}: the tile {rows}x{columns} has "
                    f"{rows * columns}"
                )
            if offset in found:
                other = found[offset]
                raise InvalidInput(
                    f"thread {thread}, value {value} and thread {other[0]}, value {other[1]} are both element {offset}"
                )
            found[offset] = thread, value

    def cell(offset: int) -> Cell:
        if offset not in found:
            return Cell("", 0)
        thread, value = found[offset]
        return Cell(f"T{thread} V{value}", thread % len(COLOURS))

    return [Panel("", [[cell(row + rows * column) for column in range(columns)] for row in range(rows)])]


def rendered(title: str, panels: Sequence[Panel]) -> str:
    """The picture of tables below each other, with the numbers of their rows and columns."""
    longest = max(len(cell.text) for panel in panels for row in panel.cells for cell in row)
    width = round(max(3, longest) * CHARACTER + MARGIN)
    left = MARGIN + 4 * CHARACTER
    shapes: list[str] = []
    write(shapes, MARGIN, HEIGHT - 6, title, "start", bold=True)
    y = float(HEIGHT)
    for panel in panels:
        if panel.title:
            write(shapes, MARGIN, y + HEIGHT - 6, panel.title, "start")
            y += HEIGHT
        table(shapes, panel.cells, left, y, width)
        y += (len(panel.cells) + 1) * HEIGHT + GAP
    whole = max(left + width * len(panels[0].cells[0]), MARGIN + CHARACTER * len(title)) + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.0f} {y:.0f}" width="{whole:.0f}" '
        f'height="{y:.0f}" font-family="monospace" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n'
    )
    return head + "\n".join(shapes) + "\n</svg>\n"


def table(shapes: list[str], cells: Sequence[Sequence[Cell]], left: float, top: float, width: int) -> None:
    for column in range(len(cells[0])):
        write(shapes, left + width * (column + 0.5), top + HEIGHT - 6, str(column), "middle", grey=True)
    for row, line in enumerate(cells):
        y = top + HEIGHT * (row + 1)
        write(shapes, left - MARGIN / 2, y + HEIGHT - 6, str(row), "end", grey=True)
        for column, cell in enumerate(line):
            x = left + width * column
            shapes.append(
                f'<rect x="{x:.0f}" y="{y:.0f}" width="{width}" height="{HEIGHT}" fill="{COLOURS[cell.colour]}" '
                'stroke="#999"/>'
            )
            if cell.text:
                write(shapes, x + width / 2, y + HEIGHT - 6, cell.text, "middle")


def write(
    shapes: list[str], x: float, y: float, text: str, anchor: str, *, bold: bool = False, grey: bool = False
) -> None:
    style = (' font-weight="bold"' if bold else "") + (' fill="#777"' if grey else "")
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{style}>{escaped}</text>')
