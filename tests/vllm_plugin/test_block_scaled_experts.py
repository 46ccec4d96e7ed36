# SPDX-License-Identifier: Apache-2.0
"""Experts of MXFP8, MXFP4 and NVFP4 checkpoints by this package: which are served, what comes out, what the log says.

vLLM's layers have its arithmetic of these formats, around products in torch, as their own kernels.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.layers.fused_moe.oracle.mxfp8")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.model_executor.model_loader import reload

import emulator
from dsl_backend.experts import ops
from dsl_backend.quant.format import MXFP4, MXFP8, NVFP4, ScaledFormat
from dsl_backend.quant.reference import mma_scales_of, mma_stored
from dsl_backend.runtime import target as targets
from dsl_backend.vllm_plugin.options import of as options_of
from dsl_backend.vllm_plugin.routed_experts import block_scaled, serve
from dsl_backend.vllm_plugin.routed_experts.kernels import BlockScaledDSLExperts
from integration import emulated_experts as emulated
from integration.emulated_experts import EmulatedExperts, dequantised
from tests.vllm_plugin.test_routed_experts import FACTORY, afresh, served

pytestmark = pytest.mark.usefixtures("one_rank")

__all__ = ["afresh", "served"]  # fixtures
EXPERTS, TOPK, HIDDEN, WIDTH = 4, 2, 128, 64
BF16 = torch.bfloat16
X_SCALE, HIDDEN_SCALE = 8 / (6 * 448), 128 / (6 * 448)
OAI: dict[str, Any] = {"activation": "swigluoai", "has_bias": True}
BY_NAME: dict[str, Any] = {"additional_config": {"dsl": {"experts": "dsl", "experts_kernel": "cute-block-scaled"}}}


def of_groups(bits: int, size: int, **more: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    facts = {"num_bits": bits, "type": "float", "group_size": size, "symmetric": True, **more}
    group = {
        "targets": ["Linear"],
        "weights": facts | {"dynamic": False},
        "input_activations": facts | {"dynamic": "local" if bits == 4 else True},
    }
    name = "nvfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    return {"format": name, "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": []}


class Kind(NamedTuple):
    """A checkpoint's format, as vLLM's configuration of it."""

    weight: ScaledFormat
    config: Callable[[], Any]
    options: Mapping[str, Any] = MappingProxyType({})


def compressed(facts: dict[str, Any]) -> Callable[[], Any]:
    return lambda: CompressedTensorsConfig.from_config(facts)


KINDS = {
    "gpt-oss": Kind(MXFP4, GptOssMxfp4Config, OAI),
    "mxfp4": Kind(MXFP4, Mxfp4Config),
    "nvfp4": Kind(NVFP4, lambda: ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True)),
    "nvfp4-compressed": Kind(NVFP4, compressed(of_groups(4, 16, strategy="tensor_group"))),
    "mxfp8": Kind(MXFP8, lambda: ModelOptMxFp8Config(True, None, [])),
}


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers of these formats can be made on a CPU."""
    for module, name, backend in emulated.CHOICES:
        monkeypatch.setattr(module, name, emulated.chooses(backend))
    ops.plan_of.cache_clear()
    yield
    ops.plan_of.cache_clear()


def experts(
    name: str, *, hidden: int = HIDDEN, width: int = WIDTH, prefix: str = "model.layers.0.mlp.experts", **options: Any
) -> Any:
    """A layer as vLLM's models make it, with random-normal weights."""
    kind = KINDS[name]
    sizes = {"num_experts": EXPERTS, "hidden_size": hidden, "intermediate_size": width, "top_k": TOPK}
    with set_current_vllm_config(VllmConfig()):
        options = {**sizes, "params_dtype": BF16, "prefix": prefix, **kind.options, **options}
        layer = FACTORY(quant_config=kind.config(), **options).routed_experts
    fill(layer, kind.weight, hidden, width)
    return layer


def fill(layer: Any, kind: ScaledFormat, hidden: int, width: int) -> None:
    """Weights as a checkpoint has them, of blocks of different magnitudes; what vLLM has padded stays zero."""
    generator = torch.Generator().manual_seed(1)
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        weight, scale = block_scaled.weight_of(layer, name), getattr(layer, f"{name}_weight_scale")
        matrix = torch.randn(EXPERTS, rows, columns, generator=generator) * columns**-0.5
        matrix *= 2.0 ** ((torch.arange(rows).view(-1, 1) + torch.arange(columns) // 16) % 5 - 2)
        wholes = torch.linspace(0.5, 0.75, EXPERTS) / 6 / 16 if kind == NVFP4 else torch.ones(EXPERTS)
        weight.data.view(torch.uint8).zero_()
        scale.data.view(torch.uint8).zero_()
        for expert, (one, whole) in enumerate(zip(matrix, wholes, strict=True)):
            by_block = mma_scales_of(one, kind, whole)
            stored = mma_stored(one, by_block, kind, whole)
            weight.data[expert, :rows, : stored.shape[1]] = stored
            scale.data.view(torch.uint8)[expert, :rows, : by_block.shape[1]] = by_block.view(torch.uint8)
        for ending, value in (("input_scale", X_SCALE if name == "w13" else HIDDEN_SCALE), ("weight_scale_2", wholes)):
            put(getattr(layer, f"{name}_{ending}", None), value)
        for ending, value in (
            ("input_global_scale", 1 / (X_SCALE if name == "w13" else HIDDEN_SCALE)),
            ("weight_global_scale", 1 / wholes),
        ):
            put(getattr(layer, f"{name}_{ending}", None), value)
        if hasattr(layer, f"{name}_bias"):
            bias = getattr(layer, f"{name}_bias").data.zero_()
            bias[:, :rows] = 0.5 * torch.randn(EXPERTS, rows, generator=generator)


def put(parameter: torch.Tensor | None, value: Any) -> None:
    """A value for each expert, of which gate and up rows have the same one."""
    if parameter is not None:
        filled = torch.as_tensor(value, dtype=torch.float32).expand(EXPERTS)
        parameter.data.copy_(filled if parameter.dim() == 1 else filled[:, None].expand_as(parameter))


def weights_of(layer: Any, hidden: int = HIDDEN, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """What w13 and w2 of a layer that was not processed are worth, float64."""
    found = []
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        pairs = zip(block_scaled.weight_of(layer, name), getattr(layer, f"{name}_weight_scale"), strict=True)
        wide = torch.stack([dequantised(*pair) for pair in pairs]).double()
        if hasattr(layer, f"{name}_weight_global_scale"):
            whole = 1 / getattr(layer, f"{name}_weight_global_scale").double()
        else:
            whole = getattr(layer, f"{name}_weight_scale_2", torch.ones(EXPERTS)).double()
        if whole.dim() == 2:
            whole = whole.repeat_interleave(wide.shape[1] // 2, 1)
        found.append((wide * whole.view(EXPERTS, -1, 1))[:, :rows, :columns])
    return found[0], found[1]


def process(layer: Any) -> Any:
    """As vLLM's loaders do; returns the kernels that were made."""
    with set_current_vllm_config(VllmConfig()):
        layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.moe_kernel.fused_experts


def x_of(tokens: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(2)).to(BF16)


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(3)).softmax(-1)
    weights, ids = scores.topk(TOPK)
    return weights, ids.int()


def exact(layer: Any, wide: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, given: Any) -> torch.Tensor:
    """Token by token in float64, nothing quantised."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    act = SwigluOAIAndMul() if hasattr(layer, "w13_bias") else SiluAndMul()
    biases = [getattr(layer, f"{name}_bias", torch.zeros(EXPERTS, 1)).double() for name in ("w13", "w2")]
    for token, slot in (given[1] >= 0).nonzero().tolist():
        expert = int(given[1][token, slot])
        columns = wide[0].shape[1]
        inner = act.forward_native(x[token].double() @ wide[0][expert].T + biases[0][expert, :columns])
        out[token] += given[0][token, slot].double() * (inner @ wide[1][expert].T + biases[1][expert, : x.shape[1]])
    return out


def error(out: torch.Tensor, right: torch.Tensor) -> float:
    return float((out.double() - right).norm() / right.norm())


def compared(name: str, ours: Any, tokens: int = 37, **options: Any) -> None:
    """A served layer's error is at most twice that of vLLM's arithmetic, for all tokens and for a few."""
    hidden, width = options.get("hidden", HIDDEN), options.get("width", WIDTH)
    theirs = experts(name, **options)
    wide = weights_of(theirs, hidden, width)
    right = exact(theirs, wide, x_of(tokens, hidden), routing(tokens))
    process(theirs)
    bound = 2 * error(theirs.forward_modular(x_of(tokens, hidden), *routing(tokens)), right)
    out = ours.forward_modular(x_of(tokens, hidden), *routing(tokens))
    assert 0 < error(out, right) <= bound
    for row in (0, tokens - 1):
        assert error(out[row], right[row]) <= 2 * bound


@pytest.mark.parametrize("name", KINDS)
def test_results_within_twice_vllms_own_error(name: str, served: Any) -> None:
    layer = experts(name)
    (line,) = served(layer)
    assert line.startswith("dsl serves 1 layers of routed experts, ")
    assert f"weights in {KINDS[name].weight} of {HIDDEN} to {WIDTH}, top 2, bfloat16, on cpu: by " in line
    kernels = process(layer)
    assert isinstance(kernels, BlockScaledDSLExperts)
    assert not [value for value in vars(kernels).values() if isinstance(value, torch.Tensor)], "nothing is kept"
    compared(name, layer)
    process(layer)  # a second call changes nothing
    compared(name, layer)


def test_what_vllm_has_padded(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gpt-oss is for TensorRT-LLM's kernels: what vLLM has added is not read, and tokens come without it."""
    chosen = emulated.chooses(Mxfp4MoeBackend.FLASHINFER_TRTLLM_MXFP4_MXFP8)
    with monkeypatch.context() as changes:
        changes.setattr(emulated.mxfp4, "select_mxfp4_moe_backend", chosen)
        layer = experts("gpt-oss", hidden=160, width=96)
    assert layer.w13_weight.shape == (EXPERTS, 256, 128)
    layer.w2_weight.data[:, :, 48:] = 0x77
    layer.w13_weight_scale.data[:, :, 5:] = 0xFF
    (line,) = served(layer)
    assert "of 160 to 96" in line
    process(layer)
    assert layer.quant_method.skip_forward_padding
    assert layer.quant_method.has_unpadded_output
    compared("gpt-oss", layer, hidden=160, width=96)


def test_rows_that_tma_cannot_unpack(served: Any) -> None:
    """They are moved apart, once."""
    layer = experts("gpt-oss", hidden=160, width=96)
    served(layer)
    process(layer)
    assert [layer.w13_weight.stride(1), layer.w2_weight.stride(1)] == [128, 64]
    compared("gpt-oss", layer, hidden=160, width=96)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-compressed"])
def test_gate_and_up_rows_with_scales_of_their_own(name: str, served: Any) -> None:
    """The smaller one goes into the scales of blocks. VLLM takes the first one for both."""
    layer, theirs = experts(name), experts(name)
    for one in (layer, theirs):
        whole = getattr(one, "w13_weight_scale_2", None)
        whole = one.w13_weight_global_scale if whole is None else whole
        whole.data[:, 1] *= 1.5
    served(layer)
    wide = weights_of(layer)
    right = exact(layer, wide, x_of(9), routing(9))
    errors = []
    for one in (layer, theirs):
        process(one)
        errors.append(error(one.forward_modular(x_of(9), *routing(9)), right))
    assert errors[0] < 0.2 < errors[1]


def test_padding_and_other_ranks_experts(served: Any) -> None:
    layer = experts("nvfp4")
    served(layer)
    kernels = process(layer)
    x, (weights, ids) = x_of(6), routing(6)
    ids[2] = -1
    places = torch.tensor([-1, 0, -1, 1, 2, 3], dtype=torch.int32)
    facts = {"apply_router_weight_on_input": False, "w1": layer.w13_weight, "w2": layer.w2_weight}
    facts |= {"topk_weights": weights, "a1q_scale": None, "hidden_states": x}
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    kernels.apply(output=outs[0], topk_ids=ids, expert_map=None, **facts)
    named = torch.tensor([1, 3, 4, 5], dtype=torch.int32)
    elsewhere = torch.where(ids < 0, 0, named[ids.clamp(min=0).long()]).int()
    kernels.apply(output=outs[1], topk_ids=elsewhere, expert_map=places, **facts)
    assert not outs[0][2].any()
    assert torch.equal(*outs)


def test_rebalancing_moves_what_is_served(served: Any) -> None:
    layer = experts("nvfp4")
    served(layer)
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
    model = nn.ModuleList([layer])
    reload.record_metadata_for_reloading(model)
    served(layer)
    process(layer)
    names = [name for name, _ in layer.named_parameters()]
    places = [getattr(layer, name).data_ptr() for name in names]
    before = layer.forward_modular(x_of(9), *routing(9))
    with set_current_vllm_config(VllmConfig()):
        reload.initialize_layerwise_reload(model)
        for name in names:
            parameter, facts = getattr(layer, name), {"weight_name": name, "shard_id": None, "expert_id": None}
            parameter.weight_loader(parameter, getattr(other, name).data, **facts)
        reload.finalize_layerwise_reload(model, None)
    assert [getattr(layer, name).data_ptr() for name in names] == places
    after = layer.forward_modular(x_of(9), *routing(9))
    served(other)
    process(other)
    assert torch.equal(after, other.forward_modular(x_of(9), *routing(9)))
    assert not torch.equal(after, before)


def test_mistakes_are_found(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests would say of parameters that are laid out otherwise."""
    right = block_scaled.mma_scales

    def alike(scale: torch.Tensor, **facts: Any) -> torch.Tensor:
        return right(scale, parts=facts["parts"])

    def one_part(scale: torch.Tensor, **facts: Any) -> torch.Tensor:
        return right(scale.flip(1), **facts)

    def not_inverted(layer: Any, name: str, scale: torch.Tensor) -> torch.Tensor:
        whole = block_scaled.WHOLE
        for ending, of in zip(whole, block_scaled.INVERSE, strict=True):
            values = getattr(layer, f"{name}_{of}").data
            values = values.max().view(1) if ending == whole[1] else values.view(EXPERTS, -1)[:, 0].contiguous()
            block_scaled.replace_parameter(layer, f"{name}_{ending}", values)
        return scale

    mistakes = (
        ("gpt-oss", "mma_scales", alike),
        ("mxfp8", "mma_scales", one_part),
        ("nvfp4-compressed", "with_whole", not_inverted),
    )
    for name, function, mistake in mistakes:
        layer = experts(name)
        served(layer)
        with monkeypatch.context() as changes:
            changes.setattr(block_scaled, function, mistake)
            process(layer)
        with pytest.raises(AssertionError):
            compared(name, layer)


# What is served.


def changed(layer: Any, attribute: str, value: Any) -> Any:
    """A layer with an attribute set."""
    owner, _, name = attribute.rpartition(".")
    target = layer
    for part in filter(None, owner.split(".")):
        target = getattr(target, part)
    setattr(target, name, value)
    return layer


class Batched(EmulatedExperts):
    activation_format = staticmethod(lambda: emulated.modular_kernel.FusedMoEActivationFormat.BatchedExperts)


def rebalanced(**sizes: int) -> Any:
    layer = experts("mxfp4", **sizes)
    return changed(layer, "moe_config.moe_parallel_config", parallel_of(layer, enable_eplb=True))


def parallel_of(layer: Any, **facts: Any) -> Any:
    return replace(layer.moe_config.moe_parallel_config, **facts)


STAY: dict[str, tuple[Callable[[], Any], str]] = {
    "batched": (
        lambda: changed(experts("nvfp4"), "quant_method.experts_cls", Batched),
        "weights in nvfp4 with tokens in vLLM's batched format",
    ),
    "weights-only": (lambda: changed(experts("nvfp4"), "quant_method.use_a16", True), "its inputs are not quantised"),
    "made": (
        lambda: changed(experts("mxfp8"), "quant_method.moe_kernel", object()),
        "vLLM has no kernels to replace, or has made them already",
    ),
    "asked": (
        lambda: changed(experts("mxfp4"), "moe_config.moe_backend", "marlin"),
        "--moe-backend marlin asks for vLLM's kernels",
    ),
    "dtype": (
        lambda: changed(experts("gpt-oss"), "moe_config.in_dtype", torch.float16),
        "w13_bias is torch.bfloat16: torch.float16 is needed with tokens of torch.float16",
    ),
    "sizes": (
        lambda: experts("nvfp4", width=80),
        "intermediate_size 80 is not a multiple of 32, as weights in nvfp4 need",
    ),
    "scales": (
        lambda: changed(experts("mxfp8"), "w2_weight_scale", nn.Parameter(torch.ones(EXPERTS, HIDDEN, 1))),
        "scales of w2: torch.float32 of shape (4, 128, 1) and strides (128, 1, 1), where packed torch.float8_e8m0fnu",
    ),
    "layout": (
        lambda: changed(experts("mxfp8"), "w13_weight", nn.Parameter(experts("mxfp8").w13_weight.mT, False)),
        "w13: torch.float8_e4m3fn of shape (4, 128, 128) and strides (16384, 1, 128), where packed",
    ),
    "rows": (
        lambda: rebalanced(width=96),
        "rebalancing of experts (EPLB) needs packed rows, and those of 128 or 96 are not",
    ),
    "up-rows": (
        lambda: changed(experts("mxfp4"), "moe_config.intermediate_size_per_partition_unpadded", 32),
        "vLLM has padded 32 columns to 64 for other kernels: up rows lie apart",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str, served: Any) -> None:
    make, says = STAY[name]
    layer = make()
    before = layer.quant_method
    (line,) = served(layer)
    assert line.startswith(f"vLLM serves 1 layers of routed experts: {says}"), line
    assert layer.quant_method is before
    assert not issubclass(before.experts_cls, BlockScaledDSLExperts)


def test_rebalancing_of_packed_rows(served: Any) -> None:
    (line,) = served(rebalanced(width=128))
    assert line.startswith("dsl serves 1 layers")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"additional_config": {}}, "nothing measured says that dsl is faster for"),
        (
            {"additional_config": {"dsl": {"experts": "dsl", "experts_kernel": "cute"}}},
            "experts (Swiglu(alpha=1.0, beta=0.0, limit=None) of 4 experts + weights in nvfp4",
        ),
    ],
)
def test_engines_that_serve_none(changes: dict[str, Any], says: str, served: Any) -> None:
    layer = experts("nvfp4")
    (line,) = served(layer, **changes)
    assert says in line
    assert line.startswith("vLLM serves 1 layers")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"experts_kernel": "cute"}, "experts_kernel is 'cute' and experts 'measured': a kernel is named with 'dsl'"),
        ({"experts": "dsl", "experts_kernel": "fast"}, "experts_kernel: 'fast' is not one of cute, cute-grouped, "),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        options_of(SimpleNamespace(additional_config={"dsl": options}))


def test_on_sm100_by_name_alone(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    begun: list[Any] = []
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: targets.from_arch("sm_100a"))
    monkeypatch.setattr(serve.ahead, "compile_experts", lambda config, layers: begun.extend(layers))
    (line,) = served(experts("gpt-oss"))
    names = "'cute-block-scaled' or 'cute-weight-only'"
    assert f"mxfp4 needs experts_kernel {names}: these kernels have not run on a GPU" in line
    layer = experts("gpt-oss")
    (line,) = served(layer, **BY_NAME)
    assert line.startswith("dsl serves 1 layers of routed experts, ")
    assert line.endswith(", on sm_100a: by experts mxfp8/mxfp4/nvfp4 sm100")
    assert [kernel for _, kernel in begun] == ["cute-block-scaled"]
    assert list(serve.served_layers()) == begun
    assert serve.compilation_key().endswith("BlockScaledDSLExperts cute-block-scaled")
    (unit, *_) = serve.ahead.experts_units(begun[0], targets.from_arch("sm_100a"))
    assert unit.key.weight == MXFP4


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpt-oss", "nvfp4"])
def test_by_the_kernels_of_an_sm100(name: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's kernel object launches SM100's kernels on the emulator, with padding behind the tokens."""
    pytest.importorskip("cutlass")
    gpu = replace(targets.from_arch("sm_100a"), sm_count=4)
    sizes = {"hidden": 160, "width": 96} if name == "gpt-oss" else {}
    layer = experts(name, **sizes)
    wide = weights_of(layer, *sizes.values())
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: gpu)
    served(layer, **BY_NAME)
    x, given = x_of(5, sizes.get("hidden", HIDDEN)), routing(5)
    given[1][-1] = -1
    right = exact(layer, wide, x, given)
    process(layer)
    monkeypatch.setattr(ops.api.targets, "detect", lambda device: gpu)
    with emulator.device(arch="sm_100a", sms=4, strict=True) as device:
        out = layer.forward_modular(x, *given)
        assert device.launches > 1
    assert not out[-1].any()
    assert error(out, right) < (0.2 if name == "nvfp4" else 0.06)
