# SPDX-License-Identifier: Apache-2.0
"""The GEMM of weights of 4 or 8 bits for few rows on SM90: weights are unpacked in registers on the way to wgmma.

Operands are swapped, so that weights are wgmma's A, which may come from registers. Packed tiles arrive by bulk copies
in the order in which threads read them (`quant/weight_only.py`). Integers less their zero points are exact in 16 bits:
products have no error of a scale, and the sums of each 128 columns are multiplied by it when they are added up.

A consumer's two boxes take turns: it unpacks one while the products of the other are in flight.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.args import GemmOperands, StreamKScratch
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.sm90.small_m import SmallMGemm
from dsl_backend.gemm.sm90.unpacking import Unpacking
from dsl_backend.gemm.sm90.weight_only_configs import WeightOnlyConfig
from dsl_backend.gemm.small_m import SmallMParams, StreamKWork
from dsl_backend.gemm.weight_only import WeightOnlyKey
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.primitives.copy import bulk_load
from dsl_backend.primitives.moved import LayoutEnum, SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline, Role, warps
from dsl_backend.quant.weight_only import TILE_COLUMNS


class WeightOnlySmallMGemm(Unpacking, SmallMGemm):
    """See `gemm/small_m.py`; operands' weight is packed."""

    def __init__(self, key: WeightOnlyKey[WeightOnlyConfig]):
        super().__init__(key)
        self.set_format(key)
        self.row_tiles, self.stage_bytes = key.config.row_tiles, key.config.packed_stage_bytes(key.kind)

    @property
    def consumers(self) -> Role:
        """Every warp reads its own weights, and may be behind the others."""
        return warps(self.groups * WARPGROUP // WARP)

    def release(self, pipeline: Pipeline, position, thread):
        """By a consumer's threads: give a position's stage back, each warp for itself."""
        pipeline.warp_release(position, thread % WARP)

    def tiled_mma(self) -> cute.TiledMma:
        """A warpgroup's products of 64 rows of weights in registers with its tokens."""
        return self.unpacked_mma(self.tokens)

    def params(self, operands: GemmOperands, scratch: StreamKScratch | None) -> SmallMParams:
        """The kernel's, with a TMA descriptor of x; weights have none."""
        partials, flags = (None, None) if scratch is None else scratch
        tile = (self.box, self.tile_tokens, self.tile_k)
        sX_box = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.x_dtype, 1)
        tma_atom_x, mX = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            operands.x,
            cute.slice_(sX_box, (None, None, 0)),
            (self.tile_tokens, self.tile_k),
        )
        return SmallMParams(None, operands.weight, tma_atom_x, mX, operands.bias, None, operands.out, partials, flags)

    def smem_layouts(self):
        """(sW_layout, sX_layout): stages of packed tiles and of x [tile_tokens, tile_k]."""
        words = self.kind.tile_words
        return cute.make_layout((words, self.row_tiles, self.stages)), super().smem_layouts()[1]

    @cute.jit
    def load(self, params: SmallMParams, sW: cute.Tensor, sX: cute.Tensor, pipeline: Pipeline, work: StreamKWork):
        """The load warp; see `SmallMGemmBase.load`. It counts places: to divide for each takes longer than to copy."""
        gX = cute.local_tile(params.mX, (self.tile_tokens, self.tile_k), (None, None))
        tXsX, tXgX = cpasync.tma_partition(
            params.tma_atom_x, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        count = work.end - work.start
        prologue = cutlass.min(count, self.stages)
        first = work.start // work.k_tiles
        k_tile, n_tile, m_tile = work.start % work.k_tiles, first % work.n_tiles, first // work.n_tiles
        # X's are behind those of the weights.
        x_k, x_n, x_m = k_tile, n_tile, m_tile
        for position in cutlass.range(prologue, unroll=1):
            self.load_tiles(params, sW, pipeline, position, k_tile, n_tile)
            k_tile, n_tile, m_tile = self.place_behind(work, k_tile, n_tile, m_tile)
        dependent_launch.wait()
        for position in cutlass.range(count, unroll=1):
            if position >= prologue:
                self.load_tiles(params, sW, pipeline, position, k_tile, n_tile)
                k_tile, n_tile, m_tile = self.place_behind(work, k_tile, n_tile, m_tile)
            source = self.x_box(tXgX, work, x_m, x_k)
            cute.copy(
                params.tma_atom_x, source, tXsX[None, pipeline.stage(position)], tma_bar_ptr=pipeline.full(position)
            )
            x_k, x_n, x_m = self.place_behind(work, x_k, x_n, x_m)

    @cute.jit
    def place_behind(
        self, work: StreamKWork, k_tile: cutlass.Int32, n_tile: cutlass.Int32, m_tile: cutlass.Int32
    ) -> tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32]:
        """(k_tile, n_tile, m_tile) of the next iteration."""
        k_tile += 1
        if k_tile == work.k_tiles:
            k_tile = cutlass.Int32(0)
            n_tile += 1
            if n_tile == work.n_tiles:
                n_tile = cutlass.Int32(0)
                m_tile += 1
        return k_tile, n_tile, m_tile

    def load_tiles(
        self,
        params: SmallMParams,
        sW: cute.Tensor,
        pipeline: Pipeline,
        position: cutlass.Int32,
        k_tile: cutlass.Int32,
        n_tile: cutlass.Int32,
    ):
        """The packed tiles of an iteration, once its stage is empty; past the last row the last tile again."""
        pipeline.producer_acquire(position)
        pipeline.producer_expect(position, self.stage_bytes)
        mbar_full, stage = pipeline.full(position), pipeline.stage(position)
        size, packed = 4 * self.kind.tile_words, params.mW
        column = packed.iterator.toint() + k_tile * size
        with cute.arch.elect_one():
            for i in range(self.row_tiles):
                row_tile = cutlass.min(n_tile * self.row_tiles + i, packed.shape[0] - 1)
                source = column + cutlass.Int64(row_tile) * (4 * packed.stride[0])
                bulk_load(source, sW.iterator + sW.layout((0, i, stage)), size, mbar_full)

    def allocate_weights(self, smem: SmemAllocator, sW_layout: cute.Layout) -> cute.Tensor:
        """Stages of packed tiles in shared memory."""
        return smem.allocate_tensor(cutlass.Int32, sW_layout, byte_alignment=128)

    def weight_operands(self, tiled_mma: cute.TiledMma, thr_mma: cute.TiledMma, sW: cute.Tensor, row_tile):
        """Packed tiles: a consumer unpacks its own."""
        return sW, sW

    @cute.jit
    def mainloop(
        self,
        tiled_mma: cute.TiledMma,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        pipeline: Pipeline,
        start: cutlass.Int32,
        count: cutlass.Int32,
        accumulate: cutlass.Boolean,
        place: tuple[SmallMParams, StreamKWork, cutlass.Int32],
        thread: cutlass.Int32,
    ):
        """Add the products of `count` positions to what the accumulators hold if `accumulate`, or to nothing.

        All but the last position are given back.
        """
        if not accumulate:
            acc_0.fill(0.0)
            acc_1.fill(0.0)
        sW, _, tCrX = operands
        group = place[2]
        part_0, part_1 = (cute.make_rmem_tensor(acc_0.shape, cutlass.Float32) for _ in range(2))
        fragment = tiled_mma.partition_shape_A((MMA_M, TILE_COLUMNS))
        tCrW_0, tCrW_1 = (cute.make_rmem_tensor(fragment, self.x_dtype) for _ in range(2))
        scales_0, scales_1 = (cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(2))
        # The first position stands alone: in the loop, box 1 of the position before is in flight.
        stage = pipeline.stage(start)
        pipeline.consumer_wait(start)
        self.unpack(sW, stage, group, thread, tCrW_0, scales_0)
        self.multiply(part_0, tCrW_0, tCrX, stage)
        self.unpack(sW, stage, self.groups + group, thread, tCrW_1, scales_1)
        wgmma.wait_group(0)
        fence_operand(part_0)
        self.multiply(part_1, tCrW_1, tCrX, stage)
        self.add_scaled(acc_0, part_0, scales_0)
        for i in cutlass.range(1, count, unroll=1):
            stage = pipeline.stage(start + i)
            pipeline.consumer_wait(start + i)
            self.unpack(sW, stage, group, thread, tCrW_0, scales_0)
            self.keep_in_front(pipeline, start + i)
            wgmma.wait_group(0)
            fence_operand(part_1)
            self.release(pipeline, start + i - 1, thread)
            self.multiply(part_0, tCrW_0, tCrX, stage)
            self.add_scaled(acc_1, part_1, scales_1)
            self.unpack(sW, stage, self.groups + group, thread, tCrW_1, scales_1)
            self.keep_in_front(pipeline, start + i)
            wgmma.wait_group(0)
            fence_operand(part_0)
            self.multiply(part_1, tCrW_1, tCrX, stage)
            self.add_scaled(acc_0, part_0, scales_0)
        wgmma.wait_group(0)
        fence_operand(part_1)
        self.add_scaled(acc_1, part_1, scales_1)

    def keep_in_front(self, pipeline: Pipeline, position: cutlass.Int32):
        """What was unpacked and added up stays in front of the wait that follows, where there are registers for it."""
        if not self.trades_registers:
            self.await_again(pipeline, position)

    def multiply(self, part: cute.Tensor, tCrW: cute.Tensor, tCrX: cute.Tensor, stage: cutlass.Int32):
        """Issue the products of a box with a stage's x, in place of what `part` has."""
        self.multiply_unpacked(self.tiled_mma(), part, tCrW, tCrX, stage, accumulate=False)

    def unpack(
        self,
        sW: cute.Tensor,
        stage: cutlass.Int32,
        row_tile: cutlass.Int32,
        thread: cutlass.Int32,
        tCrW: cute.Tensor,
        scales: cute.Tensor,
    ):
        """A thread's elements of a packed tile in a stage, as the A operand, and the scales of its two rows."""
        tile = sW[None, row_tile, stage]
        offsets = self.read_rows(tile.iterator + self.kind.value_words, thread, scales)
        words = cute.make_rmem_tensor(self.kind.value_words // WARPGROUP, cutlass.Int32)
        self.read_words(tile.iterator, thread, words)
        self.unpack_words(words, offsets, tCrW)
