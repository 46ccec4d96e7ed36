# SPDX-License-Identifier: Apache-2.0
"""The dense SM100 kernel with e4m3 products on the emulator: it computes what its arithmetic says, without findings."""

import re
from dataclasses import replace
from typing import Any

import pytest

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.attention.cute.sm100.dense_host import Fp8Prefill
from dsl_backend.attention.cute.sm100.fp8_configs import (
    Fp8DenseConfig,
    default_fp8_config,
    fp8_variants,
    has_wide_values,
    query_batch,
)
from dsl_backend.attention.plan import Planner
from dsl_backend.errors import Unsupported
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check, fp8_attention
from dsl_backend.testing.cases import Case
from dsl_backend.testing.fp8_attention import Arithmetic
from tests.attention import test_sm90_fp8
from tests.attention.emulated import SCHEDULES, SMS, scratch

NAME = dispatch.FP8_PRODUCTS
CASES = test_sm90_fp8.CASES


def config_of(case: Case, index: int) -> Fp8DenseConfig:
    """Small tiles, so that rings go around."""
    tile_n = (64, 96, 32)[index % 3]
    _, batch_bytes = query_batch(case.spec.head_dim)
    return Fp8DenseConfig(
        softmax_warpgroups=1 if has_wide_values(case.spec) else 2,
        tile_n=tile_n,
        stages=2 + index % 2,
        query_stages=1 + index % 2,
        late_p_keys=32 * (tile_n > 32 and index % 2 == 0 and not has_wide_values(case.spec)),
        ex2_emulation=2 * (index // 2 % 2),
        rounded_sums=index % 4 != 3,
        copied_q_bytes=batch_bytes * (2 if case.spec.head_dim <= 128 else 1),
    )


def arithmetic_of(config: Fp8DenseConfig) -> Arithmetic:
    """Tensor memory sums in float32, over all keys."""
    return Arithmetic(
        tile_n=config.tile_n,
        p_offset=config.p_offset,
        rescale_threshold=config.rescale_threshold,
        rounded_sums=config.rounded_sums,
        accumulate_period=0,
        accumulator_bits=None,
        in_turn=2 if config.alternate else 1,
    )


def emulate(case: Case, config: Fp8DenseConfig, index: int, sms: int = SMS) -> None:
    """Run a case with a configuration for queries of all lengths, and judge it by its arithmetic."""
    problem = case.problem()

    def adjust(planner: Planner) -> None:
        kernel = Fp8Prefill(planner.spec, planner.target, scratch(), config)
        planner.short = planner.long = (*planner.long[:2], kernel)

    target = replace(from_arch("sm_100a"), sm_count=sms)
    schedule = SCHEDULES[index % len(SCHEDULES)]
    with emulator.device(arch="sm_100a", sms=sms, schedule=schedule, seed=index, strict=True):
        result = check.run(problem, NAME, adjust=adjust, target=target)
    fp8_attention.judge(result, problem, arithmetic_of(config))


@pytest.mark.parametrize(
    ("index", "case"),
    [pytest.param(index, case, id=case.id, marks=test_sm90_fp8.marks_of(case.id)) for index, case in enumerate(CASES)],
)
def test_case(index: int, case: Case) -> None:
    emulate(case, config_of(case, index), index)


# One CTA has several work tiles: stages of Q and of its scales go around.
ROUNDS = replace(CASES[1], q_lens=(70, 20, 300, 5), kv_lens=(270, 20, 300, 130), heads=(2, 1), id="rounds")


@pytest.mark.rest
@pytest.mark.parametrize("index", range(len(SCHEDULES)))
@pytest.mark.parametrize("query_stages", [1, 2])
def test_every_schedule(query_stages: int, index: int) -> None:
    config = Fp8DenseConfig(tile_n=64, stages=2, query_stages=query_stages, late_p_keys=32, ex2_emulation=0)
    emulate(ROUNDS, config, index, sms=1)


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SCHEDULES)))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (256, 128)], ids=str)
def test_default_in_every_schedule(dims: tuple[int, int], index: int) -> None:
    case = replace(CASES[1], q_lens=(300, 3), kv_lens=(300, 260), heads=(1, 1), dim=dims[0], dim_v=dims[1])
    emulate(case, default_fp8_config(case.spec), index, sms=1)


PROBLEMS = 60  # random ones


@pytest.mark.parametrize(
    "problem", [pytest.param(n, marks=pytest.mark.full if n > 3 else pytest.mark.rest) for n in range(PROBLEMS)]
)
def test_random_problem(problem: int) -> None:
    """Of the SM90 kernel's random layers, with small tiles and with the default in turn."""
    layer, turn = problem % test_sm90_fp8.LAYERS, problem // test_sm90_fp8.LAYERS
    case = test_sm90_fp8.drawn(layer, turn)
    emulate(case, default_fp8_config(case.spec) if turn % 2 else config_of(case, layer), layer + turn)


@pytest.mark.full
@pytest.mark.parametrize("problem", range(20))
def test_random_problem_of_wide_heads(problem: int) -> None:
    # The last of SM90's wide layers, (160, 192), has no kernel for short queries here: its swizzles differ.
    layers = test_sm90_fp8.WIDE_LAYERS - 1
    layer, turn = test_sm90_fp8.LAYERS + problem % layers, problem // layers
    case = test_sm90_fp8.drawn(layer, turn)
    emulate(case, default_fp8_config(case.spec) if turn % 2 else config_of(case, layer + turn), layer + turn)


DIMS = [
    (64, 64),
    (96, 96),
    (128, 128),
    (128, 64),
    (192, 128),
    (160, 96),
    (256, 256),
    (224, 160),
    (160, 192),
    (256, 128),
    (256, 64),
]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_configs_fit(dims: tuple[int, int]) -> None:
    """The default and those to tune."""
    spec, smem_bytes = test_sm90_fp8.spec_of(*dims), from_arch("sm_100a").smem_bytes
    found = [default_fp8_config(spec), *fp8_variants(spec, smem_bytes)]
    assert [config.objections(spec, smem_bytes) for config in found] == [[]] * len(found)
    assert len(set(found[1:])) == len(found) - 1 > 5
    # All registers that a CTA of 640 threads starts with.
    for config in found:
        softmax, correction, other, query = config.registers
        softmaxes = 2 * softmax if config.softmax_warpgroups == 2 else softmax + other  # four warps are idle
        assert 128 * (softmaxes + correction + other + query) <= 640 * 96


@pytest.mark.parametrize(("facts", "reason"), test_sm90_fp8.NOT_SERVED)
def test_what_it_does_not_serve(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        dispatch.choose(dispatch.Operation.PREFILL, test_sm90_fp8.spec_of(**facts), from_arch("sm_100a"), NAME)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_n": 48}, "tiles of 48 keys: a multiple of 32 up to 128 is possible"),
        ({"stages": 1}, "1 K and V stages, 2 Q stages: at least 2 and 1 are needed"),
        ({"stages": 9}, "bytes of shared memory: there are"),
        ({"p_offset": 9.0}, "P times 2\\^9: an exponent from 0 to 8 is possible"),
        ({"rescale_threshold": 1.0}, "P of up to 2\\^9 saturates"),
        ({"dequant_stages": 2}, "2 stages to dequantize: 0 are possible"),
        ({"direct_output": False}, "direct outputs"),
        ({"shared_s": True}, "go without two-CTA MMAs"),
        ({"softmax_warpgroups": 1}, "late_p_keys must be 0"),
        ({"copied_q_bytes": 2048}, "2048 bytes for copied rows of Q: [0-9]+ are needed"),
    ],
)
def test_configs_that_do_not_fit(change: dict[str, Any], reason: str) -> None:
    spec = test_sm90_fp8.spec_of()
    found = replace(default_fp8_config(spec), **change).objections(spec, from_arch("sm_100a").smem_bytes)
    assert any(re.search(reason, one) for one in found), found


def test_it_is_had_by_name_alone() -> None:
    """Long queries by that name have e4m3 products, short ones have 16 bits up to 64 rows; nobody gets it unasked."""
    target, spec = from_arch("sm_100a"), test_sm90_fp8.spec_of()
    titles = [
        dispatch.choose(operation, spec, target, NAME).title
        for operation in (dispatch.Operation.PREFILL, dispatch.Operation.DECODE)
    ]
    assert titles == ["dense-prefill e4m3 sm100", "dense-decode e4m3-from-65-rows sm100"]
    assert dispatch.choose(dispatch.Operation.PREFILL, spec, target).name == "cute"
