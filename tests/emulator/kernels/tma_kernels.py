# SPDX-License-Identifier: Apache-2.0
"""Kernels of tensor copies: one that copies a matrix tile by tile, one that only takes tensor maps."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.primitives.moved import SmemAllocator

KINDS = warpgroup.SmemLayoutAtomKind
SWIZZLES = {0: KINDS.K_INTER, 32: KINDS.K_SW32, 64: KINDS.K_SW64, 128: KINDS.K_SW128}
ATOMS_OF_32 = 128 + 32


class TmaCopy:
    """Copies float16 [rows, columns] through shared memory, a tile per block, both ways by tensor copies."""

    def __init__(self, tile=(64, 32), cluster=(1, 1, 1), pdl=False):
        self.tile, self.cluster, self.pdl = tile, cluster, pdl

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor):
        layout = cute.make_layout(self.tile, stride=(self.tile[1], 1))
        load, mSource = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, layout, self.tile)
        store, mTarget = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), target, layout, self.tile)
        self.kernel(load, mSource, store, mTarget, layout).launch(
            grid=(cute.size(source, mode=[0]) // self.tile[0], cute.size(source, mode=[1]) // self.tile[1], 1),
            block=(128, 1, 1),
            cluster=self.cluster,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        mSource: cute.Tensor,
        store: cute.CopyAtom,
        mTarget: cute.Tensor,
        layout: cute.Layout,
    ):
        shared = SmemAllocator()
        sTile = shared.allocate_tensor(cutlass.Float16, layout, byte_alignment=128)
        barrier = shared.allocate_array(cutlass.Int64, 1)
        row, column, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        sides = cute.group_modes(sTile, 0, 2)
        gSource = cute.group_modes(cute.local_tile(mSource, self.tile, (row, column)), 0, 2)
        gTarget = cute.group_modes(cute.local_tile(mTarget, self.tile, (row, column)), 0, 2)
        sIn, gIn = cpasync.tma_partition(load, 0, cute.make_layout(1), sides, gSource)
        sOut, gOut = cpasync.tma_partition(store, 0, cute.make_layout(1), sides, gTarget)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tile[0] * self.tile[1] * 2)
            cute.copy(load, gIn, sIn, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        if warp == 0:
            cute.copy(store, sOut, gOut)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


class TensorMaps:
    """A kernel that takes one tensor map for each (tile, swizzle in bytes) of a tensor, and fetches them.

    A swizzle of ATOMS_OF_32 is that of 128 bytes with atoms of 32, of matrices of 32-bit elements.
    """

    def __init__(self, forms, internal=None):
        self.forms, self.internal = forms, internal

    @cute.jit
    def __call__(self, tensor: cute.Tensor):
        atoms = []
        for tile, swizzle in cutlass.const_expr(self.forms):
            if cutlass.const_expr(swizzle == 0):
                layout = cute.make_ordered_layout(tile, order=tuple(reversed(range(len(tile)))))
            else:
                if cutlass.const_expr(swizzle == ATOMS_OF_32):
                    atom = cute.make_composed_layout(
                        cute.make_swizzle(2, 5, 2), 0, cute.make_layout((8, 32), stride=(32, 1))
                    )
                else:
                    atom = warpgroup.make_smem_layout_atom(SWIZZLES[swizzle], tensor.element_type)
                layout = cute.tile_to_shape(atom, tile, order=(0, 1))
            atoms.append(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(),
                    tensor,
                    layout,
                    tile,
                    internal_type=self.internal,
                )[0]
            )
        self.kernel(tuple(atoms)).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, atoms: tuple):
        for index in cutlass.range_constexpr(len(self.forms)):
            cpasync.prefetch_descriptor(atoms[index])
