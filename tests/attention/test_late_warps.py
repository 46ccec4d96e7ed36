# SPDX-License-Identifier: Apache-2.0
"""A warp that lags behind all others of its CTA, each in turn: it must still see every phase of its mbarriers.

The emulator's check of phases asks that of every run, whatever the schedule. So `make test` has one run with a mistake
that `late` found; runs in which a warp does lag confirm the check where there is time.
"""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError

WARPS = 17  # of the largest CTA; a kernel with fewer begins again at its first
ARCHS = ("sm_90a", "sm_100a")
# 4 rows, then 40: the second warp of a softmax warpgroup is idle in every other work tile.
IDLE = Case(
    id="idle-warps", q_lens=(1, 10, 1, 10), kv_lens=(40, 30, 50, 200), heads=(4, 1), dim=64, page=16, why="idle warps"
)
# On SM90 the last query tile of 150 rows leaves one warpgroup without a row.
PREFILL = Case(
    id="prefill",
    q_lens=(70, 1, 150),
    kv_lens=(170, 50, 150),
    heads=(2, 1),
    dim=64,
    page=16,
    why="two S stages, idle warpgroups",
)
CASES = (
    IDLE,
    Case(
        id="window-sinks",
        q_lens=(2, 9, 1),
        kv_lens=(140, 30, 250),
        heads=(8, 2),
        dim=128,
        page=16,
        window=(40, None),
        sinks=True,
        why="windows, keys below which are cleared",
    ),
    replace(IDLE, id="fp8", page=32, fp8=True, why="warps that dequantize"),
    PREFILL,
    Case(
        id="prefill-fp8",
        q_lens=(70, 1, 150),
        kv_lens=(170, 50, 150),
        heads=(2, 1),
        dim=64,
        page=32,
        fp8=True,
        why="both",
    ),
    Case(id="wide", q_lens=(1, 20, 2), kv_lens=(100, 50, 150), heads=(2, 1), dim=256, page=16, why="wide heads"),
    replace(IDLE, id="invariant", batch_invariant=True, why="fixed splits"),
)
E4M3 = (
    Case(
        id="e4m3-prefill",
        q_lens=(70, 1, 150),
        kv_lens=(170, 50, 150),
        heads=(2, 1),
        dim=64,
        page=32,
        fp8=True,
        why="8 bits",
    ),
    Case(
        id="e4m3-many-rows",
        q_lens=(8, 1, 5),
        kv_lens=(100, 50, 150),
        heads=(16, 1),
        dim=64,
        page=32,
        fp8=True,
        why="8 bits",
    ),
)


def run(arch: str, case: Case, kernel: str, schedule: str, warp: int) -> None:
    """Run a case; deadlocks and other findings raise."""
    problem, sms = case.problem(), 2 if case.id == "wide" else 1  # pairs of CTAs
    with emulator.device(arch=arch, sms=sms, schedule=schedule, seed=warp, strict=True):
        result = check.run(problem, kernel, target=replace(from_arch(arch), sm_count=sms))
    assert result.out[problem.owned()].isfinite().all(), f"warp {warp}"


@pytest.mark.parametrize(
    ("arch", "case", "kernel"),
    [
        pytest.param(
            arch,
            case,
            kernel,
            id=f"{arch}-{case.id}",
            marks=pytest.mark.rest if case is IDLE or (arch, case) == ("sm_90a", PREFILL) else pytest.mark.full,
        )
        for arch in ARCHS
        for cases, kernel in ((CASES, "cute"), (E4M3, dispatch.FP8_PRODUCTS))
        for case in cases
    ],
)
def test_any_warp_may_lag(arch: str, case: Case, kernel: str) -> None:
    for warp in range(WARPS):
        run(arch, case, kernel, "late", warp)


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("schedule", "warp", "found"),
    [
        pytest.param("eager", 0, "a wait for phase 0, whose answer nothing orders", id="eager"),
        pytest.param("late", 1, "deadlock", id="late", marks=pytest.mark.rest),
    ],
)
def test_idle_warps_that_do_not_meet_the_others_are_found(
    schedule: str, warp: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end two work tiles while an idle warp waits for the first one's end: it never sees that phase."""
    monkeypatch.setattr(SoftmaxWarps, "sync_warpgroup", lambda warps: None)
    with pytest.raises(EmulatorError, match=found):
        run("sm_100a", IDLE, "cute", schedule, warp)
