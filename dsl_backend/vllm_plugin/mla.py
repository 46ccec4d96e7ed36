# SPDX-License-Identifier: Apache-2.0
"""vLLM's backend, metadata builder and implementation for multi-head latent attention."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs as vllm_envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from dsl_backend.attention import api
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.precompile import LATENT_PAGE_SIZE
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.log import warning_once
from dsl_backend.quant.format import E4M3
from dsl_backend.vllm_plugin import ahead, compat, options, validation
from dsl_backend.vllm_plugin.enum_members import NAME, ensure_prefill_member
from dsl_backend.vllm_plugin.hooks import Stage, install_hooks
from dsl_backend.vllm_plugin.metadata import Planners, StepPlans, place_of
from dsl_backend.vllm_plugin.mla_prefill import DSLPrefillBackend, prefill_spec

# Queries of any length.
ANY_LENGTH = 2**31 - 1
# The rope part of a key where no model configuration says otherwise.
USUAL_ROPE_DIM = 64


def latent_probe(**changes: Any) -> list[str]:
    """Reasons against an ordinary latent problem with some of its facts changed."""
    facts = {"head_dim": 576, "head_dim_v": 512, "mla": True}
    return validation.probe(validation.current_target(), **(facts | changes))


class DSLMLABackend(MLACommonBackend):
    """Answers what vLLM asks about the backend from the dispatch table."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = validation.SERVED_KV_DTYPES

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["DSLMLAImpl"]:
        return DSLMLAImpl

    @staticmethod
    def get_builder_cls() -> type["DSLMLAMetadataBuilder"]:
        return DSLMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(validation.page_size_unit(validation.current_target()))]

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        # Blocks outermost: the kernels read the stride between them at run time.
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any that supports_head_size takes

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return not latent_probe(head_dim=head_size, head_dim_v=latent_dim(head_size))

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return not latent_probe(dtype=dtype)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        try:
            kv_dtype = validation.torch_kv_dtype(kv_cache_dtype, torch.float16)
        except ValueError:
            return False
        model_dtype = validation.model_dtype_of(kv_dtype)
        return not latent_probe(dtype=model_dtype, kv_dtype=kv_dtype)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return not latent_probe(batch_invariant=True)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or not latent_probe(page_size=block_size)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        usual = LATENT_PAGE_SIZE if validation.current_target().tma else default_block_size
        return super().get_preferred_block_size(max(usual, default_block_size))

    @classmethod
    def supports_non_causal(cls) -> bool:
        return not latent_probe(causality=Causality.FULL)

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """Every reason against a configuration, with what would work instead; empty where there is none."""
        head_size = selection["head_size"]
        return validation.configuration_reasons(
            generic=super().validate_configuration(**selection),
            head_dims=(head_size, latent_dim(head_size)),
            mla=True,
            selection=selection,
            kernel=options.of(get_current_vllm_config_or_none()).attention_kernel,
        )


def latent_dim(head_size: int) -> int:
    """Elements of the latent part of a key: the model's kv_lora_rank, or all elements but the usual rope part."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    latent = None if model is None else getattr(model.hf_text_config, "kv_lora_rank", None)
    return latent if isinstance(latent, int) and latent <= head_size else max(head_size - USUAL_ROPE_DIM, 1)


@dataclass
class DSLMLADecodeMetadata(MLACommonDecodeMetadata):
    """The requests of a step that attend in latent space.

    Attributes:
        step: their batch and its plans.
    """

    step: StepPlans


@dataclass
class DSLMLAMetadata(MLACommonMetadata[DSLMLADecodeMetadata]):
    """vLLM's metadata of a step."""

    def __post_init__(self) -> None:
        """Skips the base class's check: it allows the head sizes of vLLM's own kernels only. Selection checked ours."""


class DSLMLAMetadataBuilder(MLACommonMetadataBuilder[DSLMLAMetadata]):
    """Splits a step as vLLM does: short queries attend in latent space, long ones to projected keys.

    In batch-invariant mode all queries attend in latent space.
    """

    # vLLM's builder refuses to capture a batch with prefills, so full graphs are for decodes.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Rows belong to requests by query_start_loc on the device, so drafts may have different lengths.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_draft_decode_metadata_update: bool = True
    _prefill_backend: MLAPrefillBackend

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **_: Any,
    ) -> None:
        # How a prompt is cut into chunks depends on other requests. The kernel must not depend on a chunk's length.
        invariant = bool(vllm_envs.VLLM_BATCH_INVARIANT)
        self.reorder_batch_threshold = ANY_LENGTH if invariant else options.of(vllm_config).mla_latent_queries
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, DSLMLAMetadata)
        self.planners = Planners(device, options.of(vllm_config).attention_kernel)
        install_hooks(Stage.METADATA_BUILDER, vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        # Here, so that no kernel is loaded and no scratch is allocated while a graph is captured.
        for name in layer_names:
            planner = self.planners.of(layers[name].impl.spec(kv_cache_spec.block_size, Causality.CAUSAL))
            planner.prepare(lse=True)
            self.planners.prepare_writes(planner.spec)
            if hasattr(layers[name], "dsl_rotation"):
                from dsl_backend.vllm_plugin.rope import method

                method.prepare(layers[name], kv_cache_spec.block_size, device)
        chosen = vllm_config.attention_config.mla_prefill_backend
        theirs: MLAPrefillBackend = self._prefill_backend
        if chosen is ensure_prefill_member() and not isinstance(theirs, DSLPrefillBackend):
            self._prefill_backend = DSLPrefillBackend(
                num_heads=theirs.num_heads,
                scale=theirs.scale,
                kv_lora_rank=theirs.kv_lora_rank,
                qk_nope_head_dim=theirs.qk_nope_head_dim,
                qk_rope_head_dim=theirs.qk_rope_head_dim,
                v_head_dim=theirs.v_head_dim,
                vllm_config=vllm_config,
            )
        if isinstance(self._prefill_backend, DSLPrefillBackend) and not invariant:
            self._prefill_backend.prepare(vllm_config.model_config.dtype, device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """The longest query of a decode batch with different query lengths that a captured graph may replay."""
        return compat.ragged_decode_limit(vllm_config)

    def build(self, *args: Any, **kwargs: Any) -> DSLMLAMetadata:
        """A step's metadata."""
        self.planners.begin_step()
        metadata = super().build(*args, **kwargs)
        compat.merge_all_prefills(metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: DSLMLAMetadata) -> None:
        """Nothing to do: all that changes between draft steps is in vLLM's own buffers."""

    def _build_decode(self, **arguments: Any) -> DSLMLADecodeMetadata:
        starts, seq_lens = arguments["query_start_loc_device"], arguments["seq_lens_device"]
        table, tokens = arguments["block_table_tensor"], arguments["num_decode_tokens"]
        longest = compat.decode_query_bound(arguments)
        is_short = self.planners.plans_short(longest)
        steps = self.planners.steps_at((tokens, longest, place_of(starts, seq_lens, table)) if is_short else None)
        step = steps.get(False)
        if step is None:
            batch = Batch(
                query_start_loc=starts,
                seq_lens=seq_lens,
                num_tokens=tokens,
                max_query_len=longest,
                max_seq_len=arguments["max_seq_len"],
                block_table=table,
            )
            step = steps[False] = StepPlans(batch, self.planners)
        return DSLMLADecodeMetadata(
            block_table=table, seq_lens=seq_lens, dcp_tot_seq_lens=arguments["dcp_tot_seq_lens_device"], step=step
        )


class DSLMLAImpl(MLACommonImpl[DSLMLAMetadata]):
    """One layer's latent attention.

    Raises:
        ValueError: no kernel serves the layer; with every reason.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla,
        )
        install_hooks(Stage.FIRST_LAYER)
        config = get_current_vllm_config()
        given = options.of(config)
        kernel = given.attention_kernel
        self.write_kernel = validation.kernel_for(Operation.WRITE_KV, kernel)
        # Set where a launch in front of attention writes the cache: see `rope/latent_method.py`.
        self.written_in_front = False
        dtype = torch.get_default_dtype()
        self.base_spec = AttentionSpec(
            heads_q=num_heads,
            heads_kv=1,
            head_dim=head_size,
            head_dim_v=self.kv_lora_rank,
            dtype=dtype,
            kv_dtype=validation.torch_kv_dtype(kv_cache_dtype, dtype),
            page_size=validation.ANY_PAGE_SIZE,
            scale=self.scale,
            mla=True,
            batch_invariant=bool(vllm_envs.VLLM_BATCH_INVARIANT),
        )
        # Read by vLLM's layer, which then hands over queries in e4m3.
        self.supports_quant_query_input = given.quantises_queries(self.base_spec.kv)
        if self.supports_quant_query_input:
            self.base_spec = replace(self.base_spec, q_dtype=E4M3.dtype)
        self._specs: dict[tuple[int, Causality], AttentionSpec] = {}

        # vLLM's MLA layer passes none of these to its prefill, whatever the latent kernels serve.
        reasons = [
            f"{name} is not served with MLA"
            for name, value in (
                ("ALiBi", alibi_slopes),
                ("a sliding window", sliding_window),
                ("a cap on the logits", logits_soft_cap),
            )
            if value
        ]
        if attn_type != AttentionType.DECODER:
            reasons.append(f"{attn_type} attention is not served with MLA")
        target = validation.current_target()
        reasons += validation.reasons_against(self.base_spec, target, kernel)
        validation.refuse(f"a layer of {self.base_spec}", reasons)
        self.choose_prefill(config.attention_config, target, kernel)
        specs = [self.spec(compat.page_size(config, DSLMLABackend), Causality.CAUSAL)]
        prefills = not self.base_spec.batch_invariant
        if prefills and config.attention_config.mla_prefill_backend is ensure_prefill_member():
            specs += [self.prefill_spec(causality) for causality in (Causality.CAUSAL, Causality.FULL)]
        ahead.compile_attention(config, specs, lse=True)

    def choose_prefill(self, attention_config: Any, target: Any, kernel: str | None) -> None:
        """Select dsl's prefill in vLLM's config if the user has selected none: vLLM reads it right after this."""
        if attention_config.mla_prefill_backend is not None:
            return
        spec = self.prefill_spec(Causality.CAUSAL)
        reasons = validation.reasons_against(spec, target, validation.kernel_for_keys(spec, kernel))
        if reasons:
            warning_once(f"dsl leaves MLA prefill to vLLM: {'; '.join(reasons)}")
        else:
            attention_config.mla_prefill_backend = ensure_prefill_member()

    def prefill_spec(self, causality: Causality) -> AttentionSpec:
        """The spec of the layer's prefills on projected keys."""
        return prefill_spec(
            self.num_heads, self.qk_head_dim, self.v_head_dim, self.scale, self.base_spec.dtype, causality
        )

    def spec(self, page_size: int, causality: Causality) -> AttentionSpec:
        """The layer's spec in a step.

        Args:
            page_size: tokens a page of the cache.
            causality: of the step's batch.
        """
        spec = self._specs.get((page_size, causality))
        if spec is None:
            spec = self._specs[page_size, causality] = replace(self.base_spec, page_size=page_size, causality=causality)
        return spec

    def split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, latent parts and rope parts, each [pages, page_size, 1, dim], of a cache [pages, page_size, dim]."""
        if self.base_spec.is_fp8_kv and kv_cache.dtype != self.base_spec.kv_dtype:
            kv_cache = kv_cache.view(self.base_spec.kv_dtype)
        keys = kv_cache.unsqueeze(2)
        return keys, keys[..., : self.kv_lora_rank], keys[..., self.kv_lora_rank :]

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write a step's latent and rope parts to the cache, if the layer has one.

        Args:
            kv_c_normed: [tokens, kv_lora_rank].
            k_pe: [tokens, 1, rope] or [tokens, rope].
            kv_cache: [pages, page_size, kv_lora_rank + rope].
            slot_mapping: int64; rows with a negative slot are skipped.
            skip_scale: from vLLM 0.33 on: the scale is 1. Not used, since dividing by 1 gives the same bytes.
        """
        if self.written_in_front or kv_cache.numel() == 0 or slot_mapping.numel() == 0:
            return
        keys, latent, rope = self.split(kv_cache)
        scale = k_scale if self.base_spec.is_fp8_kv else None
        api.write_kv(
            self.spec(keys.shape[1], Causality.CAUSAL),
            kv_c_normed.unsqueeze(1),
            k_pe if k_pe.dim() == 3 else k_pe.unsqueeze(1),
            latent,
            rope,
            slot_mapping.flatten(),
            k_scale=scale,
            v_scale=scale,
            kernel=self.write_kernel,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: DSLMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent attention of the step's short queries.

        Args:
            q: [tokens, heads, kv_lora_rank + rope], or its two parts; of e4m3 where vLLM quantises queries.
            kv_c_and_k_pe_cache: [pages, page_size, kv_lora_rank + rope].

        Returns:
            out [tokens, heads, kv_lora_rank] and lse [tokens, heads] float32, natural log. Rows of padding are
            undefined.
        """
        assert attn_metadata.decode is not None
        first = q[0] if isinstance(q, tuple) else q
        tokens, heads = first.shape[:2]
        out = torch.empty((tokens, heads, self.kv_lora_rank), dtype=self.base_spec.dtype, device=first.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=first.device)
        keys, latent, _ = self.split(kv_c_and_k_pe_cache)
        causality = Causality.CAUSAL if compat.is_causal(attn_metadata) else Causality.FULL
        scale = layer._k_scale if self.base_spec.is_fp8_kv else None
        api.run(
            attn_metadata.decode.step.plan(self.spec(keys.shape[1], causality)),
            q,
            keys,
            latent,
            out=out,
            lse=lse,
            k_scale=scale,
            v_scale=scale,
            q_scale=layer._q_scale if self.base_spec.is_fp8_q else None,
        )
        return out, lse
