# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: a CTA's 128 lanes x 512 columns of 32 bits, its allocations, and the cells of tcgen05.ld and .st.

Sources: PTX ISA 9.2, sections Tensor Memory (9.7.16.1), Data Movement Shape (9.7.16.2.3), Tensor Memory Allocation and
Management (9.7.16.7), Tensor Memory and Register Load/Store (9.7.16.8); the thread layouts also as the copy traits of
CUTLASS's public header cute/atom/copy_traits_sm100.hpp.

An address is lane << 16 | column. A cell's index is lane * 512 + column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine import floats
from emulator.machine.findings import Kind

Cells = NDArray[np.int64]
Words = NDArray[np.uint32]

LANES, COLUMNS = 128, 512
QUARTER = 32  # lanes that one warp of four can load and store
UNIT = 32  # columns that allocations are made of
FREE = -1
# A NaN in every floating type, so that a stale read shows.
POISON = np.uint32(0xFFFFFFFF)


class TensorMemoryError(ValueError):
    """What the hardware would refuse or leave undefined; the message names the address or the size."""

    kind = Kind.TENSOR_MEMORY


def split_address(address: int) -> tuple[int, int]:
    """(lane, column)."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


def name_address(address: int) -> str:
    lane, column = split_address(address)
    return f"tensor memory address {address:#010x} (lane {lane}, column {column})"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Cells relative to an address.

    Attributes:
        offsets: lane * 512 + column of each, any shape.
        lanes: from the address's lane to the last one, inclusive of both.
        columns: distinct offsets of columns, ascending.
        aligned: what the address's lane must be a multiple of.
    """

    offsets: Cells
    lanes: int
    columns: Cells
    aligned: int = 1

    @classmethod
    def of(cls, lanes: Any, columns: Any, aligned: int = 1) -> "Pattern":
        """From arrays of lanes and columns that broadcast against each other."""
        lane, column = np.asarray(lanes, dtype=np.int64), np.asarray(columns, dtype=np.int64)
        offsets = lane * COLUMNS + column
        offsets.flags.writeable = False
        return cls(offsets, int(lane.max()) + 1, np.unique(column), aligned)


@dataclass(frozen=True)
class Rectangle:
    """Cells [lanes, columns] of neighbouring lanes and columns: as many cells, much faster."""

    lanes: slice
    columns: slice

    @classmethod
    def of(cls, cells: Cells) -> "Cells | Rectangle":
        """The rectangle that cells [rows, columns] are; themselves where they are none."""
        if cells.ndim != 2 or not cells.size:
            return cells
        (lane, column), (rows, count) = divmod(int(cells[0, 0]), COLUMNS), cells.shape
        found = cls(slice(lane, lane + rows), slice(column, column + count))
        return found if column + count <= COLUMNS and np.array_equal(found.cells, cells) else cells

    @property
    def cells(self) -> Cells:
        lanes = np.arange(self.lanes.start, self.lanes.stop, dtype=np.int64)[:, None]
        return lanes * COLUMNS + np.arange(self.columns.start, self.columns.stop, dtype=np.int64)


class TensorMemory:
    """One CTA's tensor memory.

    Attributes:
        data: uint32 of each cell, by index.
        written: whether it was ever written since its column was allocated.
        owner: of each column the first column of its allocation, or FREE.
        relinquished: the CTA gave up its right to allocate.
    """

    def __init__(self) -> None:
        self.data: Words = np.full(LANES * COLUMNS, POISON, dtype=np.uint32)
        self.written = np.zeros(LANES * COLUMNS, dtype=np.bool_)
        self._grids = self.data.reshape(LANES, COLUMNS), self.written.reshape(LANES, COLUMNS)
        self.owner = np.full(COLUMNS, FREE, dtype=np.int16)
        self.relinquished = False

    # Allocation

    def allocate(self, columns: int) -> int | None:
        """The lowest address with so many free columns; None while there are not, and the instruction waits.

        Raises:
            TensorMemoryError: not a power of two from 32 to 512, or after `relinquish`.
        """
        return allocate((self,), columns)

    def deallocate(self, address: int, columns: int) -> None:
        """Give back a whole allocation; what it held is lost. Raises TensorMemoryError if it is none."""
        check_size(columns)
        lane, column = split_address(address)
        if lane or column >= COLUMNS or self._allocations().get(column) != columns:
            known = ", ".join(f"{count} columns at {first}" for first, count in self._allocations().items())
            raise TensorMemoryError(
                f"deallocation of {columns} columns at {name_address(address)}; allocated: {known or 'nothing'}"
            )
        self.owner[column : column + columns] = FREE
        self.data.reshape(LANES, COLUMNS)[:, column : column + columns] = POISON
        self.written.reshape(LANES, COLUMNS)[:, column : column + columns] = False

    def relinquish(self) -> None:
        """The CTA allocates no more."""
        self.relinquished = True

    def leaks(self) -> list[tuple[int, int]]:
        """(address, columns) of what is still allocated; at a kernel's exit there may be nothing."""
        return list(self._allocations().items())

    def _allocations(self) -> dict[int, int]:
        first, count = np.unique(self.owner[self.owner != FREE], return_counts=True)
        return {int(column): int(columns) for column, columns in zip(first, count, strict=True)}

    # Access

    def place(self, pattern: Pattern, address: int) -> Cells:
        """Indices of a pattern's cells at an address, in the pattern's shape.

        Raises:
            TensorMemoryError: the lane is misaligned, or a cell lies outside or in a column that nobody allocated.
        """
        lane, column = split_address(address)
        if lane % pattern.aligned:
            raise TensorMemoryError(f"{name_address(address)}: the lane must be a multiple of {pattern.aligned}")
        last = column + int(pattern.columns[-1])
        if lane + pattern.lanes > LANES or last >= COLUMNS:
            raise TensorMemoryError(
                f"{name_address(address)}: an access up to lane {lane + pattern.lanes - 1}, column {last}"
                f" leaves {LANES} lanes x {COLUMNS} columns"
            )
        columns = column + pattern.columns
        free = self.owner[columns] == FREE
        if free.any():
            raise TensorMemoryError(f"{name_address(address)}: column {int(columns[free.argmax()])} is not allocated")
        return pattern.offsets + (lane * COLUMNS + column)

    def cells(self, address: int, shape: str, num: str, quarter: int, *, halves: bool = False, split: int = 0) -> Cells:
        """The cell of each register of each thread of a warp, for tcgen05.ld and tcgen05.st.

        Args:
            shape: 32x32b, 16x64b, 16x128b, 16x256b or 16x32bx2.
            num: x1 to x128.
            quarter: the warp's number modulo 4.
            halves: pack::16b or unpack::16b: a register's halves lie in two columns.
            split: immHalfSplitoff of 16x32bx2, in columns.

        Returns:
            [registers, 32]; with halves [registers, 2, 32], low half first.

        Raises:
            TensorMemoryError: the shape has no such num, the lanes are another warp's, or as `place`.
        """
        lane, _ = split_address(address)
        if lane // QUARTER != quarter:
            raise TensorMemoryError(
                f"{name_address(address)}: a warp with number % 4 = {quarter} reaches lanes"
                f" {quarter * QUARTER} to {quarter * QUARTER + QUARTER - 1}, not lane {lane}"
            )
        return self.place(fragment(shape, int(num[1:]), halves, split), address)

    def read(self, cells: "Cells | Rectangle") -> Words:
        """What cells hold, in their shape."""
        if isinstance(cells, Rectangle):
            return self._grids[0][cells.lanes, cells.columns]
        return self.data[cells]

    def write(self, cells: "Cells | Rectangle", values: Words) -> None:
        if isinstance(cells, Rectangle):
            data, written = self._grids
            data[cells.lanes, cells.columns] = values
            written[cells.lanes, cells.columns] = True
            return
        self.data[cells] = values
        self.written[cells] = True

    def unwritten(self, cells: "Cells | Rectangle") -> int:
        """The first of the cells that was never written, -1 if all were."""
        if isinstance(cells, Rectangle):
            if self._grids[1][cells.lanes, cells.columns].all():
                return -1
            cells = cells.cells
        flat = cells.reshape(-1)
        missing = ~self.written[flat]
        return int(flat[missing.argmax()]) if missing.any() else -1

    def load(self, cells: Cells) -> Words:
        """tcgen05.ld: registers [registers, 32] of what `cells` gave."""
        values = self.data[cells]
        if cells.ndim == 2:
            return values
        packed: Words = (values[:, 0] & np.uint32(0xFFFF)) | values[:, 1] << np.uint32(16)
        return packed

    def store(self, cells: Cells, registers: Words) -> None:
        """tcgen05.st: write registers [registers, 32] to what `cells` gave. Halves leave the columns' upper bits 0."""
        if cells.ndim == 3:
            registers = np.stack((registers & np.uint32(0xFFFF), registers >> np.uint32(16)), axis=1)
        self.write(cells, registers)


def check_size(columns: int) -> None:
    """Raises TensorMemoryError where so many columns cannot be allocated."""
    if columns not in (32, 64, 128, 256, 512):
        raise TensorMemoryError(f"{columns} columns of tensor memory: a power of two from 32 to 512 is needed")


def allocate(memories: Sequence[TensorMemory], columns: int) -> int | None:
    """The same columns in each of the memories: one CTA's, or with cta_group::2 a pair's. As TensorMemory.allocate."""
    check_size(columns)
    if any(memory.relinquished for memory in memories):
        raise TensorMemoryError(f"allocation of {columns} columns after relinquish_alloc_permit")
    taken = np.logical_or.reduce([memory.owner != FREE for memory in memories])
    for first in range(0, COLUMNS - columns + 1, UNIT):
        if not taken[first : first + columns].any():
            for memory in memories:
                memory.owner[first : first + columns] = first
            return first
    return None


# Registers that a thread holds for x1, and the largest num.
PER_NUM = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128)}


@lru_cache(maxsize=256)
def fragment(shape: str, num: int, halves: bool, split: int) -> Pattern:
    """Where each register of each thread lies; arguments, shape and errors as TensorMemory.cells."""
    per_num, most = PER_NUM[shape]
    if num > most:
        raise TensorMemoryError(f".{shape} goes up to x{most}, not x{num}")
    register = np.arange(per_num * num, dtype=np.int64)[:, None]
    thread = np.arange(32, dtype=np.int64)[None, :]
    second = np.zeros_like(thread)  # threads whose columns begin `split` further
    if shape == "32x32b":
        lane, column = thread + 0 * register, register + 0 * thread
    elif shape == "16x64b":
        lane, column = thread // 4 + thread % 2 * 8 + 0 * register, thread // 2 % 2 + 2 * register
    elif shape == "16x128b":
        lane, column = thread // 4 + register % 2 * 8, thread % 4 + register // 2 * 4
    elif shape == "16x256b":
        lane = thread // 4 + register // 2 % 2 * 8
        column = thread % 4 * 2 + register % 2 + register // 4 * 8
    else:
        lane, column = thread % 16 + 0 * register, register + 0 * thread
        second = thread // 16 * split
    aligned = 32 if shape == "32x32b" else 16
    if not halves:
        return Pattern.of(lane, column + second, aligned)
    half = np.arange(2, dtype=np.int64)[None, :, None]
    return Pattern.of(lane[:, None, :], 2 * column[:, None, :] + half + second[:, None, :], aligned)


def reduce(registers: Words, op: str, type: str, *, absolute: bool = False, nan: bool = False) -> Words:
    """tcgen05.ld.red: the minimum or maximum over each thread's registers.

    Args:
        registers: [registers, 32].
        op: min or max.
        type: f32, u32 or s32.
        absolute, nan: `.abs` and `.NaN`, of f32.

    Returns:
        [32].
    """
    if type != "f32":
        if absolute or nan:
            raise Unsupported(f"tcgen05.ld.red of {type} with .abs or .NaN")
        values = registers.view(np.int32) if type == "s32" else registers
        return (values.min(axis=0) if op == "min" else values.max(axis=0)).view(np.uint32)
    numbers = registers.view(np.float32)
    if absolute:
        numbers = np.abs(numbers)
    fold = floats.minimum if op == "min" else floats.maximum
    result = numbers[0]
    for row in numbers[1:]:
        result = fold(result, row, nan=nan)
    return floats.canonical(result).view(np.uint32)
