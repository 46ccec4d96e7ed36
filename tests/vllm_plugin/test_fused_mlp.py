# SPDX-License-Identifier: Apache-2.0
"""Projections and activations of vLLM's that become one layer: which do, what comes out, and what the log says."""

import importlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm import envs as vllm_envs
from vllm.model_executor.layers.activation import (
    GeluAndMul,
    MulAndSilu,
    SiluAndMul,
    SiluAndMulWithClamp,
    SwigluOAIAndMul,
)
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.model_loader import reload

from dsl_backend import envs
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import api
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.triton import gemm as _interpreted  # noqa: F401 -- before tests that unset TRITON_INTERPRET
from dsl_backend.runtime import target as targets
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import warm_up
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.fused_mlp import forward_source, fuse, method

pytestmark = pytest.mark.usefixtures("one_rank")

BF16 = torch.bfloat16
K, N = 32, 48


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is fused yet, and the reference serves: kernels are compared with it elsewhere.

    As in vLLM's runners no gradient is asked for: 0.26's biases would have one.
    """
    monkeypatch.setattr(fuse, "_fused", [])
    others = {name: read for name, read in vllm_envs.environment_variables.items() if name != envs.LINEAR.name}
    monkeypatch.setattr(vllm_envs, "environment_variables", others)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.no_grad():
        yield


class MLP(nn.Module):
    """As most of vLLM's are."""

    def __init__(self, activation: nn.Module | None = None, dtype: torch.dtype = BF16, **options: Any) -> None:
        super().__init__()
        options = {"bias": False, "params_dtype": dtype, **options}
        sizes = options.pop("sizes", [N, N])
        self.gate_up_proj = MergedColumnParallelLinear(K, sizes, **options)
        self.down_proj = RowParallelLinear(N, K, bias=False, params_dtype=dtype)
        self.act_fn = SiluAndMul() if activation is None else activation
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x


class Inner(MLP):
    """What is compared: the activated values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        return self.act_fn(x)


class Scaled(MLP):
    """As FalconH1MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        x[:, :N] *= 2
        return self.down_proj(self.act_fn(x))[0]


class Projection(MergedColumnParallelLinear):
    """Of somebody else's."""


class Plain(UnquantizedLinearMethod):
    """Of somebody else's."""


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (3 / K**0.5))


def engine(**changes: Any) -> Any:
    """As much of a VllmConfig as the fusion reads."""
    facts: dict[str, Any] = {
        "attention_config": SimpleNamespace(backend=ensure_member()),
        "device_config": SimpleNamespace(device=torch.device("cpu")),
        "lora_config": None,
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=None, fuse_gemm_comms=None)),
    }
    return SimpleNamespace(**facts | changes)


def model_of(*mlps: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(mlps)})


def is_fused(mlp: Any) -> bool:
    both = type(mlp.gate_up_proj.quant_method) is method.GatedLinearMethod, type(mlp.act_fn) is method.FusedActivation
    assert both[0] == both[1], "half fused"
    return both[0]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "linear layers" in record.getMessage()]


@pytest.fixture
def fused(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Fuses a model; what the log says then."""

    def function(model: nn.Module, **changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fuse.fuse_model(model, engine(**changes))
        return said(caplog)

    return function


def x_of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_what_is_fused_is_compiled_ahead(fused: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(fuse.ahead, "compile_linear", lambda config, specs: begun.extend(specs))
    fused(model_of(MLP(), MLP()))
    assert len(begun) == 2
    assert set(begun) == fuse.fused_specs()


# What comes out.

ACTIVATIONS = {
    "silu": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu-tanh": lambda: GeluAndMul("tanh"),
    "clamp": lambda: SiluAndMulWithClamp(1.5),
    "clamp-all": lambda: SiluAndMulWithClamp(1.5, 1.7, 0.5),
    "oai": SwigluOAIAndMul,
}


def judged(mlp: Inner, x: torch.Tensor) -> None:
    """What a fused module gives is as good as what it gave before, and is not just that."""
    activation = mlp.act_fn.activation if is_fused(mlp) else mlp.act_fn
    weight, bias = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias

    def by_vllm(dtype: torch.dtype) -> torch.Tensor:
        product = nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return activation.forward_native(product)

    assert_within_budget(mlp(x), by_vllm(torch.float64), by_vllm(x.dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, bias: bool, fused: Any) -> None:
    mlp = Inner(ACTIVATIONS[name](), bias=bias)
    (line,) = fused(model_of(mlp))
    assert (" + bias of " in line) == bias
    assert is_fused(mlp)
    judged(mlp, x_of(7))


@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3), (1,)])
def test_shapes(shape: tuple[int, ...], fused: Any) -> None:
    """Vision encoders have a batch too."""
    mlp = Inner(dtype=torch.float16)
    fused(model_of(mlp))
    judged(mlp, x_of(*shape, dtype=torch.float16))


def test_columns_apart(fused: Any) -> None:
    mlp = Inner()
    fused(model_of(mlp))
    x = x_of(6)
    assert torch.equal(mlp(x.T.contiguous().T), mlp(x))


def test_the_whole_module(fused: Any) -> None:
    mlp, theirs = MLP(), MLP()
    fused(model_of(mlp))
    for layer in (mlp.gate_up_proj, theirs.gate_up_proj, theirs.down_proj):
        layer.quant_method.process_weights_after_loading(layer)
    mlp.down_proj.cpu_linear = nn.functional.linear
    x, weight = x_of(9), MLP().gate_up_proj.weight
    exact = SiluAndMul.forward_native(x.double() @ weight.double().T) @ mlp.down_proj.weight.double().T
    assert_within_budget(mlp(x), exact, theirs(x))


def test_weights_are_read_at_each_call(fused: Any) -> None:
    """Loaded anew in place, put elsewhere as by a reload, or another parameter altogether."""
    mlp = Inner()
    fused(model_of(mlp))
    layer = mlp.gate_up_proj
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.shape == (2 * N, K), "a reload needs it where vLLM's loaders expect it"
    before = mlp(x_of(3))
    layer.weight.copy_(layer.weight * 0.5)
    judged(mlp, x_of(3))
    layer.weight.data = layer.weight.data * 3
    judged(mlp, x_of(3))
    loader = layer.weight.weight_loader
    layer.weight = nn.Parameter(torch.randn(2 * N, K).to(BF16), requires_grad=False)
    judged(mlp, x_of(3))
    assert not torch.equal(mlp(x_of(3)), before)
    assert loader is not None


def test_vllms_reload(fused: Any) -> None:
    """Its own, layer by layer: new values, in the memory that captured graphs read."""
    mlp = Inner()
    model, layer = model_of(mlp), mlp.gate_up_proj
    reload.record_metadata_for_reloading(model)
    fused(model)
    layer.quant_method.process_weights_after_loading(layer)
    before, place = mlp(x_of(3)), layer.weight.data_ptr()
    reload.initialize_layerwise_reload(model)
    halves = [torch.randn(N, K).to(BF16) for _ in range(2)]
    for index, half in enumerate(halves):
        layer.weight.weight_loader(layer.weight, half, index)
    reload.finalize_layerwise_reload(model, None)
    assert is_fused(mlp)
    assert torch.equal(layer.weight, torch.cat(halves))
    assert layer.weight.data_ptr() == place
    judged(mlp, x_of(3))
    assert not torch.equal(mlp(x_of(3)), before)


def test_loading_is_as_before(fused: Any) -> None:
    """VLLM's loader puts gate and up into their halves of a fused projection."""
    mlp = Inner()
    fused(model_of(mlp))
    weight = mlp.gate_up_proj.weight
    for half in (0, 1):
        weight.weight_loader(weight, torch.full((N, K), half + 1.0, dtype=BF16), half)
    assert weight[:N].eq(1).all()
    assert weight[N:].eq(2).all()


def test_what_else_an_activation_is_given(fused: Any) -> None:
    mlp = Inner()
    theirs = mlp.act_fn
    fused(model_of(mlp))
    other = x_of(4).repeat(1, 2 * N // K)
    assert torch.equal(mlp.act_fn(other), theirs(other))


def test_torch_compile_sees_one_node(fused: Any) -> None:
    mlp = Inner(bias=True)
    fused(model_of(mlp))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = x_of(5)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(mlp, backend=backend, fullgraph=True)(x), mlp(x))
    (calls,) = graphs
    assert calls.count("dsl_backend.gated_linear.default") == 1
    assert not [call for call in calls if "silu" in call or call == "linear"]


# Where two kernels were measured to be faster than one.


@pytest.fixture
def fused_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """More than 4 rows are left to vLLM; the rows that were not."""
    found: list[int] = []

    def ours(x: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
        found.append(x.shape[0])
        return api.linear(x, *operands, **options)

    def fused_is_faster(rows: int, n: int, k: int, dtype: torch.dtype, target: Any) -> bool:
        assert (n, k, dtype, target.arch) == (N, K, BF16, "cpu")
        return rows <= 4

    monkeypatch.setattr(method, "api", SimpleNamespace(linear=ours))
    monkeypatch.setattr(method, "fused_is_faster", fused_is_faster)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rows_are_left_to_vllm(name: str, bias: bool, fused: Any, fused_rows: list[int]) -> None:
    """Whatever else is fused in the process: a clamp and gpt-oss' activation differ in how gate and up lie."""
    # The last has the numbers of gpt-oss' and not its order.
    others = {**ACTIVATIONS, "like-oai": lambda: SiluAndMulWithClamp(7.0, 1.702, 1.0)}
    mlps = {other: Inner(activation(), bias=bias) for other, activation in others.items()}
    theirs = Inner(ACTIVATIONS[name](), bias=bias)
    fused(model_of(*mlps.values()))
    x = x_of(7)
    judged(mlps[name], x)
    assert fused_rows == []
    product = nn.functional.linear(x, theirs.gate_up_proj.weight, theirs.gate_up_proj.bias)
    assert torch.equal(mlps[name](x), theirs.act_fn.forward_native(product)), "not the bits that vLLM makes"
    judged(mlps[name], x_of(4))
    assert set(fused_rows) == {4}


def test_compiled_code_decides_by_the_rows_that_it_gets(fused: Any, fused_rows: list[int]) -> None:
    """One graph for all numbers of rows."""
    mlp = Inner()
    fused(model_of(mlp))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(mlp, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 9, 4, 5):
        fused_rows.clear()
        x = x_of(rows)
        assert torch.equal(compiled(x), mlp(x))
        assert fused_rows == ([rows, rows] if rows <= 4 else [])
    assert len(graphs) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret where there is a GPU")
def test_batch_invariance_is_for_all_rows(fused: Any, fused_rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With another kernel for other rows it would be none."""
    monkeypatch.setattr(vllm_envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    mlp = Inner()
    fused(model_of(mlp))
    assert mlp.gate_up_proj.quant_method.batch_invariant
    mlp(x_of(7))
    assert fused_rows == [7]


@pytest.mark.parametrize("second", [False, True])
def test_beside_the_router(second: bool, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On vLLM's second stream a layer leaves SMs to the router's kernels, which are on the other one."""
    spared = []

    def ours(x: torch.Tensor, *operands: Any, spare_sms: int, **options: Any) -> torch.Tensor:
        spared.append(spare_sms)
        return x.new_zeros(x.shape[0], N)

    mlp = Inner()
    fused(model_of(mlp))
    h200 = targets.from_arch("sm_90a")
    monkeypatch.setattr(method, "api", SimpleNamespace(linear=ours))
    monkeypatch.setattr(method.targets, "detect", lambda device: h200)
    monkeypatch.setattr(method, "on_second_stream", lambda device: second)
    mlp(x_of(3))
    assert spared == [16 if second else 0]


def test_the_log_says_for_which_rows(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SimpleNamespace(least_rows=65, most_rows=700)
    monkeypatch.setattr(fuse.tuned, "unfused", lambda n, k, dtype, target: [rows])
    lines = fused(model_of(Inner()))
    assert lines[1] == "vLLM serves these linear layers for 65 to 700 rows: it was measured to be faster"


# Which are fused.


def test_every_pair_of_a_model(fused: Any) -> None:
    model = model_of(MLP(), MLP(), MLP(GeluAndMul()), nn.Linear(3, 3))
    lines = fused(model)
    assert all(is_fused(mlp) for mlp in list(model["layers"])[:3])
    assert len(lines) == 2
    what = f"dsl serves 2 gated linear layers, {Swiglu()} of {K} to {N} bfloat16, on cpu: by linear reference (not by "
    assert lines[0].startswith(what)
    assert "not by linear sm90/sm100: serves GPUs of sm_90a, sm_100a, sm_103a" in lines[0]
    assert lines[1].startswith("dsl serves 1 gated linear layers, Geglu(tanh=False)")


def two_holders() -> nn.Module:
    mlp, other = MLP(), MLP()
    other.gate_up_proj = mlp.gate_up_proj
    return model_of(mlp, other)


def changed(attribute: str, value: Any, **options: Any) -> nn.Module:
    """A module with a layer's attribute set."""
    mlp = MLP(**options)
    layer, _, name = attribute.rpartition(".")
    setattr(mlp.get_submodule(layer) if layer else mlp, name, value)
    return mlp


def gathering() -> nn.Module:
    mlp = changed("gate_up_proj.gather_output", True)
    mlp.gate_up_proj.tp_size = 2
    return mlp


def another_projection() -> nn.Module:
    mlp = MLP()
    mlp.gate_up_proj = Projection(K, [N, N], bias=False, params_dtype=BF16)
    return mlp


def without_projection() -> nn.Module:
    mlp = MLP()
    mlp.gate_up_proj = nn.Linear(K, 2 * N)
    return mlp


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Scaled, "Scaled does not just hand gate_up_proj's result to act_fn"),
        (
            lambda: changed("gate_up_proj.quant_method", Plain()),
            "MLP has a layer that is quantised or no plain product (Plain)",
        ),
        (
            lambda: changed("down_proj.quant_method", Plain()),
            "MLP has a layer that is quantised or no plain product (Plain)",
        ),
        (lambda: MLP(MulAndSilu()), "MulAndSilu is not a known activation"),
        (lambda: MLP(type("Other", (SiluAndMul,), {})()), "Other is not a known activation"),
        (lambda: MLP(dtype=torch.float32), "dtype of x is float32: one of float16, bfloat16 is needed"),
        (gathering, "gather_output collects what the ranks' projections return"),
        (lambda: MLP(skip_bias_add=True, bias=True), "skip_bias_add leaves the bias to the model"),
        (lambda: changed("gate_up_proj.output_sizes", [N, N // 2]), f"outputs of [{N}, {N // 2}] are not a gate and"),
        (lambda: changed("gate_up_proj.output_sizes", [N]), f"outputs of [{N}] are not a gate and an up half"),
        (another_projection, "Projection is not a known projection"),
        (without_projection, "MLP has 0 merged projections beside its activation: 1 is needed"),
        (lambda: changed("forward", print), "another forward was put into MLP"),
        (lambda: changed("act_fn.forward", print), "another forward was put into SiluAndMul"),
        (
            lambda: MLP(SiluAndMulWithClamp(float("inf"))),
            "Swiglu's limit is inf: a finite number of at least 0 is needed",
        ),
    ],
)
def test_what_stays(make: Callable[[], nn.Module], says: str, fused: Any) -> None:
    """Beside one that is fused; the reason is said once, with how many it is about."""
    odd, usual = [make(), make()], MLP()
    before = [(one.gate_up_proj, getattr(one.gate_up_proj, "quant_method", None), one.act_fn) for one in odd]
    lines = fused(model_of(*odd, usual))
    assert is_fused(usual)
    assert before == [(one.gate_up_proj, getattr(one.gate_up_proj, "quant_method", None), one.act_fn) for one in odd]
    assert len(lines) == 2
    assert lines[0].startswith("dsl serves 1 gated linear layers")
    assert lines[1].startswith(f"vLLM serves 2 gated linear layers: {says}")


def test_a_projection_of_two_modules(fused: Any) -> None:
    model = two_holders()
    assert fused(model) == ["vLLM serves 2 gated linear layers: 2 modules hold the projection"]
    assert not any(is_fused(mlp) for mlp in model["layers"])


def test_reasons_add_up(fused: Any) -> None:
    (line,) = fused(model_of(changed("gate_up_proj.quant_method", Plain(), skip_bias_add=True)))
    assert "(Plain); skip_bias_add" in line


def test_batch_invariance(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's products are not."""
    monkeypatch.setattr(vllm_envs, "VLLM_BATCH_INVARIANT", True)
    mlp = MLP()
    (line,) = fused(model_of(mlp))
    assert "is not batch invariant" in line
    assert not is_fused(mlp)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_config": SimpleNamespace()}, "LoRA (lora_config) adds to what a projection returns"),
        (
            {
                "parallel_config": SimpleNamespace(tensor_parallel_size=2),
                "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True)),
            },
            "sequence parallelism (enable_sp) communicates within",
        ),
    ],
)
def test_engines_that_fuse_nothing(changes: dict[str, Any], says: str, fused: Any) -> None:
    model = model_of(MLP(), MLP())
    (line,) = fused(model, **changes)
    assert line.startswith(f"vLLM serves 2 gated linear layers: {says}")
    assert not any(is_fused(mlp) for mlp in model["layers"])


def test_the_switch(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSL_BACKEND_LINEAR", "0")
    mlp = MLP()
    assert fused(model_of(mlp)) == ["vLLM serves 1 gated linear layers: DSL_BACKEND_LINEAR is off"]
    assert not is_fused(mlp)


def test_another_backend(fused: Any) -> None:
    mlp = MLP()
    assert fused(model_of(mlp), attention_config=SimpleNamespace(backend=SimpleNamespace(name="FLASH_ATTN"))) == []
    assert not is_fused(mlp)


def test_a_model_without_any(fused: Any) -> None:
    assert fused(nn.Linear(2, 2)) == ["vLLM serves all linear layers: the model has no gated activation"]


# Around it.


def test_warm_up_compiles_what_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    spec = LinearSpec(n=256, k=512, dtypes=Dtypes.of(BF16), activation=Swiglu(), bias=True)
    monkeypatch.setattr(fuse, "_fused", [{"a": spec, "b": spec}, {}])
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_90a"))
    text = {"num_attention_heads": 8, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1000}
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: text), dtype="torch.bfloat16"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    keys = [one.key for one in warm_up.precompile_specs(config) if one.family == "linear"]
    assert keys
    assert all(key.bias for key in keys), "only what is fused"
    assert len(set(keys)) == len(keys)


# What is between the two.


class Nested(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))


class Conditional(MLP):
    def forward(self, x, residual=None):  # type: ignore[no-untyped-def]
        """A branch, a shape that is read before, and vLLM's function for quantised inputs."""
        rows = x.shape[0]
        if rows:
            x, _ = self.gate_up_proj(x)
            x = maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        return self.down_proj(x)[0] if residual is None else self.down_proj(x)[0] + residual


def maybe_fused_act_quant(act_fn: Any, x: Any, linear: Any) -> Any:
    """As vLLM's with an activation that it does not know."""
    return act_fn(x)


under_another_name = maybe_fused_act_quant
as_a_module = ModuleType("fused_act_quant")
as_a_module.maybe_fused_act_quant = maybe_fused_act_quant  # type: ignore[attr-defined]


class Asked(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        """As LlamaMLP from vLLM 0.32 on."""
        x, _ = self.gate_up_proj(x)
        x = maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        x, _ = self.down_proj(x)
        return x


class AskedInOneLine(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        gate_up = self.gate_up_proj(x)[0]
        return self.down_proj(maybe_fused_act_quant(self.act_fn, gate_up, self.down_proj))[0]


class AskedByKeywords(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        x = maybe_fused_act_quant(self.act_fn, linear=self.down_proj, x=x)
        x, _ = self.down_proj(x)
        return x


class AskedByAnotherName(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        x = under_another_name(self.act_fn, x, self.down_proj)
        x, _ = self.down_proj(x)
        return x


class AskedOfAModule(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        x = as_a_module.maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        x, _ = self.down_proj(x)
        return x


class AskedAndChanged(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        x = maybe_fused_act_quant(self.act_fn, x, self.down_proj) + 1
        x, _ = self.down_proj(x)
        return x


class AskedOfRows(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        """The first row of what the activation returns."""
        x, _ = self.gate_up_proj(x)
        return self.down_proj(maybe_fused_act_quant(self.act_fn, x, self.down_proj)[0])


class AskedAndKept(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        y = maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        x, _ = self.down_proj(y)
        return x + y.mean()


class AskedAndUsed(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        """The layer is used twice, and named to vLLM's function beside."""
        x, _ = self.gate_up_proj(x)
        x = maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        y = self.down_proj(x)[0]
        return y + self.down_proj.weight.mean()


class AskedForAnother(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        """The activation is the argument, and not what is called."""
        x, _ = self.gate_up_proj(x)
        x = maybe_fused_act_quant(self.other, self.act_fn, self.down_proj)
        x, _ = self.down_proj(x)
        return x


class AskedOfItself(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        """A method of the model's own may do anything."""
        x, _ = self.gate_up_proj(x)
        x = self.maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        x, _ = self.down_proj(x)
        return x


class Helper(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.half(x)

    def half(self, x):  # type: ignore[no-untyped-def]
        gate_up: torch.Tensor
        gate_up = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(gate_up))


class Inherited(Nested):
    pass


class Twice(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x)
        return self.act_fn(x)


class Kept(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        y, _ = self.gate_up_proj(x)
        z = self.act_fn(y)
        return self.down_proj(z)[0] + y.mean()


class Beside(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x) * x.mean()
        return self.down_proj(x)[0]


class OfAnother(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        y, _ = self.gate_up_proj(x)
        x = self.act_fn(x)
        return self.down_proj(x)[0], y


class Crossed(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        y, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(y)
        return self.act_fn(x)


class Changed(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down_proj(self.act_fn(2 * self.gate_up_proj(x)[0]))


class Biased(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[1]))


class Added(MLP):
    def forward(self, x, adapter):  # type: ignore[no-untyped-def]
        """As Zamba2MLP."""
        x, _ = self.gate_up_proj(x)
        x = x + adapter
        return self.down_proj(self.act_fn(x))[0]


class InTurns(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        for _ in range(2):
            y, _ = self.gate_up_proj(x)
            z = self.act_fn(y)
        return z


class Elsewhere(MLP):
    def scores(self, x):  # type: ignore[no-untyped-def]
        return self.gate_up_proj(x)[0]


class Above(Nested):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return super().forward(x) + 1


class Swapped(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        if x.shape[0] > 1:
            x, _ = self.gate_up_proj(x)
        return self.act_fn(x)


class Options(MLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        x, _ = self.gate_up_proj(x)
        return self.act_fn(x, inplace=True)


ASKED = [Asked, AskedInOneLine, AskedByKeywords, AskedByAnotherName, AskedOfAModule]
ASKED_OTHERWISE = [AskedAndChanged, AskedOfRows, AskedAndKept, AskedAndUsed, AskedForAnother, AskedOfItself]


@pytest.mark.parametrize("kind", [MLP, Inner, Nested, Conditional, Helper, Inherited, *ASKED])
def test_one_layer(kind: type) -> None:
    assert forward_source.objection(kind, "gate_up_proj", "act_fn") is None


@pytest.mark.parametrize("kind", [MLP, Nested, Helper, Inherited, *ASKED])
def test_the_activation_and_the_layer_behind(kind: type) -> None:
    assert forward_source.objection(kind, "act_fn", "down_proj") is None


@pytest.mark.parametrize("kind", [Conditional, Beside, Crossed, Inner, *ASKED_OTHERWISE])
def test_an_activation_whose_result_is_used_otherwise(kind: type) -> None:
    why = forward_source.objection(kind, "act_fn", "down_proj")
    assert why == f"{kind.__name__} does not just hand act_fn's result to down_proj"


@pytest.mark.parametrize(
    "kind",
    [
        Scaled,
        Twice,
        Kept,
        Beside,
        OfAnother,
        Crossed,
        Changed,
        Biased,
        Added,
        InTurns,
        Elsewhere,
        Above,
        Swapped,
        Options,
        AskedForAnother,
        AskedOfItself,
    ],
)
def test_not_one_layer(kind: type) -> None:
    why = forward_source.objection(kind, "gate_up_proj", "act_fn")
    assert why == f"{kind.__name__} does not just hand gate_up_proj's result to act_fn"


def test_other_functions_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inherited, "scale", lambda self: 1.0, raising=False)
    forward_source.objection.cache_clear()
    assert forward_source.objection(Inherited, "gate_up_proj", "act_fn") is None


def test_no_source() -> None:
    made: dict[str, Any] = {"MLP": MLP}
    exec("class Typed(MLP):\n def forward(self, x):\n  return self.act_fn(self.gate_up_proj(x)[0])", made)
    assert forward_source.objection(made["Typed"], "gate_up_proj", "act_fn") == "the source of Typed cannot be read"


@pytest.mark.parametrize(
    ("module", "name", "fusible"),
    [
        ("llama", "LlamaMLP", True),
        ("qwen2", "Qwen2MLP", True),
        ("gemma2", "Gemma2MLP", True),
        ("deepseek_v2", "DeepseekV2MLP", True),
        ("falcon_h1", "FalconH1MLP", False),
        ("zamba2", "Zamba2MLP", False),
    ],
)
def test_vllms_own(module: str, name: str, fusible: bool) -> None:
    kind = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    assert (forward_source.objection(kind, "gate_up_proj", "act_fn") is None) == fusible


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("llama", "LlamaMLP"),
        ("qwen2", "Qwen2MLP"),
        ("qwen3_moe", "Qwen3MoeMLP"),
        ("deepseek_v2", "DeepseekV2MLP"),
    ],
)
def test_vllms_own_activations(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    assert forward_source.objection(kind, "act_fn", "down_proj") is None
