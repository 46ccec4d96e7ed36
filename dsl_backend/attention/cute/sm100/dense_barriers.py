# SPDX-License-Identifier: Apache-2.0
"""The mbarriers of the dense SM100 kernels: stages, and the number of arrivals of each role.

Softmax and correction threads each arrive for their row. For the other roles, see `cute/mbarriers.py`.
"""

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
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR, TWO_S_STAGES, DenseConfig
from dsl_backend.attention.cute.sm100.fp8_configs import Fp8DenseConfig

QUERY_WARPS = WARPS_PER_WARPGROUP


class Barriers(NamedTuple):
    """Arrays of mbarriers: `full` is signalled when something was written, `empty` when it was read.

    `k_loaded` and `k_taken` are full and empty of the fp8 stages of K, from which DequantWarps fill the 16-bit ones;
    `v_loaded` and `v_taken` those of V.

    Attributes:
        s_full: S of an S stage, in tensor memory.
        p_full: P of an S stage is in tensor memory, and its O is rescaled, or free for a new work tile.
        late_p_full: P of the tile's last keys is too, where p_full is of those before.
        s_empty, p_empty: softmax warps have S in registers, and P V is done, where the S stages share S.
        o_full: O of all S stages is complete.
        stats_full, stats_empty: a row's statistics in shared memory, from softmax to correction warps.
        q_scale_full: of the kernel with e4m3 products, the scales of Q's rows.
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
    stats_full: cute.Pointer
    stats_empty: cute.Pointer
    k_loaded: cute.Pointer | None = None
    k_taken: cute.Pointer | None = None
    v_loaded: cute.Pointer | None = None
    v_taken: cute.Pointer | None = None
    late_p_full: cute.Pointer | None = None
    s_empty: cute.Pointer | None = None
    p_empty: cute.Pointer | None = None
    q_scale_full: cute.Pointer | None = None


class TwoCtaBarriers(NamedTuple):
    """As `Barriers`. q_full, k_full, v_full and p_full are the leader's for both CTAs; MMAs signal both CTAs' barriers.

    Attributes:
        v_empty: P V of the tile is done too.
        stats_full: by S stage; the last one is of the end of a work tile.
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
    stats_full: cute.Pointer
    stats_empty: cute.Pointer


class SwapABBarriers(NamedTuple):
    """As `Barriers`; MMAs alone read Q, and softmax warps rescale O themselves."""

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


AnyBarriers = Barriers | TwoCtaBarriers | SwapABBarriers


def load_mbar_arrays(
    config: DenseConfig, kv_producer: int, q_consumer: int, work_consumer_warps: int | cutlass.Int32
) -> dict[str, MbarArray]:
    """Of Q, K, V and work tiles, in the order of allocation; arguments: arrivals of their producers and consumers."""
    return {
        "q_full": MbarArray(config.query_stages, TMA),
        "q_empty": MbarArray(config.query_stages, q_consumer),
        "k_full": MbarArray(config.stages, kv_producer),
        "k_empty": MbarArray(config.stages, UMMA),
        "v_full": MbarArray(config.stages, kv_producer),
        "v_empty": MbarArray(config.stages, UMMA),
        "work_full": MbarArray(WORK_TILE_STAGES, SCHEDULER_WARPS),
        "work_empty": MbarArray(WORK_TILE_STAGES, work_consumer_warps),
    }


def mbar_arrays(config: DenseConfig) -> dict[str, MbarArray]:
    """The arrays of a configuration, by their field of Barriers, in the order of allocation."""
    warpgroups, s_stages = config.softmax_warpgroups, config.s_stages
    softmax_warps, correction_warps = warpgroups * WARPS_PER_WARPGROUP, WARPS_PER_WARPGROUP
    two_s = s_stages > warpgroups
    dequant_warps = WARPS_PER_WARPGROUP if config.dequant_stages else 0
    mma_warps = MMA_WARPS + config.shared_s
    work_consumers = softmax_warps + correction_warps + LOAD_WARPS + mma_warps + dequant_warps
    row_threads = WARPGROUP
    q_consumer = UMMA if config.direct_output else correction_warps
    arrays = load_mbar_arrays(config, dequant_warps or TMA, q_consumer, work_consumers)
    arrays |= {
        "s_full": MbarArray(s_stages, UMMA),
        "p_full": MbarArray(s_stages, row_threads + row_threads),  # softmax and correction
        "o_full": MbarArray(1, UMMA),
        # The last one of a warpgroup with two S stages is of the end of a work tile.
        "stats_full": MbarArray(config.stats_stages + two_s, row_threads),
        "stats_empty": MbarArray(warpgroups, row_threads),
    }
    if config.late_p_keys:
        arrays["late_p_full"] = MbarArray(s_stages, row_threads)
    if config.shared_s:
        arrays |= {"s_empty": MbarArray(1, row_threads), "p_empty": MbarArray(s_stages, UMMA)}
    if config.dequant_stages:
        arrays |= dequant_mbar_arrays("kv", config.dequant_stages, dequant_warps)
    return arrays


def fp8_mbar_arrays(config: Fp8DenseConfig) -> dict[str, MbarArray]:
    """The arrays of the kernel with e4m3 products: warps fill Q, in place of TMA. That for one work tile has as many
    arrivals as softmax warps, which fill Q of the first one.
    """
    arrays, softmax_warps = mbar_arrays(config), config.softmax_warpgroups * WARPS_PER_WARPGROUP
    work_empty = arrays["work_empty"]
    return arrays | {
        "q_full": MbarArray(config.query_stages, softmax_warps),
        "q_scale_full": MbarArray(config.scale_stages, softmax_warps),
        "work_empty": work_empty._replace(arrivals=work_empty.arrivals + QUERY_WARPS),
    }


def two_cta_mbar_arrays(config: DenseConfig, cta_rank: int | cutlass.Int32) -> dict[str, MbarArray]:
    """The same by the fields of TwoCtaBarriers. The leader alone, of rank 0, has an MMA warp."""
    softmax_warps = correction_warps = WARPS_PER_WARPGROUP
    work_consumers = softmax_warps + correction_warps + LOAD_WARPS + MMA_WARPS - cta_rank
    row_threads = WARPGROUP
    arrays = load_mbar_arrays(config, TMA, correction_warps, work_consumers)
    arrays |= {
        "s_full": MbarArray(TWO_S_STAGES, UMMA),
        "p_full": MbarArray(TWO_S_STAGES, CTA_PAIR * (row_threads + row_threads)),  # softmax and correction
        "stats_full": MbarArray(TWO_S_STAGES + 1, row_threads),
        "stats_empty": MbarArray(1, row_threads),
    }
    return arrays


def swap_ab_mbar_arrays(config: DenseConfig) -> dict[str, MbarArray]:
    """The same by the fields of SwapABBarriers."""
    s_stages = config.softmax_warpgroups
    work_consumers = s_stages * WARPS_PER_WARPGROUP + LOAD_WARPS + MMA_WARPS
    arrays = load_mbar_arrays(config, TMA, UMMA, work_consumers)
    arrays |= {
        "s_full": MbarArray(s_stages, UMMA),
        "p_full": MbarArray(s_stages, WARPGROUP),
        "o_full": MbarArray(1, UMMA),
    }
    return arrays
