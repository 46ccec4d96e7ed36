# SPDX-License-Identifier: Apache-2.0
"""The emulator finds an fp8 stage that is released while loads from it are in flight.

Results need not show it: that depends on timing on a GPU, and on the schedule of copies on the emulator.
"""

import inspect
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute import dequant
from dsl_backend.attention.cute.sm90 import dense_kernel as forward
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, compiled_anew, emulate, scratch
from tests.mistakes import Mistake, spoilt

# Five key tiles pass through two fp8 stages.
CASE = Case(q_lens=(20,), kv_lens=(150,), heads=(1, 1), dim=128, page=16, fp8=True)
CONFIG = DenseConfig(groups=1, tile_n=32, stages=2, dequant_stages=2)

WAITS = "            if cutlass.const_expr(first == 0):\n"
ARRIVES = "        arrive_warp(self.taken + fp8_stage * parts, self.num_ctas)\n"


def early() -> Mistake:
    """The code from the wait before the stores to the arrival after them, with the arrival moved before the stores."""
    source = inspect.getsource(dequant)
    said = source[source.index(WAITS) : source.index(ARRIVES) + len(ARRIVES)]
    moved = f"            if cutlass.const_expr(last == rounds):\n        {ARRIVES}"
    return Mistake("released before the stores", dequant, said, moved + said.removesuffix(ARRIVES))


def run(index: int) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""

    fresh_class = compiled_anew(Prefill, forward.DenseForward)

    def make(planner: Planner, short: bool) -> Kernel:
        return fresh_class(planner.spec, planner.target, scratch(), CONFIG)

    emulate(CASE, "sm_90a", make, index, sms=1)


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SCHEDULES)), ids=SCHEDULES)
def test_right_without_a_mistake(index: int) -> None:
    run(index)


@pytest.mark.parametrize("index", range(len(SCHEDULES)), ids=SCHEDULES)
def test_release_before_the_stores(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "DequantWarps", spoilt(early(), tmp_path).DequantWarps)
    with pytest.raises(EmulatorError, match="an earlier load may still be under way"):
        run(index)
