# SPDX-License-Identifier: Apache-2.0
"""Outputs in e4m3 through vLLM's own layer and its pass that fuses attention with the quantisation behind it."""

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


@pytest.fixture(scope="module")
def fusion() -> Iterator[Any]:
    """The module of vLLM that has the pass."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name in OPERATORS:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor x) -> ()")
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


class Attending(nn.Module):
    """Attention whose output is quantised."""

    def __init__(self, config: VllmConfig, prefix: str = "a.0.attn") -> None:
        super().__init__()
        facts: dict[str, Any] = {"cache_config": config.cache_config, "attn_backend": dense.DSLAttentionBackend}
        self.attn = Attention(HEADS, DIM, DIM**-0.5, HEADS_KV, prefix=prefix, **facts)
        self.o_proj = Quantised()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.o_proj(self.attn(q, k, v))[0]
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


def run(function: Any, config: VllmConfig, layer: Any, step: Step, *arguments: torch.Tensor) -> torch.Tensor:
    builder = make_builder(config, BF16)
    context = {layer.layer_name: builder.build(0, step.common)}
    with set_forward_context(context, config, slot_mapping={layer.layer_name: step.slots}):
        found: torch.Tensor = function(*arguments)
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
    assert not first.impl.fused_output_quant_supported(kNvfp4Dynamic)
    odd = layer_of(config, "a.1.attn", 72)
    assert odd.impl.stores_e4m3 == (kernel == "triton")
    # One pattern takes the outputs of all layers.
    assert first.impl.fused_output_quant_supported(kFp8StaticTensorSym) == (kernel == "triton")


def test_builders_prepare_what_the_profiling_run_asked_for(config: VllmConfig) -> None:
    layer, scale = layer_of(config, "a.0.attn"), torch.ones(1)

    def quantised() -> list[bool]:
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=DIM, dtype=BF16)
        builder = dense.DSLMetadataBuilder(spec, ["a.0.attn"], config, torch.device("cpu"))
        return sorted(one.is_fp8_out for one in builder.planners._of)

    rows = torch.ones(3, HEADS, DIM)
    assert quantised() == [False]
    output = rows.to(E4M3)
    layer.impl.forward(layer, rows, rows, rows, torch.tensor([]), None, output, scale)
    assert not output.float().any()
    assert quantised() == [False, True]


def test_scales_of_blocks_are_refused(config: VllmConfig) -> None:
    layer, rows = layer_of(config, "a.0.attn"), torch.ones(3, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="to e4m3 by one scale, and not by blocks"):
        layer.impl.forward(layer, rows, rows, rows, torch.tensor([]), None, rows, torch.ones(1), torch.ones(4))


@pytest.mark.parametrize("fuses", [False, True])
def test_kernels_are_compiled_ahead_where_the_pass_is_on(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, fuses: bool
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(dense.ahead, "compile_attention", lambda _, specs, **__: begun.extend(specs))
    config.compilation_config.pass_config.fuse_attn_quant = fuses
    layer_of(config, "a.0.attn")
    assert [spec.is_fp8_out for spec in begun] == [False, True][: 1 + fuses]
