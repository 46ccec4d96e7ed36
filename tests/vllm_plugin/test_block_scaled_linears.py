# SPDX-License-Identifier: Apache-2.0
"""Linear layers of NVFP4 and MXFP8 checkpoints by this package: which are served, what comes out, what the log says.

vLLM's layers have its emulation of these formats as their own kernel, which it has for GPUs and which runs on a CPU
too. Its emulation of MXFP8 leaves inputs in 16 bits: here vLLM's own function quantises them before, as its kernels do.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytest.importorskip("vllm.model_executor.kernels.linear.nvfp4.emulation")
pytest.importorskip("vllm.model_executor.kernels.linear.mxfp8.emulation")

from vllm.config import set_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16, mxfp8_e4m3_quantize
from vllm.platforms.interface import PlatformEnum

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear.scaled import api
from dsl_backend.quant.format import MXFP8, NVFP4, ScaledFormat
from dsl_backend.quant.reference import Quantized, mma_dequantized, mma_quantized, unswizzled
from dsl_backend.runtime.target import from_arch
from dsl_backend.vllm_plugin.scaled_linears import block_scaled, serve
from dsl_backend.vllm_plugin.scaled_linears.block_scaled import kernel_of
from dsl_backend.vllm_plugin.scaled_linears.handed import Handed
from dsl_backend.vllm_plugin.scaled_linears.kernels import HandedOn
from tests.vllm_plugin.test_fused_mlp import model_of
from tests.vllm_plugin.test_scaled_linears import BF16, error, exact_of, processed, said, without_compilation

pytestmark = pytest.mark.usefixtures("one_rank")

K, N = 256, 128
X_SCALE = 0.003


class QuantisingMxfp8Kernel(EmulationMxfp8LinearKernel):
    """VLLM's emulation behind vLLM's quantisation of inputs."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = dequant_mxfp8_to_bf16(*mxfp8_e4m3_quantize(x.reshape(-1, x.shape[-1])))
        return super().apply_weights(layer, rows.view(x.shape), bias)


class Format(NamedTuple):
    layers: block_scaled.Layers
    config: Any
    theirs: type


NVFP4_FORMAT = Format(
    block_scaled.NVFP4_LAYERS, ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True), EmulationNvFp4LinearKernel
)
MXFP8_FORMAT = Format(block_scaled.MXFP8_LAYERS, ModelOptMxFp8Config(True, None, []), QuantisingMxfp8Kernel)
FORMATS = {form.layers.name: form for form in (NVFP4_FORMAT, MXFP8_FORMAT)}
each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, the reference serves, and layers of both formats can be made on a CPU."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.setitem(kernels._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CPU, [EmulationNvFp4LinearKernel])
    monkeypatch.setitem(kernels._POSSIBLE_MXFP8_KERNELS, PlatformEnum.CPU, [QuantisingMxfp8Kernel])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with torch.no_grad():
        yield
    torch.set_default_dtype(default)


class MLP(nn.Module):
    """As most of vLLM's are; `wide` has its weights dequantised, float64.

    Args:
        form, down: formats of the gate and up projection, and of the down projection; by default the same.
        n: columns of a gate.
    """

    def __init__(self, form: Format, bias: bool = False, *, down: Format | None = None, n: int = N) -> None:
        super().__init__()
        down = down or form
        with set_current_vllm_config(without_compilation()):
            made: dict[str, Any] = {"quant_config": form.config, "params_dtype": BF16}
            self.gate_up_proj = MergedColumnParallelLinear(K, [n, n], bias=bias, prefix="mlp.gate_up_proj", **made)
            made["quant_config"] = down.config
            self.down_proj = RowParallelLinear(n, K, bias=False, prefix="mlp.down_proj", **made)
        self.act_fn = SiluAndMul()
        kinds = {"gate_up_proj": form.layers.ours.kind, "down_proj": down.layers.ours.kind}
        self.wide = {name: fill(getattr(self, name), kind, seed) for seed, (name, kind) in enumerate(kinds.items())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x


class Between(MLP):
    """Something needs the activation's result in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x = x * 1.0
        x, _ = self.down_proj(x)
        return x


def fill(layer: Any, kind: ScaledFormat, seed: int) -> torch.Tensor:
    """Random-normal weights as a checkpoint has them; returns what they are worth, float64."""
    generator = torch.Generator().manual_seed(seed)
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    matrix = torch.randn(n, k, generator=generator, dtype=torch.float32) * k**-0.5
    width = kind.block_columns
    assert width is not None
    # Blocks of different magnitudes, so that the scale of another one is wrong.
    matrix *= 2.0 ** ((torch.arange(n).view(-1, 1) + torch.arange(k) // width) % 5 - 2)
    whole = float(matrix.abs().max()) / (6 * 448) if kind == NVFP4 else 1.0
    found = mma_quantized(matrix, kind, whole)
    layer.weight.data.copy_(found.values)
    layer.weight_scale.data.copy_(unswizzled(found.scale, n, k // width).view(layer.weight_scale.dtype))
    if kind == NVFP4:
        layer.weight_scale_2.data.fill_(whole)
        layer.input_scale.data.fill_(X_SCALE)
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(n, generator=generator, dtype=torch.float32))
    return mma_dequantized(found, whole)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(2), dtype=torch.float32).to(BF16)


@each_format
@pytest.mark.parametrize("bias", [False, True])
def test_results_within_twice_vllms_own_error(caplog: Any, form: Format, bias: bool) -> None:
    x = x_of(37)
    theirs, ours = MLP(form, bias), MLP(form, bias)
    said(caplog, model_of(ours))
    assert isinstance(kernel_of(ours.gate_up_proj), form.layers.ours)
    assert type(ours.act_fn) is HandedOn
    for mlp in (theirs, ours):
        processed(mlp)
    exact = exact_of(ours, x)
    compared = error(theirs(x), exact)
    assert 0 < error(ours(x), exact) <= 2 * compared
    # Each row is its own: a scale of another one would be seen.
    for row in (0, 36):
        assert error(ours(x)[row], exact[row]) <= 3 * compared


@each_format
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3)])
def test_shapes(caplog: Any, form: Format, shape: tuple[int, ...]) -> None:
    mlp = MLP(form)
    said(caplog, model_of(mlp))
    processed(mlp)
    out = mlp(x_of(*shape))
    assert (out.shape, out.dtype) == ((*shape, K), BF16)
    if 0 not in shape:
        assert error(out, exact_of(mlp, x_of(*shape))) < 0.4


@each_format
def test_what_is_said(caplog: Any, form: Format) -> None:
    lines = said(caplog, model_of(MLP(form), MLP(form)))
    assert len(lines) == 2
    gate, down = lines
    name = form.layers.name
    assert gate.startswith(f"dsl serves 2 {name} linear layers (MergedColumnParallelLinear), Swiglu(")
    assert "of 256 to 128 " in gate
    assert f", out {name.lower()}, on cpu" in gate
    assert down.startswith(f"dsl serves 2 {name} linear layers (RowParallelLinear), product of 128 to 256 ")
    assert f"x {name.lower()}, weight {name.lower()}, on cpu: by scaled-linear reference" in down


@each_format
def test_the_down_projection_takes_what_it_would_quantise_itself(caplog: Any, form: Format) -> None:
    """The same values, but for those near the middle of two: the activation is not rounded to 16 bits before."""
    mlp = MLP(form)
    said(caplog, model_of(mlp))
    assert kernel_of(mlp.gate_up_proj).link.consumer is mlp.down_proj
    assert kernel_of(mlp.down_proj).link is None
    processed(mlp)
    handed, _ = mlp.gate_up_proj(x_of(37))
    assert isinstance(handed, Handed)
    gate, up = (x_of(37).double() @ mlp.wide["gate_up_proj"].T).chunk(2, -1)
    down = kernel_of(mlp.down_proj)
    own = down.quantised(mlp.down_proj, (torch.nn.functional.silu(gate) * up).to(BF16))
    assert handed.values.shape == own.values.shape
    whole = float(mlp.down_proj.input_global_scale) if form is NVFP4_FORMAT else 1.0
    ours, theirs = (mma_dequantized(Quantized(one.values, one.scale, down.kind), whole) for one in (handed, own))
    # x is quantised too, so that gate and up are not those of `exact`.
    assert error(ours, theirs) < 0.25
    assert (handed.scale.view(torch.uint8)[37 * handed.scale.shape[1] // 128 :] == 0).any()


@each_format
def test_what_needs_16_bits_gets_them(caplog: Any, form: Format) -> None:
    mlp = Between(form)
    gate, _ = said(caplog, model_of(mlp))
    assert kernel_of(mlp.gate_up_proj).link.consumer is None
    assert ", out " not in gate
    processed(mlp)
    assert error(mlp(x_of(5)), exact_of(mlp, x_of(5))) < 0.4


def test_a_down_projection_of_another_format_quantises_itself(caplog: Any) -> None:
    mlp = MLP(NVFP4_FORMAT, down=MXFP8_FORMAT)
    said(caplog, model_of(mlp))
    assert kernel_of(mlp.gate_up_proj).link.consumer is None
    processed(mlp)
    assert error(mlp(x_of(5)), exact_of(mlp, x_of(5))) < 0.4


@each_format
def test_an_activation_that_no_kernel_applies_stays(caplog: Any, monkeypatch: pytest.MonkeyPatch, form: Format) -> None:
    """SM100's kernel has tiles of 128 gates."""
    monkeypatch.setattr(serve, "targets", SimpleNamespace(detect=lambda device: from_arch("sm_100a")))
    monkeypatch.setattr(serve.ahead, "compile_scaled_linears", lambda config, layers: None)
    mlp, name = MLP(form, n=64), form.layers.name
    options = {"scaled_linears": "dsl", "scaled_linears_kernel": "cute-sm100"}
    lines = said(caplog, model_of(mlp), additional_config={"dsl": options})
    assert type(mlp.act_fn) is SiluAndMul
    assert kernel_of(mlp.gate_up_proj).link is None
    assert sum(line.startswith(f"dsl serves 1 {name} linear layers") for line in lines) == 2
    (left,) = (line for line in lines if line.startswith(f"vLLM serves 1 activations behind {name} layers: "))
    assert "n 64 is not a multiple of 128" in left


def test_a_model_of_both_formats(caplog: Any) -> None:
    lines = said(caplog, model_of(MLP(NVFP4_FORMAT), MLP(MXFP8_FORMAT)))
    assert [line.split(" linear")[0] for line in lines] == ["dsl serves 1 NVFP4"] * 2 + ["dsl serves 1 MXFP8"] * 2
    assert len(serve._served) == 1
    assert len(serve._served[0]) == 4


LEFT = {
    "is vllm": {"additional_config": {}},
    "nothing measured says that dsl is faster": {"additional_config": {"dsl": {"scaled_linears": "measured"}}},
    "LoRA": {"lora_config": object()},
}


@each_format
@pytest.mark.parametrize("reason", LEFT)
def test_reasons_against_an_engine(caplog: Any, form: Format, reason: str) -> None:
    mlp = MLP(form)
    (line,) = said(caplog, model_of(mlp), **LEFT[reason])
    assert line.startswith(f"vLLM serves 2 {form.layers.name} linear layers: ")
    assert reason in line
    assert type(form.layers.holder_of(mlp.gate_up_proj).kernel) is form.theirs


def test_layers_that_stay(caplog: Any) -> None:
    patched, weights, batches = MLP(NVFP4_FORMAT), MLP(NVFP4_FORMAT), MLP(MXFP8_FORMAT)
    patched.down_proj.forward = patched.down_proj.forward
    # As layers whose input stays in 16 bits have it.
    for layer in (weights.gate_up_proj, weights.down_proj):
        del layer.input_scale
    # As vLLM's layers of matrices of several groups have it.
    batches.down_proj.is_bmm = True
    lines = said(caplog, model_of(patched, weights, batches))
    assert "vLLM serves 1 MXFP8 linear layers: it multiplies batches of matrices" in lines
    assert "vLLM serves 1 NVFP4 linear layers: another forward was put into RowParallelLinear" in lines
    assert "vLLM serves 2 NVFP4 linear layers: its input is not quantised" in lines


@each_format
@pytest.mark.parametrize(("arch", "kernel"), [("sm_90a", None), ("sm_100a", None), ("sm_100a", "cute-sm100")])
def test_on_a_gpu(caplog: Any, monkeypatch: pytest.MonkeyPatch, form: Format, arch: str, kernel: str | None) -> None:
    """SM100's kernel serves where it is named; nothing else of this package's multiplies these formats on a GPU."""
    monkeypatch.setattr(serve, "targets", SimpleNamespace(detect=lambda device: from_arch(arch)))
    monkeypatch.setattr(serve.ahead, "compile_scaled_linears", lambda config, layers: None)
    options = {"scaled_linears": "dsl"} | ({} if kernel is None else {"scaled_linears_kernel": kernel})
    lines = said(caplog, model_of(MLP(form)), additional_config={"dsl": options})
    if kernel is None:
        name = form.layers.name
        assert len(lines) == 2
        assert all(
            line.startswith(f"vLLM serves 1 {name} linear layers: no kernel for scaled_linear") for line in lines
        )
        assert all(f"x is {name.lower()}: no kernel but SM100's multiplies it" in line for line in lines)
    else:
        assert [line.endswith(f"on {arch}: by scaled-linear sm100") for line in lines] == [True, True]


def test_a_second_time_changes_nothing(caplog: Any) -> None:
    model = model_of(MLP(NVFP4_FORMAT), MLP(MXFP8_FORMAT))
    said(caplog, model)
    holder = NVFP4_FORMAT.layers.holder_of(model["layers"][0].gate_up_proj)
    before = holder.kernel
    assert said(caplog, model) == []
    assert holder.kernel is before


@each_format
def test_inside_torch_compile(caplog: Any, form: Format) -> None:
    mlp = MLP(form)
    said(caplog, model_of(mlp))
    processed(mlp)
    x = x_of(5)
    wanted = mlp(x)
    assert error(torch.compile(mlp, fullgraph=True, backend="eager")(x), wanted.double()) < 0.05


@pytest.mark.parametrize("shape", [(1, 32), (130, 160)])
def test_vllms_quantisation_is_the_one_of_a_cpu(shape: tuple[int, int]) -> None:
    """Kernels on a GPU get MXFP8 inputs from vLLM's function."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float32).to(BF16)
    values, scale = mxfp8_e4m3_quantize(x, is_sf_swizzled_layout=True)
    ours = mma_quantized(x, MXFP8)
    assert torch.equal(values.view(torch.uint8), ours.values.view(torch.uint8))
    assert torch.equal(scale.view(MXFP8.scale_shape(*shape)), ours.scale.view(torch.uint8))


def operands() -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        mma_quantized(torch.randn(rows, 96, generator=generator, dtype=torch.float32), NVFP4, 0.01) for rows in (5, 48)
    )


def test_the_api_multiplies_both_scales_of_whole_matrices() -> None:
    x, weight = operands()
    wanted = mma_dequantized(x, 0.01) @ mma_dequantized(weight, 0.01).T
    found = api.scaled_linear(x, weight, alpha=torch.tensor([1e-4], dtype=torch.float32))
    assert torch.allclose(found.double(), wanted, rtol=0.01, atol=0.01)


ONE = torch.ones(1)
WRONG = {
    "alpha is None and x is nvfp4": (InvalidInput, lambda x, weight: api.scaled_linear(x, weight)),
    "alpha is float64": (InvalidInput, lambda x, w: api.scaled_linear(x, w, alpha=ONE.double())),
    r"weight.values has shape \(48, 32\)": (
        InvalidInput,
        lambda x, w: api.scaled_linear(x, w._replace(values=w.values[:, :32]), alpha=ONE),
    ),
    r"x.scale has shape \(128, 4\)": (
        InvalidInput,
        lambda x, w: api.scaled_linear(x._replace(scale=x.scale[:, :4]), w, alpha=ONE),
    ),
    "out_scale is None: a scale is needed for an output in nvfp4": (
        InvalidInput,
        lambda x, w: api.scaled_linear_quantized(x, w, to=NVFP4, alpha=ONE),
    ),
    "None is needed for an output in mxfp8": (
        InvalidInput,
        lambda x, w: api.scaled_linear_quantized(x, w, to=MXFP8, alpha=ONE, out_scale=ONE),
    ),
    "x is nvfp4: no kernel but SM100's": (
        Unsupported,
        lambda x, w: api.scaled_linear(x, w, alpha=ONE, kernel="triton"),
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str) -> None:
    kind, call = WRONG[message]
    with pytest.raises(kind, match=message):
        call(*operands())
