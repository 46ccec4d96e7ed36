# SPDX-License-Identifier: Apache-2.0
"""What orders waits and phases: the two ways in which a parity may be that of another phase."""

import pytest

from emulator.machine.clocks import Clock, Components, Source
from emulator.machine.phase_order import PhaseOrder


class World:
    """Two warps and an mbarrier; `said` are the reports."""

    def __init__(self) -> None:
        self.components = Components(8)
        self.a, self.b = (Clock(self.components, self.components.new(Source.WARP, name)) for name in "ab")
        self.order = PhaseOrder("full", self.components, self.components.new(Source.MBARRIER, "full"))
        self.phase, self.said = 1, list[str]()

    def arrive(self, *clocks: Clock) -> None:
        """Arrivals that complete the phase."""
        for clock in clocks:
            clock.count_event()
            self.order.arrive(clock.history)
        self.order.complete(self.phase)
        self.phase += 1

    def wait(self, clock: Clock) -> None:
        """For the latest complete phase."""
        self.order.answer(clock, self.phase - 1, self.said.append)


def test_in_turn() -> None:
    world = World()
    for _ in range(3):
        world.arrive(world.a)
        world.wait(world.b)
        world.a.follow(world.b.history)
    assert not world.said


def test_the_next_phase_may_end_before_the_answer() -> None:
    world = World()
    world.arrive(world.a)
    world.wait(world.b)
    for _ in range(3):
        world.arrive(world.a)
    (message,) = world.said
    assert "full: a wait for phase 1, whose answer nothing orders before the end of phase 2" in message


def test_a_part_in_the_next_phase_is_behind_the_answer() -> None:
    world = World()
    world.arrive(world.a)
    world.wait(world.b)
    world.arrive(world.a, world.b)
    assert not world.said


@pytest.mark.parametrize("first", [False, True])
def test_an_arrival_before_the_answer_says_nothing_of_it(first: bool) -> None:
    world = World()
    world.arrive(world.a)
    if first:
        world.b.count_event()
        world.a.follow(world.b.history)
    world.wait(world.b)
    if not first:
        world.b.count_event()
        world.a.follow(world.b.history)
    world.arrive(world.a)
    assert bool(world.said) == first


def test_answers_for_older_phases_do_not_matter() -> None:
    """A warp that stops waiting misses nothing."""
    world = World()
    world.arrive(world.a)
    world.wait(world.b)
    world.a.follow(world.b.history)
    for _ in range(3):
        world.arrive(world.a)
    assert not world.said


def test_a_phase_that_is_left_out() -> None:
    """Before its end, a wait for the next one would not wait."""
    world = World()
    world.arrive(world.a)
    world.arrive(world.a)
    world.wait(world.b)
    (message,) = world.said
    assert "full: a wait for phase 2, before which nothing orders the end of phase 1" in message


def test_another_warp_has_waited_for_the_phase_that_is_left_out() -> None:
    world = World()
    world.arrive(world.a)
    world.wait(world.a)
    world.b.follow(world.a.history)
    world.arrive(world.a)
    world.wait(world.b)
    assert not world.said


@pytest.mark.parametrize("engine", [False, True])
def test_who_follows_all_arrivals_knows_of_the_end_but_for_those_of_engines(engine: bool) -> None:
    world = World()
    if engine:
        world.order.arrive(world.b.history, engine=True)
    world.arrive(world.b)
    world.arrive(world.a)
    world.wait(world.b)
    assert bool(world.said) == engine


def test_engines_of_one_phase_say_nothing_of_the_next() -> None:
    world = World()
    world.order.arrive(world.b.history, engine=True)
    world.arrive(world.b)
    world.wait(world.b)
    world.arrive(world.b)
    world.arrive(world.b)
    world.wait(world.b)
    assert not world.said


def test_all_arrivals_have_to_be_known() -> None:
    world = World()
    world.arrive(world.a, world.b)
    world.arrive(world.a)
    world.wait(world.b)
    assert len(world.said) == 1
