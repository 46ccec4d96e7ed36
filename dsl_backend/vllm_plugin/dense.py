# SPDX-License-Identifier: Apache-2.0
"""vLLM's backend, metadata builder and implementation for attention with keys and values of their own."""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from vllm import envs as vllm_envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.plan import AttentionPlan
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality, HostLengths
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.quant.format import E4M3, NVFP4, NVFP4_KV, TENSOR_SCALED, ScaledFormat
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, compat, options, validation
from dsl_backend.vllm_plugin.enum_members import NAME
from dsl_backend.vllm_plugin.hooks import Stage, install_hooks
from dsl_backend.vllm_plugin.metadata import Planners, StepPlans, place_of

# Queries, keys and values of one step, without a cache.
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class DSLAttentionBackend(AttentionBackend):
    """Answers what vLLM asks about the backend from the dispatch table."""

    forward_includes_kv_cache_update: bool = False
    # Whether a layer of this process has an NVFP4 cache. Workers ask for layouts without a current configuration.
    nvfp4_layers: ClassVar[bool] = False
    supported_kv_cache_dtypes: ClassVar[list[Any]] = validation.SERVED_KV_DTYPES
    # A model that wrote the cache itself calls forward without key and value (vLLM 0.33); see DSLAttentionImpl.forward.
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["DSLAttentionImpl"]:
        return DSLAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["DSLMetadataBuilder"]:
        return DSLMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(validation.page_size_unit(validation.current_target()))]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        # The kernels read strides at run time, so either layout does; blocks stay outermost with layers in between.
        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """An NVFP4 page has a slot for each head's keys, then for each head's values, of elements and scales."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_nvfp4:
            return spec
        if spec.head_size_v != spec.head_size:
            raise ValueError(
                f"attention backend dsl does not serve --kv-cache-dtype nvfp4 with keys of {spec.head_size} elements "
                f"and values of {spec.head_size_v}: equal sizes are needed"
            )
        slots, width = 2 * spec.num_kv_heads, NVFP4_KV.row_bytes(spec.head_size)
        return replace(spec, num_head_slots=slots, state_content_bytes=width)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Any; of NVFP4 pages first those where a head's tokens follow one another, which TMA can copy."""
        if not cls.nvfp4_layers:
            return None
        from vllm.v1.kv_cache_layout import KVCacheLayout

        names = ("LBHNC", "BLHNC", "LBNHC", "BLNHC")
        return tuple(KVCacheLayout[name] for name in names)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return not validation.probe(validation.current_target(), head_dim=head_size, head_dim_v=head_size)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return not validation.probe(validation.current_target(), dtype=dtype)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        try:
            kv_dtype = validation.torch_kv_dtype(kv_cache_dtype, torch.float16)
        except ValueError:
            return False
        model_dtype = validation.model_dtype_of(kv_dtype)
        return not validation.probe(validation.current_target(), dtype=model_dtype, kv_dtype=kv_dtype)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        # Every kernel that reads fp8 takes a scale for each key head, of e4m3 as vLLM stores such checkpoints.
        return cls.supports_kv_cache_dtype("fp8")

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or not validation.probe(validation.current_target(), page_size=block_size)

    @classmethod
    def supports_sink(cls) -> bool:
        return not validation.probe(validation.current_target(), sinks=True)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return not validation.probe(validation.current_target(), window_left=0)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return not validation.probe(validation.current_target(), causality=Causality.FULL)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return not validation.probe(validation.current_target(), batch_invariant=True)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *ENCODERS)

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """Every reason against a configuration, with what would work instead; empty where there is none."""
        head_size = selection["head_size"]
        return validation.configuration_reasons(
            generic=super().validate_configuration(**selection),
            head_dims=(head_size, head_size),
            mla=False,
            selection=selection,
            kernel=options.of(get_current_vllm_config_or_none()).attention_kernel,
        )


@dataclass
class DSLMetadata(AttentionMetadata):
    """One step of a group's layers. Its tensors are views of vLLM's own, which a captured graph reads at each replay.

    Attributes:
        num_actual_tokens: the first rows of the queries; only these may belong to a request.
        max_query_len, max_seq_len: upper bounds, in tokens.
        query_start_loc: [requests + 1] int32.
        seq_lens: [requests] int32.
        block_table: [requests, pages] int32.
        slot_mapping: [tokens] int64.
        causal: for all requests, or [requests] int32 or bool.
        host_lengths: of the requests of a step with prompts, unless the option `launches_by_lengths` forbids it.
        steps: the plans so far, by whether keys are packed; those of another step at the same place are found again.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    planners: Planners
    host_lengths: HostLengths | None = None
    steps: dict[bool, StepPlans] = field(default_factory=dict)

    @property
    def causality(self) -> Causality:
        if isinstance(self.causal, torch.Tensor):
            return Causality.PER_REQUEST
        return Causality.CAUSAL if self.causal else Causality.FULL

    def place(self) -> object:
        """As `Planners.steps_at` takes it."""
        if self.host_lengths is not None or not self.planners.plans_short(self.max_query_len):
            return None
        tensors = [self.query_start_loc, self.seq_lens, self.block_table]
        if isinstance(self.causal, torch.Tensor):
            tensors.append(self.causal)
        return self.num_actual_tokens, self.max_query_len, place_of(*tensors)

    def batch(self, packed: bool) -> Batch:
        """The step's requests, with packed keys or paged ones."""
        return Batch(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            num_tokens=self.num_actual_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            block_table=None if packed else self.block_table,
            kv_start_loc=self.query_start_loc if packed else None,
            causal=self.causal if isinstance(self.causal, torch.Tensor) else None,
            host_lengths=self.host_lengths,
        )

    def plan(self, spec: AttentionSpec) -> AttentionPlan:
        """The plan of a layer; made for the first layer of its spec, reused by the others."""
        packed = spec.page_size is None
        step = self.steps.get(packed)
        if step is None:
            # Here, and not where metadata is made: a replayed graph asks for no plan.
            at_place = self.planners.steps_at(self.place())
            step = at_place.get(packed)
            if step is None:
                step = at_place[packed] = StepPlans(self.batch(packed), self.planners)
            self.steps[packed] = step
        return step.plan(spec)


def by_lengths(asked: bool | None, target: Target) -> bool:
    """Whether lengths of requests choose launches: unless the user says so, where that was measured."""
    return target.kernel_arch == "sm90" if asked is None else asked


def host_lengths(common: CommonAttentionMetadata) -> HostLengths | None:
    """The lengths of a step's requests, where vLLM has bounds of them on the host."""
    keys = getattr(common, "seq_lens_cpu_upper_bound", None)
    if keys is None:
        return None
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
    # A copy: vLLM may write the next step's lengths before the layers of this one ask for plans.
    return HostLengths(starts[1:] - starts[:-1], keys[: common.num_reqs].numpy().copy())


class DSLMetadataBuilder(AttentionMetadataBuilder[DSLMetadata]):
    """Keeps the planners of a group's layers. Building a step takes a few slices; its layers make the plans."""

    # A plan depends on upper bounds only. Those of a capture hold for every batch that its graph may replay.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True
    # Nothing in the metadata has to be recomputed: all that changes between draft steps is in vLLM's own buffers.
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **_: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        given = options.of(vllm_config)
        self.planners = Planners(device, given.attention_kernel)
        self.launches_by_lengths = by_lengths(given.launches_by_lengths, self.planners.target)
        install_hooks(Stage.METADATA_BUILDER, vllm_config)
        # Here, so that no kernel is loaded and no scratch is allocated while a graph is captured.
        layers = vllm_config.compilation_config.static_forward_context
        for layer in (layers[name] for name in layer_names if name in layers):
            causal = layer.impl.attn_type == AttentionType.DECODER
            sinks = layer.impl.sinks
            # The plain outputs' last: keys and values are written for their planner's spec.
            for out_format in dict.fromkeys((layer.impl.asked_format, None)):
                planner = self.planners.of(
                    layer.impl.spec(
                        None if layer.impl.packed else kv_cache_spec.block_size,
                        Causality.CAUSAL if causal else Causality.FULL,
                        layer.head_size_v,
                        out_format,
                    )
                )
                planner.prepare(sinks=None if sinks is None else sinks.dtype)
            self.planners.prepare_writes(planner.spec)
            if hasattr(layer, "dsl_rotation"):
                from dsl_backend.vllm_plugin.rope import method

                method.prepare(layer, kv_cache_spec.block_size, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DSLMetadata:
        self.planners.begin_step()
        common = common_attn_metadata
        requests = common.num_reqs
        causal = common.causal
        if isinstance(causal, torch.Tensor):
            # A view: a captured graph reads vLLM's buffer again, and would not see a copy made here.
            causal = causal[:requests]
        # They choose between launches for queries of different lengths, and one launch serves short ones.
        reads_lengths = self.launches_by_lengths and not self.planners.plans_short(common.max_query_len)
        return DSLMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc[: requests + 1],
            seq_lens=common.seq_lens[:requests],
            block_table=common.block_table_tensor[:requests],
            slot_mapping=common.slot_mapping,
            causal=causal,
            planners=self.planners,
            host_lengths=host_lengths(common) if reads_lengths else None,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> DSLMetadata:
        """Metadata whose plans are right for every batch that the graph may replay.

        A graph of mixed batches replays any lengths that add up to its tokens, up to one request with all of them.
        vLLM 0.26 to 0.30 say at capture that the longest query has one token (`compat` has more).
        """
        common = common_attn_metadata
        if compat.captures_mixed_batches(self.vllm_config):
            common = dataclasses.replace(common, max_query_len=common.num_actual_tokens)
        # The lengths of a capture are not those of any batch that the graph replays.
        return dataclasses.replace(self.build(0, common), host_lengths=None)

    def update_block_table(
        self, metadata: DSLMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> DSLMetadata:
        """The same step for another group of layers, with plans of its own on this builder's planners."""
        other = copy.copy(metadata)
        other.block_table = blk_table[: metadata.seq_lens.shape[0]]
        other.slot_mapping = slot_mapping
        other.planners = self.planners
        other.steps = {}
        return other

    def update_draft_decode_metadata(self, metadata: DSLMetadata) -> None:
        """Nothing to do: see supports_draft_decode_metadata_update."""


def likely_formats(config: Any) -> tuple[ScaledFormat, ...]:
    """Formats that projections of a model may want attention's outputs in, as its quantisation's name says."""
    name = getattr(config.model_config, "quantization", None) or ""
    if "fp4" in name:
        return (NVFP4,)
    # These names stand for checkpoints of either kind.
    return (TENSOR_SCALED, NVFP4) if name in ("compressed-tensors", "modelopt_mixed") else (TENSOR_SCALED,)


class DSLAttentionImpl(AttentionImpl[DSLMetadata]):
    """One layer's attention. Raises ValueError: no kernel serves the layer; with every reason.

    Attributes:
        asked_format: of a quantised output that vLLM has asked for, as it first does in its profiling run.
    """

    asked_format: ScaledFormat | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        install_hooks(Stage.FIRST_LAYER)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        # vLLM builds its models under the device that they will run on.
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.packed = attn_type in ENCODERS

        dtype = torch.get_default_dtype()
        self.base_spec = AttentionSpec(
            heads_q=self.num_heads,
            heads_kv=self.num_kv_heads,
            head_dim=head_size,
            head_dim_v=head_size,
            dtype=dtype,
            # Encoders attend to the keys and values that they are given, which are not stored in a cache's dtype.
            kv_dtype=dtype if self.packed else validation.torch_kv_dtype(kv_cache_dtype, dtype),
            page_size=None if self.packed else validation.ANY_PAGE_SIZE,
            scale=self.scale,
            causality=Causality.CAUSAL if attn_type == AttentionType.DECODER else Causality.FULL,
            window_left=None if sliding_window is None else sliding_window - 1,
            softcap=logits_soft_cap or 0.0,
            sinks=sinks is not None,
            alibi=alibi_slopes is not None,
            batch_invariant=bool(vllm_envs.VLLM_BATCH_INVARIANT),
        )
        if self.base_spec.kv.nvfp4:
            DSLAttentionBackend.nvfp4_layers = True
        self._specs: dict[tuple[int | None, Causality, int, str | None], AttentionSpec] = {}
        self._stores: dict[ScaledFormat, bool] = {}
        config = get_current_vllm_config_or_none()
        given = options.of(config)
        kernel = self.kernel = given.attention_kernel
        # By name; all layers of the model, once it is made.
        self._layers: dict[str, Any] = {} if config is None else config.compilation_config.static_forward_context
        # Read by vLLM's layer, which then hands over queries in e4m3.
        self.supports_quant_query_input = given.quantises_queries(self.base_spec.kv)
        if self.supports_quant_query_input:
            self.base_spec = replace(self.base_spec, q_dtype=E4M3.dtype)
        self.write_kernel = validation.kernel_for(Operation.WRITE_KV, kernel)

        reasons = [f"{name}={value!r} is not known" for name, value in unknown.items() if value not in (None, False)]
        reasons += validation.reasons_against(self.base_spec, validation.current_target(), kernel)
        validation.refuse(f"a layer of {self.base_spec}", reasons)
        if config is not None:
            page_size = None if self.packed else compat.page_size(config, DSLAttentionBackend)
            specs = [self.spec(page_size, self.base_spec.causality, head_size)]
            if getattr(config.compilation_config.pass_config, "fuse_attn_quant", False):
                kinds = [kind for kind in likely_formats(config) if self.stores(kind)]
                specs += [self.spec(page_size, self.base_spec.causality, head_size, kind) for kind in kinds]
            ahead.compile_attention(config, specs, sinks=None if sinks is None else sinks.dtype)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether attention stores outputs quantised by that key, so that no launch behind it does.

        vLLM asks the first layers only, and has every layer's output quantised then: all have to store it.
        """
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic

        if quant_key == kNvfp4Dynamic:
            kind = NVFP4
        elif quant_key == kFp8StaticTensorSym and quant_key.dtype == E4M3.dtype:
            kind = TENSOR_SCALED
        else:
            return False
        return all(impl.stores(kind) for impl in self.impls())

    def impls(self) -> "Iterator[DSLAttentionImpl]":
        """Those of all layers of the model that are ours, and this one."""
        yield self
        for layer in self._layers.values():
            impl = getattr(layer, "impl", None)
            if impl is not self and isinstance(impl, DSLAttentionImpl):
                yield impl

    def stores(self, kind: ScaledFormat) -> bool:
        """Whether the kernels that serve the layer store its outputs in a format too, and no others would have to."""
        if kind not in self._stores:
            self._stores[kind] = self._judge_format(kind)
        return self._stores[kind]

    def _judge_format(self, kind: ScaledFormat) -> bool:
        target = validation.current_target()

        def serving(spec: AttentionSpec, operation: Operation) -> str:
            return dispatch.choose(operation, spec, target, self.kernel).title

        try:
            quantised = replace(self.base_spec, out_format=kind)
            return all(
                serving(quantised, operation) == serving(self.base_spec, operation)
                for operation in dispatch.attention_of(self.base_spec)
            )
        except (InvalidInput, Unsupported):
            return False

    def spec(
        self, page_size: int | None, causality: Causality, head_dim_v: int, out_format: ScaledFormat | None = None
    ) -> AttentionSpec:
        """The layer's spec in a step.

        Args:
            page_size: tokens a page of the cache; None where keys are packed.
            causality: of the step's batch.
            head_dim_v: elements of a value.
            out_format: of outputs that vLLM wants quantised.
        """
        key = (page_size, causality, head_dim_v, None if out_format is None else out_format.name)
        spec = self._specs.get(key)
        if spec is None:
            left = self.base_spec.window_left
            spec = self._specs[key] = replace(
                self.base_spec,
                page_size=page_size,
                causality=causality,
                head_dim_v=head_dim_v,
                # In a batch that is not causal a window reaches as far to the right as to the left.
                window_right=None if causality is Causality.CAUSAL else left,
                out_format=out_format,
            )
        return spec

    def split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [pages, page_size, heads_kv, dim] in vLLM's cache [pages, heads_kv, page_size, both dims]."""
        if self.base_spec.kv.nvfp4:
            return self.split_nvfp4(kv_cache)
        pages = kv_cache.transpose(1, 2)
        if self.base_spec.is_fp8_kv and pages.dtype != self.base_spec.kv_dtype:
            pages = pages.view(self.base_spec.kv_dtype)
        # One torch operation and not two slices: every layer runs it in every step.
        keys, values = pages.split_with_sizes((self.head_size, pages.shape[-1] - self.head_size), -1)
        return keys, values

    def split_nvfp4(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of a cache [pages, 2 * heads_kv, page_size, width], whose pages are the keys', then the values'."""
        count, slots, tokens, width = kv_cache.shape
        heads = slots // 2
        by_head, by_token = (tokens * width, width), (width, heads * width)
        if kv_cache.stride()[1:] == (*by_head, 1):
            head, token = by_head
        elif kv_cache.stride()[1:] == (width, slots * width, 1):
            head, token = by_token
        else:
            raise ValueError(f"NVFP4 pages have strides {kv_cache.stride()}: dense ones are needed")
        pages, shape = kv_cache.view(self.base_spec.kv_dtype), (count, tokens, heads, width)
        keys, values = (
            pages.as_strided(shape, (pages.stride(0), token, head, 1), pages.storage_offset() + first)
            for first in (0, heads * tokens * width)
        )
        return keys, values

    def value_size(self, values: torch.Tensor) -> int:
        """Elements of a value. NVFP4's are as many as a key's."""
        return self.head_size if self.base_spec.kv.nvfp4 else values.shape[-1]

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write a step's keys and values to the cache, if the layer has one."""
        if self.packed or kv_cache.numel() == 0 or slot_mapping.numel() == 0:
            return
        keys, values = self.split(kv_cache)
        scaled = self.base_spec.is_quantized_kv
        spec = self.spec(keys.shape[1], self.base_spec.causality, self.value_size(values))
        api.write_kv(
            spec,
            key,
            value,
            keys,
            values,
            slot_mapping,
            k_scale=layer._k_scale if scaled else None,
            v_scale=layer._v_scale if scaled else None,
            kernel=self.write_kernel,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: DSLMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step, into `output`.

        Args:
            query: [tokens, heads, head_size]; rows from num_actual_tokens on are padding. Of e4m3 where
                `supports_quant_query_input` asks for it.
            key, value: [tokens, heads_kv, dim]; read for encoders only. Other layers read the cache, and take None.
            kv_cache: [pages, heads_kv, page_size, head_size + value's]; contiguous in the last dimension. NVFP4's as
                `split_nvfp4` takes it.
            attn_metadata: None in vLLM's profiling run.
            output: [tokens, heads, value's head size]. Of e4m3 where vLLM's pass has fused the quantisation of outputs,
                or bytes of NVFP4, [tokens, heads, value's head size / 2].
            output_scale: one float32, of such an output; of NVFP4 2688 / the largest magnitude that is expected.
            output_block_scale: the scales of blocks of an output in NVFP4, swizzled.
        """
        out_format = None
        if output_scale is not None:
            out_format = TENSOR_SCALED if output_block_scale is None else NVFP4
        elif output_block_scale is not None:
            raise ValueError("attention backend dsl was given output_block_scale without output_scale: it needs both")
        if attn_metadata is None:
            self.asked_format = out_format or self.asked_format
            return output.fill_(0)
        scaled, fp8_q = self.base_spec.is_quantized_kv, self.base_spec.is_fp8_q
        page_size = None
        if self.packed:
            assert key is not None
            assert value is not None
            keys, values = key, value
        else:
            keys, values = self.split(kv_cache)
            page_size = keys.shape[1]
        spec = self.spec(page_size, attn_metadata.causality, self.value_size(values), out_format)
        plan = attn_metadata.plan(spec)
        return api.run(
            plan,
            query,
            keys,
            values,
            out=output if output_block_scale is None else (output, output_block_scale),
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            k_scale=layer._k_scale if scaled else None,
            v_scale=layer._v_scale if scaled else None,
            q_scale=layer._q_scale if fp8_q else None,
            out_scale=output_scale,
        )
