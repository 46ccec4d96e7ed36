# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in the source of absorbed MLA by CTA pairs on SM100.

They are of the share of a tile that each CTA loads, of which CTA's mbarriers are signalled, and of the order in which
stages become empty.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.sm100 import (
    mla_barriers,
    two_cta_mla_kernel,
    two_cta_mla_load,
    two_cta_mla_mma,
    two_cta_mla_softmax,
)
from dsl_backend.attention.cute.sm100.mla_configs import TwoCtaMlaConfig
from dsl_backend.attention.cute.sm100.mla_host import MlaSplitKV
from dsl_backend.primitives import copy, tcgen05_mma, tma
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import mla
from emulator.errors import EmulatorError
from tests.attention.mla_cases import SCHEDULES, Run, emulate
from tests.mistakes import Mistake, spoilt

# A CTA pair has some seven tiles, one of which ends in the middle: every stage is filled again several times.
CONFIG = TwoCtaMlaConfig(tile_n=32)
CASE = mla(128, q_lens=(1, 1), kv_lens=(330, 70), q_gain=8.0, page=16, why="a page is a part of a tile")
WIDE_PAGES = mla(128, q_lens=(1, 1), kv_lens=(330, 70), q_gain=8.0, page=64, why="a tile is a part of a page")

SEVERAL = mla(128, q_lens=(1, 1, 1), kv_lens=(100, 70, 100), q_gain=8.0, page=16, why="a CTA pair has two requests")

# Of a work tile behind another one, of the index of a box in its page, and of the rest.
BEHIND = (
    Mistake(
        "the last V over another stage",
        two_cta_mla_load,
        "pages_prev, tiles - 1)\n            self.load_v(last",
        "pages_prev, tiles)\n            self.load_v(last",
    ),
)
PAGES = (
    Mistake(
        "the leader's box in its page",
        two_cta_mla_load,
        "n_block * self.boxes + first_box + i",
        "n_block * self.boxes + i",
    ),
    Mistake("a page's first tile", two_cta_mla_load, "stage_of(n_block * self.boxes + ", "stage_of(0 * self.boxes + "),
)
MISTAKES = (
    Mistake("the leader's keys", two_cta_mla_load, "pages, self.first_box, self", "pages, 0, self"),
    Mistake(
        "the leader's columns",
        two_cta_mla_load,
        "first = self.cta_rank * (self.chunks_v",
        "first = 0 * (self.chunks_v",
    ),
    Mistake(
        "columns of the first PV MMA",
        two_cta_mla_load,
        "(self.chunks_v // CTA_PAIR) + dv_tile * width",
        "(self.chunks_v // CTA_PAIR)",
    ),
    Mistake("V from the next tile's pages", two_cta_mla_load, "last - step + 1, pages_prev", "last - step + 1, pages"),
    Mistake("K over K", two_cta_mla_load, "k_empty + mbar_idx, phase)", "k_empty + mbar_idx, phase ^ 1)"),
    Mistake("V over V", two_cta_mla_load, "v_empty + mbar_idx, phase)", "v_empty + mbar_idx, phase ^ 1)"),
    Mistake(
        "bytes of one CTA expected",
        two_cta_mla_load,
        "tx_bytes = CTA_PAIR * len(tma_boxes)",
        "tx_bytes = len(tma_boxes)",
    ),
    Mistake("bytes expected by both CTAs", two_cta_mla_load, "tx_bytes, self.cta_rank == 0)", "tx_bytes, True)"),
    Mistake(
        "V zeroed before it is loaded",
        two_cta_mla_mma,
        "if work.seqlen_k < work.n_block_max *",
        "if work.seqlen_k < 0 *",
    ),
    Mistake("S of a part", two_cta_mla_mma, "part == PARTS - 1 and not first", "part == 1 and not first"),
    Mistake("a part of K never empty", two_cta_mla_mma, "k_empty + stage * PARTS + part)", "k_empty + stage * PARTS)"),
    Mistake(
        "QK before K is loaded",
        two_cta_mla_mma,
        "k_full + stage * PARTS + part, phase",
        "k_full + stage * PARTS, phase",
    ),
    Mistake(
        "V never empty",
        two_cta_mla_mma,
        "[self.barriers.v_empty + mbar_idx]",
        "[self.barriers.v_empty + 0 * mbar_idx]",
    ),
    Mistake("O signalled early", two_cta_mla_mma, "dv_tile == self.kernel.dv_tiles - 1", "dv_tile == 0"),
    Mistake("one statistic for the maximum", two_cta_mla_softmax, "self.acc_scale, s_stage)", "self.acc_scale, 0)"),
    Mistake(
        "maximum of half of the keys",
        two_cta_mla_softmax,
        "fmax(tile_max, self.exchange(tile_max, s_stage))",
        "fmax(tile_max, tile_max)",
    ),
    Mistake("an MMA warp in both CTAs", mla_barriers, "MMA_WARPS - cta_rank", "MMA_WARPS"),
    Mistake("P of one CTA", mla_barriers, "CTA_PAIR * SOFTMAX_WARPS", "SOFTMAX_WARPS"),
    Mistake("bytes counted by the CTA's own mbarrier", tma, "~PEER_CTA_BIT & 0xFFFFFFFF", "0xFFFFFFFF"),
    Mistake("the leader alone is signalled", tcgen05_mma, "(1 << self.cluster) - 1", "1"),
    Mistake("all k-blocks in each part", tcgen05_mma, "steps or range(k, k + size)", "range(k, k + size)"),
    Mistake(
        "pages read too late",
        two_cta_mla_load,
        "pages_ahead = self.pages_ahead(work, last - step - 1)",
        "pages_ahead = self.pages_ahead(work, last - step)",
    ),
    Mistake("the last V never loaded", two_cta_mla_load, "Int32(1) if count > 1", "Int32(1) if count > 99"),
    Mistake("the even row stored twice", two_cta_mla_softmax, "return even, even + 1", "return even, even"),
    Mistake("vectors that stay where they are", copy, "received if odd else first\n", "first\n"),
    Mistake("O of the last k-block", tcgen05_mma, 'scale_d = "adds"\n            k', "pass\n            k"),
)
# Modules, and what they take from a module that may have a mistake.
IMPORTS = (
    (two_cta_mla_kernel, "TwoCtaMlaLoadWarp"),
    (two_cta_mla_kernel, "TwoCtaMlaMmaWarp"),
    (two_cta_mla_kernel, "TwoCtaMlaSoftmaxWarps"),
    (two_cta_mla_kernel, "two_cta_mbar_arrays"),
    (two_cta_mla_load, "tma_load_boxes"),
    (two_cta_mla_softmax, "exchange_vectors"),
    (two_cta_mla_mma, "Tcgen05Mma"),
)
QUICK = ("a part of K never empty",)


def run(case: Any, schedules: tuple[str, ...]) -> None:
    """Run a case on a kernel that is compiled again: a cached one has other source."""

    class Fresh(MlaSplitKV):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(
                two_cta_mla_kernel.TwoCtaMlaForward(key), fake_args(key, fake_mla_tensors(key)), target.arch, ""
            )

    for seed, schedule in enumerate(schedules):
        emulate(Run(case, schedule), seed, "sm_100a", Fresh, CONFIG)


@pytest.mark.full
@pytest.mark.parametrize("case", [CASE, WIDE_PAGES], ids=["part", "whole"])
def test_right_without_a_mistake(case: Any) -> None:
    run(case, SCHEDULES)


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        pytest.param(case, one, id=one.id, marks=() if one.id in QUICK else (pytest.mark.full,))
        for case, mistakes in ((CASE, MISTAKES), (WIDE_PAGES, PAGES), (SEVERAL, BEHIND))
        for one in mistakes
    ],
)
def test_mistake_is_found(case: Any, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    for importer, name in IMPORTS:
        monkeypatch.setattr(importer, name, getattr(module, name, getattr(importer, name)))
    with pytest.raises((EmulatorError, AssertionError)):
        run(case, SCHEDULES)
