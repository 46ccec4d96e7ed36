# SPDX-License-Identifier: Apache-2.0
"""The multiply role of a pair of blocks: a warp of the first one issues the products of both.

The scores of a tile are issued before the sums of the tile before it, so that they are made while its softmax works.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.mask import first_tile_is_masked
from dsl_backend.attention.cute.sm100.dense_configs import PAIR, ROWS
from dsl_backend.attention.cute.sm100.dense_mma import MmaWarp, sums_at
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma

BOTH = 0b11  # blocks, as a mask


class TwoCtaMmaWarp(MmaWarp):
    """Scores S = Q K^T and sums O += P V of both blocks."""

    def __init__(self, kernel, work_pipeline, mmas, barriers, base, sQ, places):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        self.places, self.base = places, base
        pair = {"dtype": kernel.dtype, "m": PAIR * ROWS, "cta_group": PAIR, "cluster": PAIR}
        self.tiled_mma_qk = Tcgen05Mma(n=kernel.tile_n, **pair)
        self.tiled_mma_pv = Tcgen05Mma(n=kernel.dims_v, b_mn_major=True, a_in_tmem=True, **pair)
        (sK,) = places.keys
        self.fQ = tiled_mma_qk.make_fragment_A(cute.tiled_divide(sQ, (ROWS, 16)))
        self.fK = tiled_mma_qk.make_fragment_B(cute.tiled_divide(sK, (kernel.tile_n // PAIR, 16)))
        sVt = cute.make_tensor(places.values.iterator, cute.select(places.values.layout, mode=[1, 0, 2]))
        self.fV = tiled_mma_pv.make_fragment_B(cute.tiled_divide(sVt, (kernel.own_v, 16)))
        weighs = tiled_mma_pv.get_slice(0)
        self.probs = tiled_mma_pv.make_fragment_A(weighs.partition_shape_A((PAIR * ROWS, kernel.tile_n))).layout

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
            self.issue_scores(stage, tiles)
            if work.seqlen_k < work.n_block_max * self.kernel.tile_n:
                # Who is told of these scores clears values behind the last key.
                self.wait_values(tiles)
            if cutlass.const_expr(self.kernel.key.has_window_left):
                if count == 1 and first_tile_is_masked(work):
                    self.wait_values(tiles)
            self.commit(self.barriers.s_full + stage_of(tiles, PAIR))
            if count > 1:
                self.go_on(work, stage, tiles + 1, count == 2)
            self.issue_sums(tiles, False)
            for tile in cutlass.range(tiles + 1, tiles + count, unroll=1):
                if tile + 1 < tiles + count:
                    self.go_on(work, stage, tile + 1, tile + 2 == tiles + count)
                self.issue_sums(tile, True)
            tiles += count
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def go_on(self, work, stage, tile, last):
        self.wait_keys(tile)
        if cutlass.const_expr(self.kernel.key.has_window_left):
            if last and first_tile_is_masked(work):
                # Who is told of these scores clears values below the window.
                self.wait_values(tile)
        self.issue_scores(stage, tile, [self.barriers.s_full + stage_of(tile, PAIR)])

    @cute.jit
    def issue_scores(self, stage, tile, then: cutlass.Constexpr[Sequence] = ()):
        """Scores into the place of the weights of the tile but one before, whose product was issued."""
        place, at = stage_of(tile, PAIR), stage_of(tile, self.config.stages)
        queries, keys = self.fQ[None, None, None, stage], self.fK[None, None, None, at]
        then = [*then, self.barriers.k_empty + at]
        self.tiled_mma_qk.issue(self.base + place * self.kernel.tile_n, queries, [keys], False, commit_multicast=then)

    @cute.jit
    def issue_sums(self, tile, adds: cutlass.Constexpr[bool]):
        place, at = stage_of(tile, PAIR), stage_of(tile, self.config.stages)
        self.wait_values(tile)
        cute.arch.mbarrier_wait(self.barriers.p_full + place, phase_of(tile, PAIR))
        tmem.after_sync()
        there = cute.recast_ptr(self.base + place * self.kernel.tile_n, dtype=self.kernel.dtype)
        probs, values = cute.make_tensor(there, self.probs), self.fV[None, None, None, at]
        sums = self.base + sums_at(self.kernel, 0)
        self.tiled_mma_pv.issue(sums, probs, [values], adds, commit_multicast=[self.barriers.v_empty + at])

    @cute.jit
    def commit(self, barrier):
        with cute.arch.elect_one():
            tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup.TWO)
