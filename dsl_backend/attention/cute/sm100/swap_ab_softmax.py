# SPDX-License-Identifier: Apache-2.0
"""The softmax role with swapped operands: a thread has one key, and its scores with all query rows.

All threads of a warpgroup subtract the same row_max of a query row. It changes only if a score exceeds it by more than
`rescale_threshold`. Whether any does is all that the threads must agree on for a tile, which takes one barrier. Only
then they find the new maximum and rescale O.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.attention.cute import nvfp4_out
from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, WorkTilePipeline, q_head_of
from dsl_backend.attention.cute.score_mod import ScoreModArgs, out_factor_of, score_mod_of
from dsl_backend.attention.cute.sizes import WARPGROUP, partial_size
from dsl_backend.attention.cute.sm100.dense_barriers import WARPS_PER_WARPGROUP, SwapABBarriers
from dsl_backend.attention.cute.sm100.dense_configs import MMA_M
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps, score_or_minus_inf
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVStages
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import VECTOR, TiledKernel
from dsl_backend.primitives import tmem
from dsl_backend.primitives.accumulators import round_to
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.math import (
    LOG2_E,
    add_pair,
    exp2,
    finite_or_zero,
    fma_pair,
    fmax3,
    in_pairs,
    mul_pair,
    sub_pair,
    tree_reduce,
)
from dsl_backend.primitives.ring import phase_of, stage_of

# Named barriers: one of each softmax warpgroup, and one of both.
WARPGROUP_BARRIER_ID, BOTH_BARRIER_ID = 1, 3
# Columns of sStats, a query row's statistics: one of each warp, its row_max, and a scale of O of each S stage.
ROW_MAX, O_SCALE = WARPS_PER_WARPGROUP, WARPS_PER_WARPGROUP + 1


class SwapABSoftmaxWarps(SoftmaxWarps):
    """A thread's key: row `thread` of its S stage's tiles; and a column of V, by its lane of tensor memory.

    Attributes:
        limit: by query row, the score up to which its reference is kept; -inf before the first score.
        minus_max: by query row, minus the reference, in base 2; 0 before the first score.
        row_sum: by query row, the sum of this thread's P.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        barriers: SwapABBarriers,
        tmem_ptr: cute.Pointer,
        sP: cute.Tensor,  # (tile_n, tile_m, S stage)
        sStats: cute.Tensor,  # (tile_m, SWAP_AB_STATS, S stage)
        kv_stages: SeparateKVStages,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
        s_stage: cutlass.Int32,
    ):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.tmem_ptr = work_pipeline, barriers, tmem_ptr
        self.sP, self.sStats, self.kv_stages = sP, sStats, kv_stages
        self.out, self.lse, self.partials, _ = outputs
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.requests, self.scoring, self.score_mod = requests, scoring, score_mod_of(kernel.key, scoring)
        self.s_stage, self.tile_m = s_stage, kernel.tile_m
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.warp, lane = self.thread // 32, self.thread % 32
        # An MMA of 64 rows has 16 of them in the lanes of each warp.
        self.column = self.thread if kernel.dims_v == MMA_M else self.warp * 16 + lane % 16
        self.has_column = lane < kernel.dims_v // WARPS_PER_WARPGROUP
        self.acc_S, self.limit, self.minus_max, self.row_sum, self.slope = (
            cute.make_rmem_tensor(self.tile_m, cutlass.Float32) for _ in range(5)
        )
        self.row_sum.fill(0.0)
        self.kv_idx = cute.make_rmem_tensor(1, cutlass.Int32)  # key tiles of both S stages before the work tile

    @cute.jit
    def run(self):
        if cutlass.const_expr(self.kernel.dims_v < MMA_M):
            # Lanes that no MMA writes are loaded with the others.
            tmem.store(self.row_sum, self.tmem_ptr, self.tmem_offset_O(self.s_stage), self.thread)
            cute.arch.fence_view_async_tmem_store()
        work_idx, kv_idx, s_idx = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            num_tiles = work.n_block_max - work.n_block_min
            own_tiles = self.own_tiles(num_tiles)
            if self.s_stage == 0:
                self.clear_v_after_end(work, kv_idx)
            self.kv_idx.fill(kv_idx)
            self.softmax_work_tile(work, s_idx, own_tiles)
            cute.arch.mbarrier_wait(self.barriers.o_full, work_idx & 1)
            tmem.after_sync()
            self.epilogue(work, num_tiles)
            s_idx += own_tiles
            kv_idx += num_tiles
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    def tmem_offset_O(self, s_stage: cutlass.Int32 | int) -> cutlass.Int32 | int:
        return (self.kernel.s_stages + s_stage) * self.tile_m

    def send_final_stats(self, s_idx: cutlass.Int32) -> None:
        """There are no correction warps."""

    @cute.jit
    def reset(self, work: WorkTile):
        self.limit.fill(-cutlass.Float32.inf)
        self.minus_max.fill(0.0)
        self.row_sum.fill(0.0)
        if cutlass.const_expr(self.key.scores.alibi):
            for row in cutlass.range_constexpr(self.tile_m):
                self.slope[row] = self.scoring.alibi_slopes[q_head_of(self.key, work.head_block, row)] * LOG2_E

    def sync_warpgroup(self) -> None:
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER_ID + self.s_stage, number_of_threads=WARPGROUP)

    def sync_both(self) -> None:
        cute.arch.barrier(barrier_id=BOTH_BARRIER_ID, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def online_softmax(
        self,
        work: WorkTile,
        first_idx: cutlass.Int32,
        s_idx: cutlass.Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """Turn S^T of a key tile into P^T; arguments as in the base class."""
        s_stage = self.s_stage
        cute.arch.mbarrier_wait(self.barriers.s_full + s_stage, s_idx & 1)
        tmem.after_sync()
        tmem.load(self.tmem_ptr, s_stage * self.tile_m, self.acc_S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        scores = [self.acc_S[row] for row in range(self.tile_m)]
        key = (work.n_block_max - 1 - 2 * (s_idx - first_idx) - s_stage) * self.kernel.tile_n + self.thread
        if cutlass.const_expr(self.score_mod.modifies):
            scores = [
                self.score_mod.apply(score, self.slope[row], self.position(work, row) - key)
                for row, score in enumerate(scores)
            ]
        if cutlass.const_expr(masked):
            scores = self.apply_mask(scores, work, key)
            self.clear_v_before_window(work, 2 * (s_idx - first_idx) + s_stage)
        # NaN does not exceed the limit, and stays NaN in P.
        excess = in_pairs(sub_pair, scores, [self.limit[row] for row in range(self.tile_m)])
        if self.any_thread(fmax_of(excess) > 0.0):
            self.update_row_max(scores, s_idx > first_idx)
        scale = self.score_mod.softmax_scale_log2
        exponents = in_pairs(
            lambda a, b: fma_pair(a, (scale, scale), b), scores, [self.minus_max[row] for row in range(self.tile_m)]
        )
        probs = [exp2(exponent) for exponent in exponents]
        self.store_p(probs)
        for row, row_sum in enumerate(in_pairs(add_pair, [self.row_sum[row] for row in range(self.tile_m)], probs)):
            self.row_sum[row] = row_sum
        # MMAs read by the async proxy: P, V that was cleared, and O that was rescaled.
        cute.arch.fence_proxy("async.shared", space="cta")
        tmem.before_sync()
        cute.arch.mbarrier_arrive(self.barriers.p_full + s_stage)

    def position(self, work: WorkTile, row: int) -> cutlass.Int32:
        """The position of a query row's token among its request's keys."""
        return work.q_position + row // self.key.pack_gqa

    @cute.jit
    def apply_mask(self, scores: cutlass.Constexpr[Sequence], work: WorkTile, key: cutlass.Int32):
        """Scores of query rows that do not see this thread's key become -inf."""
        masked = []
        for row, score in enumerate(scores):
            score = score_or_minus_inf(score, key < self.mask.col_limit_right(work, self.position(work, row), 0))
            if cutlass.const_expr(self.mask.has_left):
                score = score_or_minus_inf(score, key >= self.mask.col_limit_left(self.position(work, row), 0))
            masked.append(score)
        return masked

    def any_thread(self, condition: cutlass.Boolean) -> cutlass.Boolean:
        """Whether the condition holds for any thread of the warpgroup, for all of them."""
        return (
            cute.arch.inline_ptx(
                "{ .reg .pred mine, any; setp.ne.b32 mine, {$r0}, 0; "
                f"barrier.cta.red.or.aligned.pred any, {{$r1}}, {WARPGROUP}, mine; selp.b32 {{$w0}}, 1, 0, any; }}",
                write_only_types=[cutlass.Int32],
                read_only_args=[cutlass.Int32(condition), cutlass.Int32(WARPGROUP_BARRIER_ID + self.s_stage)],
            )
            != 0
        )

    @cute.jit
    def update_row_max(self, scores: cutlass.Constexpr[Sequence], has_o: cutlass.Boolean):
        """Find row_max of query rows whose limit is exceeded, and rescale their row_sum and O.

        Args:
            has_o: whether O has been written for this work tile.
        """
        scale = self.score_mod.softmax_scale_log2
        warp_max = cute.make_rmem_tensor(self.tile_m, cutlass.Float32)
        for row, score in enumerate(scores):
            warp_max[row] = cute.arch.warp_redux_sync(score, "fmax")
        sStats, warp, s_stage = self.sStats, self.warp, self.s_stage
        if cute.arch.lane_idx() == 0:
            cute.autovec_copy(warp_max, sStats[None, warp, s_stage])
        self.sync_warpgroup()
        warp_maxes = [self.load_stats(warp, s_stage) for warp in range(WARPS_PER_WARPGROUP)]
        acc_scales = cute.make_rmem_tensor(self.tile_m, cutlass.Float32)
        for row in cutlass.range_constexpr(self.tile_m):
            row_max = tree_reduce([one[row] for one in warp_maxes], cute.arch.fmax)
            exceeded = row_max > self.limit[row]
            minus_max = -row_max * scale if exceeded else self.minus_max[row]
            acc_scale = (
                exp2(minus_max - self.minus_max[row])
                if self.limit[row] > -cutlass.Float32.inf
                else cutlass.Float32(0.0)
            )
            acc_scales[row] = acc_scale
            self.limit[row] = row_max + self.config.rescale_threshold / scale if exceeded else self.limit[row]
            self.minus_max[row] = minus_max
            self.row_sum[row] *= acc_scale
        if has_o:
            self.rescale(acc_scales)

    def load_stats(self, column: cutlass.Int32 | int, s_stage: cutlass.Int32) -> cute.Tensor:
        """A column of sStats, of all query rows."""
        stats = cute.make_rmem_tensor(self.tile_m, cutlass.Float32)
        cute.autovec_copy(self.sStats[None, column, s_stage], stats)
        return stats

    @cute.jit
    def rescale(self, acc_scales: cute.Tensor):
        """Multiply O by a scale of each query row. P V of the tile before is done, since S came after it."""
        acc_O = cute.make_rmem_tensor(self.tile_m, cutlass.Float32)
        tmem_offset = self.tmem_offset_O(self.s_stage)
        tmem.load(self.tmem_ptr, tmem_offset, acc_O, self.thread)
        cute.arch.fence_view_async_tmem_load()
        rescaled = in_pairs(
            mul_pair, [acc_O[row] for row in range(self.tile_m)], [acc_scales[row] for row in range(self.tile_m)]
        )
        for row, value in enumerate(rescaled):
            acc_O[row] = value
        tmem.store(acc_O, self.tmem_ptr, tmem_offset, self.thread)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def store_p(self, probs: cutlass.Constexpr[Sequence]):
        """Store P of this thread's key to shared memory."""
        rP_f32 = cute.make_rmem_tensor(self.tile_m, cutlass.Float32)
        for row, prob in enumerate(probs):
            rP_f32[row] = prob
        rP = cute.make_rmem_tensor((VECTOR, self.tile_m // VECTOR), self.kernel.dtype)
        rP.store(rP_f32.load().to(self.kernel.dtype).reshape((VECTOR, self.tile_m // VECTOR)))
        sP = self.sP[None, None, self.s_stage]
        for i in cutlass.range_constexpr(self.tile_m // VECTOR):
            target = cute.local_tile(sP, (1, VECTOR), (self.thread, i))
            cute.autovec_copy(rP[None, i], cute.group_modes(target, 0, 2))

    @cute.jit
    def clear_v_after_end(self, work: WorkTile, kv_idx: cutlass.Int32):
        """Zero V after the last key, which can be NaN: P = 0 does not remove it."""
        num_keys = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if num_keys < self.kernel.tile_n:
            self.wait_v(kv_idx)
            sV = self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]
            clear_rows(sV, cutlass.max(num_keys, 0), self.kernel.tile_n, self.thread, WARPGROUP)

    @cute.jit
    def clear_v_before_window(self, work: WorkTile, step: cutlass.Int32):
        """Zero V before the windows of all rows. Only the last tile of a work tile can have such keys.

        Args:
            step: key tiles of the work tile before this one.
        """
        if cutlass.const_expr(self.key.has_window_left):
            num_keys = self.mask.keys_before_window(work.q_position, work.n_block_min)
            if step == work.n_block_max - work.n_block_min - 1 and num_keys > 0:
                kv_idx = self.kv_idx[0] + step
                self.wait_v(kv_idx)
                sV = self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]
                clear_rows(sV, 0, num_keys, self.thread, WARPGROUP)

    @cute.jit
    def wait_v(self, kv_idx: cutlass.Int32):
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_full + stage_of(kv_idx, stages), phase_of(kv_idx, stages))

    @cute.jit
    def epilogue(self, work: WorkTile, num_tiles: cutlass.Int32):
        """Add up O of both S stages: each warpgroup stores half of the query rows.

        Args:
            num_tiles: key tiles of the work tile. With one alone, O of S stage 1 is not written.
        """
        row_sum = reduce_scatter_sum([self.row_sum[row] for row in range(self.tile_m)])
        row_maxes = cute.make_rmem_tensor(self.tile_m, cutlass.Float32)
        for row in cutlass.range_constexpr(self.tile_m):
            no_score = self.limit[row] == -cutlass.Float32.inf
            row_maxes[row] = -cutlass.Float32.inf if no_score else -self.minus_max[row]
        sStats, warp, s_stage, lane = self.sStats, self.warp, self.s_stage, cute.arch.lane_idx()
        if lane < self.tile_m:
            sStats[lane, warp, s_stage] = row_sum
        if self.thread == 0:
            cute.autovec_copy(row_maxes, sStats[None, ROW_MAX, s_stage])
        self.sync_both()
        own_rows = cutlass.const_expr(self.tile_m // 2)
        first_row = s_stage * own_rows
        if self.thread < own_rows:
            self.finish_row(work, first_row + self.thread)
        acc_O = [cute.make_rmem_tensor(own_rows, cutlass.Float32) for _ in range(2)]
        acc_O[1].fill(0.0)
        tmem_offset = cute.assume(2 * self.tile_m + first_row, divby=own_rows)
        tmem.load(self.tmem_ptr, tmem_offset, acc_O[0], self.thread)
        if num_tiles > 1:
            tmem.load(self.tmem_ptr, tmem_offset + self.tile_m, acc_O[1], self.thread)
        cute.arch.fence_view_async_tmem_load()
        self.sync_warpgroup()
        o_scales = [cute.make_rmem_tensor(own_rows, cutlass.Float32) for _ in range(2)]
        for i in cutlass.range_constexpr(2):
            cute.autovec_copy(
                cute.local_tile(self.sStats[None, O_SCALE + i, s_stage], (own_rows,), (s_stage,)), o_scales[i]
            )
        for j in cutlass.range_constexpr(own_rows):
            value = acc_O[0][j] * o_scales[0][j] + acc_O[1][j] * o_scales[1][j]
            self.store_element(work, first_row + j, value)
        # P, row_sum and O of the next work tile come after this.
        tmem.before_sync()
        self.sync_both()

    @cute.jit
    def finish_row(self, work: WorkTile, row: cutlass.Int32):
        """Find what O of both S stages is multiplied by, and store the row's LSE or partial statistics."""
        sStats, s_stage = self.sStats, self.s_stage
        row_maxes = [sStats[row, ROW_MAX, i] for i in range(2)]
        row_sums = [
            tree_reduce([sStats[row, warp, i] for warp in range(WARPS_PER_WARPGROUP)], lambda a, b: a + b)
            for i in range(2)
        ]
        row_max = cute.arch.fmax(*row_maxes)
        scales = [exp2(one - finite_or_zero(row_max)) for one in row_maxes]
        row_sum = row_sums[0] * scales[0] + row_sums[1] * scales[1]
        out_scale = cutlass.Float32(1.0)
        if work.partial_idx == NOT_SPLIT:
            out_scale = self.finalize_row(work, row, row_max, row_sum)
        elif row < work.num_rows:
            partial_rows = self.requests.rows
            stats = self.partial_ptr(work) + partial_rows * self.kernel.dims_v + row
            cute.make_tensor(stats, cute.make_layout(1))[0] = row_max
            cute.make_tensor(stats + partial_rows, cute.make_layout(1))[0] = row_sum
        for i in cutlass.range_constexpr(2):
            sStats[row, O_SCALE + i, s_stage] = scales[i] * out_scale

    @cute.jit
    def finalize_row(self, work: WorkTile, row: cutlass.Int32, row_max: cutlass.Float32, row_sum: cutlass.Float32):
        """Store the row's LSE; return what its O is multiplied by."""
        head = q_head_of(self.key, work.head_block, row)
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        factor = out_factor_of(self.key, self.scoring, work.head_block, work.kv_source)
        out_scale, row_lse = finalize(row_max, row_sum, sink, factor)
        if cutlass.const_expr(self.key.lse):
            mLSE = self.lse
            if row < work.num_rows:
                mLSE[work.q_offset + row // self.key.pack_gqa, head] = row_lse
        return out_scale

    @cute.jit
    def partial_ptr(self, work: WorkTile):
        """The partial result of a work tile."""
        size = partial_size(self.requests.rows, self.kernel.dims_v)
        return self.partials.iterator + cutlass.Int64(work.partial_idx) * size

    @cute.jit
    def store_element(self, work: WorkTile, row: cutlass.Int32, value: cutlass.Float32):
        """Store this thread's column of a query row: an output, or float32 O of a partial result."""
        out, column = self.out, self.column
        if cutlass.const_expr(self.key.nvfp4_out):
            # By all lanes: a block's columns are those of sixteen neighbours.
            if work.partial_idx == NOT_SPLIT:
                nvfp4_out.store_by_lanes(
                    [value],
                    self.key,
                    out,
                    self.scoring.out_block_scale,
                    work.q_offset + row // self.key.pack_gqa,
                    q_head_of(self.key, work.head_block, row),
                    column,
                    row < work.num_rows and self.has_column and column < self.key.head_dim_v,
                )
        if row < work.num_rows and self.has_column:
            if work.partial_idx != NOT_SPLIT:
                target = self.partial_ptr(work) + row * self.kernel.dims_v + column
                cute.make_tensor(target, cute.make_layout(1))[0] = value
            elif cutlass.const_expr(not self.key.nvfp4_out) and column < self.key.head_dim_v:
                head = q_head_of(self.key, work.head_block, row)
                rounded = cute.make_rmem_tensor(1, out.element_type)
                round_to([value], rounded)
                out[work.q_offset + row // self.key.pack_gqa, head, column] = rounded[0]


def reduce_scatter_sum(values: Sequence[cutlass.Float32]) -> cutlass.Float32:
    """Lane i gets the sum of all lanes' values[i % len(values)]; len(values) is a power of two up to 32."""
    lane, bit, width = cute.arch.lane_idx(), len(values) // 2, len(values)
    while bit:
        upper = (lane & bit) != 0
        pairs = list(zip(values[:bit], values[bit:], strict=True))
        kept, sent = [select(upper, high, low) for low, high in pairs], [select(upper, *pair) for pair in pairs]
        values = [own + cute.arch.shuffle_sync_bfly(other, bit) for own, other in zip(kept, sent, strict=True)]
        bit //= 2
    value = values[0]
    while width < 32:
        value += cute.arch.shuffle_sync_bfly(value, width)
        width *= 2
    return value


@cute.jit
def select(condition: cutlass.Boolean, first: cutlass.Float32, second: cutlass.Float32):
    return first if condition else second


def fmax_of(values: Sequence[cutlass.Float32]) -> cutlass.Float32:
    """The maximum of an even number of float32 values; NaN is ignored."""
    level = [cute.arch.fmax(values[0], values[1]), *values[2:]]
    while len(level) > 1:
        threes = [fmax3(*level[i : i + 3], False) for i in range(0, len(level) - 2, 3)]
        rest = level[len(threes) * 3 :]
        level = threes + ([cute.arch.fmax(*rest)] if len(rest) == 2 else rest)
    return level[0]
