# SPDX-License-Identifier: Apache-2.0
"""Random problems for SM90's kernels with e4m3 products, on a GPU: they compute what their arithmetic says.

`python -m pytest -m gpu tests/attention/test_fp8_on_gpu.py` checks PROBLEMS problems of each family. The same checks
run on the emulator with few and small problems (test_sm90_fp8.py, test_fp8_many_rows.py, test_mla_sm90_fp8.py).
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.attention.cute.sizes import SHORT_QUERY
from dsl_backend.attention.cute.sm90.dense_host import Fp8Prefill, Fp8SplitKV
from dsl_backend.attention.cute.sm90.fp8_configs import default_fp8_config, long_query_fp8_config, many_rows_config
from dsl_backend.attention.cute.sm90.mla_fp8_configs import default_fp8_mla_config
from dsl_backend.attention.cute.sm90.mla_host import Fp8Mla
from dsl_backend.attention.plan import Planner
from dsl_backend.runtime import target as targets
from dsl_backend.testing import check, fp8_attention, fuzz
from dsl_backend.testing.cases import Case
from tests.attention.test_fp8_many_rows import GROUPS, split_tiles
from tests.attention.test_mla_sm90_fp8 import FLIPPED_PART as MLA_FLIPPED_PART
from tests.attention.test_mla_sm90_fp8 import arithmetic_of as mla_arithmetic_of
from tests.attention.test_mla_sm90_fp8 import judge_splits
from tests.attention.test_sm90_fp8 import DIMS, arithmetic_of

LAYERS, TURNS, SEED = 12, 42, 20261127
PROBLEMS = LAYERS * TURNS  # of a family
SIZES = replace(fuzz.REAL, kv=2500, q=600, requests=6, heads_kv=(1, 2, 4), heads_mla=(8, 16, 32, 128), scores=1.5e6)
NAME = dispatch.FP8_PRODUCTS


def drawn(family: str, layer: int, turn: int) -> Case:
    """A random problem whose layer the kernel serves."""
    many = family == "many-rows"
    sizes = replace(SIZES, q=SHORT_QUERY) if many else SIZES
    case = fuzz.problem("prefill" if many else family, SEED, layer + turn * LAYERS, sizes, LAYERS)
    assert isinstance(case, Case)
    # Outputs in NVFP4 are SM100's.
    case = replace(case, nvfp4_out=False, fp8=True, fp8_dtype=torch.float8_e4m3fn)
    case = replace(case, batch_invariant=False, programs=None, tile=None)
    if family == "mla":
        return replace(case, fp8_q=True, q_gain=1.0) if layer % 3 == 1 else case
    dim, dim_v = DIMS[layer % len(DIMS)]
    if many:
        heads_kv = case.heads[1]
        case = replace(case, heads=(GROUPS[layer % len(GROUPS)] * heads_kv, heads_kv))
    return replace(case, dim=dim, dim_v=dim_v)


def whole_mla(planner: Planner) -> None:
    """Every CTA has all keys of its rows, in the order that the arithmetic knows."""
    kernel = Fp8Mla(planner.spec, planner.target, planner.workspace, default_fp8_mla_config(planner.spec))
    planner.short = planner.long = (*planner.short[:2], kernel)


def check_prefill(case: Case, turn: int, device: torch.device) -> None:
    """Queries of all lengths have products in 8 bits; long tiles in every second problem, where there are any."""
    config = (long_query_fp8_config(case.spec) if turn % 2 else None) or default_fp8_config(case.spec)

    def adjust(planner: Planner) -> None:
        planner.short = planner.long = (
            *planner.long[:2],
            Fp8Prefill(planner.spec, planner.target, planner.workspace, config),
        )

    problem = case.problem(device)
    result = check.run(problem, NAME, adjust=adjust)
    fp8_attention.judge(result, problem, arithmetic_of(config))


def check_mla(case: Case, turn: int, device: torch.device) -> None:
    """Whole ranges of keys by their arithmetic; in every second problem ranges are split, with P's errors in each."""
    problem, arithmetic = case.problem(device), mla_arithmetic_of(default_fp8_mla_config(case.spec))
    if turn % 2:
        result = check.run(problem, NAME, split_q=case.split_q, adjust=whole_mla)
        fp8_attention.judge(result, problem, arithmetic, MLA_FLIPPED_PART)
        return
    judge_splits(check.run(problem, NAME, split_q=case.split_q), problem, arithmetic)


def check_many_rows(case: Case, turn: int, device: torch.device) -> None:
    """The same of short queries of many rows: in every second problem one CTA has all keys of all rows.

    `min_split_tiles` alone does not keep keys whole: a split may be shorter than that where partial results are small.
    """
    problem, config, target = case.problem(device), many_rows_config(case.spec), targets.detect(device)
    assert config is not None
    made: list[Fp8SplitKV] = []

    def adjust(planner: Planner) -> None:
        made.append(Fp8SplitKV(planner.spec, planner.target, planner.workspace, config))
        planner.short = planner.long = (*planner.short[:2], made[0])

    result = check.run(problem, NAME, adjust=adjust, target=replace(target, sm_count=1) if turn % 2 else target)
    if turn % 2:
        if any(case.q_lens):  # else the kernel writes no ranges
            assert not split_tiles(made[0]), "one CTA has all keys"
        fp8_attention.judge(result, problem, arithmetic_of(config))
    else:
        judge_splits(result, problem, arithmetic_of(config))


CHECKS: dict[str, Callable[[Case, int, torch.device], None]] = {
    "prefill": check_prefill,
    "many-rows": check_many_rows,
    "mla": check_mla,
}


@pytest.mark.gpu
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("family", CHECKS)
def test_random_problems_of_a_layer(family: str, layer: int, device: torch.device) -> None:
    if targets.detect(device).arch_objections("sm90"):
        pytest.skip("the arithmetic is SM90's")
    wrong = []
    for turn in range(TURNS):
        case = drawn(family, layer, turn)
        try:
            CHECKS[family](case, turn, device)
        except AssertionError as error:
            wrong.append(f"{turn}: {error}\n  {fuzz.source(case)}")
    assert not wrong, f"{len(wrong)} of {TURNS} problems\n" + "\n".join(wrong[:5])


# On a CPU: what the checks themselves must know. Partial results of 16 rows are few bytes, so that
# short ranges of keys are split.
FEW_ROWS = Case(q_lens=(1,), kv_lens=(640,), heads=(16, 1), dim=64, page=64, fp8=True, fp8_out=True)


@pytest.mark.parametrize("turn", [0, 1], ids=["split", "whole"])
def test_many_rows_are_judged(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised outputs, and more CTAs than key tiles."""
    monkeypatch.setattr(targets, "detect", lambda _: replace(targets.from_arch("sm_90a"), sm_count=8))
    with emulator.device(arch="sm_90a", sms=8, schedule="random", seed=0, strict=True):
        check_many_rows(FEW_ROWS, turn, torch.device("cpu"))
