# SPDX-License-Identifier: Apache-2.0
"""The mbarriers of the SM100 kernels of absorbed MLA: stages, and the number of arrivals of each role."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mbarriers import (
    LOAD_WARPS,
    MMA_WARPS,
    SCHEDULER_WARPS,
    TMA,
    UMMA,
    WARPS_PER_WARPGROUP,
    MbarArray,
    dequant_mbar_arrays,
)
from dsl_backend.attention.cute.mla_configs import PARTS
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR
from dsl_backend.attention.cute.sm100.mla_configs import S_STAGES, MlaConfig, TwoCtaMlaConfig
from dsl_backend.attention.cute.sm100.mla_fp8_configs import Q_SCALE_STAGES, Fp8MlaConfig

SOFTMAX_WARPS = QUERY_WARPS = WARPS_PER_WARPGROUP


class Barriers(NamedTuple):
    """Arrays of mbarriers: `full` is signalled when something was written, `empty` when it was read.

    Attributes:
        k_full, k_empty: of each part of a row of K, by stage.
        s_full: S of an S stage, in tensor memory.
        p_full: P is in shared memory, and O is rescaled.
        o_full: O has the last P added, so that both may be overwritten.
        k_loaded, k_taken: full and empty of the fp8 stages of K, from which DequantWarps fill the 16-bit ones.
        q_scale_full: of the kernel with e4m3 products, the scales of Q's rows, by parity of the work tile.
    """

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    k_loaded: cute.Pointer | None = None
    k_taken: cute.Pointer | None = None
    q_scale_full: cute.Pointer | None = None


class TwoCtaBarriers(NamedTuple):
    """As `Barriers`. q_full, k_full, v_full and p_full are the leader's for both CTAs; MMAs signal both CTAs' barriers.

    Attributes:
        v_full, v_empty: of the columns of V of each PV MMA, by stage.
    """

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer


def mbar_arrays(config: MlaConfig) -> dict[str, MbarArray]:
    """The arrays of a configuration, by their field of Barriers, in the order of allocation."""
    # In a cluster, a 16-bit stage is written by the TMA of every CTA, and an fp8 stage too: their readers in every CTA
    # signal all of them. A stage that DequantWarps fill belongs to one CTA.
    fp8, cluster = config.dequant_stages, config.cluster
    dequant_warps = WARPS_PER_WARPGROUP if fp8 else 0
    k_parts = PARTS * config.stages
    arrays = {
        "q_full": MbarArray(1, TMA),
        "q_empty": MbarArray(1, UMMA),
        "k_full": MbarArray(k_parts, dequant_warps or TMA),
        "k_empty": MbarArray(k_parts, UMMA if fp8 else cluster * UMMA),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, SOFTMAX_WARPS + LOAD_WARPS + MMA_WARPS + dequant_warps),
        "s_full": MbarArray(S_STAGES, UMMA),
        "p_full": MbarArray(1, SOFTMAX_WARPS),
        "o_full": MbarArray(1, UMMA),
    }
    if fp8:
        arrays |= dequant_mbar_arrays("k", PARTS * fp8, cluster * dequant_warps)
    return arrays


def fp8_mbar_arrays(config: Fp8MlaConfig) -> dict[str, MbarArray]:
    """The arrays of the kernel with e4m3 products: a warpgroup fills Q, in place of TMA."""
    arrays = mbar_arrays(config)
    work_empty = arrays["work_empty"]
    return arrays | {
        "q_full": MbarArray(1, QUERY_WARPS),
        "q_scale_full": MbarArray(Q_SCALE_STAGES, QUERY_WARPS),
        "work_empty": work_empty._replace(arrivals=work_empty.arrivals + QUERY_WARPS),
    }


def two_cta_mbar_arrays(config: TwoCtaMlaConfig, dv_tiles: int, cta_rank: int | cutlass.Int32) -> dict[str, MbarArray]:
    """The arrays of a configuration, by their field of TwoCtaBarriers, in the order of allocation.

    Args:
        dv_tiles: PV MMAs of a tile.
        cta_rank: only the leader, of rank 0, has an MMA warp that reads work tiles.
    """
    k_parts, v_parts = PARTS * config.stages, dv_tiles * config.stages
    return {
        "q_full": MbarArray(1, TMA),
        "q_empty": MbarArray(1, UMMA),
        "k_full": MbarArray(k_parts, TMA),
        "k_empty": MbarArray(k_parts, UMMA),
        "v_full": MbarArray(v_parts, TMA),
        "v_empty": MbarArray(v_parts, UMMA),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, SOFTMAX_WARPS + LOAD_WARPS + MMA_WARPS - cta_rank),
        "s_full": MbarArray(S_STAGES, UMMA),
        "p_full": MbarArray(1, CTA_PAIR * SOFTMAX_WARPS),
        "o_full": MbarArray(1, UMMA),
    }
