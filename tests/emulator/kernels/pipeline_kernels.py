# SPDX-License-Identifier: Apache-2.0
"""Small kernels with pipelines that wrap around: tensor copies, cp.async with groups and with mbarriers, a cluster.

Each sums parts of its input, since what is tested is the order of things. Mechanisms: PTX ISA 9.2, 9.7.9.25 (copies),
9.7.13.15 (mbarriers), 9.7.9.12 (st.async).
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.primitives.moved import SmemAllocator

WARPGROUP = 128


class TmaPipeline:
    """out[m, n] = sum over k of x[m, k, n], a tile [64, 32] at a time; float16.

    A producer warp loads the tiles of a row of them through `STAGES` buffers, a warpgroup sums them and stores the
    sum by a tensor copy. A block takes `tiles` rows, one after the other.
    """

    TILE = (64, 32)
    STAGES = 2

    def __init__(self, blocks=5, tiles=2):
        self.blocks, self.tiles = blocks, tiles

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, cutlass.Float16)
        staged = cute.tile_to_shape(atom, (*self.TILE, self.STAGES), order=(0, 1, 2))
        single = cute.slice_(staged, (None, None, 0))
        load, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, single, self.TILE)
        store, mOut = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, single, self.TILE)
        grid = cute.size(out, mode=[0]) // self.TILE[0] // self.tiles
        self.kernel(load, mX, store, mOut, staged, single).launch(grid=(grid, 1, 1), block=(2 * WARPGROUP, 1, 1))

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        mX: cute.Tensor,
        store: cute.CopyAtom,
        mOut: cute.Tensor,
        staged: cute.ComposedLayout,
        single: cute.ComposedLayout,
    ):
        shared = SmemAllocator()
        sX = shared.allocate_tensor(cutlass.Float16, staged.outer, byte_alignment=1024, swizzle=staged.inner)
        sOut = shared.allocate_tensor(cutlass.Float16, single.outer, byte_alignment=1024, swizzle=single.inner)
        full = shared.allocate_array(cutlass.Int64, self.STAGES)
        empty = shared.allocate_array(cutlass.Int64, self.STAGES)
        first = cute.arch.block_idx()[0] * self.tiles
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.STAGES):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, WARPGROUP // 32)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        gX = cute.local_tile(mX, self.TILE, (None, None))
        gOut = cute.local_tile(mOut, self.TILE, (None, None))
        one = cute.make_layout(1)
        sIn, gIn = cpasync.tma_partition(load, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        sBack, gBack = cpasync.tma_partition(store, 0, one, cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2))
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        if warp >= WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(40)
            if warp == WARPGROUP // 32:
                for tile in cutlass.range(self.tiles, unroll=1):
                    for block in cutlass.range(self.blocks, unroll=1):
                        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.TILE[0] * self.TILE[1] * 2)
                        cute.copy(load, gIn[None, first + tile, block], sIn[None, stage], tma_bar_ptr=full + stage)
                        stage += 1
                        if stage == self.STAGES:
                            stage, phase = cutlass.Int32(0), phase ^ 1
        else:
            cute.arch.setmaxregister_increase(232)
            columns = self.TILE[0] * self.TILE[1] // WARPGROUP
            row, column = thread // 2, thread % 2 * columns
            total = cute.make_rmem_tensor(cute.make_layout(columns), cutlass.Float32)
            for tile in cutlass.range(self.tiles, unroll=1):
                total.fill(0.0)
                for _ in cutlass.range(self.blocks, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    for i in cutlass.range_constexpr(columns):
                        total[i] += sX[row, column + i, stage].to(cutlass.Float32)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + stage)
                    stage += 1
                    if stage == self.STAGES:
                        stage, phase = cutlass.Int32(0), phase ^ 1
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                for i in cutlass.range_constexpr(columns):
                    sOut[row, column + i] = total[i].to(cutlass.Float16)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
                if warp == 0:
                    cute.copy(store, sBack, gBack[None, first + tile, 0])
                    cute.arch.cp_async_bulk_commit_group()
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def copy_atom():
    """A cp.async of 16 bytes."""
    operation = cpasync.CopyG2SOp(cute.nvgpu.LoadCacheMode.GLOBAL)
    return cute.make_copy_atom(operation, cutlass.Float32, num_bits_per_copy=128)


class CopyGroups:
    """out[m] = sum over k of x[k, m], float32; every thread copies its 16 bytes by cp.async and reads its neighbour's.

    `STAGES` - 1 copies are under way; the last of them, behind the end, are empty groups.
    """

    STAGES = 3
    THREADS = 128

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(cute.size(out) // (4 * self.THREADS), 1, 1), block=(self.THREADS, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        shared = SmemAllocator()
        layout = cute.make_layout((4, self.THREADS, self.STAGES))
        sX = shared.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
        thread = cute.arch.thread_idx()[0]
        mine = cute.arch.block_idx()[0] * self.THREADS + thread
        atom = copy_atom()
        blocks = cute.size(x, mode=[0])
        gX = cute.logical_divide(x, (None, cute.make_layout(4)))[None, (None, mine)]
        for block in cutlass.range_constexpr(self.STAGES - 1):
            cute.copy(atom, gX[block, None], sX[None, thread, block])
            cute.arch.cp_async_commit_group()
        other = (thread + 37) % self.THREADS
        total = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
        total.fill(0.0)
        for block in cutlass.range(blocks, unroll=1):
            cute.arch.cp_async_wait_group(self.STAGES - 2)
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(4):
                total[i] += sX[i, other, block % self.STAGES]
            ahead = block + self.STAGES - 1
            if ahead < blocks:
                cute.copy(atom, gX[ahead, None], sX[None, thread, ahead % self.STAGES])
            cute.arch.cp_async_commit_group()
        for i in cutlass.range_constexpr(4):
            out[(cute.arch.block_idx()[0] * self.THREADS + other) * 4 + i] = total[i]


class CopyBarriers:
    """As CopyGroups with one block; two warps copy, two others sum; mbarriers are between them."""

    STAGES = 2
    THREADS = 64

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(2 * self.THREADS, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        shared = SmemAllocator()
        layout = cute.make_layout((4, self.THREADS, self.STAGES))
        sX = shared.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
        full = shared.allocate_array(cutlass.Int64, self.STAGES)
        empty = shared.allocate_array(cutlass.Int64, self.STAGES)
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.STAGES):
                    cute.arch.mbarrier_init(full + i, self.THREADS)
                    cute.arch.mbarrier_init(empty + i, self.THREADS)
        cute.arch.sync_threads()
        blocks = cute.size(x, mode=[0])
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        if warp < self.THREADS // 32:
            atom = copy_atom()
            gX = cute.logical_divide(x, (None, cute.make_layout(4)))[None, (None, thread)]
            for block in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                cute.copy(atom, gX[block, None], sX[None, thread, stage])
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage += 1
                if stage == self.STAGES:
                    stage, phase = cutlass.Int32(0), phase ^ 1
        else:
            other = (thread + 37) % self.THREADS
            total = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
            total.fill(0.0)
            for _ in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                for i in cutlass.range_constexpr(4):
                    total[i] += sX[i, other, stage]
                cute.arch.mbarrier_arrive(empty + stage)
                stage += 1
                if stage == self.STAGES:
                    stage, phase = cutlass.Int32(0), phase ^ 1
            for i in cutlass.range_constexpr(4):
                out[other * 4 + i] = total[i]


@dsl_user_op
def store_async(value, pointer, barrier, rank, *, loc=None, ip=None):
    """st.async of a float32 to the same place in another CTA of the cluster, with that CTA's mbarrier."""
    there = cute.arch.map_dsmem_ptr(pointer, rank, loc=loc, ip=ip)
    signal = cute.arch.map_dsmem_ptr(barrier, rank, loc=loc, ip=ip)
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[
            cutlass.Int32(there.toint(loc=loc, ip=ip)),
            value,
            cutlass.Int32(signal.toint(loc=loc, ip=ip)),
        ],
        loc=loc,
        ip=ip,
    )


class ClusterSum:
    """out[cta, round] = sum of x[round], float32 [rounds, CTAS * 64]: a part in each CTA, exchanged by st.async.

    Slots for the parts are used in turn; whoever has read one tells all senders.
    """

    CTAS = 4
    SLOTS = 2
    WARPS = 2

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(self.CTAS, 1, 1), block=(32 * self.WARPS, 1, 1), cluster=(self.CTAS, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        shared = SmemAllocator()
        parts = self.CTAS * self.WARPS
        sPart = shared.allocate_tensor(cutlass.Float32, cute.make_layout((parts, self.SLOTS)), byte_alignment=16)
        full = shared.allocate_array(cutlass.Int64, self.SLOTS)
        empty = shared.allocate_array(cutlass.Int64, self.SLOTS)
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.SLOTS):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, parts)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        slot, phase = cutlass.Int32(0), cutlass.Int32(0)
        for number in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            part = x[number, rank * 32 * self.WARPS + thread]
            for step in cutlass.range_constexpr(5):
                part += cute.arch.shuffle_sync_bfly(part, offset=1 << step)
            cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + slot, 4 * parts)
            if lane < self.CTAS:
                mine = sPart.iterator + slot * parts + rank * self.WARPS + warp
                store_async(part, mine, full + slot, lane)
            cute.arch.mbarrier_wait(full + slot, phase)
            total = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(parts):
                total += sPart[i, slot]
            cute.arch.sync_warp()
            if lane < self.CTAS:
                cute.arch.mbarrier_arrive(empty + slot, lane)
            if thread == 0:
                out[rank, number] = total
            slot += 1
            if slot == self.SLOTS:
                slot, phase = cutlass.Int32(0), phase ^ 1
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
