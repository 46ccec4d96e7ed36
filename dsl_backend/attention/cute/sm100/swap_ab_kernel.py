# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100 with swapped operands, for few query rows over many keys.

A product has 128 rows, of which 8 heads of one token fill 8. Here they are its columns, and keys its rows: S^T = K Q^T,
O^T += V^T P^T. A thread of a softmax warpgroup has a key, and the scores of all query rows against it; two warpgroups
have every other key tile, with sums of their own in tensor memory, whose lanes are columns of values. They also bring
them to a new scale, which is seldom, and store them: there is no correction role. Weights go through shared memory.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils import blackwell_helpers

from dsl_backend.attention.cute.args import DenseLoads, Outputs, TiledMmas
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import (
    ROWS,
    SWAPPED_LOAD,
    SWAPPED_MULTIPLY,
    SWAPPED_SCHEDULE,
    SWAPPED_TOLD,
    TENSOR_COLUMNS,
)
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.dense_mma import AlternatingMmaWarp
from dsl_backend.attention.cute.sm100.kv_stages import OwnRings, OwnRingsLoadWarp, placed
from dsl_backend.attention.cute.sm100.swap_ab_softmax import SwapABSoftmaxWarps
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma


class SwapABBarriers(NamedTuple):
    """As `forward.Barriers`; queries are read by products alone."""

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


class SwapABForward(DenseForward):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands."""

    def __init__(self, key: DenseKey):
        super().__init__(key)
        self.rests = False

    def tiled_mmas(self) -> TiledMmas:
        inside, k = OperandMajorMode.MN, OperandMajorMode.K
        shape, sums = (ROWS, self.tile_m), (self.dims_v, self.tile_m)
        return TiledMmas(
            blackwell_helpers.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, cutlass.Float32, self.group, shape),
            blackwell_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, inside, inside, cutlass.Float32, self.group, sums
            ),
        )

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
        config, halves = self.config, self.halves
        # The merge kernel may take its place beside this one, and waits there.
        cute.arch.griddepcontrol_launch_dependents()
        allocator = cutlass.utils.SmemAllocator()
        q_layout = self.query_tiles(self.dims)
        queries = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        sQ = self.swizzled(allocator.allocate(queries * 2, byte_alignment=1024), q_layout)
        places = OwnRings(self, allocator, self.tile_n, self.dims_v)
        # [key, query row, half]
        probs = cute.tile_to_shape(self.atom(self.tile_m), (self.tile_n, self.tile_m, halves), order=(0, 1, 2))
        sP = placed(allocator, self.dtype, probs)
        told = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((self.tile_m, SWAPPED_TOLD, halves)), byte_alignment=16
        )
        items = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        place = allocator.allocate_array(cutlass.Int32, 1)
        sizes = [config.query_stages] * 2 + [config.stages] * 4 + [WORK_TILE_STAGES] * 2 + [halves] * 2 + [1]
        barriers = SwapABBarriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = WARPGROUP // 32
        if warp == SWAPPED_LOAD:
            with cute.arch.elect_one():
                # Copies and products arrive once, threads that end a tile each for itself; the mailbox is read by all.
                counts = [1, 1, 1, 1, 1, 1, 1, halves * group + 2, 1, WARPGROUP, 1]
                for pointer, size, count in zip(barriers, sizes, counts, strict=True):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        filled = self.tokens_per_tile * self.key.pack_gqa
        if cutlass.const_expr(filled < self.tile_m):
            # Rows that no tensor copy writes.
            for stage in cutlass.range_constexpr(config.query_stages):
                clear_rows(sQ[None, None, stage], filled, self.tile_m, cute.arch.thread_idx()[0], config.threads)
            cute.arch.fence_proxy("async.shared", space="cta")
        if warp == SWAPPED_MULTIPLY:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, place)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)

        work_pipeline = WorkTilePipeline(items, barriers.work_full, barriers.work_empty)
        if warp < halves * group:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            SwapABSoftmaxWarps(
                self,
                work_pipeline,
                barriers,
                base,
                sP,
                told,
                places,
                outputs,
                requests,
                scoring,
                warp // group,
            ).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if warp == SWAPPED_MULTIPLY:
                SwapABMmaWarp(self, work_pipeline, mmas, barriers, base, sQ, sP, places).run()
            if warp == SWAPPED_LOAD:
                keys, values = places.keys[0], places.values
                OwnRingsLoadWarp(self, work_pipeline, barriers, loads, sQ, keys, values, requests).run()
            if warp == SWAPPED_SCHEDULE:
                self.schedule(work_pipeline, requests, scheduler_workspace).run()
        cute.arch.sync_threads()
        if warp == SWAPPED_MULTIPLY:
            base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
            cute.arch.dealloc_tmem(base, TENSOR_COLUMNS)


class SwapABMmaWarp(AlternatingMmaWarp):
    """Scores S^T = K Q^T [key, query row] and sums O^T += V^T P^T [column, query row] of each half."""

    def __init__(self, kernel, work_pipeline, mmas, barriers, base, sQ, sP, places):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        self.places, rows = places, kernel.tile_m
        self.tiled_mma_qk = Tcgen05Mma(dtype=kernel.dtype, m=ROWS, n=rows)
        self.tiled_mma_pv = Tcgen05Mma(dtype=kernel.dtype, m=kernel.dims_v, n=rows, a_mn_major=True, b_mn_major=True)
        mine, weighs = tiled_mma_qk.get_slice(0), tiled_mma_pv.get_slice(0)
        self.fK = tiled_mma_qk.make_fragment_A(mine.partition_A(places.keys[0]))
        self.fQ = tiled_mma_qk.make_fragment_B(mine.partition_B(sQ))
        sVt, sPt = (
            cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))
            for tensor in (places.values, sP)
        )
        self.fV = tiled_mma_pv.make_fragment_A(weighs.partition_A(sVt))
        self.fP = tiled_mma_pv.make_fragment_B(weighs.partition_B(sPt))
        self.S = [base + g * rows for g in range(kernel.halves)]
        self.O = [base + (kernel.halves + g) * rows for g in range(kernel.halves)]

    def score(self, g, stage, tile, then=()):
        keys = self.fK[None, None, None, self.places.of_keys(tile)[0]]
        queries = self.fQ[None, None, None, stage]
        self.tiled_mma_qk.issue(self.S[g], keys, [queries], False, commit=[self.barriers.s_full + g, *then])

    def issue_sums(self, g, tile, adds, then):
        values = self.fV[None, None, None, self.places.of_values(tile)]
        self.tiled_mma_pv.issue(self.O[g], values, [self.fP[None, None, None, g]], adds, commit=then)

    def end(self, stage):
        self.commit(self.barriers.q_empty + stage, self.barriers.o_full)
