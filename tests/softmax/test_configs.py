# SPDX-License-Identifier: Apache-2.0
"""Configurations of softmax: every width has one, and objections say what is wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.rows import ACCESS_BYTES, DTYPES, MAX_WIDTH
from dsl_backend.softmax.configs import SoftmaxConfig, default_config
from dsl_backend.softmax.spec import SoftmaxSpec

SMEM_BYTES = 227 * 1024
WIDTHS = sorted(
    {
        *range(1, 70),
        *(2**n + d for n in range(6, 20) for d in (-1, 0, 1, 8)),
        128256,
        151936,
        201088,
        262144,
        MAX_WIDTH,
    }
)


def spec(width: int, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype | None = None) -> SoftmaxSpec:
    return SoftmaxSpec(width=width, dtype=dtype, out_dtype=out_dtype or dtype, vector=math.gcd(8, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_every_width_is_served(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for width in WIDTHS:
        problem = spec(width, dtype, out_dtype)
        config = default_config(problem)
        assert config.objections(problem, SMEM_BYTES) == [], f"{problem}: {config}"
        assert config.vector * max(dtype.itemsize, out_dtype.itemsize) <= ACCESS_BYTES
        assert config.two_pass == (width > 524288), f"{problem}: {config}"
        # No thread of a row is without work, except for the rounding to powers of two.
        assert config.two_pass or config.tile_elements - width < max(width, config.threads_per_row * config.cluster * 8)


def test_threads_and_clusters_of_a_width() -> None:
    def level(width: int, **more: Any) -> tuple[int, int]:
        config = default_config(replace(spec(width), **more))
        return config.threads_per_row, config.cluster

    assert level(8) == (1, 1)
    assert level(128) == (8, 1)
    assert level(1024) == (32, 1)
    assert level(2048) == (64, 1)
    assert level(4096) == (256, 1)
    assert level(4096, log=True) == (128, 1)
    assert level(4096, out_dtype=torch.float32) == (128, 1)
    assert level(4104) == (256, 1)
    assert level(8192) == (512, 1)
    assert level(16384) == (256, 4)
    assert level(16384, vector=4) == (512, 1)
    assert level(32768) == (256, 2)
    assert level(65536) == (256, 4)
    assert level(128256) == (256, 16)
    assert level(262144) == (512, 16)


def test_ctas_on_an_sm() -> None:
    """As many as registers suffice for; exponentials twice only if that makes room for more."""

    def found(width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int, bool]:
        config = default_config(spec(width, dtype))
        return config.vectors_per_thread, config.ctas_per_sm, config.recompute

    assert found(4096) == (2, 8, False)
    assert found(8192) == (2, 4, False)
    assert found(16384) == (2, 8, False)
    assert found(20552) == (6, 4, False)
    assert found(26240) == (7, 3, False)
    assert found(32768) == (8, 3, False)
    assert found(201088) == (4, 3, True)
    assert found(300000) == (5, 1, False)
    assert found(524288) == (8, 2, True)
    assert found(201088, torch.float32) == (7, 1, False)


FITS = SoftmaxConfig(vector=8, vectors_per_thread=4, threads_per_row=32, rows_per_cta=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors_per_thread": 3}, "holds 768 elements of 1000"),
        ({"vector": 16}, "vectors of 16 elements: rows are aligned to 8, and 8 are 16 bytes"),
        ({"threads_per_row": 33}, "threads_per_row 33 is not a power of two"),
        ({"rows_per_cta": 64}, "2048 threads for each CTA are not a multiple of 32 up to 1024"),
        ({"cluster": 32, "rows_per_cta": 1}, "clusters of 32 CTAs: 16 are the most"),
        ({"cluster": 2}, "a cluster shares one row, with whole warps: not 4 rows for each CTA"),
        ({"vectors_per_thread": 40}, "336 registers for each of 128 threads, 1 CTAs on an SM: 255 for a thread"),
        ({"vectors_per_thread": 0}, "0 vectors for each thread: one is needed"),
    ],
)
def test_what_is_refused(change: dict[str, int], message: str) -> None:
    assert FITS.objections(spec(1000), SMEM_BYTES) == []
    assert any(message in reason for reason in replace(FITS, **change).objections(spec(1000), SMEM_BYTES))


def test_shared_memory_is_counted() -> None:
    config = SoftmaxConfig(vector=8, vectors_per_thread=1, threads_per_row=512, rows_per_cta=1, cluster=16)
    assert config.smem_bytes == 8 * 16 * 16 + 8
    assert "2056 bytes of shared memory: 2000 are the most" in config.objections(spec(1000), 2000)
    assert FITS.smem_bytes == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width 0 is not from 1 to"),
        ({"width": 2**31}, "width 2147483648 is not from 1 to"),
        ({"dtype": torch.int8}, "dtype is int8: one of float32, float16, bfloat16 is needed"),
        ({"vector": 3}, "vector 3 is not 1, 2, 4 or 8"),
        ({"width": 12, "vector": 8}, "width 12 is not a multiple of the vector 8"),
    ],
)
def test_specs_that_are_none(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SoftmaxSpec(**{"width": 8, "dtype": torch.float32, "out_dtype": torch.float32, **fields})
