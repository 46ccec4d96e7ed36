# SPDX-License-Identifier: Apache-2.0
"""Which kernels a model's attention needs, by its configuration."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention import precompile
from dsl_backend.attention.cute.write_kv import WriteKey
from dsl_backend.runtime import model
from dsl_backend.runtime.target import from_arch

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
DEEPSEEK = LLAMA | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def all_keys(config: dict[str, Any], arch: str = "sm_90a", **shape: Any) -> list[Any]:
    return [one.key for one in precompile.precompile_specs(model.shape_of(config, **shape), from_arch(arch))]


def keys(config: dict[str, Any], arch: str = "sm_90a", **shape: Any) -> list[Any]:
    """Of the kernels that attend."""
    return [key for key in all_keys(config, arch, **shape) if not isinstance(key, WriteKey)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_short_and_long_queries(arch: str) -> None:
    found = keys(LLAMA, arch, tensor_parallel=2)
    # On SM90 prompts with few tiles have a kernel of their own, on SM100 decodes of few rows.
    splits = (True, False, True) if arch == "sm_90a" else (True, True, False)
    assert len(set(found)) == len(found)
    assert [(key.split, key.heads_q, key.heads_kv, key.head_dim, key.page_size) for key in found] == [
        (split, 16, 4, 128, 16) for split in splits
    ]
    assert not any(key.lse for key in found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_fp8_caches(arch: str) -> None:
    """What reads and writes the cache has its dtype; MLA's prefills have no cache."""
    for name, stored in (("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"), ("auto", "bfloat16")):
        for config in (LLAMA, DEEPSEEK):
            shape = replace(model.shape_of(config), kv_cache_dtype=name)
            found = [one.key for one in precompile.precompile_specs(shape, from_arch(arch))]
            assert any(isinstance(key, WriteKey) for key in found)
            for key in found:
                assert key.kv.name == (stored if key.page_size else "bfloat16"), (name, key)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_mla(arch: str) -> None:
    """Prefills of new tokens and of context, and the cache; all with the LSE that merges them."""
    found = keys(DEEPSEEK, arch)
    assert {(key.head_dim, key.head_dim_v, key.page_size, key.causality) for key in found} == {
        (192, 128, 0, "causal"),
        (192, 128, 0, "full"),
        (576, 512, 64, "causal"),
    }
    assert all(key.lse for key in found)


@pytest.mark.parametrize(
    ("facts", "windows"),
    [
        ({}, [False]),
        ({"sliding_window": 4096}, [True]),
        ({"sliding_window": 4096, "use_sliding_window": False}, [False]),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 3}, [True, False]),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, [False]),
        ({"text_config": LLAMA | {"sliding_window": 512}}, [True]),
    ],
)
def test_windows(facts: dict[str, Any], windows: list[bool]) -> None:
    assert [key.has_window_left for key in keys(LLAMA | facts) if not key.split] == windows


@pytest.mark.parametrize(("more", "heads"), [({}, 4), ({"attention_k_eq_v": True}, 1)])
def test_wider_heads_without_a_window(more: dict[str, Any], heads: int) -> None:
    """Gemma 4's."""
    gemma = {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "sliding_window": 512}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    found = keys(LLAMA | gemma | layers | more, tensor_parallel=2)
    assert {(key.head_dim, key.heads_kv, key.has_window_left) for key in found} == {(256, 4, True), (512, heads, False)}


def test_the_longest_queries() -> None:
    found = keys(LLAMA | {"head_dim": 64})
    assert [(key.split, key.config.groups) for key in found] == [(True, 1), (False, 2), (False, 3), (True, 2)]


def test_what_bends_scores() -> None:
    assert all(key.scores.softcap for key in keys(LLAMA | {"attn_logit_softcapping": 50.0}))
    assert {key.scores.sinks for key in keys(LLAMA | {"model_type": "gpt_oss"})} == {"bfloat16"}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("config", "heads", "dims", "page_size"),
    [(LLAMA, 4, (128, 128), 16), (LLAMA | {"head_dim": 512}, 4, (512, 512), 16), (DEEPSEEK, 1, (512, 64), 64)],
)
def test_writes(arch: str, config: dict[str, Any], heads: int, dims: tuple[int, int], page_size: int) -> None:
    """Once for a cache, and where Triton attends as well."""
    (found,) = {key for key in all_keys(config, arch, tensor_parallel=2) if isinstance(key, WriteKey)}
    assert (found.heads, found.dim, found.dim_v, found.page_size) == (heads, *dims, page_size)


def test_other_kernels_are_not_compiled_so() -> None:
    assert all_keys(LLAMA, "sm_80") == []
    assert all_keys(LLAMA | {"dtype": "float32"}) == []
