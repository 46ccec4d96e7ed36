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
