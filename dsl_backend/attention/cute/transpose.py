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
from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.primitives.copy import clear_rows, load_matrices_transposed, store_matrices
from dsl_backend.primitives.math import permute_bytes
from dsl_backend.primitives.ring import phase_of, stage_of

TRANSPOSE_WARPS = 2
TRANSPOSE_THREADS = 32 * TRANSPOSE_WARPS
TRANSPOSE_BARRIER = 5  # a named barrier
BLOCK_KEYS, BLOCK_COLUMNS = 32, 16  # of a block that one ldmatrix loads: four matrices
# A warp loads so many blocks before it stores them: a store keeps the loads behind it waiting, about 30 cycles each.
BLOCKS_IN_FLIGHT = 4
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
        sV_tma: (tile_n, columns, stage) of bytes, as TMA wrote them: head_dim_v columns, or more, of which V are the
            first; rows of `width` bytes, swizzled.
        sVt: (head_dim_v, tile_n, stage) of bytes, as MMAs read them; rows of `width_t` bytes, swizzled.
        widths: (width, width_t).
        thread: among TRANSPOSE_THREADS.
        num_ctas: CTAs whose TMA loads write to this CTA's source (multicast).
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
        num_ctas: int = 1,
    ) -> None:
        self.work_pipeline, self.barriers, self.thread = work_pipeline, barriers, thread
        self.tile_n, self.columns = kernel.tile_n, kernel.dims_v
        self.source_stages, self.stages = cute.size(sV_tma, mode=[2]), cute.size(sVt, mode=[2])
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.has_window_left = kernel.key.has_window_left
        self.num_ctas = num_ctas
        self.sV_tma, self.width, self.width_t = sV_tma, *widths
        self.source, self.target = (cutlass.Int32(tensor.iterator.toint()) for tensor in (sV_tma, sVt))
        lane = thread % 32
        self.first_column = thread // 32 * BLOCK_COLUMNS  # of a chunk's, this warp's
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
        source_stage, stage = stage_of(kv_idx, self.source_stages), stage_of(kv_idx, self.stages)
        cute.arch.mbarrier_wait(self.barriers.v_loaded + source_stage, phase_of(kv_idx, self.source_stages))
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase_of(kv_idx, self.stages) ^ 1)
        self.transpose_seen(work, n_block, source_stage, stage)
        # After the stores, which depend on the loads: see DequantTiles. MMAs and TMA use the async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_warp(self.barriers.v_taken + source_stage, self.num_ctas)
        arrive_warp(self.barriers.v_full + stage)

    @cute.jit
    def transpose_blocks(self, source_stage: cutlass.Int32, stage: cutlass.Int32):
        """Transpose this warp's part of each chunk of columns of a tile.

        In a loop: ptxas would keep the addresses of many blocks in registers.
        """
        stage_bytes = cutlass.const_expr(cute.size(self.sV_tma, mode=[0]) * cute.size(self.sV_tma, mode=[1]))
        source = self.source + source_stage * stage_bytes + self.key_offset
        target = self.target + stage * (self.tile_n * self.columns) + self.column_offset
        target += self.first_column * self.width_t
        for _ in cutlass.range(self.columns // self.width, unroll=1):
            self.transpose_chunk(source, target)
            source += self.tile_n * self.width
            target += self.width * self.width_t

    def transpose_chunk(self, source: cutlass.Int32, target: cutlass.Int32) -> None:
        """Transpose this warp's columns of a chunk, for all keys; source, target: a lane's first key, and column."""
        step = BLOCK_COLUMNS * TRANSPOSE_WARPS
        blocks = [(key, column) for key in range(0, self.tile_n, BLOCK_KEYS) for column in range(0, self.width, step)]
        for first in range(0, len(blocks), BLOCKS_IN_FLIGHT):
            some = blocks[first : first + BLOCKS_IN_FLIGHT]
            loaded = [load_matrices_transposed(self.source_of(source, *block)) for block in some]
            for block, words in zip(some, loaded, strict=True):
                store_matrices(self.target_of(target, *block), self.transposed(words))

    def source_of(self, source: cutlass.Int32, key: int, column: int) -> cutlass.Int32:
        """Where a lane's key of a block lies; key, column: the block's first, of this warp's of a chunk."""
        swizzled = (self.first_column + column) ^ swizzle_of(self.key_offset, self.width)
        return source + swizzled + key * self.width

    def target_of(self, target: cutlass.Int32, key: int, column: int) -> cutlass.Int32:
        """Where a lane's column of a block goes."""
        target += column * self.width_t + key // self.width_t * self.columns * self.width_t
        return target + ((key % self.width_t + self.key_half) ^ swizzle_of(self.column_offset, self.width_t))

    def transposed(self, words: tuple[cutlass.Int32, ...]) -> list[cutlass.Int32]:
        """The words of a block as they are stored."""
        pairs = (words[0], words[1]), (words[2], words[3])
        selectors = self.first_bytes, self.second_bytes
        return [permute_bytes(low, high, selector) for low, high in pairs for selector in selectors]

    def transpose_seen(
        self, work: WorkTile, n_block: cutlass.Int32, source_stage: cutlass.Int32, stage: cutlass.Int32
    ) -> None:
        """Transpose a tile, with zeros for the keys that no row sees."""
        self.zero_fill(work, n_block, source_stage)
        self.transpose_blocks(source_stage, stage)

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


class LatentTransposeWarps(TransposeWarps):
    """As TransposeWarps, of rows of MLA, which are read as keys at the same time: nothing is written to them.

    Args:
        sZeros: 16 bytes of zeros, which take the place of the keys that no row sees.
    """

    def __init__(self, *args: Any, sZeros: cute.Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self.zeros = cutlass.Int32(sZeros.iterator.toint())
        # Of this lane's key in each block: 1 where a row may see it.
        self.seen = cute.make_rmem_tensor(self.tile_n // BLOCK_KEYS, cutlass.Int32)

    @cute.jit
    def source_of(self, source: cutlass.Int32, key: cutlass.Constexpr[int], column: cutlass.Constexpr[int]):
        source = TransposeWarps.source_of(self, source, key, column)
        return source if self.seen[key // BLOCK_KEYS] != 0 else self.zeros

    @cute.jit
    def transpose_seen(self, work: WorkTile, n_block: cutlass.Int32, source_stage: cutlass.Int32, stage: cutlass.Int32):
        # Not another loop for tiles that all rows see: it needs registers that there are not (ptxas 13.0).
        end = work.seqlen_k - n_block * self.tile_n
        first, seen = self.mask.keys_before_window(work.q_position, n_block), self.seen
        for block in cutlass.range_constexpr(self.tile_n // BLOCK_KEYS):
            key = self.thread % 32 + block * BLOCK_KEYS
            seen[block] = cutlass.Int32(1) if key >= first and key < end else cutlass.Int32(0)
        self.transpose_blocks(source_stage, stage)
