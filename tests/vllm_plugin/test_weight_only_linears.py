# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of 4 and 8 bits by this package: which are served, what comes out, what the log says.

vLLM's layers have its kernel for CPUs as their own, where that takes the weights.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel")
pytest.importorskip("vllm.model_executor.layers.quantization.auto_gptq")
pytest.importorskip("vllm.model_executor.layers.quantization.auto_awq")

from vllm.config import set_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms.interface import PlatformEnum

from dsl_backend.quant.weight_only import WeightOnlyFormat, dequantized
from dsl_backend.runtime.target import from_arch
from dsl_backend.vllm_plugin.weight_only_linears import find, serve
from dsl_backend.vllm_plugin.weight_only_linears.kernel import WeightOnlyKernel
from integration.quantization import compressed_weights, in_words
from tests.vllm_plugin.test_fused_mlp import engine, model_of
from tests.vllm_plugin.test_scaled_linears import BF16, error, exact_of, processed, without_compilation

pytestmark = pytest.mark.usefixtures("one_rank")

K, N = 256, 128
BY_DSL: dict[str, Any] = {"additional_config": {"dsl": {"weight_only_linears": "dsl"}}}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Theirs(MPLinearKernel):
    """Takes any weights, and computes nothing."""

    get_min_capability = classmethod(lambda cls: -1)
    can_implement = classmethod(lambda cls, config: (True, None))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError

    def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, and layers of all kinds can be made on a CPU."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.setitem(kernels._POSSIBLE_KERNELS, PlatformEnum.CPU, [Theirs])
    for module in (auto_gptq, auto_awq):
        monkeypatch.setattr(module, "verify_marlin_supported", lambda **facts: None, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with torch.no_grad():
        yield
    torch.set_default_dtype(default)


def gptq(bits: int = 4, **changes: Any) -> Any:
    facts = {"bits": bits, "group_size": 128, "desc_act": False, "sym": True}
    return auto_gptq.AutoGPTQConfig.from_config(facts | changes)


def awq() -> Any:
    return auto_awq.AutoAWQConfig.from_config({"bits": 4, "group_size": 128, "zero_point": True, "lm_head": False})


def compressed(**changes: Any) -> CompressedTensorsConfig:
    return CompressedTensorsConfig.from_config(compressed_weights(**changes))


# Of checkpoints: (vLLM's configuration, the format of the weights).
SCHEMES = {
    "gptq": (gptq, WeightOnlyFormat()),
    "gptq-8": (lambda: gptq(8), WeightOnlyFormat(bits=8)),
    "awq": (awq, WeightOnlyFormat(zero_points=True)),
    "compressed": (compressed, WeightOnlyFormat()),
    "compressed-zero-points": (lambda: compressed(symmetric=False), WeightOnlyFormat(zero_points=True)),
    "compressed-rows": (lambda: compressed(group_size=None), WeightOnlyFormat(group=None)),
    "compressed-8": (lambda: compressed(num_bits=8), WeightOnlyFormat(bits=8)),
}


class MLP(nn.Module):
    """As most of vLLM's are; `wide` has its weights dequantised, float64."""

    def __init__(self, scheme: str, bias: bool = False) -> None:
        super().__init__()
        config, kind = SCHEMES[scheme]
        with set_current_vllm_config(without_compilation()):
            made: dict[str, Any] = {"quant_config": config(), "params_dtype": BF16}
            self.gate_up_proj = MergedColumnParallelLinear(K, [N, N], bias=bias, prefix="mlp.gate_up_proj", **made)
            self.down_proj = RowParallelLinear(N, K, bias=False, prefix="mlp.down_proj", **made)
        self.act_fn = SiluAndMul()
        self.wide = {
            name: fill(getattr(self, name), scheme, kind, seed)
            for seed, name in enumerate(("gate_up_proj", "down_proj"))
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x


def fill(layer: Any, scheme: str, kind: WeightOnlyFormat, seed: int) -> torch.Tensor:
    """Random weights as a checkpoint has them; returns what they are worth, float64."""
    made = torch.Generator().manual_seed(seed)
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    values = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8, generator=made)
    groups = kind.groups(k)
    scale = ((torch.rand(n, groups, generator=made) + 0.5) * k**-0.5 / (1 << (kind.bits - 2))).to(BF16)
    zeros = (
        torch.randint(0, 1 << kind.bits, (n, groups), dtype=torch.uint8, generator=made) if kind.zero_points else None
    )
    if scheme.startswith("compressed"):
        layer.weight_packed.data.copy_(in_words(values, kind.bits))
        layer.weight_scale.data.copy_(scale)
        if zeros is not None:
            layer.weight_zero_point.data.copy_(in_words(zeros.T.contiguous(), kind.bits).T)
    else:
        by_columns = scheme == "awq"
        words = in_words(values.T.contiguous(), 4, AWQ_ORDER) if by_columns else in_words(values, kind.bits).T
        layer.qweight.data.copy_(words)
        layer.scales.data.copy_(scale.T)
        if zeros is not None:
            layer.qzeros.data.copy_(in_words(zeros.T.contiguous(), 4, AWQ_ORDER))
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(n, generator=made, dtype=torch.float32))
    return dequantized(values, scale, zeros, kind)


def said(caplog: pytest.LogCaptureFixture, model: nn.Module, **changes: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO), set_current_vllm_config(without_compilation()):
        serve.serve_weight_only_linears(model, engine(**BY_DSL | changes))
    return [record.getMessage() for record in caplog.records if record.name == "vllm.dsl_backend"]


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(2), dtype=torch.float32).to(BF16)


def rounded(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """The MLP of the dequantised weights, in bfloat16."""

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(mlp, name).bias
        return nn.functional.linear(x, mlp.wide[name].to(BF16), bias)

    gate, up = layer(x, "gate_up_proj").chunk(2, -1)
    return layer(nn.functional.silu(gate) * up, "down_proj")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_within_the_error_of_a_bfloat16_model(caplog: Any, scheme: str) -> None:
    mlp, x = MLP(scheme, bias=scheme != "awq"), x_of(37)
    lines = said(caplog, model_of(mlp))
    assert len(lines) == 2, lines
    assert isinstance(find.holder_of(mlp.gate_up_proj).kernel, WeightOnlyKernel)
    processed(mlp)
    exact = exact_of(mlp, x)
    compared = error(rounded(mlp, x), exact)
    assert 0 < error(mlp(x), exact) <= 1.2 * compared
    # Each row is its own: a scale of another one would be seen.
    for row in (0, 36):
        assert error(mlp(x)[row], exact[row]) <= 3 * compared


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3)])
def test_shapes(caplog: Any, shape: tuple[int, ...]) -> None:
    mlp = MLP("gptq")
    said(caplog, model_of(mlp))
    processed(mlp)
    out = mlp(x_of(*shape))
    assert (out.shape, out.dtype) == ((*shape, K), BF16)


def test_what_is_said(caplog: Any) -> None:
    gate, down = said(caplog, model_of(MLP("awq"), MLP("awq")))
    assert gate.startswith("dsl serves 2 W4A16 linear layers (MergedColumnParallelLinear), product of 256 to 256, ")
    assert down.startswith("dsl serves 2 W4A16 linear layers (RowParallelLinear), product of 128 to 256, ")
    assert "4 bits, scales and zero points per 128 columns, bfloat16, on cpu: by weight-only-linear reference" in gate
    assert "RowParallelLinear" not in serve.compilation_key()
    assert "layers.0.down_proj: product of 128 to 256, 4 bits" in serve.compilation_key()


LEFT = {
    "weight_only_linears'] is vllm": {"additional_config": {}},
    "dsl's kernels take longer than vLLM's with many rows": {
        "additional_config": {"dsl": {"weight_only_linears": "measured"}}
    },
    "LoRA": {"lora_config": object()},
}


@pytest.mark.parametrize("reason", LEFT)
def test_reasons_against_an_engine(caplog: Any, reason: str) -> None:
    mlp = MLP("gptq")
    (line,) = said(caplog, model_of(mlp), **LEFT[reason])
    assert line.startswith("vLLM serves 2 linear layers with weights of few bits: ")
    assert reason in line
    assert type(find.holder_of(mlp.gate_up_proj).kernel) is Theirs


def config_of(mlp: MLP) -> Any:
    return find.holder_of(mlp.gate_up_proj).kernel.config


CHANGED: dict[str, Any] = {
    "act-order": {"has_g_idx": True},
    "weights of uint2b2": {"weight_type": "uint2b2"},
    "group is 64: a multiple of 128": {"group_size": 64},
    "weights of uint4b8 with zero points are not known": {"zero_points": True},
    "activations of float8_e4m3fn with scales of bfloat16": {"act_type": torch.float8_e4m3fn},
    "n is 100: a multiple of 8": {"partition_weight_shape": (256, 100)},
}


@pytest.mark.parametrize("reason", CHANGED)
def test_layers_that_stay(caplog: Any, reason: str) -> None:
    mlp = MLP("gptq")
    for name, value in CHANGED[reason].items():
        setattr(config_of(mlp), name, value)
    mlp.down_proj.forward = mlp.down_proj.forward
    lines = said(caplog, model_of(mlp))
    assert all(line.startswith("vLLM serves 1 linear layers with weights of few bits: ") for line in lines)
    assert sum(reason in line for line in lines) == 1, lines
    assert sum("another forward was put into RowParallelLinear" in line for line in lines) == 1


@pytest.mark.parametrize(("arch", "served"), [("sm_90a", True), ("sm_100a", False)])
def test_on_a_gpu(caplog: Any, monkeypatch: pytest.MonkeyPatch, arch: str, served: bool) -> None:
    monkeypatch.setattr(serve, "targets", SimpleNamespace(detect=lambda device: from_arch(arch)))
    lines = said(caplog, model_of(MLP("gptq")))
    if served:
        assert [line.endswith("on sm_90a: by weight-only-linear sm90") for line in lines] == [True, True]
    else:
        assert all(
            "vLLM serves 1 linear layers with weights of few bits: no kernel for weight_only" in one for one in lines
        )


def test_a_second_time_changes_nothing(caplog: Any) -> None:
    mlp = MLP("gptq")
    model = model_of(mlp)
    said(caplog, model)
    before = find.holder_of(mlp.gate_up_proj).kernel
    assert said(caplog, model) == []
    assert find.holder_of(mlp.gate_up_proj).kernel is before


def test_weights_that_are_loaded_again(caplog: Any) -> None:
    """VLLM gives the layers parameters as they were before processing, and processes them once more."""
    first, second = MLP("awq"), MLP("awq")
    for name in ("gate_up_proj", "down_proj"):
        getattr(second, name).scales.data.mul_(2)
    said(caplog, model_of(first))
    loaded = {name: dict(getattr(second, name).named_parameters()) for name in ("gate_up_proj", "down_proj")}
    processed(first)
    for name, parameters in loaded.items():
        for parameter, value in parameters.items():
            setattr(getattr(first, name), parameter, value)
        first.wide[name] = 2 * first.wide[name]
    processed(first)
    x = x_of(5)
    assert error(first(x), exact_of(first, x)) < 0.02


def test_inside_torch_compile(caplog: Any) -> None:
    mlp = MLP("compressed")
    said(caplog, model_of(mlp))
    processed(mlp)
    compiled = torch.compile(mlp, fullgraph=True, backend="eager", dynamic=True)
    for rows in (5, 7):
        x = x_of(rows)
        assert error(compiled(x), mlp(x).double()) < 0.02
