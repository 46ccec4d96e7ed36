# SPDX-License-Identifier: Apache-2.0
"""Outputs in e4m3 and NVFP4 through vLLM's own layer, and its pass that fuses attention with their quantisation."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dsl_backend.quant.format import NVFP4, TENSOR_SCALED
from dsl_backend.quant.reference import mma_quantized, unpacked_e2m1, unswizzled
from dsl_backend.runtime.target import from_arch
from dsl_backend.vllm_plugin import dense, validation
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.rope import serve
from tests.vllm_plugin import test_rope
from tests.vllm_plugin.conftest import Step, cache_pages, make_step
from tests.vllm_plugin.test_dense import DIM, HEADS, HEADS_KV, MIXED, PAGE, make_builder
from tests.vllm_plugin.test_fused_mlp import engine

pytestmark = pytest.mark.usefixtures("one_rank")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 0.004


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    """A config whose layers are ours, of a model in bfloat16."""
    found = VllmConfig(attention_config={"backend": ensure_member()})
    with torch.no_grad(), set_default_torch_dtype(BF16), set_current_vllm_config(found):
        yield found


# Operators of CUDA builds that vLLM's module with the pass names when it is imported.
OPERATORS = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
)


# The quantisation to NVFP4 of CUDA builds.
QUANTISE = (
    "scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, Tensor(a!) output, "
    "Tensor(b!) output_scale) -> ()"
)


def scaled_fp4_quant(
    x: torch.Tensor, scale: torch.Tensor, swizzled: bool, *, output: torch.Tensor, output_scale: torch.Tensor
) -> None:
    """What the operator computes, by this package's reference."""
    assert swizzled
    found = mma_quantized(x, NVFP4, 1 / scale)
    output.copy_(found.values)
    output_scale.view(torch.uint8).copy_(found.scale.view(torch.uint8))


@pytest.fixture(scope="module")
def fusion() -> Iterator[Any]:
    """The module of vLLM that has the pass."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name in OPERATORS:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor x) -> ()")
    library.define(QUANTISE)
    library.impl("scaled_fp4_quant.out", scaled_fp4_quant, "CPU")
    library.impl("scaled_fp4_quant.out", lambda *_, **__: None, "Meta")
    from vllm.compilation.passes.fusion import attn_quant_fusion

    yield attn_quant_fusion
    del library


def fusion_pass(fusion: Any, config: VllmConfig) -> Any:
    """The pass for the layers of a config, which asks them what they support."""
    config.model_config = SimpleNamespace(dtype=BF16)
    found = fusion.AttnQuantFusionPass(config)
    config.model_config = None
    return found


class Quantised(nn.Module):
    """What a projection with a static scale does with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
        self.scale = nn.Parameter(torch.full((1,), SCALE, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        found, _ = self.quant(x, self.scale)
        return found, None


class QuantisedToNvfp4(nn.Module):
    """What a projection in NVFP4 does with its input."""

    def __init__(self) -> None:
        super().__init__()
        # Of a tensor whose largest magnitude is about 4.
        self.scale = nn.Parameter(torch.full((1,), 2688 / 4, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
        rows, columns = x.shape
        output = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty((rows + 127) // 128 * 128, columns // 64, dtype=torch.int32)
        torch.ops._C.scaled_fp4_quant.out(x, self.scale, True, output=output, output_scale=scales)
        return (output, scales.view(E4M3)), None


class Attending(nn.Module):
    """Attention whose output is quantised."""

    def __init__(self, config: VllmConfig, prefix: str = "a.0.attn", projection: nn.Module | None = None) -> None:
        super().__init__()
        facts: dict[str, Any] = {"cache_config": config.cache_config, "attn_backend": dense.DSLAttentionBackend}
        self.attn = Attention(HEADS, DIM, DIM**-0.5, HEADS_KV, prefix=prefix, **facts)
        self.o_proj = projection or Quantised()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        found: Any = self.o_proj(self.attn(q, k, v))[0]
        return found


def compiled(function: Any, config: VllmConfig, passes: Any) -> Any:
    """The function compiled by Inductor, with the pass where vLLM's pass manager has it."""
    from torch._inductor.compile_fx import compile_fx
    from vllm.compilation.passes.utility.noop_elimination import NoOpEliminationPass

    def after_grad(graph: torch.fx.Graph) -> None:
        NoOpEliminationPass(config)(graph)
        passes(graph)

    settings = {
        "enable_auto_functionalized_v2": False,
        "force_disable_caches": True,
        "post_grad_custom_post_pass": after_grad,
    }

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return compile_fx(graph, inputs, config_patches=settings)

    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def run(function: Any, config: VllmConfig, layer: Any, step: Step, *arguments: torch.Tensor) -> Any:
    builder = make_builder(config, BF16)
    context = {layer.layer_name: builder.build(0, step.common)}
    with set_forward_context(context, config, slot_mapping={layer.layer_name: step.slots}):
        found: Any = function(*arguments)
    return found


def filled_cache(kv_lens: tuple[int, ...]) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randn(cache_pages(kv_lens, PAGE), HEADS_KV, PAGE, 2 * DIM, generator=random).to(BF16)


@pytest.mark.parametrize("rotates", [False, True], ids=["vllm", "rotation by dsl"])
def test_the_pass_has_attention_store_e4m3(
    config: VllmConfig, fusion: Any, rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No quantisation is left, and results are those of the graph that has it. Keys may be in the cache already."""
    step, random = make_step(*MIXED, PAGE), torch.Generator().manual_seed(6)
    tokens = len(step.slots)
    module: Any
    if rotates:
        module = test_rope.Plain("a.0.attn")
        module.o_proj = Quantised()
        options = {"additional_config": {"dsl": {"rope": "dsl"}}}
        serve.serve_rope(
            nn.ModuleList([module]), engine(model_config=object(), cache_config=config.cache_config, **options)
        )
        assert test_rope.is_served(module)
        arguments = torch.arange(tokens), torch.randn(tokens, test_rope.HIDDEN, generator=random).to(BF16)
    else:
        module = Attending(config)
        widths = [heads * DIM for heads in (HEADS, HEADS_KV, HEADS_KV)]
        arguments = tuple(torch.randn(tokens, width, generator=random).to(BF16) for width in widths)
    module.attn.kv_cache = filled_cache(MIXED[1])
    given: list[Any] = []
    attend = module.attn.impl.forward

    def forward(*operands: Any, **named: Any) -> torch.Tensor:
        given.append((operands[2] is None, named["output"].dtype, named["output_scale"]))
        found: torch.Tensor = attend(*operands, **named)
        return found

    monkeypatch.setattr(module.attn.impl, "forward", forward)
    apart = run(module.forward, config, module.attn, step, *arguments)
    passes = fusion_pass(fusion, config)
    fused = run(compiled(module.forward, config, passes), config, module.attn, step, *arguments)
    assert passes.matched_count == 1
    assert given[0] == (rotates, BF16, None)
    assert given[1][:2] == (rotates, E4M3)
    assert given[1][2].item() == pytest.approx(SCALE)
    assert fused.dtype == E4M3
    # bfloat16 between moves what is almost midway between two e4m3 numbers to the other one.
    differ = (apart.view(torch.uint8).int() - fused.view(torch.uint8).int()).abs()
    assert differ.max() <= 1
    assert 0 < (differ > 0).float().mean() < 0.1


def test_the_pass_has_attention_store_nvfp4(config: VllmConfig, fusion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quantisation is left, and results are those of the graph that has it."""
    monkeypatch.setattr(fusion, "current_platform", SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False))
    monkeypatch.setitem(fusion.QUANT_OPS, kNvfp4Dynamic, torch.ops._C.scaled_fp4_quant.out)
    step, random = make_step(*MIXED, PAGE), torch.Generator().manual_seed(6)
    module = Attending(config, projection=QuantisedToNvfp4())
    widths = [heads * DIM for heads in (HEADS, HEADS_KV, HEADS_KV)]
    arguments = tuple(torch.randn(len(step.slots), width, generator=random).to(BF16) for width in widths)
    module.attn.kv_cache = filled_cache(MIXED[1])
    given: list[Any] = []
    attend = module.attn.impl.forward

    def forward(*operands: Any, **named: Any) -> torch.Tensor:
        given.append(named)
        found: torch.Tensor = attend(*operands, **named)
        return found

    monkeypatch.setattr(module.attn.impl, "forward", forward)
    apart = run(module.forward, config, module.attn, step, *arguments)
    passes = fusion_pass(fusion, config)
    fused = run(compiled(module.forward, config, passes), config, module.attn, step, *arguments)
    assert passes.matched_count == 1
    assert given[0]["output"].dtype == BF16
    assert (given[1]["output"].shape, given[1]["output"].dtype) == ((len(step.slots), HEADS, DIM // 2), torch.uint8)
    assert given[1]["output_block_scale"].dtype == E4M3
    assert given[1]["output_scale"].item() == 2688 / 4
    assert [one.dtype for one in fused] == [torch.uint8, E4M3]
    tokens, columns = len(step.slots), HEADS * DIM
    (codes, scales), (fused_codes, fused_scales) = (
        (unpacked_e2m1(values), unswizzled(scale, tokens, columns // 16).double()) for values, scale in (apart, fused)
    )
    # bfloat16 between moves what is almost midway between two numbers to the other one.
    assert ((scales - fused_scales).abs() <= scales / 8).all()
    assert 0 < (codes != fused_codes).double().mean() < 0.1
    both = (codes, scales), (fused_codes, fused_scales)
    exact, found = (one * scale.repeat_interleave(16, 1) for one, scale in both)
    assert (exact - found).abs().max() <= 2.5 * scales.max()
    assert (exact - found).abs().mean() < 0.05 * exact.abs().mean()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "current_target", lambda: from_arch("sm_90a"))
    monkeypatch.setattr(dense.ahead, "compile_attention", lambda *_, **__: None)


def layer_of(config: VllmConfig, name: str, dim: int = DIM) -> Any:
    ours = dense.DSLAttentionBackend
    return Attention(HEADS, dim, 1.0, HEADS_KV, prefix=name, cache_config=config.cache_config, attn_backend=ours)


@pytest.mark.parametrize("kernel", [None, "cute", "triton"])
def test_where_the_same_kernel_stores_e4m3(config: VllmConfig, hopper: None, kernel: str | None) -> None:
    """CuTe DSL's kernels store rows of 16 bytes; Triton's store any, but must not take other kernels' place."""
    config.additional_config = {"dsl": {"attention_kernel": kernel}}
    first = layer_of(config, "a.0.attn")
    assert first.impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert not first.impl.fused_output_quant_supported(kFp8DynamicTokenSym)
    # A chip without instructions for it, on which Triton's kernels are no replacement for others.
    assert first.impl.fused_output_quant_supported(kNvfp4Dynamic) == (kernel == "triton")
    odd = layer_of(config, "a.1.attn", 72)
    assert odd.impl.stores(TENSOR_SCALED) == (kernel == "triton")
    assert not odd.impl.stores(NVFP4)
    # One pattern takes the outputs of all layers.
    assert first.impl.fused_output_quant_supported(kFp8StaticTensorSym) == (kernel == "triton")


def test_builders_prepare_what_the_profiling_run_asked_for(config: VllmConfig) -> None:
    layer, scale = layer_of(config, "a.0.attn"), torch.ones(1)

    def quantised() -> list[bool]:
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=DIM, dtype=BF16)
        builder = dense.DSLMetadataBuilder(spec, ["a.0.attn"], config, torch.device("cpu"))
        return sorted(one.is_quantized_out for one in builder.planners._of)

    rows = torch.ones(3, HEADS, DIM)
    assert quantised() == [False]
    output = rows.to(E4M3)
    layer.impl.forward(layer, rows, rows, rows, torch.tensor([]), None, output, scale)
    assert not output.float().any()
    assert quantised() == [False, True]


def test_scales_of_blocks_alone_are_refused(config: VllmConfig) -> None:
    layer, rows = layer_of(config, "a.0.attn"), torch.ones(3, HEADS, DIM)
    with pytest.raises(ValueError, match="output_block_scale without output_scale: it needs both"):
        layer.impl.forward(layer, rows, rows, rows, torch.tensor([]), None, rows, None, torch.ones(4))


@pytest.mark.parametrize(("dim", "stored"), [(128, True), (80, False), (72, False)])
def test_where_sm100_stores_nvfp4(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, dim: int, stored: bool) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setattr(validation, "current_target", lambda: from_arch("sm_100a"))
    monkeypatch.setattr(dense.ahead, "compile_attention", lambda *_, **__: None)
    assert layer_of(config, "a.0.attn", dim).impl.fused_output_quant_supported(kNvfp4Dynamic) == stored


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (None, (TENSOR_SCALED,)),
        ("fp8", (TENSOR_SCALED,)),
        ("modelopt_fp4", (NVFP4,)),
        ("compressed-tensors", (TENSOR_SCALED, NVFP4)),
    ],
)
def test_what_is_compiled_ahead(name: str | None, kinds: tuple[Any, ...]) -> None:
    assert dense.likely_formats(SimpleNamespace(model_config=SimpleNamespace(quantization=name))) == kinds


@pytest.mark.parametrize("fuses", [False, True])
def test_kernels_are_compiled_ahead_where_the_pass_is_on(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, fuses: bool
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(dense.ahead, "compile_attention", lambda _, specs, **__: begun.extend(specs))
    config.compilation_config.pass_config.fuse_attn_quant = fuses
    layer_of(config, "a.0.attn")
    assert [spec.is_quantized_out for spec in begun] == [False, True][: 1 + fuses]
