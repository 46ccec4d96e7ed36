# SPDX-License-Identifier: Apache-2.0
"""Experts of MXFP4 checkpoints under tokens in 16 bits by this package: which are served, and what comes out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.layers.fused_moe.oracle.mxfp8")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.model_loader import reload

import emulator
from dsl_backend.errors import InvalidInput
from dsl_backend.experts import ops
from dsl_backend.runtime import target as targets
from dsl_backend.vllm_plugin.routed_experts import block_scaled, serve
from dsl_backend.vllm_plugin.routed_experts.kernels import WeightOnlyDSLExperts
from integration import emulated_experts as emulated
from tests.vllm_plugin.test_block_scaled_experts import (
    EXPERTS,
    HIDDEN,
    WIDTH,
    changed,
    error,
    exact,
    experts,
    loads,
    parallel_of,
    process,
    routing,
    weights_of,
    x_of,
)
from tests.vllm_plugin.test_routed_experts import afresh, served

pytestmark = pytest.mark.usefixtures("one_rank")

__all__ = ["afresh", "loads", "served"]  # fixtures
KERNEL = "cute-weight-only"
BY_NAME: dict[str, Any] = {"additional_config": {"dsl": {"experts": "dsl", "experts_kernel": KERNEL}}}
# Of bfloat16: tokens in MXFP8 cost four times as much.
BOUND = 0.008


def served_by_name(served: Any, layer: Any) -> str:
    (line,) = served(layer, **BY_NAME)
    assert line.startswith("dsl serves 1 layers of routed experts, "), line
    return str(line)


def right_of(layer: Any, tokens: int, hidden: int = HIDDEN, width: int = WIDTH) -> torch.Tensor:
    """Of a layer that was not processed."""
    return exact(layer, weights_of(layer, hidden, width), x_of(tokens, hidden), routing(tokens))


@pytest.mark.parametrize("name", ["gpt-oss", "mxfp4"])
def test_results_are_those_of_bfloat16(name: str, served: Any) -> None:
    layer = experts(name)
    right = right_of(layer, 37)
    line = served_by_name(served, layer)
    assert f"weights in mxfp4-tiled of {HIDDEN} to {WIDTH}, top 2, bfloat16, on cpu: by experts reference" in line
    kernels = process(layer)
    assert isinstance(kernels, WeightOnlyDSLExperts)
    assert not [value for value in vars(kernels).values() if isinstance(value, torch.Tensor)], "nothing is kept"
    assert layer.w13_weight.shape == (EXPERTS, 2, 1, 1088)
    assert not hasattr(layer, "w13_weight_scale")
    for _ in range(2):
        assert 0 < error(layer.forward_modular(x_of(37), *routing(37)), right) < BOUND
        process(layer)  # a second call changes nothing


def test_what_vllm_has_padded(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read, and tokens come without it."""
    chosen = emulated.chooses(Mxfp4MoeBackend.FLASHINFER_TRTLLM_MXFP4_MXFP8)
    with monkeypatch.context() as changes:
        changes.setattr(emulated.mxfp4, "select_mxfp4_moe_backend", chosen)
        layer = experts("gpt-oss", hidden=160, width=96)
    assert layer.w13_weight.shape == (EXPERTS, 256, 128)
    layer.w2_weight.data[:, :, 48:] = 0x77
    layer.w13_weight_scale.data[:, :, 5:] = 0xFF
    right = right_of(layer, 9, 160, 96)
    assert "of 160 to 96" in served_by_name(served, layer)
    process(layer)
    assert layer.quant_method.skip_forward_padding
    assert layer.quant_method.has_unpadded_output
    assert error(layer.forward_modular(x_of(9, 160), *routing(9)), right) < BOUND


def test_padding_and_other_ranks_experts(served: Any) -> None:
    layer = experts("gpt-oss")
    served_by_name(served, layer)
    kernels = process(layer)
    x, (weights, ids) = x_of(6), routing(6)
    ids[2] = -1
    facts = {"apply_router_weight_on_input": False, "w1": layer.w13_weight, "w2": layer.w2_weight}
    facts |= {"topk_weights": weights, "a1q_scale": None, "hidden_states": x}
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    kernels.apply(output=outs[0], topk_ids=ids, expert_map=None, **facts)
    places = torch.tensor([-1, 0, -1, 1, 2, 3], dtype=torch.int32)
    named = torch.tensor([1, 3, 4, 5], dtype=torch.int32)
    elsewhere = torch.where(ids < 0, 0, named[ids.clamp(min=0).long()]).int()
    kernels.apply(output=outs[1], topk_ids=elsewhere, expert_map=places, **facts)
    assert not outs[0][2].any()
    assert torch.equal(*outs)


def test_rebalancing_moves_what_is_served(served: Any) -> None:
    layer = experts("gpt-oss")
    changed(layer, "moe_config.moe_parallel_config", parallel_of(layer, enable_eplb=True))
    served_by_name(served, layer)
    process(layer)
    x, (weights, ids) = x_of(9), routing(9)
    before = layer.forward_modular(x, weights, ids)
    for moved in layer.get_expert_weights():
        moved.copy_(moved.clone().flip(0))
    assert torch.equal(layer.forward_modular(x, weights, EXPERTS - 1 - ids), before)
    assert not torch.equal(layer.forward_modular(x, weights, ids), before)


def test_vllms_reload(served: Any) -> None:
    """New values, in the memory that captured graphs read."""
    layer, other = experts("gpt-oss"), experts("gpt-oss")
    for parameter in other.parameters():
        parameter.data.copy_(parameter.data.flip(0))
    new = {name: parameter.data.clone() for name, parameter in other.named_parameters()}
    right = right_of(other, 9)
    model = nn.ModuleList([layer])
    reload.record_metadata_for_reloading(model)
    served_by_name(served, layer)
    process(layer)
    places = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    before = layer.forward_modular(x_of(9), *routing(9))
    assert error(before, right) > BOUND
    with set_current_vllm_config(VllmConfig()):
        reload.initialize_layerwise_reload(model)
        for name, value in new.items():
            parameter, facts = getattr(layer, name), {"weight_name": name, "shard_id": None, "expert_id": None}
            parameter.weight_loader(parameter, value, **facts)
        reload.finalize_layerwise_reload(model, None)
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == places
    assert error(layer.forward_modular(x_of(9), *routing(9)), right) < BOUND


def scale_of(code: int) -> Any:
    """A layer with a scale that kernels have not."""
    layer = experts("gpt-oss")
    layer.w2_weight.data[1, 5] = 0x11
    layer.w2_weight_scale.data[1, 5, 0] = code
    return layer


STAY: dict[str, tuple[Callable[[], Any], str]] = {
    "large": (lambda: scale_of(190), "the largest scale is 2^63: 2^-93 to 2^33 are possible"),
    "small": (lambda: scale_of(3), "the smallest scale is 2^-124: 2^-93 to 2^33 are possible"),
    "dtype": (
        lambda: changed(experts("mxfp4"), "moe_config.in_dtype", torch.float16),
        "dtype float16: bfloat16 is needed with weights in mxfp4-tiled",
    ),
    "up-rows": (
        lambda: changed(experts("mxfp4"), "moe_config.intermediate_size_per_partition_unpadded", 32),
        "vLLM has padded 32 columns to 64 for other kernels: up rows lie apart",
    ),
    "other": (
        lambda: experts("nvfp4"),
        "no kernel for experts (Swiglu(alpha=1.0, beta=0.0, limit=None) of 4 experts",
    ),
    "made": (
        lambda: changed(experts("mxfp4"), "quant_method.moe_kernel", object()),
        "vLLM has no kernels to replace, or has made them already",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str, served: Any) -> None:
    make, says = STAY[name]
    layer = make()
    before = layer.quant_method
    (line,) = served(layer, **BY_NAME)
    assert line.startswith(f"vLLM serves 1 layers of routed experts: {says}"), line
    assert layer.quant_method is before


def test_blocks_of_zeros_may_have_any_scale(served: Any) -> None:
    layer = scale_of(190)
    layer.w2_weight.data[1, 5, :16] = 0x80
    served_by_name(served, layer)


def test_a_scale_that_is_reloaded_is_refused_too(served: Any) -> None:
    layer = experts("mxfp4")
    served_by_name(served, layer)
    layer.w13_weight.data[0, 0] = 0x11
    layer.w13_weight_scale.data[0, 0, 0] = 255
    with pytest.raises(InvalidInput, match=r"the largest scale is 2\^128 \(NaN\)"):
        process(layer)


def test_by_name_alone(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    begun: list[Any] = []
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: targets.from_arch("sm_90a"))
    monkeypatch.setattr(serve.ahead, "compile_experts", lambda config, layers: begun.extend(layers))
    (line,) = served(experts("gpt-oss"))
    assert "mxfp4 needs experts_kernel 'cute-weight-only': these kernels are slow for many tokens" in line
    line = served_by_name(served, experts("gpt-oss"))
    assert line.endswith(", on sm_90a: by experts mxfp4 under 16 bits sm90/sm100")
    assert [kernel for _, kernel in begun] == [KERNEL]
    assert list(serve.served_layers()) == begun
    assert serve.compilation_key().endswith("WeightOnlyDSLExperts cute-weight-only")
    units = list(serve.ahead.experts_units(begun[0], targets.from_arch("sm_90a")))
    assert {unit.key.decodes for unit in units} == {False, True}
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: targets.from_arch("sm_100a"))
    line = served_by_name(served, experts("gpt-oss"))
    assert line.endswith(", on sm_100a: by experts mxfp4 under 16 bits sm90/sm100")
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: targets.from_arch("sm_80"))
    (line,) = served(experts("gpt-oss"), **BY_NAME)
    assert line.startswith("vLLM serves 1 layers of routed experts: ")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("arch", "tokens", "launches"), [("sm_90a", 5, 2), ("sm_90a", 40, 4), ("sm_100a", 5, 2), ("sm_100a", 70, 4)]
)
def test_by_the_kernels_of_a_gpu(
    arch: str, tokens: int, launches: int, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's kernel object launches an SM's kernels on the emulator, with padding behind the tokens."""
    pytest.importorskip("cutlass")
    gpu = replace(targets.from_arch(arch), sm_count=4)
    layer = experts("gpt-oss", hidden=160, width=96)
    wide = weights_of(layer, 160, 96)
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: gpu)
    served_by_name(served, layer)
    x, given = x_of(tokens, 160), routing(tokens)
    given[1][-1] = -1
    right = exact(layer, wide, x, given)
    process(layer)
    monkeypatch.setattr(ops.api.targets, "detect", lambda device: gpu)
    with emulator.device(arch=arch, sms=4, strict=True) as device:
        out = layer.forward_modular(x, *given)
        assert device.launches == launches
    assert not out[-1].any()
    assert error(out, right) < BOUND


def test_mistakes_are_found(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests would say of parameters that are laid out otherwise."""
    right = block_scaled.pack_experts

    def apart(*given: torch.Tensor, parts: int, interleaved: bool) -> torch.Tensor:
        return right(*given, parts=parts, interleaved=not interleaved)

    def reversed_parts(*given: torch.Tensor, **facts: Any) -> torch.Tensor:
        packed = right(*given, **facts)
        return torch.cat(packed.chunk(facts["parts"], 1)[::-1], 1)

    for mistake in (apart, reversed_parts):
        layer = experts("gpt-oss")
        wanted = right_of(layer, 9)
        served_by_name(served, layer)
        with monkeypatch.context() as changes:
            changes.setattr(block_scaled, "pack_experts", mistake)
            process(layer)
        assert error(layer.forward_modular(x_of(9), *routing(9)), wanted) > 10 * BOUND
