# SPDX-License-Identifier: Apache-2.0
"""The dense backend through vLLM's own classes: write a step's keys, attend, compare with float64 without a cache."""

import copy
import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from dsl_backend.attention import api, reference
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.quant.format import E4M3, NVFP4_KV, KVFormat
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.numerics import assert_within_budget
from dsl_backend.vllm_plugin import compat, dense, validation
from dsl_backend.vllm_plugin.dense import (
    DSLAttentionBackend,
    DSLAttentionImpl,
    DSLMetadata,
    DSLMetadataBuilder,
    by_lengths,
)
from dsl_backend.vllm_plugin.enum_members import ensure_member
from tests.vllm_plugin.conftest import Step, cache_pages, make_step

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 64, 16
# A decode, an extend, a prefill that starts its context, a decode at a page's edge, and a padded request.
MIXED = ((1, 5, 20, 1, 0), (37, 21, 20, 16, 0))


class Layer(torch.nn.Module):
    """What vLLM's layer hands to an impl."""

    def __init__(self, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        super().__init__()
        self._k_scale = torch.tensor(k_scale, dtype=torch.float32)
        self._v_scale = torch.tensor(v_scale, dtype=torch.float32)


def make_builder(
    config: VllmConfig, dtype: torch.dtype, block_size: int = PAGE, kind: type = FullAttentionSpec, **facts: Any
) -> DSLMetadataBuilder:
    spec = kind(block_size=block_size, num_kv_heads=HEADS_KV, head_size=DIM, dtype=dtype, **facts)
    return DSLMetadataBuilder(spec, [], config, torch.device("cpu"))


def empty_nvfp4_cache(kv_lens: tuple[int, ...], layout: str) -> torch.Tensor:
    """[pages, 2 * heads_kv, page_size, width] bytes, as vLLM lays out what `customize_spec` says; scales are NaN."""
    pages, width = cache_pages(kv_lens, PAGE), DIM // 2 + DIM // 16
    shape = (pages, 2 * HEADS_KV, PAGE, width) if layout == "HND" else (pages, PAGE, 2 * HEADS_KV, width)
    cache = torch.full((pages, 3, *shape[1:]), 0x7F, dtype=torch.uint8)[:, 1]  # several layers' blocks side by side
    return cache if layout == "HND" else cache.transpose(1, 2)


def empty_cache(kv_lens: tuple[int, ...], dtype: torch.dtype, layout: str = "NHD", page: int = PAGE) -> torch.Tensor:
    """[pages, heads_kv, page_size, 2 * dim] as vLLM lays it out, full of NaN: what is not written must not be read."""
    pages = cache_pages(kv_lens, page)
    if layout == "NHD":
        cache = torch.empty(pages, page, HEADS_KV, 2 * DIM, dtype=dtype).transpose(1, 2)
    elif layout == "HND":
        cache = torch.empty(pages, HEADS_KV, page, 2 * DIM, dtype=dtype)
    else:  # several layers' blocks side by side
        cache = torch.empty(pages, 3, page, HEADS_KV, 2 * DIM, dtype=dtype)[:, 1].transpose(1, 2)
    if dtype.itemsize == 1:
        cache.view(torch.uint8).fill_(0x7F)
    else:
        cache.fill_(math.nan)
    return cache


def compare(
    impl: DSLAttentionImpl,
    builder: DSLMetadataBuilder,
    step: Step,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    layer: Layer | None = None,
    cache: torch.Tensor | None = None,
    padding: int = 0,
    causal: list[bool] | None = None,
    rounded_query: bool = False,
) -> None:
    """Run a step as vLLM's layer does, and attend to the same keys in float64 without pages.

    Args:
        rounded_query: the layer quantises queries.
    """
    layer = Layer() if layer is None else layer
    dtype = impl.base_spec.dtype
    generator = torch.Generator().manual_seed(1)

    def rows(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, DIM, generator=generator).to(dtype)

    tokens = sum(q_lens)
    query = rows(tokens + padding, HEADS)
    keys = [rows(length, HEADS_KV) for length in kv_lens]
    values = [rows(length, HEADS_KV) for length in kv_lens]
    contexts = [kv - q for q, kv in zip(q_lens, kv_lens, strict=True)]
    if cache is None:
        cache = empty_cache(kv_lens, impl.base_spec.kv_dtype)
    for slots, key, value, context in zip(step.context_slots, keys, values, contexts, strict=True):
        impl.do_kv_cache_update(layer, key[:context], value[:context], cache, slots)
    new_key = torch.cat([*(key[c:] for key, c in zip(keys, contexts, strict=True)), rows(padding, HEADS_KV)])
    new_value = torch.cat([*(value[c:] for value, c in zip(values, contexts, strict=True)), rows(padding, HEADS_KV)])
    impl.do_kv_cache_update(layer, new_key, new_value, cache, step.slots)
    metadata = builder.build(0, step.common)
    output = torch.empty_like(query)
    returned = impl.forward(layer, query, new_key, new_value, cache, metadata, output)
    assert returned is output

    if impl.base_spec.is_quantized_kv:
        keys = [rounded(key, layer._k_scale, impl.base_spec.kv) for key in keys]
        values = [rounded(value, layer._v_scale, impl.base_spec.kv) for value in values]
    if rounded_query:
        query = rounded(query, layer._q_scale, E4M3)
    spec = AttentionSpec(
        heads_q=HEADS,
        heads_kv=HEADS_KV,
        head_dim=DIM,
        head_dim_v=DIM,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=None,
        scale=impl.scale,
        causality=Causality.PER_REQUEST,
        window_left=None if impl.sliding_window is None else impl.sliding_window - 1,
        window_right=None if impl.sliding_window is None else impl.sliding_window - 1,
        softcap=impl.base_spec.softcap,
        sinks=impl.sinks is not None,
        alibi=impl.alibi_slopes is not None,
    )
    whole_causal = step.common.causal if isinstance(step.common.causal, bool) else True
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    batch = Batch(
        query_start_loc=step.common.query_start_loc,
        seq_lens=lengths,
        num_tokens=tokens,
        max_query_len=max(q_lens),
        max_seq_len=max(kv_lens),
        kv_start_loc=torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()]),
        causal=torch.tensor(causal or [whole_causal] * len(q_lens)),
    )
    exact, naive = (
        reference.attention(
            spec,
            batch,
            query[:tokens],
            torch.cat(keys),
            torch.cat(values),
            sinks=impl.sinks,
            alibi_slopes=impl.alibi_slopes,
            compute_dtype=compute,
        )[0]
        for compute in (torch.float64, dtype)
    )
    assert_within_budget(output[:tokens], exact, naive)
    assert output[:tokens].abs().sum() > 0


def rounded(rows: torch.Tensor, scale: torch.Tensor, kv: KVFormat) -> torch.Tensor:
    """What a quantized cache gives back, in float32."""
    if kv.nvfp4:
        return reference.dequantize_nvfp4(*reference.quantize_nvfp4(rows, scale)) * scale
    return reference.quantize(rows, torch.float8_e4m3fn, scale).float() * scale


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    """The model's dtype, as vLLM sets it while it builds a model. float32 has the reference, bfloat16 Triton."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def make_impl(**facts: Any) -> DSLAttentionImpl:
    return DSLAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_KV, **facts)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"sliding_window": 7},
        {"logits_soft_cap": 1.5},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"sinks": True},
        {"sinks": True, "sliding_window": 16},
    ],
    ids=str,
)
def test_mixed_batch(plain_config: VllmConfig, dtype: torch.dtype, facts: dict[str, Any]) -> None:
    if "sinks" in facts:
        facts = facts | {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=dtype)}
    step = make_step(*MIXED, PAGE, padding=3)
    compare(make_impl(**facts), make_builder(plain_config, dtype), step, *MIXED, padding=3)


def test_query_lengths_are_read_on_the_device(plain_config: VllmConfig, dtype: torch.dtype) -> None:
    """Adaptive verification deals drafts out again on the device; the host knows their number and a bound."""
    q_lens, kv_lens = (5, 1, 3), (40, 33, 3)
    step = make_step(q_lens, kv_lens, PAGE)
    step.common.query_start_loc_cpu = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    step.common.max_query_len = 6
    compare(make_impl(), make_builder(plain_config, dtype), step, q_lens, kv_lens)


@pytest.mark.parametrize("guessed", [False, True])
def test_launches_by_lengths(plain_config: VllmConfig, dtype: torch.dtype, guessed: bool) -> None:
    """The host's lengths, also where the device has dealt queries out in another way, choose launches alone."""
    plain_config.additional_config = {"dsl": {"launches_by_lengths": True}}
    step, builder = make_step(*MIXED, PAGE), make_builder(plain_config, dtype)
    if guessed:
        equal = sum(MIXED[0]) // len(MIXED[0])
        step.common.query_start_loc_cpu = equal * torch.arange(len(MIXED[0]) + 1, dtype=torch.int32)
    found = builder.build(0, step.common).host_lengths
    assert found is not None
    assert guessed != (found.queries.tolist() == list(MIXED[0]))
    assert found.keys.tolist() == list(MIXED[1])
    assert builder.build_for_cudagraph_capture(step.common).host_lengths is None
    compare(make_impl(), builder, step, *MIXED)


def test_lengths_of_a_decode_step_are_not_read(plain_config: VllmConfig) -> None:
    """Each request has one token, so that there is nothing to choose."""
    plain_config.additional_config = {"dsl": {"launches_by_lengths": True}}
    builder = make_builder(plain_config, torch.bfloat16)
    assert builder.build(0, make_step([1, 1, 1], [4, 9, 30], PAGE).common).host_lengths is None
    assert builder.build(0, make_step([1, 2, 1], [4, 9, 30], PAGE).common).host_lengths is not None


def test_lengths_choose_launches_where_that_was_measured() -> None:
    assert [by_lengths(None, from_arch(arch)) for arch in ("sm_90a", "sm_100a", "sm_80", "cpu")] == [True, *[False] * 3]
    assert not by_lengths(False, from_arch("sm_90a"))
    assert by_lengths(True, from_arch("sm_100a"))


def test_lengths_stay_vllms_elsewhere(plain_config: VllmConfig) -> None:
    """And where vLLM has none on the host."""
    step = make_step(*MIXED, PAGE)
    assert make_builder(plain_config, torch.bfloat16).build(0, step.common).host_lengths is None
    plain_config.additional_config = {"dsl": {"launches_by_lengths": True}}
    step.common.seq_lens_cpu_upper_bound = None
    assert make_builder(plain_config, torch.bfloat16).build(0, step.common).host_lengths is None


def test_null_pages_below_a_window(plain_config: VllmConfig, dtype: torch.dtype) -> None:
    """VLLM 0.33 puts page 0 in the place of those that no row of a request sees any more. Here NaN is in it."""
    window, (q_lens, kv_lens) = 19, ((1, 7, 1), (200, 150, 90))
    step = make_step(q_lens, kv_lens, PAGE)
    nulled = copy.copy(step)
    table = step.common.block_table_tensor.clone()
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        table[request, : max(0, kv_len - q_len - (window - 1)) // PAGE] = 0
    assert (table == 0).sum() > (step.common.block_table_tensor == 0).sum() + 10
    nulled.common = dataclasses.replace(step.common, block_table_tensor=table)
    compare(make_impl(sliding_window=window), make_builder(plain_config, dtype), nulled, q_lens, kv_lens)


@pytest.mark.parametrize("layout", ["NHD", "HND", "layers"])
@pytest.mark.parametrize("page", [16, 48])
def test_any_layout_of_the_cache(plain_config: VllmConfig, dtype: torch.dtype, layout: str, page: int) -> None:
    step = make_step(*MIXED, page)
    cache = empty_cache(MIXED[1], dtype, layout, page)
    compare(make_impl(), make_builder(plain_config, dtype, page), step, *MIXED, cache=cache)


@pytest.mark.parametrize("as_bytes", [False, True], ids=["fp8", "uint8"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_fp8_cache_with_the_layers_scales(
    plain_config: VllmConfig, dtype: torch.dtype, name: str, as_bytes: bool
) -> None:
    step = make_step(*MIXED, PAGE)
    cache = empty_cache(MIXED[1], torch.uint8 if as_bytes else torch.float8_e4m3fn)
    impl = make_impl(kv_cache_dtype=name)
    builder = make_builder(plain_config, dtype)
    compare(impl, builder, step, *MIXED, cache=cache, layer=Layer(0.02, 0.015))


@pytest.fixture
def no_nvfp4_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test says of a process's layers ends with the test."""
    monkeypatch.setattr(DSLAttentionBackend, "nvfp4_layers", False)


needs_packed_pages = pytest.mark.skipif(
    not compat.pages_can_be_packed(), reason="this vLLM's backends do not say what a page is"
)


@needs_packed_pages
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_nvfp4_cache(plain_config: VllmConfig, dtype: torch.dtype, layout: str, no_nvfp4_layers: None) -> None:
    # Few keys: Triton's interpreter takes 0.1 s for each.
    lengths = (1, 3, 0), (18, 5, 0)
    step, impl = make_step(*lengths, PAGE), make_impl(kv_cache_dtype="nvfp4")
    cache = empty_nvfp4_cache(lengths[1], layout)
    compare(impl, make_builder(plain_config, dtype), step, *lengths, cache=cache, layer=Layer(0.02, 0.015))


@needs_packed_pages
def test_nvfp4_pages_are_vllms(no_nvfp4_layers: None) -> None:
    """The spec is FlashInfer's, and elements and scales are where vLLM's own views of a page have them."""
    from vllm.utils.torch_utils import nvfp4_split_data_scale
    from vllm.v1.kv_cache_interface import KVQuantMode

    spec = FullAttentionSpec(
        block_size=PAGE,
        num_kv_heads=HEADS_KV,
        head_size=DIM,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NVFP4,
    )
    ours = DSLAttentionBackend.customize_spec(spec)
    assert (ours.num_head_slots, ours.state_content_bytes) == (2 * HEADS_KV, DIM // 2 + DIM // 16)
    assert DSLAttentionBackend.customize_spec(ours) is ours
    plain = dataclasses.replace(spec, kv_quant_mode=KVQuantMode.NONE)
    assert DSLAttentionBackend.customize_spec(plain) is plain
    with pytest.raises(ValueError, match="keys of 64 elements and values of 32: equal sizes are needed"):
        DSLAttentionBackend.customize_spec(dataclasses.replace(spec, head_size_v=32))

    cache = empty_nvfp4_cache(MIXED[1], "HND")
    keys, values = make_impl(kv_cache_dtype="nvfp4").split(cache)
    for side, ours_of_side in enumerate((keys, values)):
        elements, scales = nvfp4_split_data_scale(cache[:, side * HEADS_KV : (side + 1) * HEADS_KV])
        for theirs, found in zip((elements, scales), NVFP4_KV.parts(ours_of_side), strict=True):
            assert theirs.data_ptr() == found.data_ptr()
            assert theirs.transpose(1, 2).stride() == found.stride()
    with pytest.raises(ValueError, match="NVFP4 pages have strides"):
        make_impl(kv_cache_dtype="nvfp4").split(cache[:, :, ::2])


@needs_packed_pages
def test_nvfp4_pages_have_a_heads_tokens_together(plain_config: VllmConfig, no_nvfp4_layers: None) -> None:
    assert DSLAttentionBackend.supported_kv_cache_layouts() is None
    make_impl(kv_cache_dtype="fp8")
    assert DSLAttentionBackend.supported_kv_cache_layouts() is None
    make_impl(kv_cache_dtype="nvfp4")
    layouts = DSLAttentionBackend.supported_kv_cache_layouts()
    assert [layout.name for layout in layouts] == ["LBHNC", "BLHNC", "LBNHC", "BLNHC"]


def test_nvfp4_needs_a_vllm_with_packed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "pages_can_be_packed", lambda: False)
    with pytest.raises(ValueError, match="--kv-cache-dtype nvfp4 needs a vLLM whose backends say what a page is"):
        validation.torch_kv_dtype("nvfp4", torch.bfloat16)
    assert not DSLAttentionBackend.supports_kv_cache_dtype("nvfp4")


def test_not_causal(plain_config: VllmConfig, dtype: torch.dtype) -> None:
    step = make_step(*MIXED, PAGE, causal=False)
    for window in (None, 6):
        compare(make_impl(sliding_window=window), make_builder(plain_config, dtype), step, *MIXED)


@pytest.mark.parametrize("flags", [torch.bool, torch.int32], ids=str)
def test_causal_by_request(plain_config: VllmConfig, dtype: torch.dtype, flags: torch.dtype) -> None:
    causal = [True, False, True, False, True]
    step = make_step(*MIXED, PAGE, causal=torch.tensor(causal, dtype=flags))
    for window in (None, 6):
        compare(make_impl(sliding_window=window), make_builder(plain_config, dtype), step, *MIXED, causal=causal)


@pytest.mark.parametrize("window", [None, 6])
def test_encoder_has_no_cache(plain_config: VllmConfig, dtype: torch.dtype, window: int | None) -> None:
    lens = (7, 1, 33)
    step = make_step(lens, lens, PAGE, padding=2, causal=False)
    impl = make_impl(attn_type=AttentionType.ENCODER_ONLY, kv_cache_dtype="fp8", sliding_window=window)
    builder = make_builder(plain_config, dtype, kind=EncoderOnlyAttentionSpec)
    compare(impl, builder, step, lens, lens, cache=torch.tensor([]), padding=2)


def test_profiling_run_without_metadata_is_zero(plain_config: VllmConfig) -> None:
    query = torch.randn(3, HEADS, DIM)
    output = torch.full_like(query, 5.0)
    assert make_impl().forward(Layer(), query, query, query, torch.tensor([]), None, output) is output
    assert output.count_nonzero() == 0


def test_updates_without_a_cache_or_slots_do_nothing(plain_config: VllmConfig) -> None:
    rows = torch.randn(3, HEADS_KV, DIM)
    impl = make_impl()
    impl.do_kv_cache_update(Layer(), rows, rows, torch.tensor([]), torch.arange(3))
    cache = torch.zeros(2, HEADS_KV, PAGE, 2 * DIM)
    impl.do_kv_cache_update(Layer(), rows, rows, cache, torch.full((3,), -1))
    impl.do_kv_cache_update(Layer(), rows, rows, cache, torch.empty(0, dtype=torch.int64))
    assert cache.count_nonzero() == 0


class TestBuilder:
    """What the runner relies on."""

    def test_tensors_are_the_runners_own(self, plain_config: VllmConfig) -> None:
        step = make_step(*MIXED, PAGE)
        step.common.num_reqs = 4
        metadata = make_builder(plain_config, torch.float32).build(0, step.common)
        for name, buffer in (
            ("query_start_loc", step.common.query_start_loc),
            ("seq_lens", step.common.seq_lens),
            ("block_table", step.common.block_table_tensor),
            ("slot_mapping", step.common.slot_mapping),
        ):
            assert getattr(metadata, name).data_ptr() == buffer.data_ptr(), name
        assert metadata.seq_lens.shape == (4,)
        assert metadata.query_start_loc.shape == (5,)
        batch = metadata.plan(make_impl().spec(PAGE, Causality.CAUSAL, DIM)).batch
        assert batch.seq_lens.data_ptr() == step.common.seq_lens.data_ptr()
        assert batch.block_table is not None
        assert batch.block_table.data_ptr() == step.common.block_table_tensor.data_ptr()

    def test_layers_of_a_spec_share_a_plan(self, plain_config: VllmConfig) -> None:
        builder = make_builder(plain_config, torch.float32)
        metadata = builder.build(0, make_step(*MIXED, PAGE).common)
        one, two, other = make_impl(), make_impl(), make_impl(sliding_window=4)
        plans = [metadata.plan(impl.spec(PAGE, Causality.CAUSAL, DIM)) for impl in (one, two, other)]
        assert plans[0] is plans[1]
        assert plans[0] is not plans[2]
        spec = one.spec(PAGE, Causality.CAUSAL, DIM)
        assert builder.planners.of(spec) is builder.planners.of(spec)

    def test_other_groups_table_makes_other_plans(self, plain_config: VllmConfig) -> None:
        builder, other_builder = (make_builder(plain_config, torch.float32) for _ in range(2))
        step = make_step(*MIXED, PAGE)
        metadata = builder.build(0, step.common)
        spec = make_impl().spec(PAGE, Causality.CAUSAL, DIM)
        plan = metadata.plan(spec)
        table, slots = step.common.block_table_tensor.clone(), step.slots.clone()
        other = other_builder.update_block_table(metadata, table, slots)
        assert other.block_table.data_ptr() == table.data_ptr()
        assert other.plan(spec).batch.block_table is other.block_table
        assert other.slot_mapping is slots
        assert other.planners is other_builder.planners
        assert metadata.plan(spec) is plan

    def test_passes_of_a_draft_model_share_a_plan(self, plain_config: VllmConfig) -> None:
        """Between them vLLM writes other lengths to the same memory, and the longest context grows by one."""
        builder, spec = make_builder(plain_config, torch.float32), make_impl().spec(PAGE, Causality.CAUSAL, DIM)
        common = make_step([1, 1, 1], [4, 9, 30], PAGE).common
        plan = builder.build_for_drafting(common, 1).plan(spec)
        common.seq_lens += 1
        later = dataclasses.replace(common, max_seq_len=31, slot_mapping=common.slot_mapping + 1)
        assert builder.build_for_drafting(later, 2).plan(spec) is plan
        assert plan.batch.seq_lens.tolist() == [5, 10, 31]

    @pytest.mark.parametrize("changed", ["query_start_loc", "seq_lens", "block_table_tensor", "causal"])
    def test_tensors_elsewhere_have_a_plan_of_their_own(self, plain_config: VllmConfig, changed: str) -> None:
        builder = make_builder(plain_config, torch.float32)
        spec = make_impl().spec(PAGE, Causality.PER_REQUEST, DIM)
        common = make_step([1, 1, 1], [4, 9, 30], PAGE, causal=torch.ones(3, dtype=torch.int32)).common
        plan = builder.build(0, common).plan(spec)
        moved = dataclasses.replace(common, **{changed: getattr(common, changed).clone()})
        assert builder.build(0, common).plan(spec) is plan
        assert builder.build(0, moved).plan(spec) is not plan

    def test_numbers_that_plans_depend_on_make_other_plans(self, plain_config: VllmConfig) -> None:
        builder, spec = make_builder(plain_config, torch.float32), make_impl().spec(PAGE, Causality.CAUSAL, DIM)
        common = make_step([1, 1, 1], [4, 9, 30], PAGE).common
        plan = builder.build(0, common).plan(spec)
        for changes in ({"num_actual_tokens": 4}, {"max_query_len": 2}, {"num_reqs": 2}):
            assert builder.build(0, dataclasses.replace(common, **changes)).plan(spec) is not plan

    def test_long_queries_have_plans_of_their_own(
        self, plain_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They depend on the longest context, and on the lengths that the host knows."""
        builder, spec = make_builder(plain_config, torch.float32), make_impl().spec(PAGE, Causality.CAUSAL, DIM)
        builder.planners.of(spec)
        common = make_step([4, 4], [4, 30], PAGE).common
        assert builder.build(0, common).plan(spec) is builder.build(0, common).plan(spec)
        monkeypatch.setattr(builder.planners, "_short", 3)
        assert builder.build(0, common).plan(spec) is not builder.build(0, common).plan(spec)

    def test_graphs_of_any_batch(self, plain_config: VllmConfig) -> None:
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=DIM, dtype=torch.float32)
        assert DSLMetadataBuilder.get_cudagraph_support(plain_config, spec) is AttentionCGSupport.ALWAYS
        assert DSLMetadataBuilder.supports_update_block_table

    def test_drafting_builds_the_same(self, plain_config: VllmConfig) -> None:
        builder = make_builder(plain_config, torch.float32)
        metadata = builder.build_for_drafting(make_step(*MIXED, PAGE).common, 0)
        assert isinstance(metadata, DSLMetadata)
        builder.update_draft_decode_metadata(metadata)

    def test_metadata_can_be_rebuilt_from_its_fields(self, plain_config: VllmConfig) -> None:
        """Fast prefill with shared caches copies the fields into a subclass."""
        metadata = make_builder(plain_config, torch.float32).build(0, make_step(*MIXED, PAGE).common)

        class Other(type(metadata)):  # type: ignore[misc]
            def __init__(self, original: DSLMetadata) -> None:
                for name in original.__dataclass_fields__:
                    setattr(self, name, getattr(original, name))

        spec = make_impl().spec(PAGE, Causality.CAUSAL, DIM)
        assert Other(metadata).plan(spec) is metadata.plan(spec)
        assert copy.copy(metadata).causality is Causality.CAUSAL


@pytest.fixture
def dsl_config() -> Any:
    config = VllmConfig(attention_config={"backend": ensure_member()})
    with set_current_vllm_config(config):
        yield config


def test_vllms_layers_take_our_classes(dsl_config: VllmConfig) -> None:
    """Attention and its wrappers select, construct, and hand their layers to our builder."""
    plain = Attention(HEADS, DIM, 0.125, HEADS_KV, prefix="a.0.attn")
    window = Attention(HEADS, DIM, 0.125, HEADS_KV, prefix="a.1.attn", per_layer_sliding_window=32)
    encoder = EncoderOnlyAttention(HEADS, DIM, 0.125, num_kv_heads=HEADS_KV, prefix="a.2.attn")
    for layer in (plain, window, encoder):
        assert layer.attn_backend.get_name() == "DSL"
        assert isinstance(layer.impl, DSLAttentionImpl)
        assert layer.query_quant is None
    for layer, name, kind, facts in (
        (plain, "a.0.attn", FullAttentionSpec, {}),
        (window, "a.1.attn", SlidingWindowSpec, {"sliding_window": 32}),
        (encoder, "a.2.attn", EncoderOnlyAttentionSpec, {}),
    ):
        spec = kind(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=DIM, dtype=torch.float32, **facts)
        api.writer.cache_clear()
        builder = layer.attn_backend.get_builder_cls()(spec, [name], dsl_config, torch.device("cpu"))
        before = dict(builder.planners._of)
        metadata = builder.build(0, make_step(*MIXED, PAGE).common)
        page = None if layer is encoder else PAGE
        metadata.plan(layer.impl.spec(page, metadata.causality, DIM))
        if page is not None:
            writer = api.writer(layer.impl.spec(page, Causality.CAUSAL, DIM), torch.device("cpu"), None)
            assert writer._kernels, "what writes is compiled in a step"
        assert builder.planners._of == before, "the builder had not made the planner that the layer asks for"
    assert encoder.impl.spec(None, Causality.FULL, DIM).page_size is None


def fp8_layer(config: VllmConfig, options: dict[str, Any], kv_cache_dtype: str = "fp8") -> Any:
    """A layer of vLLM's own over a cache of that dtype, as a model with these options has it."""
    config.additional_config = {"dsl": options}
    config.cache_config.cache_dtype = kv_cache_dtype
    ours = dense.DSLAttentionBackend
    facts: dict[str, Any] = {"cache_config": config.cache_config, "attn_backend": ours, "prefix": "a.0.attn"}
    return Attention(HEADS, DIM, DIM**-0.5, HEADS_KV, **facts)


class TestQuantisedQueries:
    """vLLM quantises queries where the kernel that takes them was asked for, and hands them over with their scale."""

    OPTIONS: ClassVar = {"attention_kernel": "cute-fp8", "fp8_queries": True}

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(validation, "current_target", lambda: from_arch("sm_90a"))
        monkeypatch.setattr(dense.ahead, "compile_attention", lambda *_, **__: None)

    @pytest.mark.parametrize("kv_cache_dtype", ["fp8", pytest.param("nvfp4", marks=needs_packed_pages)])
    def test_they_are_attended_with(
        self,
        plain_config: VllmConfig,
        monkeypatch: pytest.MonkeyPatch,
        kv_cache_dtype: str,
        no_nvfp4_layers: None,
    ) -> None:
        nvfp4 = kv_cache_dtype == "nvfp4"
        with set_default_torch_dtype(torch.bfloat16):
            layer = fp8_layer(plain_config, {"fp8_queries": True} if nvfp4 else self.OPTIONS, kv_cache_dtype)
        assert layer.query_quant is not None
        for name, scale in (("_q_scale", 0.02), ("_k_scale", 0.02), ("_v_scale", 0.03)):
            getattr(layer, name).fill_(scale)
        builder = make_builder(plain_config, torch.bfloat16)
        builder.planners.kernel = "reference"  # no CPU has the kernel; it takes such queries too
        quantise: Any = layer.impl.forward

        def forward(own: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
            found: torch.Tensor = quantise(
                own, layer.query_quant(query.flatten(1), layer._q_scale)[0].view_as(query), *rest
            )
            return found

        monkeypatch.setattr(layer.impl, "forward", forward)
        # Few keys of 4 bits: Triton's interpreter writes them.
        lengths = ((1, 3, 0), (18, 5, 0)) if nvfp4 else MIXED
        cache = empty_nvfp4_cache(lengths[1], "HND") if nvfp4 else None
        compare(
            layer.impl,
            builder,
            make_step(*lengths, PAGE),
            *lengths,
            cache=cache,
            layer=layer,
            rounded_query=True,
        )

    @pytest.mark.parametrize(
        ("options", "kv_cache_dtype"),
        [
            ({"attention_kernel": "cute-fp8"}, "fp8"),
            ({}, "fp8"),
            ({"attention_kernel": "triton"}, "fp8_e5m2"),
            ({"attention_kernel": "triton", "fp8_queries": True}, "fp8_e5m2"),
        ],
    )
    def test_they_stay_as_they_are(
        self, plain_config: VllmConfig, options: dict[str, Any], kv_cache_dtype: str
    ) -> None:
        with set_default_torch_dtype(torch.bfloat16):
            layer = fp8_layer(plain_config, options, kv_cache_dtype)
        assert layer.query_quant is None
        assert not layer.impl.base_spec.is_fp8_q


class TestRefusals:
    """A layer that no kernel serves is refused when the model is built."""

    def test_unknown_features(self, plain_config: VllmConfig) -> None:
        with pytest.raises(ValueError, match="chunk_lookback=4 is not known"):
            make_impl(chunk_lookback=4)
        make_impl(use_alibi_sqrt=False)

    def test_every_reason_of_the_table(self, plain_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        from dsl_backend.runtime.target import from_arch

        monkeypatch.setattr(validation, "current_target", lambda: from_arch("sm_90a"))
        with pytest.raises(ValueError) as error:
            DSLAttentionImpl(HEADS, 20, 1.0, HEADS_KV, kv_cache_dtype="bfloat16")
        for word in ("head size 20", "float32 is not one of", "keys of bfloat16"):
            assert word in str(error.value)
