# SPDX-License-Identifier: Apache-2.0
"""Configurations of softmax: every width has one, and objections say what is wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.rows import ACCESS_BYTES, DTYPES, MAX_WIDTH
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.registry import named
from dsl_backend.softmax.configs import SoftmaxConfig, default_config, estimate, spreads
from dsl_backend.softmax.spec import SoftmaxSpec

H200, H100 = named("sm_90a").chips
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


def default(problem: SoftmaxSpec, chip: Chip = H200) -> SoftmaxConfig:
    return default_config(problem, chip)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_every_width_is_served(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for width in WIDTHS:
        problem = spec(width, dtype, out_dtype)
        config = default(problem)
        assert config.objections(problem, SMEM_BYTES) == [], f"{problem}: {config}"
        assert config.vector * max(dtype.itemsize, out_dtype.itemsize) <= ACCESS_BYTES
        assert config.two_pass == (width > 524288), f"{problem}: {config}"
        # No thread of a row is without work, except for the rounding to powers of two.
        assert config.two_pass or config.tile_elements - width < max(width, config.threads_per_row * config.cluster * 8)


def test_threads_and_clusters_of_a_width() -> None:
    def level(width: int, **more: Any) -> tuple[int, int]:
        config = default(replace(spec(width), **more))
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
    # Spreads over whole warps, by the estimate; not for accesses of less than 16 bytes.
    assert level(20552) == (128, 4)
    assert level(18432) == (192, 2)
    assert level(65528) == (128, 8)
    assert level(65536) == (256, 4)
    assert level(65544) == (160, 8)
    assert level(102400) == (160, 16)
    assert level(102400, vector=4) == (256, 16)
    assert level(102400, out_dtype=torch.float32) == (256, 16)
    assert level(128256) == (128, 16)
    assert level(131072) == (128, 16)
    assert level(201088) == (224, 16)
    assert level(262144) == (256, 16)


def test_ctas_on_an_sm() -> None:
    """As many as registers suffice for; exponentials twice only if that makes room for more."""

    def found(width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int, bool]:
        config = default(spec(width, dtype))
        return config.vectors_per_thread, config.ctas_per_sm, config.recompute

    assert found(4096) == (2, 8, False)
    assert found(8192) == (2, 4, False)
    assert found(16384) == (2, 8, False)
    assert found(20552) == (6, 10, True)
    assert found(32768) == (8, 3, False)
    assert found(102400) == (5, 7, False)
    assert found(151936) == (8, 7, True)
    assert found(524288) == (8, 2, True)
    assert found(32000, torch.float32) == (8, 9, False)
    # Rows of float32 take a unit of registers more, whether they fill their tile or not.
    assert found(131072, torch.float32) == (16, 5, False)
    assert found(151936, torch.float32) == (15, 4, False)


# The winner by name of each row that an H200 timed (benchmarks/softmax; see docs/performance/softmax-and-norm.md), or a
# choice within 2 % of it: threads of a CTA, CTAs, vectors, computed twice, late, predicated.
TIMED = (
    (1072, torch.bfloat16, (64, 1, 3, False, True, False)),
    (2144, torch.bfloat16, (128, 1, 3, False, True, False)),
    (864, torch.bfloat16, (32, 1, 4, False, True, False)),
    (568, torch.float32, (32, 1, 5, False, True, False)),
    (20552, torch.bfloat16, (128, 4, 6, True, True, True)),
    (32000, torch.float32, (128, 8, 8, False, True, True)),
    (76296, torch.bfloat16, (160, 8, 8, True, False, True)),
    (102400, torch.bfloat16, (160, 16, 5, False, False, False)),
    (128256, torch.bfloat16, (128, 16, 8, True, True, True)),
    (151936, torch.bfloat16, (160, 16, 8, True, False, True)),
    (151936, torch.float32, (160, 16, 15, False, False, True)),
    (4096, torch.bfloat16, (256, 1, 2, False, False, False)),
    (8192, torch.bfloat16, (512, 1, 2, False, False, False)),
    (16384, torch.bfloat16, (256, 4, 2, False, False, False)),
)


@pytest.mark.parametrize(("width", "dtype", "expected"), TIMED, ids=lambda one: str(one))
def test_what_was_timed_is_chosen(width: int, dtype: torch.dtype, expected: tuple[object, ...]) -> None:
    config = default(spec(width, dtype))
    names = ("threads_per_row", "cluster", "vectors_per_thread", "recompute", "late_dependents", "predicated")
    assert tuple(getattr(config, name) for name in names) == expected


def test_late_launches_end_where_ctas_get_larger() -> None:
    for dtype in DTYPES:
        for width in WIDTHS:
            config = default(spec(width, dtype))
            whole = config.vector * dtype.itemsize == ACCESS_BYTES
            fine = config.threads == 128 and whole
            assert config.late_dependents == fine, f"{dtype} {width}"
    assert [default(spec(width)).late_dependents for width in (582, 2048, 4088, 4104)] == [
        False,
        True,
        True,
        False,
    ]
    assert [default(spec(width)).predicated for width in (582, 4088, 4104, 4099)] == [True, False, True, False]


def test_rows_that_caches_keep() -> None:
    """Those that gained: three powers of two of 16-bit elements, aligned, no logarithms."""

    def kept(width: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> bool:
        return default(replace(spec(width, dtype), **more)).evict_last

    assert [kept(width) for width in (4096, 8192, 8200, 16384, 32768, 49152, 65536)] == [0, 1, 0, 1, 1, 0, 0]
    assert kept(8192, torch.float16)
    assert not kept(8192, torch.float32)
    assert not kept(8192, log=True)
    assert not kept(8192, vector=4)
    assert not kept(32768, log=True)


def test_the_estimate_prefers_much_in_flight_and_small_ctas() -> None:
    problem = spec(102400)
    found = list(spreads(problem))
    best = min(found, key=lambda one: estimate(one, problem, H200))
    assert best == default(problem)
    assert estimate(replace(best, ctas_per_sm=4), problem, H200) > estimate(best, problem, H200)
    assert estimate(replace(best, recompute=True), problem, H200) > estimate(best, problem, H200)
    larger = replace(best, threads_per_row=320, cluster=8, ctas_per_sm=best.ctas_per_sm // 2 + 1)
    assert larger.tile_elements == best.tile_elements
    assert estimate(replace(larger, ctas_per_sm=best.ctas_per_sm // 2), problem, H200) > estimate(best, problem, H200)
    # CTAs of 4 KB start too often, and rows computed twice spill their registers where they have one CTA.
    assert all(one.cluster > 1 and problem.width * 2 >= one.cluster * 8192 for one in found)


def test_a_chip_with_less_bandwidth_needs_less_in_flight() -> None:
    """Rows that an H200 has in four CTAs, which hold more of them at once, an H100 has in eight.

    All but its bandwidth and its L2, which no rule asks, is an H200's. What no spread is, is the same on every chip.
    """
    problem = spec(20552, torch.float32)
    on_h200, on_h100 = default(problem, H200), default(problem, H100)
    assert (on_h200.cluster, on_h100.cluster) == (4, 8)
    assert replace(H200, memory_gb_s=H100.memory_gb_s, l2_bytes=H100.l2_bytes) == H100
    held = [one.ctas_per_sm * one.threads * one.vectors_per_thread for one in (on_h200, on_h100)]
    assert held[1] < held[0]
    # Twice the clock leaves more time for exponentials that are computed twice.
    twice = replace(on_h200, recompute=True)
    faster = replace(H200, clock_mhz=2 * H200.clock_mhz)
    assert estimate(on_h200, problem, faster) == estimate(on_h200, problem, H200)
    assert estimate(twice, problem, faster) < estimate(twice, problem, H200)
    for width in (1072, 4096, 8192, 32768, 600000):
        assert default(spec(width), H100) == default(spec(width), H200)


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
        ({"vector": 4, "vectors_per_thread": 8, "evict_last": True}, "priorities of loads of 8 bytes: 16 bytes"),
        ({"predicated": True, "evict_last": True}, "priorities of predicated loads: 16 bytes without a predicate"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
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
