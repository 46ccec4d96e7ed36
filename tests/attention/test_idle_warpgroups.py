# SPDX-License-Identifier: Apache-2.0
"""Warpgroups of SM90 leave query tiles in which they have no row to the others, and take part in what all do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.sm90 import dense_kernel, dense_mma
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill, SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import FULL, Case
from emulator.errors import EmulatorError, HostError
from emulator.machine.profile import Profile
from tests.attention.emulated import emulate, scratch
from tests.mistakes import Mistake, spoil_methods, spoilt

TWO = DenseConfig(groups=2, tile_n=32, stages=2)
PING_PONG = replace(TWO, ping_pong=True)
THREE = replace(PING_PONG, groups=3)
# Tails of 20 and 72 rows, a tile without one, and a request that is shorter than a warpgroup's rows.
TAILS = Case(id="tails", q_lens=(148, 200, 128, 5), kv_lens=(170, 200, 300, 90), heads=(2, 1), dim=64)
CASES = (
    TAILS,
    replace(TAILS, id="window", window=(40, 0)),
    replace(TAILS, id="window-on-both-sides", window=(40, 25), causality=FULL),
    replace(TAILS, id="one-key-tile", q_lens=(20, 64, 65), kv_lens=(20, 64, 65)),
)
CONFIGS = {"together": TWO, "ping-pong": PING_PONG, "three": THREE}


def run(case: Case, config: DenseConfig, index: int, *, sms: int = 4) -> Profile:
    """On a kernel compiled anew, since cached ones were compiled from other source."""

    class Fresh(Prefill):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(
                dense_kernel.DenseForward(key), fake_args(key, fake_dense_tensors(key)), target.arch, ""
            )

    def make(planner: Planner, short: bool) -> Kernel:
        if short:
            return SplitKV(planner.spec, planner.target, scratch())
        return Fresh(planner.spec, planner.target, scratch(), config)

    return emulate(case, "sm_90a", make, index, sms=sms)


QUICK = ("tails-ping-pong", "window-three", "one-key-tile-together")


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=name, marks=() if name in QUICK else pytest.mark.rest)
        for case in CASES
        for config in CONFIGS
        if (name := f"{case.id}-{config}")
    ],
)
def test_case(case: Case, config: str) -> None:
    run(case, CONFIGS[config], CASES.index(case))


def test_fp8_cache() -> None:
    """Stages are filled by the dequantization warps, which wait for all warpgroups."""
    run(replace(TAILS, fp8=True), replace(PING_PONG, dequant_stages=2), 2)


def products(profile: Profile) -> int:
    """Matrix products of all warps."""
    found = 0
    for kernel in profile.kernels.values():
        is_product = ["wgmma.mma_async" in str(instruction) for instruction in kernel.program.instrs]
        found += sum(int(counts[is_product].sum()) for counts in kernel.executed.values())
    return found


@pytest.mark.parametrize(
    ("config", "rows", "share"), [("ping-pong", 64, 2), ("ping-pong", 65, 1), ("three", 64, 3), ("together", 17, 2)]
)
def test_products_are_of_warpgroups_with_rows(config: str, rows: int, share: int) -> None:
    """A tile with few rows has so many times fewer products than a full one."""
    case = Case(q_lens=(rows,), kv_lens=(200,), heads=(1, 1), dim=64, causality=FULL)
    full = replace(case, q_lens=(64 * CONFIGS[config].groups,))
    few, all_of_them = (products(run(one, CONFIGS[config], 0, sms=1)) for one in (case, full))
    assert all_of_them == share * few > 0


# K's wait could be left out: V's holds a warpgroup back as far.
WAIT_FOR_V = """            cute.arch.mbarrier_wait(
                self.barriers.v_full + stage_of(i, self.config.stages), phase_of(i, self.config.stages)
            )
"""
TURN = "            self.warp_scheduler_barrier_sync()\n            self.warp_scheduler_barrier_arrive()\n"
MISTAKES = (
    Mistake("a stage is given back before it is full", dense_mma, WAIT_FOR_V, ""),
    Mistake("a turn is not passed on", dense_mma, TURN, "            self.warp_scheduler_barrier_sync()\n"),
    Mistake(
        "V's rows beyond the last key are left to the others",
        dense_mma,
        "self.zero_fill_v_end(work, work.n_block_max - 1, i)",
        "pass",
    ),
    Mistake("64 rows too many are passed over", dense_mma, "self.warpgroup * WGMMA_M < w", "self.row + 64 < w"),
    Mistake("Q is not given back", dense_mma, "        self.release_q(q_stage)\n        last", "        last"),
)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.id, marks=() if one is MISTAKES[-1] else pytest.mark.rest) for one in MISTAKES]
)
def test_mistake_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_methods(dense_mma.MmaConsumer, spoilt(mistake, tmp_path), monkeypatch)
    config = TWO if mistake.said == WAIT_FOR_V else PING_PONG
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(TAILS, config, 1)
    assert not isinstance(raised.value, HostError), "it ran"
