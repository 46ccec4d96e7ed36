# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA on SM90, on the emulator: right, and without a finding, whatever lies around its data."""

from dataclasses import dataclass, field, replace

import pytest
import torch

import emulator
from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.sm90.latent_configs import LatentConfig, default_latent_config
from dsl_backend.attention.sm90.latent_launch import Latent, LatentSplitKV
from dsl_backend.attention.spec import Causality
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import FP16, LATENT, Case, by_id, mla

SCHEDULES = ("eager", "lazy", "random")
SMS = 4
TARGET = replace(from_arch("sm_90a"), sm_count=SMS)
# Ranges are cut wherever a tile ends, so that short ones have several parts.
SMALL = LatentConfig(least_share=1)
SCORES_FIRST = LatentConfig(least_share=1, scores_first=True)
CLUSTERS = LatentConfig(least_share=1, scores_first=True, cluster=2)


@dataclass(frozen=True)
class Run:
    """A case and how it is run: on one of the schedules, split or in whole ranges."""

    case: Case
    schedule: str
    split: bool = True
    config: LatentConfig = field(default=SMALL)

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.schedule}-{'split' if self.split else 'whole'}"


def emulate(run: Run, seed: int) -> None:
    problem = run.case.problem()
    result = check.empty_result(problem)
    q, q_rope = problem.split_q if run.case.split_q else (problem.q, None)
    kernel = (LatentSplitKV if run.split else Latent)(problem.spec, TARGET, Workspace(torch.device("cpu")), run.config)
    assert not run.config.objections(problem.spec, TARGET.smem_bytes)
    with emulator.device(arch="sm_90a", sms=SMS, schedule=run.schedule, seed=seed, strict=True):
        operands = Operands(q, q_rope, problem.keys, problem.values, result.out, result.lse, problem.sinks, *[None] * 3)
        kernel.launch(problem.batch, operands, 0, problem.batch.max_query_len)
    check.judge(result, problem.expected(), problem.score_magnitude())


QUICK = (
    Run(
        mla(
            16,
            id="ragged",
            q_lens=(1, 1, 0, 1, 1),
            kv_lens=(700, 33, 0, 300, 20),
            q_gain=8.0,
            why="rings wrap, parts merge, rows' largest scores grow by more than sums bear",
        ),
        "random",
    ),
    Run(by_id("mla-8-ragged"), "lazy"),
    Run(
        mla(
            128, id="heads-128", q_lens=(2,), kv_lens=(330,), page=64, why="two blocks share key tiles, for two tokens"
        ),
        "lazy",
        config=CLUSTERS,
    ),
    Run(replace(by_id("mla-320"), kv_lens=(350, 70), split_q=True), "eager", False, LatentConfig(stages=4)),
)
FULL = (
    *(
        Run(case, SCHEDULES[index % 3])
        for index, case in enumerate(LATENT)
        if not case.fp8 and case.dim == 576 and case.id != "mla-8-ragged"
    ),
    Run(by_id("mla-320"), "lazy", config=LatentConfig(stages=4, least_share=1)),
    Run(by_id("mla-288"), "random", config=LatentConfig(stages=4, least_share=1)),
    Run(by_id("mla-mixed"), "random", False),
    Run(by_id("mla-mixed"), "lazy", False, SCORES_FIRST),
    Run(
        mla(
            20, id="many-tiles", q_lens=(1, 3), kv_lens=(130, 270), why="a third buffer, tiles of half a page's length"
        ),
        "random",
        config=LatentConfig(tile_n=32, stages=3, least_share=1),
    ),
    Run(mla(40, id="heads-40", q_lens=(1, 2), kv_lens=(200, 64), dtype=FP16, page=48, why="24 rows idle"), "random"),
    Run(
        mla(96, id="heads-96", q_lens=(1, 3), kv_lens=(130, 64), page=64, why="48 heads a tile"),
        "lazy",
        True,
        SCORES_FIRST,
    ),
    Run(
        mla(96, id="pages-of-16", q_lens=(1, 2), kv_lens=(330, 64), why="two boxes for each of two blocks"),
        "random",
        config=CLUSTERS,
    ),
    Run(
        mla(128, id="clusters", q_lens=(3, 1), kv_lens=(300, 1), page=48, why="whole ranges of neighbouring units"),
        "random",
        False,
        CLUSTERS,
    ),
    Run(mla(67, id="heads-67", q_lens=(1, 1), kv_lens=(65, 33), why="a prime: one head a tile"), "eager"),
    Run(mla(20, id="no-keys", q_lens=(1, 8, 3), kv_lens=(0, 8, 129), why="a query that sees nothing"), "eager"),
    Run(
        mla(
            16, id="nan", q_lens=(1, 1, 1), kv_lens=(65, 33, 200), nan_request=1, why="one request's NaN stays its own"
        ),
        "random",
    ),
    Run(
        mla(16, id="window", q_lens=(1, 4), kv_lens=(300, 150), window=(70, None), why="tiles before a window"),
        "random",
    ),
    Run(
        mla(16, id="sinks-softcap", q_lens=(1, 4), kv_lens=(300, 150), sinks=True, softcap=5.0, why="bent scores"),
        "lazy",
        config=SCORES_FIRST,
    ),
    Run(
        mla(16, id="full", q_lens=(1, 4), kv_lens=(300, 150), causality=Causality.FULL, why="later keys count"), "eager"
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
    emulate(run, seed)


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("dims", [(576, 512), (320, 256), (288, 256)])
def test_default_config_fits(heads: int, dims: tuple[int, int]) -> None:
    spec = mla(heads, dims, q_lens=(1,), kv_lens=(1,)).spec
    assert default_latent_config(spec).objections(spec, from_arch("sm_90a").smem_bytes) == []


@pytest.mark.parametrize(
    ("config", "dims", "reason"),
    [
        (LatentConfig(stages=3), (576, 512), "shared memory"),
        (LatentConfig(stages=1), (576, 512), "at least 2"),
        (LatentConfig(tile_n=40), (576, 512), "multiple of 16"),
        (LatentConfig(tile_n=128), (576, 512), "registers"),
        (LatentConfig(cluster=2), (576, 512), "clusters of 2"),
        (LatentConfig(), (512, 512), "latent sizes"),
        (LatentConfig(), (576, 520), "latent sizes"),
        (LatentConfig(), (648, 576), "latent sizes"),
    ],
)
def test_objections(config: LatentConfig, dims: tuple[int, int], reason: str) -> None:
    spec = mla(16, dims, q_lens=(1,), kv_lens=(1,)).spec
    assert any(reason in objection for objection in config.objections(spec, TARGET.smem_bytes))


def test_unaligned_cache_is_refused() -> None:
    problem = by_id("mla-16").problem()
    result = check.empty_result(problem)
    kernel = LatentSplitKV(problem.spec, TARGET, Workspace(torch.device("cpu")))
    keys = torch.zeros(*problem.keys.shape[:-1], 577, dtype=problem.keys.dtype)[..., 1:]
    operands = Operands(problem.q, None, keys, keys[..., :512], result.out, result.lse, *[None] * 4)
    with pytest.raises(InvalidInput, match="keys begins at"):
        kernel.launch(problem.batch, operands, 0, 1)
