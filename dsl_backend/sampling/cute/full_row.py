# SPDX-License-Identifier: Apache-2.0
"""Sampling from a whole row, where no filter bounds the candidates or they are too many.

A draw finds the block by the sums of the blocks, and reads that block again. Top-p sums what is likelier than the drawn
token, which is accepted if that is less than what top-p keeps; otherwise the same sums are those of the next draw. Most
tokens are accepted without that: the blocks that have a logit as likely are less than top-p keeps as a whole.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.last_kept import LastKept
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import (
    HALF_WORD,
    LANE_UNIT_BITS,
    LIMIT,
    LOGITS_PER_LANE,
    Row,
    RowReader,
    bits_of_draw,
    top_p_of,
    write_token,
)
from dsl_backend.sampling.cute.scan import WARP, add, cta_inclusive_sum, cta_sum, warp_sum
from dsl_backend.sampling.cute.smem import SharedStorage

# Below every id: with it, all logits from a bound on are likelier.
NO_ID = -1
# Bits of a lane's sum of probabilities that are added apart: 16 probabilities are up to 2**44.
PROB_LOW_BITS = 20
PROB_UNIT = 2.0**-constants.PROB_BITS


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


def next_above(x):
    """The least float32 above one that is not NaN and not negative zero; NaN for infinity."""
    return fixed_point.from_ordered_uint(fixed_point.to_ordered_uint(x) + cutlass.Uint32(1))


class FullRowSampler:
    """Draws from the sums of the row's blocks.

    Args:
        last_kept: writes what the filters keep; None where it is not returned.
    """

    def __init__(
        self,
        config: ClusterConfig,
        cluster: Cluster,
        reader: RowReader,
        radix: RadixSelect,
        last_kept: LastKept | None = None,
    ):
        self.threads, self.warps, self.vector = config.threads, config.warps, config.vector
        self.cluster, self.reader, self.radix, self.last_kept = cluster, reader, radix, last_kept

    @cute.jit
    def count_from(self, smem: SharedStorage, row: Row, x):
        """How many of the CTA's logits are at least x, uint64."""
        rFound = cute.make_rmem_tensor(1, cutlass.Uint32)
        rFound[0] = cutlass.Uint32(0)
        self.reader.for_each_block(smem, row, x, partial(self.add_count, rFound, x))
        return cta_sum(cutlass.Uint64(rFound[0]), smem.sScratch[None, 3], self.warps)

    @cute.jit
    def add_count(self, rFound: cute.Tensor, x, index, rLogits: cute.Tensor):
        found = cutlass.Uint32(rFound[0])
        for i in cutlass.range_constexpr(LOGITS_PER_LANE):
            found = found + 1 if cutlass.Float32(rLogits[i]) >= x else found
        rFound[0] = found

    @cute.jit
    def rescale_sums(self, smem: SharedStorage, row: Row):
        """Rescale each block's sum, relative to its own maximum, to the row's."""
        for index in cutlass.range(cute.arch.thread_idx()[0], self.reader.blocks(row.vocab), self.threads, unroll=1):
            weight = self.weight(row, cutlass.Float32(smem.sBlockMax[index]))
            smem.sBlockSum[index] = fixed_point.weighted(cutlass.Uint64(smem.sBlockSum[index]), weight)

    def weight(self, row: Row, block_reference):
        return fixed_point.prob_of(block_reference, row.reference, row.scale)

    @cute.jit
    def sum_likelier(self, smem: SharedStorage, row: Row, bound, bound_id):
        """Write the sum of the probabilities in each block that min-p keeps and that are likelier than the bound.

        Blocks whose maximum is below the bound are not read.
        """
        for index in cutlass.range(cute.arch.thread_idx()[0], self.reader.blocks(row.vocab), self.threads, unroll=1):
            smem.sBlockSum[index] = cutlass.Uint64(0)
        cta_barrier()
        self.reader.for_each_block(smem, row, bound, partial(self.sum_block, smem, row, bound, bound_id))

    @cute.jit
    def sum_block(self, smem: SharedStorage, row: Row, bound, bound_id, index, rLogits: cute.Tensor):
        """Write a block's sum of what is likelier than the bound."""
        first_id = self.reader.block(row.vocab, index) * constants.BLOCK
        # Of equal logits the higher ids are the likelier. One block may have both kinds.
        least = bound if first_id > bound_id else next_above(bound)
        if first_id <= bound_id and bound_id < first_id + constants.BLOCK:
            least = bound
            self.remove_ties(rLogits, bound, bound_id - first_id)
        prob_sum = warp_sum(self.sum_packed(smem, row, rLogits, least), PROB_LOW_BITS)
        if cute.arch.lane_idx() == 0:
            smem.sBlockSum[index] = prob_sum

    @cute.jit
    def kept_prob(self, row: Row, x):
        """The probability of a logit, uint64; 0 where min-p removes it."""
        power = fixed_point.prob_power_of(x, row.reference, row.scale)
        # Exact in float32: the least probability is a float32 times a power of two.
        power = power if power >= cutlass.Float32(row.min_prob) else cutlass.Float32(0.0)
        return fixed_point.truncate_to_uint(power, cutlass.Uint64)

    @cute.jit
    def sum_packed(self, smem: SharedStorage, row: Row, rLogits: cute.Tensor, least):
        """The sum of the probabilities from a logit on that min-p keeps, of the lane's logits of a block.

        The few that count are packed in the lane's column of shared memory first, since a comparison costs less than a
        probability, and registers have no index.
        """
        begin = cute.arch.warp_idx() * constants.BLOCK + cute.arch.lane_idx()
        end = begin
        for i in cutlass.range_constexpr(LOGITS_PER_LANE):
            x = cutlass.Float32(rLogits[i])
            # Without a condition, which costs more. The next one that counts replaces one that does not.
            smem.sPacked[end] = x
            end = end + WARP if x >= least else end
        lane_sum = cutlass.Uint64(0)
        for place in cutlass.range(begin, end, WARP, unroll=1):
            lane_sum = lane_sum + self.kept_prob(row, smem.sPacked[place])
        cute.arch.sync_warp()
        return lane_sum

    def in_block(self, i):
        """Index in its block of a lane's logit."""
        return (i // self.vector * WARP + cute.arch.lane_idx()) * self.vector + i % self.vector

    @cute.jit
    def remove_ties(self, rLogits: cute.Tensor, bound, last):
        """Make -inf of a block's logits that equal the bound, up to an index in the block."""
        for i in cutlass.range_constexpr(LOGITS_PER_LANE):
            is_tie = cutlass.Float32(rLogits[i]) == bound and self.in_block(i) <= last
            rLogits[i] = self.reader.dtype(float("-inf")) if is_tie else rLogits[i]

    @cute.jit
    def prefix_sums(self, smem: SharedStorage, row: Row) -> Sums:
        """Add the sums of all blocks; a barrier of the cluster."""
        blocks = self.reader.blocks(row.vocab)
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

    @cute.jit
    def upper_sum(self, smem: SharedStorage, row: Row, bound):
        """At least the sum of the probabilities of the logits from a bound on: that of the blocks that have one.

        Each block's sum is that of an earlier bound, or of masses and rescaled. These sums are not those of probs: each
        is less by at most 2**-15 of itself, and by a unit for each logit.
        """
        blocks = self.reader.blocks(row.vocab)
        thread_sum = cutlass.Uint64(0)
        for index in cutlass.range(cute.arch.thread_idx()[0], blocks, self.threads, unroll=1):
            has_one = cutlass.Float32(smem.sBlockMax[index]) >= fixed_point.finite(bound)
            thread_sum = thread_sum + cutlass.Uint64(smem.sBlockSum[index]) if has_one else thread_sum
        return self.upper_total(smem, thread_sum)

    @cute.jit
    def upper_sum_of_lanes(self, smem: SharedStorage, row: Row, bound):
        """The same by the bounds that the first pass has written for each lane, which has 16 logits and not 512.

        `RowReader.write_lane_bound` has rounded them up.
        """
        key = fixed_point.to_ordered_uint(bound) >> cutlass.Uint32(HALF_WORD)
        thread_sum = cutlass.Uint64(0)
        for place in cutlass.range(
            cute.arch.thread_idx()[0], self.reader.blocks(row.vocab) * WARP, self.threads, unroll=1
        ):
            lane_bound = cutlass.Uint32(smem.sLaneBounds[place])
            if lane_bound >> cutlass.Uint32(HALF_WORD) >= key:
                mass = fixed_point.truncate_to_uint(
                    (lane_bound << cutlass.Uint32(HALF_WORD)).bitcast(cutlass.Float32), cutlass.Uint64
                )
                weight = self.weight(row, cutlass.Float32(smem.sBlockMax[place // WARP]))
                # One more for what is rounded down here.
                weighted = fixed_point.weighted(mass << cutlass.Uint64(LANE_UNIT_BITS), weight)
                thread_sum = thread_sum + weighted + cutlass.Uint64(1)
        return self.upper_total(smem, thread_sum)

    @cute.jit
    def upper_total(self, smem: SharedStorage, thread_sum):
        """At least the sum over the cluster of what each thread has of `upper_sum`; a barrier of the cluster."""
        self.cluster.share(cta_sum(thread_sum, smem.sScratch[None, 4], self.warps), smem.sUpper, self.cluster.rank())
        self.cluster.barrier()
        lane = cute.arch.lane_idx()
        of_lane = cutlass.Uint64(smem.sUpper[lane]) if lane < self.cluster.ctas else cutlass.Uint64(0)
        total = cutlass.Uint64(cute.arch.warp_reduction(of_lane, add))
        return total + (total >> cutlass.Uint64(15)) + cutlass.Uint64(constants.MAX_VOCAB)

    def blocks_per_thread(self, blocks):
        """Adjacent blocks, of which one thread adds the sums."""
        return cute.ceil_div(blocks, self.threads)

    @cute.jit
    def sample(self, smem: SharedStorage, row: Row):
        """Draw a token from the row and return its id, in every CTA.

        Where no filter but top-p is on, the first pass has summed masses.
        """
        top_k = row.top_k
        by_block = top_k == row.vocab and row.min_prob == 0
        # -inf is no bound: its probability is 0.
        bound, bound_id = -cutlass.Float32(constants.MAX_LOGIT), cutlass.Int32(NO_ID)
        if top_k < row.vocab:
            pivot, _ = self.radix.top_k_pivot(smem, row, top_k)
            bound = cute.arch.fmax(bound, fixed_point.from_ordered_uint(pivot))
        lowest = bound
        bound_id = self.draw_until_accepted(smem, row, by_block, bound, bound_id)
        if cutlass.const_expr(self.last_kept is not None):
            self.last_kept.write(smem, row, lowest)
        if self.cluster.rank() == 0 and cute.arch.thread_idx()[0] == 0:
            write_token(row, bound_id)
        return bound_id

    @cute.jit
    def draw_until_accepted(
        self, smem: SharedStorage, row: Row, by_block, bound, bound_id, drawn: cutlass.Constexpr = False
    ):
        """Draw among the tokens likelier than a bound until top-p keeps one; its id, in every CTA.

        Args:
            by_block: whether the first pass has summed masses.
            bound, bound_id: logit and id.
            drawn: whether the bound is a token that was drawn, which top-p may keep. Shared memory has the limit then.
        """
        draws = cutlass.Int32(1 if cutlass.const_expr(drawn) else 0)
        accepted = cutlass.Boolean(False)
        while not accepted:
            if by_block:
                self.rescale_sums(smem, row)
            else:
                self.sum_likelier(smem, row, bound, bound_id)
            sums = self.prefix_sums(smem, row)
            if cutlass.const_expr(not drawn) and draws == 0 and cute.arch.thread_idx()[0] == 0:
                # In shared memory: held in registers over the passes, others spilled.
                smem.sResult[LIMIT] = fixed_point.top_p_limit(top_p_of(row), sums.total)
                if cutlass.const_expr(self.reader.exp_sums):
                    if by_block and row.args.temperature[row.index] == 1.0:
                        # The first pass has not summed exponentials: other CTAs' are 0, and so are they here.
                        smem.sExpSums[0] = cutlass.Float32(sums.total) * cutlass.Float32(PROB_UNIT)
            if draws > 0:
                accepted = sums.total < cutlass.Uint64(smem.sResult[LIMIT])
            if not accepted:
                bound, bound_id, accepted = self.draw_and_judge(smem, row, by_block, bound, bound_id, sums, draws)
                draws = draws + 1
                by_block = cutlass.Boolean(False)
        return bound_id

    @cute.jit
    def draw_once(self, smem: SharedStorage, row: Row):
        """Draw a token of a row that is summed by blocks.

        Returns:
            Its id, and whether it is sure that top-p keeps it, in every CTA. Shared memory has top-p's limit.
        """
        self.rescale_sums(smem, row)
        sums = self.prefix_sums(smem, row)
        if cute.arch.thread_idx()[0] == 0:
            smem.sResult[LIMIT] = fixed_point.top_p_limit(top_p_of(row), sums.total)
        lowest, no_id = -cutlass.Float32(constants.MAX_LOGIT), cutlass.Int32(NO_ID)
        _, token_id, is_kept = self.draw_and_judge(
            smem, row, cutlass.Boolean(True), lowest, no_id, sums, cutlass.Int32(0)
        )
        return token_id, is_kept

    @cute.jit
    def draw_and_judge(self, smem: SharedStorage, row: Row, by_block, bound, bound_id, sums: Sums, draws):
        """(logit and id of the next token by the sums, whether it is sure that top-p keeps it), in every CTA.

        Args: as of `draw_until_accepted`.
        """
        target = fixed_point.sampling_target(bits_of_draw(smem, row, draws), sums.total)
        token_id = self.draw(smem, row, by_block, bound, bound_id, sums, target)
        x = fixed_point.canonical(self.reader.load_logit(row.logits, token_id))
        is_kept = top_p_of(row) == 1.0
        if not is_kept:
            is_kept = self.surely_keeps(smem, row, x, by_block)
        return x, token_id, is_kept

    @cute.jit
    def surely_keeps(self, smem: SharedStorage, row: Row, x, by_block):
        """Whether what is likelier than a drawn token of logit x is less than top-p keeps, by upper bounds.

        Args:
            by_block: the sums are the first pass's.
        """
        upper = cutlass.Uint64(0)
        if cutlass.const_expr(self.reader.lane_bounds):
            if by_block:  # noqa: SIM108 - a conditional expression of CuTe DSL computes both
                upper = self.upper_sum_of_lanes(smem, row, x)
            else:
                upper = self.upper_sum(smem, row, x)
        else:
            upper = self.upper_sum(smem, row, x)
        # The token itself is in the bound. Without it the likeliest of few tokens is accepted at once.
        return upper - fixed_point.prob_of(x, row.reference, row.scale) < cutlass.Uint64(smem.sResult[LIMIT])

    @cute.jit
    def draw(self, smem: SharedStorage, row: Row, by_block, bound, bound_id, sums: Sums, target):
        """The first id at which the prefix sum exceeds the target, in every CTA; a barrier of the cluster."""
        if sums.before_cta <= target and target - sums.before_cta < sums.cta:
            blocks = self.reader.blocks(row.vocab)
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
        block = self.reader.block(row.vocab, index)
        reference, weight = row.reference, cutlass.Uint64(1 << constants.MANTISSA_BITS)
        if by_block:
            reference = cutlass.Float32(smem.sBlockMax[index])
            weight = self.weight(row, reference)
        passed = cutlass.Uint64(0)
        begin = cutlass.Int32(0)
        while begin < constants.BLOCK and fixed_point.weighted(passed, weight) <= rest:
            token_id = block * constants.BLOCK + begin + thread
            prob = cutlass.Uint64(0)
            if token_id < row.vocab:
                x = self.reader.load_logit(row.logits, token_id)
                found = fixed_point.prob_of(x, reference, row.scale)
                if by_block:
                    found = cutlass.Uint64(fixed_point.mass_of(x, reference, row.scale, above=True))
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
