# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: allocation, and tcgen05.ld and .st against the copy traits of CUTLASS written in CuTe's notation."""

import numpy as np
import pytest
from cute_layouts import Nested, matrix
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.tensor_memory import (
    COLUMNS,
    LANES,
    Pattern,
    TensorMemory,
    TensorMemoryError,
    allocate,
    reduce,
)


def filled() -> TensorMemory:
    """All columns allocated; each cell holds lane * 1000 + column, below 2^17, so that cells tell their place."""
    memory = TensorMemory()
    assert memory.allocate(COLUMNS) == 0
    lanes, columns = np.divmod(np.arange(LANES * COLUMNS), COLUMNS)
    memory.data[:] = lanes * 1000 + columns
    return memory


class TestAllocation:
    def test_the_lowest_free_columns_are_taken(self) -> None:
        memory = TensorMemory()
        assert [memory.allocate(columns) for columns in (64, 32, 256, 128)] == [0, 64, 96, 352]
        assert memory.allocate(64) is None
        memory.deallocate(64, 32)
        assert memory.allocate(32) == 64
        assert memory.leaks() == [(0, 64), (64, 32), (96, 256), (352, 128)]

    def test_everything_can_be_taken_and_given_back(self) -> None:
        memory = TensorMemory()
        assert memory.allocate(512) == 0
        assert memory.allocate(32) is None
        memory.deallocate(0, 512)
        assert memory.leaks() == []
        assert memory.allocate(32) == 0

    @pytest.mark.parametrize("columns", [0, 16, 48, 1024])
    def test_sizes(self, columns: int) -> None:
        with pytest.raises(TensorMemoryError, match=f"{columns} columns"):
            TensorMemory().allocate(columns)

    @pytest.mark.parametrize(("address", "columns"), [(0, 32), (32, 64), (128, 32), (0x10000, 64), (512, 64)])
    def test_what_was_not_allocated_is_not_given_back(self, address: int, columns: int) -> None:
        memory = TensorMemory()
        memory.allocate(64)
        with pytest.raises(TensorMemoryError, match="allocated: 64 columns at 0"):
            memory.deallocate(address, columns)

    def test_no_allocation_after_relinquishing(self) -> None:
        memory = TensorMemory()
        memory.allocate(32)
        memory.relinquish()
        with pytest.raises(TensorMemoryError, match="after relinquish_alloc_permit"):
            memory.allocate(32)
        memory.deallocate(0, 32)

    def test_a_pair_gets_the_same_columns(self) -> None:
        first, second = TensorMemory(), TensorMemory()
        first.allocate(32)
        assert allocate((first, second), 64) == 32
        assert (first.leaks(), second.leaks()) == ([(0, 32), (32, 64)], [(32, 64)])
        assert allocate((first, second), 512) is None

    def test_deallocated_memory_is_poison(self) -> None:
        memory = TensorMemory()
        memory.allocate(32)
        cells = memory.cells(0, "32x32b", "x4", 0)
        memory.store(cells, np.zeros((4, 32), dtype=np.uint32))
        assert memory.unwritten(cells) == -1
        memory.deallocate(0, 32)
        memory.allocate(32)
        assert memory.unwritten(cells) == 0
        assert np.isnan(memory.load(cells).view(np.float32)).all()


# (thread), (bit of its registers) -> bit of the fragment, for x2; and columns of the fragment's row.
TRAITS: dict[str, tuple[tuple[Nested, Nested], tuple[Nested, Nested], int]] = {
    "32x32b": ((32, 64), (64, 1), 2),
    "16x64b": (((2, 2, 8), (32, 2)), ((1024, 32, 128), (1, 64)), 4),
    "16x128b": (((4, 8), (32, 2, 2)), ((32, 256), (1, 2048, 128)), 8),
    "16x256b": (((4, 8), (64, 2, 2)), ((64, 512), (1, 4096, 256)), 16),
    "16x32bx2": (((16, 2), 64), ((128, 64), 1), 4),
}


def traits(shape: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lane and column [registers, 32] of x2, as CUTLASS's SM100_TMEM_LOAD_*2x have them."""
    (threads, bits), strides, columns = TRAITS[shape]
    words = matrix((threads, bits), strides)[:, ::32].T // 32
    return np.divmod(words, columns)


class TestFragments:
    @pytest.mark.parametrize("shape", TRAITS)
    @pytest.mark.parametrize("quarter", range(4))
    def test_whole_words(self, shape: str, quarter: int) -> None:
        memory = filled()
        lane, column = traits(shape)
        lower = quarter * 32 + (0 if shape == "32x32b" else 16)
        split = 2 if shape == "16x32bx2" else 0
        cells = memory.cells(lower << 16 | 40, shape, "x2", quarter, split=split)
        np.testing.assert_array_equal(memory.load(cells), (lower + lane) * 1000 + 40 + column)

    @pytest.mark.parametrize("shape", TRAITS)
    def test_halves(self, shape: str) -> None:
        """pack::16b takes the low halves of columns 2c and 2c + 1 where whole words take column c."""
        memory = filled()
        lane, column = traits(shape)
        split = 4 if shape == "16x32bx2" else 0
        cells = memory.cells(40, shape, "x2", 0, halves=True, split=split)
        low = (lane * 1000 + 40 + 2 * column) & 0xFFFF
        np.testing.assert_array_equal(memory.load(cells), low | (lane * 1000 + 41 + 2 * column & 0xFFFF) << 16)

    @pytest.mark.parametrize("shape", TRAITS)
    @pytest.mark.parametrize("num", [1, 2, 4, 8, 16, 32, 64, 128])
    @pytest.mark.parametrize("halves", [False, True])
    def test_every_cell_of_the_rectangle_once(self, shape: str, num: int, halves: bool) -> None:
        memory = filled()
        per_num = {"16x128b": 2, "16x256b": 4}.get(shape, 1)
        if per_num * num > 128:
            with pytest.raises(TensorMemoryError, match="goes up to"):
                memory.cells(0, shape, f"x{num}", 0, halves=halves)
            return
        width = num * {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 2}[shape] * (1 + halves)
        if width > 512:
            return
        split = width // 2 if shape == "16x32bx2" else 0
        cells = memory.cells(0, shape, f"x{num}", 0, halves=halves, split=split)
        assert cells.shape[0] == per_num * num
        lanes = 32 if shape == "32x32b" else 16
        expected = np.add.outer(np.arange(lanes) * COLUMNS, np.arange(width)).reshape(-1)
        np.testing.assert_array_equal(np.sort(cells.reshape(-1)), expected)

    def test_the_split_is_where_threads_16_to_31_begin(self) -> None:
        memory = filled()
        values = memory.load(memory.cells(0, "16x32bx2", "x2", 0, split=100))
        assert values[:, [0, 15, 16, 31]].tolist() == [[0, 15000, 100, 15100], [1, 15001, 101, 15101]]

    @pytest.mark.parametrize("shape", TRAITS)
    @pytest.mark.parametrize("halves", [False, True])
    def test_a_store_is_read_back(self, shape: str, halves: bool) -> None:
        memory = filled()
        split = 8 if shape == "16x32bx2" else 0
        cells = memory.cells(64 << 16 | 7, shape, "x4", 2, halves=halves, split=split)
        registers = np.random.default_rng(0).integers(0, 1 << 32, (len(cells), 32), dtype=np.uint32)
        assert memory.unwritten(cells) >= 0
        memory.store(cells, registers)
        np.testing.assert_array_equal(memory.load(cells), registers)
        assert memory.unwritten(cells) == -1
        assert memory.written.sum() == cells.size
        if halves:
            assert (memory.read(cells) < 1 << 16).all()

    @pytest.mark.parametrize(
        ("address", "quarter", "message"),
        [
            (0, 1, r"lanes 32 to 63, not lane 0"),
            (32 << 16, 0, r"lanes 0 to 31, not lane 32"),
            (16 << 16, 0, "multiple of 32"),
            (500, 0, "column 515 leaves"),
            (96 << 16 | 64, 3, "column 64 is not allocated"),
            (56, 0, "column 64 is not allocated"),
        ],
    )
    def test_wrong_places(self, address: int, quarter: int, message: str) -> None:
        memory = TensorMemory()
        memory.allocate(64)
        with pytest.raises(TensorMemoryError, match=message):
            memory.cells(address, "32x32b", "x16", quarter)

    def test_lanes_end(self) -> None:
        with pytest.raises(TensorMemoryError, match="up to lane 128"):
            filled().place(Pattern.of(np.arange(65), 0), 64 << 16)


class TestReduction:
    def test_floats(self) -> None:
        values = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)
        values[3, 5] = np.nan
        bits = values.view(np.uint32)
        assert reduce(bits, "max", "f32").view(np.float32).tolist() == np.nanmax(values, axis=0).tolist()
        smallest = reduce(bits, "min", "f32", absolute=True).view(np.float32)
        assert smallest.tolist() == np.nanmin(np.abs(values), axis=0).tolist()
        assert np.flatnonzero(np.isnan(reduce(bits, "min", "f32", nan=True).view(np.float32))).tolist() == [5]

    def test_integers(self) -> None:
        bits = np.random.default_rng(2).integers(0, 1 << 32, (8, 32), dtype=np.uint32)
        assert reduce(bits, "min", "u32").tolist() == bits.min(axis=0).tolist()
        assert reduce(bits, "max", "s32").view(np.int32).tolist() == bits.view(np.int32).max(axis=0).tolist()
        with pytest.raises(Unsupported):
            reduce(bits, "max", "s32", absolute=True)
