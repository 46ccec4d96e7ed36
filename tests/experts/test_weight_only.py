# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4 under bfloat16: the layout, the door, the reference, and the kernels emulated."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from experts_cases import SCHEDULES
from gpu_kernels import skip_unless
from weight_only_experts_cases import (
    BY_ID,
    CASES,
    FEW_SM100,
    GROUPED,
    GROUPED_BY_ID,
    SM100,
    WeightOnlyEmulated,
    emulate,
    random_emulated,
    random_few_sm100,
    random_grouped,
    random_sm100,
)

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import api, dispatch, precompile, reference, weight_only_configs
from dsl_backend.experts.configs import ExpertsConfig, products
from dsl_backend.experts.weight_only_sm100_configs import UnpackedSmallMConfig, UnpackedTiles
from dsl_backend.quant.format import MXFP4, MXFP4_TILED
from dsl_backend.quant.mxfp4_tiles import LEAST_SCALE, MOST_SCALE, pack, pack_experts, unpack, unpack_expert
from dsl_backend.quant.reference import unpacked_e2m1
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.experts import (
    WEIGHT_ONLY,
    WEIGHT_ONLY_CASES,
    WEIGHT_ONLY_REAL,
    check_experts,
    random_weight_only_case,
    tensors,
)

TARGET = from_arch("sm_90a")
QUICK = ("plain", "gpt-oss")


def in_turn(cases: Sequence[WeightOnlyEmulated], quick: Sequence[str]) -> list[Any]:
    """A case, and one of three schedules; all of them where there is time."""
    return [
        pytest.param(
            one.id,
            schedule,
            id=f"{one.id}-{schedule}",
            marks=pytest.mark.full if (i + j) % 3 else () if one.id in quick else pytest.mark.rest,
        )
        for i, one in enumerate(cases)
        for j, schedule in enumerate(SCHEDULES)
    ]


# Of random problems: a few, and more where there is time.
SEEDS = [pytest.param(seed, marks=pytest.mark.rest if seed < 2 else pytest.mark.full) for seed in range(40)]


def of_checkpoint(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All codes with scales that kernels have; the weights in float64."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=made)
    exponents = torch.randint(LEAST_SCALE, MOST_SCALE + 1, (rows, columns // 32), generator=made)
    wide = unpacked_e2m1(weight).double() * exponents.double().exp2().repeat_interleave(32, 1)
    return weight, (exponents + 127).to(torch.uint8), wide


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (136, 160), (8, 32), (72, 416)])
def test_packing_loses_nothing(rows: int, columns: int) -> None:
    weight, scale, wide = of_checkpoint(rows, columns)
    packed = pack(weight, scale)
    assert packed.shape == (-(-rows // 64), -(-columns // 128), 1088)
    found = unpack(packed)
    assert found[:rows, :columns].equal(wide)
    assert not found[rows:].any()
    assert not found[:, columns:].any()
    assert pack(weight, scale.view(MXFP4.scales)).equal(packed)


@pytest.mark.parametrize(("parts", "interleaved"), [(1, False), (2, False), (2, True)])
def test_gate_and_up_rows_are_in_tiles_of_their_own(parts: int, interleaved: bool) -> None:
    both = [of_checkpoint(144, 96, seed) for seed in range(2)]
    weight, scale, wide = (torch.stack(one) for one in zip(*both, strict=True))
    packed = pack_experts(weight, scale, parts=parts, interleaved=interleaved)
    assert packed.shape == (2, 3 if parts == 1 else 4, 1, 1088)
    for one, right in zip(packed, wide, strict=True):
        assert unpack_expert(one, 144, 96, parts=parts, interleaved=interleaved).equal(right)
    if parts == 2:
        gate = wide[0][::2] if interleaved else wide[0][:72]
        assert unpack(packed[0][:2])[:72, :96].equal(gate)


def test_blocks_of_zeros_may_have_any_scale() -> None:
    weight, scale, wide = of_checkpoint(8, 64)
    weight[:, :16], wide[:, :32], scale[:, 0] = 0x80, 0.0, 0
    assert unpack(pack(weight, scale))[:8, :64].equal(wide)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (255, r"largest scale is 2\^128 \(NaN\): 2\^-93 to 2\^33 are possible"),
        (161, r"largest scale is 2\^34"),
        (33, r"smallest scale is 2\^-94"),
    ],
)
def test_scales_that_no_kernel_has_are_refused(code: int, message: str) -> None:
    weight, scale, _ = of_checkpoint(8, 64)
    weight[3, 20], scale[3, 1] = 0x11, code
    with pytest.raises(InvalidInput, match=message):
        pack(weight, scale)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(8, 24, dtype=torch.uint8), torch.zeros(8, 1, dtype=torch.uint8), r"shape \(8, 24\)"),
        (
            torch.zeros(8, 32, dtype=torch.uint8),
            torch.zeros(8, 1, dtype=torch.uint8),
            r"scale has shape \(8, 1\): \(8, 2",
        ),
        (torch.zeros(8, 32), torch.zeros(8, 2, dtype=torch.uint8), "dtype of weight is float32"),
        (torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 2), "dtype of scale is float32"),
    ],
)
def test_weights_of_another_layout_are_refused(weight: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        pack(weight, scale)


BYTES = torch.zeros(2, 8, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": [1]}, "weight is a list: a tensor is needed"),
        ({"scale": [2]}, "scale is a list: a tensor is needed"),
        ({"weight": BYTES[0]}, r"weight has shape \(8, 32\): \[experts, rows, columns / 2\] is needed"),
        ({"weight": BYTES[:0], "scale": BYTES[:0, :, :2]}, r"weight has shape \(0, 8, 32\)"),
        ({"scale": BYTES[0, :, :2]}, r"scale has shape \(8, 2\): \[2, rows, columns / 32\] is needed"),
        ({"scale": BYTES[:1, :, :2]}, r"scale has shape \(1, 8, 2\): \[2, rows"),
        ({"parts": 3}, "parts is 3: an integer from 1 to 2 is needed"),
        ({"interleaved": "no"}, "interleaved is 'no': True or False is needed"),
    ],
)
def test_weights_that_are_not_of_experts_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        pack_experts(**{"weight": BYTES, "scale": BYTES[:, :, :2], **changed})


def test_parts_of_a_tile_are_tensors() -> None:
    with pytest.raises(InvalidInput, match="weight is a list: a tensor is needed"):
        pack([1], BYTES[0, :, :2])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="scale is None: a tensor is needed"):
        pack(BYTES[0], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WEIGHT_ONLY_CASES)
def test_case(name: str) -> None:
    check_experts(WEIGHT_ONLY_CASES[name], "reference", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WEIGHT_ONLY_CASES, *WEIGHT_ONLY_REAL])
def test_case_on_a_gpu(name: str, device: torch.device) -> None:
    skip_unless("sm90", device)
    check_experts({**WEIGHT_ONLY_CASES, **WEIGHT_ONLY_REAL}[name], "cute-weight-only", str(device))


# More of them: `dsl-backend verify --families weight_only_experts`.
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_fuzz_on_a_gpu(seed: int, device: torch.device) -> None:
    skip_unless("sm90", device)
    check_experts(random_weight_only_case(random.Random(seed), 700), "cute-weight-only", str(device))


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_the_layer_of_the_weights_before(interleaved: bool) -> None:
    """Up to what 4 bits of weights cost: scales belong to their rows, whichever way gate and up rows lie."""
    case = replace(WEIGHT_ONLY, interleaved=interleaved)
    right = reference.exact(replace(case.spec, weight=None), tensors(replace(case, weight=None), "cpu"))
    wrong = reference.exact(case.spec, tensors(case, "cpu")) - right
    assert 0.05 < float(wrong.norm() / right.norm()) < 0.3


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dtype": torch.float16}, "dtype float16: bfloat16 is needed with weights in mxfp4-tiled"),
        ({"hidden": 168}, "hidden_size 168 is not a multiple of 32"),
        ({"width": 72}, "intermediate_size 72 is not a multiple of 32"),
        ({"shared": 1}, "weights in 8 or 4 bits"),
    ],
)
def test_layers_that_are_none(facts: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(WEIGHT_ONLY, **facts).spec  # noqa: B018


def test_tensors_of_another_layout_are_refused() -> None:
    given = tensors(WEIGHT_ONLY, "cpu")
    plan = api.plan(WEIGHT_ONLY.spec, "cpu")
    run = (plan, given.x, given.w13, given.w2, given.topk_weights, given.topk_ids)
    api.run(*run)
    with pytest.raises(InvalidInput, match=r"w13 has shape \(3, 2, 2, 1088\): \[3, 4, 2, 1088\] is needed"):
        api.run(plan, given.x, given.w13[:, :2], *run[3:])
    with pytest.raises(InvalidInput, match="w2 is not contiguous"):
        api.run(*run[:3], given.w2.transpose(0, 1).contiguous().transpose(0, 1), *run[4:])
    with pytest.raises(InvalidInput, match=r"scales\.w13 is given"):
        api.run(*run, scales=api.ExpertsScales(w13=torch.zeros(3, 192, 5)))


def test_which_kernel_serves() -> None:
    """By name alone, on SM90 and SM100; no kernel of other weights takes them."""
    spec = WEIGHT_ONLY.spec
    for arch in ("sm_90a", "sm_100a"):
        entry = dispatch.choose(spec, from_arch(arch), "cute-weight-only")
        assert entry.title == "experts mxfp4 under 16 bits sm90/sm100"
    for arch in ("sm_90a", "sm_100a", "sm_80"):
        assert all(reasons for _, reasons in dispatch.judge(spec, from_arch(arch)))
    with pytest.raises(Unsupported, match="serves GPUs of"):
        dispatch.choose(spec, from_arch("sm_80"), "cute-weight-only")
    with pytest.raises(Unsupported, match="weights in 16 bits: this one's are in mxfp4-tiled"):
        dispatch.choose(replace(spec, weight=None), TARGET, "cute-weight-only")
    with pytest.raises(Unsupported, match="weights in mxfp4-tiled: this one's are in mxfp8"):
        dispatch.choose(spec, from_arch("sm_100a"), "cute-block-scaled")
    assert api.plan(spec, "cpu").title == "experts reference"


def test_any_number_of_tokens_has_tiles() -> None:
    """Those for few tokens as long as they serve all at once; then tiles as tall as experts have rows."""
    spec = replace(WEIGHT_ONLY.spec, num_experts=128, hidden_size=2880, intermediate_size=2880, topk=4)
    most, heights = weight_only_configs.MOST_TOKENS, []
    for tokens in (*range(1, most + 3), *(1 << i for i in range(6, 18))):
        config = weight_only_configs.choose(spec, tokens, TARGET)
        assert config.serves(tokens)
        assert config in weight_only_configs.candidates(spec, TARGET)
        assert isinstance(config, ExpertsConfig) == (tokens > most)
        if isinstance(config, ExpertsConfig):
            heights.append(config.tile_m)
            assert config.first.smem_bytes(products(spec)[0]) <= TARGET.smem_bytes
    assert heights == sorted(heights)
    assert {heights[0], heights[-1]} == {16, 128}
    assert weight_only_configs.choose(spec, 64, TARGET.sparing(20)) == weight_only_configs.choose(spec, 64, TARGET)
    units = list(precompile.precompile_specs_of(spec, TARGET, "cute-weight-only"))
    assert len(units) == len(weight_only_configs.candidates(spec, TARGET))
    assert not weight_only_configs.objections(spec, TARGET)


def test_any_number_of_tokens_has_tiles_on_sm100() -> None:
    """Those for few tokens as long as they serve all at once; then narrow ones where wide ones would leave SMs idle."""
    target = from_arch("sm_100a")
    spec = replace(WEIGHT_ONLY.spec, num_experts=2, hidden_size=2880, intermediate_size=2880, topk=1)
    widths, few = [], []
    for tokens in (1 << i for i in range(18)):
        config = weight_only_configs.choose(spec, tokens, target)
        assert config.serves(tokens)
        assert config in weight_only_configs.candidates(spec, target)
        assert config.first.smem_bytes(products(spec)[0]) <= target.smem_bytes
        if isinstance(config, ExpertsConfig):
            widths.append(config.first.weight_rows)
        else:
            few.append(config.first.tile_tokens)
            assert tokens <= few[-1]
    assert few == [16, 16, 16, 16, 16, 32, 64]
    assert widths == sorted(widths)
    assert {widths[0], widths[-1]} == {128, 256}
    units = list(precompile.precompile_specs_of(spec, target, "cute-weight-only"))
    assert len(units) == len(weight_only_configs.candidates(spec, target)) == 5
    small = replace(target, smem_bytes=100 << 10)
    assert weight_only_configs.objections(spec, small) == ["102400 bytes of shared memory are too few for every tile"]


@pytest.mark.parametrize(
    ("tiles", "facts", "message"),
    [
        (UnpackedTiles(stages=4), {"box_n": 96}, "box_n is 96: 128 or 64 is needed, of whole packed tiles"),
        (UnpackedTiles(stages=4), {"two_cta": True}, "two CTAs share no products"),
        (UnpackedTiles(stages=4), {"stages": 12}, "bytes of shared memory"),
        (UnpackedSmallMConfig(), {"tile_k": 64}, "tile_k 64 is not 128, the columns of packed tiles"),
        (UnpackedSmallMConfig(), {"tokens": 128}, "128 tokens: tensor memory has room for 64 beside"),
        (UnpackedSmallMConfig(), {"tokens": 40}, "40 tokens are neither a multiple of 16"),
        (UnpackedSmallMConfig(), {"num_splits": 2}, "CTAs hand partial sums to each other through memory alone"),
        (UnpackedSmallMConfig(), {"stages": 14}, "bytes of shared memory"),
    ],
)
def test_tiles_that_are_none_on_sm100(
    tiles: UnpackedTiles | UnpackedSmallMConfig, facts: dict[str, Any], message: str
) -> None:
    spec, smem_bytes = products(WEIGHT_ONLY.spec)[0], from_arch("sm_100a").smem_bytes
    assert not tiles.objections(spec, smem_bytes)
    assert re.search(message, "; ".join(replace(tiles, **facts).objections(spec, smem_bytes)))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tokens": 40}, "40 tokens are not a multiple of 16 from 16 to 128"),
        ({"tokens": 144}, "144 tokens are not"),
        ({"box_n": 96}, "box_n is 96: 64 or 128 is needed"),
        ({"stages": 3}, "3 stages: 4 are the fewest"),
        ({"stages": 10}, "10 stages|bytes of shared memory"),
        ({"pingpong": True}, "consumers share a tile"),
    ],
)
def test_tiles_that_are_none(facts: dict[str, Any], message: str) -> None:
    spec = products(replace(WEIGHT_ONLY.spec, w13_bias=True))[0]
    tiles = weight_only_configs.WeightOnlyGroupedTiles(stages=8)
    assert not tiles.objections(spec, TARGET.smem_bytes)
    assert re.search(message, "; ".join(replace(tiles, **facts).objections(spec, TARGET.smem_bytes)))


@pytest.mark.parametrize(("name", "schedule"), in_turn(CASES, QUICK))
def test_emulated(name: str, schedule: str) -> None:
    emulate(BY_ID[name], schedule, 1)


@pytest.mark.parametrize(("name", "schedule"), in_turn(GROUPED, ("gpt-oss", "special")))
def test_many_tokens_emulated(name: str, schedule: str) -> None:
    emulate(GROUPED_BY_ID[name], schedule, 1)


@pytest.mark.parametrize(("name", "schedule"), in_turn(SM100, ("sm100-ragged",)))
def test_emulated_on_sm100(name: str, schedule: str) -> None:
    emulate(GROUPED_BY_ID[name], schedule, 1)


@pytest.mark.parametrize(("name", "schedule"), in_turn(FEW_SM100, ("sm100-few-plain",)))
def test_few_tokens_emulated_on_sm100(name: str, schedule: str) -> None:
    emulate(BY_ID[name], schedule, 1)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "warp"),
    [("rows", 5), ("deep", 5), *((name, warp) for name in ("sm100-deep", "sm100-few-plain") for warp in (4, 9, 14))],
)
def test_with_a_late_warp(name: str, warp: int) -> None:
    """A consumer's; on SM100 that of products, one that gathers or unpacks, and one that unpacks."""
    emulate({**BY_ID, **GROUPED_BY_ID}[name], "late", warp)


@pytest.mark.parametrize("seed", SEEDS)
def test_fuzz(seed: int) -> None:
    emulate(random_emulated(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_fuzz_of_many_tokens(seed: int) -> None:
    emulate(random_grouped(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_fuzz_on_sm100(seed: int) -> None:
    emulate(random_sm100(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_fuzz_of_few_tokens_on_sm100(seed: int) -> None:
    emulate(random_few_sm100(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.rest
def test_the_bits_are_the_same_in_any_order_of_events() -> None:
    for one in (BY_ID["long"], BY_ID["sm100-few-plain"], GROUPED_BY_ID["rows"], GROUPED_BY_ID["sm100-tall"]):
        assert torch.equal(emulate(one, "eager"), emulate(one, "random", seed=5))


@pytest.mark.rest
def test_all_elements_under_scales_far_apart() -> None:
    """Rows of the second product have scales of their own, from 2^-40 to 2^20."""
    case = replace(WEIGHT_ONLY, tokens=8, num_experts=1, topk=1, hidden=64, width=32)
    weight, scale, _ = of_checkpoint(64, 32)
    packed = pack_experts(weight[None], scale[None].clamp(87, 147))
    for one in (BY_ID["one"], BY_ID["sm100-few-one"], GROUPED_BY_ID["sm100-single"]):
        emulate(replace(one, case=case), "eager", 0, given=tensors(case, "cpu")._replace(w2=packed))


def test_the_format_has_a_name() -> None:
    assert api.MXFP4_TILED == MXFP4_TILED
    assert str(MXFP4_TILED) == "mxfp4-tiled"
