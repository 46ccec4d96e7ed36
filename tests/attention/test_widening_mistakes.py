# SPDX-License-Identifier: Apache-2.0
"""Bytes of fp8 given back while loads of them are under way are found on the emulator.

Whether results show it is luck: of a GPU, and of the lazy schedule, in which copies come late.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute import dequant as widen
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.sm90 import dense_kernel as forward
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, emulate, scratch
from tests.attention.mistakes import Mistake, spoilt

# Five key tiles go through two places.
CASE = Case(q_lens=(20,), kv_lens=(150,), heads=(1, 1), dim=128, page=16, fp8=True)
CONFIG = DenseConfig(groups=1, tile_n=32, stages=2, dequant_stages=2)

WAITS = "            if cutlass.const_expr(first == 0):\n"
ARRIVES = "        self.arrive(self.taken + place * parts, self.num_ctas)\n"


def early() -> Mistake:
    """All from the wait in front of the stores to the arrival behind them, with the arrival in front."""
    source = inspect.getsource(widen)
    said = source[source.index(WAITS) : source.index(ARRIVES) + len(ARRIVES)]
    moved = f"            if cutlass.const_expr(last == turns):\n        {ARRIVES}"
    return Mistake("given back in front of the stores", widen, said, moved + said.removesuffix(ARRIVES))


def run(index: int) -> None:
    """The case, on a kernel compiled anew: what is kept was made of other source."""

    class Fresh(Prefill):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(forward.DenseForward(key), fake_args(key, fake_dense_tensors(key)), target.arch, "")

    def make(planner: Planner, short: bool) -> Kernel:
        return Fresh(planner.spec, planner.target, scratch(), CONFIG)

    emulate(CASE, "sm_90a", make, index, sms=1)


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SCHEDULES)), ids=SCHEDULES)
def test_right_without_a_mistake(index: int) -> None:
    run(index)


@pytest.mark.parametrize("index", range(len(SCHEDULES)), ids=SCHEDULES)
def test_given_back_in_front_of_the_stores(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "DequantWarps", spoilt(early(), tmp_path).DequantWarps)
    with pytest.raises(EmulatorError, match="an earlier load may still be under way"):
        run(index)
