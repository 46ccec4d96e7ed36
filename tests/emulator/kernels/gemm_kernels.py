# SPDX-License-Identifier: Apache-2.0
"""Small matrix products with everything that large ones have: c [m, n] = a [m, k] times b [n, k] transposed, float16.

Hopper's: wgmma, tensor copies, multicast in a cluster of two. Blackwell's: tcgen05 with one or two CTAs, accumulators
in tensor memory that are used in turn. Mechanisms: PTX ISA 9.2, 9.7.15 (wgmma) and 9.7.16 (tcgen05).
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers, hopper_helpers

from dsl_backend.primitives.moved import LayoutEnum, SmemAllocator

WARPGROUP = 128


class HopperGemm:
    """Two CTAs share the tile of b: each loads half of it for both. A CTA makes `tiles` tiles [64, 64] of a row."""

    TILE = (64, 64, 64)
    STAGES = 2
    CTAS = 2

    def __init__(self, tiles=2):
        self.tiles = tiles

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        m, n, k = self.TILE
        half = cutlass.Float16
        product = hopper_helpers.make_trivial_tiled_mma(
            half, half, OperandMajorMode.K, OperandMajorMode.K, cutlass.Float32, (1, 1, 1), (m, n)
        )
        a_staged = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.TILE, half, self.STAGES)
        b_staged = hopper_helpers.make_smem_layout_b(LayoutEnum.from_tensor(b), self.TILE, half, self.STAGES)
        c_staged = hopper_helpers.make_smem_layout_epi(half, LayoutEnum.ROW_MAJOR, (m, n), 1)
        a_load, mA = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), a, cute.slice_(a_staged, (None, None, 0)), (m, k)
        )
        b_load, mB = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            b,
            cute.slice_(b_staged, (None, None, 0)),
            (n, k),
            num_multicast=self.CTAS,
        )
        c_store, mC = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, cute.slice_(c_staged, (None, None, 0)), (m, n)
        )
        grid = (cute.size(c, mode=[0]) // m, cute.size(c, mode=[1]) // n // self.tiles, 1)
        self.kernel(product, a_load, mA, b_load, mB, c_store, mC, a_staged, b_staged, c_staged).launch(
            grid=grid, block=(2 * WARPGROUP, 1, 1), cluster=(self.CTAS, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        product: cute.TiledMma,
        a_load: cute.CopyAtom,
        mA: cute.Tensor,
        b_load: cute.CopyAtom,
        mB: cute.Tensor,
        c_store: cute.CopyAtom,
        mC: cute.Tensor,
        a_staged: cute.ComposedLayout,
        b_staged: cute.ComposedLayout,
        c_staged: cute.ComposedLayout,
    ):
        m, n, k = self.TILE
        half = cutlass.Float16
        shared = SmemAllocator()
        sA = shared.allocate_tensor(half, a_staged.outer, byte_alignment=1024, swizzle=a_staged.inner)
        sB = shared.allocate_tensor(half, b_staged.outer, byte_alignment=1024, swizzle=b_staged.inner)
        sC = shared.allocate_tensor(half, c_staged.outer, byte_alignment=1024, swizzle=c_staged.inner)
        full = shared.allocate_array(cutlass.Int64, self.STAGES)
        empty = shared.allocate_array(cutlass.Int64, self.STAGES)
        row, group, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.STAGES):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, self.CTAS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        gA = cute.local_tile(mA, (m, k), (row, None))
        gB = cute.local_tile(mB, (n, k), (None, None))
        gC = cute.local_tile(mC, (m, n), (row, None))
        one = cute.make_layout(1)
        sAIn, gAIn = cpasync.tma_partition(a_load, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        sBIn, gBIn = cpasync.tma_partition(
            b_load, rank, cute.make_layout(self.CTAS), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        sCOut, gCOut = cpasync.tma_partition(c_store, 0, one, cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2))
        blocks = cute.size(gA, mode=[2])
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        if warp >= WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(40)
            if warp == WARPGROUP // 32:
                for tile in cutlass.range(self.tiles, unroll=1):
                    for block in cutlass.range(blocks, unroll=1):
                        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (m + n) * k * 2)
                        cute.copy(a_load, gAIn[None, block], sAIn[None, stage], tma_bar_ptr=full + stage)
                        cute.copy(
                            b_load,
                            gBIn[None, group * self.tiles + tile, block],
                            sBIn[None, stage],
                            tma_bar_ptr=full + stage,
                            mcast_mask=cutlass.Int16((1 << self.CTAS) - 1),
                        )
                        stage += 1
                        if stage == self.STAGES:
                            stage, phase = cutlass.Int32(0), phase ^ 1
        else:
            cute.arch.setmaxregister_increase(232)
            mine = product.get_slice(thread)
            fA = product.make_fragment_A(mine.partition_A(sA))
            fB = product.make_fragment_B(mine.partition_B(sB))
            sums = cute.make_rmem_tensor(mine.partition_shape_C((m, n)), cutlass.Float32)
            for tile in cutlass.range(self.tiles, unroll=1):
                product.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, False)
                before = stage
                for block in cutlass.range(blocks, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    cute.nvgpu.warpgroup.fence()
                    for part in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                        cute.gemm(product, sums, fA[None, None, part, stage], fB[None, None, part, stage], sums)
                        product.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
                    cute.nvgpu.warpgroup.commit_group()
                    # The block before this one is done, and its buffers are free.
                    cute.nvgpu.warpgroup.wait_group(1)
                    if block > 0:  # noqa: SIM102 - both are run-time values, of which CuTe DSL makes no `and`
                        if thread < self.CTAS:
                            cute.arch.mbarrier_arrive(empty + before, thread)
                    before = stage
                    stage += 1
                    if stage == self.STAGES:
                        stage, phase = cutlass.Int32(0), phase ^ 1
                cute.nvgpu.warpgroup.wait_group(0)
                if thread < self.CTAS:
                    cute.arch.mbarrier_arrive(empty + before, thread)
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                rounded = cute.make_rmem_tensor(sums.shape, half)
                rounded.store(sums.load().to(half))
                cute.autovec_copy(rounded, mine.partition_C(sC)[None, None, None, 0])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                if warp == 0:
                    cute.copy(c_store, sCOut[None, 0], gCOut[None, group * self.tiles + tile])
                    cute.arch.cp_async_bulk_commit_group()
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        # The other CTA may still arrive here, or copy.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class BlackwellGemm:
    """One CTA makes tiles [128, 64], a pair tiles [256, 64]; `tiles` tiles of a row, in two accumulators in turn.

    Operands are K-major halves, or with `tf32` M- and N-major floats; results are halves.
    """

    N = 64
    STAGES = 2
    ACCUMULATORS = 2
    COLUMNS = 128
    STORE, MULTIPLY, LOAD = 0, 4, 5  # first warp of each role

    def __init__(self, ctas=1, tiles=3, tf32=False):
        self.ctas, self.tiles = ctas, tiles
        self.operand, self.multiplied = (
            (cutlass.Float32, cutlass.TFloat32) if tf32 else (cutlass.Float16, cutlass.Float16)
        )
        self.major = OperandMajorMode.MN if tf32 else OperandMajorMode.K
        self.K = 1024 // self.operand.width
        self.group = tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE
        self.tile = (128 * ctas, self.N, self.K)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        half = cutlass.Float16
        product = blackwell_helpers.make_trivial_tiled_mma(
            self.multiplied, self.multiplied, self.major, self.major, cutlass.Float32, self.group, self.tile[:2]
        )
        a_staged = blackwell_helpers.make_smem_layout_a(product, self.tile, self.operand, self.STAGES)
        b_staged = blackwell_helpers.make_smem_layout_b(product, self.tile, self.operand, self.STAGES)
        c_staged = blackwell_helpers.make_smem_layout_epi(half, LayoutEnum.ROW_MAJOR, (128, self.N), 1)
        cluster = cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (product.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        a_load, mA = cute.nvgpu.make_tiled_tma_atom_A(
            load,
            a,
            cute.slice_(a_staged, (None, None, None, 0)),
            self.tile,
            product,
            cluster.shape,
            internal_type=self.multiplied,
        )
        b_load, mB = cute.nvgpu.make_tiled_tma_atom_B(
            load,
            b,
            cute.slice_(b_staged, (None, None, None, 0)),
            self.tile,
            product,
            cluster.shape,
            internal_type=self.multiplied,
        )
        c_store, mC = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, cute.slice_(c_staged, (None, None, 0)), (128, self.N)
        )
        rows, columns = cute.size(c, mode=[0]) // 128, cute.size(c, mode=[1]) // self.N
        self.kernel(product, a_load, mA, b_load, mB, c_store, mC, a_staged, b_staged, c_staged).launch(
            grid=(rows, columns // self.tiles, 1), block=(192, 1, 1), cluster=(self.ctas, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        product: cute.TiledMma,
        a_load: cute.CopyAtom,
        mA: cute.Tensor,
        b_load: cute.CopyAtom,
        mB: cute.Tensor,
        c_store: cute.CopyAtom,
        mC: cute.Tensor,
        a_staged: cute.ComposedLayout,
        b_staged: cute.ComposedLayout,
        c_staged: cute.ComposedLayout,
    ):
        half = cutlass.Float16
        two = self.ctas == 2
        shared = SmemAllocator()
        sA = shared.allocate_tensor(self.operand, a_staged.outer, byte_alignment=1024, swizzle=a_staged.inner)
        sB = shared.allocate_tensor(self.operand, b_staged.outer, byte_alignment=1024, swizzle=b_staged.inner)
        sC = shared.allocate_tensor(half, c_staged.outer, byte_alignment=1024, swizzle=c_staged.inner)
        full = shared.allocate_array(cutlass.Int64, self.STAGES)
        empty = shared.allocate_array(cutlass.Int64, self.STAGES)
        summed = shared.allocate_array(cutlass.Int64, self.ACCUMULATORS)
        taken = shared.allocate_array(cutlass.Int64, self.ACCUMULATORS)
        place = shared.allocate_array(cutlass.Int32, 1)
        row, group, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == self.LOAD:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.STAGES):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 1)
                for i in cutlass.range_constexpr(self.ACCUMULATORS):
                    cute.arch.mbarrier_init(summed + i, 1)
                    cute.arch.mbarrier_init(taken + i, 4 * self.ctas)
            cute.arch.mbarrier_init_fence()
        if warp == self.STORE:
            cute.arch.alloc_tmem(self.COLUMNS, place, is_two_cta=two)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two)
        if cutlass.const_expr(two):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
        mine = product.get_slice(rank)
        gA = mine.partition_A(cute.local_tile(mA, (self.tile[0], self.K), (row // self.ctas, None)))
        gB = mine.partition_B(cute.local_tile(mB, (self.N, self.K), (None, None)))
        gC = cute.local_tile(mC, (128, self.N), (row, None))
        one = cute.make_layout(1)
        sAIn, gAIn = cpasync.tma_partition(a_load, 0, one, cute.group_modes(sA, 0, 3), cute.group_modes(gA, 0, 3))
        sBIn, gBIn = cpasync.tma_partition(b_load, 0, one, cute.group_modes(sB, 0, 3), cute.group_modes(gB, 0, 3))
        sCOut, gCOut = cpasync.tma_partition(c_store, 0, one, cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2))
        shape = product.partition_shape_C(self.tile[:2])
        sums = product.make_fragment_C(cute.append(shape, self.ACCUMULATORS))
        sums = cute.make_tensor(base, sums.layout)
        blocks = cute.size(gA, mode=[3])
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        slot, turn = cutlass.Int32(0), cutlass.Int32(0)
        if warp == self.LOAD:
            for tile in cutlass.range(self.tiles, unroll=1):
                for block in cutlass.range(blocks, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                    if rank == 0:
                        with cute.arch.elect_one():
                            # 128 bytes of each row.
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (self.tile[0] + self.N) * 128)
                    column = group * self.tiles + tile
                    cute.copy(a_load, gAIn[None, block], sAIn[None, stage], tma_bar_ptr=full + stage)
                    cute.copy(b_load, gBIn[None, column, block], sBIn[None, stage], tma_bar_ptr=full + stage)
                    stage += 1
                    if stage == self.STAGES:
                        stage, phase = cutlass.Int32(0), phase ^ 1
        elif warp == self.MULTIPLY:
            if rank == 0:
                fA, fB = product.make_fragment_A(sA), product.make_fragment_B(sB)
                for _ in cutlass.range(self.tiles, unroll=1):
                    cute.arch.mbarrier_wait(taken + slot, turn ^ 1)
                    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
                    product.set(tcgen05.Field.ACCUMULATE, False)
                    for _ in cutlass.range(blocks, unroll=1):
                        cute.arch.mbarrier_wait(full + stage, phase)
                        for part in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                            at = sums[None, None, None, slot]
                            cute.gemm(product, at, fA[None, None, part, stage], fB[None, None, part, stage], at)
                            product.set(tcgen05.Field.ACCUMULATE, True)
                        with cute.arch.elect_one():
                            if cutlass.const_expr(two):
                                tcgen05.commit(empty + stage, 3, self.group)
                            else:
                                tcgen05.commit(empty + stage, None, self.group)
                        stage += 1
                        if stage == self.STAGES:
                            stage, phase = cutlass.Int32(0), phase ^ 1
                    with cute.arch.elect_one():
                        if cutlass.const_expr(two):
                            tcgen05.commit(summed + slot, 3, self.group)
                        else:
                            tcgen05.commit(summed + slot, None, self.group)
                    slot += 1
                    if slot == self.ACCUMULATORS:
                        slot, turn = cutlass.Int32(0), turn ^ 1
        else:
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
            flat = sums[(None, None), 0, 0, None]
            take = tcgen05.make_tmem_copy(atom, flat[None, None, 0]).get_slice(thread)
            source = take.partition_S(flat)
            target = take.partition_D(sC[None, None, 0])
            for tile in cutlass.range(self.tiles, unroll=1):
                cute.arch.mbarrier_wait(summed + slot, turn)
                cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
                registers = cute.make_rmem_tensor(target.shape, cutlass.Float32)
                cute.copy(atom, source[None, None, None, slot], registers)
                cute.arch.fence_view_async_tmem_load()
                cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(taken + slot, 0 if cutlass.const_expr(two) else None)
                if warp == self.STORE:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                rounded = cute.make_rmem_tensor(target.shape, half)
                rounded.store(registers.load().to(half))
                cute.autovec_copy(rounded, target)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                if warp == self.STORE:
                    cute.copy(c_store, sCOut[None, 0], gCOut[None, group * self.tiles + tile])
                    cute.arch.cp_async_bulk_commit_group()
                slot += 1
                if slot == self.ACCUMULATORS:
                    slot, turn = cutlass.Int32(0), turn ^ 1
            if warp == self.STORE:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(two):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == self.STORE:
            cute.arch.dealloc_tmem(base, self.COLUMNS, is_two_cta=two)
