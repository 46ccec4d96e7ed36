# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels that the attention of a model needs, for compiling them before it is served.

The defaults are vLLM's: keys in the model's dtype, in pages of 16 tokens, or of 64 with MLA.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsl_backend.attention import dispatch, rope_dispatch
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.rope_spec import AnySpec, RopeSpec
from dsl_backend.attention.spec import AttentionSpec, Causality
from dsl_backend.errors import Unsupported
from dsl_backend.runtime.model import KV_CACHE_DTYPES, ModelShape, text_of
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import OTHER_GPUS, Target
from dsl_backend.runtime.workspace import Workspace

PAGE_SIZE = 16
# A TMA copy loads rows of one page. With pages as long as a key tile, MLA's decode takes 1 to 3 % less time on an H200
# than with pages of 16 tokens.
LATENT_PAGE_SIZE = 64
# Model types whose heads have sinks; no other field of the configuration says so.
WITH_SINKS = ("gpt_oss",)


def layer_specs(model: ModelShape) -> Iterator[AttentionSpec]:
    """The specs of all layers of a decoder, each once."""
    dtype, text = getattr(torch, model.dtype), text_of(model.config)
    stored = getattr(torch, KV_CACHE_DTYPES.get(model.kv_cache_dtype, model.dtype))
    # Any positive scale: kernels take it as an argument.
    shared: dict[str, Any] = {"dtype": dtype, "kv_dtype": stored, "scale": model.head_dim**-0.5}
    if model.latent_rank is not None and model.rope_dim is not None:
        width = text.get("v_head_dim") or model.head_dim - model.rope_dim
        for causality in (Causality.CAUSAL, Causality.FULL):
            yield AttentionSpec(
                heads_q=model.heads_q,
                heads_kv=model.heads_q,
                head_dim=model.head_dim,
                head_dim_v=width,
                page_size=None,
                causality=causality,
                **(shared | {"kv_dtype": dtype}),  # no cache: keys and values as they are computed
            )
        yield AttentionSpec(
            heads_q=model.heads_q,
            heads_kv=1,
            head_dim=model.latent_rank + model.rope_dim,
            head_dim_v=model.latent_rank,
            page_size=LATENT_PAGE_SIZE,
            mla=True,
            **shared,
        )
        return
    for window in windows(text):
        heads_kv, head_dim = heads_of(model, text, window)
        yield AttentionSpec(
            heads_q=model.heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim,
            page_size=PAGE_SIZE,
            window_left=None if window is None else window - 1,
            softcap=text.get("attn_logit_softcapping") or 0.0,
            sinks=text.get("model_type") in WITH_SINKS,
            **shared,
        )


def heads_of(model: ModelShape, text: Mapping[str, Any], window: int | None) -> tuple[int, int]:
    """(key heads of this rank, head size) of a model's layers with that window."""
    wide = text.get("global_head_dim")
    if window is not None or not wide:
        return model.heads_kv, model.head_dim
    # Gemma 4's layers without a window. If their keys are also their values, they have another number of key heads.
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return model.heads_kv if heads is None else max(1, heads // model.tensor_parallel), wide


def windows(text: Mapping[str, Any]) -> list[int | None]:
    """The sliding windows of a model's layers; None is a layer without one."""
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if not window or text.get("use_sliding_window") is False:
        return [None]
    if not kinds:
        return [window]
    return [window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)]


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    """The CuTe DSL kernels for short queries, for long queries and for cache writes, as far as CuTe DSL serves them."""
    for spec in layer_specs(model):
        # The parts of MLA are combined by their LSE; vLLM asks for no other LSE.
        lse = spec.mla or spec.page_size is None
        yield from precompile_specs_of(spec, target, lse=lse, sinks=spec.dtype if spec.sinks else None)


def precompile_specs_of(
    spec: AttentionSpec, target: Target, *, lse: bool, sinks: torch.dtype | None = None, kernel: str | None = None
) -> Iterator[PrecompileSpec]:
    """The CuTe DSL kernels of a layer, for any batch; none if other kernels serve it.

    Args:
        lse: whether launches ask for the LSE.
        sinks: the dtype of the sinks, if there are any.
        kernel: the only one to attend with, by its name in the dispatch table.
    """
    try:
        planner = Planner(spec, target, Workspace(torch.device("cpu")), kernel)
    except Unsupported:
        return
    # Triton's kernels have no keys. Some kernels are both for short queries and for few tiles of long ones.
    chosen: list[Any] = [kernel for _, _, kernel in planner.kernels if hasattr(kernel, "keys")]
    builds = {key: type(kernel).build for kernel in chosen for key in kernel.keys(lse, sinks)}
    for key, build in builds.items():
        yield PrecompileSpec("attention", build, key, target)
    if spec.page_size is not None and not dispatch.cute_writes(spec, target):
        # Imports CuTe DSL.
        from dsl_backend.attention.cute import write_kv_host as write_launch

        yield PrecompileSpec("attention", write_launch.build, write_launch.key_of(spec), target)


def rope_precompile_specs_of(spec: AnySpec, target: Target) -> Iterator[PrecompileSpec]:
    """The CuTe DSL kernel that rotates a layer's queries and keys; none where another kernel serves it."""
    if rope_dispatch.choose(spec, target).name != "cute":
        return
    # Imports CuTe DSL.
    from dsl_backend.attention.cute import mla_rope_host, rope_host

    if isinstance(spec, RopeSpec):
        yield PrecompileSpec("attention", rope_host.build, rope_host.key_of(spec), target)
    else:
        yield PrecompileSpec("attention", mla_rope_host.build, mla_rope_host.key_of(spec), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """Layer -> why CuTe DSL's kernels do not serve it: `kernels: reason`."""
    found = {}
    for spec in layer_specs(model):
        reasons = dispatch.reasons_against(spec, target, lambda operation: "cute")
        # Objections of kernels for other GPUs are shown only if there are no others.
        own = [reason for reason in reasons if OTHER_GPUS not in reason]
        found[str(spec)] = own or reasons
    return found
