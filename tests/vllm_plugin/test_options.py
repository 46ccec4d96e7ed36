# SPDX-License-Identifier: Apache-2.0
"""`--additional-config '{"dsl": {...}}'`: what is accepted, and how the rest is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

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
        (
            {"attention_kernel": "triton", "fp8_queries": True},
            ["fp8_queries is true and attention_kernel 'triton': quantised queries are those of 'cute-fp8'"],
        ),
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
