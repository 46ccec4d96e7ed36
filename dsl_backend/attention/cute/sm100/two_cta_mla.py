# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM100 by pairs of blocks, whose tensor cores multiply as one (cta_group::2).

Each block has 64 query rows, their scores, weights and sums. For scores it holds half of a tile's keys, for sums half
of the value's columns; the pair's products take both halves from where they are. In tensor memory a row is cut in two:
lanes from 64 on have the second half of the keys, and of the value's columns.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from dsl_backend.attention.cute.args import MlaLoads, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import partial_size
from dsl_backend.attention.cute.loader.dense import PerTileLoads
from dsl_backend.attention.cute.mask import first_tile_is_masked
from dsl_backend.attention.cute.mla import MlaLoadWarp
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.rows import AccumulatorRow
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WORK_TILE_STAGES, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import TENSOR_COLUMNS, WARP
from dsl_backend.attention.cute.sm100.mla_configs import BLOCK, LOAD, MULTIPLY, PAIR_STATISTICS, SCHEDULE, SCORES
from dsl_backend.attention.cute.sm100.mla_kernel import MlaForward
from dsl_backend.attention.cute.sm100.mla_mma import MlaMmaWarp, steps_of
from dsl_backend.attention.cute.sm100.mla_softmax import OWN, SLACK
from dsl_backend.attention.cute.softmax import OnlineSoftmax, finalize
from dsl_backend.attention.cute.tiles import VECTOR
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows, store_vector
from dsl_backend.primitives.math import add_pair, exp2, finite_or_zero, fma_pair, fmax3_tree, tree_reduce
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma
from dsl_backend.primitives.tma import TmaBox, tma_load_boxes

PAIR = 2
BOTH = 0b11  # blocks of the pair, as a mask
TOTALS = 2  # in the statistics, behind two tiles' largest scores
PIECE = 32  # columns of sums in registers at a time


class TwoCtaBarriers(NamedTuple):
    """As `latent.Barriers`. Full ones count in the first block, for both; what products signal, in both.

    Attributes:
        k_full, k_empty: of each part of a tile's keys.
        v_full, v_empty: of the columns of each product of sums.
    """

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer


class TwoCtaLoadWarp(PerTileLoads, MlaLoadWarp):
    """Fills the block's rings: half of the keys, whole, and of all keys half of the value's columns."""

    def __init__(self, kernel, work_pipeline, barriers, loads, sQ, sK, sV, requests, rank):
        super().__init__(kernel, work_pipeline, barriers, loads, sQ, sK, requests)
        self.rank, self.num_ctas = rank, kernel.num_ctas
        self.sV = self.in_boxes(sV, self.box, kernel.chunk)
        self.q_bytes *= PAIR
        # A lane's page is that of one box of a tile; where a tile lies in one page, all have the same.
        self.one_page = self.page % self.tile_n == 0
        self.box_begin = 0 if self.one_page else cute.arch.lane_idx() % self.boxes * self.box

    @cute.jit
    def expect(self, full, size):
        if self.rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    def atoms(self):
        return self.tma_atom_q, self.tma_atom_q_rope, self.tma_atom_k

    @cute.jit
    def load_item(self, work, tiles):
        """In the order in which places become free: of keys with the scores of the tile before, of values with its
        sums, which come after the scores of this one. Those of the item before are done when this one's begin.
        """
        last, count = work.n_block_max - 1, work.n_block_max - work.n_block_min
        pages = self.pages_of(work, last)
        self.load_keys(last, pages, tiles)
        self.load_values(last, pages, tiles)
        for step in cutlass.range(1, count, unroll=1):
            before = pages
            pages = self.whole_pages_of(work, last - step)
            self.load_keys(last - step, pages, tiles + step)
            if step > 1:
                self.load_values(last - step + 1, before, tiles + step - 1)
        if count > 1:
            self.load_values(work.n_block_min, pages, tiles + count - 1)

    @cute.jit
    def pages_of(self, work, tile):
        """A lane's page; past the keys, one that is not there, whose copy fills with zeros."""
        page = cutlass.Int32(cute.size(self.mK, mode=[3]))
        if tile * self.tile_n + self.box_begin < work.seqlen_k:
            page = self.whole_pages_of(work, tile)
        return page

    def whole_pages_of(self, work, tile):
        """The same for a tile that has all of its keys, as all of an item but its first have."""
        place = cutlass.Uint32(tile * self.tile_n + self.box_begin) // self.page
        return self.requests.page_table[work.kv_source, cutlass.Int32(place)]

    @cute.jit
    def load_keys(self, tile, pages, count):
        stage, phase = stage_of(count, self.config.stages), phase_of(count, self.config.stages) ^ 1
        begins = self.begins_of(tile, pages, self.first_box, self.own_boxes)
        for part in cutlass.range_constexpr(PARTS):
            place, chunks = stage * PARTS + part, self.parts[part]
            cute.arch.mbarrier_wait(self.barriers.k_empty + place, phase)
            self.load_boxes(self.sK, chunks, begins, chunks.start, stage, self.barriers.k_full + place)

    @cute.jit
    def load_values(self, tile, pages, count):
        stage, phase = stage_of(count, self.config.stages), phase_of(count, self.config.stages) ^ 1
        begins = self.begins_of(tile, pages, 0, self.boxes)
        width = cutlass.const_expr(BLOCK // self.chunk)
        for block in cutlass.range_constexpr(self.num_ctas):
            place, chunks = stage * self.num_ctas + block, range(block * width, (block + 1) * width)
            cute.arch.mbarrier_wait(self.barriers.v_empty + place, phase)
            first = self.rank * (self.chunks_v // PAIR) + block * width
            self.load_boxes(self.sV, chunks, begins, first, stage, self.barriers.v_full + place)

    def begins_of(self, tile, pages, first_box, boxes: int) -> list:
        """For boxes of a tile from one on: the page, and which of its boxes it is."""
        return [(self.page_of(pages, first_box + i), self.place_of(tile, first_box, i)) for i in range(boxes)]

    def page_of(self, pages, b):
        return pages if self.one_page else cute.arch.shuffle_sync(pages, b)

    def place_of(self, tile, first_box, i: int):
        if self.own_boxes * self.box % self.page == 0:
            # Pages begin with the block's own keys.
            return i * self.box % self.page // self.box
        return stage_of(tile * self.boxes + first_box + i, self.page // self.box)

    def load_boxes(self, target, chunks, begins, first_chunk, stage, full):
        """Chunks of the target (a range) in all of its boxes, from columns that begin with a chunk."""
        cut = cute.group_modes(cute.flat_divide(self.mK[None, None, 0, None], (self.box, self.chunk)), 0, 2)
        to, given = cpasync.tma_partition(self.tma_atom_k, 0, cute.make_layout(1), target, cut)
        at = to[None, None, None, stage]
        size = target.element_type.width // 8
        boxes = [
            TmaBox(
                size * cute.crd2idx((0, i, c), at.layout),
                given[None, place, first_chunk + c - chunks.start, page].iterator,
            )
            for i, (page, place) in enumerate(begins)
            for c in chunks
        ]
        expected = PAIR * len(boxes) * self.box * self.chunk * size
        tma_load_boxes(self.tma_atom_k, boxes, at.iterator, full, expected, self.rank == 0)


class TwoCtaMmaWarp(MlaMmaWarp):
    """By the first block: scores S = Q K^T and sums O += P V of both."""

    def __init__(self, kernel, work_pipeline, mmas, barriers, base, sQ, sK, sV, sP):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        both = {"dtype": kernel.dtype, "m": PAIR * ROWS, "cta_group": PAIR, "cluster": PAIR}
        self.tiled_mma_qk = Tcgen05Mma(n=kernel.tile_n, **both)
        self.tiled_mma_pv = Tcgen05Mma(n=PAIR * BLOCK, b_mn_major=True, **both)
        self.base = base
        self.fQ = tiled_mma_qk.make_fragment_A(cute.tiled_divide(sQ, (ROWS, 16)))
        self.fK = tiled_mma_qk.make_fragment_B(cute.tiled_divide(sK, (kernel.tile_n // PAIR, 16)))
        self.fP = tiled_mma_pv.make_fragment_A(cute.tiled_divide(sP, (ROWS, 16)))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        cut = cute.local_tile(sVt, (BLOCK, kernel.tile_n), (None, 0, None))  # [column, key, block, stage]
        self.fV = [
            tiled_mma_pv.make_fragment_B(cute.tiled_divide(cut[None, None, block, None], (BLOCK, 16)))
            for block in range(kernel.num_ctas)
        ]

    @cute.jit
    def score(self, work, tile, first: cutlass.Constexpr[bool], last):
        stage, round_ = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        place = stage_of(tile, SCORES)
        S = self.base + place * (self.kernel.tile_n // PAIR)
        told = self.barriers.s_full + place
        queries, keys = self.fQ[None, None, None, 0], self.fK[None, None, None, stage]
        windowed = cutlass.const_expr(self.kernel.key.has_window_left)
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, round_)
            done = [told] if part == PARTS - 1 and not first and not windowed else []
            done.append(self.barriers.k_empty + stage * PARTS + part)
            steps = steps_of(self.kernel, part)
            self.tiled_mma_qk.issue(S, queries, [keys], part > 0, commit_multicast=done, steps=steps)
        if cutlass.const_expr(first):
            if work.seqlen_k < work.n_block_max * self.kernel.tile_n:
                # Who is told of these scores clears values behind the last key.
                self.wait_all_values(stage, round_)
            if cutlass.const_expr(windowed):
                if last and first_tile_is_masked(work):
                    self.wait_all_values(stage, round_)
            self.commit(told)
        elif cutlass.const_expr(windowed):
            if last and first_tile_is_masked(work):
                # Who is told of these clears values below the window. With one stage they come behind the next sums.
                pass
            else:
                self.commit(told)
        if last:
            self.commit(self.barriers.q_empty)

    @cute.jit
    def sum(self, tile, adds):
        stage, round_ = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.p_full, tile & 1)
        tmem.after_sync()
        for block in cutlass.range_constexpr(self.kernel.num_ctas):
            place = stage * self.kernel.num_ctas + block
            self.wait_values(place, round_)
            done = [self.barriers.v_empty + place]
            if cutlass.const_expr(block == self.kernel.num_ctas - 1):
                done.append(self.barriers.o_full)
            sums, values = self.base + sums_at(self.kernel) + block * BLOCK, self.fV[block][None, None, None, stage]
            self.tiled_mma_pv.issue(sums, self.fP, [values], adds, commit_multicast=done)

    @cute.jit
    def tell_late(self, work, tile):
        if cutlass.const_expr(self.kernel.key.has_window_left):
            if first_tile_is_masked(work):
                self.wait_all_values(stage_of(tile, self.config.stages), phase_of(tile, self.config.stages))
                self.commit(self.barriers.s_full + stage_of(tile, SCORES))

    @cute.jit
    def wait_all_values(self, stage, round_):
        for block in cutlass.range_constexpr(self.kernel.num_ctas):
            self.wait_values(stage * self.kernel.num_ctas + block, round_)

    @cute.jit
    def wait_values(self, place, round_):
        cute.arch.mbarrier_wait(self.barriers.v_full + place, round_)

    @cute.jit
    def commit(self, barrier):
        with cute.arch.elect_one():
            tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup.TWO)


class TwoCtaSoftmaxWarps(OnlineSoftmax):
    """Two threads of the warpgroup share a row: each has half of its keys. Two keys an instruction."""

    def __init__(self, scores, statistics, thread):
        super().__init__(1, 1, scores, SLACK)
        self.statistics, self.thread = statistics, thread

    @cute.jit
    def weigh_half(self, scores: cute.Tensor, acc_scale: cute.Tensor, place):
        """As `weigh`; place: in the statistics, for the larger of two."""
        before, factor = self.row_max[0], self.softmax_scale_log2
        largest = fmax3_tree([before, *(scores[j] for j in range(cute.size(scores)))], nan=False)
        largest = cute.arch.fmax(largest, self.other(largest, place))
        # The difference is no number where both are -inf: top stays.
        moves = (largest - before) * factor > self.rescale_threshold
        row_max = largest if moves else before
        self.row_max[0] = row_max
        reference = finite_or_zero(row_max) * factor
        acc_scale[0] = exp2(before * factor - reference) if moves else 1.0
        sums = []
        for j in cutlass.range_constexpr(0, cute.size(scores), 2):
            power = fma_pair((scores[j], scores[j + 1]), (factor, factor), (-reference, -reference))
            scores[j], scores[j + 1] = exp2(power[0]), exp2(power[1])
            sums.append((scores[j], scores[j + 1]))
        added = tree_reduce(sums, add_pair)
        self.row_sum[0] = self.row_sum[0] * acc_scale[0] + (added[0] + added[1])

    @cute.jit
    def other(self, value, place):
        """The value of the thread with the same row."""
        statistics = self.statistics
        statistics[self.thread, place] = value
        cute.arch.barrier(barrier_id=OWN, number_of_threads=WARPGROUP)
        return statistics[self.thread ^ ROWS, place]


class TwoCtaMlaSoftmaxWarps:
    """A thread's half of a row, and what it does with an item."""

    def __init__(self, kernel, work_pipeline, barriers, base, statistics, sV, sP, outputs, requests, scoring):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.base = work_pipeline, barriers, base
        self.sV, self.sP = sV, sP
        self.out, self.lse, self.partials = outputs
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.row, self.half = self.thread % ROWS, self.thread // ROWS
        self.keys = kernel.tile_n // PAIR
        self.rows = AccumulatorRow(kernel.key, kernel.tile_n, requests, scoring, self.row, self.half * self.keys)
        self.softmax = TwoCtaSoftmaxWarps(self.rows.score_mod, statistics, self.thread)
        self.S = cute.make_rmem_tensor(self.keys, cutlass.Float32)
        self.P = cute.make_rmem_tensor((VECTOR, self.keys // VECTOR), kernel.dtype)
        self.acc_scale = cute.make_rmem_tensor(1, cutlass.Float32)

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            self.softmax.reset()
            self.rows.start(work)
            for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                self.online_softmax(work, work.n_block_max - 1 - step, tiles, step > 0)
                tiles += 1
            cute.arch.mbarrier_wait(self.barriers.o_full, (tiles - 1) & 1)
            tmem.after_sync()
            self.store(work)
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def online_softmax(self, work, tile, count, adds):
        """A tile's scores into weights; count: tiles before it; adds: to earlier sums of the item."""
        place = stage_of(count, SCORES)
        cute.arch.mbarrier_wait(self.barriers.s_full + place, phase_of(count, SCORES))
        tmem.after_sync()
        tmem.load(self.base, place * self.keys, self.S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        scores = cute.make_tensor(self.S.iterator, cute.make_layout((1, self.keys)))
        self.rows.apply_score_mod(scores, work, tile)
        if tile >= work.n_block_full_max or tile < work.n_block_full_min:
            self.rows.apply_mask(scores, work, tile)
        self.softmax.weigh_half(self.S, self.acc_scale, place)
        self.P.store(self.S.load().to(self.kernel.dtype).reshape(self.P.shape))
        self.clear_past(work, tile, count)
        # The weights' place is read, and the sums are at rest.
        cute.arch.mbarrier_wait(self.barriers.o_full, (count & 1) ^ 1)
        tmem.after_sync()
        if cute.arch.vote_any_sync(adds and self.row < work.num_rows and self.acc_scale[0] != 1.0):
            for first in cutlass.range(0, self.kernel.dims_v // PAIR, PIECE, unroll=1):
                held = self.sums(first, self.acc_scale[0])
                tmem.store(held, self.base, sums_at(self.kernel) + first, self.thread)
            cute.arch.fence_view_async_tmem_store()
        for i in cutlass.range_constexpr(self.keys // VECTOR):
            to = cute.local_tile(self.sP, (1, VECTOR), (self.row, self.half * (self.keys // VECTOR) + i))
            cute.autovec_copy(self.P[None, i], cute.group_modes(to, 0, 2))
        cute.arch.fence_proxy("async.shared", space="cta")
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.p_full, 0)

    @cute.jit
    def clear_past(self, work, tile, count):
        """Zero the values behind the last key, and those below the windows of all rows: a weight of 0 does not take
        away a NaN. Scores are told of when they are there.
        """
        kept = work.seqlen_k - tile * self.kernel.tile_n
        below = self.rows.mask.keys_before_window(work.q_position, tile)
        if kept < self.kernel.tile_n or below > 0:
            values = self.sV[None, None, stage_of(count, self.config.stages)]
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            if cutlass.const_expr(self.key.has_window_left):
                clear_rows(values, 0, below, self.thread, WARPGROUP)

    @cute.jit
    def sums(self, first, factor):
        """A piece of this thread's sums, times a factor."""
        held = cute.make_rmem_tensor(PIECE, cutlass.Float32)
        tmem.load(self.base, sums_at(self.kernel) + first, held, self.thread)
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(PIECE):
            held[j] *= factor
        return held

    @cute.jit
    def store(self, work):
        """Out of registers: a thread has half of a row."""
        row_sum = self.softmax.row_sum[0]
        row_sum += self.softmax.other(row_sum, TOTALS)
        row_max = self.softmax.row_max[0] * self.softmax.softmax_scale_log2
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work, row_max, row_sum)
            else:
                self.store_whole(work, row_max, row_sum)
        else:
            self.store_whole(work, row_max, row_sum)

    @cute.jit
    def store_partial(self, work, row_max, row_sum):
        """Sums as they are, in float32; the merge kernel does the rest."""
        rows, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(rows, columns)
        for first in cutlass.range(0, columns // PAIR, PIECE, unroll=1):
            held = self.sums(first, 1.0)
            if self.row < work.num_rows:
                for i in cutlass.range_constexpr(0, PIECE, 4):
                    part = cute.make_tensor(held.iterator + i, cute.make_layout(4))
                    store_vector(part, partial, self.row * columns + self.half * (columns // PAIR) + first + i)
        if self.row < work.num_rows and self.half == 0:
            place = partial + rows * columns + self.row
            cute.make_tensor(place, cute.make_layout(1))[0] = row_max
            cute.make_tensor(place + rows, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def store_whole(self, work, row_max, row_sum):
        columns = cutlass.const_expr(self.kernel.dims_v)
        token, head = work.q_offset + self.row // self.key.pack_gqa, self.rows.head(work, 0)
        factor, lse = finalize(row_max, row_sum, self.rows.sink(work, 0), self.rows.v_scale(work))
        if cutlass.const_expr(self.key.lse):
            to = self.lse
            if self.row < work.num_rows and self.half == 0:
                to[token, head] = lse
        start = cutlass.Int64(token) * self.out.stride[0] + head * self.out.stride[1] + self.half * (columns // PAIR)
        narrow = cute.make_rmem_tensor((VECTOR, PIECE // VECTOR), self.kernel.dtype)
        for first in cutlass.range(0, columns // PAIR, PIECE, unroll=1):
            held = self.sums(first, factor)
            for j in cutlass.range_constexpr(PIECE):
                narrow[j] = held[j].to(self.kernel.dtype)
            if self.row < work.num_rows:
                for i in cutlass.range_constexpr(PIECE // VECTOR):
                    store_vector(narrow[None, i], self.out.iterator, start + first + i * VECTOR)


def sums_at(kernel) -> int:
    """The first column of sums: behind the scores."""
    return SCORES * kernel.tile_n // PAIR


class TwoCtaMlaForward(MlaForward):
    """out = softmax(q k^T) k[:, :head_dim_v] for the requests of a batch; see `api.run` for the operands."""

    group = tcgen05.CtaGroup.TWO

    @property
    def num_ctas(self) -> int:
        """Of a block's value columns, those of one product."""
        return self.dims_v // PAIR // BLOCK

    def tiled_mmas(self) -> TiledMmas:
        return TiledMmas(
            self.tiled_mma(OperandMajorMode.K, OperandMajorMode.K, (PAIR * ROWS, self.tile_n)),
            self.tiled_mma(OperandMajorMode.K, OperandMajorMode.MN, (PAIR * ROWS, PAIR * BLOCK)),
        )

    def load_ops(self):
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        return load, load

    def layouts(self):
        """Of queries, key tiles and weights: the block's share."""
        atom, stages = self.atom(self.chunk), self.config.stages
        q_layout, _, p_layout = super().layouts()
        return q_layout, cute.tile_to_shape(atom, (self.tile_n // PAIR, self.dims, stages), order=(0, 1, 2)), p_layout

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: MlaLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        if cutlass.const_expr(self.key.split):
            # The merge kernel may take its place beside this one, and waits there.
            cute.arch.griddepcontrol_launch_dependents()
        q_layout, k_layout, p_layout = self.layouts()
        v_layout = cute.tile_to_shape(
            self.atom(self.chunk), (self.tile_n, self.dims_v // PAIR, config.stages), order=(0, 1, 2)
        )
        allocator = cutlass.utils.SmemAllocator()
        sQ, sK, sV, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (q_layout, k_layout, v_layout, p_layout)
        )
        items = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        statistics = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((WARPGROUP, PAIR_STATISTICS)), byte_alignment=16
        )
        place = allocator.allocate_array(cutlass.Int32, 1)
        keys, values = PARTS * config.stages, self.num_ctas * config.stages
        sizes = [1] * 2 + [keys] * 2 + [values] * 2 + [WORK_TILE_STAGES] * 2 + [SCORES, 1, 1]
        barriers = TwoCtaBarriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        rank = cute.arch.block_idx_in_cluster()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = WARPGROUP // WARP
        if warp == LOAD:
            with cute.arch.elect_one():
                # Copies, for both blocks, and products arrive once; both blocks' warpgroups by a lane of each warp; the
                # mailbox's readers are the warpgroup, who loads, and in the first block who multiplies.
                counts = [1, 1, 1, 1, 1, 1, 1, group + 2 - rank, 1, PAIR * group, 1]
                for pointer, size, count in zip(barriers, sizes, counts, strict=True):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.rows_loaded < ROWS):
            # Rows that no tensor copy may write.
            clear_rows(sQ[None, None, 0], self.rows_loaded, ROWS, cute.arch.thread_idx()[0], config.threads)
            cute.arch.fence_proxy("async.shared", space="cta")
        if warp == MULTIPLY:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, place, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
        self.meet()

        work_pipeline = WorkTilePipeline(items, barriers.work_full, barriers.work_empty)
        if warp < group:
            TwoCtaMlaSoftmaxWarps(
                self, work_pipeline, barriers, base, statistics, sV, sP, outputs, requests, scoring
            ).run()
        if warp == MULTIPLY and rank == 0:
            TwoCtaMmaWarp(self, work_pipeline, mmas, barriers, base, sQ, sK, sV, sP).run()
        if warp == LOAD:
            TwoCtaLoadWarp(self, work_pipeline, barriers, loads, sQ, sK, sV, requests, rank).run()
        if warp == SCHEDULE:
            self.schedule(work_pipeline, requests, scheduler_workspace).run()
        # A block's memory and barriers are there until the other has done with them.
        self.meet()
        if warp == MULTIPLY:
            cute.arch.dealloc_tmem(base, TENSOR_COLUMNS, is_two_cta=True)
