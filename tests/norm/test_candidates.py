# SPDX-License-Identifier: Apache-2.0
"""Configurations beside the defaults: all of them serve."""

import math
from typing import Any

import pytest
import torch

from dsl_backend.norm import candidates
from dsl_backend.norm.configs import default_config
from dsl_backend.norm.spec import NormSpec, Scaling

BF16, F32 = torch.bfloat16, torch.float32
SMEM_BYTES = 227 * 1024


def spec(width: int, dtype: torch.dtype = BF16, **more: Any) -> NormSpec:
    fields = {"out_dtype": dtype, "weight_dtype": dtype, **more}
    return NormSpec(width=width, dtype=dtype, vector=math.gcd(8, width), **fields)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("width", [7, 128, 4096, 7168, 20000, 32768, 262144])
def test_all_candidates_serve(width: int, dtype: torch.dtype) -> None:
    problem = spec(width, dtype)
    found = candidates.named(problem, SMEM_BYTES)
    assert found["default"] == default_config(problem)
    assert len(set(found.values())) == len(found) > 1
    for name, config in found.items():
        assert config.objections(problem, SMEM_BYTES) == [], name
        assert config.reread == name.startswith("twice")
        assert config.evict_last == ("last" in name)


def test_registers_of_a_second_read() -> None:
    found = candidates.named(spec(8192), SMEM_BYTES)
    assert found["default"].ctas_per_sm == 4
    # 16 registers for 32 elements and 24 more, and not 16 for the weight as well.
    assert found["twice-256x1x4"].ctas_per_sm == 6


@pytest.mark.parametrize(
    "more",
    [{"residual": True}, {"out_dtype": torch.float8_e4m3fn, "scaling": Scaling.TOKEN}],
    ids=["residual", "token"],
)
def test_what_is_not_read_twice(more: dict[str, Any]) -> None:
    assert not any(one.reread for one in candidates.named(spec(8192, **more), SMEM_BYTES).values())
