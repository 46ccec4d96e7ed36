# SPDX-License-Identifier: Apache-2.0
"""Configurations of RMSNorm, and the kernels that are compiled for a model ahead of time."""

import math
from typing import Any

import pytest
import torch

from dsl_backend.norm import launch, precompile
from dsl_backend.norm.configs import NormConfig, default_config
from dsl_backend.norm.spec import FP8, NormSpec, NormTensors, Scaling
from dsl_backend.rows import ACCESS_BYTES, DTYPES
from dsl_backend.runtime import model
from dsl_backend.runtime import target as targets

SMEM_BYTES = 227 * 1024
WIDTHS = sorted({*range(1, 70), *(2**n + d for n in range(6, 18) for d in (-1, 0, 1, 8)), 7168, 18432, 262144})
CONFIG = {"num_attention_heads": 8, "hidden_size": 1024, "vocab_size": 1000, "dtype": "bfloat16"}


def spec(width: int, dtype: torch.dtype = torch.bfloat16, **more: object) -> NormSpec:
    fields = {"out_dtype": dtype, "weight_dtype": dtype, "residual": True, "vector": math.gcd(8, width), **more}
    return NormSpec(width=width, dtype=dtype, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [False, True])
def test_every_width_up_to_a_quarter_million_is_served(dtype: torch.dtype, quantized: bool) -> None:
    more = {"out_dtype": FP8, "scaling": Scaling.TOKEN} if quantized else {}
    for width in WIDTHS:
        problem = spec(width, dtype, **more)
        config = default_config(problem)
        assert config.objections(problem, SMEM_BYTES) == [], f"{problem}: {config}"
        assert config.vector * dtype.itemsize <= ACCESS_BYTES
        # No thread of a row is without work, except for the rounding to powers of two.
        assert config.tile_elements - width < max(width, config.threads_per_row * config.cluster * 8)


def test_threads_and_clusters_of_a_width() -> None:
    def level(width: int, **more: Any) -> tuple[int, int]:
        config = default_config(spec(width, **more))
        return config.threads_per_row, config.cluster

    assert level(16384, residual=False) == (256, 2)
    assert level(32768, residual=False) == (128, 8)
    assert level(32768, residual=False, vector=4) == (256, 4)
    assert level(32760, residual=False) == (256, 4)

    assert level(8) == (1, 1)
    assert level(128) == (8, 1)
    assert level(4096) == (128, 1)
    assert level(8192) == (256, 1)
    assert level(16384) == (512, 1)
    assert level(16392) == (256, 4)
    assert level(32768) == (256, 4)
    assert level(131072) == (256, 16)
    assert level(262144) == (512, 16)


@pytest.mark.parametrize("width", [1024, 4096, 8192, 65536, 131072])
def test_an_sm_reads_for_several_rows(width: int) -> None:
    """64 KB of rows in flight where 64 bytes of a thread, as many of weight and 32 registers fit four times 256."""
    for more, least in (({"residual": False}, 64), ({}, 48)):
        problem = spec(width, **more)
        config = default_config(problem)
        assert config.ctas_per_sm > 1
        assert config.ctas_per_sm * config.threads * config.vector * config.vectors_per_thread * 2 >= least * 1024
        # Rows that end within a tile need more registers.
        assert default_config(spec(width - 8)).ctas_per_sm <= config.ctas_per_sm
    assert default_config(spec(width - 1)).ctas_per_sm == 1, "accesses of one element"


def test_rows_that_caches_keep() -> None:
    """Those that gained: three powers of two of 16-bit elements, aligned, without residual and scales."""

    def kept(width: int, dtype: torch.dtype = torch.bfloat16, **more: object) -> bool:
        return default_config(spec(width, dtype, **{"residual": False, **more})).evict_last

    assert [kept(width) for width in (4096, 7168, 8192, 16384, 24576, 32768, 65536)] == [0, 0, 1, 1, 0, 1, 0]
    assert kept(8192, torch.float16, weight_dtype=None)
    assert not kept(8192, residual=True)
    assert not kept(8192, torch.float32)
    assert not kept(8192, out_dtype=torch.float32)
    assert not kept(8192, out_dtype=FP8, scaling=Scaling.TOKEN)
    assert not kept(8192, vector=4), "loads of 8 bytes"


def test_rows_that_whole_warps_fill_exactly() -> None:
    """Those of 4096 to 8192 columns of 16 bits whose tile is idle by an eighth or more otherwise."""

    def threads(width: int, dtype: torch.dtype = torch.bfloat16, **more: object) -> int:
        return default_config(spec(width, dtype, **more)).threads_per_row

    exact = {width: threads(width) for width in range(4608, 8193, 512)}
    assert exact == {4608: 288, 5120: 320, 5632: 256, 6144: 256, 6656: 416, 7168: 448, 7680: 256, 8192: 256}
    assert threads(7168, residual=False) == threads(7168, torch.float16, weight_dtype=None) == 448
    others = ({"vector": 4}, {"out_dtype": torch.float32}, {"out_dtype": FP8, "scaling": Scaling.TOKEN})
    assert [threads(7168, **one) for one in others] == [256, 256, 256]  # type: ignore[arg-type]
    assert threads(7168, torch.float32) == 256
    assert threads(7168 - 8) == 256, "no whole warps"
    assert default_config(spec(3584)).threads_per_row == 128, "narrower"
    timed = default_config(spec(7168, residual=False))
    assert (timed.vectors_per_thread, timed.ctas_per_sm, timed.tile_elements) == (2, 3, 7168)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors_per_thread": 3}, "holds 768 elements of 1000"),
        ({"vector": 16}, "vectors of 16 elements: rows are aligned to 8, and 8 are 16 bytes"),
        ({"vectors_per_thread": 20}, "272 registers for each of 128 threads, 1 CTAs on an SM: 255 for a thread"),
        ({"ctas_per_sm": 16}, "80 registers for each of 128 threads, 16 CTAs on an SM"),
        ({"vector": 4, "vectors_per_thread": 8, "evict_last": True}, "priorities of loads of 8 bytes: 16 are needed"),
    ],
)
def test_what_is_refused(change: dict[str, int], message: str) -> None:
    fields = {"vector": 8, "vectors_per_thread": 4, "threads_per_row": 32, "rows_per_cta": 4}
    assert NormConfig(**fields).objections(spec(1000), SMEM_BYTES) == []
    reasons = NormConfig(**{**fields, **change}).objections(spec(1000), SMEM_BYTES)
    assert any(message in reason for reason in reasons), reasons


class TestPrecompile:
    @pytest.mark.parametrize("kind", ["llama", "gemma2"])
    @pytest.mark.parametrize("hidden", [1024, 2880, 100])
    def test_norms_of_a_model_get_a_kernel_of_the_list(self, hidden: int, kind: str) -> None:
        host = pytest.importorskip("dsl_backend.norm.cute.host", reason="CuTe DSL is not installed")
        shape = model.shape_of(CONFIG | {"hidden_size": hidden, "model_type": kind, "head_dim": 64})
        listed = [one.key for one in precompile.precompile_specs(shape, targets.from_arch("sm_90a"))]
        assert len(listed) == 2
        for residual in (False, True):
            x, added = (torch.empty(3, hidden, dtype=torch.bfloat16) for _ in range(2))
            rows = added if residual else None
            weight = torch.empty(hidden, dtype=torch.bfloat16)
            found = launch.spec_of(
                NormTensors(x, rows, weight, None, torch.empty_like(x), rows, None), 1.0 if kind == "gemma2" else 0.0
            )
            assert host.key_of(found, default_config(found)) in listed

    def test_other_gpus_have_none(self) -> None:
        shape, target = model.shape_of(CONFIG), targets.from_arch("sm_80")
        assert list(precompile.precompile_specs(shape, target)) == []
        assert all(precompile.served_by_others(shape, target).values())
