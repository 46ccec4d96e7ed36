# SPDX-License-Identifier: Apache-2.0
"""Shared experts that the kernels of routed experts compute: which are taken from vLLM, and what comes out."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from dsl_backend.runtime import target as targets
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.fused_mlp.find import gated_activations
from dsl_backend.vllm_plugin.projections.find import projections
from dsl_backend.vllm_plugin.routed_experts import serve
from dsl_backend.vllm_plugin.routed_experts.kernels import DSLExperts, SharedDSLExperts

FACTORY = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not hasattr(fused_moe, "FusedMoEFactory"), reason="vLLM's runner calls them otherwise"),
]

BF16 = torch.bfloat16
EXPERTS, TOPK, HIDDEN, WIDTH, SHARED = 4, 2, 64, 32, 2
BY_DSL = {"experts": "dsl", "shared_experts": "dsl"}


class Workspaces:
    """In the place of vLLM's manager of scratch: new memory for each call."""

    def get_simultaneous(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.setattr(modular_kernel, "current_workspace_manager", Workspaces)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.no_grad():
        yield


class MLP(nn.Module):
    """As DeepSeek's."""

    def __init__(self, width: int = SHARED * WIDTH, dtype: torch.dtype = BF16, **options: Any) -> None:
        super().__init__()
        activation = options.pop("activation", SiluAndMul)
        facts = {"bias": False, "params_dtype": dtype, **options}
        self.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [width] * 2, **facts)
        self.down_proj = RowParallelLinear(width, HIDDEN, bias=False, reduce_results=False, params_dtype=dtype)
        self.act_fn = activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x


class Doubled(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Skipped(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0] if x is None else x


class Gated(MLP):
    """As Qwen2's, whose gate is another projection."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_gate = nn.Linear(HIDDEN, 1)


class Layer(nn.Module):
    """Routed and shared experts as vLLM's models make them."""

    def __init__(
        self, mlp: nn.Module, dtype: torch.dtype = BF16, prefix: str = "layer.experts", **options: Any
    ) -> None:
        super().__init__()
        self.shared_experts = mlp
        self.experts: Any = FACTORY(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            top_k=TOPK,
            params_dtype=dtype,
            prefix=prefix,
            shared_experts=mlp,
            **options,
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            gain = 2 * parameter.shape[-1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * gain)


def made(make: Callable[[], nn.Module] = MLP, **options: Any) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return Layer(make(), **options)


def engine(**options: Any) -> Any:
    """As much of a VllmConfig as is read."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=ensure_member()),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        lora_config=None,
        model_config=None,
        additional_config={"dsl": BY_DSL | options},
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    )


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Serves a layer; what the log says then."""

    def function(layer: nn.Module, **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            serve.serve_experts(layer, engine(**options))
        return [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]

    return function


def process(layer: Any) -> Any:
    """As vLLM's loaders do; returns the kernel that vLLM made."""
    with set_current_vllm_config(VllmConfig()):
        for module in layer.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
    return layer.experts.routed_experts.quant_method.moe_kernel.fused_experts


def expected(layer: Any, x: torch.Tensor, weights: Any, ids: Any, dtype: torch.dtype) -> torch.Tensor:
    """What routed experts and shared ones return, added up."""
    experts, mlp, act = layer.experts.routed_experts, layer.shared_experts, SiluAndMul()
    shared = act.forward_native(x.to(dtype) @ mlp.gate_up_proj.weight.to(dtype).T) @ mlp.down_proj.weight.to(dtype).T
    out = shared / layer.experts.routed_scaling_factor
    for token, slot in torch.ones_like(ids).nonzero().tolist():
        expert = int(ids[token, slot])
        inner = act.forward_native(x[token].to(dtype)[None] @ experts.w13_weight[expert].to(dtype).T)
        out[token] += (weights[token, slot].to(dtype) * (inner @ experts.w2_weight[expert].to(dtype).T))[0]
    return out


def judged(layer: Any, tokens: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(BF16)
    weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    out: torch.Tensor = layer.experts.routed_experts.forward_modular(x, weights, ids.int())
    assert_within_budget(out, *(expected(layer, x, weights, ids, dtype) for dtype in (torch.float64, BF16)))
    return out


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_one_kernel_returns_both(factor: float, served: Any) -> None:
    options = {"routed_scaling_factor": factor, "apply_routed_scale_to_output": True} if factor != 1 else {}
    layer = made(**options)
    assert layer.experts.routed_scaling_factor == factor
    (line,) = served(layer)
    assert "dsl serves 1 layers of routed experts, " in line
    assert "2 shared" in line
    assert isinstance(process(layer), SharedDSLExperts)
    judged(layer)


def test_what_vllm_runs_no_more(served: Any) -> None:
    """The runner returns what the kernels do: nothing is added, and the MLP's own layers are left alone."""
    layer = made()
    before = layer.experts._forward_entry
    served(layer)
    process(layer)
    assert layer.experts.shared_experts is None
    assert layer.experts._forward_entry is not before
    assert not list(gated_activations(layer))
    assert not [name for name, _ in projections(layer) if "shared" in name]
    with pytest.raises(RuntimeError, match="the kernels of routed experts apply this projection"):
        layer.shared_experts(torch.zeros(1, HIDDEN, dtype=BF16))


def test_weights_are_read_at_each_call(served: Any) -> None:
    layer = made()
    served(layer)
    process(layer)
    before = judged(layer)
    layer.shared_experts.down_proj.weight.data *= 2
    layer.shared_experts.gate_up_proj.weight.data = layer.shared_experts.gate_up_proj.weight.data.flip(0)
    assert not torch.equal(judged(layer), before)


def test_each_layer_has_its_own(served: Any) -> None:
    model = nn.ModuleList([made(), made(prefix="other.experts")])
    model[1].shared_experts.down_proj.weight.data *= -3
    served(model)
    for layer in model:
        process(layer)
        judged(layer)
    (services,) = [Counter(one.values()) for one in serve._served]
    assert list(services.values()) == [2], "one kind of layer"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: made(lambda: MLP(width=WIDTH + 8)), "a whole number of experts of 64 to 32"),
        (lambda: made(lambda: MLP(bias=True)), "a shared expert is quantised, has a bias or is served otherwise"),
        (lambda: made(lambda: MLP(activation=GeluAndMul)), "GeluAndMul is not the activation of the routed experts"),
        (lambda: made(Doubled), "Doubled does more than a product, an activation and a product"),
        (lambda: made(Skipped), "Skipped does more than a product, an activation and a product"),
        (lambda: made(Gated), "Gated is not a gate and up projection, an activation and a down projection"),
        (
            lambda: made(
                lambda: MLP(dtype=torch.float16),
                dtype=torch.float16,
                routed_scaling_factor=2.5,
                apply_routed_scale_to_output=True,
            ),
            "in float16 vLLM divides what shared experts return",
        ),
    ],
)
def test_what_stays_vllms(layer: Callable[[], Any], reason: str, served: Any) -> None:
    """The routed experts are served all the same."""
    one = layer()
    routed, beside = served(one)
    assert "dsl serves 1 layers of routed experts, " in routed
    assert beside.startswith("vLLM serves 1 shared experts: ")
    assert reason in beside
    assert one.experts.shared_experts is not None
    assert isinstance(process(one), DSLExperts)


@pytest.mark.parametrize("options", [{"shared_experts": "measured"}, {"shared_experts": "vllm"}])
def test_they_are_served_if_asked_for(options: dict[str, str], served: Any) -> None:
    layer = made()
    (line,) = served(layer, **options)
    assert "shared" not in line
    assert layer.experts.shared_experts is not None


def test_other_ranks_tokens(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made()
    monkeypatch.setattr(layer.experts.moe_config.moe_parallel_config, "use_ep", True)
    assert "expert parallelism gives routed and shared experts other tokens" in served(layer)[-1]


def test_compiled_ahead_with_shared_experts(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(serve.ahead, "compile_experts", lambda config, layers: begun.extend(layers))
    served(made())
    assert [spec.shared_experts for spec, _ in begun] == [SHARED]
    assert targets.detect(torch.device("cpu")).kernel_arch is None
