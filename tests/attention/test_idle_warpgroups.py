# SPDX-License-Identifier: Apache-2.0
"""Warpgroups of SM90 leave query tiles in which they have no row to the others, and take part in what all do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.sm90 import dense_mma
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill, SplitKV
from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.testing.cases import FULL, Case
from emulator.errors import EmulatorError, HostError
from emulator.machine.profile import Profile
from tests.attention.emulated import compiled_anew, emulate, executed, scratch
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


def run(case: Case, config: DenseConfig, index: int, *, sms: int = 4, prefill: Any = Prefill) -> Profile:
    """Run a case on a class of kernels and judge the result."""

    def make(planner: Planner, short: bool) -> Kernel:
        if short:
            return SplitKV(planner.spec, planner.target, scratch())
        kernel: Kernel = prefill(planner.spec, planner.target, scratch(), config)
        return kernel

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


@pytest.mark.parametrize(
    ("config", "rows", "share"), [("ping-pong", 64, 2), ("ping-pong", 65, 1), ("three", 64, 3), ("together", 17, 2)]
)
def test_products_are_of_warpgroups_with_rows(config: str, rows: int, share: int) -> None:
    """A tile with few rows has so many times fewer products than a full one."""
    case = Case(q_lens=(rows,), kv_lens=(200,), heads=(1, 1), dim=64, causality=FULL)
    full = replace(case, q_lens=(64 * CONFIGS[config].groups,))
    profiles = [run(one, CONFIGS[config], 0, sms=1) for one in (case, full)]
    few, all_of_them = (executed(profile, "wgmma.mma_async") for profile in profiles)
    assert all_of_them == share * few > 0


# K's wait could be left out: V's holds a warpgroup back as far.
WAIT_FOR_V = "            self.wait_kv(self.barriers.v_full, i)\n"
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
        run(TAILS, config, 1, prefill=compiled_anew(Prefill, DenseForward))
    assert not isinstance(raised.value, HostError), "it ran"
