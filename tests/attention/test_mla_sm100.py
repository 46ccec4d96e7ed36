# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA on SM100, on the emulator: right, and without a finding, whatever lies around its data."""

import math
from dataclasses import replace

import pytest

from dsl_backend.attention.cute.sm100.mla_configs import MlaConfig, TwoCtaMlaConfig, default_mla_config
from dsl_backend.attention.cute.sm100.mla_host import Mla, MlaSplitKV
from dsl_backend.attention.dispatch import Operation, choose
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import FP8, FP16, by_id, mla
from dsl_backend.testing.inputs import Problem
from tests.attention import mla_cases
from tests.attention.emulated import dequant_conflicts
from tests.attention.mla_cases import EVERYWHERE, SCHEDULES, Run, emulate

TARGET = from_arch("sm_100a")
# Ranges are cut wherever a tile ends, so that short ones have several parts; rings of two and three wrap early.
SMALL = MlaConfig(tile_n=32, stages=3, min_split_tiles=1)
DEQUANT = MlaConfig(tile_n=32, stages=2, dequant_stages=3, min_split_tiles=1)
TILES_OF_64 = MlaConfig(stages=2, min_split_tiles=1)
TWO_CTA = TwoCtaMlaConfig(min_split_tiles=1)
CLUSTERS = MlaConfig(stages=2, min_split_tiles=1, cluster=2)

QUICK = (
    Run(replace(mla_cases.RAGGED, kv_lens=(260, 33, 0, 130, 20)), "random"),
    Run(by_id("mla-8-ragged"), "lazy"),
    Run(mla_cases.PIECES, "eager"),
    Run(replace(mla_cases.HEADS_128, q_gain=8.0), "lazy", config=TWO_CTA),
    Run(mla_cases.WHOLE_320, "eager", False, MlaConfig(tile_n=64, stages=4)),
    mla_cases.FP8[0],
)
FULL = (
    *(run for run in mla_cases.FP8 if run not in QUICK),
    *(replace(run, config=replace(DEQUANT, cluster=2)) for run in mla_cases.FP8_CLUSTERS),
    *(
        replace(run, schedule=schedule)
        for run in QUICK
        if not run.case.fp8
        for schedule in SCHEDULES
        if schedule != run.schedule
    ),
    *EVERYWHERE,
    Run(mla_cases.RAGGED, "lazy", config=TILES_OF_64),
    Run(by_id("mla-320"), "lazy", config=MlaConfig(tile_n=128, stages=2, min_split_tiles=1)),
    Run(by_id("mla-288"), "random", config=MlaConfig(tile_n=16, stages=4, min_split_tiles=1)),
    Run(by_id("mla-mixed"), "lazy", False, TILES_OF_64),
    Run(
        mla(20, id="pages-of-32", q_lens=(1, 4), kv_lens=(130, 270), page=32, why="tiles of two pages"),
        "random",
        config=TILES_OF_64,
    ),
    Run(
        mla(64, id="pages-of-128", q_lens=(1, 3, 2), kv_lens=(150, 64, 2), page=128, why="a tile is part of a page"),
        "eager",
    ),
    Run(
        mla(64, id="fp16", q_lens=(1, 2), kv_lens=(150, 64), page=64, dtype=FP16, why="float16 throughout"),
        "lazy",
        config=TILES_OF_64,
    ),
    *(Run(mla_cases.HEADS_128, schedule, config=CLUSTERS) for schedule in SCHEDULES),
    *(Run(mla_cases.PAGES_OF_16, schedule, config=CLUSTERS) for schedule in SCHEDULES),
    Run(mla_cases.PIECES_128, "lazy", config=replace(CLUSTERS, tile_n=32)),
    Run(mla_cases.PAGES_OF_16, "lazy", config=TWO_CTA),
    Run(mla_cases.CLUSTERS, "random", False, CLUSTERS),
    Run(mla_cases.CLUSTERS, "eager", False, TWO_CTA),
    Run(
        mla(
            128,
            id="two-cta-ragged",
            q_lens=(1, 1, 0, 3),
            kv_lens=(400, 33, 0, 120),
            page=128,
            dtype=FP16,
            q_gain=8.0,
            why="stages wrap, splits are combined, O is rescaled, tiles are parts of pages",
        ),
        "random",
        config=TwoCtaMlaConfig(tile_n=32, stages=3, min_split_tiles=1),
    ),
    Run(
        mla(80, (320, 256), id="two-cta-320", q_lens=(1, 2), kv_lens=(300, 64), page=64, why="24 rows idle, one CTA"),
        "lazy",
        config=TwoCtaMlaConfig(stages=2, min_split_tiles=1),
    ),
    Run(
        mla(96, (288, 256), id="two-cta-288", q_lens=(2,), kv_lens=(300,), page=64, why="rows of 64 bytes"),
        "random",
        config=TwoCtaMlaConfig(tile_n=64, stages=4, min_split_tiles=1),
    ),
    Run(
        mla(
            96,
            id="two-cta-score-mod",
            q_lens=(1, 4),
            kv_lens=(200, 150),
            page=64,
            window=(70, None),
            sinks=True,
            softcap=5.0,
            why="every score modification, and a window",
        ),
        "lazy",
        config=TWO_CTA,
    ),
    Run(
        mla(
            128,
            id="two-cta-nan",
            q_lens=(1, 1),
            kv_lens=(65, 33),
            page=64,
            nan_request=1,
            why="NaN stays apart",
        ),
        "eager",
        config=TWO_CTA,
    ),
    Run(
        mla(16, id="growing", q_lens=(1, 1), kv_lens=(300, 150), q_gain=30.0, why="O is rescaled by much, and often"),
        "lazy",
    ),
)


@pytest.mark.parametrize(
    ("seed", "run"),
    [
        pytest.param(seed, run, id=run.id, marks=() if run in QUICK else (pytest.mark.full,))
        for seed, run in enumerate((*QUICK, *FULL))
    ],
)
def test_run(seed: int, run: Run) -> None:
    emulate(run, seed, "sm_100a", MlaSplitKV if run.split else Mla, DEQUANT if run.case.fp8 else SMALL)


def test_one_row_and_one_key_less_than_tiles() -> None:
    """O is rescaled where the maximum of the last row alone grows, and V of a tile's one missing key is zeroed.

    Behind a request's end there is NaN in two of four keys only, and not in the last one of a tile.
    """
    case = mla(16, id="one", q_lens=(1, 1), kv_lens=(255, 127), q_gain=30.0, why="one row, and one key")

    def change(problem: Problem) -> None:
        problem.q[:, :-1] = 0.0
        table = problem.batch.block_table
        assert table is not None
        for request, length in enumerate(case.kv_lens):
            problem.keys[int(table[request, length // case.page]), length % case.page] = math.nan

    emulate(Run(case, "lazy"), 0, "sm_100a", MlaSplitKV, SMALL, change=change)


@pytest.mark.full
def test_dequantization_hits_no_bank_twice() -> None:
    assert dequant_conflicts(emulate(mla_cases.FP8[0], 0, "sm_100a", MlaSplitKV, DEQUANT)) == []


@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
@pytest.mark.parametrize("dims", [(576, 512), (320, 256), (288, 256)])
def test_default_config_fits(heads: int, dims: tuple[int, int]) -> None:
    spec = mla(heads, dims, q_lens=(1,), kv_lens=(1,)).spec
    for each in (spec, replace(spec, kv_dtype=FP8)):
        assert default_mla_config(each).objections(each, TARGET.smem_bytes) == []


@pytest.mark.parametrize(
    ("config", "dims", "reason"),
    [
        (MlaConfig(tile_n=64, stages=3), (576, 512), "shared memory"),
        (MlaConfig(stages=1), (576, 512), "at least 2"),
        (MlaConfig(tile_n=48), (576, 512), "tiles of 48 keys: 16, 32"),
        (MlaConfig(tile_n=40), (576, 512), "multiple of 16"),
        (MlaConfig(cluster=2), (576, 512), "clusters of 2"),
        (TwoCtaMlaConfig(), (576, 512), "clusters of 2"),
        (TwoCtaMlaConfig(cluster=1), (576, 512), "a CTA pair is a cluster of 2"),
        (TwoCtaMlaConfig(tile_n=16), (576, 512), "32 is the least"),
        (TwoCtaMlaConfig(stages=2), (576, 512), "shared memory"),
        (TwoCtaMlaConfig(stages=0), (576, 512), "at least 1"),
        (TwoCtaMlaConfig(), (1088, 1024), "640 columns of tensor memory: there are 512"),
        (MlaConfig(), (512, 512), "MLA head sizes"),
        (MlaConfig(), (1088, 1024), "640 columns of tensor memory: there are 512"),
        (MlaConfig(), (448, 384), "a multiple of 256"),
    ],
)
def test_objections(config: MlaConfig, dims: tuple[int, int], reason: str) -> None:
    spec = mla(16, dims, q_lens=(1,), kv_lens=(1,)).spec
    assert any(reason in objection for objection in config.objections(spec, TARGET.smem_bytes))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_is_had_by_name(arch: str) -> None:
    spec = mla(128, q_lens=(1,), kv_lens=(1,)).spec
    assert choose(Operation.MLA_DECODE, spec, from_arch(arch), "cute").load() is MlaSplitKV
    fp8 = mla(128, q_lens=(1,), kv_lens=(1,), fp8=True).spec
    assert choose(Operation.MLA_DECODE, fp8, from_arch(arch), "cute").load() is MlaSplitKV
    (objection,) = (
        why for why in TwoCtaMlaConfig(dequant_stages=2).objections(fp8, TARGET.smem_bytes) if "CTA pairs" in why
    )
    assert "fp8 keys are possible with MlaConfig" in objection
