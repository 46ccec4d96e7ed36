# SPDX-License-Identifier: Apache-2.0
"""Attention modules whose norms, rotation and cache write are one launch: which are, the results, what the log says."""

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope

from dsl_backend.attention import rope
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import ahead, loaded_models
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.rope import find, forward_source, method, serve
from tests.vllm_plugin.test_fused_mlp import engine

pytestmark = pytest.mark.usefixtures("one_rank")

HEADS, HEADS_KV, DIM, HIDDEN, PAGE, TOKENS = 4, 2, 64, 96, 16, 7
BF16 = torch.bfloat16
BY_DSL = {"additional_config": {"dsl": {"rope": "dsl"}}}


class Project(nn.Module):
    """A projection as vLLM's: its result, and a bias that is left to the caller."""

    def __init__(self, columns: int, rows: int, seed: int) -> None:
        super().__init__()
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5
        self.weight = nn.Parameter(values.to(BF16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Plain(nn.Module):
    """In the form of Llama's attention; other classes have another `forward`."""

    norm: Any = None

    def __init__(self, prefix: str = "a.attn", rotary: Any = None, **attention: Any) -> None:
        super().__init__()
        self.q_size, self.kv_size, self.head_dim = HEADS * DIM, HEADS_KV * DIM, DIM
        self.num_heads, self.num_kv_heads = HEADS, HEADS_KV
        self.use_rope = True
        self.qkv_proj = Project(HIDDEN, self.q_size + 2 * self.kv_size, 1)
        self.o_proj = Project(self.q_size, HIDDEN, 2)
        self.rotary_emb = rotary or get_rope(DIM, max_position=64)
        self.attn = Attention(HEADS, DIM, DIM**-0.5, HEADS_KV, prefix=prefix, **attention)
        if self.norm is not None:
            self.q_norm, self.k_norm = (self.norm(DIM, eps=1e-5) for _ in range(2))
            for seed, norm in enumerate((self.q_norm, self.k_norm)):
                norm.weight.data = torch.randn(DIM, generator=torch.Generator().manual_seed(seed)).to(BF16)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class Turned(Plain):
    """In the form of gpt-oss: other arguments; and with a flag, as Granite's."""

    def forward(self, hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden)[0]
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.use_rope:
            q, k = self.rotary_emb(where, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class Normed(Plain):
    """In the form of Qwen3's."""

    norm = RMSNorm

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q_by_head = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
        q_by_head = self.q_norm(q_by_head)
        q = q_by_head.view(q.shape)
        k_by_head = k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
        k_by_head = self.k_norm(k_by_head)
        k = k_by_head.view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class Gemma(Normed):
    """In the form of Gemma 3's."""

    norm = GemmaRMSNorm

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        q = self.q_norm(q)
        q = q.flatten(-2, -1)
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        k = self.k_norm(k)
        k = k.flatten(-2, -1)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served yet, the reference serves, and layers are ours."""
    monkeypatch.setattr(serve, "_served", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    config = VllmConfig(attention_config={"backend": ensure_member()})
    with torch.no_grad(), set_current_vllm_config(config):
        yield
    torch.set_default_dtype(before)


def config_of(**changes: Any) -> Any:
    facts = {"model_config": object(), "cache_config": get_current_vllm_config().cache_config}
    return engine(**facts | BY_DSL | changes)


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Serves a model; what the log says then."""

    def function(*parts: nn.Module, **changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            serve.serve_rope(nn.ModuleList(parts), config_of(**changes))
        return [record.getMessage() for record in caplog.records if " rotary " in record.getMessage()]

    return function


def is_served(module: Any) -> bool:
    return getattr(module.forward, "__func__", None) is method.forward


class Step:
    """A prompt of some tokens behind none, and one token of padding; attention is replaced by what it is given."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.seen = module, []
        self.cache = torch.zeros(3, HEADS_KV, PAGE, 2 * DIM)
        self.slots = torch.tensor([20, 21, 3, 47, 16, 0, -1])
        self.positions = torch.tensor([0, 1, 2, 3, 40, 63, 0])
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).to(BF16)
        module.attn.kv_cache = self.cache

        def attend(layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, **given: Any) -> None:
            self.seen.append((query.clone(), key, value))
            given["output"].copy_(query)

        monkeypatch.setattr(module.attn.impl, "forward", attend)

    def run(self, *arguments: torch.Tensor, slots: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, queries that attention was given, the cache)."""
        self.cache.zero_()
        config, name = get_current_vllm_config(), self.module.attn.layer_name
        mapping = {name: self.slots} if slots else {}
        with set_forward_context({name: None}, config, slot_mapping=mapping):
            out = self.module(*(arguments or (self.positions, self.hidden)))
        return out, self.seen[-1][0].flatten(1), self.cache.clone()


def exact(step: Step, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads, dim] and keys in float64, from the rounded result of the projection."""
    module = step.module
    qkv = module.qkv_proj(step.hidden)[0].double()
    q, k, _ = (part.unflatten(1, (-1, DIM)) for part in qkv.split([module.q_size, module.kv_size, module.kv_size], 1))
    if module.norm is not None:
        q, k = (
            part * (norm.weight.double() + offset) / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            for part, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    cos, sin = module.rotary_emb.cos_sin_cache[step.positions].double().unsqueeze(1).chunk(2, -1)

    def turned(part: torch.Tensor) -> torch.Tensor:
        a, b = part.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turned(q), turned(k)


@pytest.mark.parametrize("kind", [Plain, Normed, Gemma])
def test_results(kind: type[Plain], served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within twice the error of vLLM's own modules; values are the same bits, and attention gets no keys."""
    step = Step(kind(), monkeypatch)
    theirs = step.run()
    (line,) = served(step.module)
    assert line.startswith("dsl serves 1 rotary embeddings and cache writes, 4/2 heads of 64, bfloat16, page ")
    assert line.endswith("by rope-write-kv reference")
    out, q, cache = step.run()
    assert step.seen[-1][1:] == (None, None)
    assert out.shape == theirs[0].shape
    q_exact, k_exact = exact(step, 1.0 if kind is Gemma else 0.0)
    assert_within_budget(q.flatten(1), q_exact.flatten(1), theirs[1].flatten(1))
    kept = step.slots >= 0
    at = (step.slots[kept] // PAGE, slice(None), step.slots[kept] % PAGE)
    keys, keys_theirs = (one[at][..., :DIM].flatten(1) for one in (cache, theirs[2]))
    assert_within_budget(keys, k_exact[kept].flatten(1), keys_theirs)
    assert torch.equal(cache[..., DIM:], theirs[2][..., DIM:])
    assert cache.flatten(0, 2).any(-1).sum() == HEADS_KV * kept.sum()


def test_other_arguments(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(Turned(), monkeypatch)
    assert served(step.module)
    found = step.run(step.hidden, step.positions)
    plain = Step(Plain("b.attn"), monkeypatch)
    assert served(plain.module)
    for one, other in zip(found, plain.run(), strict=True):
        assert torch.equal(one, other)


def test_a_run_without_slots_writes_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(Plain(), monkeypatch)
    served(step.module)
    out, _, cache = step.run(slots=False)
    assert out.isfinite().all()
    assert not cache.any()


def test_torch_compile_sees_one_node(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(Normed(), monkeypatch)
    served(step.module)
    expected = step.run()
    step.module.forward = torch.compile(step.module.forward, fullgraph=True, backend="aot_eager")
    for one, other in zip(step.run(), expected, strict=True):
        assert torch.equal(one, other)


def test_reloaded_weights_are_used(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(Normed(), monkeypatch)
    served(step.module)
    before = step.run()[1]
    step.module.q_norm.weight.data = step.module.q_norm.weight.data * 2
    torch.testing.assert_close(step.run()[1], before * 2)


def test_graphs_are_cut_where_the_cache_is_written(served: Any) -> None:
    cut = SimpleNamespace(splitting_ops=[serve.DENSE.attends], pass_config=SimpleNamespace())
    for number in range(2):
        served(Plain(f"a.{number}.attn"), compilation_config=cut)
    assert cut.splitting_ops == [serve.DENSE.attends, "dsl_backend::rope_write_kv_layer"]
    whole = SimpleNamespace(splitting_ops=[], pass_config=SimpleNamespace())
    served(Plain("b.attn"), compilation_config=whole)
    assert whole.splitting_ops == []


def test_captured_pieces_read_no_tensor_of_an_operator_at_a_cut(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece reads its inputs where they were when it was captured; what runs between pieces would move them."""
    from vllm.compilation.backends import split_graph

    step, cut = Step(Plain(), monkeypatch), [serve.DENSE.attends, f"dsl_backend::{method.NAME}"]
    served(step.module)
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        traced.append(graph)
        return graph.forward

    step.module.forward = torch.compile(step.module.forward, fullgraph=True, backend=backend)
    step.run()
    (graph,) = traced
    pieces = split_graph(graph, cut)[1]
    between = [piece.graph for piece in pieces if piece.is_splitting_graph]
    # One piece: in front of it the projection, behind it the output's. Each further one is a graph to replay.
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    assert any(str(node.target).startswith(f"dsl_backend.{method.NAME}") for one in between for node in one.graph.nodes)
    for one in between:
        (output,) = (node for node in one.graph.nodes if node.op == "output")
        assert not output.all_input_nodes, f"{output.all_input_nodes} are made where graphs are cut"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"additional_config": {}}, "models that dsl serves were measured on sm_90a, and not on cpu"),
        ({"additional_config": {"dsl": {"rope": "vllm"}}}, "additional_config['dsl']['rope'] is vllm"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, "calculate_kv_scales reads the keys"),
    ],
)
def test_engines_that_are_left_alone(served: Any, changes: dict[str, Any], says: str) -> None:
    module = Plain()
    (line,) = served(module, **changes)
    assert line.startswith(f"vLLM serves 1 rotary embeddings and cache writes: {says}")
    assert not is_served(module)


class Scaled(Plain):
    """Queries are scaled between."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        q = q * 2
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class Swapped(Plain):
    """Keys are rotated as queries."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        k, q = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class Gated(Plain):
    """More than attention's output is projected."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        attended = self.attn(q, k, v)
        output, _ = self.o_proj(attended + q)
        return output


class Unrotated(Plain):
    """Of a layer without positions, as some of Llama 4's."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class HalfNormed(Normed):
    """Only queries are normalised."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim)).view(-1, self.q_size)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Scaled, "Scaled is not of the common form: an expression that is not known (q * 2)"),
        (Swapped, "Swapped is not of the common form: a call that is not known (self.attn(q, k, v))"),
        (Gated, "Gated is not of the common form: an expression that is not known (attended + q)"),
        (Unrotated, "Unrotated is not of the common form: a call that is not known (self.attn(q, k, v))"),
        (HalfNormed, "HalfNormed is not of the common form: "),
    ],
)
def test_other_forms_are_left_alone(kind: type[Plain], says: str, served: Any) -> None:
    module = kind()
    (line,) = served(module)
    assert line.startswith(f"vLLM serves 1 rotary embeddings and cache writes: {says}"), line
    assert not is_served(module)


def mrope() -> Any:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    return get_rope(DIM, max_position=64, rope_parameters=parameters)


def changed(**facts: Any) -> Callable[[], Any]:
    """A module with other facts than its class gives it."""

    def make() -> Any:
        module = Normed()
        for path, value in facts.items():
            owner, _, name = path.rpartition("__")
            setattr(getattr(module, owner) if owner else module, name, value)
        return module

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plain(rotary=mrope()), "MRotaryEmbedding is M-RoPE: a token has three positions, one is needed"),
        (lambda: Plain(rotary=nn.Identity()), "Identity is not vLLM's RotaryEmbedding"),
        (lambda: Plain(rotary=get_rope(32, max_position=64)), "RotaryEmbedding is for heads of 32"),
        (changed(forward=print), "another forward was put into Normed"),
        (changed(q_size=64), "Normed splits (64, 128, 128): (256, 128, 128) is needed for its attention's heads"),
        (changed(attn__kv_sharing_target_layer_name="b"), "layers that share another one's cache write none"),
        (changed(attn__query_quant=print), "queries are quantised behind the rotation"),
        (changed(q_norm__variance_epsilon=1e-3), "the norms of queries and keys differ in more than their weights"),
    ],
)
def test_modules_that_are_left_alone(make: Callable[[], Any], says: str, served: Any) -> None:
    module = make()
    (line,) = served(module)
    assert line.startswith(f"vLLM serves 1 rotary embeddings and cache writes: {says}"), line
    assert not is_served(module)


def test_norms_of_other_widths_are_left_alone(served: Any) -> None:
    """As OLMo 2's, over all heads."""
    module = Normed()
    module.q_norm, module.k_norm = RMSNorm(HEADS * DIM), RMSNorm(HEADS_KV * DIM)
    (line,) = served(module)
    assert "RMSNorm normalises 256 elements and not a head of 64" in line


def test_another_backend_is_left_alone(served: Any) -> None:
    module = Plain()
    assert served(module, attention_config=SimpleNamespace(backend=None)) == []
    assert not is_served(module)


# Model -> (class, whether it is of the common form)
FORMS = {
    "llama": ("LlamaAttention", True),
    "qwen2": ("Qwen2Attention", True),
    "qwen3": ("Qwen3Attention", True),
    "qwen3_moe": ("Qwen3MoeAttention", True),
    "gemma2": ("Gemma2Attention", True),
    "gemma3": ("Gemma3Attention", True),
    "gpt_oss": ("OAIAttention", True),
    "mixtral": ("MixtralAttention", True),
    "granite": ("GraniteAttention", True),
    "stablelm": ("StablelmAttention", True),
    "glm4": ("Glm4Attention", True),
    "internlm2": ("InternLM2Attention", False),
    "commandr": ("CohereAttention", False),
}


@pytest.mark.rest
@pytest.mark.parametrize("model", FORMS)
def test_forms_of_vllms_models(model: str) -> None:
    """Read from vLLM's own sources, without weights."""
    name, common = FORMS[model]
    kind = getattr(importlib.import_module(f"vllm.model_executor.models.{model}"), name)
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    module.q_size, module.kv_size, module.use_rope, module.qk_norm = 256, 128, True, False
    if not common:
        with pytest.raises(forward_source.OtherForm):
            forward_source.form_of(module, "attn")
        return
    form = forward_source.form_of(module, "attn")
    assert (form.projection, form.rotary, form.attention, form.output) == ("qkv_proj", "rotary_emb", "attn", "o_proj")
    assert form.positions == "positions"
    assert form.hidden == "hidden_states"
    assert form.sizes == (256, 128, 128)
    assert (form.norms is not None) == (model in ("qwen3", "qwen3_moe", "gemma3"))


def test_what_is_served_is_compiled_ahead(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from dsl_backend.attention.cute import rope_host

    begun: list[Any] = []
    monkeypatch.setattr(ahead, "begin", lambda config, units, beside: begun.extend(units(from_arch("sm_90a"))))
    served(Plain("a.attn"), Normed("b.attn"))
    (made,) = serve._served
    assert {unit.key for unit in begun} == {rope_host.key_of(one.spec) for one in made.values()}
    assert loaded_models.compilation_key().count("rotated in neox's style") == 2


def test_builders_compile_for_their_pages(served: Any) -> None:
    module = Plain()
    served(module)
    rope.writer.cache_clear()
    method.prepare(module.attn, 32, torch.device("cpu"))
    spec = module.attn.dsl_rotation.spec
    wanted = replace(spec, layer=replace(spec.layer, page_size=32))
    assert rope.writer(wanted, torch.device("cpu"), None)._kernels


def test_a_vllm_that_wants_keys_is_left_alone(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "takes_queries_alone", lambda: False)
    (line,) = served(Plain())
    assert "this vLLM's Attention has to be given keys and values" in line
