# SPDX-License-Identifier: Apache-2.0
"""`--additional-config '{"dsl": {...}}'`: what is accepted, and how the rest is refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from dsl_backend.quant.format import E4M3, E5M2, NVFP4_KV, KVFormat, format_of
from dsl_backend.vllm_plugin import options


def config(dsl: Any) -> Any:
    return VllmConfig(additional_config={"dsl": dsl})


def test_defaults_where_nothing_is_set() -> None:
    for nothing in (None, VllmConfig(), config({}), SimpleNamespace(additional_config=object())):
        assert options.of(nothing) == options.Options()


@pytest.mark.parametrize("name", ["triton", "reference", "cute-fp8"])
def test_kernel_by_name(name: str) -> None:
    assert options.of(config({"attention_kernel": name})).attention_kernel == name


@pytest.mark.parametrize(
    ("dsl", "parts"),
    [
        ({"atention_kernel": "triton"}, ["atention_kernel: unknown key", "accepted keys: attention_kernel"]),
        ({"attention_kernel": "cuda"}, ["'cuda' is not one of", "triton", "reference"]),
        ({"attention_kernel": 3}, ["attention_kernel", "string"]),
        ({"mla_latent_queries": 0}, ["mla_latent_queries", "greater than 0, not 0"]),
        ({"mla_latent_queries": True}, ["mla_latent_queries", "a valid integer, not True"]),
        ({"launches_by_lengths": 1}, ["launches_by_lengths", "a valid boolean, not 1"]),
        ({"fp8_queries": 1}, ["fp8_queries", "a valid boolean, not 1"]),
        ({"experts": True}, ["experts", "'measured', 'dsl' or 'vllm'"]),
        ({"norms": "fast"}, ["norms", "'measured', 'dsl' or 'vllm'"]),
        ({"projections": 1}, ["projections", "'measured', 'dsl' or 'vllm'"]),
        (["triton"], ["an object with the keys attention_kernel"]),
    ],
)
def test_refusals_name_what_is_accepted(dsl: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        options.of(config(dsl))
    for part in parts:
        assert part in str(error.value)


def test_the_key_in_another_case_is_refused() -> None:
    with pytest.raises(ValueError, match="has the key 'Dsl', which is not read: use 'dsl'"):
        options.of(VllmConfig(additional_config={"other": 1, "Dsl": {"rope": "dsl"}}))


@pytest.mark.parametrize(
    ("dsl", "quantised"),
    [
        ({"attention_kernel": "cute-fp8", "fp8_queries": True}, {E4M3, NVFP4_KV}),
        ({"attention_kernel": "cute-fp8"}, set()),
        ({}, set()),
    ],
)
def test_whose_queries_are_quantised(dsl: Any, quantised: set[KVFormat]) -> None:
    given = options.of(config(dsl))
    formats = {E4M3, E5M2, NVFP4_KV, format_of(torch.bfloat16)}
    assert {kv for kv in formats if given.quantises_queries(kv)} == quantised


@pytest.mark.parametrize("dsl", [{"fp8_queries": True}, {"attention_kernel": "triton", "fp8_queries": True}])
def test_queries_that_no_product_would_take_are_refused(dsl: Any) -> None:
    given = options.of(config(dsl))
    assert given.quantises_queries(NVFP4_KV)
    named = re.escape(repr(dsl.get("attention_kernel")))
    message = f"attention_kernel {named}: quantised queries over a cache of float8_e4m3fn are those of 'cute-fp8'"
    with pytest.raises(ValueError, match=message):
        given.quantises_queries(E4M3)
