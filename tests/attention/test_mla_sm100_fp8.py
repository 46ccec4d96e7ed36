# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel of absorbed MLA with e4m3 products on the emulator: it computes what its arithmetic says."""

import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dsl_backend.attention import dispatch
from dsl_backend.attention.cute.sm100.mla_fp8_configs import Fp8MlaConfig, default_fp8_mla_config, fp8_mla_variants
from dsl_backend.attention.cute.sm100.mla_host import Fp8Mla, Fp8MlaSplitKV
from dsl_backend.errors import Unsupported
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import fp8_attention
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.check import Result
from dsl_backend.testing.fp8_attention import Arithmetic
from dsl_backend.testing.inputs import Layout, Problem, Surroundings
from tests.attention.mla_cases import SCHEDULES, SMS, launched
from tests.attention.test_mla_sm90_fp8 import (
    CLUSTERS,
    FLIPPED_PART,
    NAME,
    QUERIES,
    RAGGED,
    WINDOW,
    check_random_problems,
    layers,
    spec_of,
)

TARGET = from_arch("sm_100a")
# Rings wrap early.
SMALL = Fp8MlaConfig(stages=3, min_split_tiles=1)


def arithmetic_of(config: Fp8MlaConfig) -> Arithmetic:
    """Sums in tensor memory are those of float32: SM100's tensor cores do not cut addends, or so the emulator says."""
    return Arithmetic(
        tile_n=config.tile_n,
        p_offset=config.p_offset,
        rescale_threshold=config.rescale_threshold,
        accumulate_period=0,
        accumulator_bits=None,
    )


def run(problem: Problem, config: Fp8MlaConfig, schedule: str, split: bool, split_q: bool = False) -> Result:
    """A problem's results from the emulator; any finding or warning raises."""
    target, seed = replace(TARGET, sm_count=SMS), SCHEDULES.index(schedule)
    kernel = (Fp8MlaSplitKV if split else Fp8Mla)(problem.spec, target, Workspace(torch.device("cpu")), config)
    assert not config.objections(problem.spec, target.smem_bytes)
    return launched(kernel, problem, "sm_100a", sms=SMS, schedule=schedule, seed=seed, split_q=split_q)[0]


@dataclass(frozen=True)
class Run:
    """A case, and how it is run: whole ranges, which the arithmetic knows, on one of the schedules."""

    case: Case
    schedule: str
    config: Fp8MlaConfig = SMALL

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.schedule}"


# Work tiles follow one another on a CTA: the scales of Q go around.
MANY = mla(
    16,
    (288, 256),
    id="many",
    q_lens=(9, 1, 5, 6, 4, 7),
    kv_lens=(40, 70, 90, 6, 33, 100),
    page=16,
    q_gain=3.0,
    fp8=True,
)
QUICK = (
    Run(CLUSTERS, "lazy", replace(SMALL, cluster=2)),
    Run(WINDOW, "random"),
    Run(MANY, "eager"),
    Run(QUERIES, "eager"),
)
OTHERS = (
    Run(
        mla(16, id="tiles-128", q_lens=(1, 2), kv_lens=(300, 140), q_gain=3.0, fp8=True, why="rows of P of 128 bytes"),
        "lazy",
        replace(SMALL, tile_n=128, stages=2),
    ),
    Run(
        mla(
            16,
            (320, 256),
            id="tiles-32",
            q_lens=(1, 3),
            kv_lens=(330, 90),
            split_q=True,
            fp8=True,
            around=Surroundings(layout=Layout.PADDED),
            why="rows of P of 32 bytes; small P become 0",
        ),
        "random",
        replace(SMALL, tile_n=32, stages=5, p_offset=4.0),
    ),
    Run(
        mla(16, id="nan", q_lens=(1, 4), kv_lens=(65, 150), nan_request=1, fp8=True, why="a NaN stays its request's"),
        "lazy",
    ),
    Run(RAGGED, "random"),
    *(Run(QUERIES, schedule) for schedule in ("lazy", "random")),
    *(Run(RAGGED, schedule) for schedule in ("eager", "lazy")),
    *(Run(CLUSTERS, schedule, replace(SMALL, cluster=2)) for schedule in ("eager", "random")),
    *(Run(WINDOW, schedule) for schedule in ("eager", "lazy")),
    *(Run(MANY, schedule) for schedule in ("lazy", "random")),
)


@pytest.mark.parametrize(
    "given",
    [
        *(pytest.param(one, id=one.id) for one in QUICK),
        *(pytest.param(one, id=one.id, marks=pytest.mark.rest) for one in OTHERS[:4]),
        *(pytest.param(one, id=one.id, marks=pytest.mark.full) for one in OTHERS[4:]),
    ],
)
def test_case(given: Run) -> None:
    problem = given.case.problem()
    result = run(problem, given.config, given.schedule, split=False, split_q=given.case.split_q)
    fp8_attention.judge(result, problem, arithmetic_of(given.config), FLIPPED_PART)


@pytest.mark.parametrize(
    ("case", "config", "schedule"),
    [
        pytest.param(replace(RAGGED, kv_lens=(700, 150, 0, 70)), SMALL, "random", id="ragged"),
        pytest.param(CLUSTERS, replace(SMALL, cluster=2), "lazy", id="clusters", marks=pytest.mark.full),
    ],
)
def test_split_keys_of_equal_scores(case: Case, config: Fp8MlaConfig, schedule: str) -> None:
    """Where all keys weigh the same, P is a power of two: splits in any order give the mean of the values."""
    problem = case.problem()
    problem.q.zero_()
    result, mine = run(problem, config, schedule, split=True), problem.owned()
    expected = fp8_attention.attention(problem, arithmetic_of(config))
    exact = expected.out[mine]
    assert ((result.out[mine].double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-14).all()
    assert (result.lse[mine].double() - expected.lse[mine]).abs().max() < 1e-5


@layers
def test_random_problems_of_a_layer(layer: int) -> None:
    """Those of SM90's kernel."""
    check_random_problems(layer, sys.modules[__name__])


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("dims", dispatch.LATENT_DIMS, ids=str)
def test_configs_fit(heads: int, dims: tuple[int, int]) -> None:
    """The default and those to tune."""
    spec = spec_of(heads, dims)
    found = [default_fp8_mla_config(spec), *fp8_mla_variants(spec, TARGET.smem_bytes)]
    assert [config.objections(spec, TARGET.smem_bytes) for config in found] == [[]] * len(found)
    assert len(set(found[1:])) == len(found) - 1 > 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_n": 16}, "tiles of 16 keys: a multiple of 32 is possible"),
        ({"stages": 1}, "1 stages of K: at least 2 are needed"),
        ({"stages": 6}, "bytes of shared memory: there are"),
        ({"dequant_stages": 2}, "2 stages to dequantize: 0 are possible"),
        ({"p_offset": 9.0}, "P times 2\\^9: an exponent from 0 to 8 is possible"),
        ({"cluster": 2}, "clusters of 2 CTAs"),
    ],
)
def test_configs_that_do_not_fit(change: dict[str, Any], reason: str) -> None:
    spec = spec_of()
    found = replace(default_fp8_mla_config(spec), **change).objections(spec, TARGET.smem_bytes)
    assert any(re.search(reason, one) for one in found), found


def test_it_is_had_by_name_alone() -> None:
    decode, spec = dispatch.Operation.MLA_DECODE, spec_of()
    assert dispatch.choose(decode, spec, TARGET, NAME).title == "mla-decode e4m3 sm100"
    assert dispatch.choose(decode, spec, TARGET).title == "mla-decode sm100"
    for facts, reason in (({"fp8": False}, "keys of bfloat16"), ({"batch_invariant": True}, "batch invariance")):
        with pytest.raises(Unsupported, match=reason):
            dispatch.choose(decode, spec_of(**facts), TARGET, NAME)
