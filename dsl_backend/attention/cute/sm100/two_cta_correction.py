# SPDX-License-Identifier: Apache-2.0
"""The correction role of a block of a pair."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import PAIR
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_softmax import SHRINK, TOP
from dsl_backend.attention.cute.sm100.two_cta_softmax import END
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.ring import phase_of, stage_of


class TwoCtaCorrectionWarps(CorrectionWarps):
    """A thread's row of the block. Scores of a tile say nothing of the sums of the one before: `v_empty` does."""

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            stage = stage_of(items, self.config.query_stages)
            self.wait_shrink(tiles)
            self.clear_past(work, tiles)
            through = tiles + work.n_block_max - work.n_block_min
            if tiles + 1 == through:
                self.clear_below(work, tiles)
            self.ready(tiles)
            for tile in cutlass.range(tiles + 1, through, unroll=1):
                self.correct_for(work, tile, tile + 1 == through)
            tiles = through
            self.wait_summed(tiles - 1)
            tmem.after_sync()
            cute.arch.mbarrier_wait(self.barriers.l_full + END, items & 1)
            row_sum, row_max = self.statistics[self.thread, TOP, 0], self.statistics[self.thread, TOP, 1]
            cute.arch.mbarrier_arrive(self.barriers.l_empty)
            self.finish(work, self.thread, stage, row_max, row_sum, [(0, None)])
            self.leave(work, stage)
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def wait_shrink(self, tile):
        cute.arch.mbarrier_wait(self.barriers.l_full + stage_of(tile, PAIR), phase_of(tile, PAIR))

    @cute.jit
    def wait_summed(self, tile):
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage_of(tile, stages), phase_of(tile, stages))

    @cute.jit
    def ready(self, tile):
        cute.arch.mbarrier_arrive(self.barriers.p_full + stage_of(tile, PAIR), 0)

    @cute.jit
    def correct_for(self, work, tile, last):
        """The sums are brought to the scale of the weights of a tile; last: of the item."""
        self.wait_shrink(tile)
        factor = self.statistics[self.thread, SHRINK, stage_of(tile, PAIR)]
        if cute.arch.vote_all_sync(factor == 1.0):
            pass
        else:
            self.wait_summed(tile - 1)
            self.scale(0, factor)
        if last:
            self.clear_below(work, tile)
        self.ready(tile)

    @cute.jit
    def clear_past(self, work, tile):
        """As the base does. Who multiplies has waited for the values before it told of their scores."""
        kept = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if kept < self.kernel.tile_n:
            values = self.places.values[None, None, self.places.of_values(tile)]
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_below(self, work, tile):
        """Zero the values of an item's last tile that lie below the windows of all rows of the pair."""
        if cutlass.const_expr(self.key.has_window_left):
            # Both blocks' rows are multiplied by the values of each: what counts is the first row of the pair.
            first = cute.arch.block_idx_in_cluster() * self.kernel.tokens_per_tile
            below = self.mask.keys_before_window(work.q_position - first, work.n_block_min)
            if below > 0:
                values = self.places.values[None, None, self.places.of_values(tile)]
                clear_rows(values, 0, below, self.thread, WARPGROUP)
                cute.arch.fence_proxy("async.shared", space="cta")
