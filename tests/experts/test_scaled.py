# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights are in 8 bits: the door, the kernels of any host, and those of SM90 and SM100 emulated."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_cases import SCHEDULES, SMS, TARGETS
from gpu_kernels import REFERENCE, on_gpu, skip_unless

import emulator
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import api, dispatch, precompile, reference, scaled_configs
from dsl_backend.experts.cute import scaled_host as host
from dsl_backend.experts.scaled_configs import ScaledExpertsConfig, SideBySideConfig
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig
from dsl_backend.gemm.sm100.configs import GemmConfig, PromotedConfig
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    GROUP_SCALED,
    MXFP4,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    TENSOR_SCALED,
    ScaledFormat,
)
from dsl_backend.quant.reference import Quantized, dequantized
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.model import shape_of
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import (
    BF16,
    BLOCKS,
    SCALED_CASES,
    SCALED_REAL,
    ExpertsCase,
    check_experts,
    judge,
    random_scaled_case,
    tensors,
)
from integration.quantization import BLOCKS as BLOCKS_CHECKPOINT
from integration.quantization import CHANNELS as CHANNELS_CHECKPOINT
from integration.quantization import MXFP4 as MXFP4_CHECKPOINT
from integration.quantization import NVFP4 as NVFP4_CHECKPOINT

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)
KERNELS = [REFERENCE, pytest.param("triton", marks=needs_triton)]
# What serves them on a GPU, by its architecture.
CUTE = {"cute-scaled": "sm90", "cute-scaled-sm100": "sm100"}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SCALED_CASES)
def test_case(name: str, kernel: str, device: torch.device) -> None:
    check_experts(SCALED_CASES[name], kernel, str(device))


@pytest.mark.rest
@pytest.mark.parametrize("kernel", KERNELS)
def test_fuzz(kernel: str, device: torch.device) -> None:
    for seed in range(6 if kernel == "triton" and device.type == "cpu" else 30):
        check_experts(random_scaled_case(random.Random(seed), 200), kernel, str(device))


def check_served(case: ExpertsCase, kernel: str, device: torch.device) -> None:
    """A kernel that refuses router weights on the input, and nothing else."""
    if case.router_weights is RouterWeights.INPUT:
        with pytest.raises(Unsupported, match="router weights on the input"):
            check_experts(case, kernel, str(device))
    else:
        check_experts(case, kernel, str(device))


@pytest.mark.parametrize("kernel", on_gpu(*CUTE))
@pytest.mark.parametrize("name", SCALED_CASES)
def test_case_on_a_gpu(name: str, kernel: str, device: torch.device) -> None:
    skip_unless(CUTE[kernel], device)
    check_served(SCALED_CASES[name], kernel, device)


# More of them: `dsl-backend verify --families scaled_experts`.
@pytest.mark.parametrize("kernel", on_gpu(*CUTE))
@pytest.mark.parametrize("seed", range(6))
def test_fuzz_on_a_gpu(seed: int, kernel: str, device: torch.device) -> None:
    skip_unless(CUTE[kernel], device)
    check_served(random_scaled_case(random.Random(seed), 700), kernel, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALED_REAL)
def test_real(name: str, device: torch.device) -> None:
    check_experts(SCALED_REAL[name], None, str(device))


@pytest.mark.parametrize("weight", [BLOCK_SCALED, ROW_SCALED])
def test_it_is_the_layer_of_the_dequantised_weights(weight: ScaledFormat) -> None:
    """Up to what quantised activations cost: a sixteenth of their magnitude at most, and less on average."""
    case = replace(BLOCKS, weight=weight)
    given, plain = tensors(case, "cpu"), replace(case.spec, weight=None)
    weights = {}
    for name in ("w13", "w2"):
        pairs = zip(getattr(given, name), getattr(given.scales, name), strict=True)
        weights[name] = torch.stack([dequantized(Quantized(*one, weight)) for one in pairs])
    right = reference.exact(plain, given._replace(**weights))
    wrong = reference.exact(case.spec, given) - right
    assert 0.005 < float(wrong.norm() / right.norm()) < 0.06


@pytest.mark.parametrize(("number", "right"), [(160.0, True), (176.0, True), (288.0, False)])
def test_a_number_of_x_in_the_middle_of_two_may_go_to_either(number: float, right: bool) -> None:
    """Whether a kernel divides by a scale or multiplies with its inverse decides; a number further away is wrong."""
    case = replace(SCALED_CASES["channels-x"], tokens=9, hidden=32, width=16, topk=1, pad_x=0)
    given = tensors(case, "cpu")
    given.x[3] *= 100 / given.x[3].abs().max()
    given.x[3, :2] = torch.tensor([448.0, number])
    given.out.copy_(reference.exact(case.spec, given))
    given.x[3, 1] = 168
    if right:
        judge(case, given)
    else:
        with pytest.raises(AssertionError, match="in rows 3;"):
            judge(case, given)


def test_the_judge_finds_a_scale_of_another_block() -> None:
    case = replace(BLOCKS, hidden=256)
    given = tensors(case, "cpu")
    assert given.scales.w13 is not None
    given.out.copy_(reference.exact(case.spec, given, torch.float32))
    judge(case, given)
    other = given.scales._replace(w13=given.scales.w13.flip(2) * torch.tensor([1.0, 1.25]))
    turned = given._replace(scales=other)
    given.out.copy_(reference.exact(case.spec, turned, torch.float32))
    with pytest.raises(AssertionError, match="further from the oracle"):
        judge(case, given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": TENSOR_SCALED},
            "is e4m3-tensor: one of None, e4m3-128x128, e4m3-row, mxfp8, mxfp4, nvfp4, mxfp4-tiled is needed",
        ),
        ({"x": ROW_SCALED}, "x is e4m3-row: e4m3-1x128 or None is needed with weights in e4m3-128x128"),
        ({"weight": None, "x": GROUP_SCALED}, "x is e4m3-1x128: None is needed with weights in bfloat16"),
        ({"intermediate_size": 200}, "intermediate_size 200 is not a multiple of 128"),
        ({"interleaved": True}, "interleaved: weights in e4m3-128x128 have all gate rows first"),
        ({"w2_bias": True}, "w2_bias: experts of weights in e4m3-128x128 have no biases"),
    ],
)
def test_specs_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(BLOCKS.spec, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w13": None}, "scales.w13 is None: a tensor is needed"),
        ({"w13": torch.ones(4, 2, 1)}, r"scales.w13 has shape \(4, 2, 1\): \[4, 2, 2\] is needed"),
        ({"w2": torch.ones(4, 2, 1).double()}, "scales.w2 is float64: float32 is needed"),
        ({"w13": torch.ones(4, 4, 2)[:, ::2]}, "scales.w13 is not contiguous"),
        ({"x": torch.ones(20, 2)}, "scales.x is given, and the plan's spec has none"),
    ],
)
def test_scales_are_checked(changes: dict[str, Any], message: str) -> None:
    given = tensors(BLOCKS, "cpu")
    given = given._replace(scales=given.scales._replace(**changes))
    with pytest.raises(InvalidInput, match=message):
        api.run(api.plan(BLOCKS.spec, "cpu", kernel="reference"), **given._asdict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w2": torch.zeros(4, 144, 128, dtype=BF16)}, "w2 is bfloat16: float8_e4m3fn is needed"),
        ({"scales": None}, "scales is None: an ExpertsScales is needed"),
    ],
)
def test_operands_are_checked(changes: dict[str, Any], message: str) -> None:
    given = tensors(BLOCKS, "cpu")._asdict() | changes
    with pytest.raises(InvalidInput, match=message):
        api.run(api.plan(BLOCKS.spec, "cpu", kernel="reference"), **given)


def test_which_kernels_serve() -> None:
    target = from_arch("sm_90a")
    assert dispatch.choose(BLOCKS.spec, target).title == "experts e4m3 sm90"
    assert dispatch.choose(BLOCKS.spec, target, "triton").title == "experts e4m3 triton"
    assert dispatch.choose(BLOCKS.spec, from_arch("sm_100a")).title == "experts e4m3 triton"
    for changes, kernel, message in (
        ({}, "cute", "weights in e4m3-128x128: this one's are in 16 bits"),
        ({"weight": None}, "cute-scaled", "weights in 16 bits: this one's are in 8 bits"),
        ({"topk": 1, "router_weights": RouterWeights.INPUT}, "cute-scaled", "router weights on the input"),
        ({"hidden_size": 136}, "cute-scaled", "hidden_size 136 is not a multiple of 16"),
    ):
        with pytest.raises(Unsupported, match=message):
            dispatch.choose(replace(BLOCKS.spec, **changes), target, kernel)
    with pytest.raises(Unsupported, match="sm_100a"):
        dispatch.choose(BLOCKS.spec, from_arch("sm_100a"), "cute-scaled")
    with pytest.raises(Unsupported, match="sm_90a"):
        dispatch.choose(BLOCKS.spec, target, "cute-scaled-sm100")


@pytest.mark.parametrize("weight", [BLOCK_SCALED, ROW_SCALED])
def test_each_number_of_tokens_has_a_configuration_among_the_candidates(weight: ScaledFormat) -> None:
    spec = replace(BLOCKS.spec, num_experts=128, hidden_size=2048, intermediate_size=768, topk=8, weight=weight)
    target = from_arch("sm_90a")
    found = scaled_configs.candidates(spec, target)
    assert found
    chosen = [scaled_configs.choose(spec, tokens, target) for tokens in (1, 64, 2047, 2048, 5000)]
    assert set(chosen) <= set(found)
    # 128 rows of an expert.
    assert [one == scaled_configs.wide(spec, target) for one in chosen] == [False, False, False, True, True]


MODEL = {
    "num_attention_heads": 8,
    "hidden_size": 1024,
    "vocab_size": 1000,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
SMALL_BLOCKS = BLOCKS_CHECKPOINT | {"weight_block_size": [64, 64]}


def of_weights(inputs: bool = False, **facts: Any) -> dict[str, Any]:
    """compressed-tensors' configuration of weights of these facts, with inputs of the same or in 16 bits."""
    weights = {"type": "float", "symmetric": True, **facts}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights if inputs else None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def two_formats() -> dict[str, Any]:
    """Weights in 8 bits beside ones in NVFP4."""
    both = (CHANNELS_CHECKPOINT, of_weights(inputs=True, num_bits=4, strategy="tensor_group", group_size=16))
    groups = {f"group_{i}": one["config_groups"]["group_0"] for i, one in enumerate(both)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


MXFP8_CHECKPOINT = of_weights(inputs=True, num_bits=8, strategy="group", group_size=32, scale_dtype="torch.uint8")


@pytest.mark.parametrize(
    ("quantization", "tensor_parallel", "found"),
    [
        (BLOCKS_CHECKPOINT, 1, BLOCK_SCALED),
        (BLOCKS_CHECKPOINT, 8, "intermediate_size 64 is not a multiple of 128, as blocks of weights are"),
        (CHANNELS_CHECKPOINT, 8, ROW_SCALED),
        (
            SMALL_BLOCKS,
            1,
            "quantization_config 'fp8' is not served: e4m3 with scales of 128x128 blocks",
        ),
        ({"quant_method": "awq"}, 1, "quantization_config 'awq' is not served"),
        (of_weights(num_bits=8, strategy="block", block_structure=[64, 64]), 1, "quantization_config 'compressed"),
        (of_weights(num_bits=8, strategy="group", group_size=32), 1, "quantization_config 'compressed-tensors' is not"),
        (of_weights(num_bits=4, strategy="tensor_group", group_size=16), 1, "quantization_config 'compressed-tensors'"),
        (two_formats(), 1, "quantization_config 'compressed-tensors' is not served"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1, "quantization_config 'modelopt' is not served"),
    ],
)
def test_what_a_models_configuration_says(quantization: dict[str, Any], tensor_parallel: int, found: Any) -> None:
    """What `compile` and `doctor` are told of a checkpoint."""
    shape = shape_of(MODEL | {"quantization_config": quantization}, tensor_parallel=tensor_parallel)
    spec, target = precompile.spec_of(shape), from_arch("sm_90a")
    if isinstance(found, str):
        assert isinstance(spec, str)
        assert spec.startswith(found)
        assert precompile.served_by_others(shape, target) == {precompile.LAYER: [spec]}
        return
    assert isinstance(spec, ExpertsSpec)
    assert (spec.weight, spec.intermediate_size) == (found, 512 // tensor_parallel)
    assert precompile.served_by_others(shape, target) == {}
    keys = [one.key for one in precompile.precompile_specs(shape, target)]
    assert [key.weight for key in keys] == [found] * 3, "tiles of 128 rows, side by side, and wide ones"
    (reason,) = precompile.served_by_others(shape, from_arch("sm_100a")).values()
    assert "sm_100a" in reason[0]


@pytest.mark.parametrize(
    ("quantization", "weight"),
    [
        (MXFP4_CHECKPOINT, MXFP4),
        (NVFP4_CHECKPOINT, NVFP4),
        (of_weights(inputs=True, num_bits=4, strategy="tensor_group", group_size=16), NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "mxfp8"}, MXFP8),
        (MXFP8_CHECKPOINT, MXFP8),
    ],
)
def test_kernels_that_are_named_are_compiled(quantization: dict[str, Any], weight: ScaledFormat) -> None:
    """Of formats that no kernel serves by itself; without the name, `compile` says which one is needed."""
    shape = shape_of(MODEL | {"quantization_config": quantization})
    sm90, sm100 = map(from_arch, ("sm_90a", "sm_100a"))

    def compiled(kernel: str | None, target: Target) -> tuple[set[str], list[str]]:
        asked = replace(shape, experts_kernel=kernel)
        units = list(precompile.precompile_specs(asked, target))
        (reasons,) = precompile.served_by_others(asked, target).values() or [[]]
        return {unit.build.__module__.rpartition(".")[2] for unit in units}, reasons

    assert compiled("cute-block-scaled", sm100) == ({"block_scaled_host"}, [])
    assert compiled(None, sm100) == (
        set(),
        [f"weights in {weight} need the kernel's name: --experts-kernel cute-block-scaled"],
    )
    units, (reason,) = compiled("cute-block-scaled", sm90)
    assert not units
    assert "sm_90a" in reason
    if weight == MXFP4:
        for target in (sm90, sm100):
            assert compiled("cute-weight-only", target) == ({"weight_only_host"}, [])
        assert compiled(None, sm90)[1] == ["weights in mxfp4 need the kernel's name: --experts-kernel cute-weight-only"]
    else:
        units, (reason,) = compiled("cute-weight-only", sm90)
        assert (units, reason) == (set(), f"weights in {weight}: this one's are in mxfp4-tiled")
        assert "sm_90a" in compiled(None, sm90)[1][0]
    with pytest.raises(InvalidInput, match="experts has no kernel 'fast': choose one of cute"):
        compiled("fast", sm90)


def test_a_named_kernel_of_a_model_in_16_bits_is_compiled() -> None:
    shape = replace(shape_of(MODEL), experts_kernel="cute-decode")
    units = list(precompile.precompile_specs(shape, from_arch("sm_90a")))
    assert units
    assert all(unit.key.decodes for unit in units)
    assert not precompile.served_by_others(shape, from_arch("sm_90a"))


QWEN3 = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768}
DEEPSEEK = {"num_experts": 32, "hidden_size": 7168, "intermediate_size": 2048}


@pytest.mark.parametrize(
    ("sizes", "weight", "few"),
    [
        (QWEN3, BLOCK_SCALED, (8, 64, 512)),
        (QWEN3, ROW_SCALED, (8, 64, 512)),
        (DEEPSEEK, BLOCK_SCALED, (1, 8, 64)),
        (DEEPSEEK, ROW_SCALED, (1, 8, 64)),
    ],
)
def test_the_faster_tiles_on_an_h200(sizes: dict[str, int], weight: ScaledFormat, few: tuple[int, ...]) -> None:
    """By the tables of docs/performance/experts.md, whose closest two (DeepSeek's blocks with 8) are 0.3 % apart.

    Wide tiles of an eighth of DeepSeek-V3 were not timed.
    """
    spec = replace(BLOCKS.spec, topk=8, weight=weight, **sizes)
    chosen = {tokens: scaled_configs.choose(spec, tokens, from_arch("sm_90a")) for tokens in (1, 8, 64, 512, 2048)}
    side = {tokens for tokens, config in chosen.items() if isinstance(config.first, SideBySideConfig)}
    assert side == set(few)
    # Their epilogue quantises whole groups, and has no scale of a whole row.
    assert {chosen[tokens].beside for tokens in side} == {not weight.blocked}
    wide = {tokens for tokens, config in chosen.items() if config == scaled_configs.wide(spec, from_arch("sm_90a"))}
    assert wide == {tokens for tokens in chosen if tokens * 8 >= 128 * spec.num_experts}


# On the emulator

WIDE, NARROW = (ScaledGemmConfig(box_n=box_n, stages=2) for box_n in (64, 32))
SIDE, THIN = SideBySideConfig(box_n=64, stages=2), SideBySideConfig(box_n=32, stages=3)
EPILOGUE = ScaledExpertsConfig(first=WIDE, second=NARROW, prefetches=True, trims=True)
BESIDE = ScaledExpertsConfig(first=NARROW, second=replace(WIDE, stages=3), beside=True, prefetches=True, trims=True)
FOURS = ScaledExpertsConfig(first=NARROW, second=WIDE, prefetches=True, trims=True)
PROMOTED = replace(NARROW, promotion=4)
CHANNELS = ScaledExpertsConfig(first=PROMOTED, second=replace(PROMOTED, stages=3), beside=True, trims=True)
# Both consumers have half of each group of the first product's columns, which the epilogue quantises.
FEW = ScaledExpertsConfig(first=SIDE, second=THIN, prefetches=True, trims=True)
FEW_CHANNELS = ScaledExpertsConfig(
    first=replace(THIN, promotion=4), second=replace(SIDE, promotion=4), beside=True, prefetches=True, trims=True
)
# Boxes that take turns: the second product stores the columns of one after the other's.
TURNS = ScaledGemmConfig(box_n=128, turns=2, stages=2)
TURNED = ScaledExpertsConfig(first=TURNS, second=replace(TURNS, stages=3), prefetches=True, trims=True)
SMALL_TURNS = ScaledExpertsConfig(
    first=replace(TURNS, box_n=64), second=replace(TURNS, box_n=64), beside=True, trims=True
)
WIDE_CHANNELS = ScaledExpertsConfig(
    first=replace(PROMOTED, box_n=96), second=replace(PROMOTED, box_n=96), beside=True, prefetches=True, trims=True
)
NARROW_100, WIDE_100 = PromotedConfig(box_n=32, stages=2), PromotedConfig(box_n=64, stages=3)
BLOCKS_100 = ScaledExpertsConfig(first=NARROW_100, second=WIDE_100, beside=True, prefetches=True)
MORE_BLOCKS_100 = ScaledExpertsConfig(first=WIDE_100, second=PromotedConfig(box_n=16, stages=2), beside=True)
CHANNELS_100 = ScaledExpertsConfig(
    first=GemmConfig(box_n=32, stages=2), second=GemmConfig(box_n=16, stages=3), beside=True, prefetches=True
)
# id -> (case, tiles, CTAs of the routing).
EMULATED: dict[str, tuple[str, ScaledExpertsConfig, int]] = {
    "epilogue": ("blocks", EPILOGUE, 1),
    "beside": ("blocks-padding", BESIDE, 1),
    # Groups of four tiles; several groups a CTA.
    "fours": ("blocks-wide", FOURS, 1),
    # Both consumers have rows, and one of them; several work tiles an expert; several CTAs sort.
    "tall": ("blocks-tall", EPILOGUE, 3),
    "one": ("blocks-one", EPILOGUE, 1),
    "all-padding": ("blocks-all-padding", BESIDE, 1),
    "special": ("blocks-special", EPILOGUE, 1),
    "no-weights": ("blocks-no-weights", BESIDE, 1),
    # Consumers side by side.
    "few": ("blocks-padding", FEW, 1),
    "few-wide": ("blocks-wide", FEW, 1),
    # Several work tiles a CTA: magnitudes of one while those of the tile before may still be read.
    "few-tall": ("blocks-tall", FEW, 3),
    "few-special": ("blocks-special", FEW, 1),
    # Wide tiles: one row of tiles is partly filled, and several work tiles an expert.
    "turns": ("blocks-padding", TURNED, 1),
    "turns-wide": ("blocks-wide", TURNED, 1),
    "turns-tall": ("blocks-tall", SMALL_TURNS, 3),
    "turns-special": ("blocks-special", TURNED, 1),
    "wide-channels": ("channels-x", WIDE_CHANNELS, 2),
    "wide-channels-interleaved": ("channels-interleaved", WIDE_CHANNELS, 1),
    "few-channels": ("channels-x", FEW_CHANNELS, 2),
    "channels": ("channels", CHANNELS, 1),
    "channels-x": ("channels-x", CHANNELS, 2),
    "channels-interleaved": ("channels-interleaved", CHANNELS, 1),
}
SM100_EMULATED: dict[str, tuple[str, ScaledExpertsConfig, int]] = {
    # An expert map, a limited activation, router's numbers that are padding.
    "blocks-padding": ("blocks-padding", BLOCKS_100, 1),
    "blocks-wide": ("blocks-wide", MORE_BLOCKS_100, 1),
    # Several tiles of rows an expert, and of columns; several CTAs sort.
    "blocks-tall": ("blocks-tall", BLOCKS_100, 3),
    "blocks-one": ("blocks-one", BLOCKS_100, 1),
    "blocks-all-padding": ("blocks-all-padding", BLOCKS_100, 1),
    "blocks-special": ("blocks-special", MORE_BLOCKS_100, 1),
    "blocks-no-weights": ("blocks-no-weights", BLOCKS_100, 1),
    "channels": ("channels", CHANNELS_100, 1),
    "channels-x": ("channels-x", CHANNELS_100, 2),
    "channels-interleaved": ("channels-interleaved", CHANNELS_100, 1),
}


def emulate(
    case: ExpertsCase,
    config: ScaledExpertsConfig,
    schedule: str,
    seed: int,
    routing_ctas: int = 1,
    arch: str = "sm_90a",
) -> None:
    """Compile, run on the emulator, judge; any finding or warning raises."""
    given, spec, target = tensors(case, "cpu"), case.spec, TARGETS[arch]
    with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, config), target)
        ctas = (routing_ctas, *config.ctas(spec, case.tokens, target)[1:])
        host.run(function, spec, config, given, ctas, Workspace(given.x.device))
    judge(case, given)


def marked(cases: Iterable[str]) -> list[Any]:
    """Parameters (name, schedule): each under one schedule, under the others where there is time."""
    found = []
    for i, name in enumerate(cases):
        for j, schedule in enumerate(SCHEDULES):
            late = pytest.mark.full if (i + j) % 3 else pytest.mark.rest
            found.append(pytest.param(name, schedule, marks=() if i == j == 0 else late))
    return found


@pytest.mark.parametrize(("name", "schedule"), marked(EMULATED))
def test_sm90(name: str, schedule: str) -> None:
    case, config, routing_ctas = EMULATED[name]
    emulate(SCALED_CASES[case], config, schedule, 1, routing_ctas)


@pytest.mark.parametrize(("name", "schedule"), marked(SM100_EMULATED))
def test_sm100(name: str, schedule: str) -> None:
    case, config, routing_ctas = SM100_EMULATED[name]
    emulate(SCALED_CASES[case], config, schedule, 1, routing_ctas, "sm_100a")


def random_served_case(draw: random.Random, most: int) -> ExpertsCase:
    case = random_scaled_case(draw, most)
    if case.router_weights is RouterWeights.INPUT:
        case = replace(case, router_weights=RouterWeights.OUTPUT)
    return case


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_sm90_fuzz(seed: int) -> None:
    draw = random.Random(seed)
    case = random_served_case(draw, 200)
    of_blocks, of_channels = (EPILOGUE, BESIDE, FOURS, FEW, TURNED), (CHANNELS, FEW_CHANNELS, WIDE_CHANNELS)
    configs = of_blocks if case.weight == BLOCK_SCALED else of_channels
    emulate(case, draw.choice(configs), SCHEDULES[seed % 3], seed, draw.choice((1, 1, 3)))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_sm100_fuzz(seed: int) -> None:
    draw = random.Random(seed)
    case = random_served_case(draw, 200)
    configs = (BLOCKS_100, MORE_BLOCKS_100) if case.weight == BLOCK_SCALED else (CHANNELS_100,)
    emulate(case, draw.choice(configs), SCHEDULES[seed % 3], seed, draw.choice((1, 1, 3)), "sm_100a")


@pytest.mark.parametrize("weight", [BLOCK_SCALED, ROW_SCALED])
def test_sm100_has_tiles_for_each_number_of_tokens(weight: ScaledFormat) -> None:
    """The widest that give most SMs one; and fewer columns for one token."""
    target = from_arch("sm_100a")
    spec = replace(BLOCKS.spec, num_experts=128, hidden_size=2048, intermediate_size=768, topk=8, weight=weight)
    found = [scaled_configs.choose(spec, tokens, target) for tokens in (1, 64, 4096)]
    assert set(found) <= set(scaled_configs.candidates(spec, target))
    boxes = [config.first.box_n for config in found]
    assert boxes == sorted(boxes)
    assert boxes[0] < boxes[-1]
    assert dispatch.choose(spec, target, "cute-scaled-sm100").title == "experts e4m3 sm100"
