# SPDX-License-Identifier: Apache-2.0
"""Transposition warps: V in 8 bits from rows of keys to rows of columns, in shared memory.

WGMMA in 8 bits takes B with the elements of its sum one after the other: of P V these are keys, and a cache has a key's
columns one after the other. TMA fills stages of V as it is stored (barriers `v_loaded` and `v_taken`); the warps here
fill those of V transposed, which the MMA warps read.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.primitives.copy import clear_rows, load_matrices_transposed, store_matrices
from dsl_backend.primitives.math import permute_bytes
from dsl_backend.primitives.ring import phase_of, stage_of

TRANSPOSE_WARPS = 2
TRANSPOSE_THREADS = 32 * TRANSPOSE_WARPS
TRANSPOSE_BARRIER = 5  # a named barrier
BLOCK_KEYS, BLOCK_COLUMNS = 32, 16  # what a warp transposes at once: four matrices
# Of two words of (key, column), (key, next column), (next key, column), (next key, next column): the bytes of the
# column, and those of the next one.
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531


def swizzle_of(offset: Any, width: int) -> Any:
    """What the swizzle of rows of `width` bytes adds, by XOR, to the offset of 16 bytes."""
    return (offset >> 3) & (width - 16)


class TransposeWarps:
    """The transposition warps' loop over V, in the order in which it is loaded.

    Of each 16 keys, keys 2q, 2q + 1, 8 + 2q and 9 + 2q become neighbours: thread q of a quad has these columns of an
    accumulator S, so that its P is an A operand as it is.

    Args:
        sV_tma: (tile_n, head_dim_v, stage) of bytes, as TMA wrote them; rows of `width` bytes, swizzled.
        sVt: (head_dim_v, tile_n, stage) of bytes, as MMAs read them; rows of `width_t` bytes, swizzled.
        widths: (width, width_t).
        thread: among TRANSPOSE_THREADS.
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: Any,
        sV_tma: cute.Tensor,
        sVt: cute.Tensor,
        widths: tuple[int, int],
        requests: Requests,
        thread: cutlass.Int32,
    ) -> None:
        self.work_pipeline, self.barriers, self.thread = work_pipeline, barriers, thread
        self.tile_n, self.columns, self.stages = kernel.tile_n, kernel.dims_v, kernel.config.stages
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.has_window_left = kernel.key.has_window_left
        self.sV_tma, self.width, self.width_t = sV_tma, *widths
        self.source, self.target = (cutlass.Int32(tensor.iterator.toint()) for tensor in (sV_tma, sVt))
        lane = thread % 32
        # The row of memory that a lane addresses: of the source a key, of the target a column.
        self.key_offset = lane * self.width
        row, odd = lane % 8, lane // 8 % 2
        # Rows 4 to 7 of a matrix have the odd column where rows 0 to 3 have the even one: else two rows of each would
        # lie in the same banks.
        self.column_offset = (2 * row + (odd ^ (row // 4))) * self.width_t
        self.key_half = lane // 16 * 16
        upper = lane // 16
        self.first_bytes = EVEN_BYTES + upper * (ODD_BYTES - EVEN_BYTES)
        self.second_bytes = ODD_BYTES + upper * (EVEN_BYTES - ODD_BYTES)

    @cute.jit
    def run(self):
        tile_count, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(tile_count)
        valid = work.valid
        while valid != 0:
            n_block = work.n_block_max - 1
            for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                self.transpose_n_block(work, n_block - step, kv_idx)
                kv_idx += 1
            tile_count += 1
            work = self.work_pipeline.consume(tile_count)
            valid = work.valid

    @cute.jit
    def transpose_n_block(self, work: WorkTile, n_block: cutlass.Int32, kv_idx: cutlass.Int32):
        """Transpose V of one key tile; kv_idx counts the tiles of all work tiles."""
        stage, phase = stage_of(kv_idx, self.stages), phase_of(kv_idx, self.stages)
        cute.arch.mbarrier_wait(self.barriers.v_loaded + stage, phase)
        self.zero_fill(work, n_block, stage)
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase ^ 1)
        for block in cutlass.range_constexpr(self.columns // BLOCK_COLUMNS // TRANSPOSE_WARPS):
            self.transpose_columns(self.thread // 32 + block * TRANSPOSE_WARPS, stage)
        # After the stores, which depend on the loads: see DequantTiles. MMAs and TMA use the async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.v_taken + stage)
            cute.arch.mbarrier_arrive(self.barriers.v_full + stage)

    @cute.jit
    def transpose_columns(self, column_block: cutlass.Int32, stage: cutlass.Int32):
        """Transpose 16 columns of all keys of a tile."""
        column, size = column_block * BLOCK_COLUMNS, cutlass.const_expr(self.tile_n * self.columns)
        source = self.source + stage * size + column // self.width * self.tile_n * self.width + self.key_offset
        source += (column % self.width) ^ swizzle_of(self.key_offset, self.width)
        target = self.target + stage * size + column * self.width_t + self.column_offset
        for key in cutlass.range_constexpr(0, self.tile_n, BLOCK_KEYS):
            words = load_matrices_transposed(source + key * self.width)
            pairs = (words[0], words[1]), (words[2], words[3])
            out = [
                permute_bytes(low, high, selector)
                for low, high in pairs
                for selector in (self.first_bytes, self.second_bytes)
            ]
            chunk_offset = cutlass.const_expr(key // self.width_t * self.columns * self.width_t)
            within = (key % self.width_t + self.key_half) ^ swizzle_of(self.column_offset, self.width_t)
            store_matrices(target + chunk_offset + within, out)

    @cute.jit
    def zero_fill(self, work: WorkTile, n_block: cutlass.Int32, stage: cutlass.Int32):
        """Zero-fill keys beyond the last one and before the first query's window: P = 0 times NaN is NaN."""
        sV = self.sV_tma[None, None, stage]
        num_keys = work.seqlen_k - n_block * self.tile_n
        if num_keys < self.tile_n:
            clear_rows(sV, cutlass.max(num_keys, 0), self.tile_n, self.thread, TRANSPOSE_THREADS)
            self.sync()
        if cutlass.const_expr(self.has_window_left):
            num_keys = self.mask.keys_before_window(work.q_position, n_block)
            if num_keys > 0:
                clear_rows(sV, 0, num_keys, self.thread, TRANSPOSE_THREADS)
                self.sync()

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=TRANSPOSE_BARRIER, number_of_threads=TRANSPOSE_THREADS)
