# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP8, MXFP4 and NVFP4: the door, the reference, and SM100's kernels emulated."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_cases import SCHEDULES, SMS
from gpu_kernels import skip_unless

import emulator
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import api, block_scaled_configs, dispatch, reference
from dsl_backend.experts.block_scaled_configs import GroupedBlockScaledConfig
from dsl_backend.experts.configs import ExpertsConfig
from dsl_backend.experts.cute import block_scaled_host as host
from dsl_backend.experts.scales import mma_scales, row_scales
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.activation import SWIGLU_OAI
from dsl_backend.quant.format import MXFP4, MXFP8, NVFP4, ScaledFormat
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import (
    BF16,
    BLOCK_SCALED_CASES,
    BLOCK_SCALED_REAL,
    MX,
    ExpertsCase,
    check_experts,
    judge,
    random_block_scaled_case,
    tensors,
)

TARGET: Target = replace(from_arch("sm_100a"), sm_count=SMS)
KINDS = (MXFP8, MXFP4, NVFP4)
GPT_OSS = replace(
    MX.spec,
    num_experts=32,
    hidden_size=2880,
    intermediate_size=2880,
    topk=4,
    activation=SWIGLU_OAI,
    interleaved=True,
    w13_bias=True,
    w2_bias=True,
    weight=MXFP4,
)


@pytest.mark.parametrize("name", BLOCK_SCALED_CASES)
def test_case(name: str) -> None:
    check_experts(BLOCK_SCALED_CASES[name], "reference", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*BLOCK_SCALED_CASES, *BLOCK_SCALED_REAL])
def test_case_on_a_gpu(name: str, device: torch.device) -> None:
    skip_unless("sm100", device)
    check_experts({**BLOCK_SCALED_CASES, **BLOCK_SCALED_REAL}[name], "cute-block-scaled", str(device))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_layer_of_the_weights_before(kind: ScaledFormat, interleaved: bool) -> None:
    """Up to what 8 and 4 bits cost: scales belong to their rows, whichever way gate and up rows lie."""
    case = replace(MX, weight=kind, interleaved=interleaved, width=96)
    given = tensors(case, "cpu")
    right = reference.exact(replace(case.spec, weight=None), tensors(replace(case, weight=None), "cpu"))
    wrong = reference.exact(case.spec, given) - right
    bounds = {MXFP8: (0.02, 0.08), MXFP4: (0.08, 0.3), NVFP4: (0.08, 0.3)}[kind]
    assert bounds[0] < float(wrong.norm() / right.norm()) < bounds[1]


@pytest.mark.parametrize(("parts", "interleaved"), [(1, False), (2, False), (2, True)])
def test_scales_of_gate_and_up_rows_are_apart(parts: int, interleaved: bool) -> None:
    codes = torch.arange(2 * 320 * 5, dtype=torch.int64).remainder(251).to(torch.uint8).view(2, 320, 5)
    found = mma_scales(codes, parts=parts, interleaved=interleaved)
    assert found.shape == (2, parts * (-(-320 // parts // 128) * 128), 8)
    for one, scale in zip(codes, found, strict=True):
        assert row_scales(scale, 320, 5, parts=parts, interleaved=interleaved).equal(one)


CODES = torch.zeros(2, 6, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": [1]}, "scale is a list: a tensor is needed"),
        ({"scale": CODES[0]}, r"scale has shape \(6, 4\): \[experts, rows, blocks\] is needed"),
        ({"scale": CODES[:0]}, r"scale has shape \(0, 6, 4\): .* no size may be 0"),
        ({"scale": CODES.float()}, "dtype of scale is float32: one of uint8, float8_e8m0fnu, float8_e4m3fn is needed"),
        ({"scale": CODES[:, :5], "parts": 2}, "scale has 5 rows: gate and up rows are equally many"),
        ({"parts": 3}, "parts is 3: an integer from 1 to 2 is needed"),
        ({"interleaved": 1}, "interleaved is 1: True or False is needed"),
    ],
)
def test_what_has_no_scales_of_experts_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        mma_scales(**{"scale": CODES, **changed})


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_finds_scales_of_another_place(kind: ScaledFormat) -> None:
    case = replace(MX, weight=kind, hidden=256)
    given = tensors(case, "cpu")
    assert given.scales.w13 is not None
    blocks = given.scales.w13.view(torch.uint8)
    # Experts' scales change places.
    turned = given._replace(scales=given.scales._replace(w13=blocks.flip(0).view(kind.scales)))
    given.out.copy_(reference.exact(case.spec, given, torch.float32))
    judge(case, given)
    given.out.copy_(reference.exact(case.spec, turned, torch.float32))
    with pytest.raises(AssertionError, match="further from the oracle"):
        judge(case, given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": MXFP8}, "x is mxfp8: None is needed with weights in mxfp8"),
        ({"hidden_size": 144}, "hidden_size 144 is not a multiple of 32, as weights in mxfp8 need"),
        ({"intermediate_size": 48}, "intermediate_size 48 is not a multiple of 32, as weights in mxfp8 need"),
    ],
)
def test_specs_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(MX.spec, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (MXFP8, {"w13": None}, "scales.w13 is None: a tensor is needed"),
        (MXFP8, {"w13": torch.zeros(4, 384, 8)}, r"scales.w13 has shape \(4, 384, 8\): \[4, 512, 8\] is needed"),
        (MXFP4, {"w2": torch.zeros(4, 256, 8)}, "scales.w2 is float32: float8_e8m0fnu is needed"),
        (MXFP8, {"x_global": torch.ones(1)}, "scales.x_global is given, and the plan's spec has none"),
        (NVFP4, {"w2_global": None}, "scales.w2_global is None: a tensor is needed"),
        (NVFP4, {"w13_global": torch.ones(1)}, r"scales.w13_global has shape \(1,\): \[4\] is needed"),
    ],
)
def test_scales_are_checked(kind: ScaledFormat, changes: dict[str, Any], message: str) -> None:
    case = replace(MX, weight=kind)
    given = tensors(case, "cpu")
    given = given._replace(scales=given.scales._replace(**changes))
    with pytest.raises(InvalidInput, match=message):
        api.run(api.plan(case.spec, "cpu", kernel="reference"), **given._asdict())


def test_weights_are_checked() -> None:
    case = replace(MX, weight=MXFP4)
    given = tensors(case, "cpu")._asdict() | {"w2": torch.zeros(4, 160, 160, dtype=torch.uint8)}
    with pytest.raises(InvalidInput, match=r"w2 has shape \(4, 160, 160\): \[4, 160, 80\] is needed"):
        api.run(api.plan(case.spec, "cpu", kernel="reference"), **given)


def test_rows_of_mxfp4_have_padding() -> None:
    """What TMA reads of the last row is memory of the tensor."""
    whole = torch.zeros(2, 4, 128, dtype=torch.uint8)
    assert host.with_padding(whole) is whole
    assert host.with_padding(whole[:, :, :80]).shape == (2, 4, 128)
    with pytest.raises(InvalidInput, match="weights of rows of 80 bytes end with their memory: 128 are read"):
        host.with_padding(torch.zeros(2 * 4 * 128 - 16, dtype=torch.uint8).as_strided((2, 4, 80), (512, 128, 1)))


def test_which_kernels_serve() -> None:
    target = from_arch("sm_100a")
    for kind in KINDS:
        spec = replace(GPT_OSS, weight=kind)
        assert dispatch.choose(spec, target, "cute-block-scaled").title == "experts mxfp8/mxfp4/nvfp4 sm100"
        # Not by itself: it has not run on a GPU.
        with pytest.raises(Unsupported, match=f"weights in {kind}: this one's"):
            dispatch.choose(spec, target)
    for changes, arch, message in (
        ({"weight": None}, "sm_100a", "weights in 16 bits: this one's are in mxfp8, mxfp4 or nvfp4"),
        ({"topk": 1, "router_weights": RouterWeights.INPUT}, "sm_100a", "router weights on the input"),
        ({}, "sm_90a", "sm_90a"),
    ):
        with pytest.raises(Unsupported, match=message):
            dispatch.choose(replace(GPT_OSS, **changes), from_arch(arch), "cute-block-scaled")


def test_rows_of_weights_start_where_tma_unpacks() -> None:
    """Rows of 1440 bytes, as of gpt-oss, are padded; those of 8 bits need 16 bytes as all do."""
    assert dispatch.weight_alignment("cute-block-scaled", GPT_OSS) == 64
    assert dispatch.weight_alignment("cute-block-scaled", replace(GPT_OSS, weight=NVFP4)) == 16
    assert dispatch.weight_alignment("cute", GPT_OSS) == 16
    assert dispatch.weight_alignment("reference", GPT_OSS) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tiles(kind: ScaledFormat) -> None:
    """Few tokens get narrower tiles of the second product; four stages fit, and six of narrow ones."""
    target = from_arch("sm_100a")
    spec = replace(GPT_OSS, weight=kind)
    few, many = (block_scaled_configs.choose(spec, tokens, target) for tokens in (1, 4096))
    assert {few, many} <= set(block_scaled_configs.candidates(spec, target))
    assert (few.second.box_n, many.second.box_n) == (64, 128)
    assert many.first.stages == many.second.stages == 4
    assert few.second.stages == 6


# On the emulator


def tiles(second: int = 128, prefetches: bool = True, stages: int = 2) -> ExpertsConfig:
    return ExpertsConfig(
        first=GroupedBlockScaledConfig(stages=stages),
        second=GroupedBlockScaledConfig(box_n=second, stages=stages),
        prefetches=prefetches,
    )


WIDE, NARROW = tiles(), tiles(64, prefetches=False, stages=3)
# id -> (tiles, CTAs of the routing).
EMULATED: dict[str, tuple[ExpertsConfig, int]] = {
    "mxfp4-gpt-oss": (WIDE, 1),
    "mxfp8": (NARROW, 1),
    # Accumulators of two tiles overlap; several CTAs sort.
    "mxfp8-tall": (WIDE, 3),
    "mxfp8-wide": (WIDE, 1),
    "mxfp8-one": (NARROW, 1),
    "mxfp8-padding": (NARROW, 2),
    "mxfp8-all-padding": (WIDE, 1),
    "mxfp8-special": (NARROW, 1),
    "mxfp8-no-weights": (WIDE, 1),
    "mxfp4": (NARROW, 1),
    "nvfp4": (WIDE, 1),
    "nvfp4-wide": (NARROW, 1),
}


def emulate(case: ExpertsCase, config: ExpertsConfig, schedule: str, seed: int, routing_ctas: int = 1) -> None:
    """Compile, run on the emulator, judge; any finding or warning raises."""
    given, spec = tensors(case, "cpu"), case.spec
    with emulator.device(arch="sm_100a", sms=SMS, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, config), TARGET)
        ctas = (routing_ctas, *config.ctas(spec, case.tokens, TARGET)[1:])
        host.run(function, spec, config, given, ctas, Workspace(given.x.device))
    judge(case, given)


def emulated() -> list[Any]:
    """Parameters (name, schedule): gpt-oss's layer always, all others under one schedule in the rest's run."""
    found = []
    for i, name in enumerate(EMULATED):
        for j, schedule in enumerate(SCHEDULES):
            late = pytest.mark.full if (i + j) % 3 else pytest.mark.rest
            found.append(pytest.param(name, schedule, marks=() if i == j == 0 else late))
    return found


@pytest.mark.parametrize(("name", "schedule"), emulated())
def test_sm100(name: str, schedule: str) -> None:
    config, routing_ctas = EMULATED[name]
    emulate(BLOCK_SCALED_CASES[name], config, schedule, 1, routing_ctas)


# Problems that share a kernel, but for the number of experts.
SHARED = 6


def random_served_case(draw: random.Random, most: int, facts: random.Random) -> ExpertsCase:
    case = replace(random_block_scaled_case(draw, most, facts=facts), num_experts=facts.randint(8, 20))
    if case.router_weights is RouterWeights.INPUT:
        case = replace(case, router_weights=RouterWeights.OUTPUT)
    return case


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_fuzz(seed: int) -> None:
    draw, facts = random.Random(seed), random.Random(seed // SHARED)
    case = random_served_case(draw, 200, facts)
    emulate(case, facts.choice((WIDE, NARROW)), SCHEDULES[seed % 3], seed, draw.choice((1, 3)))


def test_by_name() -> None:
    """The plan of the name runs what `EMULATED` runs, its arguments checked at the door."""
    case = replace(MX, weight=MXFP4)
    given = tensors(case, "cpu")
    unpadded = given._replace(w2=given.w2.contiguous())._asdict()
    apart = given._replace(x=torch.zeros(case.tokens, case.hidden + 4, dtype=BF16)[:, : case.hidden])._asdict()
    with emulator.device(arch="sm_100a", sms=SMS, strict=True):
        plan = api.ExpertsPlan(case.spec, TARGET, Workspace(torch.device("cpu")), "cute-block-scaled")
        with pytest.raises(InvalidInput, match="w2 has rows that do not start at multiples of 64 bytes"):
            api.run(plan, **unpadded)
        with pytest.raises(InvalidInput, match="x has rows that do not start at multiples of 16 bytes"):
            api.run(plan, **apart)
        api.run(plan, **given._asdict())
    judge(case, given)
