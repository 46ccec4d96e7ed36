# SPDX-License-Identifier: Apache-2.0
"""Configurations beside the defaults: all of them serve."""

import math
from typing import Any

import pytest
import torch

from dsl_backend.norm import candidates
from dsl_backend.norm.configs import default_config
from dsl_backend.norm.spec import NormSpec

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
        assert config.evict_last == (found["default"].evict_last != (name in ("last", "plain")))


def test_names() -> None:
    plain, kept = (candidates.named(spec(32768, residual=residual), SMEM_BYTES) for residual in (True, False))
    assert [name for name in plain if name in ("last", "plain")] == [], "a residual"
    assert "last" in candidates.named(spec(4096), SMEM_BYTES)
    assert [name for name in kept if name in ("last", "plain")] == ["plain"]
    assert (kept["256x4x4"].threads_per_row, kept["256x4x4"].cluster, kept["256x4x4"].ctas_per_sm) == (256, 4, 4)
    # The default's own spread has no second name, and CTAs have at least 8 KB of a row.
    assert "128x8x4" not in kept
    assert "256x4x4" not in plain
    exact = candidates.named(spec(7168), SMEM_BYTES)
    assert {"224x1x4", "256x1x4"} <= exact.keys()
    assert "448x1x2" not in exact
    assert "224x4x5" not in kept
    assert not any(one.cluster > 1 for name, one in candidates.named(spec(4096), SMEM_BYTES).items() if "x" in name)
