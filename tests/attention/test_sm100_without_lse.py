# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernels without an LSE, as prefill uses them: some exponentials are emulated on the FMA units.

Masked tiles have no emulated exponentials: a case needs key tiles that all rows of a query tile see.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsl_backend.attention.cute import score_mod
from dsl_backend.attention.cute.sm100 import dense_kernel, dense_softmax
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig, default_config
from dsl_backend.attention.cute.sm100.dense_host import Prefill, SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.primitives import math as device_math
from dsl_backend.testing.cases import FP16, FULL, Case
from dsl_backend.testing.inputs import Problem
from tests.attention.emulated import emulate, scratch
from tests.mistakes import Mistake, spoilt

EX2_EMULATION = 4  # of each 16 exponentials
NAN_KEYS = (1, 67)  # in an unmasked tile each, the second key of a pair


@dataclass(frozen=True)
class Subject:
    """A case, and the configuration of its long queries; None for the layer's default."""

    case: Case
    config: DenseConfig | None = None
    spoil: Callable[[Problem], None] | None = None

    def make(self, planner: Planner, short: bool) -> Kernel:
        if short:
            return SplitKV(planner.spec, planner.target, scratch())
        config = self.config or default_config(planner.spec)
        assert config.ex2_emulation > 0
        assert config.objections(planner.spec, planner.target.smem_bytes) == []
        return Prefill(planner.spec, planner.target, scratch(), config)

    def run(self, index: int) -> None:
        emulate(self.case, "sm_100a", self.make, index, with_lse=False, spoil=self.spoil)


def nan_keys(problem: Problem) -> None:
    """Put NaN into keys of the first request whose exponentials are emulated."""
    table, page = problem.batch.block_table, problem.spec.page_size
    assert table is not None
    assert page is not None
    for position in NAN_KEYS:
        problem.keys[int(table[0, position // page]), position % page, 0] = math.nan


SMALL = DenseConfig(tile_n=64, ex2_emulation=EX2_EMULATION)
SUBJECTS = (
    Subject(
        Case(
            id="plain",
            q_lens=(40, 1, 140),
            kv_lens=(300, 150, 290),
            heads=(2, 1),
            dtype=FP16,
            why="the emulation's error is within that of a float16; short queries in the same batch",
        )
    ),
    Subject(
        Case(
            id="nan-keys",
            q_lens=(20, 30),
            kv_lens=(230, 200),
            heads=(2, 1),
            dtype=FP16,
            q_gain=40.0,
            why="NaN reaches its rows; P below the least exponent",
        ),
        SMALL,
        nan_keys,
    ),
    Subject(
        Case(
            id="alibi-full",
            q_lens=(140, 40),
            kv_lens=(200, 256),
            heads=(2, 1),
            dtype=FP16,
            causality=FULL,
            alibi=True,
            why="distances of both signs",
        ),
        replace(SMALL, ex2_emulation=8),
    ),
    Subject(
        Case(id="pairs", q_lens=(150,), kv_lens=(400,), heads=(2, 2), dim=256, dtype=FP16, why="two-CTA MMAs"),
    ),
    Subject(
        Case(
            id="fp8",
            q_lens=(20, 40),
            kv_lens=(300, 400),
            heads=(2, 1),
            dtype=FP16,
            fp8=True,
            q_gain=3.0,
            why="dequantized keys; row_max grows by less than the rescale threshold",
        )
    ),
    Subject(
        Case(
            id="shared-ring",
            q_lens=(20, 140),
            kv_lens=(300, 260),
            heads=(2, 2),
            dim=192,
            dim_v=64,
            dtype=FP16,
            page=None,
            why="K and V share their stages",
        )
    ),
    Subject(
        Case(
            id="window-softcap-sinks",
            q_lens=(40, 140),
            kv_lens=(500, 290),
            heads=(2, 1),
            window=(260, None),
            softcap=5.0,
            sinks=True,
            q_gain=4.0,
            why="unmasked tiles between masked ones",
        ),
        replace(SMALL, ex2_emulation=8, softmax_warpgroups=1),
    ),
    Subject(
        Case(id="launched", q_lens=(140, 40), kv_lens=(300, 200), heads=(2, 1), dtype=FP16, why="off the grid"),
        replace(SMALL, use_clc=True),
    ),
    Subject(
        Case(id="wide", q_lens=(20, 40), kv_lens=(200, 150), heads=(1, 1), dim=384, dtype=FP16, why="slices of values")
    ),
)
QUICK = ("plain", "nan-keys", "alibi-full", "pairs", "fp8", "window-softcap-sinks")


def by_id(name: str) -> Subject:
    return next(subject for subject in SUBJECTS if subject.case.id == name)


@pytest.mark.parametrize(
    ("index", "subject"),
    [
        pytest.param(i, one, id=one.case.id, marks=() if one.case.id in QUICK else pytest.mark.full)
        for i, one in enumerate(SUBJECTS)
    ],
)
def test_without_lse(index: int, subject: Subject) -> None:
    subject.run(index)


def exp2_of(wrong: ModuleType) -> tuple[ModuleType, str, Any]:
    return dense_softmax, "ex2_emulation_pair", wrong.ex2_emulation_pair


def softmax_of(wrong: ModuleType) -> tuple[ModuleType, str, Any]:
    return dense_kernel, "SoftmaxWarps", wrong.SoftmaxWarps


def score_mod_of(wrong: ModuleType) -> tuple[ModuleType, str, Any]:
    return dense_softmax, "score_mod_of", wrong.score_mod_of


SHIFTED = "return add_exponent(power[0], rounded[0]), add_exponent(power[1], rounded[1])"
ROW_MAX = "row_max = fmax3_tree([row_max_prev, *scores], nan=self.ex2_emulation > 0)"
# A mistake, what has it in place of the right one, and the quick case that has to show it.
MISTAKES = (
    (
        Mistake("exponent-of-the-second", device_math, SHIFTED, SHIFTED.replace("rounded[1])", "rounded[0])")),
        exp2_of,
        "plain",
    ),
    (
        Mistake("sign-of-the-part", device_math, "fraction = sub_pair(x, integer)", "fraction = sub_pair(integer, x)"),
        exp2_of,
        "plain",
    ),
    (
        Mistake(
            "a-coefficient-too-few",
            device_math,
            "for coefficient in EXP2_COEFFICIENTS[2::-1]:",
            "for coefficient in EXP2_COEFFICIENTS[1::-1]:",
        ),
        exp2_of,
        "plain",
    ),
    (
        Mistake(
            "no-least-power",
            device_math,
            "x = tuple(cute.arch.fmax(value, MIN_EXPONENT) for value in x)",
            "x = tuple(x)",
        ),
        exp2_of,
        "nan-keys",
    ),
    (
        Mistake(
            "nan-left-out-of-the-maximum", dense_softmax, ROW_MAX, ROW_MAX.replace("self.ex2_emulation > 0", "False")
        ),
        softmax_of,
        "nan-keys",
    ),
    (
        Mistake(
            "distance-without-abs",
            score_mod,
            "value -= slope * cute.arch.fmax(signed, -signed)",
            "value -= slope * distance",
        ),
        score_mod_of,
        "alibi-full",
    ),
)


@pytest.mark.full
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(("mistake", "patch", "case"), [pytest.param(*one, id=one[0].id) for one in MISTAKES])
def test_mistake_is_found(
    mistake: Mistake,
    patch: Callable[[ModuleType], tuple[ModuleType, str, Any]],
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By values, in several rows: one row near its error bound could be chance."""
    assert case in QUICK
    monkeypatch.setattr(*patch(spoilt(mistake, tmp_path)))
    with pytest.raises(AssertionError) as raised:
        by_id(case).run(0)
    rows = re.search(r"in rows ([^;]*)", str(raised.value))
    assert rows is not None, raised.value
    assert re.search(r"[-,]", rows[1]), f"found in one row alone: {raised.value}"
