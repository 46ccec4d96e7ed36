# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA on SM90, on the emulator: right, and without a finding, whatever lies around its data."""

from dataclasses import replace

import pytest
import torch

from dsl_backend.attention.cute.sm90.dense_configs import SM_REGISTERS, WGMMA_SPARE_REGISTERS
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS, MlaConfig, default_mla_config
from dsl_backend.attention.cute.sm90.mla_host import Mla, MlaSplitKV
from dsl_backend.attention.protocol import Operands
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import FP8, by_id, mla
from tests.attention import mla_cases
from tests.attention.emulated import dequant_conflicts
from tests.attention.mla_cases import EVERYWHERE, Run, emulate

TARGET = from_arch("sm_90a")
# Ranges are cut wherever a tile ends, so that short ones have several parts.
SMALL = MlaConfig(min_split_tiles=1)
# Rings that go around at different times.
DEQUANT = MlaConfig(tile_n=32, stages=2, dequant_stages=3, min_split_tiles=1)
SCORES_FIRST = MlaConfig(min_split_tiles=1, scores_first=True)
CLUSTERS = MlaConfig(min_split_tiles=1, scores_first=True, cluster=2)

SPECULATIVE = MlaConfig(min_split_tiles=1, speculative_max=True)

# Two CTAs, or three and one that is left over, process a request's row tiles side by side.
GROUPS_OF = {"groups-of-2": 2, "groups-of-3": 3, "groups-of-2-clusters": 2}
GROUPED = (
    Run(
        mla(16, id="groups-of-2", q_lens=(6, 1, 8), kv_lens=(330, 90, 200), q_gain=4.0, why="a row tile is alone"),
        "random",
        config=replace(SMALL, row_groups=True, combine_many_rows=True),
    ),
    Run(
        mla(32, id="groups-of-3", q_lens=(5, 6), kv_lens=(300, 70), page=64, why="a CTA is left over"),
        "lazy",
        config=replace(SCORES_FIRST, row_groups=True),
    ),
    Run(
        mla(128, id="groups-of-2-clusters", q_lens=(2, 1), kv_lens=(330, 90), page=64, why="row groups of clusters"),
        "eager",
        config=replace(CLUSTERS, row_groups=True),
    ),
)

QUICK = (
    *GROUPED[:2],
    Run(mla_cases.RAGGED, "random"),
    Run(replace(mla_cases.RAGGED, id="ragged-speculative"), "random", config=SPECULATIVE),
    Run(by_id("mla-8-ragged"), "lazy"),
    Run(mla_cases.PIECES, "random"),
    Run(mla_cases.HEADS_128, "lazy", config=CLUSTERS),
    Run(mla_cases.WHOLE_320, "eager", False, MlaConfig(stages=4)),
    mla_cases.FP8[0],
    Run(by_id("stale-mla"), "random"),
)
FULL = (
    *GROUPED[2:],
    *(run for run in mla_cases.FP8 if run not in QUICK),
    *(replace(run, config=replace(DEQUANT, cluster=2)) for run in mla_cases.FP8_CLUSTERS),
    Run(by_id("stale-mla"), "lazy", False, SCORES_FIRST),
    Run(by_id("stale-mla-fp8"), "lazy", config=DEQUANT),
    *(run for run in EVERYWHERE if run not in QUICK),
    Run(by_id("mla-320"), "lazy", config=MlaConfig(stages=4, min_split_tiles=1)),
    Run(by_id("mla-288"), "random", config=MlaConfig(stages=4, min_split_tiles=1)),
    Run(by_id("mla-mixed"), "lazy", False, SCORES_FIRST),
    Run(
        mla(
            20, id="many-tiles", q_lens=(1, 3), kv_lens=(130, 270), why="a third buffer, tiles of half a page's length"
        ),
        "random",
        config=MlaConfig(tile_n=32, stages=3, min_split_tiles=1),
    ),
    Run(
        mla(96, id="heads-96", q_lens=(1, 3), kv_lens=(130, 64), page=64, why="48 heads a tile"),
        "lazy",
        True,
        SCORES_FIRST,
    ),
    Run(mla_cases.PAGES_OF_16, "random", config=CLUSTERS),
    Run(mla_cases.PIECES_128, "lazy", config=replace(CLUSTERS, tile_n=32)),
    Run(
        mla(
            16,
            id="speculative",
            q_lens=(1, 4),
            kv_lens=(65, 330),
            nan_request=1,
            window=(70, None),
            why="empty rows",
        ),
        "lazy",
        config=replace(SPECULATIVE, scores_first=True),
    ),
    Run(mla_cases.CLUSTERS, "random", False, CLUSTERS),
    Run(
        mla(
            16,
            id="sinks",
            q_lens=(1, 4),
            kv_lens=(300, 150),
            sinks=True,
            softcap=5.0,
            why="score_mod, QK first",
        ),
        "lazy",
        config=SCORES_FIRST,
    ),
)


@pytest.mark.parametrize(
    ("seed", "run"),
    [
        pytest.param(seed, run, id=run.id, marks=() if run in QUICK else (pytest.mark.full,))
        for seed, run in enumerate((*QUICK, *FULL))
    ],
)
def test_run(seed: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if run.case.id in GROUPS_OF:
        # A machine of so few SMs is not short of memory bandwidth: the estimate would find no row group.
        found = GROUPS_OF[run.case.id], 10**6
        monkeypatch.setattr(MlaSplitKV, "row_group", lambda *_: found)
    emulate(run, seed, "sm_90a", MlaSplitKV if run.split else Mla, DEQUANT if run.case.fp8 else SMALL)


@pytest.mark.full
def test_dequantization_hits_no_bank_twice() -> None:
    assert dequant_conflicts(emulate(mla_cases.FP8[0], 0, "sm_90a", MlaSplitKV, DEQUANT)) == []


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("dims", [(576, 512), (320, 256), (288, 256)])
def test_default_config_fits(heads: int, dims: tuple[int, int]) -> None:
    spec = mla(heads, dims, q_lens=(1,), kv_lens=(1,)).spec
    for each in (spec, replace(spec, kv_dtype=FP8)):
        assert default_mla_config(each).objections(each, TARGET.smem_bytes) == []


@pytest.mark.parametrize(
    ("config", "dims", "reason"),
    [
        (MlaConfig(stages=3), (576, 512), "shared memory"),
        (MlaConfig(stages=1), (576, 512), "at least 2"),
        (MlaConfig(tile_n=40), (576, 512), "multiple of 16"),
        (MlaConfig(tile_n=128), (576, 512), "registers"),
        (MlaConfig(dequant_stages=2), (576, 512), "2 fp8 stages"),
        (MlaConfig(cluster=2), (576, 512), "clusters of 2"),
        (MlaConfig(), (512, 512), "MLA head sizes"),
        (MlaConfig(), (576, 520), "MLA head sizes"),
        (MlaConfig(), (648, 576), "MLA head sizes"),
    ],
)
def test_objections(config: MlaConfig, dims: tuple[int, int], reason: str) -> None:
    spec = mla(16, dims, q_lens=(1,), kv_lens=(1,)).spec
    assert any(reason in objection for objection in config.objections(spec, TARGET.smem_bytes))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MlaConfig(), "0 fp8 stages"),
        (MlaConfig(dequant_stages=1), "1 fp8 stages"),
        (MlaConfig(dequant_stages=2), "shared memory"),
        (MlaConfig(tile_n=80, dequant_stages=2), "registers"),
    ],
)
def test_objections_to_fp8(config: MlaConfig, reason: str) -> None:
    spec = mla(16, q_lens=(1,), kv_lens=(1,), fp8=True).spec
    assert any(reason in objection for objection in config.objections(spec, TARGET.smem_bytes))


@pytest.mark.parametrize("dequant_stages", [0, 2])
def test_roles_share_what_a_block_starts_with(dequant_stages: int) -> None:
    """A role would wait for ever for registers that no other gives away; no product has more than there are."""
    config = MlaConfig(dequant_stages=dequant_stages)
    math, other, dequant = config.registers
    first = SM_REGISTERS // config.threads // 8 * 8
    assert (GROUPS * math + other + dequant) * 128 <= first * config.threads
    assert config.columns(512) // 2 + WGMMA_SPARE_REGISTERS <= first


def test_unaligned_cache_is_refused() -> None:
    problem = by_id("mla-16").problem()
    result = check.empty_result(problem)
    kernel = MlaSplitKV(problem.spec, TARGET, Workspace(torch.device("cpu")))
    keys = torch.zeros(*problem.keys.shape[:-1], 577, dtype=problem.keys.dtype)[..., 1:]
    operands = Operands(problem.q, None, keys, keys[..., :512], result.out, result.lse, *[None] * 4)
    with pytest.raises(InvalidInput, match="keys begins at"):
        kernel.bind(problem.batch, 0, 1)(operands)
