# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM90: a load warp, a scheduler warp, and two MMA warpgroups.

A row of the cache is a key, and its first elements are the value: it is loaded once. O of 64 rows and 512 columns does
not fit a warpgroup's registers: each warpgroup has half of the columns, and P passes between them through shared memory
(as in FlashMLA: Li and Liu, 2025). Query rows are tokens times packed heads (pack_gqa). One more warpgroup dequantizes
fp8 keys.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.cute.args import MlaLoads, MlaTensors, MlaTiledMmas, Outputs
from dsl_backend.attention.cute.combine import SplitKVCombine, cta_fold_workspace, with_fold_workspace
from dsl_backend.attention.cute.dequant import MlaDequantWarps, tma_barriers
from dsl_backend.attention.cute.loader.mla import MlaLoadWarp
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.mla import MOST_BOXES, TiledMla
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm90.dense_kernel import LOAD_WARP, SCHEDULER_WARP
from dsl_backend.attention.cute.sm90.mla_barriers import WARPS_PER_WARPGROUP, Barriers, mbar_arrays
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS
from dsl_backend.attention.cute.sm90.mla_mma import ACC_SCALE, MlaMmaConsumer, MlaSmem
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.moved import SmemAllocator


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
        outputs = with_fold_workspace(key, Outputs(out, lse, partials), num_ctas, ROWS, self.dims_v)
        self.kernel(self.tiled_mmas(), self.loads(tensors), outputs, scheduler_workspace, requests, scoring).launch(
            grid=(num_ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            combine = SplitKVCombine(
                key,
                self.dims_v,
                many_rows=config.combine_many_rows,
                early_dependents=config.early_dependents,
                by_tasks=config.combine_by_tasks,
            )
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> MlaTiledMmas:
        halves, columns = (1, GROUPS, 1), self.config.columns(self.dims_v)
        return MlaTiledMmas(
            self.tiled_mma((1, 1, 1), self.tile_n, OperandMajorMode.K, warpgroup.OperandSource.SMEM),
            self.tiled_mma(halves, columns, OperandMajorMode.MN, warpgroup.OperandSource.RMEM),
            self.tiled_mma(halves, columns, OperandMajorMode.MN, warpgroup.OperandSource.SMEM),
        )

    def tiled_mma(
        self,
        warpgroups: tuple[int, int, int],
        columns: int,
        b_major: OperandMajorMode,
        a_source: warpgroup.OperandSource,
    ) -> cute.TiledMma:
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, cutlass.Float32, warpgroups, (ROWS, columns), a_source
        )

    def by_group(self, layout: cute.Layout) -> cute.Layout:
        """View V [column, key, stage] in the order in which the tiled MMA takes the columns.

        The tiled MMA alternates between warpgroups: consecutive WGMMAs belong to different ones, while the columns of
        one warpgroup lie side by side.
        """
        wgmmas = self.dims_v // GROUPS // self.config.columns(self.dims_v)  # of a warpgroup
        (width, chunks), (one, stride) = layout.shape[0], layout.stride[0]
        chunks_per_wgmma = chunks // GROUPS // wgmmas
        shape = (width, (chunks_per_wgmma, GROUPS, wgmmas))
        strides = (one, (stride, stride * chunks_per_wgmma * wgmmas, stride * chunks_per_wgmma))
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
        allocator = SmemAllocator()
        sQ, sK, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in self.layouts()
        )
        sV, sK_tma = self.values(sK), self.tma_target(allocator, sK)
        sStats = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, ACC_SCALE + 1)), byte_alignment=16)
        sRowSum = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, GROUPS, 2)), byte_alignment=16)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        arrays = mbar_arrays(config)
        barriers = Barriers(**allocate_mbarriers(allocator, arrays))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                init_mbarriers(barriers, arrays)
            cute.arch.mbarrier_init_fence()
        self.cluster_sync()

        # Until here, nothing was accessed that the kernels before this one read or write.
        dependent_launch.wait()
        if cutlass.const_expr(self.key.split):
            # The combine kernel may be launched beside this one: it waits for this one's end.
            dependent_launch.launch_dependents()
        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        mma_registers, other_registers, dequant_registers = config.registers
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == LOAD_WARP:
                MlaLoadWarp(self, work_pipeline, tma_barriers(barriers), loads, sQ, sK_tma, requests).run()
            if warp == SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        elif warp >= (1 + GROUPS) * WARPS_PER_WARPGROUP:
            if cutlass.const_expr(self.key.kv.fp8):
                cute.arch.setmaxregister_decrease(dequant_registers)
                MlaDequantWarps(self, work_pipeline, barriers, sK_tma, sK).run()
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            smem = MlaSmem(sQ, sK, sV, sP, sStats, sRowSum)
            own_outputs = outputs._replace(fold_workspace=cta_fold_workspace(outputs.fold_workspace, ROWS, self.dims_v))
            MlaMmaConsumer(
                self, work_pipeline, mmas, barriers, smem, own_outputs, requests, scoring, thread - WARPGROUP
            ).run()
        if cutlass.const_expr(config.cluster > 1):
            # Peers access this CTA's shared memory until here.
            self.cluster_sync()
