# SPDX-License-Identifier: Apache-2.0
"""Launches of a stream that overlap: what waits for what, and what is found where nothing does."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from host_machines import Recorder

import emulator
from emulator.errors import HostError
from emulator.machine.findings import Finding, Kind

pytest.importorskip("cutlass")

from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from dependent_kernels import THREADS, Step

SCHEDULES = ("eager", "lazy", "random")
CTAS = 6
SIZE = CTAS * THREADS

# What kernels with programmatic dependent launch do.
RIGHT = "launch_dependents wait load store"
LATE = "wait load store launch_dependents"
# (actions of the kernel, the buffer that it reads, the buffer that it writes)
Stage = tuple[str, int, int]


class Outcome:
    """What a chain of kernels found, and left."""

    def __init__(self, findings: Sequence[object], buffers: list[torch.Tensor]) -> None:
        self.findings = [one for one in findings if isinstance(one, Finding)]
        self.buffers = buffers


@cache
def compiled(actions: str, pdl: bool) -> Callable[..., None]:
    """On a device that is active."""
    view = from_dlpack(torch.zeros(SIZE))
    return cute.compile(Step(actions, pdl=pdl), view, view)


def run(
    stages: Sequence[Stage], schedule: str, *, seed: int = 0, captured: bool = True, plain: int = -1, sms: int = 2
) -> Outcome:
    """A chain of launches on buffers of float32, of which the first holds numbers and the others zeros.

    Args:
        captured: the launches may overlap.
        plain: the number of a launch that is not to overlap with the one before it.
    """
    count = 1 + max(max(source, target) for _, source, target in stages)
    buffers = [torch.arange(SIZE, dtype=torch.float32), *(torch.zeros(SIZE) for _ in range(count - 1))]
    with emulator.device("sm_90a", sms=sms, schedule=schedule, seed=seed, keep_findings=True) as device:
        views = [from_dlpack(buffer) for buffer in buffers]
        functions = [compiled(actions, number != plain) for number, (actions, _, _) in enumerate(stages)]

        def launch() -> None:
            for function, (_, source, target) in zip(functions, stages, strict=True):
                function(views[source], views[target])

        if captured:
            with device.capture():
                launch()
        else:
            launch()
        return Outcome(device.findings, buffers)


def chain(*actions: str) -> list[Stage]:
    """Each kernel reads what the one before it wrote."""
    return [(one, number, number + 1) for number, one in enumerate(actions)]


def expected(steps: int) -> torch.Tensor:
    result = torch.arange(SIZE, dtype=torch.float32)
    for _ in range(steps):
        result = 2 * result + 1
    return result


def kinds(outcome: Outcome) -> set[Kind]:
    return {one.kind for one in outcome.findings}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "stages",
    [
        chain(RIGHT, RIGHT, RIGHT),
        chain(LATE, RIGHT, LATE),
        chain("load store", RIGHT),
        # One warp waits, and a barrier tells the other.
        chain(RIGHT, "launch_dependents 0wait sync load store", RIGHT),
        # The second waits, so that its end is after the first's: the third's wait is for both.
        [(RIGHT, 0, 1), (RIGHT, 3, 4), (RIGHT, 1, 2)],
        # Another buffer, read and written in front of the wait: no launch before wrote it.
        [(RIGHT, 0, 1), ("launch_dependents load store wait", 2, 3)],
        # The second lets the third start after its own wait: the first is over when the third begins.
        [(RIGHT, 0, 1), ("wait launch_dependents load store", 3, 4), ("load wait store", 1, 2)],
    ],
)  # fmt: skip
def test_chains_that_wait(stages: list[Stage], schedule: str) -> None:
    outcome = run(stages, schedule)
    assert not outcome.findings
    assert all(torch.equal(outcome.buffers[target], outcome.buffers[source] * 2 + 1) for _, source, target in stages)


MISTAKES = {
    "load-before-wait": chain(RIGHT, "launch_dependents load wait store"),
    "no-wait": chain(RIGHT, "launch_dependents load store"),
    "no-wait-behind-a-kernel-that-lets-nobody-start-early": chain("wait load store", "load store"),
    "other-warp-waits": chain(RIGHT, "launch_dependents 0wait load store"),
    # The second has not waited, so it may end before the first does.
    "wait-for-one-that-has-not-waited": [(RIGHT, 0, 1), ("launch_dependents load store", 3, 4), (RIGHT, 1, 2)],
    # The second lets the third start before it has waited for the first.
    "trigger-before-wait": [
        (RIGHT, 0, 1),
        ("launch_dependents wait load store", 3, 4),
        ("load wait store", 1, 2),
    ],
    "read-then-written": [(RIGHT, 0, 1), ("launch_dependents load store wait", 2, 0)],
    "written-twice": [(RIGHT, 0, 1), ("launch_dependents load store wait", 2, 1)],
    "counters": [("launch_dependents wait count", 0, 1), ("count wait", 0, 1)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_in_every_schedule(name: str, schedule: str) -> None:
    outcome = run(MISTAKES[name], schedule)
    assert kinds(outcome) == {Kind.DEPENDENCY}
    (finding, *_) = outcome.findings
    assert "dependent_kernels.py:" in finding.place.source
    assert finding.other is not None
    assert "dependent_kernels.py:" in finding.other.source
    assert {finding.place.who[:8], finding.other.who[:8]} in ({"launch 0", "launch 1"}, {"launch 0", "launch 2"})


def test_the_lazy_schedule_shows_what_a_missing_wait_reads() -> None:
    outcome = run(MISTAKES["load-before-wait"], "lazy", sms=CTAS)
    assert not torch.equal(outcome.buffers[2], expected(2))
    assert torch.equal(run(MISTAKES["load-before-wait"], "eager").buffers[2], expected(2))


def test_launches_before_one_that_is_ended_go_on() -> None:
    """What was read too early may be why it had to be ended."""
    outcome = run(chain(RIGHT, "launch_dependents load beyond wait store", RIGHT), "lazy", sms=CTAS)
    assert kinds(outcome) == {Kind.BOUNDS, Kind.DEPENDENCY}
    assert torch.equal(outcome.buffers[1], expected(1))
    assert not outcome.buffers[3].any()


@pytest.mark.parametrize("name", MISTAKES)
def test_launches_on_their_own_do_not_overlap(name: str) -> None:
    assert not run(MISTAKES[name], "lazy", captured=False).findings


def test_a_launch_without_the_attribute_waits_for_all_before_it() -> None:
    stages = [(RIGHT, 0, 1), ("launch_dependents load store", 3, 4), ("load store", 1, 2)]
    outcome = run(stages, "lazy", plain=2)
    assert not outcome.findings
    assert torch.equal(outcome.buffers[2], expected(2))


@pytest.mark.parametrize("seed", range(4))
def test_random_orders(seed: int) -> None:
    outcome = run(chain(*[RIGHT] * 5), "random", seed=seed)
    assert not outcome.findings
    assert torch.equal(outcome.buffers[5], expected(5))


def captured_with_an_error(device: emulator.Device, launch: Callable[[], None]) -> None:
    with device.capture():
        launch()
        device.register(torch.zeros(1, device="meta"))


def test_captured_launches_run_at_the_end_and_not_after_an_error() -> None:
    machine = Recorder()
    buffer = torch.zeros(SIZE)
    with emulator.device("sm_90a", machine=machine) as device:
        view = from_dlpack(buffer)
        step = cute.compile(Step(RIGHT), view, view)
        with device.capture():
            step(view, view)
            step(view, view)
            assert not machine.launches
        assert len(machine.launches) == device.launches == 2
        with pytest.raises(HostError):
            captured_with_an_error(device, lambda: step(view, view))
        step(view, view)
        assert len(machine.launches) == 3
