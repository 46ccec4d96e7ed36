# SPDX-License-Identifier: Apache-2.0
"""The multiply role: one warp issues all products.

After the weights of a half have been multiplied, the next scores of the same half follow, so that while one half's
softmax works, the tensor cores work for the other. Products of one thread execute in order, which is what lets scores
overwrite weights that were just read.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.sm100.dense_configs import ROWS
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma


class MmaWarp:
    """Scores S = Q K^T and sums O += P V of each half."""

    def __init__(self, kernel, work_pipeline, mmas, barriers, base, sQ, places):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        self.places = places
        self.tiled_mma_qk = Tcgen05Mma(dtype=kernel.dtype, m=ROWS, n=kernel.tile_n)
        self.tiled_mma_pv = Tcgen05Mma(dtype=kernel.dtype_v, m=ROWS, n=kernel.dims_v, b_mn_major=True, a_in_tmem=True)
        mine, weighs = tiled_mma_qk.get_slice(0), tiled_mma_pv.get_slice(0)
        half = cute.local_tile(sQ, (ROWS, kernel.dims), (None, 0, None))  # [row, column, half, stage]
        own = range(1 if kernel.alternate else kernel.halves)
        self.fQ = [tiled_mma_qk.make_fragment_A(mine.partition_A(half[None, None, g, None])) for g in own]
        self.fK = [tiled_mma_qk.make_fragment_B(mine.partition_B(columns)) for columns in places.keys]
        sVt = cute.make_tensor(places.values.iterator, cute.select(places.values.layout, mode=[1, 0, 2]))
        self.fV = tiled_mma_pv.make_fragment_B(weighs.partition_B(sVt))
        probs = tiled_mma_pv.make_fragment_A(weighs.partition_shape_A((ROWS, kernel.tile_n)))
        self.S = [base + scores_at(kernel, g) for g in range(kernel.halves)]
        self.O = [base + sums_at(kernel, g) for g in range(kernel.halves)]
        self.P = [
            cute.make_tensor(cute.recast_ptr(base + scores_at(kernel, g), dtype=kernel.dtype_v), probs.layout)
            for g in range(kernel.halves)
        ]

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            stage = stage_of(items, self.config.query_stages)
            cute.arch.mbarrier_wait(self.barriers.q_full + stage, phase_of(items, self.config.query_stages))
            count = work.n_block_max - work.n_block_min
            self.wait_keys(tiles)
            for g in cutlass.range_constexpr(self.kernel.halves):
                self.score(g, stage, tiles)
            self.release(self.barriers.k_empty, tiles)
            self.wait_values(tiles)
            for g in cutlass.range_constexpr(self.kernel.halves):
                self.sum(g, tiles, tiles, False, self.freed(g, tiles))
                if count > 1:
                    self.follow(g, stage, tiles)
            for step in cutlass.range(1, count, unroll=1):
                tile = tiles + step
                self.wait_values(tile)
                for g in cutlass.range_constexpr(self.kernel.halves):
                    self.sum(g, tile, tile, True, self.freed(g, tile))
                    if step < count - 1:
                        self.follow(g, stage, tile)
            self.commit(self.barriers.o_full)
            tiles += count
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def follow(self, g: cutlass.Constexpr[int], stage, tile):
        """The half's scores of the tile after this one; the last half's free its place."""
        if cutlass.const_expr(g == 0):
            self.wait_keys(tile + 1)
        free = []
        if cutlass.const_expr(g == self.kernel.halves - 1):
            free = [self.barriers.k_empty + stage_of(tile + 1, self.config.stages)]
        self.score(g, stage, tile + 1, free)

    def freed(self, g: int, tile):
        """The place of values that the half's sums are the last to read."""
        return [self.barriers.v_empty + stage_of(tile, self.config.stages)] if g == self.kernel.halves - 1 else []

    @cute.jit
    def wait_keys(self, tile):
        cute.arch.mbarrier_wait(
            self.barriers.k_full + stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        )

    @cute.jit
    def wait_values(self, tile):
        cute.arch.mbarrier_wait(
            self.barriers.v_full + stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        )

    @cute.jit
    def release(self, empty, tile):
        """The ring's place is free when all products so far are done."""
        self.commit(empty + stage_of(tile, self.config.stages))

    @cute.jit
    def commit(self, *barriers):
        with cute.arch.elect_one():
            for barrier in barriers:
                tcgen05.commit(barrier)

    @cute.jit
    def score(self, g: cutlass.Constexpr[int], stage, tile, then: cutlass.Constexpr[Sequence] = ()):
        queries = self.fQ[min(g, len(self.fQ) - 1)][None, None, None, stage]
        at = self.places.of_keys(tile)
        keys = [columns[None, None, None, place] for columns, place in zip(self.fK, at, strict=True)]
        self.tiled_mma_qk.issue(self.S[g], queries, keys, False, commit=[self.barriers.s_full + g, *then])

    @cute.jit
    def sum(
        self,
        g: cutlass.Constexpr[int],
        tile,
        turn,
        adds: cutlass.Constexpr[bool],
        then: cutlass.Constexpr[Sequence] = (),
    ):
        """Once the half's weights are there, and its sums at their scale; turn: of the half's own."""
        cute.arch.mbarrier_wait(self.barriers.p_full + g, turn & 1)
        tmem.after_sync()
        self.issue_sums(g, tile, adds, then)

    def issue_sums(self, g, tile, adds, then):
        values = self.fV[None, None, None, self.places.of_values(tile)]
        self.tiled_mma_pv.issue(self.O[g], self.P[g], [values], adds, commit=then)


class AlternatingMmaWarp(MmaWarp):
    """Both halves have the same rows, and every other key tile."""

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        even, odd = cutlass.Int32(0), cutlass.Int32(0)  # tiles of each half
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            stage = stage_of(items, self.config.query_stages)
            cute.arch.mbarrier_wait(self.barriers.q_full + stage, phase_of(items, self.config.query_stages))
            count = work.n_block_max - work.n_block_min
            self.begin(0, stage, tiles, 0, count)
            self.begin(1, stage, tiles, 1, count)
            self.go_on(0, stage, tiles, 0, count, even, False)
            self.go_on(1, stage, tiles, 1, count, odd, False)
            for pair in cutlass.range(1, (count + 1) // 2, unroll=1):
                self.go_on(0, stage, tiles, 2 * pair, count, even + pair, True)
                self.go_on(1, stage, tiles, 2 * pair + 1, count, odd + pair, True)
            self.end(stage)
            tiles += count
            even += (count + 1) // 2
            odd += count // 2
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    def end(self, stage):
        """Behind the products of an item."""
        self.commit(self.barriers.o_full)

    @cute.jit
    def begin(self, g: cutlass.Constexpr[int], stage, tiles, tile, count):
        """The half's scores of the item's tile, if there is one."""
        if tile < count:
            self.wait_keys(tiles + tile)
            self.score(g, stage, tiles + tile, [self.barriers.k_empty + stage_of(tiles + tile, self.config.stages)])

    @cute.jit
    def go_on(self, g: cutlass.Constexpr[int], stage, tiles, tile, count, turn, adds: cutlass.Constexpr[bool]):
        """The half's sums of the item's tile, if there is one, and then its next scores."""
        if tile < count:
            self.wait_values(tiles + tile)
            then = [self.barriers.v_empty + stage_of(tiles + tile, self.config.stages)]
            self.sum(g, tiles + tile, turn, adds, then)
        self.begin(g, stage, tiles, tile + 2, count)


def scores_at(kernel, half: int) -> int:
    """The half's first column of scores, and of weights."""
    return half * kernel.tile_n


def sums_at(kernel, half: int) -> int:
    return kernel.places * kernel.tile_n + half * kernel.dims_v
