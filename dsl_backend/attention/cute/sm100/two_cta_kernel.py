# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100 whose blocks multiply in pairs (cta_group::2), for whole query tiles of wide values.

Each block has 128 of a tile's 256 query rows, with their scores, weights and sums in tensor memory. For scores it holds
half of a tile's keys, for sums half of its values' columns; the pair's products take both halves from where they are,
so that a block reads and keeps half of what it would alone. Scores have two places: the next tile's are made while the
softmax works.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from dsl_backend.attention.cute.args import DenseLoads, Outputs, TiledMmas
from dsl_backend.attention.cute.loader.dense import box_rows
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.two_cta import TileIdxMessage, TwoCtaTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, chunk
from dsl_backend.attention.cute.sm100.dense_configs import (
    PAIR,
    PAIR_CORRECT,
    PAIR_LOAD,
    PAIR_MULTIPLY,
    PAIR_SCHEDULE,
    ROWS,
    TENSOR_COLUMNS,
    WARP,
)
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.kv_stages import OwnRings
from dsl_backend.attention.cute.sm100.two_cta_correction import TwoCtaCorrectionWarps
from dsl_backend.attention.cute.sm100.two_cta_load import TwoCtaLoadWarp
from dsl_backend.attention.cute.sm100.two_cta_mma import TwoCtaMmaWarp
from dsl_backend.attention.cute.sm100.two_cta_softmax import TwoCtaSoftmaxWarps


class TwoCtaBarriers(NamedTuple):
    """As `forward.Barriers`. Of k_full, v_full, q_full and p_full the first block's count for both; what products
    signal, they signal in both.

    Attributes:
        s_full, p_full: of each place of scores.
        v_empty: the sums of a tile are there as well.
        l_full: what softmax tells the correction, by the place of scores; the last one is of an item's end.
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
    l_full: cute.Pointer
    l_empty: cute.Pointer


class TwoCtaForward(DenseForward):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands.

    Attributes:
        box, value_rows: keys, and values, of one tensor copy.
        own_v: columns of values that a block has.
    """

    group, num_ctas = tcgen05.CtaGroup.TWO, PAIR
    cluster = (PAIR, 1, 1)

    def __init__(self, key: DenseKey):
        super().__init__(key)
        self.places, self.rests = PAIR, False
        self.own_v = self.dims_v // PAIR
        self.chunk_v = self.copied_v = chunk(self.own_v)
        self.box, self.value_rows = box_rows(key.page_size, self.tile_n // PAIR), self.box

    def value_box(self):
        return self.boxed(self.value_rows, self.chunk_v), (self.value_rows, self.chunk_v)

    def load_op(self):
        return cpasync.CopyBulkTensorTileG2SOp(self.group)

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: DenseLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        allocator = cutlass.utils.SmemAllocator()
        q_layout, out_layout = self.query_tiles(self.dims), self.query_tiles(self.dims_v)
        queries = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        q_place = allocator.allocate(queries * 2, byte_alignment=1024)
        sQ, sOut = self.swizzled(q_place, q_layout), self.swizzled(q_place, out_layout)
        places = OwnRings(self, allocator, self.tile_n // PAIR, self.own_v)
        items = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        statistics = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, 2, PAIR)), byte_alignment=16)
        place = allocator.allocate_array(cutlass.Int32, 1)
        sizes = [config.query_stages] * 2 + [config.stages] * 4 + [WORK_TILE_STAGES] * 2 + [PAIR] * 2 + [PAIR + 1, 1]
        barriers = TwoCtaBarriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))
        claims = TileIdxMessage.allocate(allocator)

        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = WARPGROUP // WARP
        if warp == PAIR_LOAD:
            with cute.arch.elect_one():
                # Copies, for both blocks, and products arrive once; threads that end a tile each for itself. The
                # mailbox is read by both warpgroups, who loads, and in the first block who multiplies.
                readers = 2 * group + 2 - rank
                counts = [1, group, 1, 1, 1, 1, 1, readers, 1, PAIR * 2 * WARPGROUP, WARPGROUP, WARPGROUP]
                for pointer, size, count in zip(barriers, sizes, counts, strict=True):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
                cute.arch.mbarrier_init(claims.mbar_full, 1)
                cute.arch.mbarrier_init(claims.mbar_empty, 1)
            cute.arch.mbarrier_init_fence()
        if warp == PAIR_MULTIPLY:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, place, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
        # The other's copies, products and arrivals need the barriers.
        self.meet()

        work_pipeline = WorkTilePipeline(items, barriers.work_full, barriers.work_empty)
        if warp < group:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            TwoCtaSoftmaxWarps(self, work_pipeline, barriers, base, statistics, requests, scoring, 0).run()
        elif warp < PAIR_CORRECT + group:
            cute.arch.setmaxregister_decrease(self.registers.correct)
            TwoCtaCorrectionWarps(
                self, work_pipeline, barriers, base, statistics, places, sOut, outputs, requests, scoring
            ).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if warp == PAIR_MULTIPLY and rank == 0:
                TwoCtaMmaWarp(self, work_pipeline, mmas, barriers, base, sQ, places).run()
            if warp == PAIR_LOAD:
                TwoCtaLoadWarp(self, work_pipeline, barriers, loads, sQ, places, requests, rank).run()
            if warp == PAIR_SCHEDULE:
                tokens = PAIR * self.tokens_per_tile
                TwoCtaTileScheduler(
                    self.key, work_pipeline, tokens, self.tile_n, requests, scheduler_workspace, claims, rank
                ).run()
        # A block's memory and barriers are there until the other has done with them.
        self.meet()
        if warp == PAIR_MULTIPLY:
            base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
            cute.arch.dealloc_tmem(base, TENSOR_COLUMNS, is_two_cta=True)

    @cute.jit
    def meet(self):
        """All threads of the pair."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
