# SPDX-License-Identifier: Apache-2.0
"""Projections of vLLM's that this package serves for few rows: which do, what comes out, and what the log says."""

import datetime
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from dsl_backend.gemm.sm90.configs import SmallMConfig
from dsl_backend.linear import api, tuned
from dsl_backend.linear.tuned import MOST_ROWS, TUNED_CONFIGS, Unfused
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import ahead, compat, warm_up
from dsl_backend.vllm_plugin.fused_mlp import fuse
from dsl_backend.vllm_plugin.projections import method, serve
from tests.vllm_plugin.test_fused_mlp import BF16, MLP, engine, model_of

pytestmark = pytest.mark.usefixtures("one_rank")

K, HEADS, VOCAB = 64, 4, 192
BY_DSL = {"additional_config": {"dsl": {"projections": "dsl"}}}
OURS = (method.LinearMethod, method.EmbeddingMethod)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, and the reference serves: kernels are compared with it elsewhere."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.setattr(fuse, "_fused", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """The projections of an attention layer, with the logits' and a router behind them."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.qkv_proj = QKVParallelLinear(K, K // HEADS, HEADS, 2, bias=bias, params_dtype=dtype)
            self.o_proj = RowParallelLinear(K, K, bias=bias, params_dtype=dtype)
            self.gate = ReplicatedLinear(K, 8, bias=False, params_dtype=dtype)
            self.lm_head = ParallelLMHead(VOCAB, K, params_dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * K**-0.5)


class Own(ReplicatedLinear):
    """Of somebody else's."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x * 2)


class Plain(UnquantizedLinearMethod):
    """Of somebody else's."""


def is_served(layer: Any) -> bool:
    return isinstance(layer.quant_method, OURS)


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Serves a model; what the log says then."""

    def function(model: nn.Module, **changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            serve.serve_projections(model, engine(**BY_DSL | changes))
        return [record.getMessage() for record in caplog.records if "projections" in record.getMessage()]

    return function


def x_of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_what_is_served_and_said(served: Any) -> None:
    model = Attention(bias=True)
    lines = served(model)
    assert all(is_served(layer) for layer in (model.qkv_proj, model.o_proj, model.gate, model.lm_head))
    assert [line.partition(", product")[0] for line in lines] == [
        "dsl serves 1 projections (QKVParallelLinear)",
        "dsl serves 1 projections (RowParallelLinear)",
        "dsl serves 1 projections (ReplicatedLinear)",
        "dsl serves 1 projections (ParallelLMHead)",
    ]
    assert "product + bias of 64 to 128 bfloat16, for 1 to 64 rows on cpu" in lines[0]


def test_logits_need_no_operator(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of compiled code; other layers are in it, and a compiled caller of the logits' sees one node."""
    model, x, called = Attention(), x_of(3), []
    served(model)
    operator = method.PROJECTION
    monkeypatch.setattr(method, "PROJECTION", lambda *given: called.append(given) or operator(*given))

    def outputs() -> list[torch.Tensor]:
        return [layer.quant_method.apply(layer, x) for layer in (model.lm_head, model.o_proj)]

    found = outputs()
    assert [given[1] is model.o_proj.weight for given in called] == [True]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert all(map(torch.equal, found, outputs()))
    assert [given[1] is model.lm_head.weight for given in called] == [False, True, False]


def test_a_second_time_changes_nothing(served: Any) -> None:
    model = Attention()
    served(model)
    methods = [module.quant_method for module in model.children()]
    assert served(model) == []
    assert [module.quant_method for module in model.children()] == methods


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, MOST_ROWS, MOST_ROWS + 1])
def test_results(served: Any, bias: bool, rows: int) -> None:
    """Of few rows and of many, by each of a decoder's layers."""
    model = Attention(bias=bias)
    served(model)
    for layer in (model.qkv_proj, model.o_proj, model.gate):
        x = x_of(rows)
        out, _ = layer(x)
        exact = nn.functional.linear(
            x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
        assert_within_budget(out, exact, nn.functional.linear(x, layer.weight, layer.bias))
    x = x_of(rows)
    out = model.lm_head.quant_method.apply(model.lm_head, x)
    assert_within_budget(out, x.double() @ model.lm_head.weight.double().T, x @ model.lm_head.weight.T)


def test_few_rows_are_ours_and_many_are_not(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()
    served(model)
    seen: list[int] = []
    theirs = api.linear
    monkeypatch.setattr(
        method.api, "linear", lambda x, *rest, **more: (seen.append(len(x)), theirs(x, *rest, **more))[1]
    )
    for rows in (1, MOST_ROWS, MOST_ROWS + 1, 500):
        model.o_proj(x_of(rows))
    model.o_proj(x_of(2, 3))
    assert seen == [1, MOST_ROWS, 6]


def test_reloaded_weights_are_used(served: Any) -> None:
    model = Attention()
    served(model)
    model.o_proj.quant_method.process_weights_after_loading(model.o_proj)
    before, _ = model.o_proj(x_of(3))
    model.o_proj.weight.data = model.o_proj.weight.data * 2
    after, _ = model.o_proj(x_of(3))
    torch.testing.assert_close(after, before * 2)


def test_tied_weights_stay_an_embedding(served: Any) -> None:
    model = Attention()
    with set_current_vllm_config(VllmConfig()):
        embed = VocabParallelEmbedding(VOCAB, K, params_dtype=BF16)
    # vLLM leaves it as memory was, which may be NaN: then it is not equal to itself.
    embed.weight.data.copy_(x_of(VOCAB))
    model.lm_head = model.lm_head.tie_weights(embed)
    served(model)
    assert model.lm_head.weight is embed.weight
    assert not is_served(embed)
    assert torch.equal(embed(torch.tensor([5, 3])), embed.weight[[5, 3]])


def test_torch_compile_sees_one_node(served: Any) -> None:
    model = Attention()
    served(model)
    x = x_of(5)
    expected, _ = model.o_proj(x)
    compiled = torch.compile(lambda x: model.o_proj(x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 3, MOST_ROWS + 3):
        assert torch.equal(compiled(x_of(rows)), model.o_proj(x_of(rows))[0])
    assert torch.equal(compiled(x), expected)


# What stays vLLM's.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"additional_config": {"dsl": {"projections": "measured"}}}, "nothing measured says that dsl is faster"),
        ({"additional_config": {}}, "nothing measured says that dsl is faster"),
        ({"additional_config": {"dsl": {"projections": "vllm"}}}, "additional_config['dsl']['projections'] is vllm"),
        ({"lora_config": object()}, "LoRA (lora_config) adds to what a projection returns"),
        ({"kernel_config": SimpleNamespace(linear_backend="torch")}, "--linear-backend torch asks for vLLM's kernels"),
        (
            {
                "parallel_config": SimpleNamespace(tensor_parallel_size=2),
                "compilation_config": SimpleNamespace(
                    pass_config=SimpleNamespace(enable_sp=True, fuse_gemm_comms=None)
                ),
            },
            "sequence parallelism (enable_sp) communicates within vLLM's own products",
        ),
    ],
)
def test_engines_that_are_left_alone(served: Any, changes: Any, says: str) -> None:
    model = Attention()
    (line,) = served(model, **changes)
    assert line.startswith(f"vLLM serves 4 projections: {says}")
    assert not any(is_served(layer) for layer in model.children())


def test_batch_invariance_leaves_all_to_vllm(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_batch_invariant", lambda: True)
    (line,) = served(Attention(), additional_config={})
    assert "VLLM_BATCH_INVARIANT" in line
    assert """'{"dsl": {"projections": "dsl"}}' has dsl serve them""" in line
    model = Attention()
    lines = served(model)
    assert not any(is_served(layer) for layer in model.children())
    assert all("torch sums in an order that depends on the number of rows" in line for line in lines)


def test_batch_invariance_asks_for_one_kernel_for_any_number_of_rows(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "is_batch_invariant", lambda: True)
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: TARGET)
    begun: list[Any] = []
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: begun.extend(units(TARGET)))
    model = Attention()
    lines = served(model)
    assert all(is_served(layer) for layer in model.children())
    assert all(", for all rows on sm_90a" in line for line in lines), lines
    specs = serve.served_specs()
    assert all(spec.batch_invariant for spec in specs)
    assert len(begun) == len(specs), "one kernel for each"
    asked: list[Any] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: Any, **options: Any) -> torch.Tensor:
        asked.append((len(x), options["batch_invariant"]))
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(method.api, "linear", product)
    monkeypatch.setattr(method, "spare_sms", lambda device: 0)
    for rows in (1, MOST_ROWS + 1, 300):
        assert model.o_proj(x_of(rows))[0].shape == (rows, K)
    assert asked == [(1, True), (MOST_ROWS + 1, True), (300, True)]


def test_another_backend_is_left_alone(served: Any) -> None:
    model = Attention()
    assert served(model, attention_config=SimpleNamespace(backend=None)) == []
    assert not is_served(model.o_proj)


def test_layers_that_are_left_alone(served: Any) -> None:
    model = Attention(dtype=torch.float32)
    assert not any(is_served(layer) for layer in model.children())
    (line,) = served(model)
    assert "float32" in line
    model = Attention()
    with set_current_vllm_config(VllmConfig()):
        model.gate = Own(K, 8, bias=False, params_dtype=BF16)
        model.o_proj.quant_method = Plain()
    model.qkv_proj.forward = model.qkv_proj.forward
    lines = served(model)
    assert [is_served(layer) for layer in (model.qkv_proj, model.o_proj, model.gate, model.lm_head)] == [False] * 3 + [
        True
    ]
    assert "vLLM serves 1 projections: Own has a forward of its own" in lines
    assert "vLLM serves 1 projections: QKVParallelLinear has a forward of its own" in lines
    assert "vLLM serves 1 projections: a layer is quantised or no plain product (Plain)" in lines


def router(**options: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    with set_current_vllm_config(VllmConfig()):
        made = GateLinear(K, 8, bias=False, params_dtype=BF16, **options)
    made.weight.data.copy_(torch.randn(8, K, generator=torch.Generator().manual_seed(3)))
    return made


@pytest.mark.parametrize("out_dtype", [None, BF16])
def test_router_of_logits_in_the_weight_s_dtype(out_dtype: torch.dtype | None, served: Any) -> None:
    gate = router(out_dtype=out_dtype)
    theirs = nn.functional.linear(x_of(5), gate.weight)
    (line,) = served(nn.ModuleList([gate]))
    assert line.startswith("dsl serves 1 projections (GateLinear), product of 64 to 8 bfloat16")
    ours = gate(x_of(5))[0]
    assert ours.dtype is BF16
    torch.testing.assert_close(ours, theirs)
    assert is_served(gate)


def test_router_with_a_kernel_of_its_own_is_left_alone(served: Any) -> None:
    special = router()
    special.allow_some_router_gemm = True
    gates = nn.ModuleList([router(out_dtype=torch.float32), special])
    assert served(gates) == ["vLLM serves 2 projections: GateLinear has a forward of its own"]
    assert not any(is_served(gate) for gate in gates)


def fused_latent(own_kernel: bool = False) -> Any:
    """MLA's projection to the latents of queries and of keys.

    Args:
        own_kernel: with vLLM's own kernel for few rows, as DeepSeek-V3's has on GPUs.
    """
    from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear

    with set_current_vllm_config(VllmConfig()):
        made = DeepSeekV2FusedQkvAProjLinear(K, [48, 32])
    made.weight.data = torch.randn(80, K, generator=torch.Generator().manual_seed(4)).to(BF16)
    made._use_min_latency_gemm = own_kernel
    return made


@pytest.mark.parametrize("own_kernel", [False, True])
@pytest.mark.parametrize("rows", [1, MOST_ROWS + 1])
def test_fused_latent_projection(own_kernel: bool, rows: int, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for, so that it replaces vLLM's own kernel too."""
    layer, called = fused_latent(own_kernel), []
    (line,) = served(nn.ModuleList([layer]))
    assert line.startswith("dsl serves 1 projections (DeepSeekV2FusedQkvAProjLinear), product of 64 to 80 bfloat16")
    operator = method.PROJECTION
    monkeypatch.setattr(method, "PROJECTION", lambda *given: called.append(len(given[0])) or operator(*given))
    x = x_of(rows)
    out, bias = layer(x)
    assert called == [rows]
    assert bias is None
    assert_within_budget(out, x.double() @ layer.weight.double().T, x @ layer.weight.T)


@pytest.mark.parametrize("own_kernel", [False, True])
def test_fused_latent_projection_by_measurement(own_kernel: bool, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed was timed beside cuBLAS, and not beside vLLM's own kernel."""
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: TARGET)
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: None)
    layer = fused_latent(own_kernel)
    (line,) = served(nn.ModuleList([layer]), additional_config={})
    assert is_served(layer) is not own_kernel
    assert layer._use_min_latency_gemm is own_kernel
    says = "DeepSeekV2FusedQkvAProjLinear has a kernel of vLLM's for up to 16 rows"
    assert (f"vLLM serves 1 projections: {says}" in line) is own_kernel


@pytest.mark.parametrize("changed", ["another flag", "another parent's forward"])
def test_fused_latent_projection_of_another_form_is_left_alone(changed: str, served: Any) -> None:
    layer = fused_latent()
    if changed == "another flag":
        del layer._use_min_latency_gemm
    else:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (Own,), {"forward": kind.forward})
    assert served(nn.ModuleList([layer])) == [
        "vLLM serves 1 projections: DeepSeekV2FusedQkvAProjLinear has a forward of its own"
    ]
    assert not is_served(layer)


def test_fused_layers_stay_fused(served: Any) -> None:
    model = model_of(MLP())
    fuse.fuse_model(model, engine())
    served(model)
    mlp: Any = model["layers"][0]
    assert not is_served(mlp.gate_up_proj)
    assert is_served(mlp.down_proj)


# What was measured.

GPU = "NVIDIA Test"
TARGET = replace(from_arch("sm_90a"), gpu=GPU)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """o_proj was faster with 1 to 8 rows, and slower with 9 to 16, on this GPU."""

    def record(least: int, most: int, config: Any) -> Any:
        problem = tuned.problem_of(K, K, False, BF16, TARGET.sm_count).of_rows(least, most)
        facts = {"gpu": GPU, "arch": "sm_90a", "date": datetime.date(2026, 11, 25), "commit": "0123abc", "versions": {}}
        return TUNED_CONFIGS.record(problem, config, us=1.0, default_us=2.0, **facts)

    found = [record(1, 8, SmallMConfig(tokens=8, num_splits=1)), record(9, 16, Unfused())]
    monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (found, []))
    tuned.replaces.cache_clear()
    yield
    tuned.replaces.cache_clear()


@pytest.mark.usefixtures("records")
def test_measured_rows_alone_are_ours() -> None:
    assert [tuned.replaces(rows, K, K, BF16, TARGET) for rows in (1, 8, 9, 16, 17)] == [True, True, False, False, False]


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("sizes", "dtype", "changes"),
    [((K, 2 * K), BF16, {}), ((K, K), torch.float16, {}), ((K, K), BF16, {"gpu": "NVIDIA Other"})],
)
def test_few_rows_are_ours_on_sm90_without_a_record(sizes: Any, dtype: torch.dtype, changes: Any) -> None:
    ours = [tuned.replaces(rows, *sizes, dtype, replace(TARGET, **changes)) for rows in (1, 16, 17, 64)]
    assert ours == [True, True, False, False]
    for other in (replace(TARGET, gpu=None), replace(TARGET, **changes, capability=(10, 0))):
        assert not tuned.replaces(1, *sizes, dtype, other)


@pytest.mark.usefixtures("records")
def test_measured_layers_alone_are_served(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: TARGET)
    begun: list[Any] = []
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: begun.extend(units(TARGET)))
    model = Attention()
    lines = served(model, additional_config={"dsl": {"projections": "measured"}})
    assert all(is_served(layer) for layer in model.children())
    assert any(", for 1 to 8 rows on sm_90a" in line for line in lines), lines
    assert sum(", for 1 to 16 rows on sm_90a" in line for line in lines) == 3, lines
    compiled = {unit.key.config for unit in begun}
    assert compiled
    assert all(tuned.config_of(serve.served_specs().copy().pop(), rows, TARGET) in compiled for rows in (1, 8, 9, 64))


@pytest.mark.usefixtures("records")
def test_unmeasured_layers_are_left_alone(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: replace(TARGET, capability=(10, 0)))
    model = Attention()
    lines = served(model, additional_config={"dsl": {"projections": "measured"}})
    assert not any(is_served(layer) for layer in model.children())
    assert any(line.startswith("vLLM serves 4 projections: nothing measured") for line in lines), lines


@pytest.mark.usefixtures("records")
def test_warm_up_compiles_what_is_served(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()
    served(model)
    assert warm_up.projection_specs() == serve.served_specs()
    assert len(serve.served_specs()) == 4
    assert serve.compilation_key().count("product of") == 4
