# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the source of the ring that keys and values share on SM100 are found on the emulator.

Beside those in its PTX (test_mutants.py): places, waits and numbers of bytes that are wrong for every tile.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.sm100 import dense_correction as correct
from dsl_backend.attention.cute.sm100 import dense_kernel as forward
from dsl_backend.attention.cute.sm100 import dense_mma as multiply
from dsl_backend.attention.cute.sm100 import kv_stages as places
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm100.dense_host import Prefill
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, emulate, scratch
from tests.attention.mistakes import Mistake, spoilt

# Ten tiles go through the three places, and the last one ends in the middle.
CASE = Case(q_lens=(140,), kv_lens=(150,), heads=(2, 1), dim=192, dim_v=128, page=None)
CONFIG = DenseConfig(tile_n=32, shared_ring=True)

MISTAKES = (
    Mistake(
        "values in the place of the next keys",
        places,
        "stage_of(tile + SHARED_PLACES - 1, SHARED_PLACES)",
        "stage_of(tile + 1, SHARED_PLACES)",
    ),
    Mistake("one place for the other columns", places, ", stage_of(tile, self.stages)]", ", cutlass.Int32(0)]"),
    Mistake("keys in one of two places", places, "[stage_of(tile, SHARED_PLACES),", "[stage_of(tile, self.stages),"),
    Mistake("other columns are the first ones", places, "(0, kernel.dims_v, *", "(0, 0, *"),
    Mistake("other columns are not expected", places, "(full, self.k_bytes)", "(full, self.v_bytes)"),
    Mistake(
        "a wait for the values of a round before",
        places,
        "v_empty + stage, phase_of(",
        "v_empty + stage, 1 ^ phase_of(",
    ),
    Mistake(
        "a phase of three places",
        places,
        "+ stage, phase_of(count, self.stages)",
        "+ stage, phase_of(count, SHARED_PLACES)",
    ),
    Mistake("a wait for keys that were read before", places, "before = count - 1", "before = count - 2"),
    Mistake("places of keys that others have", multiply, "places.of_keys(tile)", "places.of_keys(tile + 1)"),
    Mistake("values free too early", multiply, "if g == self.kernel.halves - 1 else []", "if g == 0 else []"),
    Mistake("values never free", multiply, "if g == self.kernel.halves - 1 else []", "if g < 0 else []"),
    Mistake(
        "zeros in another place",
        correct,
        "of_values(count)]\n            clear_rows(values, cutlass.max",
        "of_values(count + 1)]\n            clear_rows(values, cutlass.max",
    ),
)
QUICK = ("one place for the other columns", "a phase of three places")
# The classes of these modules that the kernel is made of.
ROLES = ("OwnRings", "SharedRing", "SharedRingLoadWarp", "MmaWarp", "AlternatingMmaWarp", "CorrectionWarps")


def run(schedules: Iterable[int]) -> None:
    """The case, on a kernel compiled anew: what is kept was made of other source."""

    class Fresh(Prefill):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(forward.DenseForward(key), fake_args(key, fake_dense_tensors(key)), target.arch, "")

    def make(planner: Planner, short: bool) -> Kernel:
        return Fresh(planner.spec, planner.target, scratch(), CONFIG)

    for index in schedules:
        emulate(CASE, "sm_100a", make, index, sms=1)


@pytest.mark.full
def test_right_without_a_mistake() -> None:
    run(range(len(SCHEDULES)))


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, id=one.id, marks=() if one.id in QUICK else (pytest.mark.full,)) for one in MISTAKES],
)
def test_mistake_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    for role in ROLES:
        if getattr(module, role, None) is not None:
            monkeypatch.setattr(forward, role, getattr(module, role))
    with pytest.raises((EmulatorError, AssertionError)):
        run(range(len(SCHEDULES)))
