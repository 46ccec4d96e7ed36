# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of each dispatch row of attention, and the batches that each serves. Needs no CuTe DSL."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsl_backend.attention.cute.mla_configs import ROWS as MLA_ROWS
from dsl_backend.attention.cute.sizes import packed_gqa_heads, widened_tokens
from dsl_backend.attention.cute.sm90 import dense_configs as sm90
from dsl_backend.attention.cute.sm90 import fp8_configs as fp8_sm90
from dsl_backend.attention.cute.sm90 import mla_configs as mla_sm90
from dsl_backend.attention.cute.sm90 import mla_fp8_configs as mla_fp8_sm90
from dsl_backend.attention.cute.sm100 import dense_configs as sm100
from dsl_backend.attention.cute.sm100 import fp8_configs as fp8_sm100
from dsl_backend.attention.cute.sm100 import mla_configs as mla_sm100
from dsl_backend.attention.cute.sm100 import mla_fp8_configs as mla_fp8_sm100
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.attention.tuned import Heuristic, config_of
from dsl_backend.runtime.dispatch import Variant
from dsl_backend.runtime.target import Target

Variants = Callable[[AttentionSpec, Target], list[Variant]]
# A second kernel beside a heuristic's: the variant, or None where the heuristic's serves all batches.
Second = Callable[[AttentionSpec, Target], Variant | None]


def named(config: Any, *, two_cta: bool, tile_m: int) -> str:
    """What a configuration's kernel is: the form of its products, query rows by keys of a tile, its schedule."""
    form = "swap-AB " if getattr(config, "swap_ab", 0) else "2-CTA " if two_cta else ""
    schedule = (
        " ping-pong" if getattr(config, "ping_pong", False) else " CLC" if getattr(config, "use_clc", False) else ""
    )
    return f"{form}{tile_m}x{config.tile_n}{schedule}"


def of_dense(config: Any, min_query_len: int = 0, max_query_len: int | None = None) -> Variant:
    name = named(config, two_cta=getattr(config, "two_cta", False), tile_m=config.tile_m)
    return Variant(name, config, min_query_len, max_query_len)


def long_queries(spec: AttentionSpec, target: Target) -> Variant | None:
    """SM90's for batches with a long query."""
    config = sm90.long_query_config(spec)
    return None if config is None else of_dense(config, min_query_len=sm90.LONG_QUERY)


def long_fp8_queries(spec: AttentionSpec, target: Target) -> Variant | None:
    """The same of the kernel with e4m3 products."""
    config = fp8_sm90.long_query_fp8_config(spec)
    return None if config is None else of_dense(config, min_query_len=fp8_sm90.FP8_LONG_QUERY)


def few_rows(spec: AttentionSpec, target: Target) -> Variant | None:
    """SM100's for batches whose requests have few query rows."""
    config = sm100.few_rows_config(spec, target.smem_bytes)
    if config is None:
        return None
    return of_dense(config, max_query_len=config.tile_m // packed_gqa_heads(spec.group))


def split_prompts(config: Any, spec: AttentionSpec, target: Target) -> Variant | None:
    """Split-KV for batches whose query tiles are too few for the SMs; None where the configuration does not fit."""
    if config.objections(spec, target.smem_bytes):
        return None
    return replace(of_dense(config), name=f"split-KV {of_dense(config).name}", few_tiles=True)


def sm90_extend(spec: AttentionSpec, target: Target) -> Variant | None:
    config = sm90.extend_config(spec)
    return None if config is None else split_prompts(config, spec, target)


def packed_fp8(packed: Callable[[AttentionSpec], Any]) -> Second:
    """The kernel of short queries with e4m3 products, for longer ones too."""

    def splitting(spec: AttentionSpec, target: Target) -> Variant | None:
        return split_prompts(packed(spec), spec, target)

    return splitting


def sm100_extend(spec: AttentionSpec, target: Target) -> Variant | None:
    """The kernel of short queries, as it is."""
    if spec.batch_invariant:
        # Splits begin at fixed keys.
        return None
    config = config_of(spec, target, sm100.default_split_config)
    return split_prompts(sm100.default_split_config(spec) if config.swap_ab else config, spec, target)


def only_one(spec: AttentionSpec, target: Target) -> None:
    return None


def dense(default: Heuristic, second: Second = only_one, extend: Second = only_one) -> Variants:
    """The kernels of dense attention, the usual one first. A tuned one serves batches of all query lengths.

    Args:
        second: for some query lengths. extend: for few query tiles.
    """

    def variants(spec: AttentionSpec, target: Target) -> list[Variant]:
        config = config_of(spec, target, default)
        other, splitting = second(spec, target) if config == default(spec) else None, extend(spec, target)
        usual = of_dense(config)
        if other is not None and other.max_query_len is None:
            usual = of_dense(config, max_query_len=other.min_query_len - 1)
        elif other is not None and other.max_query_len is not None:
            usual = of_dense(config, min_query_len=other.max_query_len + 1)
        return [one for one in (usual, other, splitting) if one is not None]

    return variants


def by_rows(default: Heuristic, many_rows: Callable[[AttentionSpec], Any]) -> Variants:
    """The kernels of short queries of layers with e4m3 products.

    Args:
        default: for few rows, whose products are in 16 bits. many_rows: for more; None where there are none.
    """

    def variants(spec: AttentionSpec, target: Target) -> list[Variant]:
        config, few = many_rows(spec), widened_tokens(spec.group)
        if config is None:
            return [of_dense(config_of(spec, target, default))]
        many = replace(of_dense(config, min_query_len=few + 1 if few else 0), name=f"e4m3 {of_dense(config).name}")
        return [of_dense(config_of(spec, target, default), max_query_len=few), many] if few else [many]

    return variants


def mla(default: Heuristic) -> Variants:
    """The kernel of absorbed MLA."""

    def variants(spec: AttentionSpec, target: Target) -> list[Variant]:
        config = config_of(spec, target, default)
        return [Variant(named(config, two_cta=isinstance(config, mla_sm100.TwoCtaMlaConfig), tile_m=MLA_ROWS), config)]

    return variants


SM90_PREFILL = dense(sm90.default_config, long_queries, sm90_extend)
SM90_FP8_PREFILL = dense(fp8_sm90.default_fp8_config, long_fp8_queries, packed_fp8(fp8_sm90.packed_config))
SM90_DECODE = dense(sm90.default_split_config)
SM90_FP8_DECODE = by_rows(sm90.default_split_config, fp8_sm90.many_rows_config)
SM90_MLA = mla(mla_sm90.default_mla_config)
SM90_FP8_MLA = mla(mla_fp8_sm90.default_fp8_mla_config)
SM100_PREFILL = dense(sm100.default_config, extend=sm100_extend)
SM100_FP8_PREFILL = dense(fp8_sm100.default_fp8_config, extend=packed_fp8(fp8_sm100.packed_config))
SM100_DECODE = dense(sm100.default_split_config, few_rows)
SM100_FP8_DECODE = by_rows(sm100.default_split_config, fp8_sm100.many_rows_config)
SM100_MLA = mla(mla_sm100.default_mla_config)
SM100_FP8_MLA = mla(mla_fp8_sm100.default_fp8_mla_config)
