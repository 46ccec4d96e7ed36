# SPDX-License-Identifier: Apache-2.0
"""Configurations beside the defaults: all of them serve."""

import math
from dataclasses import replace

import pytest
import torch

from dsl_backend.runtime.target import from_arch
from dsl_backend.softmax import candidates
from dsl_backend.softmax.configs import SoftmaxConfig, default_config
from dsl_backend.softmax.spec import SoftmaxSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SM90 = from_arch("sm_90a")


def spec(width: int, dtype: torch.dtype = BF16) -> SoftmaxSpec:
    return SoftmaxSpec(width=width, dtype=dtype, out_dtype=dtype, vector=math.gcd(8, width))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [1, 7, 72, 1072, 2144, 4099, 8192, 102400, 151936, 600000])
def test_all_candidates_serve(width: int, dtype: torch.dtype) -> None:
    problem = spec(width, dtype)
    found = candidates.named(problem, SM90)
    assert found["default"] == default_config(problem, SM90.chips[0])
    assert len(set(found.values())) == len(found) > 1
    for name, config in found.items():
        assert config.objections(problem, SM90.smem_bytes) == [], name
        assert config.use_pdl == (name != "no-pdl")


def test_names() -> None:
    found = candidates.named(spec(1072), SM90)
    assert found["predicated"] == replace(found["default"], predicated=True)
    assert found["early"] == replace(found["default"], late_dependents=False)
    assert (found["4*32x1x5"].rows_per_cta, found["32x1x5"].rows_per_cta) == (4, 1)
    # The default is a spread already; nothing of it is named again.
    wide = candidates.named(spec(151936), SM90)
    assert {"late", "no-pdl"} < set(wide)
    assert not {"early", "predicated", "160x16x8r"} & set(wide)
    # A row that fills its tile has nothing to leave out, and neither has one whose loads are single 16-bit elements.
    assert "predicated" not in candidates.named(spec(8192), SM90)
    assert not any(config.predicated for config in candidates.named(spec(4099), SM90).values())


def test_predicated_loads_have_whole_registers() -> None:
    config = SoftmaxConfig(vector=1, vectors_per_thread=2, threads_per_row=32, rows_per_cta=4, predicated=True)
    assert config.objections(spec(63), SM90.smem_bytes) == ["predicated loads of 2 bytes: 4 are the fewest"]
    assert config.objections(spec(63, F32), SM90.smem_bytes) == []


def test_rows_of_one_cta_have_candidates_that_fill_it() -> None:
    """The default of 9048 columns fills 0.74 of a CTA of 512 threads, of which two fit an SM."""
    found = candidates.named(spec(9048), SM90)
    assert found["default"].tile_elements == 12288
    assert found["192x1x6r"].tile_elements == 9216
    assert found["more"].ctas_per_sm == 3
    assert "more" not in candidates.named(spec(8192), SM90)
