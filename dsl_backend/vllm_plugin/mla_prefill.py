# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA prefill: attention on keys and values that its layer has projected up and packed."""

from typing import Any

import torch
from vllm import envs as vllm_envs
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from dsl_backend.attention import api
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.vllm_plugin import compat, options, validation
from dsl_backend.vllm_plugin.enum_members import NAME
from dsl_backend.vllm_plugin.metadata import Planners, StepPlans


def prefill_spec(
    num_heads: int, qk_head_dim: int, v_head_dim: int, scale: float, dtype: torch.dtype, causality: Causality
) -> AttentionSpec:
    """The spec of MLA prefill. New tokens attend causally to each other, and fully to each chunk of their context."""
    return AttentionSpec(
        heads_q=num_heads,
        heads_kv=num_heads,
        head_dim=qk_head_dim,
        head_dim_v=v_head_dim,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=None,
        scale=scale,
        causality=causality,
        batch_invariant=bool(vllm_envs.VLLM_BATCH_INVARIANT),
    )


class DSLPrefillBackend(MLAPrefillBackend):
    """MLA prefill by dsl. Each metadata builder has its own instance, which holds the plans of one step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planners: Planners | None = None
        # Key: the chunk of context; None for the new tokens.
        self._steps: dict[int | None, StepPlans] = {}
        self._specs: dict[tuple[torch.dtype, Causality], AttentionSpec] = {}

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return not validation.probe(validation.current_target(), dtype=dtype, page_size=None)

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        """Every reason against the model's sizes and dtype; empty where there is none."""
        sizes = selector_config.mla_dimensions
        spec = prefill_spec(
            num_heads=1,
            qk_head_dim=sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
            v_head_dim=sizes.v_head_dim,
            scale=1.0,
            dtype=selector_config.dtype,
            causality=Causality.CAUSAL,
        )
        return validation.reasons_against(spec, validation.target_of(device_capability))

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Start a step: its plans are made when its first layer asks for them."""
        super().prepare_metadata(prefill_metadata)
        self._steps = {}

    def planners(self, device: torch.device) -> Planners:
        if self._planners is None:
            self._planners = Planners(device, options.of(self.vllm_config).attention_kernel)
        return self._planners

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what steps will need: causal attention for new tokens, full attention for chunks of context."""
        for causality in (Causality.CAUSAL, Causality.FULL):
            self.planners(device).of(self.spec(dtype, causality)).prepare(lse=True)

    def step(self, key: int | None, batch: Batch) -> StepPlans:
        return self._steps.setdefault(key, StepPlans(batch, self.planners(batch.seq_lens.device)))

    def spec(self, dtype: torch.dtype, causality: Causality) -> AttentionSpec:
        spec = self._specs.get((dtype, causality))
        if spec is None:
            spec = self._specs[dtype, causality] = prefill_spec(
                self.num_heads,
                self.qk_nope_head_dim + self.qk_rope_head_dim,
                self.v_head_dim,
                self.scale,
                dtype,
                causality,
            )
        return spec

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of the step's new tokens to each other.

        Args:
            q, k: [tokens, heads, qk_head_dim].
            v: [tokens, heads, v_head_dim].

        Returns:
            out [tokens, heads, v_head_dim]; with `return_softmax_lse` also lse [heads, tokens] float32, natural log.
        """
        if output_scale is not None:
            raise NotImplementedError("MLA prefill backend dsl does not quantise its output")
        step = self._steps.get(None)
        if step is None:
            starts = self._prefill_metadata.query_start_loc
            longest = self._prefill_metadata.max_query_len
            step = self.step(None, packed_batch(starts, starts, q.shape[0], longest, longest))
        attended, lse = self.attend(step, Causality.CAUSAL, q, k, v, out)
        return (attended, lse) if return_softmax_lse else attended

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        chunk_idx: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Full attention of new tokens to a chunk of what was cached before them.

        Args:
            chunk, chunk_idx: vLLM's chunk object, or its index in the step's metadata; see compat.
            q: [tokens, heads, qk_head_dim], of the chunk's requests (with an index: of all requests).
            k, v: [keys of the chunk, heads, dim].

        Returns:
            out [tokens, heads, v_head_dim] and lse [heads, tokens] float32, natural log; 0 and -inf for tokens whose
            request has no key in the chunk.
        """
        assert q is not None
        assert k is not None
        assert v is not None
        bounds = compat.context_chunk(chunk if chunk_idx is None else chunk_idx, self._prefill_metadata)
        step = self._steps.get(bounds.key)
        if step is None:
            step = self.step(
                bounds.key,
                packed_batch(
                    bounds.query_start_loc, bounds.kv_start_loc, q.shape[0], bounds.max_query_len, bounds.max_kv_len
                ),
            )
        return self.attend(step, Causality.FULL, q, k, v, out)

    def attend(
        self,
        step: StepPlans,
        causality: Causality,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if out is None:
            out = q.new_empty((q.shape[0], self.num_heads, self.v_head_dim))
        lse = torch.empty((self.num_heads, q.shape[0]), dtype=torch.float32, device=q.device)
        api.run(step.plan(self.spec(q.dtype, causality)), q, k, v, out=out, lse=lse.transpose(0, 1))
        return out, lse


def packed_batch(
    query_start_loc: torch.Tensor, kv_start_loc: torch.Tensor, tokens: int, max_query_len: int, max_kv_len: int
) -> Batch:
    """A batch with packed keys; the lengths are computed on the device.

    A chunk's starts are a row of vLLM's tensor of all chunks: Triton would compile again where that is not aligned.
    """
    query_start_loc, kv_start_loc = (
        one.clone() if one.data_ptr() % 16 else one for one in (query_start_loc, kv_start_loc)
    )
    return Batch(
        query_start_loc=query_start_loc,
        seq_lens=kv_start_loc.diff(),
        num_tokens=tokens,
        max_query_len=max_query_len,
        max_seq_len=max_kv_len,
        kv_start_loc=kv_start_loc,
    )
