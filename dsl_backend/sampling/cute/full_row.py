# SPDX-License-Identifier: Apache-2.0
"""Sampling from a whole row, where no filter bounds the candidates or they are too many.

A warp sums one block of the row at a time. A draw finds the block by the sums of the blocks, and reads that block
again. Top-p sums what is likelier than the drawn token, which is accepted if that is less than what top-p keeps;
otherwise the same sums are those of the next draw.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import Row, RowReader, Segment, bits_of_draw, top_p_of
from dsl_backend.sampling.cute.scan import WARP, add, cta_inclusive_sum, cta_sum, warp_sum
from dsl_backend.sampling.cute.smem import SharedStorage

# Logits of a lane in a block, and how many masses fit 32 bits together.
LOGITS_PER_LANE = constants.BLOCK // WARP
MASSES_AT_ONCE = 4
# Below every id: with it, all logits from a bound on are likelier.
NO_ID = -1


class Sums(NamedTuple):
    """Prefix sums of the row's blocks, uint64 in units of 2**-40.

    Attributes:
        before_cta, cta: the sum of the blocks before this CTA's, and of this CTA's.
        before_thread: the sum of the blocks before those of which this thread adds the sums.
        total: of the row.
    """

    before_cta: Any
    cta: Any
    before_thread: Any
    total: Any


class FullRowSampler:
    """Every CTA has adjacent blocks, and every warp of it the block of its index, and so on."""

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader, radix: RadixSelect):
        self.threads, self.warps, self.vector = config.threads, config.warps, config.vector
        self.cluster, self.reader, self.radix = cluster, reader, radix

    def blocks(self, vocab):
        """Blocks of a CTA; the last ones of the row may be empty."""
        return cute.ceil_div(cute.ceil_div(vocab, constants.BLOCK), self.cluster.ctas)

    @cute.jit
    def sum_masses(self, smem: SharedStorage, segment: Segment, vocab, scale):
        """Write the maximum of each block and its sum of masses.

        Returns the maximum of this thread's logits, and the sum of their exponentials below it (`RowReader.exp_sums`).
        """
        thread_max, exp_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        blocks = self.blocks(vocab)
        for index in cutlass.range(cute.arch.warp_idx(), blocks, self.warps, unroll=1):
            block = self.cluster.rank() * blocks + index
            reference, mass_sum = -cutlass.Float32.inf, cutlass.Uint64(0)
            if block * constants.BLOCK < vocab:
                rLogits = self.reader.load_block(segment, vocab, block)
                rX = cute.make_rmem_tensor(LOGITS_PER_LANE, cutlass.Float32)
                lane_max = -cutlass.Float32.inf
                for i in cutlass.range_constexpr(LOGITS_PER_LANE):
                    rX[i] = cutlass.Float32(rLogits[i])
                    lane_max = cute.arch.fmax(lane_max, rX[i])
                exp_sum = self.reader.rescaled(exp_sum, thread_max, lane_max)
                thread_max = cute.arch.fmax(thread_max, lane_max)
                exp_sum = exp_sum + self.reader.exponentials(rX, thread_max)
                reference = fixed_point.finite(cute.arch.warp_reduction(lane_max, cute.arch.fmax))
                for first in cutlass.range_constexpr(0, LOGITS_PER_LANE, MASSES_AT_ONCE):
                    mass = cutlass.Uint32(0)
                    for i in cutlass.range_constexpr(first, first + MASSES_AT_ONCE):
                        mass = mass + fixed_point.mass_of(rX[i], reference, scale)
                    mass_sum = mass_sum + cutlass.Uint64(mass)
                mass_sum = warp_sum(mass_sum)
            if cute.arch.lane_idx() == 0:
                smem.sBlockMax[index] = reference
                smem.sBlockSum[index] = mass_sum
        return thread_max, exp_sum

    @cute.jit
    def for_each_logit_of_blocks(self, row: Row, is_needed: cutlass.Constexpr, visit: cutlass.Constexpr):
        """Call visit(x, token_id) for this thread's logits in the CTA's blocks whose index is_needed accepts."""
        blocks = self.blocks(row.vocab)
        for index in cutlass.range(cute.arch.warp_idx(), blocks, self.warps, unroll=1):
            block = self.cluster.rank() * blocks + index
            if block * constants.BLOCK < row.vocab and is_needed(index):
                rLogits = self.reader.load_block(row.segment, row.vocab, block)
                begin = block * constants.BLOCK + cute.arch.lane_idx() * self.vector
                for i in cutlass.range_constexpr(LOGITS_PER_LANE):
                    token_id = begin + i // self.vector * (WARP * self.vector) + i % self.vector
                    visit(cutlass.Float32(rLogits[i]), token_id)

    @cute.jit
    def count_from(self, smem: SharedStorage, row: Row, x, by_block):
        """How many of the CTA's logits are at least x, uint64. by_block: `sum_masses` has been called."""
        blocks = self.blocks(row.vocab)
        found = cutlass.Uint32(0)
        for index in cutlass.range(cute.arch.warp_idx(), blocks, self.warps, unroll=1):
            block = self.cluster.rank() * blocks + index
            if block * constants.BLOCK < row.vocab:
                if not by_block or cutlass.Float32(smem.sBlockMax[index]) >= fixed_point.finite(x):
                    rLogits = self.reader.load_block(row.segment, row.vocab, block)
                    for i in cutlass.range_constexpr(LOGITS_PER_LANE):
                        found = found + 1 if cutlass.Float32(rLogits[i]) >= x else found
        return cta_sum(cutlass.Uint64(found), smem.sScratch[None, 3], self.warps)

    @cute.jit
    def rescale_sums(self, smem: SharedStorage, row: Row):
        """Rescale each block's sum, relative to its own maximum, to the row's."""
        for index in cutlass.range(cute.arch.thread_idx()[0], self.blocks(row.vocab), self.threads, unroll=1):
            weight = self.weight(row, cutlass.Float32(smem.sBlockMax[index]))
            smem.sBlockSum[index] = fixed_point.weighted(cutlass.Uint64(smem.sBlockSum[index]), weight)

    def weight(self, row: Row, block_reference):
        return fixed_point.prob_of(fixed_point.exponent_of(block_reference, row.reference, row.scale))

    @cute.jit
    def sum_likelier(self, smem: SharedStorage, row: Row, bound, bound_id):
        """Write the sum of the probabilities in each block that min-p keeps and that are likelier than the bound.

        The few that are likelier are found first, since a comparison costs less than a probability.
        """
        blocks = self.blocks(row.vocab)
        lane = cute.arch.lane_idx()
        for index in cutlass.range(cute.arch.warp_idx(), blocks, self.warps, unroll=1):
            block = self.cluster.rank() * blocks + index
            prob_sum = cutlass.Uint64(0)
            if block * constants.BLOCK < row.vocab:
                rLogits = self.reader.load_block(row.segment, row.vocab, block)
                found = cutlass.Uint32(0)
                for i in cutlass.range_constexpr(LOGITS_PER_LANE):
                    bit = cutlass.Uint32(1 << i)
                    found = found | bit if cutlass.Float32(rLogits[i]) >= bound else found
                while found != 0:
                    i = cutlass.Int32(cute.arch.popc((found & (~found + 1)) - 1))
                    found = found & (found - 1)
                    in_block = (i // self.vector * WARP + lane) * self.vector + i % self.vector
                    token_id = block * constants.BLOCK + in_block
                    prob_sum = prob_sum + self.likelier_prob(row, token_id, bound, bound_id)
                cute.arch.sync_warp()
                prob_sum = cute.arch.warp_reduction(prob_sum, add)
            if lane == 0:
                smem.sBlockSum[index] = prob_sum

    @cute.jit
    def likelier_prob(self, row: Row, token_id, bound, bound_id):
        """A token's probability; 0 where min-p removes it, and where it is not likelier than the bound."""
        x = self.reader.load_logit(row.segment, token_id)
        prob = fixed_point.prob_of(fixed_point.exponent_of(x, row.reference, row.scale))
        counts = prob >= row.min_prob and fixed_point.is_likelier(x, token_id, bound, bound_id)
        return prob if counts else cutlass.Uint64(0)

    @cute.jit
    def prefix_sums(self, smem: SharedStorage, row: Row) -> Sums:
        """Add the sums of all blocks; a barrier of the cluster."""
        blocks = self.blocks(row.vocab)
        cta_barrier()
        first = cute.arch.thread_idx()[0] * self.blocks_per_thread(blocks)
        thread_sum = cutlass.Uint64(0)
        for index in cutlass.range(first, cutlass.min(first + self.blocks_per_thread(blocks), blocks), unroll=1):
            thread_sum = thread_sum + cutlass.Uint64(smem.sBlockSum[index])
        prefix, cta_sum = cta_inclusive_sum(thread_sum, smem.sScratch[None, 0], self.warps)
        self.cluster.share(cta_sum, smem.sTotal, self.cluster.rank())
        self.cluster.barrier()
        lane = cute.arch.lane_idx()
        total_of_lane = cutlass.Uint64(smem.sTotal[lane]) if lane < self.cluster.ctas else cutlass.Uint64(0)
        before_cta = total_of_lane if lane < self.cluster.rank() else cutlass.Uint64(0)
        before_cta = cute.arch.warp_reduction(before_cta, add)
        total = cute.arch.warp_reduction(total_of_lane, add)
        return Sums(before_cta, cta_sum, before_cta + prefix - thread_sum, total)

    def blocks_per_thread(self, blocks):
        """Adjacent blocks, of which one thread adds the sums."""
        return cute.ceil_div(blocks, self.threads)

    @cute.jit
    def sample(self, smem: SharedStorage, row: Row, token: cute.Pointer):
        """Draw a token from the row and return its id, in every CTA.

        Where no filter but top-p is on, `sum_masses` has been called.
        """
        top_k = row.top_k
        by_block = top_k == row.vocab and row.min_prob == 0
        # -inf is no bound: its probability is 0.
        bound, bound_id = -cutlass.Float32(constants.MAX_LOGIT), cutlass.Int32(NO_ID)
        if top_k < row.vocab:
            pivot, _ = self.radix.top_k_pivot(smem, row, top_k)
            bound = cute.arch.fmax(bound, fixed_point.from_ordered_uint(pivot))
        top_p = top_p_of(row)
        limit = cutlass.Uint64(0)
        draws = cutlass.Int32(0)
        accepted = cutlass.Boolean(False)
        while not accepted:
            if by_block:
                self.rescale_sums(smem, row)
            else:
                self.sum_likelier(smem, row, bound, bound_id)
            sums = self.prefix_sums(smem, row)
            limit = fixed_point.top_p_limit(top_p, sums.total) if draws == 0 else limit
            accepted = draws > 0 and sums.total < limit
            if not accepted:
                target = fixed_point.sampling_target(bits_of_draw(row, draws), sums.total)
                bound_id = self.draw(smem, row, by_block, bound, bound_id, sums, target)
                bound = self.reader.load_logit(row.segment, bound_id)
                by_block = cutlass.Boolean(False)
                draws = draws + 1
                accepted = top_p == 1.0
        if self.cluster.rank() == 0 and cute.arch.thread_idx()[0] == 0:
            fixed_point.store_token(token, bound_id)
        return bound_id

    @cute.jit
    def draw(self, smem: SharedStorage, row: Row, by_block, bound, bound_id, sums: Sums, target):
        """The first id at which the prefix sum exceeds the target, in every CTA; a barrier of the cluster."""
        if sums.before_cta <= target and target - sums.before_cta < sums.cta:
            blocks = self.blocks(row.vocab)
            first = cute.arch.thread_idx()[0] * self.blocks_per_thread(blocks)
            before = sums.before_thread
            for index in cutlass.range(first, cutlass.min(first + self.blocks_per_thread(blocks), blocks), unroll=1):
                block_sum = cutlass.Uint64(smem.sBlockSum[index])
                if before <= target and target - before < block_sum:
                    smem.sIndex[0] = cutlass.Uint32(index)
                    smem.sResult[0] = target - before
                before = before + block_sum
            cta_barrier()
            self.search_block(smem, row, by_block, bound, bound_id)
            cta_barrier()
            self.cluster.share(cutlass.Uint32(smem.sIndex[1]), smem.sIndex, 2)
        self.cluster.barrier()
        return cutlass.Int32(smem.sIndex[2])

    @cute.jit
    def search_block(self, smem: SharedStorage, row: Row, by_block, bound, bound_id):
        """Write the id at which the prefix sum of a block exceeds the rest of the target. By one CTA."""
        index, rest = cutlass.Int32(smem.sIndex[0]), cutlass.Uint64(smem.sResult[0])
        thread = cute.arch.thread_idx()[0]
        block = self.cluster.rank() * self.blocks(row.vocab) + index
        reference, mass_to_prob = row.reference, cutlass.Uint64(fixed_point.MASS_TO_PROB)
        weight = cutlass.Uint64(1 << constants.MANTISSA_BITS)
        if by_block:
            reference, mass_to_prob = cutlass.Float32(smem.sBlockMax[index]), cutlass.Uint64(0)
            weight = self.weight(row, reference)
        passed = cutlass.Uint64(0)
        begin = cutlass.Int32(0)
        while begin < constants.BLOCK and fixed_point.weighted(passed, weight) <= rest:
            token_id = block * constants.BLOCK + begin + thread
            prob = cutlass.Uint64(0)
            if token_id < row.vocab:
                x = self.reader.load_logit(row.segment, token_id)
                found = fixed_point.prob_of(fixed_point.exponent_of(x, reference, row.scale), mass_to_prob)
                counts = found >= row.min_prob and fixed_point.is_likelier(x, token_id, bound, bound_id)
                prob = found if by_block or counts else prob
            # Other warps may still read the sums of the step before.
            sScratch = smem.sScratch[None, 1 + begin // self.threads % 2]
            prefix, prob_sum = cta_inclusive_sum(prob, sScratch, self.warps)
            prefix = prefix + passed
            if fixed_point.weighted(prefix, weight) > rest and fixed_point.weighted(prefix - prob, weight) <= rest:
                smem.sIndex[1] = cutlass.Uint32(token_id)
            passed = passed + prob_sum
            begin = begin + self.threads
