# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM90: one warp finds work, one loads, two warpgroups multiply.

A row of the cache is a key, and its first elements are the value: it is loaded once. Outputs of 64 rows and 512 columns
do not fit a warpgroup's registers: each of the two has half of the columns, and weights pass between them through
shared memory (as in FlashMLA: Li and Liu, 2025). Query rows are tokens times the heads that share a tile. Of fp8 keys,
one more warpgroup makes 16 bits.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.cute.args import MlaLoads, MlaTensors, MlaTiledMmas, Outputs
from dsl_backend.attention.cute.combine import SplitKVCombine
from dsl_backend.attention.cute.dequant import MlaDequantWarps, tma_barriers
from dsl_backend.attention.cute.loader.mla import MlaLoadWarp
from dsl_backend.attention.cute.mla import MOST_BOXES, TiledMla
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WORK_TILE_STAGES, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm90.dense_kernel import LOAD_WARP, SCHEDULER_WARP
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS
from dsl_backend.attention.cute.sm90.mla_mma import MlaMmaConsumer


class Barriers(NamedTuple):
    """Pairs of mbarrier arrays: full ones say that a buffer was written, empty ones that it was read."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    # Of fp8 tiles, on their way to the others.
    k_loaded: cute.Pointer | None = None
    k_taken: cute.Pointer | None = None


class MlaForward(TiledMla):
    """out = softmax(q k^T) k[:, :head_dim_v] for the requests of a batch; see `api.run` for the operands."""

    most_boxes = MOST_BOXES

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
            use_pdl=True,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            combine = SplitKVCombine(key, self.tile_n, config.min_split_tiles, self.dims_v, self.tokens_per_tile)
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> MlaTiledMmas:
        halves, columns = (1, GROUPS, 1), self.config.columns(self.dims_v)
        return MlaTiledMmas(
            self.tiled_mma((1, 1, 1), self.tile_n, OperandMajorMode.K, warpgroup.OperandSource.SMEM),
            self.tiled_mma(halves, columns, OperandMajorMode.MN, warpgroup.OperandSource.RMEM),
            self.tiled_mma(halves, columns, OperandMajorMode.MN, warpgroup.OperandSource.SMEM),
        )

    def tiled_mma(self, groups, columns, b_major, a_source):
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, cutlass.Float32, groups, (ROWS, columns), a_source
        )

    def by_group(self, layout: cute.Layout) -> cute.Layout:
        """Values [column, key, stage] in the order in which products of all groups take the columns: neighbouring
        products are different groups', and a group's columns lie side by side.
        """
        taken = self.config.columns(self.dims_v)
        products = self.dims_v // GROUPS // taken
        (width, chunks), (one, stride) = layout.shape[0], layout.stride[0]
        per = chunks // GROUPS // products
        shape = (width, (per, GROUPS, products))
        strides = (one, (stride, stride * per * products, stride * per))
        return cute.make_layout((shape, *layout.shape[1:]), stride=(strides, *layout.stride[1:]))

    @cute.kernel
    def kernel(
        self,
        mmas: MlaTiledMmas,
        loads: MlaLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        allocator = cutlass.utils.SmemAllocator()
        q_layout, k_layout, p_layout = self.layouts()
        sQ, sK, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (q_layout, k_layout, p_layout)
        )
        sV, loaded = self.values(sK), self.tma_target(allocator, sK)
        state = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, 2)), byte_alignment=16)
        row_sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, GROUPS, 2)), byte_alignment=16)
        items = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        sizes = [1] * 2 + [PARTS * config.stages] * 2 + [WORK_TILE_STAGES] * 2
        if cutlass.const_expr(self.key.kv.fp8):
            sizes += [PARTS * config.dequant_stages] * 2
        barriers = Barriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                group = WARPGROUP // 32
                # A loading warp fills by bytes. One group's warps empty a part of a key tile, in all blocks of a
                # cluster; both groups' the queries; the mailbox has the load warp as well. Of fp8 it is the widening
                # group's warps that fill, for the block alone, and that empty what the loading ones filled.
                widening = group if self.key.kv.fp8 else 0
                empties = group if self.key.kv.fp8 else config.cluster * group
                counts = [1, GROUPS * group, widening or 1, empties, 1, GROUPS * group + 1 + widening]
                counts += [1, config.cluster * widening]
                for pointer, size, count in zip(barriers, sizes, counts, strict=False):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        self.cluster_sync()

        # Until here nothing was read or written that the kernels before this one have to do with.
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.key.split):
            # The merge kernel may take its place beside this one, and waits there.
            cute.arch.griddepcontrol_launch_dependents()
        work_pipeline = WorkTilePipeline(items, barriers.work_full, barriers.work_empty)
        math, other, widen = config.registers
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(other)
            if warp == LOAD_WARP:
                rings = tma_barriers(barriers)
                MlaLoadWarp(self, work_pipeline, rings, loads, sQ, loaded, requests).run()
            if warp == SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace).run()
        elif warp >= (1 + GROUPS) * WARPGROUP // 32:
            if cutlass.const_expr(self.key.kv.fp8):
                cute.arch.setmaxregister_decrease(widen)
                MlaDequantWarps(self, work_pipeline, barriers, loaded, sK).run()
        else:
            cute.arch.setmaxregister_increase(math)
            smem = (sQ, sK, sV, sP, state, row_sums)
            MlaMmaConsumer(
                self, work_pipeline, mmas, barriers, smem, outputs, requests, scoring, thread - WARPGROUP
            ).run()
        if cutlass.const_expr(config.cluster > 1):
            # A block's memory and barriers are there until the others have done with them.
            self.cluster_sync()
