# SPDX-License-Identifier: Apache-2.0
"""Query tiles that SM90's prefill claims late: when a CTA has nearly loaded the tile before."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsl_backend.attention.cute.loader import dense
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig, default_split_config
from dsl_backend.attention.cute.sm90.dense_host import Prefill, SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.runtime import toolkit
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError
from tests.attention.emulated import emulate, scratch
from tests.mistakes import Mistake, spoil_methods, spoilt

pytestmark = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")

# Work tiles of 1 key tile up to 25, on two CTAs: below, at and above LATE_KEY_TILES, and some that are claimed ahead.
RAGGED = Case(
    id="ragged", q_lens=(20, 150, 1, 64, 130), kv_lens=(20, 400, 300, 128, 137), heads=(2, 1), dim=64, page=32
)
CASES = (
    RAGGED,
    replace(RAGGED, id="window", window=(70, None), softcap=3.0),
    Case(id="fp8", q_lens=(40, 70), kv_lens=(170, 300), heads=(2, 2), dim=64, fp8=True),
)


def run(case: Case, index: int, groups: int = 1) -> None:
    def make(planner: Planner, short: bool) -> Kernel:
        spec, target = planner.spec, planner.target
        if short:
            return SplitKV(spec, target, scratch(), default_split_config(spec))
        config = DenseConfig(
            groups=groups,
            tile_n=16,
            stages=2 + index % 2,
            query_stages=1 + index % 2,
            ping_pong=groups == 2,
            dequant_stages=2 if spec.is_fp8_kv else 0,
        )
        return Prefill(spec, target, scratch(), config)

    emulate(case, "sm_90a", make, index, sms=2)


@pytest.mark.parametrize("index", range(3), ids=("eager", "lazy", "random"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_results(case: Case, index: int) -> None:
    run(case, index, groups=1 if case.fp8 else 1 + index % 2)


IN_LOOP = "n_block + 1 - work.n_block_min == LATE_KEY_TILES"
MISTAKES = (
    Mistake("twice", dense, IN_LOOP, IN_LOOP.replace("==", "<=")),
    Mistake("never", dense, IN_LOOP, "n_block < 0"),
    Mistake("short ones twice", dense, "work.n_block_min <= LATE_KEY_TILES", "work.n_block_min <= LATE_KEY_TILES + 1"),
)


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_a_mistake_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_methods(dense.LoadWarp, spoilt(mistake, tmp_path), monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):
        run(RAGGED, 0)
