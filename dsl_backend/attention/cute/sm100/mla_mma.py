# SPDX-License-Identifier: Apache-2.0
"""The multiply role of absorbed MLA: one warp issues all products.

The scores of a tile are issued before the sums of the tile before it, so that they are made while its softmax works.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.sm100.mla_configs import BLOCK, SCORES
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma


class MlaMmaWarp:
    """Scores S = Q K^T, and transposed sums O^T += V^T P^T."""

    def __init__(self, kernel, work_pipeline, mmas, barriers, base, sQ, sK, sV, sP):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        # Every block of a cluster may write to a place of keys: each hears that it was read. Widened ones are its own.
        cluster = 1 if kernel.key.kv.fp8 else self.config.cluster
        self.tiled_mma_qk = Tcgen05Mma(dtype=kernel.dtype, m=ROWS, n=kernel.tile_n, cluster=cluster)
        self.tiled_mma_pv = Tcgen05Mma(dtype=kernel.dtype, m=BLOCK, n=ROWS, a_mn_major=True, cluster=cluster)
        mine, weighs = tiled_mma_qk.get_slice(0), tiled_mma_pv.get_slice(0)
        self.fQ = tiled_mma_qk.make_fragment_A(mine.partition_A(sQ))
        self.fK = tiled_mma_qk.make_fragment_B(mine.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        cut = cute.local_tile(sVt, (BLOCK, kernel.tile_n), (None, 0, None))  # [column, key, block, stage]
        num_ctas = range(kernel.dims_v // BLOCK)
        self.fV = [tiled_mma_pv.make_fragment_A(weighs.partition_A(cut[None, None, block, None])) for block in num_ctas]
        self.fP = tiled_mma_pv.make_fragment_B(weighs.partition_B(sP))
        self.base = base

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            cute.arch.mbarrier_wait(self.barriers.q_full, items & 1)
            count = work.n_block_max - work.n_block_min
            self.score(work, tiles, True, count == 1)
            for step in cutlass.range(count, unroll=1):
                if step + 1 < count:
                    self.score(work, tiles + step + 1, False, step + 2 == count)
                self.sum(tiles + step, step > 0)
                if step + 2 == count:
                    self.tell_late(work, tiles + step + 1)
            tiles += count
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    def tell_late(self, work, tile):
        """Of the scores of an item's last tile, where they were not told of when they were issued."""

    @cute.jit
    def score(self, work, tile, first: cutlass.Constexpr[bool], last):
        """Scores of the tile, part by part as they arrive; first, last: of its item. Their place was read before the
        weights of the tile but one were there.
        """
        stage, round_ = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        place = stage_of(tile, SCORES)
        S = self.base + place * self.kernel.tile_n
        queries, keys = self.fQ[None, None, None, 0], self.fK[None, None, None, stage]
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, round_)
            end = part == PARTS - 1
            self.tiled_mma_qk.issue(
                S,
                queries,
                [keys],
                part > 0,
                commit=[self.barriers.s_full + place] if end else [],
                # Of the place, what is only key: sums read the rest.
                commit_multicast=[self.barriers.k_empty + stage * PARTS] if end else [],
                steps=steps_of(self.kernel, part),
            )
        if last:
            self.commit(self.barriers.q_empty)

    @cute.jit
    def sum(self, tile, adds):
        """Sums of the tile, once its weights are there and earlier sums are at their scale; adds: to those."""
        stage = stage_of(tile, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.p_full, tile & 1)
        tmem.after_sync()
        num_ctas = cutlass.const_expr(len(self.fV))
        for block in cutlass.range_constexpr(num_ctas):
            half_done, done = (block + 1) % (num_ctas // 2) == 0, block == num_ctas - 1
            part = 1 + block // (num_ctas // 2)
            self.tiled_mma_pv.issue(
                self.base + sums_at(self.kernel, block),
                self.fV[block][None, None, None, stage],
                [self.fP],
                adds,
                commit=[self.barriers.o_full] if done else [],
                commit_multicast=[self.barriers.k_empty + stage * PARTS + part] if half_done else [],
            )

    @cute.jit
    def commit(self, barrier):
        with cute.arch.elect_one():
            tcgen05.commit(barrier)


def steps_of(kernel, part: int) -> range:
    """Of a row's k, 16 elements each, those of a part."""
    chunks, steps = kernel.parts[part], kernel.chunk // 16
    return range(chunks.start * steps, chunks.stop * steps)


def sums_at(kernel, block: int) -> int:
    """The first column of a block's sums: behind the scores."""
    return SCORES * kernel.tile_n + block * ROWS
