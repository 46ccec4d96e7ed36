# SPDX-License-Identifier: Apache-2.0
"""The multiply role of absorbed MLA: one warp issues all products.

The scores of a tile are issued before the sums of the tile before it, so that they are made while its softmax works.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.parts.latent_configs import PARTS, ROWS
from dsl_backend.attention.sm100.latent_configs import BLOCK, SCORES
from dsl_backend.primitives import tensor_memory
from dsl_backend.primitives.ring import phase_of, stage_of


class LatentMultiplier:
    """Scores S = Q K^T, and transposed sums O^T += V^T P^T."""

    def __init__(self, kernel, mailbox, product, weighing, barriers, base, sQ, sK, sV, sP):
        self.kernel, self.config, self.mailbox, self.barriers = kernel, kernel.config, mailbox, barriers
        self.product, self.weighing = product, weighing
        mine, weighs = product.get_slice(0), weighing.get_slice(0)
        self.fQ = product.make_fragment_A(mine.partition_A(sQ))
        self.fK = product.make_fragment_B(mine.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        cut = cute.local_tile(sVt, (BLOCK, kernel.tile_n), (None, 0, None))  # [column, key, block, stage]
        blocks = range(kernel.dims_v // BLOCK)
        self.fV = [weighing.make_fragment_A(weighs.partition_A(cut[None, None, block, None])) for block in blocks]
        self.fP = weighing.make_fragment_B(weighs.partition_B(sP))
        self.scores = product.make_fragment_C(mine.partition_shape_C((ROWS, kernel.tile_n))).layout
        self.sums = weighing.make_fragment_C(weighs.partition_shape_C((BLOCK, ROWS))).layout
        self.base = base

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.mailbox.read(items)
        valid = work.valid
        while valid != 0:
            cute.arch.mbarrier_wait(self.barriers.q_full, items & 1)
            count = work.end - work.begin
            self.score(tiles, True, count == 1)
            for step in cutlass.range(count, unroll=1):
                if step + 1 < count:
                    self.score(tiles + step + 1, False, step + 2 == count)
                self.sum(tiles + step, step > 0)
            tiles += count
            items += 1
            work = self.mailbox.read(items)
            valid = work.valid

    @cute.jit
    def score(self, tile, first: cutlass.Constexpr[bool], last):
        """Scores of the tile, part by part as they arrive; first, last: of its item. Their place was read before the
        weights of the tile but one were there.
        """
        stage, round_ = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        place = tile % SCORES
        S = cute.make_tensor(self.base + place * self.kernel.tile_n, self.scores)
        product = self.product.with_()
        blocks = cutlass.const_expr(self.kernel.chunk // 16)
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, round_)
            chunks = cutlass.const_expr(self.kernel.parts[part])
            for k in cutlass.range_constexpr(chunks.start * blocks, chunks.stop * blocks):
                product.set(tcgen05.Field.ACCUMULATE, part > 0 or k > chunks.start * blocks)
                cute.gemm(product, S, self.fQ[None, None, k, 0], self.fK[None, None, k, stage], S)
        self.commit(self.barriers.s_full + place)
        self.release(stage, 0)
        if last:
            self.commit(self.barriers.q_empty)

    @cute.jit
    def sum(self, tile, adds):
        """Sums of the tile, once its weights are there and earlier sums are at their scale; adds: to those."""
        stage = stage_of(tile, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.p_full, tile & 1)
        tensor_memory.after_sync()
        weighing = self.weighing.with_()
        blocks = cutlass.const_expr(len(self.fV))
        for block in cutlass.range_constexpr(blocks):
            sums = cute.make_tensor(self.base + sums_at(self.kernel, block), self.sums)
            for k in cutlass.range_constexpr(cute.size(self.fP, mode=[2])):
                weighing.set(tcgen05.Field.ACCUMULATE, adds if cutlass.const_expr(k == 0) else True)
                cute.gemm(weighing, sums, self.fV[block][None, None, k, stage], self.fP[None, None, k], sums)
            if cutlass.const_expr((block + 1) % (blocks // 2) == 0):
                self.release(stage, 1 + block // (blocks // 2))
        self.commit(self.barriers.o_full)

    @cute.jit
    def release(self, stage, part):
        """A part of a key tile is read when all products so far are done; every block of a cluster may write to it."""
        empty = self.barriers.k_empty + stage * PARTS + part
        with cute.arch.elect_one():
            if cutlass.const_expr(self.config.cluster > 1 and not self.kernel.key.fp8):
                tcgen05.commit(empty, (1 << self.config.cluster) - 1)
            else:
                tcgen05.commit(empty)

    @cute.jit
    def commit(self, barrier):
        with cute.arch.elect_one():
            tcgen05.commit(barrier)


def sums_at(kernel, block: int) -> int:
    """The first column of a block's sums: behind the scores."""
    return SCORES * kernel.tile_n + block * ROWS
