# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in the source of SM100's dense kernel: stages that K and V share, and P in two pieces.

Those in its PTX are in test_mutants.py. Here stages, waits and byte counts are wrong for every tile.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.sm100 import dense_correction, dense_kernel, dense_mma, dense_softmax, kv_stages
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm100.dense_host import Prefill
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, compiled_anew, emulate, scratch
from tests.mistakes import Mistake, spoilt

# Ten K and V tiles pass through the three stages, and the last one is partly full.
CASE = Case(q_lens=(140,), kv_lens=(150,), heads=(2, 1), dim=192, dim_v=128, page=None)
CONFIG = DenseConfig(tile_n=32, shared_kv_stages=True)

MISTAKES = (
    Mistake(
        "V in the stage of the next K",
        kv_stages,
        "stage_of(kv_idx + SHARED_STAGES - 1, SHARED_STAGES)",
        "stage_of(kv_idx + 1, SHARED_STAGES)",
    ),
    Mistake("one stage for the other columns", kv_stages, ", stage_of(kv_idx, self.stages)]", ", cutlass.Int32(0)]"),
    Mistake(
        "K in one of two stages", kv_stages, "[stage_of(kv_idx, SHARED_STAGES),", "[stage_of(kv_idx, self.stages),"
    ),
    Mistake("other columns are the first ones", kv_stages, "(0, kernel.dims_v, *", "(0, 0, *"),
    Mistake("other columns are not expected", kv_stages, "(full, self.k_bytes)", "(full, self.v_bytes)"),
    Mistake(
        "a wait for the V of a round before",
        kv_stages,
        "v_empty + stage, phase_of(",
        "v_empty + stage, 1 ^ phase_of(",
    ),
    Mistake(
        "a phase of three stages",
        kv_stages,
        "+ stage, phase_of(count, self.stages)",
        "+ stage, phase_of(count, SHARED_STAGES)",
    ),
    Mistake("a wait for K that was read before", kv_stages, "before = count - 1", "before = count - 2"),
    Mistake("stages of the next K", dense_mma, "kv_stages.k_stages(kv_idx)", "kv_stages.k_stages(kv_idx + 1)"),
    Mistake("V released too early", dense_mma, "if s_stage == last else []", "if s_stage == 0 else []"),
    Mistake("V never released", dense_mma, "if s_stage == last else []", "if s_stage < 0 else []"),
    Mistake(
        "zeros in another stage",
        dense_correction,
        "v_stage(kv_idx)]\n            clear_rows(sV, cutlass.max",
        "v_stage(kv_idx + 1)]\n            clear_rows(sV, cutlass.max",
    ),
)
# Several work tiles, so that O is freed for the next one before an output is stored.
LATE_CASE = Case(q_lens=(300, 290), kv_lens=(330, 300), heads=(1, 1), dim=64, page=None)
LATE_CONFIG = DenseConfig(tile_n=64, late_p_keys=32, query_stages=2)

LATE_MISTAKES = (
    Mistake(
        "a late P is not waited for",
        dense_mma,
        "cute.arch.mbarrier_wait(self.barriers.late_p_full + s_stage, p_idx & 1)",
        "pass",
    ),
    Mistake("k-blocks of the late P are left out", dense_mma, "range(early, k_blocks)", "range(early, early)"),
    Mistake("all k-blocks with the first P", dense_mma, "[], range(early))", "[], range(k_blocks))"),
    Mistake(
        "the late P overwrites O", dense_mma, "kv_idx, True, released, range", "kv_idx, accumulate, released, range"
    ),
    Mistake(
        "the first P may be under way",
        dense_softmax,
        "== early:\n                p_stored()",
        "== early:\n                tmem.before_sync()",
    ),
    Mistake(
        "the late P may be under way",
        dense_softmax,
        "is not None\n            p_stored()",
        "is not None\n            tmem.before_sync()",
    ),
    Mistake(
        "rows of the next work tile",
        dense_correction,
        "self.store_tile(work, q_stage)\n            work = next_work",
        "self.store_tile(next_work, q_stage)\n            work = next_work",
    ),
    Mistake(
        "statistics of a later tile",
        dense_correction,
        "self.begin_work_tile(next_work, work_idx, kv_idx)",
        "self.begin_work_tile(next_work, work_idx, kv_idx + 1)",
    ),
)
QUICK = ("a late P is not waited for", "one stage for the other columns", "a phase of three stages")
# The classes of these modules that the kernel uses.
ROLES = (
    "SeparateKVStages", "SharedKVStages", "SharedKVLoadWarp", "MmaWarp", "AlternatingMmaWarp", "SoftmaxWarps",
    "CorrectionWarps",
)  # fmt: skip


def run(schedules: Iterable[int], case: Case, config: DenseConfig) -> None:
    """Run a case on a kernel compiled anew: the cached one is of other source."""

    fresh_class = compiled_anew(Prefill, dense_kernel.DenseForward)

    def make(planner: Planner, short: bool) -> Kernel:
        return fresh_class(planner.spec, planner.target, scratch(), config)

    for index in schedules:
        emulate(case, "sm_100a", make, index, sms=1)


@pytest.mark.full
@pytest.mark.parametrize(("case", "config"), [(CASE, CONFIG), (LATE_CASE, LATE_CONFIG)], ids=["shared", "late"])
def test_right_without_a_mistake(case: Case, config: DenseConfig) -> None:
    run(range(len(SCHEDULES)), case, config)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one, id=one.id, marks=() if one.id in QUICK else (pytest.mark.full,))
        for one in (*MISTAKES, *LATE_MISTAKES)
    ],
)
def test_mistake_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    for role in ROLES:
        if getattr(module, role, None) is not None:
            monkeypatch.setattr(dense_kernel, role, getattr(module, role))
    with pytest.raises((EmulatorError, AssertionError)):
        run(range(len(SCHEDULES)), *((LATE_CASE, LATE_CONFIG) if mistake in LATE_MISTAKES else (CASE, CONFIG)))
