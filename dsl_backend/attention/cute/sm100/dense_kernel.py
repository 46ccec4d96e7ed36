# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100: roles of warps around tensor memory (FlashAttention-4: Zadouri et al., 2026).

One warp issues products, whose scores and sums live in tensor memory. Two softmax warpgroups, each with 128 query rows,
turn scores into weights in place, in turn; a correction warpgroup rescales sums when a row's largest score has grown,
and stores outputs. One warp loads, one finds work; of fp8 keys and values, a warpgroup makes 16 bits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

from dsl_backend.attention.cute.args import DenseLoads, DenseTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import SplitKVCombine
from dsl_backend.attention.cute.dequant import DequantWarps, tma_barriers
from dsl_backend.attention.cute.scheduler.clc import ClcResponse, ClcTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import (
    CORRECT,
    LOAD,
    MULTIPLY,
    ROWS,
    SCHEDULE,
    TENSOR_COLUMNS,
    WIDEN,
    DenseConfig,
)
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_mma import AlternatingMmaWarp, MmaWarp
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps
from dsl_backend.attention.cute.sm100.kv_stages import OwnRings, OwnRingsLoadWarp, SharedRing, SharedRingLoadWarp
from dsl_backend.attention.cute.tiles import LayerKey, TiledKernel
from dsl_backend.errors import InvalidInput
from dsl_backend.primitives.copy import clear_rows


@dataclass(frozen=True, kw_only=True)
class DenseKey(LayerKey):
    """All that the kernel's code depends on."""

    config: DenseConfig

    def __post_init__(self) -> None:
        if self.split and self.config.use_clc:
            raise InvalidInput("launch control hands out whole query tiles, and key ranges are split: leave it off")
        if self.split and self.config.two_cta:
            raise InvalidInput("pairs of blocks have whole query tiles, and key ranges are split: leave them off")

    @property
    def dynamic_scheduler(self) -> bool:
        return super().dynamic_scheduler and not self.config.use_clc


class Barriers(NamedTuple):
    """Arrays of mbarriers; `_full` says that something was written, `_empty` that it was read.

    Attributes:
        s_full: scores of a half, by its product.
        p_full: weights of a half are there, and its sums are at their scale, or free for new ones.
        o_full: sums of both halves are complete.
        l_full, l_empty: what a half's softmax tells the correction of its rows.
        k_loaded ... v_taken: of fp8 tiles, on their way to the others.
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
    l_full: cute.Pointer
    l_empty: cute.Pointer
    k_loaded: cute.Pointer | None = None
    k_taken: cute.Pointer | None = None
    v_loaded: cute.Pointer | None = None
    v_taken: cute.Pointer | None = None


class DenseForward(TiledKernel):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands.

    Attributes:
        group, blocks, cluster: blocks that multiply together, as products, sizes and launches name them.
        places: of scores, and of the weights that take their place.
        rests: warps of rows that are nobody's pass over an item's tiles; see rest.py.
    """

    group, num_ctas = tcgen05.CtaGroup.ONE, 1
    cluster: tuple[int, int, int] | None = None

    def __init__(self, key: DenseKey):
        super().__init__(key, key.config)
        self.halves, self.alternate = key.config.halves, key.config.alternate
        self.places, self.rests = self.halves, self.tile_m == ROWS
        self.registers = key.config.registers

    @cute.jit
    def __call__(
        self,
        tensors: DenseTensors,
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
            cluster=self.cluster,
            stream=stream,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            combine = SplitKVCombine(key, self.tile_n, config.min_split_tiles, self.dims_v)
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> TiledMmas:
        tiled_mma_qk = blackwell_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            self.group,
            (self.num_ctas * ROWS, self.tile_n),
        )
        tiled_mma_pv = blackwell_helpers.make_trivial_tiled_mma(
            self.dtype_v,
            self.dtype_v,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            self.group,
            (self.num_ctas * ROWS, self.dims_v),
            tcgen05.OperandSource.TMEM,
        )
        return TiledMmas(tiled_mma_qk, tiled_mma_pv)

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
        if cutlass.const_expr(self.key.split):
            # The merge kernel may take its place beside this one, and waits there.
            cute.arch.griddepcontrol_launch_dependents()
        allocator = cutlass.utils.SmemAllocator()
        q_layout, out_layout = self.query_tiles(self.dims), self.query_tiles(self.dims_v)
        queries = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        q_place = allocator.allocate(queries * 2, byte_alignment=1024)
        sQ, sOut = self.swizzled(q_place, q_layout), self.swizzled(q_place, out_layout)
        if cutlass.const_expr(config.shared_ring):
            places: Any = SharedRing(self, allocator)
        else:
            places = OwnRings(self, allocator, self.tile_n, self.dims_v)
        loaded_k, loaded_v = self.loaded(allocator, places.keys[0], places.values)
        items = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        statistics = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, 2, halves)), byte_alignment=16)
        place = allocator.allocate_array(cutlass.Int32, 1)
        sizes = (
            [config.query_stages] * 2 + [config.stages] * 4 + [WORK_TILE_STAGES] * 2 + [halves] * 2 + [1] + [halves] * 2
        )
        if cutlass.const_expr(self.key.kv.fp8):
            sizes += [config.dequant_stages] * 4
        barriers = Barriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))
        launches: Any = ClcResponse.allocate(allocator) if config.use_clc else None

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = WARPGROUP // 32
        if warp == LOAD:
            with cute.arch.elect_one():
                # Copies and products arrive once, threads that end a tile each for itself; the mailbox is read by all.
                widening = group if self.key.kv.fp8 else 0
                readers = (halves + 1) * group + 2 + widening
                writers = widening or 1
                counts = [1, group, writers, 1, writers, 1, 1, readers, 1, 2 * WARPGROUP, 1, WARPGROUP, WARPGROUP]
                counts += [1, widening] * 2
                for pointer, size, count in zip(barriers, sizes, counts, strict=False):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
                if cutlass.const_expr(config.use_clc):
                    cute.arch.mbarrier_init(launches.full, 1)
            cute.arch.mbarrier_init_fence()
        filled = self.tokens_per_tile * self.key.pack_gqa
        if cutlass.const_expr(filled < self.tile_m):
            # Rows that no tensor copy writes.
            for stage in cutlass.range_constexpr(config.query_stages):
                clear_rows(sQ[None, None, stage], filled, self.tile_m, cute.arch.thread_idx()[0], config.threads)
            cute.arch.fence_proxy("async.shared", space="cta")
        if warp == MULTIPLY:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, place)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)

        work_pipeline = WorkTilePipeline(items, barriers.work_full, barriers.work_empty)
        if warp < halves * group:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            softmax = SoftmaxWarps(self, work_pipeline, barriers, base, statistics, requests, scoring, warp // group)
            softmax.run()
        elif warp >= CORRECT and warp < CORRECT + group:
            cute.arch.setmaxregister_decrease(self.registers.correct)
            CorrectionWarps(
                self, work_pipeline, barriers, base, statistics, places, sOut, outputs, requests, scoring
            ).run()
        elif warp >= WIDEN:
            if cutlass.const_expr(self.key.kv.fp8):
                cute.arch.setmaxregister_decrease(self.registers.widen)
                DequantWarps(self, work_pipeline, barriers, loaded_k, places.keys[0], loaded_v, places.values).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if warp == MULTIPLY:
                role = AlternatingMmaWarp if self.alternate else MmaWarp
                role(self, work_pipeline, mmas, barriers, base, sQ, places).run()
            if warp == LOAD:
                rings = tma_barriers(barriers)
                if cutlass.const_expr(config.shared_ring):
                    SharedRingLoadWarp(self, work_pipeline, rings, loads, sQ, places, requests).run()
                else:
                    OwnRingsLoadWarp(self, work_pipeline, rings, loads, sQ, loaded_k, loaded_v, requests).run()
            if warp == SCHEDULE:
                if cutlass.const_expr(config.use_clc):
                    ClcTileScheduler(
                        self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, launches
                    ).run()
                else:
                    self.schedule(work_pipeline, requests, scheduler_workspace).run()
        cute.arch.sync_threads()
        if warp == MULTIPLY:
            # Read again: kept, it was one register too many for the roles in between (ptxas 13.0).
            base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
            cute.arch.dealloc_tmem(base, TENSOR_COLUMNS)
