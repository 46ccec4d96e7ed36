# SPDX-License-Identifier: Apache-2.0
"""What makes a kernel slower on a GPU makes it slower on the clock.

The kernels are those that `python -m benchmarks.clock.on_chip --mutants` times on a GPU.
"""

import pytest

pytest.importorskip("cutlass")

from cutlass.cute.nvgpu import warpgroup

import emulator
from benchmarks.clock.kernels import mutants
from emulator.clock.machine import ClockMachine


def microseconds(row, **options):
    """A row's launch alone."""
    clock = ClockMachine(mutants.ARCH, mutants.SMS, **options)
    with emulator.device(mutants.ARCH, sms=mutants.SMS, schedule="clock", machine=clock):
        mutants.run_of(row)()
    return sum(time.microseconds for time in clock.times)


@pytest.mark.rest
def test_fewer_stages_are_slower():
    times = {stages: microseconds(f"stages-{stages}", samples=1) for stages in (2, 3, 4)}
    assert times[2] > 1.1 * times[4]
    assert times[2] > times[3] >= times[4]


@pytest.mark.rest
def test_outputs_in_the_same_banks_are_slower():
    """A warp stores 8 x 8 elements at once: 8 rows that lie in the same 4 banks take 8 times as long."""
    swizzled, conflicting = microseconds("outputs", samples=1), microseconds("outputs-in-the-same-banks", samples=1)
    # A consumer's 64 x 128 outputs are 16 KB: 128 wavefronts of a stmatrix's, or 1024. Both have theirs at once.
    more = 2 * (1024 - 128) / 1755
    assert 0.5 * more < conflicting - swizzled < 1.5 * more


@pytest.mark.rest
def test_a_softmax_behind_all_products_is_slower():
    """The softmax of a tile runs beside the product of P and V of the tile before, unless it waits for that too."""
    wait = warpgroup.wait_group
    overlapped, serialised = microseconds("softmax"), microseconds("serialised-softmax")
    assert warpgroup.wait_group is wait
    # Each of 7 tiles waits for 64 x 128 x 128 more of two groups: 512 cycles each, of which softmax hides half or more.
    assert 7 * 200 / 1755 < serialised - overlapped < 7 * 1500 / 1755


def test_every_mutant_has_its_usual_kernel():
    rows = {row for one in mutants.MUTANTS for row in (one.row, one.usual)}
    assert rows == mutants.RUNS.keys()
    assert all(one.row != one.usual for one in mutants.MUTANTS)
    with pytest.raises(KeyError):
        mutants.run_of("stages-9")
