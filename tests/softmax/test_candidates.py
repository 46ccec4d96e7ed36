# SPDX-License-Identifier: Apache-2.0
"""Configurations beside the defaults: all of them serve, the estimate ranks, and the emulator runs them."""

import math
from dataclasses import replace

import pytest
import torch

from dsl_backend.softmax import candidates
from dsl_backend.softmax.configs import SoftmaxConfig, default_config
from dsl_backend.softmax.spec import SoftmaxSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMEM_BYTES = 227 * 1024


def spec(width: int, dtype: torch.dtype = BF16) -> SoftmaxSpec:
    return SoftmaxSpec(width=width, dtype=dtype, out_dtype=dtype, vector=math.gcd(8, width))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [1, 7, 72, 1072, 2144, 4099, 8192, 102400, 151936, 600000])
def test_all_candidates_serve(width: int, dtype: torch.dtype) -> None:
    problem = spec(width, dtype)
    found = candidates.named(problem, SMEM_BYTES)
    assert found["default"] == default_config(problem)
    assert len(set(found.values())) == len(found) > 1
    for name, config in found.items():
        assert config.objections(problem, SMEM_BYTES) == [], name
        assert name in ("default", "no-pdl", "late", "predicated") or config.use_pdl


def test_names() -> None:
    found = candidates.named(spec(1072), SMEM_BYTES)
    assert found["predicated"] == replace(found["default"], predicated=True)
    assert (found["4*32x1x5"].rows_per_cta, found["32x1x5"].rows_per_cta) == (4, 1)
    # A row that fills its tile has nothing to leave out, and neither has one whose loads are single 16-bit elements.
    assert "predicated" not in candidates.named(spec(8192), SMEM_BYTES)
    assert not any(config.predicated for config in candidates.named(spec(4099), SMEM_BYTES).values())


def test_the_estimate_prefers_even_rows_with_much_in_flight() -> None:
    problem = spec(102400)
    assert default_config(problem).tile_elements == 131072
    best = candidates.ranked(problem, SMEM_BYTES)
    assert best[0].tile_elements == 102400
    usual = candidates.estimate(default_config(problem), problem)
    assert all(candidates.estimate(one, problem) < usual for one in best)
    even = replace(best[0], threads_per_row=320, cluster=8, vectors_per_thread=5, recompute=False)
    assert candidates.estimate(replace(even, vectors_per_thread=6), problem) > candidates.estimate(even, problem)
    few = SoftmaxConfig(vector=8, vectors_per_thread=1, threads_per_row=128, rows_per_cta=1)
    many = replace(few, threads_per_row=32, rows_per_cta=4, vectors_per_thread=4)
    assert candidates.estimate(many, spec(1024)) < candidates.estimate(few, spec(1024))


def test_predicated_loads_have_whole_registers() -> None:
    config = SoftmaxConfig(vector=1, vectors_per_thread=2, threads_per_row=32, rows_per_cta=4, predicated=True)
    assert config.objections(spec(63), SMEM_BYTES) == ["predicated loads of 2 bytes: 4 are the fewest"]
    assert config.objections(spec(63, F32), SMEM_BYTES) == []
