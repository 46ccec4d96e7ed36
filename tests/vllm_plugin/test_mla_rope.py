# SPDX-License-Identifier: Apache-2.0
"""MLA layers whose norm, rotation and cache write are one launch: which are, the results, and what the log says."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding import get_rope

from dsl_backend.attention import api, rope
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import ahead, loaded_models
from dsl_backend.vllm_plugin.rope import latent_method, latent_source, method, serve
from tests.vllm_plugin.conftest import engine_config
from tests.vllm_plugin.test_fused_mlp import engine
from tests.vllm_plugin.test_rope import BY_DSL, Project

pytestmark = pytest.mark.usefixtures("one_rank")

HEADS, LATENT, ROPE, NOPE, VALUE, Q_LATENT, HIDDEN, PAGE, TOKENS = 4, 512, 64, 128, 128, 48, 96, 16, 7
BF16 = torch.bfloat16
WHAT = "norms, rotary embeddings and cache writes of MLA"
YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


def yarn(elements: int) -> Any:
    return get_rope(elements, max_position=64, rope_parameters=YARN, is_neox_style=False)


def norm_of(width: int, kind: type[Any] = RMSNorm) -> Any:
    norm = kind(width, eps=1e-5)
    norm.weight.data = (torch.randn(width, generator=torch.Generator().manual_seed(width)) / 4 + 1).to(BF16)
    return norm


def layer(
    q_latent: int | None = None, kind: type[Any] = MultiHeadLatentAttentionWrapper, **changes: Any
) -> MultiHeadLatentAttentionWrapper:
    """An MLA layer of small projections, as a model has it."""
    width = HEADS * (NOPE + ROPE)
    parts: dict[str, Any] = {
        "kv_a_layernorm": norm_of(LATENT),
        "kv_b_proj": Project(LATENT, HEADS * (NOPE + VALUE), 1),
        "rotary_emb": yarn(ROPE),
        "o_proj": Project(HEADS * VALUE, HIDDEN, 2),
        "fused_qkv_a_proj": Project(HIDDEN, q_latent + LATENT + ROPE, 3) if q_latent else None,
        "kv_a_proj_with_mqa": None if q_latent else Project(HIDDEN, LATENT + ROPE, 3),
        "q_a_layernorm": norm_of(q_latent) if q_latent else None,
        "q_b_proj": Project(q_latent, width, 4) if q_latent else None,
        "q_proj": None if q_latent else Project(HIDDEN, width, 4),
        "indexer": None,
        "is_sparse": False,
        "topk_indices_buffer": None,
    }
    sizes = (HIDDEN, HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, VALUE, q_latent, LATENT)
    cache = get_current_vllm_config().cache_config
    return kind(*sizes, MLAModules(**parts | changes), cache, prefix="a")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch, model_folders: dict[str, Path]) -> Iterator[VllmConfig]:
    """Nothing is served yet, the reference serves, and layers are ours."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    config = engine_config(model_folders["deepseek"], attention_backend="dsl", dtype="bfloat16")
    with torch.no_grad(), set_current_vllm_config(config):
        yield config
    torch.set_default_dtype(before)


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Serves a model; what the log says then."""

    def function(*parts: nn.Module, **changes: Any) -> list[str]:
        current = get_current_vllm_config()
        facts = {"model_config": object(), "cache_config": current.cache_config}
        caplog.clear()
        with caplog.at_level(logging.INFO):
            serve.serve_rope(nn.ModuleList(parts), engine(**facts | BY_DSL | changes))
        return [record.getMessage() for record in caplog.records if WHAT in record.getMessage()]

    return function


def is_served(module: Any) -> bool:
    return getattr(module.forward, "__func__", None) is latent_method.forward


class Step:
    """A prompt of some tokens behind none, and one token of padding; attention is replaced by what it is given."""

    def __init__(self, module: Any, cache_dtype: torch.dtype = BF16) -> None:
        self.module, self.seen = module, []
        self.cache = torch.zeros(3, PAGE, LATENT + ROPE, dtype=cache_dtype)
        self.slots = torch.tensor([20, 21, 3, 47, 16, 0, -1])
        self.positions = torch.tensor([0, 1, 2, 3, 40, 63, 0])
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).to(BF16)
        module.mla_attn.kv_cache = self.cache

        def attend(q: Any, latent: Any, rope: Any, cache: Any, metadata: Any, output: Any = None, **_: Any) -> Any:
            self.seen.append((q.clone(), latent.clone(), rope.clone()))
            return output.copy_(q[..., :VALUE].flatten(1))

        module.mla_attn.forward_impl = attend

    def run(self, *arguments: Any, slots: bool = True, **more: Any) -> tuple[torch.Tensor, ...]:
        """(output, queries, latent and rope parts that attention was given, the cache)."""
        self.cache.zero_()
        config, name = get_current_vllm_config(), self.module.mla_attn.layer_name
        with set_forward_context({name: None}, config, slot_mapping={name: self.slots} if slots else {}):
            out = self.module(*(arguments or (self.positions, self.hidden)), **more)
        return out, *(part.flatten(1) for part in self.seen[-1]), self.cache.clone()


def exact(step: Step) -> tuple[torch.Tensor, ...]:
    """Queries [tokens, heads * dim], latent and rope parts in float64, from the rounded results of the projections."""
    module = step.module
    if module.q_lora_rank:
        q_latent, keys = module.fused_qkv_a_proj(step.hidden)[0].split([Q_LATENT, LATENT + ROPE], 1)
        q = module.q_b_proj(module.q_a_layernorm(q_latent))[0]
    else:
        keys, q = module.kv_a_proj_with_mqa(step.hidden)[0], module.q_proj(step.hidden)[0]
    q, keys = q.double().view(TOKENS, HEADS, -1), keys.double()
    latent = keys[:, :LATENT]
    latent = latent * module.kv_a_layernorm.weight.double() / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    cos, sin = module.rotary_emb.cos_sin_cache[step.positions].double().unsqueeze(1).chunk(2, -1)

    def turned(part: torch.Tensor) -> torch.Tensor:
        a, b = part[..., 0::2], part[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    q = torch.cat((q[..., :NOPE], turned(q[..., NOPE:])), -1)
    return q.flatten(1), latent, turned(keys[:, None, LATENT:]).squeeze(1)


@pytest.mark.parametrize("q_latent", [None, Q_LATENT])
def test_results(q_latent: int | None, served: Any) -> None:
    """Within twice the error of vLLM's own layer, in attention's inputs and in the cache."""
    step = Step(layer(q_latent))
    theirs = step.run()
    (line,) = served(step.module)
    assert line.startswith(f"dsl serves 1 {WHAT}, 4/1 heads of (576, 512), bfloat16, page ")
    assert line.endswith("by rope-write-mla reference")
    assert is_served(step.module)
    found = step.run()
    assert found[0].shape == theirs[0].shape
    right = exact(step)
    for ours, one, other in zip(found[1:4], right, theirs[1:4], strict=True):
        assert_within_budget(ours, one, other)
    kept = step.slots >= 0
    at = (step.slots[kept] // PAGE, step.slots[kept] % PAGE)
    assert torch.equal(found[4][at], torch.cat(found[2:4], 1)[kept])
    assert found[4].any(-1).sum() == kept.sum()


def test_vllms_own_write_writes_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(layer())
    monkeypatch.setattr(api, "write_kv", lambda *_, **__: pytest.fail("the cache is written twice"))
    with pytest.raises(pytest.fail.Exception):
        step.run()
    served(step.module)
    assert step.run()[4].any()


def test_an_fp8_cache_is_divided_by_its_scale(afresh: VllmConfig, served: Any) -> None:
    afresh.cache_config.cache_dtype = "fp8"
    step = Step(layer(), torch.uint8)
    step.module.mla_attn._k_scale.fill_(0.5)
    served(step.module)
    found = step.run()
    kept = step.slots >= 0
    cached = found[4].view(torch.float8_e4m3fn)[step.slots[kept] // PAGE, step.slots[kept] % PAGE].float()
    rows = torch.cat(found[2:4], 1)[kept].float() / 0.5
    assert ((cached - rows).abs() <= rows.abs() / 14 + 2**-9).all()


def test_a_run_without_slots_writes_nothing(served: Any) -> None:
    step = Step(layer())
    served(step.module)
    found = step.run(slots=False)
    assert found[0].isfinite().all()
    assert not found[4].any()


@pytest.mark.parametrize("q_latent", [None, Q_LATENT])
def test_torch_compile_sees_one_node(q_latent: int | None, served: Any) -> None:
    step = Step(layer(q_latent))
    served(step.module)
    expected = step.run()
    step.module.forward = torch.compile(step.module.forward, fullgraph=True, backend="aot_eager")
    found = step.run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("q_latent", [None, Q_LATENT])
def test_an_operator_at_a_cut_and_attention_are_one_piece(q_latent: int | None, served: Any) -> None:
    """What lies between them would be a graph to replay in each layer; vLLM's own cache write would do nothing."""
    from vllm.compilation.backends import split_graph

    step = Step(layer(q_latent))
    served(step.module)
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        traced.append(graph)
        return graph.forward

    step.module.forward = torch.compile(step.module.forward, fullgraph=True, backend=backend)
    step.run()
    (graph,) = traced
    cut = [serve.LATENT.attends, "vllm::unified_mla_kv_cache_update", f"dsl_backend::{latent_method.NAME}"]
    pieces = split_graph(graph, cut)[1]
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    calls = [node for node in pieces[1].graph.graph.nodes if node.op not in ("placeholder", "output")]
    assert [str(node.target).split(".")[1] for node in calls] == [latent_method.NAME, serve.LATENT.attends[6:]]
    (output,) = (node for node in pieces[1].graph.graph.nodes if node.op == "output")
    assert not output.all_input_nodes, f"{output.all_input_nodes} are made where graphs are cut"


def test_reloaded_weights_are_used(served: Any) -> None:
    step = Step(layer())
    served(step.module)
    before = step.run()[2]
    step.module.kv_a_layernorm.weight.data = step.module.kv_a_layernorm.weight.data * 2
    torch.testing.assert_close(step.run()[2], before * 2)


def test_an_argument_that_the_form_leaves_out_is_refused(served: Any) -> None:
    step = Step(layer())
    served(step.module)
    step.run(step.positions, step.hidden, None)
    with pytest.raises(InvalidInput, match="llama_4_scaling is given"):
        step.run(step.positions, step.hidden, torch.ones(TOKENS, 1, 1))


def test_graphs_are_cut_where_the_cache_is_written(served: Any) -> None:
    attends = "vllm::unified_mla_attention_with_output"
    cut = SimpleNamespace(splitting_ops=[attends], pass_config=SimpleNamespace())
    served(layer(), compilation_config=cut)
    assert cut.splitting_ops == [attends, "dsl_backend::rope_write_mla_layer"]
    assert serve.LATENT.attends in VllmConfig().compilation_config._attention_ops


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"additional_config": {}}, "models that dsl serves were measured on sm_90a, and not on cpu"),
        ({"additional_config": {"dsl": {"rope": "vllm"}}}, "additional_config['dsl']['rope'] is vllm"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, "calculate_kv_scales reads the keys"),
        (
            {"model_config": SimpleNamespace(hf_text_config=SimpleNamespace(llama_4_scaling={"beta": 1}))},
            "queries are scaled by their positions",
        ),
    ],
)
def test_engines_that_are_left_alone(served: Any, changes: dict[str, Any], says: str) -> None:
    step = Step(layer())
    (line,) = served(step.module, **changes)
    assert line.startswith(f"vLLM serves 1 {WHAT}: {says}")
    assert not is_served(step.module)
    # vLLM writes the cache then.
    assert step.run()[4].any()


class Direct(MultiHeadLatentAttentionWrapper):
    """In the form of older versions of vLLM: projections are called where they are named."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.q_lora_rank is not None:
            q_c, kv_lora = self.fused_qkv_a_proj(hidden_states)[0].split(
                [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1
            )
            q = self.q_b_proj(self.q_a_layernorm(q_c))[0]
        else:
            kv_lora = self.kv_a_proj_with_mqa(hidden_states)[0]
            q = self.q_proj(hidden_states)[0]
        kv_c, k_pe = kv_lora.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv_c_normed = self.kv_a_layernorm(kv_c)
        q = q.view(-1, self.num_heads, self.qk_head_dim)
        k_pe = k_pe.unsqueeze(1)
        q[..., self.qk_nope_head_dim :], k_pe = self.rotary_emb(positions, q[..., self.qk_nope_head_dim :], k_pe)
        if llama_4_scaling is not None:
            q *= llama_4_scaling
        attended = self.mla_attn(
            q, kv_c_normed, k_pe, output_shape=(hidden_states.shape[0], self.num_heads * self.v_head_dim)
        )
        return self.o_proj(attended)[0]


@pytest.mark.parametrize("q_latent", [None, Q_LATENT])
def test_older_forms_are_served(q_latent: int | None, served: Any) -> None:
    found = []
    for kind in (Direct, MultiHeadLatentAttentionWrapper):
        get_current_vllm_config().compilation_config.static_forward_context.clear()
        step = Step(layer(q_latent, kind))
        served(step.module)
        assert is_served(step.module)
        found.append(step.run())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Other(MultiHeadLatentAttentionWrapper):
    """Another layer: keys are rotated and nothing is normalised."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        kv_lora = self.kv_a_proj_with_mqa(hidden_states)[0]
        q = self.q_proj(hidden_states)[0]
        kv_c, k_pe = kv_lora.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q = q.view(-1, self.num_heads, self.qk_head_dim)
        k_pe = k_pe.unsqueeze(1)
        q[..., self.qk_nope_head_dim :], k_pe = self.rotary_emb(positions, q[..., self.qk_nope_head_dim :], k_pe)
        return self.o_proj(self.mla_attn(q, kv_c, k_pe))[0]


def changed(**facts: Any) -> Callable[[], Any]:
    """A layer with other facts than its class gives it."""

    def make() -> Any:
        module: Any = layer(Q_LATENT if facts.get("fuse_qkv_rmsnorm") else None)
        for path, value in facts.items():
            owner, _, name = path.rpartition("__")
            setattr(getattr(module, owner) if owner else module, name, value)
        return module

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: layer(kind=Other), "Other is not of the common form: a call that is not known (self.mla_attn("),
        (changed(fuse_qkv_rmsnorm=True), "a name that is not known (fused_q_kv_rmsnorm)"),
        (changed(rotary_emb=None), "is not of the common form: a call that is not known (self.mla_attn("),
        (changed(g_proj=nn.Identity()), "an expression that is not known (attn_out * self.g_proj("),
        (changed(dcp_q_replicate=True), "a statement that is not known (heads *= "),
        (changed(num_heads=8, mla_attn__forward=print), "another forward was put into MLAAttention"),
        (changed(forward=print), "another forward was put into MultiHeadLatentAttentionWrapper"),
        (changed(mla_attn__use_pcp=True), "MLAAttention has use_pcp"),
        (lambda: layer(rotary_emb=nn.Identity()), "Identity is not vLLM's RotaryEmbedding"),
        (lambda: layer(rotary_emb=yarn(32)), "DeepseekScalingRotaryEmbedding rotates 32 elements of 64"),
        (lambda: layer(kv_a_layernorm=norm_of(LATENT, GemmaRMSNorm)), "GemmaRMSNorm adds 1 to its weight"),
        (lambda: layer(kv_a_layernorm=norm_of(64)), "RMSNorm normalises 64 elements and not a head of 512"),
    ],
)
def test_layers_that_are_left_alone(make: Callable[[], Any], says: str, served: Any) -> None:
    module = make()
    (line,) = served(module)
    assert line.startswith(f"vLLM serves 1 {WHAT}: ")
    assert says in line
    assert not is_served(module)
    assert not module.mla_attn.impl.written_in_front


def test_a_plain_embedding_and_neox(served: Any) -> None:
    """As Kimi's and others': not DeepSeek's scaling."""
    step = Step(layer(rotary_emb=get_rope(ROPE, max_position=64)))
    theirs = step.run()
    assert served(step.module)
    for ours, other in zip(step.run()[1:4], theirs[1:4], strict=True):
        torch.testing.assert_close(ours, other, rtol=0.02, atol=0.02)


def test_what_is_served_is_compiled_ahead(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from dsl_backend.attention.cute import mla_rope_host

    begun: list[Any] = []
    module = layer()
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: begun.extend(units(from_arch("sm_90a"))))
    served(module)
    (made,) = serve._served
    assert {unit.key for unit in begun} == {mla_rope_host.key_of(one.spec) for one in made.values()}
    assert loaded_models.compilation_key().count("512 normalised by bfloat16 weights") == 1


def test_builders_compile_for_their_pages(served: Any) -> None:
    module = layer()
    served(module)
    rope.writer.cache_clear()
    method.prepare(module.mla_attn, 32, torch.device("cpu"))
    spec = module.mla_attn.dsl_rotation.spec
    assert rope.writer(replace(spec, layer=replace(spec.layer, page_size=32)), torch.device("cpu"), None)._kernels


def test_form() -> None:
    assert latent_source.latent_form_of(layer(Q_LATENT), "mla_attn") == latent_source.LatentForm(
        arguments=("positions", "hidden_states", "llama_4_scaling"),
        positions="positions",
        hidden="hidden_states",
        keys="fused_qkv_a_proj",
        q_norm="q_a_layernorm",
        queries="q_b_proj",
        norm="kv_a_layernorm",
        rotary="rotary_emb",
        attention="mla_attn",
        output="o_proj",
    )
