# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM100: one warp finds work, one loads, one multiplies, a warpgroup weighs.

A row of the cache is a key, and its first elements are the value: it is loaded once. 128 rows of 512 float32 sums would
be all of tensor memory, and scores need room as well: a tile has 64 query rows, tokens times the heads that share it.
Sums are transposed, O^T = V^T P^T, in blocks of 128 value columns: products of 128 rows have twice the rate of products
of 64, and what comes out needs no more than a store of neighbouring columns. Of fp8 keys, a warpgroup makes 16 bits.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

from dsl_backend.attention.cute.args import MlaLoads, MlaTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import SplitKVCombine
from dsl_backend.attention.cute.dequant import tma_barriers
from dsl_backend.attention.cute.mla import MlaDequantWarps, MlaLoadWarp, TiledMla
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import TENSOR_COLUMNS, WARP
from dsl_backend.attention.cute.sm100.mla_configs import BLOCK, LOAD, MULTIPLY, SCHEDULE, SCORES, STATISTICS, WIDEN
from dsl_backend.attention.cute.sm100.mla_mma import MlaMmaWarp
from dsl_backend.attention.cute.sm100.mla_softmax import MlaSoftmaxWarps
from dsl_backend.primitives.copy import clear_rows


class Barriers(NamedTuple):
    """Arrays of mbarriers; `_full` says that something was written, `_empty` that it was read.

    Attributes:
        s_full: scores, by their product.
        p_full: weights are laid out, and the sums at their scale.
        o_full: sums hold the last weights, whose place is free.
        k_loaded, k_taken: of fp8 tiles, on their way to the others.
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


class MlaForward(TiledMla):
    """out = softmax(q k^T) k[:, :head_dim_v] for the requests of a batch; see `api.run` for the operands."""

    group = tcgen05.CtaGroup.ONE
    products_release = True

    @cute.jit
    def __call__(
        self,
        tensors: MlaTensors,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: cute.Tensor | None,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
        num_ctas: cutlass.Int32,
        stream,
    ):
        key, config = self.key, self.config
        outputs = Outputs(out, lse, partials)
        self.kernel(self.tiled_mmas(), self.loads(tensors), outputs, scheduler_workspace, requests, scoring).launch(
            grid=(num_ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            combine = SplitKVCombine(key, self.tile_n, config.min_split_tiles, self.dims_v, self.tokens_per_tile)
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> TiledMmas:
        """Scores of 64 rows, and transposed sums of a block of value columns."""
        return TiledMmas(
            self.tiled_mma(OperandMajorMode.K, OperandMajorMode.K, (ROWS, self.tile_n)),
            self.tiled_mma(OperandMajorMode.MN, OperandMajorMode.K, (BLOCK, ROWS)),
        )

    def tiled_mma(self, a_major, b_major, shape):
        return blackwell_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, a_major, b_major, cutlass.Float32, self.group, shape
        )

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: MlaLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        if cutlass.const_expr(self.key.split):
            # The merge kernel may take its place beside this one, and waits there.
            cute.arch.griddepcontrol_launch_dependents()
        allocator = cutlass.utils.SmemAllocator()
        q_layout, k_layout, p_layout = self.layouts()
        sQ, sK, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (q_layout, k_layout, p_layout)
        )
        sV, loaded = self.values(sK), self.loaded(allocator, sK)
        items = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        statistics = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, STATISTICS)), byte_alignment=16)
        place = allocator.allocate_array(cutlass.Int32, 1)
        sizes = [1] * 2 + [PARTS * config.stages] * 2 + [WORK_TILE_STAGES] * 2 + [SCORES, 1, 1]
        if cutlass.const_expr(self.key.kv.fp8):
            sizes += [PARTS * config.dequant_stages] * 2
        barriers = Barriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = WARPGROUP // WARP
        if warp == LOAD:
            with cute.arch.elect_one():
                # Copies and products arrive once, where key tiles are shared in each block of the cluster; the
                # warpgroups by a lane of each warp; the mailbox's readers are all roles but its writer.
                widening = group if self.key.kv.fp8 else 0
                empties = 1 if self.key.kv.fp8 else config.cluster
                counts = [1, 1, widening or 1, empties, 1, group + 2 + widening, 1, group, 1]
                counts += [1, config.cluster * widening]
                for pointer, size, count in zip(barriers, sizes, counts, strict=False):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.rows_loaded < ROWS):
            # Rows that no tensor copy may write.
            clear_rows(sQ[None, None, 0], self.rows_loaded, ROWS, cute.arch.thread_idx()[0], config.threads)
            cute.arch.fence_proxy("async.shared", space="cta")
        if warp == MULTIPLY:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, place)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
        if cutlass.const_expr(config.cluster > 1):
            # The others' copies write here, and signal barriers that must be there.
            self.meet()

        work_pipeline = WorkTilePipeline(items, barriers.work_full, barriers.work_empty)
        if warp < group:
            MlaSoftmaxWarps(self, work_pipeline, barriers, base, statistics, sV, sP, outputs, requests, scoring).run()
        if warp == MULTIPLY:
            MlaMmaWarp(self, work_pipeline, mmas, barriers, base, sQ, sK, sV, sP).run()
        if warp == LOAD:
            rings = tma_barriers(barriers)
            MlaLoadWarp(self, work_pipeline, rings, loads, sQ, loaded, requests).run()
        if warp == SCHEDULE:
            self.schedule(work_pipeline, requests, scheduler_workspace).run()
        if cutlass.const_expr(self.key.kv.fp8):
            if warp >= WIDEN:
                MlaDequantWarps(self, work_pipeline, barriers, loaded, sK).run()
        # A block's memory and barriers are there until the others have done with them.
        self.meet()
        if warp == MULTIPLY:
            cute.arch.dealloc_tmem(base, TENSOR_COLUMNS)
