# SPDX-License-Identifier: Apache-2.0
"""The mbarriers of the SM90 kernel: stages, and the number of arrivals of each role."""

from typing import NamedTuple

from cutlass import cute

from dsl_backend.attention.cute.mbarriers import (
    LOAD_WARPS,
    SCHEDULER_WARPS,
    TMA,
    WARPS_PER_WARPGROUP,
    MbarArray,
    dequant_mbar_arrays,
)
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.fp8_configs import Fp8Config
from dsl_backend.attention.cute.transpose import TRANSPOSE_WARPS


class Barriers(NamedTuple):
    """Arrays of mbarriers in pairs: `full` for the producer of a stage, `empty` for its consumers.

    `k_loaded` and `k_taken` are full and empty of the fp8 stages of K, from which DequantWarps fill the 16-bit ones;
    `v_loaded` and `v_taken` those of V. The kernel with e4m3 products has those of V alone, from which TransposeWarps
    fill the stages of `v_full`.
    """

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    k_loaded: cute.Pointer | None = None
    k_taken: cute.Pointer | None = None
    v_loaded: cute.Pointer | None = None
    v_taken: cute.Pointer | None = None


def mbar_arrays(config: DenseConfig) -> dict[str, MbarArray]:
    """The arrays that a configuration has, by their field of Barriers, in the order of allocation."""
    q, kv, fp8 = config.query_stages, config.stages, config.dequant_stages
    mma_warps = config.groups * WARPS_PER_WARPGROUP
    dequant_warps = WARPS_PER_WARPGROUP if fp8 else 0
    kv_producer = dequant_warps or TMA
    arrays = {
        "q_full": MbarArray(q, TMA),
        "q_empty": MbarArray(q, mma_warps),
        "k_full": MbarArray(kv, kv_producer),
        "k_empty": MbarArray(kv, mma_warps),
        "v_full": MbarArray(kv, kv_producer),
        "v_empty": MbarArray(kv, mma_warps),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, mma_warps + dequant_warps + LOAD_WARPS),
    }
    if fp8:
        arrays |= dequant_mbar_arrays("kv", fp8, dequant_warps)
    return arrays


def fp8_mbar_arrays(config: Fp8Config) -> dict[str, MbarArray]:
    """The same of the kernel with e4m3 products, in which V has stages as it is stored and stages transposed."""
    q, kv = config.query_stages, config.stages
    mma_warps = config.groups * WARPS_PER_WARPGROUP
    return {
        "q_full": MbarArray(q, TMA),
        "q_empty": MbarArray(q, mma_warps),
        "k_full": MbarArray(kv, TMA),
        "k_empty": MbarArray(kv, mma_warps),
        "v_full": MbarArray(kv, TRANSPOSE_WARPS),
        "v_empty": MbarArray(kv, mma_warps),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, mma_warps + TRANSPOSE_WARPS + LOAD_WARPS),
        **dequant_mbar_arrays("v", kv, TRANSPOSE_WARPS),
    }
