# SPDX-License-Identifier: Apache-2.0
"""The door of experts, their dispatch, and the kernels that run on any host."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_kernels import REFERENCE, on_gpu
from torch.nn import functional

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import api, configs, dispatch, precompile, reference
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.plan import ExpertsPlan
from dsl_backend.experts.spec import MAX_TOKENS, ExpertsSpec, RouterWeights
from dsl_backend.quant.format import ROW_SCALED
from dsl_backend.runtime import model, toolkit
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import (
    ADDED_CASES,
    BF16,
    CASES,
    PLAIN,
    REAL,
    SHARED,
    SHARED_CASES,
    ExpertsCase,
    check_experts,
    judge,
    of_additions,
    random_case,
    random_layer,
    tensors,
)

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)
KERNELS = [REFERENCE, pytest.param("triton", marks=needs_triton)]
# By name, so that few tokens go through the grouped GEMMs too, and many through the kernels for few.
CUTE = on_gpu("cute-decode", "cute-grouped")


@pytest.mark.parametrize("kernel", [*KERNELS, *CUTE])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, kernel: str, device: torch.device) -> None:
    check_experts(CASES[name], kernel, str(device))


@pytest.mark.parametrize("kernel", [REFERENCE, *CUTE])
@pytest.mark.parametrize("name", SHARED_CASES)
def test_shared_case(name: str, kernel: str, device: torch.device) -> None:
    check_experts(SHARED_CASES[name], kernel, str(device))


@pytest.mark.parametrize("kernel", KERNELS)
def test_fuzz(kernel: str, device: torch.device) -> None:
    # Interpreted kernels take seconds each.
    for seed in range(6 if kernel == "triton" and device.type == "cpu" else 30):
        check_experts(random_case(random.Random(seed), 100), kernel, str(device))


# More of them: `dsl-backend verify --families experts`.
@pytest.mark.parametrize("kernel", on_gpu("cute", "cute-overlapped"))
@pytest.mark.parametrize("seed", range(4))
def test_fuzz_on_a_gpu(seed: int, kernel: str, device: torch.device) -> None:
    check_experts(random_layer(random.Random(seed), 700), kernel, str(device))


@pytest.mark.parametrize("kernel", [REFERENCE, *on_gpu("cute", "cute-grouped", "cute-overlapped")])
@pytest.mark.parametrize("name", ADDED_CASES)
def test_sums_in_any_order(name: str, kernel: str, device: torch.device) -> None:
    check_experts(ADDED_CASES[name], kernel, str(device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["real-qwen3-16", "real-qwen3-1000"])
def test_real(name: str, device: torch.device) -> None:
    check_experts(REAL[name], None, str(device))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cute", "triton"])
def test_offsets_past_32_bits(kernel: str, device: torch.device) -> None:
    """As many tokens as there may be; their experts' results are 2^32 elements."""
    tokens, experts, hidden, width = MAX_TOKENS, 16, 2048, 64
    layer = ExpertsSpec(num_experts=experts, hidden_size=hidden, intermediate_size=width, topk=experts, dtype=BF16)
    x = torch.randn(tokens, hidden, device=device).to(BF16)
    w13 = torch.randn(experts, 2 * width, hidden, device=device).mul(hidden**-0.5).to(BF16)
    w2 = torch.randn(experts, hidden, width, device=device).mul(width**-0.5).to(BF16)
    ids = torch.rand(tokens, experts, device=device).argsort(dim=1).int()
    weights = torch.rand(tokens, experts, device=device)
    out = api.run(api.plan(layer, device, kernel=kernel), x, w13, w2, weights, ids)
    for chosen in (slice(0, 4), slice(tokens // 2, tokens // 2 + 4), slice(tokens - 4, tokens)):
        given = ExpertsOperands(x[chosen], w13, w2, weights[chosen], ids[chosen], None, None, None, out[chosen])
        torch.testing.assert_close(out[chosen].double(), reference.exact(layer, given), rtol=2e-2, atol=4e-2)


@needs_triton
def test_a_layer_leaves_the_counters_of_its_routing_as_it_found_them(device: torch.device) -> None:
    """Else the next layer of the workspace has other experts' rows."""
    workspace = Workspace(device)
    for tokens in (40, 3):
        case = replace(PLAIN, tokens=tokens)
        plan = api.plan(case.spec, device, workspace=workspace, kernel="triton")
        right = api.run(api.plan(case.spec, device, kernel="triton"), **tensors(case, str(device))._asdict())
        assert torch.equal(api.run(plan, **tensors(case, str(device))._asdict()), right)
        assert not workspace.flags(0).any()


def run(case: ExpertsCase, **changes: Any) -> torch.Tensor:
    """The default kernel's result, with some of its arguments replaced."""
    given = tensors(case, "cpu")._asdict() | changes
    plan = api.plan(case.spec, "cpu", kernel="reference")
    return api.run(plan, **given)


def test_it_is_a_mixture_of_experts() -> None:
    """Against loops over tokens and slots, which share nothing with the reference."""
    given = tensors(PLAIN, "cpu")
    assert given.topk_weights is not None
    right = torch.zeros(PLAIN.tokens, PLAIN.hidden)
    for token in range(PLAIN.tokens):
        for slot in range(PLAIN.topk):
            expert = int(given.topk_ids[token, slot])
            gate, up = (given.w13[expert].float() @ given.x[token].float()).chunk(2)
            made = given.w2[expert].float() @ (functional.silu(gate) * up)
            right[token] += given.topk_weights[token, slot] * made
    torch.testing.assert_close(run(PLAIN).float(), right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [-1, -7, 6, 2**31 - 1])
def test_numbers_that_are_no_experts_are_skipped(bad: int) -> None:
    given = tensors(PLAIN, "cpu")
    assert given.topk_weights is not None
    ids, weights = given.topk_ids.clone(), given.topk_weights.clone()
    ids[2, 1], weights[2, 1] = bad, torch.nan
    ids[4] = bad
    out = run(PLAIN, topk_ids=ids)
    same = run(PLAIN, topk_ids=torch.where(ids == bad, -1, ids), topk_weights=weights)
    assert torch.equal(out, same)
    assert out.isfinite().all()
    assert not out[4].any()


def test_shared_experts_are_mlps_of_every_token() -> None:
    """Against the routed experts alone and an MLP of the checkpoint's layout, whatever the routing is."""
    given = tensors(SHARED, "cpu")
    assert given.shared_w13 is not None
    assert given.shared_w2 is not None
    routed = run(replace(SHARED, shared=0, shared_weight=1.0), shared_w13=None, shared_w2=None)
    gate, up = (given.x.float() @ given.shared_w13.float().T).chunk(2, dim=1)
    right = routed.float() + 0.4 * (functional.silu(gate) * up) @ given.shared_w2.float().T
    torch.testing.assert_close(run(SHARED).float(), right, rtol=1e-2, atol=1e-2)


def test_estimates_count_shared_experts() -> None:
    """Every token has them: their weights are read once, and they have as many rows as there are tokens."""
    lite = spec(num_experts=64, hidden_size=2048, intermediate_size=1408, topk=6)
    shared = replace(lite, shared_experts=2)
    assert configs.chosen_experts(shared, 1) == pytest.approx(8)
    assert configs.tiles_of_experts(shared, 2048, 128) - configs.tiles_of_experts(lite, 2048, 128) == pytest.approx(32)


def test_a_map_that_names_no_expert_is_skipped() -> None:
    case = replace(PLAIN, mapped=True)
    given = tensors(case, "cpu")
    assert given.expert_map is not None
    beyond = given.expert_map.clone()
    beyond[beyond < 0] = case.num_experts
    assert torch.equal(run(case), run(case, expert_map=beyond))


def test_nothing_to_do() -> None:
    case = replace(PLAIN, tokens=0)
    assert run(case).shape == (0, case.hidden)


def test_the_judge_finds_a_token_that_is_missing() -> None:
    given = tensors(PLAIN, "cpu")
    given.out.copy_(reference.exact(PLAIN.spec, given, torch.float32))
    judge(PLAIN, given)
    given.out[3] = 0
    with pytest.raises(AssertionError, match="in rows 3"):
        judge(PLAIN, given)


def spec(**changes: Any) -> ExpertsSpec:
    return replace(PLAIN.spec, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0: an integer from 1 to 512 is needed"),
        ({"num_experts": 513}, "num_experts is 513: an integer from 1 to 512"),
        ({"topk": 17}, "topk is 17: an integer from 1 to 16"),
        ({"hidden_size": 0}, "hidden_size is 0: an integer from 1"),
        ({"intermediate_size": 2**30}, "intermediate_size is 1073741824: an integer from 1"),
        ({"dtype": torch.float32}, "dtype is float32: one of float16, bfloat16"),
        ({"ids_dtype": torch.int16}, "ids_dtype is int16: one of int32, int64"),
        ({"activation": "silu"}, r"activation is 'silu': Swiglu\(...\) or Geglu\(...\) is needed"),
        ({"interleaved": 1}, "interleaved is 1: True or False"),
        ({"deterministic": None}, "deterministic is None: True or False"),
        ({"router_weights": "input"}, "router_weights is 'input': one of"),
        ({"router_weights": RouterWeights.INPUT}, "topk 3: router weights on the input need a topk of 1"),
        ({"global_experts": 0}, "global_experts is 0: an integer from 1"),
        ({"shared_experts": -1}, "shared_experts is -1: an integer from 0"),
        ({"shared_experts": 14}, "shared_experts 14 and topk 3 exceed 16"),
        ({"num_experts": 511, "shared_experts": 2}, "shared_experts 2 and num_experts 511 exceed 512"),
        ({"shared_weight": 0.5}, "shared_weight is 0.5 without shared experts: 1 is needed"),
        ({"shared_experts": 1, "w13_bias": True}, "shared_experts is 1: with biases 0 is needed"),
        ({"shared_experts": 1, "interleaved": True}, "shared_experts is 1: with interleaved rows 0 is needed"),
        ({"shared_experts": 1, "weight": ROW_SCALED}, "shared_experts is 1: with weights in 8 or 4 bits 0 is needed"),
    ],
)
def test_specs_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        spec(**changes)


X = torch.zeros(9, 72, dtype=BF16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X[:, :40]}, r"x has shape \(9, 40\): \[9, 72\] is needed"),
        ({"x": X.half()}, "x is float16: bfloat16 is needed"),
        ({"x": X[0]}, r"x has shape \(72,\): \[72, 72\] is needed"),
        ({"x": torch.zeros(1, 72, dtype=BF16).expand(2**17 + 1, 72)}, "x has 131073 rows: 131072 are the most"),
        ({"x": torch.zeros(72, 9, dtype=BF16).T}, "x has stride 9 in its last dimension: 1 is needed"),
        ({"x": None}, "x is None: a tensor is needed"),
        ({"w13": torch.zeros(6, 40, 72, dtype=BF16)}, r"w13 has shape \(6, 40, 72\): \[6, 80, 72\] is needed"),
        ({"w2": torch.zeros(6, 40, 72, dtype=BF16)}, r"w2 has shape \(6, 40, 72\): \[6, 72, 40\] is needed"),
        ({"w2": torch.zeros(6, 72, 40, dtype=BF16).requires_grad_()}, "w2 requires a gradient"),
        ({"topk_ids": torch.zeros(9, 3, dtype=torch.int64)}, "topk_ids is int64: int32 is needed"),
        ({"topk_ids": torch.zeros(3, 9, dtype=torch.int32).T}, "topk_ids has stride 9 in its last dimension"),
        ({"topk_ids": torch.zeros(9, 6, dtype=torch.int32)[:, ::2]}, "topk_ids has stride 2 in its last dimension"),
        ({"topk_ids": torch.zeros(9, 6, dtype=torch.int32)[:, :3]}, "topk_ids is not contiguous"),
        ({"topk_weights": None}, "topk_weights is None: a tensor is needed"),
        ({"topk_weights": torch.zeros(9, 3, dtype=BF16)}, "topk_weights is bfloat16: float32 is needed"),
        ({"w13_bias": torch.zeros(6, 80, dtype=BF16)}, "w13_bias is given, and the plan's spec has none"),
        ({"expert_map": torch.zeros(6, dtype=torch.int32)}, "expert_map is given, and the plan's spec has none"),
        ({"out": torch.zeros(9, 80, dtype=BF16)}, r"out has shape \(9, 80\): \[9, 72\] is needed"),
        ({"out": torch.zeros(1, 72, dtype=BF16).expand(9, 72)}, "its rows overlap in memory"),
        ({"out": X.to("meta")}, "out is on meta, the plan on cpu"),
        ({"w13": [[1.0]]}, "w13 is a list: a tensor is needed"),
        ({"shared_w2": X}, "shared_w2 is given, and the plan's spec has none"),
    ],
)
def test_operands_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(PLAIN, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_w13": None}, "shared_w13 is None: a tensor is needed"),
        ({"shared_w13": X}, r"shared_w13 has shape \(9, 72\): \[160, 72\] is needed"),
        ({"shared_w2": X.half()}, r"shared_w2 has shape \(9, 72\): \[72, 80\] is needed"),
        ({"shared_w2": torch.zeros(72, 80)}, "shared_w2 is float32: bfloat16 is needed"),
    ],
)
def test_shared_operands_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(SHARED, **changes)


def test_plans_are_checked() -> None:
    with pytest.raises(InvalidInput, match="kernel is 1: a name from the dispatch table"):
        api.plan(PLAIN.spec, "cpu", kernel=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="experts has no kernel 'fast': choose one of"):
        api.plan(PLAIN.spec, "cpu", kernel="fast")
    with pytest.raises(InvalidInput, match="device is 'gpu'"):
        api.plan(PLAIN.spec, "gpu")
    with pytest.raises(InvalidInput, match="workspace is on meta, the plan on cpu"):
        api.plan(PLAIN.spec, "cpu", workspace=Workspace(torch.device("meta")))
    with pytest.raises(InvalidInput, match="spec is None: an ExpertsSpec is needed"):
        api.plan(None, "cpu")  # type: ignore[arg-type]


def test_rows_that_a_kernel_cannot_load_are_refused() -> None:
    given = tensors(replace(PLAIN, pad_x=1), "cpu")
    plan = api.plan(PLAIN.spec, "cpu", kernel="reference")
    api.check(plan, given)
    plan.alignment = dispatch.ALIGNMENT["cute"]
    api.check(plan, tensors(replace(PLAIN, pad_x=8), "cpu"))
    with pytest.raises(InvalidInput, match="x has rows that do not start at multiples of 16 bytes"):
        api.check(plan, given)
    shifted = torch.zeros(9 * 72 + 1, dtype=BF16)[1:].view(9, 72)
    with pytest.raises(InvalidInput, match="out has rows that do not start at multiples of 16 bytes"):
        api.check(plan, tensors(PLAIN, "cpu")._replace(out=shifted))


H200 = from_arch("sm_90a")
needs_cute = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")


@needs_cute
def test_an_sm90_gets_the_cute_kernels() -> None:
    assert dispatch.choose(PLAIN.spec, H200).name == "cute"
    assert dispatch.choose(PLAIN.spec, from_arch("sm_100a")).name == "cute"
    for other in ("sm_80", "sm_120a"):
        assert dispatch.choose(PLAIN.spec, from_arch(other)).name == "triton"
    with pytest.raises(Unsupported, match="2 shared experts: run them as a layer of their own"):
        dispatch.choose(SHARED.spec, from_arch("sm_80"))
    for name in ("hidden_size", "intermediate_size"):
        odd = spec(**{name: 84})
        assert dispatch.choose(odd, H200).name == "triton"
        with pytest.raises(Unsupported, match=f"{name} 84 is not a multiple of 8"):
            dispatch.choose(odd, H200, "cute")
    with pytest.raises(Unsupported, match="20000 bytes of shared memory are too few for every tile"):
        dispatch.choose(PLAIN.spec, replace(H200, smem_bytes=20_000), "cute")


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 64, 500, 3000, 8192, 1 << 17])
def test_configurations(tokens: int) -> None:
    qwen = spec(num_experts=128, hidden_size=2048, intermediate_size=768, topk=8)
    assert configs.choose(qwen, tokens, H200) in configs.candidates(qwen, H200)
    config = configs.choose(qwen, tokens, H200, configs.Kind.GROUPED)
    assert isinstance(config, configs.ExpertsConfig)
    assert config in configs.candidates(qwen, H200, configs.Kind.GROUPED)
    assert config.first.tile_m == config.second.tile_m == config.tile_m
    for tiles, gemm in zip((config.first, config.second), configs.products(qwen), strict=True):
        assert tiles.objections(gemm, H200.smem_bytes) == []
    assert all(1 <= ctas <= H200.sm_count for ctas in config.ctas(qwen, tokens, H200))
    assert config.ctas(qwen, tokens, H200)[0] == min(-(-tokens * 8 // configs.SORTED_PAIRS), 132)
    # All to one expert, evenly, one row more than tiles for each expert.
    for counts in ([tokens] + [0] * 127, [tokens * 8 // 128] * 128, [config.tile_m + 1] * 128):
        if sum(counts) <= tokens * 8:
            assert sum(-(-rows // config.tile_m) for rows in counts) <= config.work_tiles(qwen, tokens)


# By layer and tokens: which kind took less time on an H100 (docs/performance/experts.md), where it was 2 % at least.
TIMED: dict[tuple[int, ...], dict[int, configs.Kind]] = {
    (128, 2048, 768, 8): {1: configs.Kind.DECODE, 8: configs.Kind.DECODE, 128: configs.Kind.GROUPED},
    (64, 2048, 1408, 6): {1: configs.Kind.DECODE, 8: configs.Kind.DECODE, 128: configs.Kind.GROUPED},
    (32, 2880, 2880, 4): {1: configs.Kind.DECODE, 32: configs.Kind.GROUPED, 128: configs.Kind.GROUPED},
    (8, 4096, 7168, 2): {1: configs.Kind.DECODE, 8: configs.Kind.DECODE, 32: configs.Kind.DECODE},
}


@pytest.mark.parametrize("sizes", TIMED, ids=str)
def test_the_kind_that_was_faster_is_chosen(sizes: tuple[int, ...]) -> None:
    experts, hidden, width, topk = sizes
    layer = spec(num_experts=experts, hidden_size=hidden, intermediate_size=width, topk=topk)
    h100 = replace(H200, chip=next(chip for chip in H200.chips if chip.memory_gb_s < 4000))
    for tokens, kind in TIMED[sizes].items():
        assert configs.choose(layer, tokens, h100) in configs.all_fitting(layer, h100, kind)


def test_blocks_without_rows_are_left_out_where_that_was_faster() -> None:
    """Of five layers with 32 to 8192 tokens on an H200 (docs/performance/experts.md)."""
    h200 = replace(H200, chip=next(chip for chip in H200.chips if chip.memory_gb_s > 4000))
    sizes = (*TIMED, (32, 7168, 2048, 8))
    found = [
        (*one, tokens)
        for one in sizes
        for layer in [spec(num_experts=one[0], hidden_size=one[1], intermediate_size=one[2], topk=one[3])]
        for tokens in (32, 128, 512, 2048, 8192)
        if configs.choose(layer, tokens, h200) in set(configs.trimmed(layer, h200))
    ]
    assert found == [(128, 2048, 768, 8, 2048)]


def test_experts_with_more_rows_than_a_tile_have_more_tiles() -> None:
    qwen = spec(num_experts=128, hidden_size=2048, intermediate_size=768, topk=8)
    # 128 rows on average: of tiles of so many rows half of the experts need a second one.
    assert configs.tiles_of_experts(qwen, 2048, 128) == pytest.approx(128 * 1.5, abs=4)
    assert configs.tiles_of_experts(qwen, 2048, 256) == pytest.approx(128, abs=0.2)
    assert configs.tiles_of_experts(qwen, 2048, 64) == pytest.approx(128 * 2.5, abs=4)
    # One token has 8 experts of 128.
    assert configs.tiles_of_experts(qwen, 1, 64) == pytest.approx(8)


def test_kinds_that_were_not_timed_are_taken_by_name_alone() -> None:
    qwen = spec(num_experts=128, hidden_size=2048, intermediate_size=768, topk=8)
    timed = set(configs.candidates(qwen, H200))
    of_both = set(configs.trimmed(qwen, H200))
    assert len(of_both) == 1
    assert timed & set(configs.all_fitting(qwen, H200, configs.Kind.OVERLAPPED)) == of_both
    assert not set(configs.trimmed(qwen, from_arch("sm_100a")))
    overlapped = configs.choose(qwen, 2048, H200, configs.Kind.OVERLAPPED)
    assert isinstance(overlapped, configs.ExpertsConfig)
    assert overlapped.prefetches
    assert overlapped.trims


def test_a_gpu_is_not_served_by_the_reference() -> None:
    with pytest.raises(Unsupported, match="is for CPUs, this is sm_90a"):
        dispatch.choose(PLAIN.spec, from_arch("sm_90a"), "reference")


QWEN = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
}


def test_experts_of_a_model() -> None:
    found = precompile.spec_of(model.shape_of(QWEN, tensor_parallel=2))
    assert found == ExpertsSpec(num_experts=128, hidden_size=2048, intermediate_size=384, topk=8, dtype=BF16)


def test_experts_of_a_rank_that_has_whole_ones() -> None:
    shape = model.shape_of({**QWEN, "num_experts": 127}, tensor_parallel=2)
    found = precompile.spec_of(replace(shape, expert_parallel=4))
    assert found == ExpertsSpec(
        num_experts=32, hidden_size=2048, intermediate_size=768, topk=8, dtype=BF16, global_experts=127
    )


def of_sm100(shape: model.ModelShape) -> list[Any]:
    """Which of the kernels serves how many tokens is an estimate there: nothing was timed."""
    found = list(precompile.precompile_specs(shape, from_arch("sm_100a")))
    assert not all(unit.key.decodes for unit in found)
    return found


@needs_cute
def test_a_models_kernels_are_compiled_ahead() -> None:
    shape = model.shape_of(QWEN)
    found = list(precompile.precompile_specs(shape, H200))
    assert {unit.key.first.tile_m for unit in found if not unit.key.decodes} == {64, 128}
    assert {unit.key.first.tile_tokens for unit in found if unit.key.decodes} <= {8, 16, 32, 64, 80, 96, 128}
    assert any(unit.key.decodes for unit in found)
    assert precompile.served_by_others(shape, H200) == {}
    assert all(unit.key.decodes or unit.key.first.tile_m == 128 for unit in of_sm100(shape))
    assert list(precompile.precompile_specs(shape, from_arch("sm_120a"))) == []
    ((layer, (reason,)),) = precompile.served_by_others(shape, from_arch("sm_120a")).items()
    assert layer == precompile.LAYER
    assert reason.startswith("serves GPUs of sm_90a, sm_100a")


def test_a_model_without_experts_has_none() -> None:
    dense = {name: value for name, value in QWEN.items() if "expert" not in name}
    assert precompile.spec_of(model.shape_of(dense)) is None
    assert precompile.served_by_others(model.shape_of(dense), from_arch("sm_90a")) == {}


def test_a_model_whose_experts_are_unusual_says_why() -> None:
    shape = model.shape_of({**QWEN, "num_experts": 1024})
    assert precompile.served_by_others(shape, from_arch("sm_90a")) == {
        precompile.LAYER: ["num_experts is 1024: an integer from 1 to 512 is needed"]
    }


@needs_cute
def test_the_plan_says_whether_sums_are_in_order() -> None:
    from dsl_backend.experts.cute import host

    adding = spec(deterministic=False)
    assert "sums in any order" in str(adding)
    assert "sums in any order" not in str(PLAIN.spec)
    workspace = Workspace(torch.device("cpu"))
    for name, adds in (("cute", True), ("cute-grouped", True), ("cute-overlapped", True), ("cute-decode", False)):
        assert ExpertsPlan(adding, H200, workspace, name).adds == adds
        assert not ExpertsPlan(PLAIN.spec, H200, workspace, name).adds
    # Those that have no such form serve such layers in order.
    assert not api.plan(adding, "cpu").adds
    for other in (replace(SHARED.spec, deterministic=False), spec(weight=ROW_SCALED, deterministic=False)):
        assert not ExpertsPlan(other, from_arch("sm_90a"), workspace).adds
    grouped, few = (configs.choose(adding, tokens, H200) for tokens in (4096, 1))
    assert isinstance(grouped, configs.ExpertsConfig)
    assert host.key_of(adding, grouped).adds
    assert not host.key_of(adding, few).adds
    assert host.scratch_of(adding, grouped, 4096, 1, workspace).made is None


def test_the_budget_knows_that_each_addition_rounds() -> None:
    """A sum in bfloat16 is within it, and one that lost an expert is not."""
    case = replace(CASES["many-experts"], deterministic=False)
    given = tensors(case, "cpu")
    given.out.copy_(reference.exact(case.spec, given, BF16))
    judge(case, given)
    budget = of_additions(case.spec, given)
    assert bool((budget > 0).all())
    assert not of_additions(replace(case.spec, deterministic=True), given).any()
    small = tensors(replace(PLAIN, deterministic=False), "cpu")
    small.out.copy_(reference.exact(PLAIN.spec, small._replace(topk_ids=small.topk_ids.clamp(min=1)), torch.float32))
    with pytest.raises(AssertionError, match="further from the oracle than the budget"):
        judge(replace(PLAIN, deterministic=False), small)


def test_kernels_by_name_are_chosen_by_nothing_else() -> None:
    """What chooses between them serves the same layers: nobody has to read why they do not."""
    names = [entry.name for entry, _ in dispatch.judge(PLAIN.spec, H200)]
    # CuTe DSL's and Triton's, both for weights in 16 and in 8 bits.
    assert names == ["cute", "cute-scaled", "triton", "triton", "reference"]
    assert dispatch.choose(PLAIN.spec, H200).name == "cute"
    assert dispatch.choose(PLAIN.spec, H200, "cute-grouped").name == "cute-grouped"
    with pytest.raises(Unsupported) as error:
        dispatch.choose(PLAIN.spec, from_arch("sm_80"), "cute-decode")
    assert list(error.value.objections) == ["experts decode"]
