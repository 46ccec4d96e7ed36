# SPDX-License-Identifier: Apache-2.0
"""Clocks, shadows and barriers: what is ordered, what is not, and what a barrier refuses."""

import numpy as np
import pytest

from emulator.machine.barriers import BarrierMisuse, MBarrier, NamedBarrier
from emulator.machine.clocks import Clock, Components, Source
from emulator.machine.shadow import Shadow

WORDS = np.arange(4)


class World:
    """Two warps, a memory and an mbarrier for one arrival."""

    def __init__(self, arrivals: int = 1) -> None:
        self.components = Components(32)
        self.a, self.b = (Clock(self.components, self.components.new(Source.WARP, name)) for name in "ab")
        self.barrier = MBarrier("full", self.components, arrivals)
        self.memory = Shadow(64)

    def write(self, clock: Clock) -> object:
        return self.memory.write(WORDS, (clock.component, clock.now), clock.knows.seen, where=7)

    def read(self, clock: Clock) -> object:
        return self.memory.read(WORDS, (clock.component, clock.now), clock.knows.seen, where=8)

    def async_read(self, clock: Clock) -> object:
        return self.memory.read(WORDS, (self.barrier.component, self.barrier.phase), clock.async_order(), where=9)

    def hand_over(self, giver: Clock, taker: Clock) -> None:
        """A phase of the barrier from giver to taker."""
        phase = self.barrier.arrive(giver, giver.history)
        assert self.barrier.is_complete((phase - 1) & 1)
        taker.acquire(self.barrier.released)


def test_write_then_read_without_a_barrier_clashes() -> None:
    world = World()
    assert world.write(world.a) is None
    clash = world.read(world.b)
    assert clash is not None
    assert (clash.component, clash.where, clash.earlier) == (world.a.component, 7, "write")


def test_a_barrier_orders() -> None:
    world = World()
    world.write(world.a)
    world.hand_over(world.a, world.b)
    assert world.read(world.b) is None
    assert world.write(world.b) is None


def test_what_is_written_after_the_arrival_is_not_ordered() -> None:
    world = World()
    world.hand_over(world.a, world.b)
    world.write(world.a)
    assert world.read(world.b) is not None


def test_a_read_must_be_ordered_before_a_write() -> None:
    world = World()
    world.read(world.a)
    clash = world.write(world.b)
    assert clash is not None
    assert clash.earlier == "read"


def test_every_one_of_several_readers_counts() -> None:
    world = World(arrivals=2)
    world.read(world.a)
    world.read(world.b)
    world.barrier.arrive(world.a, world.a.history)
    third = Clock(world.components, world.components.new(Source.WARP, "c"))
    assert not world.barrier.is_complete(0)
    third.acquire(world.barrier.released)
    assert world.write(third) is not None
    world.read(world.a)
    world.read(world.b)
    world.barrier.arrive(world.a, world.a.history)
    world.barrier.arrive(world.b, world.b.history)
    third.acquire(world.barrier.released)
    assert world.write(third) is not None, "a read again after its first arrival, in the phase that is not complete"


def test_own_accesses_never_clash() -> None:
    world = World()
    for _ in range(2):
        assert world.write(world.a) is None
        assert world.read(world.a) is None


@pytest.mark.parametrize("fencing", ["nobody", "writer", "issuer"])
def test_the_async_proxy_needs_a_fence_on_either_side(fencing: str) -> None:
    world = World()
    world.write(world.a)
    if fencing == "writer":
        world.a.proxy_fence()
    world.hand_over(world.a, world.b)
    if fencing == "issuer":
        world.b.proxy_fence()
    assert (world.async_read(world.b) is None) == (fencing != "nobody")


def test_a_fence_before_the_write_does_not_count() -> None:
    world = World()
    world.a.proxy_fence()
    world.write(world.a)
    world.hand_over(world.a, world.b)
    assert world.async_read(world.b) is not None


def test_asynchronous_writes_are_known_by_their_barrier() -> None:
    world = World()
    world.barrier.expect(16)
    world.barrier.arrive(world.a, world.a.history)
    stamp = (world.barrier.component, world.barrier.phase)
    world.memory.write(WORDS, stamp, world.a.async_order(), where=1, read_order=world.a.knows.seen)
    world.b.acquire(world.barrier.released)
    assert world.read(world.b) is not None, "the bytes are not complete"
    world.barrier.complete_bytes(16, world.a.history)
    world.b.acquire(world.barrier.released)
    world.memory.write(WORDS, stamp, world.b.knows.seen, where=1)
    assert world.read(world.b) is None


@pytest.mark.parametrize("waited", [False, True])
def test_own_asynchronous_accesses_go_along_once_waited_for(waited: bool) -> None:
    world = World()
    stores = world.components.new(Source.TENSOR_STORE, "a's stores")
    world.memory.write(WORDS, (stores, 1), world.a.knows.seen, where=1)
    if waited:
        world.a.knows.learn(stores, 1)
    world.hand_over(world.a, world.b)
    assert (world.read(world.b) is None) == waited


def test_atomics_need_no_order_among_themselves() -> None:
    world = World()
    for clock in (world.a, world.b):
        assert world.memory.write(WORDS, clock.stamp, clock.knows.seen, where=1, atomic=True) is None
    assert world.read(world.a) is not None


def test_bytes_of_a_word_that_do_not_overlap_do_not_clash() -> None:
    world = World()
    low, high = 0b0011, 0b1100
    assert world.memory.write(WORDS, (world.a.component, 1), world.a.knows.seen, 1, low) is None
    assert world.memory.write(WORDS, (world.b.component, 1), world.b.knows.seen, 2, high) is None
    assert world.memory.unwritten(WORDS) == -1
    assert world.memory.unwritten(np.array([3, 5])) == 5


def test_mbarrier_phases() -> None:
    world = World(arrivals=2)
    barrier = world.barrier
    assert not barrier.is_complete(0)
    assert barrier.is_complete(1), "the phase before the first counts as complete"
    barrier.expect(32)
    barrier.arrive(world.a, world.a.history)
    barrier.arrive(world.b, world.b.history)
    assert not barrier.is_complete(0), "bytes are outstanding"
    barrier.complete_bytes(32, world.a.history)
    assert barrier.is_complete(0)
    assert not barrier.is_complete(1)
    assert barrier.is_idle


def test_bytes_may_complete_before_they_are_expected() -> None:
    world = World()
    world.barrier.complete_bytes(8, world.a.history)
    assert world.barrier.bytes == -8
    world.barrier.expect(8)
    world.barrier.arrive(world.a, world.a.history)
    assert world.barrier.is_complete(0)


def test_barriers_refuse() -> None:
    world = World()
    with pytest.raises(BarrierMisuse, match="2 more arrivals"):
        world.barrier.arrive(world.a, world.a.history, 2)
    with pytest.raises(BarrierMisuse, match="initialised for 0 arrivals"):
        MBarrier("empty", world.components, 0)
    named = NamedBarrier("barrier 1", world.components)
    named.arrive(world.a, 32, 64)
    with pytest.raises(BarrierMisuse, match="a warp arrives for 96 threads"):
        named.arrive(world.b, 32, 96)
    with pytest.raises(BarrierMisuse, match="64 more threads arrive"):
        named.arrive(world.b, 64, 64)
    assert named.arrive(world.b, 32, 64) == 1
    assert named.round == 1
