# SPDX-License-Identifier: Apache-2.0
"""The MLA backend through vLLM's own classes, compared with float64 attention without pages."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs as vllm_envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from dsl_backend.attention import api, reference
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.quant.format import E4M3
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import compat, mla, validation
from dsl_backend.vllm_plugin.enum_members import ensure_prefill_member
from dsl_backend.vllm_plugin.mla import DSLMLAImpl, DSLMLAMetadata, DSLMLAMetadataBuilder
from dsl_backend.vllm_plugin.mla_prefill import DSLPrefillBackend, packed_batch
from tests.vllm_plugin.conftest import Step, cache_pages, engine_config, make_step
from tests.vllm_plugin.test_dense import rounded

HEADS, LATENT, ROPE, NOPE, VALUE, PAGE = 4, 512, 64, 128, 128, 16
SCALE = (NOPE + ROPE) ** -0.5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def config(model_folders: dict[str, Path], dtype: torch.dtype) -> Iterator[VllmConfig]:
    """A server's config for a small DeepSeek, with dsl and three draft tokens."""
    config = engine_config(
        model_folders["deepseek"],
        attention_backend="dsl",
        dtype=str(dtype).removeprefix("torch."),
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    )
    with set_current_vllm_config(config):
        yield config


def make_layer(kv_cache_dtype: str = "auto", name: str = "model.layers.0.self_attn.attn") -> MLAAttention:
    from vllm.config import get_current_vllm_config

    cache = get_current_vllm_config().cache_config
    cache.cache_dtype = kv_cache_dtype
    projection = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
    layer = MLAAttention(
        num_heads=HEADS,
        scale=SCALE,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        kv_b_proj=projection,
        cache_config=cache,
        prefix=name,
    )
    layer._k_scale.fill_(0.02 if kv_cache_dtype != "auto" else 1.0)
    return layer


def make_builder(layer: MLAAttention, config: VllmConfig) -> DSLMLAMetadataBuilder:
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=layer.impl.base_spec.dtype)
    return layer.attn_backend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))


def filled(
    layer: MLAAttention, step: Step, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A cache [pages, page_size, 576] that our update wrote, and each request's keys as the cache gives them back."""
    impl = layer.impl
    spec = impl.base_spec
    cache = torch.full((cache_pages(kv_lens, PAGE), PAGE, LATENT + ROPE), torch.nan)
    cache = cache.to(spec.kv_dtype)
    cache = cache.view(torch.uint8) if spec.is_fp8_kv else cache
    generator = torch.Generator().manual_seed(3)
    keys = [torch.randn(length, LATENT + ROPE, generator=generator).to(spec.dtype) for length in kv_lens]
    contexts = [kv - q for q, kv in zip(q_lens, kv_lens, strict=True)]

    def update(rows: torch.Tensor, slots: torch.Tensor) -> None:
        name = "fp8" if spec.is_fp8_kv else "auto"
        impl.do_kv_cache_update(rows[:, :LATENT], rows[:, None, LATENT:], cache, slots, name, layer._k_scale)

    for rows, slots, context in zip(keys, step.context_slots, contexts, strict=True):
        update(rows[:context], slots)
    update(torch.cat([rows[context:] for rows, context in zip(keys, contexts, strict=True)]), step.slots)
    if spec.is_fp8_kv:
        keys = [rounded(rows, layer._k_scale, E4M3) for rows in keys]
        cache = cache.view(torch.float8_e4m3fn)
    return cache, keys


def oracle(
    spec: AttentionSpec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    kv_starts: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) in float64, and in q's dtype."""
    lengths = kv_starts.diff()
    batch = Batch(
        query_start_loc=starts,
        seq_lens=lengths,
        num_tokens=q.shape[0],
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lengths.max()),
        kv_start_loc=kv_starts,
    )
    both = [
        reference.attention(spec, batch, q, keys, values, compute_dtype=compute) for compute in (torch.float64, q.dtype)
    ]
    return both[0], both[1]


def starts_of(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("in_two_parts", [True, False], ids=["pair", "one"])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "host_q_lens"),
    [
        ((1, 1, 1, 0), (40, 16, 1, 0), (1, 1, 1, 0)),
        ((4, 4), (20, 7), (4, 4)),
        ((4, 1, 3, 2), (35, 18, 3, 50), (4, 1, 3, 2)),
        # Adaptive verification deals drafts out again on the device; the host only knows how many there are.
        ((4, 1, 3, 1), (35, 18, 3, 50), (3, 2, 2, 2)),
        # Rows of a padded graph, which no request has.
        ((2, 1, 1), (35, 18, 3), (2, 2, 2)),
    ],
    ids=["decode", "uniform", "ragged", "dealt-again", "padded"],
)
def test_decode(
    config: VllmConfig,
    dtype: torch.dtype,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    host_q_lens: tuple[int, ...],
    in_two_parts: bool,
    kv_cache_dtype: str,
) -> None:
    layer = make_layer(kv_cache_dtype)
    builder = make_builder(layer, config)
    step = make_step(q_lens, kv_lens, PAGE)
    tokens, rows = sum(q_lens), sum(host_q_lens)
    step.common.query_start_loc_cpu = starts_of(host_q_lens)
    step.common.num_actual_tokens = rows
    metadata = builder.build(0, step.common)
    assert (metadata.num_decodes, metadata.num_prefills) == (len(q_lens), 0), "drafts are decodes, ragged ones too"
    cache, keys = filled(layer, step, q_lens, kv_lens)
    q = torch.randn(rows, HEADS, LATENT + ROPE, generator=torch.Generator().manual_seed(5)).to(dtype)
    given = (q[..., :LATENT], q[..., LATENT:]) if in_two_parts else q
    out, lse = layer.impl.forward_mqa(given, cache, metadata, layer)
    q, out, lse = q[:tokens], out[:tokens], lse[:tokens]
    packed = torch.cat(keys).unsqueeze(1)
    spec = AttentionSpec(
        heads_q=HEADS,
        heads_kv=1,
        head_dim=LATENT + ROPE,
        head_dim_v=LATENT,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=None,
        scale=SCALE,
        mla=True,
    )
    exact, naive = oracle(spec, q, packed, packed[..., :LATENT], step.common.query_start_loc, starts_of(kv_lens))
    assert_within_budget(out, exact[0], naive[0])
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-4, atol=1e-4)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["cute-fp8", None])
def test_quantised_queries(
    config: VllmConfig, dtype: torch.dtype, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel that takes them was asked for, vLLM quantises them, and hands them over with their scale."""
    if dtype is not torch.bfloat16:
        pytest.skip("a GPU's kernels have no float32")
    monkeypatch.setattr(validation, "current_target", lambda: from_arch("sm_90a"))
    monkeypatch.setattr(validation, "configuration_reasons", lambda **_: [])  # this is a CPU
    monkeypatch.setattr(mla.ahead, "compile_attention", lambda *_, **__: None)
    config.additional_config = {"dsl": {"attention_kernel": kernel, "fp8_queries": kernel is not None}}
    layer = make_layer("fp8")
    assert layer.impl.supports_quant_query_input == (kernel is not None)
    if kernel is None:
        return
    layer._q_scale.fill_(0.02)
    q_lens, kv_lens = (4, 1), (35, 18)
    config.additional_config = {"dsl": {"attention_kernel": "reference"}}  # no CPU has the kernel
    step, builder = make_step(q_lens, kv_lens, PAGE), make_builder(layer, config)
    cache, keys = filled(layer, step, q_lens, kv_lens)
    q = torch.randn(sum(q_lens), HEADS, LATENT + ROPE, generator=torch.Generator().manual_seed(5)).to(dtype)
    given = layer._decode_concat_quant_fp8_op.forward_native(q[..., :LATENT], q[..., LATENT:], layer._q_scale)
    assert given.dtype == E4M3.dtype
    out, _ = layer.impl.forward_mqa(given, cache, builder.build(0, step.common), layer)
    rows = (given.double() * 0.02).to(dtype)
    packed = torch.cat(keys).unsqueeze(1)
    spec = replace(layer.impl.base_spec, q_dtype=None, kv_dtype=dtype, page_size=None)
    starts = step.common.query_start_loc
    exact, naive = oracle(spec, rows, packed, packed[..., :LATENT], starts, starts_of(kv_lens))
    assert out.dtype == dtype
    assert_within_budget(out, exact[0], naive[0])


def test_draft_blocks_that_are_not_causal(config: VllmConfig, dtype: torch.dtype) -> None:
    layer = make_layer()
    if not hasattr(layer, "non_causal_multi_token_decode"):
        pytest.skip("this vLLM has causal MLA only")
    layer.non_causal_multi_token_decode = True
    q_lens, kv_lens = (4, 4), (20, 7)
    step = make_step(q_lens, kv_lens, PAGE, causal=False)
    metadata = make_builder(layer, config).build(0, step.common)
    cache, keys = filled(layer, step, q_lens, kv_lens)
    q = torch.randn(8, HEADS, LATENT + ROPE, generator=torch.Generator().manual_seed(5)).to(dtype)
    out, _ = layer.impl.forward_mqa(q, cache, metadata, layer)
    packed = torch.cat(keys).unsqueeze(1)
    spec = AttentionSpec(
        heads_q=HEADS,
        heads_kv=1,
        head_dim=LATENT + ROPE,
        head_dim_v=LATENT,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=None,
        scale=SCALE,
        causality=Causality.FULL,
        mla=True,
    )
    exact, naive = oracle(spec, q, packed, packed[..., :LATENT], step.common.query_start_loc, starts_of(kv_lens))
    assert_within_budget(out, exact[0], naive[0])


class TestPrefill:
    """Our prefill backend, with the metadata that our builder prepares."""

    # A decode, then prefills: one with nothing before it, one longer than a draft.
    q_lens, kv_lens = (1, 20, 9), (30, 20, 9)

    def inputs(self, tokens: int, keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(11)
        q = torch.randn(tokens, HEADS, NOPE + ROPE, generator=generator).to(dtype)
        k = torch.randn(keys, HEADS, NOPE + ROPE, generator=generator).to(dtype)
        # Values are the second part of a projection: rows are not side by side.
        v = torch.randn(keys, HEADS, NOPE + VALUE, generator=generator).to(dtype)[..., NOPE:]
        return q, k, v

    def spec(self, dtype: torch.dtype, causality: Causality) -> AttentionSpec:
        return AttentionSpec(
            heads_q=HEADS,
            heads_kv=HEADS,
            head_dim=NOPE + ROPE,
            head_dim_v=VALUE,
            dtype=dtype,
            kv_dtype=dtype,
            page_size=None,
            scale=SCALE,
            causality=causality,
        )

    def backend(self, config: VllmConfig) -> DSLPrefillBackend:
        config.additional_config = {"dsl": {"mla_latent_queries": 4}}
        layer = make_layer()
        step = make_step(self.q_lens, self.kv_lens, PAGE)
        metadata = make_builder(layer, config).build(0, step.common)
        assert metadata.prefill is not None
        assert (metadata.num_decodes, metadata.num_prefills) == (1, 2)
        backend = metadata.prefill.prefill_backend
        assert isinstance(backend, DSLPrefillBackend)
        return backend

    def test_new_tokens(self, config: VllmConfig, dtype: torch.dtype) -> None:
        backend = self.backend(config)
        q, k, v = self.inputs(29, 29, dtype)
        starts = starts_of((20, 9))
        exact, naive = oracle(self.spec(dtype, Causality.CAUSAL), q, k, v, starts, starts)
        alone = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False)
        assert isinstance(alone, torch.Tensor)
        out, lse = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
        assert torch.equal(alone, out)
        assert_within_budget(out, exact[0], naive[0])
        assert lse.shape == (HEADS, 29)
        torch.testing.assert_close(lse.double(), exact[1].T, rtol=1e-4, atol=1e-4)
        given = torch.empty_like(out)
        assert backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False, out=given) is given
        assert torch.equal(given, out)

    @pytest.mark.parametrize("as_index", [False, True], ids=["chunk", "index"])
    def test_context_chunk(self, config: VllmConfig, dtype: torch.dtype, as_index: bool) -> None:
        """Both of vLLM's ways to name a chunk; one request has nothing in this one."""
        backend = self.backend(config)
        q, k, v = self.inputs(29, 32, dtype)
        starts, kv_starts = starts_of((20, 9)), starts_of((32, 0))
        if as_index:
            context = SimpleNamespace(cu_seq_lens=torch.stack([starts, kv_starts]), max_seq_lens=[20, 32])
            metadata = SimpleNamespace(query_start_loc=starts, max_query_len=20, chunked_context=context)
            backend.prepare_metadata(metadata)
            out, lse = backend.run_prefill_context_chunk(chunk_idx=1, q=q, k=k, v=v)
        else:
            chunk = SimpleNamespace(
                index=1, query_start_loc=starts, cu_seq_lens=kv_starts, max_query_len=20, max_seq_len=32
            )
            out, lse = backend.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v)
        exact, naive = oracle(self.spec(dtype, Causality.FULL), q, k, v, starts, kv_starts)
        assert_within_budget(out, exact[0], naive[0])
        torch.testing.assert_close(lse[:, :20].double(), exact[1][:20].T, rtol=1e-4, atol=1e-4)
        assert (lse[:, 20:] == -torch.inf).all()
        assert out[20:].count_nonzero() == 0

    def test_nothing_of_vllms_workspace_is_kept(self, config: VllmConfig, dtype: torch.dtype) -> None:
        """Keys and values may be views of a buffer that vLLM shares: one that is kept would pin it when it grows."""
        backend = self.backend(config)
        tensors = self.inputs(29, 29, dtype)
        result = backend.run_prefill_new_tokens(*tensors, return_softmax_lse=False)
        references = [weakref.ref(tensor) for tensor in (*tensors, result)]
        del tensors, result
        assert [reference() for reference in references] == [None] * 4

    def test_a_new_step_makes_new_plans(self, config: VllmConfig, dtype: torch.dtype) -> None:
        backend = self.backend(config)
        q, k, v = self.inputs(29, 29, dtype)
        before = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False)
        starts = starts_of((3, 26))
        backend.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=26))
        after = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False)
        assert isinstance(before, torch.Tensor)
        assert isinstance(after, torch.Tensor)
        assert not torch.equal(before, after)
        exact, naive = oracle(self.spec(dtype, Causality.CAUSAL), q, k, v, starts, starts)
        assert_within_budget(after, exact[0], naive[0])


class TestChoice:
    """Which prefill backend our layers end up with."""

    def test_ours_by_default(self, config: VllmConfig) -> None:
        layer = make_layer()
        assert config.attention_config.mla_prefill_backend is ensure_prefill_member()
        assert isinstance(make_builder(layer, config)._prefill_backend, DSLPrefillBackend)

    def test_the_users_otherwise(self, model_folders: dict[str, Path]) -> None:
        config = engine_config(
            model_folders["deepseek"],
            attention_backend="dsl",
            dtype="float32",
            attention_config={"mla_prefill_backend": "FLASH_ATTN"},
        )
        with set_current_vllm_config(config):
            layer = make_layer()
            assert config.attention_config.mla_prefill_backend is not ensure_prefill_member()
            assert not isinstance(make_builder(layer, config)._prefill_backend, DSLPrefillBackend)

    def test_vllms_where_no_kernel_serves(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        from dsl_backend.runtime.target import from_arch

        config.attention_config.mla_prefill_backend = None
        layer = make_layer()
        config.attention_config.mla_prefill_backend = None
        layer.impl.v_head_dim = 20
        layer.impl.choose_prefill(config.attention_config, from_arch("sm_90a"), None)
        assert config.attention_config.mla_prefill_backend is None


def test_layer_takes_our_classes(config: VllmConfig) -> None:
    layer = make_layer()
    assert layer.attn_backend.get_name() == "DSL"
    assert isinstance(layer.impl, DSLMLAImpl)
    assert not layer.impl.supports_quant_query_input
    assert not layer.impl.supports_dcp
    api.writer.cache_clear()
    builder = make_builder(layer, config)
    writer = api.writer(layer.impl.spec(PAGE, Causality.CAUSAL), torch.device("cpu"), None)
    assert writer._kernels, "what writes is compiled in a step"
    assert builder.reorder_batch_threshold == 512
    assert builder.get_cudagraph_support(config, builder.kv_cache_spec) is AttentionCGSupport.UNIFORM_BATCH
    assert builder.get_varlen_cudagraph_max_query_len(config, builder.kv_cache_spec) in (4, None)


def test_all_queries_attend_in_latent_space_in_batch_invariant_mode(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a chunk is depends on other requests: it must not choose the kernel."""
    monkeypatch.setattr(vllm_envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    step = make_step((1, 700, 3), (35, 700, 3), PAGE)
    metadata = make_builder(make_layer(), config).build(0, step.common)
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    assert metadata.decode is not None
    assert metadata.decode.step.batch.max_query_len == 700


def test_metadata_aliases_the_runners_tensors(config: VllmConfig) -> None:
    step = make_step((4, 1, 3), (35, 18, 3), PAGE)
    metadata = make_builder(make_layer(), config).build(0, step.common)
    assert isinstance(metadata, DSLMLAMetadata)
    assert metadata.decode is not None
    batch = metadata.decode.step.batch
    assert batch.block_table is not None
    assert batch.seq_lens.data_ptr() == step.common.seq_lens.data_ptr()
    assert batch.query_start_loc.data_ptr() == step.common.query_start_loc.data_ptr()
    assert batch.block_table.data_ptr() == step.common.block_table_tensor.data_ptr()
    assert batch.max_query_len == 4
    assert metadata.decode.step.planners is not None


def test_decode_bound_without_vllms_word() -> None:
    assert compat.decode_query_bound({"query_start_loc_cpu": torch.tensor([0, 1, 5, 7])}) == 4
    assert compat.decode_query_bound({"max_query_len": 2}) == 2
    assert compat.is_causal(SimpleNamespace())
    assert not compat.is_causal(SimpleNamespace(causal=False))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"alibi_slopes": [1.0] * HEADS, "logits_soft_cap": 2.0}, ["ALiBi", "a cap on the logits"]),
        ({"sliding_window": 8}, ["a sliding window"]),
        ({"attn_type": "encoder_only"}, ["encoder_only attention"]),
    ],
    ids=str,
)
def test_refusals(config: VllmConfig, facts: dict[str, Any], words: list[str]) -> None:
    ordinary: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": LATENT + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": VALUE,
        "kv_b_proj": torch.nn.Identity(),
    }
    with pytest.raises(ValueError) as error:
        DSLMLAImpl(**(ordinary | facts))
    for word in words:
        assert word in str(error.value)


def test_starts_of_a_chunk_are_aligned() -> None:
    """Else each chunk of context would be another kernel to Triton."""
    rows = torch.arange(15, dtype=torch.int32).view(3, 5)
    for row in rows:
        batch = packed_batch(rows[0], row, tokens=4, max_query_len=4, max_kv_len=4)
        assert batch.kv_start_loc is not None
        assert batch.kv_start_loc.data_ptr() % 16 == 0
        assert torch.equal(batch.kv_start_loc, row)
