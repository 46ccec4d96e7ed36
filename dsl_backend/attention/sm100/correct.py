# SPDX-License-Identifier: Apache-2.0
"""The correction role: a warpgroup keeps the sums at the scale of the weights to come, and stores what comes out."""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.softmax import normalized
from dsl_backend.attention.sm90.rows import VECTOR, clear_rows, store_rows
from dsl_backend.attention.sm100 import tensor_memory
from dsl_backend.attention.sm100.configs import ROWS, WARPGROUP
from dsl_backend.attention.sm100.multiply import sums_at
from dsl_backend.attention.sm100.softmax import SHRINK, TOP

OWN = 1  # named barrier of the warpgroup
PIECE = 32  # columns of sums in registers at a time


class Corrector:
    """A thread's row of each half."""

    def __init__(self, kernel, mailbox, barriers, base, statistics, sV, sOut, out, lse, scoring):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.mailbox, self.barriers, self.base, self.statistics = mailbox, barriers, base, statistics
        self.sV, self.sOut, self.out, self.lse, self.scoring = sV, sOut, out, lse, scoring
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.mailbox.read(items)
        valid = work.valid
        while valid != 0:
            self.clear_past(work, tiles)
            for step in cutlass.range(work.end - work.begin, unroll=1):
                for g in cutlass.range_constexpr(self.kernel.halves):
                    shrink, _ = self.told(g, tiles + items)
                    if step > 0:
                        self.shrink(g, shrink)
                    tensor_memory.before_sync()
                    self.arrive(self.barriers.o_ready + g)
                tiles += 1
            stage = items % self.config.query_stages
            for g in cutlass.range_constexpr(self.kernel.halves):
                total, top = self.told(g, tiles + items)
                cute.arch.mbarrier_wait(self.barriers.o_full + g, items & 1)
                tensor_memory.after_sync()
                self.finish(work, g, stage, top, total)
            cute.arch.barrier(barrier_id=OWN, number_of_threads=WARPGROUP)
            rows = self.sOut[None, None, stage]
            store_rows(rows, self.out, work, self.key, 0, self.kernel.tile_m, self.thread, WARPGROUP)
            # The next queries arrive by another proxy.
            cute.arch.fence_proxy("async.shared", space="cta")
            self.arrive(self.barriers.q_empty + stage)
            items += 1
            work = self.mailbox.read(items)
            valid = work.valid

    @cute.jit
    def told(self, g: cutlass.Constexpr[int], count):
        """What the half's softmax says of this thread's row."""
        cute.arch.mbarrier_wait(self.barriers.l_full + g, count & 1)
        value, top = self.statistics[self.thread, SHRINK, g], self.statistics[self.thread, TOP, g]
        self.arrive(self.barriers.l_empty + g)
        return value, top

    @cute.jit
    def arrive(self, barrier):
        """By a lane, for the warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def shrink(self, g: cutlass.Constexpr[int], factor):
        """Sums times the factor, where a row of the warp needs it. Products are done: the scores came after them."""
        if cute.arch.vote_any_sync(factor != 1.0):
            tensor_memory.after_sync()
            base = self.base + sums_at(self.kernel, g)
            for first, width in tensor_memory.pieces(self.kernel.dims_v, PIECE):
                held = cute.make_rmem_tensor(width, cutlass.Float32)
                tensor_memory.load(base, first, held, self.thread)
                cute.arch.fence_view_async_tmem_load()
                for j in cutlass.range_constexpr(width):
                    held[j] *= factor
                tensor_memory.store(held, base, first, self.thread)
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def finish(self, work, g: cutlass.Constexpr[int], stage, top, total):
        """The half's sums, divided, into the place of its queries."""
        m = g * ROWS + self.thread
        head = work.unit * self.key.pack + m % self.key.pack
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        factor, row_lse = normalized(top, total, sink)
        if cutlass.const_expr(self.key.lse):
            to = self.lse
            if m < work.rows:
                to[work.query + m // self.key.pack, head] = row_lse
        base = self.base + sums_at(self.kernel, g)
        rows = self.sOut[None, None, stage]
        for first, width in tensor_memory.pieces(self.kernel.dims_v, PIECE):
            held = cute.make_rmem_tensor(width, cutlass.Float32)
            tensor_memory.load(base, first, held, self.thread)
            cute.arch.fence_view_async_tmem_load()
            narrow = cute.make_rmem_tensor((VECTOR, width // VECTOR), self.kernel.dtype)
            for j in cutlass.range_constexpr(width):
                narrow[j] = (held[j] * factor).to(self.kernel.dtype)
            for i in cutlass.range_constexpr(width // VECTOR):
                place = cute.local_tile(rows, (1, VECTOR), (m, first // VECTOR + i))
                cute.autovec_copy(narrow[None, i], cute.group_modes(place, 0, 2))

    @cute.jit
    def clear_past(self, work, count):
        """Zero the values behind the last key, which may be anything: a weight of 0 does not take away a NaN."""
        kept = work.keys - (work.end - 1) * self.kernel.tile_n
        if kept < self.kernel.tile_n:
            buffer = count % self.config.stages
            cute.arch.mbarrier_wait(self.barriers.v_full + buffer, (count // self.config.stages) & 1)
            values = self.sV[None, None, buffer]
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            cute.arch.fence_proxy("async.shared", space="cta")
