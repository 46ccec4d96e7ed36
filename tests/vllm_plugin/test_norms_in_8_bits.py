# SPDX-License-Identifier: Apache-2.0
"""Norms of fp8 models that quantise their result for the projection behind them: which do, and what comes out."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from dsl_backend.norm.spec import FP8, Scaling
from dsl_backend.vllm_plugin.norms import serve, source
from dsl_backend.vllm_plugin.scaled_linears import kernels
from dsl_backend.vllm_plugin.scaled_linears import serve as serve_scaled_linears
from dsl_backend.vllm_plugin.scaled_linears.handed import Handed
from tests.vllm_plugin import test_scaled_linears as scaled
from tests.vllm_plugin.test_fused_mlp import engine, model_of

pytestmark = pytest.mark.usefixtures("one_rank")

BF16, K = torch.bfloat16, scaled.K
BY_DSL = {"scaled_linears": "dsl", "norms": "dsl"}
afresh = scaled.afresh


@pytest.fixture(autouse=True)
def no_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_served", [])


class Layer(nn.Module):
    """As vLLM's decoder layers are, with an MLP for attention too."""

    def __init__(self, scheme: str, mlp: type[scaled.MLP] = scaled.MLP) -> None:
        super().__init__()
        self.self_attn, self.mlp = mlp(scheme), mlp(scheme)
        with set_current_vllm_config(scaled.without_compilation()):
            self.input_layernorm, self.post_attention_layernorm = RMSNorm(K, eps=1e-5), RMSNorm(K, eps=1e-5)
        for seed, norm in enumerate((self.input_layernorm, self.post_attention_layernorm)):
            norm.weight.data.copy_(torch.randn(K, generator=torch.Generator().manual_seed(seed), dtype=torch.float32))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = x
            x = self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x=x)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return x, residual


class Kept(Layer):
    """Reads the first norm's result twice."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.input_layernorm(x)
        made = self.self_attn(normed)
        return made + normed, self.mlp(self.post_attention_layernorm(made))


class Twice(Layer):
    """Calls a norm in another method too."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.input_layernorm(x)
        x = self.self_attn(x)
        return self.other(x), x

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.input_layernorm(x)


class OneBranch(Layer):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x = self.input_layernorm(x)
        x = self.self_attn(x)
        return x, x


class Shaped(scaled.MLP):
    """Asks its input for more than a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(gate_up))[0].view(x.shape)


def said(caplog: pytest.LogCaptureFixture, model: nn.Module, **options: str) -> list[str]:
    caplog.clear()
    changes: dict[str, Any] = {
        "additional_config": {"dsl": BY_DSL | options},
        "quant_config": object(),
        "model_config": SimpleNamespace(get_hidden_size=lambda: K, dtype=BF16),
    }
    with caplog.at_level(logging.INFO), set_current_vllm_config(scaled.without_compilation()):
        serve_scaled_linears.serve_scaled_linears(model, engine(**changes))
        serve.serve_norms(model, engine(**changes))
    return [record.getMessage() for record in caplog.records if " norms" in record.getMessage()]


def inputs(rows: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    return scaled.x_of(rows), scaled.x_of(rows).flip(0)


@pytest.mark.parametrize("scheme", ["channels", "static", "blocks"])
def test_results_are_as_with_a_launch_of_its_own(caplog: Any, scheme: str) -> None:
    """One rounding to 16 bits less: beside float64 the error is no larger than that of vLLM's norms."""
    ours, theirs = Layer(scheme), Layer(scheme)
    (line,) = said(caplog, model_of(ours))
    scale = {"channels": "token", "static": "tensor", "blocks": "group"}[scheme]
    assert line.startswith(
        f"dsl serves 2 norms, RMSNorm of {K} bfloat16 to float8_e4m3fn, with residual, scale by {scale}, on cpu"
    )
    said(caplog, model_of(theirs), norms="vllm")
    for model in (ours, theirs):
        scaled.processed(model)
    for residual in (None, inputs()[1]):
        x = inputs()[0]
        found, wanted = ours(x, residual), theirs(x, residual)
        norm, z = theirs.input_layernorm, x.double() if residual is None else (x + residual).double()
        normed = z * norm.weight.double() / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        exact = scaled.exact_of(theirs.self_attn, normed)
        z = z + exact
        normed = z * theirs.post_attention_layernorm.weight.double() / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        for mine, other, right in zip(found, wanted, (scaled.exact_of(theirs.mlp, normed), z), strict=True):
            assert scaled.error(mine, right) <= 1.2 * scaled.error(other, right)
            assert scaled.error(mine, right) < 0.1


@pytest.mark.parametrize("scheme", ["channels", "blocks"])
def test_nothing_quantises_behind_them(caplog: Any, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The projections get 8 bits: their own quantisation is not called."""
    layer = Layer(scheme)
    said(caplog, model_of(layer))
    scaled.processed(layer)
    given: list[Any] = []
    layer_of = kernels.ServedByDsl.layer_of

    def seen(self: Any, x: Any, *rest: Any) -> Any:
        given.append(x)
        return layer_of(self, x, *rest)

    monkeypatch.setattr(kernels.ServedByDsl, "layer_of", seen)
    layer(*inputs(5))
    assert len(given) == 4
    assert all(isinstance(one, Handed) and one.values.dtype == FP8 for one in given)


def test_a_scale_that_is_written_later_is_used(caplog: Any) -> None:
    layer = Layer("static")
    said(caplog, model_of(layer))
    scaled.processed(layer)
    normed = layer.input_layernorm(inputs()[0])
    layer.self_attn.gate_up_proj.input_scale.data *= 2
    halved = layer.input_layernorm(inputs()[0])
    assert torch.equal(halved.scale, layer.self_attn.gate_up_proj.input_scale.view(1))
    before, inside = normed.values.float(), normed.values.float().abs() < 448
    assert torch.equal(before[inside & (before.abs() > 1)], 2 * halved.values.float()[inside & (before.abs() > 1)])


@pytest.mark.parametrize("scheme", ["channels", "blocks"])
def test_torch_compile_sees_one_node(caplog: Any, scheme: str) -> None:
    layer = Layer(scheme)
    said(caplog, model_of(layer))
    scaled.processed(layer)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 3):
        for found, expected in zip(compiled(*inputs(rows)), layer(*inputs(rows)), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        (lambda: Layer("dynamic"), {"no norm quantises to e4m3": 2}),
        (lambda: Layer("channels", Shaped), {"Shaped does more with it than one product": 2}),
        (lambda: Kept("channels"), {"Kept does not just hand": 2}),
        (lambda: Twice("channels"), {"Twice does not just hand": 2}),
        (lambda: OneBranch("channels"), {"OneBranch does not just hand": 2}),
    ],
)
def test_norms_that_stay(caplog: Any, model: Any, reasons: dict[str, int]) -> None:
    layer = model()
    lines = said(caplog, model_of(layer))
    assert sum(int(line.split()[2]) for line in lines) == 2
    for reason in reasons:
        assert all(line.startswith("vLLM serves ") and reason in line for line in lines), lines
    assert not hasattr(layer.input_layernorm, "dsl_handed_to")


def test_projections_that_are_not_dsls(caplog: Any) -> None:
    (line,) = said(caplog, model_of(Layer("channels")), scaled_linears="vllm")
    assert "dsl does not serve the projection behind it in 8 bits" in line


def test_a_projection_of_two_modules(caplog: Any) -> None:
    """Another module may call it with 16 bits."""
    model = model_of(Layer("channels"))
    model.other = next(one for one in model.modules() if isinstance(one, Layer)).mlp.gate_up_proj
    assert any("several modules hold it or what is behind it" in line for line in said(caplog, model))


def test_by_default_they_stay(caplog: Any) -> None:
    (line,) = said(caplog, model_of(Layer("channels")), norms="measured")
    assert line.startswith("vLLM serves 2 norms: ")


def test_what_is_compiled_before(caplog: Any) -> None:
    said(caplog, model_of(Layer("channels")))
    (spec,) = serve.served_specs()
    assert (spec.out_dtype, spec.scaling, spec.residual) == (FP8, Scaling.TOKEN, True)


def test_vllms_models_are_read() -> None:
    """A version whose layers are written otherwise would be left alone without a word here."""
    from vllm.model_executor.models import llama, qwen3

    for layer, attention, mlp in (
        (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP),
        (qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP),
    ):
        first = source.given_to(layer, "input_layernorm")
        second = source.given_to(layer, "post_attention_layernorm")
        assert first == source.Given("self_attn", "hidden_states")
        assert isinstance(second, source.Given)
        assert second.module == "mlp"
        assert source.taken_by(attention, first.argument) == "qkv_proj"
        assert source.taken_by(mlp, second.argument) == "gate_up_proj"
