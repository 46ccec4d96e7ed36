# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM with swapped operands on SM90: weights are wgmma's M, rows of x (tokens) its N.

wgmma's M comes in steps of 64, its N in steps of 8. So a tile can have about as many rows as there are tokens, and
few products of rows that do not exist.

A thread has the accumulators of rows r and r + 8. In a tile of weights, 8 gate rows and the 8 up rows of the same
columns alternate, so that a thread finds both there. One TMA copy makes that order, from gate and up halves or from
alternating rows: to it the weights are [8 rows, 2 parts, n / 8, k].
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import BLOCK_K, WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M, SwapABConfig
from dsl_backend.gemm.sm90.gemm import CONSUMER_BARRIER, Gemm
from dsl_backend.gemm.tiled import GemmParams
from dsl_backend.gemm.views import bias_of, parts_view
from dsl_backend.primitives.accumulators import cvt_f16x2
from dsl_backend.primitives.copy import store_matrices_transposed

OCTET = 8  # gate rows, and up rows, that lie together
# Columns of the output of 64 rows of a tile.
MMA_OUT = MMA_M // 2


class SwapABGemm(Gemm):
    """See `gemm/tiled.py`, whose tile_m are tokens here; a row in memory of the output is a column of accumulators."""

    def __init__(self, key: GemmKey[SwapABConfig]):
        super().__init__(key)
        config = key.config
        self.epi_tokens, self.mma_n = config.epi_tokens, config.tokens
        self.epi_tile = (self.epi_tokens, MMA_OUT)
        self.box_octets, self.tail_boxes = self.box_n // (2 * OCTET), config.tail_boxes

    def rows_loaded(self, params: GemmParams, m_tile):
        """The same; without `tail_boxes` all rows of a tile that has some."""
        if self.tail_boxes:
            return super().rows_loaded(params, m_tile)
        rows = params.mX.shape[0] - m_tile * self.tile_m
        return cutlass.min(cutlass.max(rows, 0), 1) * self.tile_m

    def weight_copy(self, operands: GemmOperands, weight_op):
        """(tma_atom_w, mW): the copy of a box of weights, and coordinates [8, 2, n / 8, k]."""
        view = parts_view(operands.weight, self.parts, self.interleaved)
        n, k, _ = view.shape
        row, _, part = view.stride
        layout = cute.make_layout((OCTET, 2, n // OCTET, k), stride=(row, part, OCTET * row, 1))
        weights = cute.make_tensor(operands.weight.iterator, layout)
        box = (OCTET, 2, self.box_octets, BLOCK_K)
        sW_box = cute.make_layout(box, stride=(BLOCK_K, OCTET * BLOCK_K, 2 * OCTET * BLOCK_K, 1))
        swizzled = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, sW_box)
        return cpasync.make_tiled_tma_atom(weight_op, weights, swizzled, box)

    def weight_partition(self, params: GemmParams, sW: cute.Tensor):
        """(tWsW, tWgW) of the copies of weights: [copy, box, stage] and [copy, box of n, k tile]."""
        box = (OCTET, 2, self.box_octets, BLOCK_K)
        gW = cute.local_tile(params.mW, box, (0, 0, None, None))
        box_elements = self.box_n * BLOCK_K
        layout = cute.make_layout(
            (*box, 2, self.stages),
            stride=(BLOCK_K, OCTET * BLOCK_K, 2 * OCTET * BLOCK_K, 1, box_elements, 2 * box_elements),
        )
        boxes = cute.make_tensor(sW.iterator, layout)
        return cpasync.tma_partition(
            params.tma_atom_w, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 4), cute.group_modes(gW, 0, 4)
        )

    def box(self, tWgW: cute.Tensor, n_tile, k_tile, index):
        """The first or the second half of a tile's rows."""
        return tWgW[None, 2 * n_tile + index, k_tile]

    def sOut_layout(self) -> cute.ComposedLayout:
        """Of the consumers' output buffers, one for each 64 rows: [epi_tokens, 32 columns, 64 rows of a consumer].

        The swizzle of rows of 64 bytes: their 16-byte vectors are permuted by the row's place among 8.
        """
        plain = cute.make_ordered_layout((*self.epi_tile, self.consumers * self.mma_tiles_m), order=(1, 0, 2))
        return cute.make_composed_layout(cute.make_swizzle(2, 4, 3), 0, plain)

    def sOut_tile(self, sOut_layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """One of these buffers; CuTe DSL 4.6.0 aborts the process where it is to slice buffers of 40 rows."""
        return cute.make_composed_layout(
            cute.make_swizzle(2, 4, 3), 0, cute.make_layout(self.epi_tile, stride=(MMA_OUT, 1))
        )

    def consumer_operands(self, tiled_mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, group, thread):
        """(row_tile, tCrA, tCrB, acc): which rows of a tile's weights a consumer has, weights, x, and accumulators."""
        thr_mma = tiled_mma.get_slice(thread)
        row_tile = 0 if self.pingpong else group
        sW_rows = cute.local_tile(sW, (self.consumer_m, BLOCK_K), (row_tile, 0, None))
        tCrW = tiled_mma.make_fragment_A(thr_mma.partition_A(sW_rows))
        tCrX = tiled_mma.make_fragment_B(thr_mma.partition_B(sX))
        acc_shape = tiled_mma.partition_shape_C((self.consumer_m, self.mma_n))
        return row_tile, tCrW, tCrX, cute.make_rmem_tensor(acc_shape, cutlass.Float32)

    @cute.jit
    def init_acc(
        self,
        params: GemmParams,
        acc: cute.Tensor,
        first_column: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
        thread: cutlass.Int32,
    ):
        """Accumulators start with the bias of their rows."""
        n = params.mOut.shape[1]
        column = first_column + row_tile * (self.consumer_m // 2) + thread // 32 * OCTET + thread % 32 // 4
        for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
            for part in cutlass.range_constexpr(2):
                value = bias_of(params.mBias, column + mma_tile * MMA_OUT, part, n, self.interleaved)
                for j in cutlass.range_constexpr(self.mma_n // 8):
                    for a in cutlass.range_constexpr(2):
                        acc[(a, part, j), mma_tile, 0] = value

    @cute.jit
    def epilogue(
        self,
        params: GemmParams,
        acc: cute.Tensor,
        sOut: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
        m_tile: cutlass.Int32,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
    ):
        """Accumulators of a consumer's rows of a CTA's tile to the output, `epi_tokens` tokens at a time."""
        gOut = cute.local_tile(params.mOut, self.epi_tile, (None, None))
        tOsO, tOgO = cpasync.tma_partition(
            params.tma_atom_out, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        pieces = cutlass.const_expr(self.mma_n // self.epi_tokens)
        first_out = n_tile * (self.columns // MMA_OUT) + row_tile * self.mma_tiles_m
        for piece in cutlass.range_constexpr(pieces):
            words = [self.convert(acc, mma_tile, piece) for mma_tile in range(self.mma_tiles_m)]
            # The TMA stores that were issued last have read these buffers.
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
            for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
                self.stage_out(sOut, words[mma_tile], group * self.mma_tiles_m + mma_tile, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
            if thread < 32:
                # Stores are awaited by the thread that issued them: `elect_one` elects the same one every time.
                with cute.arch.elect_one():
                    for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
                        cute.copy(
                            params.tma_atom_out,
                            tOsO[None, group * self.mma_tiles_m + mma_tile],
                            tOgO[None, m_tile * pieces + piece, first_out + mma_tile],
                        )
                    cute.arch.cp_async_bulk_commit_group()

    def convert(self, acc: cute.Tensor, mma_tile: int, piece: int) -> list:
        """Outputs of a thread for 64 rows and `epi_tokens` tokens, in pairs of neighbouring tokens.

        wgmma's accumulators: a thread has tokens 8 j + 2 (lane % 4) + a of rows 16 warp + lane / 4 + 8 part.
        """
        tokens = range(piece * self.epi_tokens // 8, (piece + 1) * self.epi_tokens // 8)
        gates, ups = ([acc[(a, part, j), mma_tile, 0] for j in tokens for a in range(2)] for part in range(2))
        values = self.activate(gates, ups)
        return [cvt_f16x2(values[i], values[i + 1], self.out_dtype) for i in range(0, len(values), 2)]

    def stage_out(self, sOut: cute.Tensor, words: list, buffer, thread):
        """Outputs of a thread to a buffer, where a row has the 32 columns of a token, 8 of each warp."""
        row_bytes = MMA_OUT * 2
        lane, vector = thread % 32, thread // 32
        row = cutlass.Int32(sOut.iterator.toint()) + (buffer * self.epi_tokens + lane) * row_bytes
        # Each store begins at a multiple of 8 rows, as the swizzle does.
        address = row + (vector ^ (lane // 2 % 4)) * 16
        done = 0
        while done < len(words):
            count = next(count for count in (4, 2, 1) if done + count <= len(words))
            store_matrices_transposed(address + done * 8 * row_bytes, words[done : done + count])
            done += count
