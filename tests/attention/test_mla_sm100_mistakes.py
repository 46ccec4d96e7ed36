# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what the load warp of the SM100 kernels of absorbed MLA does by itself are found."""

from pathlib import Path
from typing import Any

import pytest

from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.sm100 import mla_load
from dsl_backend.attention.cute.sm100.mla_configs import MlaConfig
from dsl_backend.attention.cute.sm100.mla_host import Mla
from dsl_backend.attention.cute.sm100.mla_kernel import MlaForward
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import mla
from emulator.errors import EmulatorError
from tests.attention.mla_cases import SCHEDULES, Run, emulate
from tests.mistakes import Mistake, spoil_methods, spoilt

# Requests of several tiles, of one, and without keys, two for each CTA and more; a tile has two pages.
CASE = mla(16, (288, 256), q_lens=(2, 1, 1, 1, 1, 1, 1, 1, 1), kv_lens=(80, 20, 0, 50, 70, 31, 33, 40, 64), page=16)
CONFIG = MlaConfig(tile_n=32, stages=2)

MISTAKES = (
    ("pages of the tile itself", "self.pages_from(work, n_block - 1)", "self.pages_from(work, n_block)"),
    ("pages that are never taken over", "                pages = pages_ahead\n", ""),
    (
        "pages of the work tile before",
        "            work = self.work_pipeline.consume(work_tiles)\n            pages = self.pages_from("
        "work, work.n_block_max - 1)\n            valid",
        "            work = self.work_pipeline.consume(work_tiles)\n            valid",
    ),
    ("the last tile has no page", "n_block >= work.n_block_min", "n_block > work.n_block_min"),
)
QUICK = ("the last tile has no page",)


def run(schedules: tuple[str, ...]) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""

    class Fresh(Mla):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(MlaForward(key), fake_args(key, fake_mla_tensors(key)), target.arch, "")

    for seed, schedule in enumerate(schedules):
        emulate(Run(CASE, schedule, False), seed, "sm_100a", Fresh, CONFIG)


@pytest.mark.rest
def test_right_without_a_mistake() -> None:
    run(SCHEDULES)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, id=one[0], marks=() if one[0] in QUICK else (pytest.mark.full,)) for one in MISTAKES],
)
def test_a_mistake_is_found(mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_methods(mla_load.PagesAhead, spoilt(Mistake(mistake[0], mla_load, *mistake[1:]), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run(("lazy",))
