# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 or 8 bits for products with 16-bit activations: the format, and the layout that kernels stream.

A weight is (value - zero point) * scale. Values are integers from 0; a group of columns of k has a scale and a zero
point in each row. That covers GPTQ's symmetric weights (the zero point is half of the range) and AWQ's (a zero point
for each group).

Packed weights are tiles of 64 rows and 128 columns, [row tile, column tile, 32-bit word]. A tile holds all that its
products need, so that one copy brings it:

1. Its values in the order in which a warpgroup reads them: word w of thread t is word (w / 4 * 128 + t) * 4 + w % 4, so
   that a thread reads 16 bytes at once and neighbouring threads read neighbouring bytes. A thread has the elements that
   it hands to a wgmma: with t = 32 i + 4 g + c rows 16 i + g + 8 b, and columns 16 s + 8 h + 2 c + e of step s. Word s
   has eight elements of 4 bits, number b + 2 h + 4 e counted from the lowest bits; word 2 s + h has four elements of 8
   bits, number b + 2 e. So the halves of a word have the elements of neighbouring columns at the same bits.
2. The scales of its 64 rows, in the dtype of the activations.
3. With zero points, what is subtracted from the elements once they are numbers of that dtype: `base(dtype)` plus the
   zero point.

Rows and columns that are missing at the edges have scales and weights of zero.
"""

import numbers
from dataclasses import dataclass, replace

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short

TILE_ROWS, TILE_COLUMNS = 64, 128
# Rows and columns of a weight are multiples, so that rows of activations and of the output begin at 16 bytes.
MULTIPLE = 8
DTYPES = (torch.float16, torch.bfloat16)
BITS = (4, 8)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyFormat:
    """How weights are stored.

    Attributes:
        bits: of a value, 4 or 8.
        group: columns of k with one scale, a multiple of 128; None: the whole row has one.
        zero_points: whether groups have zero points; else it is half of the range.
    """

    bits: int = 4
    group: int | None = TILE_COLUMNS
    zero_points: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.bits, numbers.Integral)
        require(whole and self.bits in BITS, f"bits is {self.bits!r}: one of 4, 8 is needed")
        if self.group is not None:
            checks.integer("group", self.group, 1)
            require(
                self.group % TILE_COLUMNS == 0,
                f"group is {self.group}: a multiple of {TILE_COLUMNS}, or None for a scale for each row is needed",
            )
        checks.flag("zero_points", self.zero_points)
        require(
            self.bits == 4 or not self.zero_points,
            "zero_points is True with 8 bits: weights of 8 bits have none, their zero point is 128",
        )

    @property
    def middle(self) -> int:
        """The zero point where groups have none."""
        return 1 << (self.bits - 1)

    @property
    def value_words(self) -> int:
        """32-bit words of a tile's values."""
        return TILE_ROWS * TILE_COLUMNS * self.bits // 32

    @property
    def tile_words(self) -> int:
        """32-bit words of a tile."""
        return self.value_words + TILE_ROWS // 2 * (2 if self.zero_points else 1)

    def groups(self, k: int) -> int:
        """Scales of a row."""
        return 1 if self.group is None else -(-k // self.group)

    @property
    def by_tile(self) -> "WeightOnlyFormat":
        """The same with scales and zero points of each tile of columns, as packed weights have them."""
        return replace(self, group=TILE_COLUMNS)

    def packed_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Of n rows and k columns."""
        return -(-n // TILE_ROWS), -(-k // TILE_COLUMNS), self.tile_words

    def __str__(self) -> str:
        per = "per row" if self.group is None else f"per {self.group} columns"
        return f"{self.bits} bits, scales{' and zero points' if self.zero_points else ''} {per}"


def base(dtype: torch.dtype) -> int:
    """The number that 16-bit elements are counted from: with an exponent of its own, its mantissa counts in ones."""
    return 128 if dtype == torch.bfloat16 else 1024


def check_parts(
    values: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None, kind: WeightOnlyFormat
) -> None:
    """Raises InvalidInput: these are not weights of this format, or no kernel multiplies them."""
    checks.instance("kind", kind, WeightOnlyFormat)
    checks.tensor("values", values)
    checks.tensor("scale", scale)
    others = [("scale", scale)]
    if zero_points is not None:
        checks.tensor("zero_points", zero_points)
        others.append(("zero_points", zero_points))
    for name, tensor in others:
        require(tensor.device == values.device, f"{name} is on {tensor.device}, values on {values.device}")
    require(values.dim() == 2, f"values has shape {tuple(values.shape)}: [n, k] is needed")
    checks.dtype("dtype of values", values.dtype, (torch.uint8,))
    require(values.numel() > 0, f"values has shape {tuple(values.shape)}: no size may be 0")
    n, k = values.shape
    for size, what in ((n, "rows"), (k, "columns")):
        require(size % MULTIPLE == 0, f"values has {size} {what}: a multiple of {MULTIPLE} is needed")
    checks.dtype("dtype of scale", scale.dtype, DTYPES)
    wanted = (n, kind.groups(k))
    require(tuple(scale.shape) == wanted, f"scale has shape {tuple(scale.shape)}: {wanted} is needed for {kind}")
    require(
        (zero_points is not None) == kind.zero_points,
        f"zero_points is {'missing' if zero_points is None else 'given'}: it is needed for formats with zero points "
        f"alone, and this is {kind}",
    )
    limits = [("values", values)]
    if zero_points is not None:
        require(
            tuple(zero_points.shape) == wanted,
            f"zero_points has shape {tuple(zero_points.shape)}: {wanted} is needed for {kind}",
        )
        checks.dtype("dtype of zero_points", zero_points.dtype, (torch.uint8,))
        limits.append(("zero_points", zero_points))
    if kind.bits < 8:
        for name, tensor in limits:
            most = int(tensor.max())
            require(most < 1 << kind.bits, f"{name} has {most}: {kind.bits} bits hold 0 to {(1 << kind.bits) - 1}")


def by_tile(scale: torch.Tensor, kind: WeightOnlyFormat, column_tiles: int) -> torch.Tensor:
    """Scales or zero points [n, groups] for each tile of columns: [n, column_tiles]."""
    if kind.group is None:
        return scale.expand(-1, column_tiles)
    return scale.repeat_interleave(kind.group // TILE_COLUMNS, 1)[:, :column_tiles]


def padded(tensor: torch.Tensor, rows: int, columns: int, fill: int = 0) -> torch.Tensor:
    """The tensor with rows and columns behind it."""
    return torch.nn.functional.pad(tensor, (0, columns - tensor.shape[1], 0, rows - tensor.shape[0]), value=fill)


def in_thread_order(kind: WeightOnlyFormat) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(Sizes of the axes of values, their order in packed words); the last three name an element of a word."""
    # Row tile, warp, b, g, column tile, four words, step among them, h, c, e.
    steps = 4 if kind.bits == 4 else 2
    sizes = (-1, 4, 2, 8, 0, TILE_COLUMNS // 16 // steps, steps, 2, 4, 2)
    if kind.bits == 4:
        return sizes, (0, 4, 5, 1, 3, 8, 6, 9, 7, 2)
    return sizes, (0, 4, 5, 1, 3, 8, 6, 7, 9, 2)


def pack(
    values: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor | None, kind: WeightOnlyFormat
) -> torch.Tensor:
    """Packed weights, int32 `kind.packed_shape(n, k)`; see the module.

    Args:
        values: uint8 [n, k], both multiples of 8. scale: [n, groups], in the dtype of the activations. zero_points:
            uint8 [n, groups].

    Raises:
        InvalidInput: these are not weights of this format, or n or k is no multiple of 8.
    """
    check_parts(values, scale, zero_points, kind)
    row_tiles, column_tiles, _ = kind.packed_shape(*values.shape)
    rows, columns = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    sizes, order = in_thread_order(kind)
    wide = padded(values, rows, columns).view(*sizes[:4], column_tiles, *sizes[5:]).permute(order)
    elements = wide.reshape(row_tiles, column_tiles, kind.value_words, 32 // kind.bits)
    words = torch.zeros(elements.shape[:3], dtype=torch.int32, device=values.device)
    for i in range(32 // kind.bits):
        words |= elements[..., i].to(torch.int32) << (kind.bits * i)
    parts = [words, tiled(by_tile(scale, kind, column_tiles), rows)]
    if zero_points is not None:
        offsets = by_tile(zero_points, kind, column_tiles).to(scale.dtype) + base(scale.dtype)
        parts.append(tiled(offsets, rows))
    return torch.cat(parts, 2)


def tiled(of_rows: torch.Tensor, rows: int) -> torch.Tensor:
    """16-bit numbers [n, column tiles] as words [row tiles, column tiles, 32]."""
    column_tiles = of_rows.shape[1]
    wide = padded(of_rows, rows, column_tiles).view(-1, TILE_ROWS, column_tiles)
    return wide.transpose(1, 2).reshape(-1).view(torch.int32).view(-1, column_tiles, TILE_ROWS // 2)


def unpack(packed: torch.Tensor, dtype: torch.dtype, kind: WeightOnlyFormat) -> tuple[torch.Tensor, ...]:
    """What `pack` was given, for whole tiles: values, scale and, with zero points, zero_points [rows, column tiles]."""
    row_tiles, column_tiles, _ = packed.shape
    words = packed[..., : kind.value_words].unsqueeze(-1)
    shifts = torch.arange(0, 32, kind.bits, dtype=torch.int32, device=packed.device)
    sizes, order = in_thread_order(kind)
    full = (row_tiles, *sizes[1:4], column_tiles, *sizes[5:])
    elements = ((words >> shifts) & ((1 << kind.bits) - 1)).view([full[axis] for axis in order])
    back = sorted(range(len(order)), key=lambda axis: order[axis])
    values = elements.permute(back).reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS).to(torch.uint8)
    rest = packed[..., kind.value_words :].contiguous().view(dtype).unflatten(-1, (-1, TILE_ROWS))
    found = [one.transpose(1, 2).reshape(-1, column_tiles) for one in rest.unbind(2)]
    if not kind.zero_points:
        return values, found[0]
    return values, found[0], (found[1] - base(dtype)).to(torch.uint8)


def dequantized(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_points: torch.Tensor | None,
    kind: WeightOnlyFormat,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The weights [n, k], in this arithmetic."""
    _, k = values.shape
    width = k if kind.group is None else kind.group
    of_columns = scale.to(dtype).repeat_interleave(width, 1)[:, :k]
    if zero_points is None:
        return (values.to(dtype) - kind.middle) * of_columns
    return (values.to(dtype) - zero_points.to(dtype).repeat_interleave(width, 1)[:, :k]) * of_columns


def describe(dtype: torch.dtype, kind: WeightOnlyFormat) -> str:
    """For logs and messages."""
    return f"W{kind.bits}A16 ({kind}, {short(dtype)})"
