# SPDX-License-Identifier: Apache-2.0
"""Routed experts of vLLM's that this package serves: which do, what comes out, and what the log says."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm import envs as vllm_envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import utils as vllm_utils
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul, SiluAndMulWithClamp, SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.model_loader import reload

import emulator
from dsl_backend.errors import InvalidInput
from dsl_backend.experts import ops, reference, tuned
from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.activation import SWIGLU_OAI, Swiglu
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, ROW_SCALED
from dsl_backend.quant.reference import quantized
from dsl_backend.runtime import target as targets
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import ahead, compat, warm_up
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.fused_mlp import fuse
from dsl_backend.vllm_plugin.routed_experts import kernels as routed_experts_kernels
from dsl_backend.vllm_plugin.routed_experts import serve
from dsl_backend.vllm_plugin.routed_experts.kernels import (
    BatchedDSLExperts,
    DSLExperts,
    MeasuredExperts,
    MeasuredScaledExperts,
    ScaledDSLExperts,
    block_ids,
)
from integration.quantization import BLOCKS, CHANNELS

pytestmark = pytest.mark.usefixtures("one_rank")

# 0.26 has another name for it.
FACTORY = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
BF16 = torch.bfloat16
EXPERTS, TOPK, HIDDEN, WIDTH = 4, 2, 64, 32
SERVED_BY_DSL = {"dsl": {"experts": "dsl"}}


class Workspaces:
    """In the place of vLLM's manager of scratch: new memory for each call."""

    def get_simultaneous(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, and the reference serves: kernels are compared with it elsewhere."""
    monkeypatch.setattr(serve, "_served", [])
    # vLLM for CUDA, and 0.26, ask a manager of a GPU's memory.
    monkeypatch.setattr(modular_kernel, "current_workspace_manager", Workspaces)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.no_grad():
        yield


def experts(*, experts: int = EXPERTS, hidden: int = HIDDEN, width: int = WIDTH, **options: Any) -> Any:
    """A layer as vLLM's models make it, with weights."""
    options = {"top_k": TOPK, "params_dtype": BF16, "prefix": "experts", **options}
    with set_current_vllm_config(VllmConfig()):
        runner = FACTORY(num_experts=experts, hidden_size=hidden, intermediate_size=width, **options)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in runner.routed_experts.named_parameters():
        scale = 0.5 if "bias" in name else 2 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return runner.routed_experts


def engine(**changes: Any) -> Any:
    """As much of a VllmConfig as is read."""
    facts: dict[str, Any] = {
        "attention_config": SimpleNamespace(backend=ensure_member()),
        "device_config": SimpleNamespace(device=torch.device("cpu")),
        "lora_config": None,
        "model_config": None,
        "additional_config": SERVED_BY_DSL,
        "parallel_config": SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=2048),
    }
    return SimpleNamespace(**facts | changes)


def is_served(layer: Any) -> bool:
    return issubclass(layer.quant_method.experts_cls, DSLExperts)


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Serves layers; what the log says then."""

    def function(*layers: nn.Module, **changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            serve.serve_experts(nn.ModuleList(layers), engine(**changes))
        return [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]

    return function


def process(layer: Any) -> Any:
    """As vLLM's loaders do; returns the kernel that vLLM made."""
    with set_current_vllm_config(VllmConfig()):
        layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.moe_kernel


def routing(tokens: int, experts: int = EXPERTS, topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(tokens, experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(topk)
    return weights, ids.int()


def x_of(tokens: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def expected(
    layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, act: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Token by token, with one of vLLM's own activations; an id of -1 adds nothing."""
    out = torch.zeros(x.shape, dtype=dtype)
    for token, slot in torch.ones_like(ids).nonzero().tolist():
        expert = int(ids[token, slot])
        if expert < 0:
            continue

        def biased(name: str, product: torch.Tensor, expert: int = expert) -> torch.Tensor:
            bias = getattr(layer, name, None)
            return product if bias is None else product + bias[expert].to(dtype)

        row = x[token : token + 1].to(dtype)
        inner = act.forward_native(biased("w13_bias", row @ layer.w13_weight[expert].to(dtype).T))
        made = biased("w2_bias", inner @ layer.w2_weight[expert].to(dtype).T)
        out[token] += (weights[token, slot].to(dtype) * made)[0]
    return out


def judged(layer: Any, act: Any, tokens: int = 9, **more: Any) -> torch.Tensor:
    """What vLLM's kernel object returns is as good as the same maths in x's dtype."""
    x, (weights, ids) = x_of(tokens, layer.w13_weight.dtype), routing(tokens)
    out: torch.Tensor = layer.forward_modular(x, weights, ids)
    assert_within_budget(
        out, expected(layer, x, weights, ids, act, torch.float64), expected(layer, x, weights, ids, act, x.dtype)
    )
    return out


# What comes out.

LAYERS: dict[str, tuple[dict[str, Any], Any]] = {
    "silu": ({}, SiluAndMul),
    "fp16": ({"params_dtype": torch.float16}, SiluAndMul),
    "gelu": ({"activation": "gelu"}, GeluAndMul),
    "gelu-tanh": ({"activation": "gelu_tanh"}, lambda: GeluAndMul("tanh")),
    "clamp": ({"swiglu_limit": 1.5}, lambda: SiluAndMulWithClamp(1.5)),
    "gpt-oss": ({"activation": "swigluoai", "has_bias": True}, SwigluOAIAndMul),
    "minimax": (
        {"activation": "swigluoai_uninterleave", "swiglu_limit": 1.5, "swiglu_alpha": 1.7, "swiglu_beta": 0.5},
        lambda: SiluAndMulWithClamp(1.5, 1.7, 0.5),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's CPU kernels know fewer activations than a GPU's: the layer is made all the same.
    monkeypatch.setattr(cpu_moe.CPUUnquantizedExperts, "_supports_activation", staticmethod(lambda activation: True))
    options, act = LAYERS[name]
    layer = experts(**options)
    (line,) = served(layer)
    assert line.startswith("dsl serves 1 layers of routed experts, ")
    assert isinstance(process(layer).fused_experts, DSLExperts)
    judged(layer, act())


def test_padding_and_numbers_beyond_the_last(served: Any) -> None:
    layer = experts()
    served(layer)
    process(layer)
    x, (weights, ids) = x_of(5), routing(5)
    ids[1, 0], ids[2] = -1, EXPERTS
    weights[1, 0] = torch.nan
    out = layer.forward_modular(x, weights, ids)
    assert not out[2].any(), "a number that is no expert's is no memory's either"
    clean = torch.where(ids >= EXPERTS, -1, ids)
    want = [expected(layer, x, weights, clean, SiluAndMul(), dtype) for dtype in (torch.float64, BF16)]
    assert_within_budget(out, *want)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_other_ranks_experts(ids_dtype: torch.dtype, served: Any) -> None:
    """VLLM's expert map: this rank has experts 1, 3, 5 and 7 of 8."""
    layer = experts()
    served(layer)
    kernel = process(layer)
    numbers = torch.full((8,), -1, dtype=torch.int32)
    numbers[1::2] = torch.arange(4, dtype=torch.int32)
    x, (weights, ids) = x_of(6), routing(6, experts=8)
    out = kernel.apply(
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights.to(BF16),
        topk_ids=ids.to(ids_dtype),
        activation=layer.activation,
        global_num_experts=8,
        expert_map=numbers,
        apply_router_weight_on_input=False,
    )
    local = numbers[ids.long()]
    want = [expected(layer, x, weights.to(BF16), local, SiluAndMul(), dtype) for dtype in (torch.float64, BF16)]
    assert_within_budget(out, *want)


def test_weights_on_the_input(served: Any) -> None:
    layer = experts(top_k=1, apply_router_weight_on_input=True)
    served(layer)
    process(layer)
    x, (weights, ids) = x_of(7), routing(7, topk=1)
    out = layer.forward_modular(x, weights, ids)
    scaled, ones = x * weights.to(BF16), torch.ones_like(weights)
    want = [expected(layer, scaled, ones, ids, SiluAndMul(), dtype) for dtype in (torch.float64, BF16)]
    assert_within_budget(out, *want)


def test_no_tokens(served: Any) -> None:
    """A rank that no other rank sent a token to."""
    layer = experts()
    served(layer)
    process(layer)
    assert layer.forward_modular(x_of(0), *routing(0)).shape == (0, HIDDEN)


def test_weights_of_another_layout_are_refused_at_the_call(served: Any) -> None:
    """As if another kernel's layout were loaded into a served layer."""
    layer = experts()
    served(layer)
    process(layer)
    layer.w13_weight = nn.Parameter(layer.w13_weight.mT.contiguous(), requires_grad=False)
    layer.w13_weight.data = layer.w13_weight.data[:, :, : 2 * WIDTH - 8]
    with pytest.raises(InvalidInput, match=r"w13 has shape \(4, 64, 56\): \[4, 64, 64\] is needed"):
        layer.forward_modular(x_of(3), *routing(3))


def test_weights_are_read_at_each_call(served: Any) -> None:
    """Processed again after a reload, experts swapped between ranks in place, memory elsewhere."""
    layer = experts()
    served(layer)
    kernel, place = process(layer), layer.w13_weight.data_ptr()
    before = judged(layer, SiluAndMul())
    layer.w13_weight.copy_(layer.w13_weight * 0.5)
    assert process(layer) is kernel, "graphs have captured it"
    assert layer.w13_weight.data_ptr() == place
    halved = judged(layer, SiluAndMul())
    assert not torch.equal(before, halved)
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.copy_(weight.flip(0))
    judged(layer, SiluAndMul())
    layer.w2_weight.data = layer.w2_weight.data * 3
    judged(layer, SiluAndMul())


def test_vllms_reload(served: Any) -> None:
    """Its own, expert by expert: new values, in the memory that captured graphs read."""
    layer = experts()
    model = nn.ModuleList([layer])
    reload.record_metadata_for_reloading(model)
    served(layer)
    kernel = process(layer)
    before, places = judged(layer, SiluAndMul()), [layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()]
    generator = torch.Generator().manual_seed(9)
    with set_current_vllm_config(VllmConfig()):
        reload.initialize_layerwise_reload(model)
        for expert in range(EXPERTS):
            for shard, name, shape in (
                ("w1", "w13", (WIDTH, HIDDEN)),
                ("w3", "w13", (WIDTH, HIDDEN)),
                ("w2", "w2", None),
            ):
                parameter = getattr(layer, f"{name}_weight")
                values = torch.randn(shape or (HIDDEN, WIDTH), generator=generator).to(BF16) * 0.25
                parameter.weight_loader(parameter, values, f"{name}_weight", shard_id=shard, expert_id=expert)
        reload.finalize_layerwise_reload(model, None)
    assert [layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()] == places
    assert layer.quant_method.moe_kernel is kernel
    assert not torch.equal(judged(layer, SiluAndMul()), before)


def test_rebalancing_moves_what_is_served(served: Any) -> None:
    """What EPLB copies experts into is the memory that kernels are handed."""
    layer = experts()
    served(layer)
    process(layer)
    before = judged(layer, SiluAndMul())
    for weights in layer.get_expert_weights():
        weights.copy_(weights.flip(0))
    assert not torch.equal(judged(layer, SiluAndMul()), before)


def test_nothing_of_a_layer_is_kept(served: Any) -> None:
    """No copy of the weights and no pointer to them: vLLM's parameters are the only ones."""
    layer = experts(activation="swigluoai", has_bias=True)
    served(layer)
    kernels = process(layer).fused_experts
    held = [value for value in vars(kernels).values() if isinstance(value, torch.Tensor)]
    assert held == []
    assert kernels.w1_bias is layer.w13_bias


@pytest.mark.parametrize("counts", [(3, 0, 6, 1), (0, 0, 0, 0)])
def test_batched_format(counts: tuple[int, ...]) -> None:
    """Blocks of rows by expert, of which the first count."""
    layer = experts()
    method = layer.quant_method
    kernels = BatchedDSLExperts(
        layer.moe_config, method.get_fused_moe_quant_config(layer), max_num_tokens=6, num_dispatchers=1
    )
    x = torch.randn(EXPERTS, 6, HIDDEN, generator=torch.Generator().manual_seed(5)).to(BF16)
    for block, count in zip(x, counts, strict=True):
        block[count:] = torch.nan
    out = torch.empty_like(x)
    ids = block_ids(torch.tensor(counts), 6)
    kernels.apply(
        output=out,
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        expert_tokens_meta=SimpleNamespace(expert_num_tokens=torch.tensor(counts)),
    )
    rows, ones = x.view(-1, HIDDEN).nan_to_num(), torch.ones(ids.shape)
    want = [expected(layer, rows, ones, ids, SiluAndMul(), dtype) for dtype in (torch.float64, BF16)]
    assert_within_budget(out.view(-1, HIDDEN), *want)


def test_batched_format_in_vllm() -> None:
    """Its own preparation and finalization around our class."""
    layer = experts()
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    kernels = BatchedDSLExperts(layer.moe_config, config, max_num_tokens=16, num_dispatchers=1)
    exchange = BatchedPrepareAndFinalize(max_num_tokens=16, num_local_experts=EXPERTS, num_dispatchers=1, rank=0)
    kernel = modular_kernel.FusedMoEKernel(exchange, kernels)
    x, (weights, ids) = x_of(9), routing(9)
    out = kernel.apply(
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=ids,
        activation=layer.activation,
        global_num_experts=EXPERTS,
        expert_map=None,
        apply_router_weight_on_input=False,
    )
    # vLLM rounds each expert's weighted rows before it adds them up.
    want = [expected(layer, x, weights, ids, SiluAndMul(), dtype) for dtype in (torch.float64, BF16)]
    assert_within_budget(out, *want)


# Which are served.


def test_every_layer_of_a_model(served: Any) -> None:
    """One line for each kind; the reason for what better kernels lack is in it."""
    layers = [experts(prefix=f"layer{index}") for index in range(3)]
    lines = served(*layers, experts(prefix="other", width=48), nn.Linear(3, 3))
    assert len(lines) == 2
    what = f"dsl serves 3 layers of routed experts, {Swiglu()} of 4 experts of 64 to 32, top 2, bfloat16, on cpu: by "
    assert lines[0].startswith(
        what + "experts reference (not by experts sm90/sm100: serves GPUs of sm_90a, sm_100a, sm_103a, this is cpu"
    )
    assert lines[1].startswith("dsl serves 1 layers of routed experts")
    assert all(map(is_served, layers))


def test_a_second_call_changes_nothing(served: Any) -> None:
    layer = experts()
    assert len(served(layer)) == 1
    assert served(layer) == []
    assert is_served(layer)


def changed(layer: Any, attribute: str, value: Any) -> Any:
    """A layer with an attribute of its configuration set."""
    owner, _, name = attribute.rpartition(".")
    target = layer
    for part in filter(None, owner.split(".")):
        target = getattr(target, part)
    setattr(target, name, value)
    return layer


def another_method() -> Any:
    layer = experts()
    layer.quant_method.__class__ = type("Int8MoEMethod", (UnquantizedFusedMoEMethod,), {})
    return layer


def of_another_layout() -> Any:
    layer = experts()
    layer.w13_weight = nn.Parameter(layer.w13_weight.mT, requires_grad=False)
    return layer


def padded() -> Any:
    layer = experts()
    return changed(layer, "moe_config.intermediate_size_per_partition_unpadded", WIDTH - 8)


STAY: dict[str, tuple[Callable[[], Any], str]] = {
    "quantised": (another_method, "Int8MoEMethod is not vLLM's method of 16-bit weights, or of e4m3"),
    "float32": (lambda: experts(params_dtype=torch.float32), "dtype is float32: one of float16, bfloat16 is needed"),
    "no-gate": (
        lambda: changed(experts(), "moe_config.activation", fused_moe.MoEActivation.RELU2_NO_MUL),
        "kernel does not support no act_and_mul MLP layer",
    ),
    "activation": (
        lambda: changed(experts(), "moe_config.activation", fused_moe.MoEActivation.SWIGLUSTEP),
        "kernel does not support MoEActivation.SWIGLUSTEP activation",
    ),
    "clamped-gelu": (
        lambda: experts(activation="gelu", swiglu_limit=2.0),
        "activation GELU with limit 2.0, alpha 1.0 and beta 0.0 is not served: SILU, GELU, GELU_TANH, SWIGLUOAI",
    ),
    "other-oai": (
        lambda: experts(activation="swigluoai", swiglu_limit=5.0),
        "activation SWIGLUOAI with limit 5.0, alpha 1.0 and beta 0.0 is not served",
    ),
    "layout": (of_another_layout, "w13 has shape (4, 64, 64) and strides (4096, 1, 64): packed [4, 64, 64] is needed"),
    "padded": (padded, "vLLM has padded the sizes (64, 24) to (64, 32) for other kernels: use --moe-backend triton"),
    "asked": (
        lambda: changed(experts(), "moe_config.moe_backend", "flashinfer_cutlass"),
        "--moe-backend flashinfer_cutlass asks for vLLM's kernels",
    ),
    "deferred": (
        lambda: changed(experts(), "moe_config._defer_moe_finalize", True),
        "the model adds up a token's experts itself",
    ),
    "lora": (lambda: changed(experts(), "moe_config.is_lora_enabled", True), "kernel does not support LoRA"),
    "exchange": (
        lambda: changed(
            experts(), "moe_config.moe_parallel_config", SimpleNamespace(use_fi_nvl_two_sided_kernels=True)
        ),
        "kernel does not support parallel config",
    ),
    "made": (
        lambda: changed(experts(), "quant_method.moe_kernel", object()),
        "vLLM has no kernels to replace, or has made them already",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str, served: Any) -> None:
    """Beside one that is served; the reason is said once, with how many it is about."""
    make, says = STAY[name]
    odd, usual = [make(), make()], experts(prefix="usual")
    before = [one.quant_method.experts_cls for one in odd]
    lines = served(*odd, usual)
    assert is_served(usual)
    assert [one.quant_method.experts_cls for one in odd] == before
    assert len(lines) == 2
    assert lines[1].startswith(f"vLLM serves 2 layers of routed experts: {says}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_config": SimpleNamespace()}, "LoRA (lora_config) adds to what both products return"),
        ({"additional_config": {"dsl": {"experts": "vllm"}}}, "additional_config['dsl']['experts'] is vllm"),
        (
            {"scheduler_config": SimpleNamespace(max_num_batched_tokens=1 << 18)},
            "a step may have 262144 rows: 131072 are the most",
        ),
    ],
)
def test_engines_that_serve_none(changes: dict[str, Any], says: str, served: Any) -> None:
    layers = [experts(prefix="a"), experts(prefix="b")]
    (line,) = served(*layers, **changes)
    assert line.startswith(f"vLLM serves 2 layers of routed experts: {says}")
    assert not any(map(is_served, layers))


def test_batch_invariance(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not promised: other numbers of tokens have other tiles."""
    layer = experts()
    monkeypatch.setattr(vllm_envs, "VLLM_BATCH_INVARIANT", True)
    assert "kernel does not support batch invariance" in served(layer)[0]
    assert not is_served(layer)


@pytest.mark.skipif(not hasattr(vllm_utils, "is_weights_pre_processed"), reason="this vLLM shares no weights")
def test_weights_of_another_process(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts()
    monkeypatch.setattr(vllm_utils, "is_weights_pre_processed", lambda: True)
    assert "the weights were laid out by another process" in served(layer)[0]
    assert not is_served(layer)


def test_layers_of_an_unknown_version(served: Any) -> None:
    layer = experts()
    del layer.moe_config.experts_per_token
    (line,) = served(layer)
    assert "vLLM's layer is not as it was expected: " in line
    assert "experts_per_token" in line
    assert not is_served(layer)


def test_a_version_without_such_layers(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts()
    monkeypatch.setattr(compat, "has_routed_experts", lambda: False)
    assert served(layer) == []
    assert not is_served(layer)


def test_another_backend(served: Any) -> None:
    layer = experts()
    assert served(layer, attention_config=SimpleNamespace(backend=SimpleNamespace(name="FLASH_ATTN"))) == []
    assert not is_served(layer)


def test_a_model_without_experts(served: Any) -> None:
    assert served(nn.Linear(2, 2)) == []


def test_kernels_that_would_change_weights_are_not_asked_for(served: Any) -> None:
    """On SM100 vLLM's first choice shuffles them; where dsl is asked for it takes them as they are."""
    layer = experts()
    backend = type(layer.quant_method.unquantized_backend)
    layer.quant_method.unquantized_backend = backend.FLASHINFER_CUTLASS
    served(layer)
    assert layer.quant_method.unquantized_backend is backend.TRITON
    process(layer)
    judged(layer, SiluAndMul())


def test_kernels_outside_of_these_classes(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.26 has them on a CPU."""
    layer = experts()
    monkeypatch.setattr(type(layer.quant_method), "is_monolithic", True)
    monkeypatch.setattr(layer.quant_method, "unquantized_backend", type(layer.quant_method.unquantized_backend).CPU)
    assert "vLLM has no kernels to replace, or has made them already" in served(layer)[0]
    assert not is_served(layer)


def test_exchanges_with_wide_numbers() -> None:
    wide = SimpleNamespace(use_deepep_ht_kernels=True)
    assert compat.expert_ids_dtype(wide) is torch.int64
    assert compat.expert_ids_dtype(SimpleNamespace()) is torch.int32


# Where nothing is asked for, measurements decide.


class Triton(modular_kernel.FusedMoEExpertsModular):
    """In the place of vLLM's Triton kernels, which a CPU build lacks: returns the number of tokens."""

    activation_format = staticmethod(lambda: modular_kernel.FusedMoEActivationFormat.Standard)
    _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(lambda *_: True)

    def workspace_shapes(self, M: int, N: int, K: int, *others: Any) -> Any:
        return (M, 3), (M, 5), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return DSLExperts.finalize_weight_and_reduce_impl(self)  # type: ignore[arg-type]

    def apply(self, output: torch.Tensor, **given: Any) -> None:
        output.fill_(len(output))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the layer: faster from 3 to 5 tokens, and from 9 on, on a GPU in the place of this CPU."""
    gpu = targets.from_arch("sm_90a")
    monkeypatch.setattr(fused_moe, "TritonExperts", Triton, raising=False)

    def faster(spec: Any, target: Any) -> list[Any]:
        problem = tuned.problem_of(spec, gpu.sm_count)
        return [problem.of_rows(3, 5), problem.of_rows(9, 100)]

    monkeypatch.setattr(tuned, "faster", faster)
    tuned.is_faster.cache_clear()
    yield
    tuned.is_faster.cache_clear()


def by_triton(layer: Any) -> Any:
    """A layer for which vLLM would choose its Triton kernels, as it does on SM90."""
    layer.quant_method.unquantized_backend = type(layer.quant_method.unquantized_backend).TRITON
    layer.quant_method.experts_cls = Triton
    return layer


@pytest.mark.usefixtures("measured")
def test_others_than_triton_were_not_measured(served: Any) -> None:
    layer = experts()
    theirs = layer.quant_method.experts_cls.__name__
    (line,) = served(layer, additional_config={})
    assert line.endswith(f"dsl was measured to be faster than vLLM's Triton kernels, and not than {theirs}")
    assert not is_served(layer)


@pytest.mark.usefixtures("measured")
def test_measured_tokens(served: Any) -> None:
    layer = by_triton(experts())
    lines = served(layer, additional_config={})
    assert lines[0].startswith("dsl serves 1 layers of routed experts")
    assert lines[1:] == ["dsl's serve routed experts for 3 to 5, 9 to 100 tokens, vLLM's Triton kernels do for others"]
    kernel = process(layer)
    assert isinstance(kernel.fused_experts, MeasuredExperts)
    sizes = (7, 2 * WIDTH, HIDDEN, TOPK, EXPERTS, EXPERTS, None, layer.activation)
    assert kernel.fused_experts.workspace_shapes(*sizes) == ((7, 3), (7, 5), (7, HIDDEN))
    for tokens in (1, 3, 5, 6, 9):
        out = layer.forward_modular(x_of(tokens), *routing(tokens))
        theirs = bool((out == tokens).all())
        assert theirs == (tokens in (1, 6)), tokens
        if not theirs:
            judged(layer, SiluAndMul(), tokens)


@pytest.mark.usefixtures("measured")
def test_what_is_asked_for_is_not_measured(served: Any) -> None:
    layer = changed(experts(), "moe_config.moe_backend", "triton")
    assert "--moe-backend triton asks for vLLM's kernels" in served(layer, additional_config={})[0]
    assert len(served(layer)) == 1
    assert layer.quant_method.experts_cls is DSLExperts


def test_without_measurements_they_stay(served: Any) -> None:
    layer = experts()
    (line,) = served(layer, additional_config={})
    assert line.startswith(
        "vLLM serves 1 layers of routed experts: nothing measured says that dsl is faster for Swiglu("
    )
    assert """--additional-config '{"dsl": {"experts": "dsl"}}' has dsl serve them""" in line
    assert not is_served(layer)


# Compiled before they serve.


def config_of(**changes: Any) -> Any:
    text = {
        "num_attention_heads": 8,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "vocab_size": 1000,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    }
    facts: dict[str, Any] = {
        "model_config": SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: text), dtype="torch.bfloat16"),
        "parallel_config": SimpleNamespace(tensor_parallel_size=2, enable_expert_parallel=False),
        "compilation_config": SimpleNamespace(pass_config=SimpleNamespace()),
        "speculative_config": None,
    }
    return engine(**facts | changes)


def test_warm_up_compiles_what_is_served(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setattr(fuse, "_fused", [])
    served(experts(prefix="a"), experts(prefix="b"))
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_90a"))
    keys = [one.key for one in warm_up.precompile_specs(config_of()) if one.family == "experts"]
    assert keys
    assert all(key.num_experts == EXPERTS for key in keys), "only what is served"
    assert len(set(keys)) == len(keys)


def test_warm_up_compiles_tritons_too(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(fuse, "_fused", [])
    served(experts())
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_80"))
    (unit,) = [one for one in warm_up.precompile_specs(config_of()) if one.family == "experts"]
    assert unit.build.__module__ == "dsl_backend.experts.triton.kernels"


@pytest.mark.parametrize(
    ("changes", "predicted"),
    [
        ({}, True),
        ({"additional_config": {}}, False),
        ({"additional_config": {"dsl": {"experts": "vllm"}}}, False),
        ({"lora_config": SimpleNamespace()}, False),
        ({"quant_config": SimpleNamespace()}, False),
    ],
)
def test_what_is_compiled_while_weights_load(changes: dict[str, Any], predicted: bool) -> None:
    """A rank's share of the width, as the model's configuration has it."""
    pytest.importorskip("cutlass")
    keys = [
        one.key for one in ahead.predicted(config_of(**changes), targets.from_arch("sm_90a")) if one.family == "experts"
    ]
    assert bool(keys) == predicted
    assert all((key.topk, key.num_experts, key.mapped) == (4, 16, False) for key in keys)


def test_whole_experts_are_predicted_too() -> None:
    pytest.importorskip("cutlass")
    ranks = SimpleNamespace(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    found = ahead.predicted(config_of(parallel_config=ranks), targets.from_arch("sm_90a"))
    keys = [one.key for one in found if one.family == "experts"]
    assert keys
    assert all((key.num_experts, key.mapped) == (4, True) for key in keys)


def test_what_is_served_is_compiled_ahead(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(serve.ahead, "compile_experts", lambda config, layers: begun.extend(layers))
    served(experts(prefix="a"), experts(prefix="b"))
    assert begun == list(serve.served_layers())
    assert len(begun) == 1


def test_gpt_oss_is_recognised(served: Any) -> None:
    layer = experts(activation="swigluoai", has_bias=True)
    served(layer)
    ((spec, kernel),) = serve.served_layers()
    assert kernel is None
    assert (spec.activation, spec.interleaved, spec.w13_bias, spec.w2_bias) == (SWIGLU_OAI, True, True, True)


@pytest.mark.parametrize("tokens", [3, pytest.param(150, marks=pytest.mark.rest)])
def test_by_the_kernels_of_a_gpu(tokens: int, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's kernel object launches CuTe DSL's kernels on the emulator, with padding behind the tokens."""
    pytest.importorskip("cutlass")
    gpu = replace(targets.from_arch("sm_90a"), sm_count=4)
    layer = experts()
    served(layer)
    process(layer)
    monkeypatch.setattr(ops.api.targets, "detect", lambda device: gpu)
    ops.plan_of.cache_clear()
    x, (weights, ids) = x_of(tokens), routing(tokens)
    ids[-1] = -1
    with emulator.device(arch="sm_90a", sms=4, strict=True) as device:
        out = layer.forward_modular(x, weights, ids)
        assert device.launches > 1
    ops.plan_of.cache_clear()
    assert not out[-1].any()
    want = [expected(layer, x, weights, ids, SiluAndMul(), dtype) for dtype in (torch.float64, BF16)]
    assert_within_budget(out, *want)


# Weights in 8 bits.

WIDE, DEEP = 128, 256
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# vLLM's configurations, by what a layer's weights have scales of.
CHECKPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": (Fp8Config, BLOCKS),
    "channels": (CompressedTensorsConfig, CHANNELS),
    "one-scale": (Fp8Config, FP8),
    "small-blocks": (Fp8Config, FP8 | {"weight_block_size": [64, 64]}),
}


def scaled_experts(kind: str = "blocks", prefix: str = "model.layers.0.mlp.experts", **options: Any) -> Any:
    """A layer of an fp8 checkpoint, with weights and scales."""
    config, facts = CHECKPOINTS[kind]
    sizes = {"num_experts": EXPERTS, "hidden_size": DEEP, "intermediate_size": WIDE, "top_k": TOPK}
    with set_current_vllm_config(VllmConfig()):
        made = config.from_config(facts)
        runner = FACTORY(**{**sizes, "params_dtype": BF16, "prefix": prefix, "quant_config": made, **options})
    generator = torch.Generator().manual_seed(1)
    for name, parameter in runner.routed_experts.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        of_scale = (values.abs() + 0.5) / 64 * DEEP**-0.5
        parameter.data.copy_(of_scale if "scale" in name else (64 * values).clamp(-448, 448))
    return runner.routed_experts


def scaled_rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, DEEP, generator=torch.Generator().manual_seed(2)).to(BF16)


class BatchedTriton(Triton):
    activation_format = staticmethod(lambda: modular_kernel.FusedMoEActivationFormat.BatchedExperts)


def operands_of(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[Any, Any]:
    """(spec, operands) of what a layer of an fp8 checkpoint is given."""
    blocked = hasattr(layer, "w13_weight_scale_inv")
    scales = [
        getattr(layer, f"{name}_weight_scale_inv") if blocked else getattr(layer, f"{name}_weight_scale").squeeze(-1)
        for name in ("w13", "w2")
    ]
    spec = ExpertsSpec(
        num_experts=EXPERTS,
        hidden_size=DEEP,
        intermediate_size=WIDE,
        topk=TOPK,
        dtype=BF16,
        weight=BLOCK_SCALED if blocked else ROW_SCALED,
    )
    given = ExpertsOperands(
        x, layer.w13_weight, layer.w2_weight, weights, ids, None, None, None, x.clone(), ExpertsScales(*scales)
    )
    return spec, given


def test_layers_in_8_bits(served: Any) -> None:
    """The operator gets vLLM's parameters, as they are at each call."""
    for kind in ("blocks", "channels"):
        layer = scaled_experts(kind)
        (line,) = served(layer)
        formats = {"blocks": "e4m3-128x128", "channels": "e4m3-row"}
        assert f"weights in {formats[kind]} of 256 to 128, top 2, bfloat16" in line
        kernel = process(layer)
        assert isinstance(kernel.fused_experts, ScaledDSLExperts)
        x, (weights, ids) = scaled_rows(9), routing(9)
        ids[3] = -1
        for factor in (1, 3):
            for name, parameter in layer.named_parameters():
                if "scale" in name:
                    parameter.mul_(factor)
            spec, given = operands_of(layer, x, weights, ids)
            want = reference.exact(spec, given, torch.float32).to(BF16)
            assert want[0].any(), "or nothing is compared"
            assert torch.equal(layer.forward_modular(x, weights, ids), want), (kind, factor)


def test_nothing_of_a_layer_in_8_bits_is_kept(served: Any) -> None:
    layer = scaled_experts()
    served(layer)
    kernels = process(layer).fused_experts
    assert not [value for value in vars(kernels).values() if isinstance(value, torch.Tensor)]
    assert kernels.w1_scale is layer.w13_weight_scale_inv
    assert layer.quant_method.fp8_backend.name == "TRITON", "which leaves weights as they are"


@pytest.mark.parametrize("kind", ["blocks", "channels"])
def test_tokens_that_vllm_quantised(kind: str, served: Any) -> None:
    """As they come from another rank: e4m3, with the scales of groups or of tokens [M, 1]."""
    layer = scaled_experts(kind)
    served(layer)
    kernels = process(layer).fused_experts
    x, (weights, ids) = scaled_rows(6), routing(6)
    taken = quantized(x, GROUP_SCALED if kind == "blocks" else ROW_SCALED)
    facts: dict[str, Any] = {"w1": layer.w13_weight, "w2": layer.w2_weight, "topk_weights": weights, "topk_ids": ids}
    facts |= {"expert_map": None, "apply_router_weight_on_input": False}
    outs = [torch.empty_like(x) for _ in range(2)]
    kernels.apply(output=outs[0], hidden_states=x, a1q_scale=None, **facts)
    scale = taken.scale.contiguous() if kind == "blocks" else taken.scale[:, None]
    kernels.apply(output=outs[1], hidden_states=taken.values, a1q_scale=scale, **facts)
    assert outs[0].any()
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: scaled_experts("one-scale"),
            "weights have one scale for each expert: 128x128 blocks and channels",
        ),
        (lambda: scaled_experts("small-blocks"), "weights have scales of 64x64 blocks: 128x128 are served"),
        (lambda: scaled_experts(has_bias=True), "w13_bias: experts of weights in e4m3-128x128 have no biases"),
        (
            lambda: changed(scaled_experts(), "w13_weight_scale_inv", nn.Parameter(torch.ones(EXPERTS, 2, 2).half())),
            "scales of w13 are torch.float16 of shape (4, 2, 2) and strides (4, 2, 1): packed float32 [4, 2, 2] is",
        ),
        (
            lambda: changed(scaled_experts(), "quant_method.experts_cls", BatchedTriton),
            "weights in e4m3-128x128 with tokens in vLLM's batched format",
        ),
        (
            lambda: changed(scaled_experts(), "quant_method.moe_kernel", object()),
            "vLLM has no kernels to replace, or has made them already",
        ),
    ],
)
def test_what_stays_of_8_bits(make: Any, says: str, served: Any) -> None:
    layer = make()
    before = layer.quant_method.experts_cls
    (line,) = served(layer)
    assert line.startswith(f"vLLM serves 1 layers of routed experts: {says}"), line
    assert layer.quant_method.experts_cls is before


def test_8_bits_are_vllms_by_default(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a GPU where layers in 16 bits without a record are dsl's."""
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: targets.from_arch("sm_90a"))
    layer = scaled_experts()
    before = layer.quant_method.experts_cls
    (line,) = served(layer, additional_config={})
    assert "nothing measured says that dsl is faster for " in line
    assert "e4m3-128x128" in line
    assert layer.quant_method.experts_cls is before


class TritonOf8Bits(Triton):
    """Returns the number of tokens, and notes what it was given."""

    given: ClassVar[list[Any]] = []

    def apply(self, output: torch.Tensor, **given: Any) -> None:
        self.given.append(given)
        output.fill_(len(output))


@pytest.mark.usefixtures("measured")
def test_measured_tokens_in_8_bits(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For other numbers of tokens vLLM's kernels get what vLLM quantises, by its own function."""
    monkeypatch.setattr(fused_moe, "TritonExperts", TritonOf8Bits, raising=False)
    TritonOf8Bits.given.clear()
    asked = []

    def quantise(x: torch.Tensor, scale: Any, dtype: Any, of_tokens: bool, block: Any) -> Any:
        asked.append((scale, dtype, of_tokens, block))
        taken = quantized(x, GROUP_SCALED)
        return taken.values, taken.scale

    monkeypatch.setattr(routed_experts_kernels, "moe_kernel_quantize_input", quantise)
    layer = scaled_experts()
    layer.quant_method.fp8_backend = type(layer.quant_method.fp8_backend).TRITON
    layer.quant_method.experts_cls = TritonOf8Bits
    assert served(layer, additional_config={})[1].startswith("dsl's serve routed experts for 3 to 5, 9 to 100 tokens")
    kernel = process(layer)
    assert isinstance(kernel.fused_experts, MeasuredScaledExperts)
    for tokens in (1, 3, 6, 9):
        x, (weights, ids) = scaled_rows(tokens), routing(tokens)
        out = layer.forward_modular(x, weights, ids)
        if tokens in (1, 6):
            assert (out == tokens).all()
            (given,) = TritonOf8Bits.given
            TritonOf8Bits.given.clear()
            taken = quantized(x, GROUP_SCALED)
            assert torch.equal(given["hidden_states"].float(), taken.values.float())
            assert torch.equal(given["a1q_scale"], taken.scale)
        else:
            spec, operands = operands_of(layer, x, weights, ids)
            assert torch.equal(out, reference.exact(spec, operands, torch.float32).to(BF16)), tokens
            assert not TritonOf8Bits.given
    assert asked == [(None, torch.float8_e4m3fn, False, [128, 128])] * 2


@pytest.mark.usefixtures("measured")
def test_channels_were_not_measured(served: Any) -> None:
    """VLLM's choice for them is CUTLASS."""
    layer = scaled_experts("channels")
    layer.quant_method.experts_cls = Triton
    (line,) = served(layer, additional_config={})
    assert "dsl was measured to be faster than vLLM's Triton kernels, and not than Triton" in line


@pytest.mark.rest
def test_8_bits_by_the_kernels_of_a_gpu(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's kernel object launches SM90's kernels on the emulator."""
    pytest.importorskip("cutlass")
    gpu = replace(targets.from_arch("sm_90a"), sm_count=4)
    layer = scaled_experts()
    served(layer)
    process(layer)
    monkeypatch.setattr(ops.api.targets, "detect", lambda device: gpu)
    ops.plan_of.cache_clear()
    x, (weights, ids) = scaled_rows(5), routing(5)
    with emulator.device(arch="sm_90a", sms=4, strict=True) as device:
        out = layer.forward_modular(x, weights, ids)
        assert device.launches > 1
    ops.plan_of.cache_clear()
    spec, given = operands_of(layer, x, weights, ids)
    right = reference.exact(spec, given, torch.float32)
    assert float((out.float() - right).norm() / right.norm()) < 0.02
