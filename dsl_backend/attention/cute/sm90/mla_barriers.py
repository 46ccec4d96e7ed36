# SPDX-License-Identifier: Apache-2.0
"""The mbarriers of the SM90 kernel of absorbed MLA: stages, and arrivals by who arrives."""

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
from dsl_backend.attention.cute.mla_configs import PARTS
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS, MlaConfig
from dsl_backend.attention.cute.sm90.mla_fp8_configs import Fp8MlaConfig
from dsl_backend.attention.cute.transpose import TRANSPOSE_WARPS


class Barriers(NamedTuple):
    """Arrays of mbarriers in pairs: `full` for the producer of a stage, `empty` for its consumers.

    Attributes:
        k_full, k_empty: of each part of a row of K, by stage.
        k_loaded, k_taken: full and empty of the fp8 stages of K, from which DequantWarps fill the 16-bit ones.
    """

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    k_loaded: cute.Pointer | None = None
    k_taken: cute.Pointer | None = None


class Fp8Barriers(NamedTuple):
    """The same of the kernel with e4m3 products: stages of K, and of V transposed, each of whole tiles.

    Attributes:
        v_loaded, v_taken: `k_full` and `k_empty`, as TransposeWarps call them.
    """

    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    v_loaded: cute.Pointer | None = None
    v_taken: cute.Pointer | None = None


def mbar_arrays(config: MlaConfig) -> dict[str, MbarArray]:
    """The arrays of a configuration, by their field of Barriers, in the order of allocation."""
    fp8, cluster = config.dequant_stages, config.cluster
    mma_warps = GROUPS * WARPS_PER_WARPGROUP
    dequant_warps = WARPS_PER_WARPGROUP if fp8 else 0
    # One MMA warpgroup releases a part. Its warps signal every CTA of the cluster, as the TMA of each writes the stage;
    # a stage that DequantWarps fill belongs to one CTA.
    k_consumers = WARPS_PER_WARPGROUP if fp8 else cluster * WARPS_PER_WARPGROUP
    arrays = {
        "q_full": MbarArray(1, TMA),
        "q_empty": MbarArray(1, mma_warps),
        "k_full": MbarArray(PARTS * config.stages, dequant_warps or TMA),
        "k_empty": MbarArray(PARTS * config.stages, k_consumers),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, mma_warps + LOAD_WARPS + dequant_warps),
    }
    if fp8:
        arrays |= dequant_mbar_arrays("k", PARTS * fp8, cluster * dequant_warps)
    return arrays


def fp8_mbar_arrays(config: Fp8MlaConfig) -> dict[str, MbarArray]:
    """The arrays of the kernel with e4m3 products. One MMA warpgroup and the transposition warps read a stage of K."""
    mma_warps = GROUPS * WARPS_PER_WARPGROUP
    k_consumers = WARPS_PER_WARPGROUP + TRANSPOSE_WARPS
    return {
        "k_full": MbarArray(config.dequant_stages, TMA),
        "k_empty": MbarArray(config.dequant_stages, config.cluster * k_consumers),
        "v_full": MbarArray(config.stages, TRANSPOSE_WARPS),
        "v_empty": MbarArray(config.stages, mma_warps),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, mma_warps + LOAD_WARPS + TRANSPOSE_WARPS),
    }
