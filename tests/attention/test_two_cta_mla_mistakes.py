# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the source of absorbed MLA by pairs of blocks on SM100 are found on the emulator.

Whose share of a tile goes where, what barriers hear of it in which block, and in which order places become free.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.sm100 import two_cta_mla
from dsl_backend.attention.cute.sm100.mla_configs import TwoCtaMlaConfig
from dsl_backend.attention.cute.sm100.mla_host import MlaSplitKV
from dsl_backend.primitives import tcgen05_mma, tma
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import mla
from emulator.errors import EmulatorError
from tests.attention.mistakes import Mistake, spoilt
from tests.attention.mla_cases import SCHEDULES, Run, emulate

# Each pair has some seven tiles, one of which ends in the middle: every place is filled again several times.
CONFIG = TwoCtaMlaConfig(tile_n=32)
CASE = mla(128, q_lens=(1, 1), kv_lens=(330, 70), q_gain=8.0, page=16, why="a page is a part of a tile")
WIDE_PAGES = mla(128, q_lens=(1, 1), kv_lens=(330, 70), q_gain=8.0, page=64, why="a tile is a part of a page")

# Of what takes part in a tile's place in its page, and of the rest.
PLACES = (
    Mistake(
        "keys of the first block's place",
        two_cta_mla,
        "tile * self.boxes + first_box + i",
        "tile * self.boxes + i",
    ),
    Mistake("a page's first tile", two_cta_mla, "stage_of(tile * self.boxes + ", "stage_of(0 * self.boxes + "),
)
MISTAKES = (
    Mistake("keys of the first block", two_cta_mla, "pages, self.first_box, self", "pages, 0, self"),
    Mistake(
        "columns of the first block", two_cta_mla, "first = self.rank * (self.chunks_v", "first = 0 * (self.chunks_v"
    ),
    Mistake(
        "columns of the first product",
        two_cta_mla,
        "(self.chunks_v // PAIR) + block * width",
        "(self.chunks_v // PAIR)",
    ),
    Mistake("values of the next tile's pages", two_cta_mla, "last - step + 1, before", "last - step + 1, pages"),
    Mistake("keys over keys", two_cta_mla, "k_empty + place, phase)", "k_empty + place, phase ^ 1)"),
    Mistake("values over values", two_cta_mla, "v_empty + place, phase)", "v_empty + place, phase ^ 1)"),
    Mistake("bytes of one block expected", two_cta_mla, "expected = PAIR * len(boxes)", "expected = len(boxes)"),
    Mistake("bytes expected by both", two_cta_mla, "expected, self.rank == 0)", "expected, self.rank >= 0)"),
    Mistake(
        "values cleared on their way", two_cta_mla, "if work.seqlen_k < work.n_block_max *", "if work.seqlen_k < 0 *"
    ),
    Mistake("scores of a part", two_cta_mla, "part == PARTS - 1 and not first", "part == 1 and not first"),
    Mistake("a part of keys never free", two_cta_mla, "k_empty + stage * PARTS + part)", "k_empty + stage * PARTS)"),
    Mistake(
        "keys multiplied on their way",
        two_cta_mla,
        "k_full + stage * PARTS + part, round_",
        "k_full + stage * PARTS, round_",
    ),
    Mistake("values never free", two_cta_mla, "[self.barriers.v_empty + place]", "[self.barriers.v_empty + 0 * place]"),
    Mistake("sums told of early", two_cta_mla, "block == self.kernel.num_ctas - 1", "block == 0"),
    Mistake("one place for the larger of two", two_cta_mla, "self.acc_scale, place)", "self.acc_scale, 0)"),
    Mistake(
        "half of the keys' largest", two_cta_mla, "fmax(largest, self.other(largest, place))", "fmax(largest, largest)"
    ),
    Mistake("bytes counted by the block's own", tma, "~PEER_CTA_BIT & 0xFFFFFFFF", "0xFFFFFFFF"),
    Mistake("the first block alone is told", tcgen05_mma, "(1 << self.cluster) - 1", "1"),
    Mistake("all of k in each part", tcgen05_mma, "steps or range(k, k + size)", "range(k, k + size)"),
    Mistake("sums of the last step of k", tcgen05_mma, 'scale_d = "adds"\n            k', "pass\n            k"),
)
QUICK = ("a part of keys never free",)


def run(pair: Any, case: Any, schedules: tuple[str, ...]) -> None:
    """A case, on a kernel compiled anew: what is kept was made of other source."""

    class Fresh(MlaSplitKV):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(pair.TwoCtaMlaForward(key), fake_args(key, fake_mla_tensors(key)), target.arch, "")

    for seed, schedule in enumerate(schedules):
        emulate(Run(case, schedule), seed, "sm_100a", Fresh, CONFIG)


@pytest.mark.full
@pytest.mark.parametrize("case", [CASE, WIDE_PAGES], ids=["part", "whole"])
def test_right_without_a_mistake(case: Any) -> None:
    run(two_cta_mla, case, SCHEDULES)


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        pytest.param(case, one, id=one.id, marks=() if one.id in QUICK else (pytest.mark.full,))
        for case, mistakes in ((CASE, MISTAKES), (WIDE_PAGES, PLACES))
        for one in mistakes
    ],
)
def test_mistake_is_found(case: Any, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    pair = module if mistake.module is two_cta_mla else two_cta_mla
    for name in ("tma_load_boxes", "Tcgen05Mma"):
        monkeypatch.setattr(pair, name, getattr(module, name, getattr(pair, name)))
    with pytest.raises((EmulatorError, AssertionError)):
        run(pair, case, SCHEDULES)
