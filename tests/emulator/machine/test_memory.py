# SPDX-License-Identifier: Apache-2.0
"""Memory: values, bounds, alignment."""

import numpy as np
import pytest

from emulator.machine.findings import Kind
from emulator.machine.memory import GlobalMemory, MemoryFault, Region, SharedMemory


def region(array: np.ndarray, name: str) -> Region:  # type: ignore[type-arg]
    return Region.at(array.ctypes.data, array.nbytes, name)


def test_loads_and_stores_reach_the_process_memory() -> None:
    a, b = np.arange(64, dtype=np.uint32), np.zeros(64, dtype=np.uint64)
    memory = GlobalMemory([region(a, "a"), region(b, "b")])
    addresses = np.array([a.ctypes.data + 16 * lane for lane in range(4)])
    np.testing.assert_array_equal(memory.load(addresses, 4, 4), np.arange(16).reshape(4, 4))
    memory.store(b.ctypes.data + 8 * np.arange(4), np.array([[5], [6], [7], [8]], dtype=np.uint64))
    assert b[:5].tolist() == [5, 6, 7, 8, 0]
    both = np.array([a.ctypes.data, b.ctypes.data])
    assert memory.load(both, 4, 2).tolist() == [[0, 1], [5, 0]]


def test_out_of_bounds_names_the_nearest_tensor() -> None:
    a, b = np.zeros(8, dtype=np.uint32), np.zeros(8, dtype=np.uint32)
    memory = GlobalMemory([region(a, "queries"), region(b, "keys")])
    with pytest.raises(MemoryFault, match="32 bytes from the start of keys, which has 32") as fault:
        memory.load(np.array([b.ctypes.data, b.ctypes.data + 32]), 4, 1)
    assert (fault.value.kind, fault.value.lane) == (Kind.BOUNDS, 1)
    with pytest.raises(MemoryFault):
        memory.load(np.array([a.ctypes.data + 28]), 4, 2)


def test_misaligned() -> None:
    a = np.zeros(8, dtype=np.uint64)
    with pytest.raises(MemoryFault, match="not aligned to 8 bytes") as fault:
        GlobalMemory([region(a, "a")]).load(np.array([a.ctypes.data, a.ctypes.data + 4]), 4, 2)
    assert (fault.value.kind, fault.value.lane) == (Kind.ALIGNMENT, 1)


def test_shared_memory_is_poisoned_and_bounded() -> None:
    shared = SharedMemory(100)
    assert np.isnan(shared.bytes.view(4).view(np.float32)[:25]).all()
    shared.check(np.array([0, 96]), 4)
    for address in (-4, 100):
        with pytest.raises(MemoryFault, match="the CTA has 100 bytes"):
            shared.check(np.array([address]), 4)
    with pytest.raises(MemoryFault, match="not aligned to 16 bytes"):
        shared.check(np.array([8]), 16)


@pytest.mark.parametrize("shift", [2, 4, 12])
def test_a_region_that_begins_anywhere(shift: int) -> None:
    """Accesses are aligned by their address, wherever the tensor begins."""
    data = np.zeros(64 + 16, np.uint8)
    start = -data.ctypes.data % 16 + shift
    base = data.ctypes.data + start
    region = Region.at(base, 40, "x")
    memory = GlobalMemory([region])
    first = np.array([-(-base // 8) * 8])
    memory.store(first, np.array([[0x0102030405060708]], np.uint64))
    offset = int(first[0]) - data.ctypes.data
    assert data[offset : offset + 8].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert int(memory.load(first, 8, 1)[0, 0]) == 0x0102030405060708
    with pytest.raises(MemoryFault, match=f"-{shift % 8 or 4} bytes from the start of x, which has 40"):
        memory.load(np.array([base - (shift % 8 or 4)]), 2 if shift == 2 else 4, 1)


@pytest.mark.parametrize("words", [slice(2, 12), np.arange(2, 12)])
def test_every_word_keeps_all_its_readers(words: "slice | np.ndarray") -> None:
    """Of two readers of a stretch the second one writes one word, knowing of itself alone."""
    shadow = SharedMemory(64).shadow
    alone = np.array([0, 1], np.int32)
    shadow.read(words, (0, 1), alone, where=7)
    shadow.read(words, (1, 1), alone, where=8)
    clash = shadow.write(slice(9, 10), (1, 1), alone, where=9)
    assert clash is not None
    assert (clash.word, clash.component, clash.earlier) == (9, 0, "read")
