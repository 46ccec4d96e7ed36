# SPDX-License-Identifier: Apache-2.0
"""Linear layers of fp8 checkpoints by this package: which are served and linked, what comes out, what the log says.

vLLM's layers are those of its CPU build, which has no kernel of 128x128 blocks without AMX: there the results are
compared with dequantised weights alone.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm import _custom_ops
from vllm import envs as vllm_envs
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm import cpu as cpu_kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import FP8BlockParams
from vllm.model_executor.layers.activation import MulAndSilu, SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from dsl_backend.errors import InvalidInput
from dsl_backend.linear.scaled.precompile import precompile_specs_of
from dsl_backend.quant.format import BLOCK_SCALED, BLOCK_SCALED_E8M0, ROW_SCALED, TENSOR_SCALED
from dsl_backend.quant.reference import dequantized, quantized
from dsl_backend.runtime import family as families
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.vllm_plugin import ahead, hooks, loaded_models, warm_up
from dsl_backend.vllm_plugin.fused_mlp import fuse
from dsl_backend.vllm_plugin.scaled_linears import serve
from dsl_backend.vllm_plugin.scaled_linears.find import KERNEL, holder_of
from dsl_backend.vllm_plugin.scaled_linears.kernels import (
    BlockScaledKernel,
    HandedOn,
    PowersOfTwoKernel,
    RowScaledKernel,
)
from integration.quantization import CHANNELS
from tests.vllm_plugin.test_fused_mlp import engine, model_of

try:
    from vllm.model_executor.layers.fusion import fused_act_quant
except ImportError:
    fused_act_quant = None  # type: ignore[assignment]

pytestmark = pytest.mark.usefixtures("one_rank")

BF16 = torch.bfloat16
K, N = 256, 128
BY_DSL = {"additional_config": {"dsl": {"scaled_linears": "dsl"}}}


def config_of(scheme: str) -> Any:
    if scheme == "channels":
        return CompressedTensorsConfig.from_config(CHANNELS)
    more = {"weight_block_size": [128, 128]} if scheme == "blocks" else {}
    activation = "static" if scheme == "static" else "dynamic"
    return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=activation, **more)


FORMATS = {"channels": ROW_SCALED, "blocks": BLOCK_SCALED, "static": TENSOR_SCALED, "dynamic": TENSOR_SCALED}
SCHEMES = tuple(FORMATS)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, the reference serves, and layers of blocks can be made."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.setattr(fuse, "_fused", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    makes = classmethod(lambda cls, compute_capability=None: (True, None))
    monkeypatch.setattr(cpu_kernels.CPUFp8BlockScaledMMKernel, "is_supported", makes)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with torch.no_grad():
        yield
    torch.set_default_dtype(default)


def scaled_fp8_quant(x: torch.Tensor, scale: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """For vLLM's, which its CPU build has not: of weights whose shards get one scale."""
    return quantized(x, TENSOR_SCALED, scale.float().view(1)).values, scale


def without_compilation() -> VllmConfig:
    """Else vLLM compiles its quantisation by torch, without guards: kinds of it in one process take each other's."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    config.model_config = SimpleNamespace(dtype=BF16)  # type: ignore[assignment]
    return config


class MLP(nn.Module):
    """As most of vLLM's are; `wide` has its weights dequantised, float64."""

    def __init__(self, scheme: str, activation: nn.Module | None = None, bias: bool = False) -> None:
        super().__init__()
        with set_current_vllm_config(without_compilation()):
            made = {"quant_config": config_of(scheme), "params_dtype": BF16}
            self.gate_up_proj = MergedColumnParallelLinear(K, [N, N], bias=bias, prefix="mlp.gate_up_proj", **made)
            self.down_proj = RowParallelLinear(N, K, bias=False, prefix="mlp.down_proj", **made)
        self.act_fn = SiluAndMul() if activation is None else activation
        self.scheme = scheme
        self.wide = {name: fill(getattr(self, name), scheme, seed) for seed, name in enumerate(NAMES)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x


class Asked(MLP):
    """As LlamaMLP from vLLM 0.32 on: the next layer is asked which inputs it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        x = fused_act_quant.maybe_fused_act_quant(self.act_fn, x, self.down_proj)
        x, _ = self.down_proj(x)
        return x


def exact_of(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Of the dequantised weights, with nothing else rounded."""
    both = x.double() @ mlp.wide["gate_up_proj"].T
    if mlp.gate_up_proj.bias is not None:
        both += mlp.gate_up_proj.bias.double()
    gate, up = both.chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ mlp.wide["down_proj"].T


NAMES = ("gate_up_proj", "down_proj")


def needs_fused_act_quant(kind: type[MLP]) -> None:
    if kind is Asked and fused_act_quant is None:
        pytest.skip("this vLLM does not ask the next layer")


class Between(MLP):
    """Its down projection needs 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x = x + 0
        x, _ = self.down_proj(x)
        return x


def fill(layer: Any, scheme: str, seed: int) -> torch.Tensor:
    """Random-normal weights as a checkpoint has them; returns what they are worth, float64."""
    generator = torch.Generator().manual_seed(seed)
    n, k = layer.weight.shape
    matrix = torch.randn(n, k, generator=generator, dtype=torch.float32) * k**-0.5
    shards = len(layer.weight_scale) if scheme in ("static", "dynamic") else 1
    parts = [quantized(part, FORMATS[scheme]) for part in matrix.chunk(shards)]
    layer.weight.data.copy_(torch.cat([part.values for part in parts]))
    scale = getattr(layer, "weight_scale_inv" if scheme == "blocks" else "weight_scale")
    scale.data.copy_(torch.cat([part.scale for part in parts]).view(scale.shape))
    if scheme == "static":
        layer.input_scale.data.fill_(0.02)
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(n, generator=generator, dtype=torch.float32))
    return torch.cat([dequantized(part) for part in parts])


def kernel(layer: Any) -> Any:
    return getattr(holder_of(layer), KERNEL)


def processed(model: nn.Module) -> None:
    """As vLLM's loader does."""
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def said(caplog: pytest.LogCaptureFixture, model: nn.Module, **changes: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO), set_current_vllm_config(without_compilation()):
        serve.serve_scaled_linears(model, engine(**BY_DSL | changes))
    return [record.getMessage() for record in caplog.records if record.name == "vllm.dsl_backend"]


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(2), dtype=torch.float32).to(BF16)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def by_hand(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """Blocks: inputs quantised by group, and everything between in bfloat16, as vLLM's kernels on a GPU have it."""
    from dsl_backend.quant.format import GROUP_SCALED

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        return (dequantized(quantized(x, GROUP_SCALED)) @ mlp.wide[name].T).to(BF16)

    gate, up = layer(x, "gate_up_proj").chunk(2, -1)
    return layer((nn.functional.silu(gate) * up), "down_proj")


@pytest.mark.parametrize(("kind", "bias"), [(MLP, False), (MLP, True), (Asked, False)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_within_twice_vllms_own_error(caplog: Any, scheme: str, kind: type[MLP], bias: bool) -> None:
    if scheme == "blocks" and bias:
        pytest.skip("by_hand has no bias")
    needs_fused_act_quant(kind)
    x = x_of(37)
    theirs, ours = kind(scheme, bias=bias), kind(scheme, bias=bias)
    said(caplog, model_of(ours))
    assert isinstance(kernel(ours.gate_up_proj), BlockScaledKernel if scheme == "blocks" else RowScaledKernel)
    processed(ours)
    exact = exact_of(ours, x)
    if scheme == "blocks":
        compared = by_hand(theirs, x)
    else:
        processed(theirs)
        try:
            compared = theirs(x)
        except RuntimeError as reason:
            if not bias:
                raise
            pytest.skip(f"vLLM's kernel for this CPU takes no bias of bfloat16: {reason}")
    assert 0 < error(ours(x), exact) <= 2 * error(compared, exact)
    # Each row is its own: a scale of another one would be seen.
    for row in (0, 36):
        assert error(ours(x)[row], exact[row]) <= 3 * error(compared, exact)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shapes(caplog: Any, scheme: str, shape: tuple[int, ...]) -> None:
    if scheme == "dynamic" and 0 in shape:
        pytest.skip("vLLM has no largest element of nothing")
    mlp = MLP(scheme)
    said(caplog, model_of(mlp))
    processed(mlp)
    out = mlp(x_of(*shape))
    assert (out.shape, out.dtype) == ((*shape, K), BF16)
    if 0 not in shape:
        assert error(out, exact_of(mlp, x_of(*shape))) < 0.1


def test_parameters_of_vllm_0_26(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have scales of blocks under two names, and no attribute that says which of them it is."""
    mlp = MLP("blocks")
    said(caplog, model_of(mlp))
    processed(mlp)
    for name in ("block_scale", "block_scale_attr"):
        monkeypatch.delattr(FP8BlockParams, name, raising=False)
    assert error(mlp(x_of(3)), exact_of(mlp, x_of(3))) < 0.1


@pytest.mark.parametrize("kind", [MLP, Asked])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_linked_and_said(caplog: Any, scheme: str, kind: type[MLP]) -> None:
    """Gate and up projection, activation and the next quantisation are one launch; a computed scale for all is not."""
    needs_fused_act_quant(kind)
    mlp = kind(scheme)
    lines = said(caplog, model_of(mlp))
    link = kernel(mlp.gate_up_proj).link
    assert type(mlp.act_fn) is HandedOn
    assert link.consumer is (None if scheme == "dynamic" else mlp.down_proj)
    assert kernel(mlp.down_proj).link is None
    gate, down = lines
    assert gate.startswith("dsl serves 1 fp8 linear layers (MergedColumnParallelLinear), Swiglu(")
    assert f"of {K} to {N}" in gate
    assert (", out " in gate) == (scheme != "dynamic")
    assert "on cpu: by scaled-linear reference" in gate
    assert down.startswith("dsl serves 1 fp8 linear layers (RowParallelLinear), product of")


def test_what_needs_16_bits_gets_them(caplog: Any) -> None:
    mlp = Between("channels")
    said(caplog, model_of(mlp))
    assert kernel(mlp.gate_up_proj).link.consumer is None
    processed(mlp)
    assert error(mlp(x_of(5)), exact_of(mlp, x_of(5))) < 0.1


def test_activations_that_stay(caplog: Any) -> None:
    mlp = MLP("channels", activation=MulAndSilu())
    lines = said(caplog, model_of(mlp))
    assert type(mlp.act_fn) is MulAndSilu
    assert "vLLM serves 1 activations behind fp8 layers: MulAndSilu is not a known activation" in lines
    assert kernel(mlp.gate_up_proj).link is None


AGAINST = {
    "is vllm": {"additional_config": {}},
    "nothing measured says that dsl is faster": {"additional_config": {"dsl": {"scaled_linears": "measured"}}},
    "LoRA": {"lora_config": object()},
    "--linear-backend cutlass": {"kernel_config": SimpleNamespace(linear_backend="cutlass")},
}


@pytest.mark.parametrize("reason", AGAINST)
def test_reasons_against_an_engine(caplog: Any, reason: str) -> None:
    mlp = MLP("channels")
    before = kernel(mlp.gate_up_proj)
    (line,) = said(caplog, model_of(mlp), **AGAINST[reason])
    assert line.startswith("vLLM serves 2 fp8 linear layers: ")
    assert reason in line
    assert kernel(mlp.gate_up_proj) is before


def test_batch_invariance_is_refused(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_envs, "VLLM_BATCH_INVARIANT", True)
    (line,) = said(caplog, model_of(MLP("channels")))
    assert "batch invariance (VLLM_BATCH_INVARIANT) bypasses kernels that vLLM does not know" in line


def test_other_attention_changes_nothing(caplog: Any) -> None:
    other = SimpleNamespace(backend=SimpleNamespace(name="FLASH_ATTN"))
    assert said(caplog, model_of(MLP("channels")), attention_config=other) == []


def test_layers_that_stay(caplog: Any) -> None:
    """A forward of somebody's, a size that no kernel takes, and scales of another dtype."""
    patched, small, rounded = MLP("channels"), MLP("channels"), MLP("blocks")
    patched.down_proj.forward = patched.down_proj.forward
    small.down_proj.weight = nn.Parameter(small.down_proj.weight[:, :120], requires_grad=False)
    scale = rounded.down_proj.weight_scale_inv
    scale.data = scale.data.bfloat16()
    lines = said(caplog, model_of(patched, small, rounded))
    assert "vLLM serves 1 fp8 linear layers: another forward was put into RowParallelLinear" in lines
    assert "vLLM serves 1 fp8 linear layers: k 120 is not a multiple of 16" in lines
    assert "vLLM serves 1 fp8 linear layers: scales of the weight are torch.bfloat16: float32 is needed" in lines


# config.json of a checkpoint whose scales of blocks are powers of two.
UE8M0 = {"model_config": SimpleNamespace(hf_config=SimpleNamespace(quantization_config={"scale_fmt": "ue8m0"}))}


def in_powers_of_two(stored: bool) -> MLP:
    """Blocks whose scales are powers of two, `stored` as such or in float32."""
    mlp = MLP("blocks")
    for seed, name in enumerate(NAMES):
        layer = getattr(mlp, name)
        matrix = torch.randn(*layer.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        # Blocks of different magnitudes, so that the scale of another one is wrong.
        matrix *= 2.0 ** (torch.arange(matrix.shape[0]).view(-1, 1) // 128 + torch.arange(matrix.shape[1]) // 128 - 6)
        found = quantized(matrix, BLOCK_SCALED_E8M0)
        layer.weight.data.copy_(found.values)
        layer.weight_scale_inv.data = found.scale if stored else found.scale.to(torch.float32)
        mlp.wide[name] = dequantized(found)
    return mlp


@pytest.mark.parametrize("stored", [False, True])
def test_blocks_of_powers_of_two_are_multiplied_in_mxfp8(caplog: Any, stored: bool) -> None:
    """Where a kernel does; inputs then have scales of 32 columns, and errors are not above those of 128."""
    x = x_of(37)
    blocks, powers = in_powers_of_two(stored=False), in_powers_of_two(stored)
    said(caplog, model_of(blocks))
    gate, down = said(caplog, model_of(powers), **({} if stored else UE8M0))
    assert [type(kernel(layer)) for layer in (blocks.gate_up_proj, powers.gate_up_proj)] == [
        BlockScaledKernel,
        PowersOfTwoKernel,
    ]
    assert "x mxfp8, weight mxfp8" in gate
    assert "Swiglu" in gate
    assert "x mxfp8, weight mxfp8" in down
    assert kernel(powers.gate_up_proj).link.consumer is powers.down_proj
    assert ", out mxfp8, on" in gate
    for mlp in (blocks, powers):
        processed(mlp)
    exact = exact_of(powers, x)
    assert 0 < error(powers(x), exact) <= 1.2 * error(blocks(x), exact)


@pytest.mark.parametrize(
    ("arch", "kernel_name", "kind"),
    [
        ("sm_100a", "cute-sm100", PowersOfTwoKernel),
        ("sm_90a", None, BlockScaledKernel),
        ("sm_90a", "triton", BlockScaledKernel),
    ],
)
def test_kernels_of_powers_of_two(
    caplog: Any, monkeypatch: pytest.MonkeyPatch, arch: str, kernel_name: str | None, kind: type
) -> None:
    """SM100's by name; other kernels get the same scales in float32."""
    monkeypatch.setattr(serve, "targets", SimpleNamespace(detect=lambda device: from_arch(arch)))
    monkeypatch.setattr(serve.ahead, "compile_scaled_linears", lambda config, layers: None)
    options = {"scaled_linears": "dsl"} | ({} if kernel_name is None else {"scaled_linears_kernel": kernel_name})
    mlp = in_powers_of_two(stored=True)
    said(caplog, model_of(mlp), additional_config={"dsl": options})
    assert type(kernel(mlp.down_proj)) is kind
    wanted = mlp.down_proj.weight_scale_inv.to(torch.float32)
    processed(mlp)
    if kind is BlockScaledKernel:
        assert mlp.down_proj.weight_scale_inv.dtype == torch.float32
    assert torch.equal(mlp.down_proj.weight_scale_inv.to(torch.float32), wanted)


def test_a_scale_that_is_no_power_of_two_is_named(caplog: Any) -> None:
    """Where the checkpoint's config says that all are."""
    mlp = in_powers_of_two(stored=False)
    said(caplog, model_of(mlp), **UE8M0)
    mlp.down_proj.weight_scale_inv.data[1, 0] = 0.75
    with pytest.raises(InvalidInput, match=r"a scale of the weight is 0\.75: the checkpoint's config says scale_fmt"):
        processed(mlp)


@pytest.mark.parametrize("scheme", ["channels", "blocks"])
def test_sm100_links_layers_too(caplog: Any, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(serve, "targets", SimpleNamespace(detect=lambda device: from_arch("sm_100a")))
    monkeypatch.setattr(serve.ahead, "compile_scaled_linears", lambda config, layers: None)
    options = {"scaled_linears": "dsl", "scaled_linears_kernel": "cute-sm100"}
    mlp = MLP(scheme)
    gate, _ = said(caplog, model_of(mlp), additional_config={"dsl": options})
    assert kernel(mlp.gate_up_proj).link.consumer is mlp.down_proj
    assert ", out e4m3-" in gate
    assert gate.endswith("on sm_100a: by scaled-linear sm100")


def test_a_kernel_by_name(caplog: Any) -> None:
    """The kernel that is named, or vLLM's; a name that the table has not is refused."""

    def served(kernel: str) -> list[str]:
        options = {"scaled_linears": "dsl", "scaled_linears_kernel": kernel}
        return said(caplog, model_of(MLP("channels")), additional_config={"dsl": options})

    assert served("reference")[0].endswith("on cpu: by scaled-linear reference")
    lines = served("cute-sm90")
    assert len(lines) == 2
    assert all(line.startswith("vLLM serves 1 fp8 linear layers: ") for line in lines)
    assert all("scaled-linear sm90" in line for line in lines)
    with pytest.raises(
        ValueError, match="scaled_linears_kernel: 'fastest' is not one of cute-sm100, cute-sm90, triton"
    ):
        served("fastest")


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize("scheme", ["channels", "blocks"])
def test_what_is_served_is_compiled_before(caplog: Any, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """While the engine starts, and before vLLM's warm-up ends: with the activation of linked layers."""
    gpu = from_arch("sm_90a")
    begun: list[Any] = []
    monkeypatch.setattr(serve.targets, "detect", lambda device=None: gpu)
    monkeypatch.setattr(warm_up.targets, "detect", lambda device=None: gpu)
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: begun.extend(units(gpu)))
    monkeypatch.setattr(families, "load_all", lambda: ())
    options = {"scaled_linears": "dsl", "scaled_linears_kernel": "cute-sm90"}
    lines = said(caplog, model_of(MLP(scheme), MLP(scheme)), additional_config={"dsl": options})
    assert [line.endswith("by scaled-linear sm90") for line in lines] == [True, True], lines
    specs = {served.spec for served in serve.served_layers()}
    assert {(spec.n, spec.activation is not None) for spec in specs} == {(N, True), (K, False)}
    wanted = {unit for spec in specs for unit in precompile_specs_of(spec, gpu, "cute-sm90")}
    assert wanted
    assert set(begun) == wanted
    assert {
        unit for unit in warm_up.precompile_specs(SimpleNamespace(model_config=1)) if unit.family == "linear"
    } == wanted
    begun.clear()
    serve._served.clear()
    # Triton's are compiled by the first dummy run.
    options["scaled_linears_kernel"] = "triton"
    said(caplog, model_of(MLP(scheme)), additional_config={"dsl": options})
    assert begun == []


def test_a_second_time_changes_nothing(caplog: Any) -> None:
    model = model_of(MLP("channels"))
    said(caplog, model)
    kernels = [kernel(module) for module in model.modules() if hasattr(module, "quant_method")]
    assert said(caplog, model) == []
    assert [kernel(module) for module in model.modules() if hasattr(module, "quant_method")] == kernels


@pytest.mark.parametrize("kind", [MLP, Asked])
@pytest.mark.parametrize("scheme", ["channels", "blocks", "static"])
def test_inside_torch_compile(caplog: Any, scheme: str, kind: type[MLP]) -> None:
    needs_fused_act_quant(kind)
    mlp = kind(scheme)
    said(caplog, model_of(mlp))
    processed(mlp)
    x = x_of(5)
    wanted = mlp(x)
    assert error(torch.compile(mlp, fullgraph=True, backend="eager")(x), wanted.double()) < 1e-2


def test_weights_that_are_written_later_are_used(caplog: Any) -> None:
    mlp = MLP("channels")
    said(caplog, model_of(mlp))
    processed(mlp)
    mlp.down_proj.weight_scale.data *= 2
    x = x_of(3)
    assert error(mlp(x), 2 * exact_of(mlp, x)) < 0.1


def test_compiled_graphs_are_keyed_by_what_is_served(caplog: Any) -> None:
    before = loaded_models.compilation_key()
    said(caplog, model_of(MLP("channels")))
    assert loaded_models.compilation_key() != before
    assert "layers.0.gate_up_proj: Swiglu(" in loaded_models.compilation_key()


def test_a_fused_mlp_of_16_bits_is_not_tried(caplog: Any) -> None:
    """The fusion of 16-bit layers, which comes next, finds nothing to say of linked ones."""
    model = model_of(MLP("channels"))
    said(caplog, model)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fuse.fuse_model(model, engine())
    assert [line for line in caplog.messages if "gated linear layers" in line] == []


def test_the_list_of_hooks_has_it() -> None:
    assert "fp8_linear" in next(hook.changes for hook in hooks.HOOKS if hook.name == "loaded_models")
