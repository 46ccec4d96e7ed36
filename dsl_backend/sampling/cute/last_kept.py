# SPDX-License-Identifier: Apache-2.0
"""What the filters keep of a row whose candidates are not listed: where top-p ends in the order of likelier tokens.

Each pass over the row sums the probabilities from some bounds on, and so refines the range of logits in which
top-p's limit is reached. Blocks below the range are not read. Once few tokens can be in the range they are listed as
candidates; more ties than a list holds are counted.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.candidates import CandidateSampler
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import LIMIT, LOGITS_PER_LANE, Row, RowReader, top_p_of, write_kept
from dsl_backend.sampling.cute.scan import WARP, add, cta_sum
from dsl_backend.sampling.cute.smem import SharedStorage

# Parts that a pass divides the range in; each has a sum in registers.
PARTS = 4
SHIFT = 2


class Range(NamedTuple):
    """Where top-p's limit is reached.

    Attributes:
        low, high: uint32, as `to_ordered_uint`: the least logit of the range, and one above its largest.
        above: uint64, the sum of the probabilities from `high` on, which is below the limit.
        inside: uint64, that of the range. With it the limit is reached.
    """

    low: Any
    high: Any
    above: Any
    inside: Any


class LastKept:
    """Writes what the filters keep of rows that are sampled as a whole."""

    def __init__(
        self,
        config: ClusterConfig,
        cluster: Cluster,
        reader: RowReader,
        radix: RadixSelect,
        candidates: CandidateSampler,
    ):
        self.threads, self.warps, self.max_candidates = config.threads, config.warps, config.max_candidates
        self.cluster, self.reader, self.radix, self.candidates = cluster, reader, radix, candidates

    @cute.jit
    def write(self, smem: SharedStorage, row: Row, lowest):
        """Write what the filters keep. Shared memory has the limit of top-p, and the maxima of the blocks.

        Args:
            lowest: the least logit that top-k keeps, finite.
        """
        limit = cutlass.Uint64(smem.sResult[LIMIT])
        if top_p_of(row) == 1.0:
            # All of the sum is below the limit.
            if self.cluster.rank() == 0 and cute.arch.thread_idx()[0] == 0:
                write_kept(row, limit, fixed_point.to_ordered_uint(lowest), 0)
        else:
            # Below the farthest logit all probabilities are 0.
            lowest = cute.arch.fmax(lowest, row.reference + row.scale.farthest)
            self.search(smem, row, fixed_point.to_ordered_uint(fixed_point.canonical(lowest)), limit)

    @cute.jit
    def search(self, smem: SharedStorage, row: Row, lowest, limit):
        """Write what top-p keeps of the logits from a key on."""
        low, high = lowest, fixed_point.to_ordered_uint(row.row_max) + cutlass.Uint32(1)
        above, inside = cutlass.Uint64(0), cutlass.Uint64(0)
        passes, searching, reaches = cutlass.Int32(0), cutlass.Boolean(True), cutlass.Boolean(True)
        while searching:
            low, high, above, inside, reaches = self.refine(smem, row, Range(low, high, above, inside), limit, passes)
            passes = passes + 1
            fits = self.fits(row, low, inside)
            searching = reaches and not fits and high - low > 1
        if not reaches:
            # The sum by blocks, of which the limit is a part, may be larger than that of the probabilities.
            if self.cluster.rank() == 0 and cute.arch.thread_idx()[0] == 0:
                write_kept(row, above, lowest, 0)
        elif self.fits(row, low, inside):
            self.list_range(smem, row, Range(low, high, above, inside), limit)
        else:
            self.count_ties(smem, row, Range(low, high, above, inside), limit)

    def fits(self, row: Row, low, inside):
        """Whether a list of candidates holds all tokens of a range, by its sum and its least probability."""
        return inside <= self.prob(row, fixed_point.from_ordered_uint(low)) * cutlass.Uint64(self.max_candidates)

    def prob(self, row: Row, x):
        """The probability of a logit, uint64, also where min-p removes it: that is after all that top-p keeps."""
        return fixed_point.prob_of(x, row.reference, row.scale)

    @cute.jit
    def refine(self, smem: SharedStorage, row: Row, found: Range, limit, passes):
        """The part of a range in which the limit is reached, and whether it is reached at all; a pass over the row.

        Where it is not reached, `above` is the sum of all.
        """
        rBounds = cute.make_rmem_tensor(PARTS, cutlass.Float32)
        rSums = cute.make_rmem_tensor(PARTS, cutlass.Uint64)
        for i in cutlass.range_constexpr(PARTS):
            rBounds[i] = fixed_point.from_ordered_uint(self.bound_key(row, found, passes, i))
            rSums[i] = cutlass.Uint64(0)
        end = fixed_point.from_ordered_uint(found.high)
        self.reader.for_each_block(smem, row, rBounds[0], partial(self.sum_parts, smem, row, rBounds, end, rSums))
        for i in cutlass.range_constexpr(PARTS):
            prob_sum = cta_sum(cutlass.Uint64(rSums[i]), smem.sScratch[None, i], self.warps)
            self.cluster.share(prob_sum, smem.sCandProb, i * self.cluster.ctas + self.cluster.rank())
        self.cluster.barrier()
        low, high, above, upto = found.low, found.high, found.above, found.above
        reaches = cutlass.Boolean(False)
        lane = cute.arch.lane_idx()
        # From the highest part down.
        for i in cutlass.range_constexpr(PARTS - 1, -1, -1):
            of_lane = cutlass.Uint64(0)
            if lane < self.cluster.ctas:
                of_lane = cutlass.Uint64(smem.sCandProb[i * self.cluster.ctas + lane])
            prob_sum = found.above + cutlass.Uint64(cute.arch.warp_reduction(of_lane, add))
            if not reaches:
                bound = self.bound_key(row, found, passes, i)
                upto = prob_sum
                if prob_sum >= limit:
                    low, reaches = bound, cutlass.Boolean(True)
                else:
                    high, above = bound, prob_sum
        # The next pass writes the sums again.
        self.cluster.wait_for_peer_reads()
        return low, high, above, upto - above, reaches

    @cute.jit
    def bound_key(self, row: Row, found: Range, passes, part):
        """The least key of a part of a range, uint32.

        Parts are alternately of the same difference of logits, and of the same number of keys, whose passes are at most
        16.
        """
        size = found.high - found.low
        shift, factor = cutlass.Uint32(SHIFT), cutlass.Uint32(part)
        key = found.low + (size >> shift) * factor + (((size & cutlass.Uint32(PARTS - 1)) * factor) >> shift)
        if passes % 2 == 0:
            low = fixed_point.from_ordered_uint(found.low)
            # A key above infinity's is NaN.
            high = cute.arch.fmin(fixed_point.from_ordered_uint(found.high), row.reference)
            x = low + (high - low) * cutlass.Float32(part / PARTS)
            key = fixed_point.to_ordered_uint(fixed_point.canonical(x))
            key = cutlass.min(cutlass.max(key, found.low), found.high)
        return key

    @cute.jit
    def sum_parts(
        self, smem: SharedStorage, row: Row, rBounds: cute.Tensor, end, rSums: cute.Tensor, index, rLogits: cute.Tensor
    ):
        """Add the probabilities of a block's logits below `end` to the sums from each bound on.

        The few that count are packed first, as in `FullRowSampler.sum_packed`.
        """
        first = cute.arch.warp_idx() * constants.BLOCK + cute.arch.lane_idx()
        last = first
        for i in cutlass.range_constexpr(LOGITS_PER_LANE):
            x = cutlass.Float32(rLogits[i])
            smem.sPacked[last] = x
            last = last + WARP if is_inside(x, rBounds[0], end) else last
        for place in cutlass.range(first, last, WARP, unroll=1):
            x = smem.sPacked[place]
            prob = self.prob(row, x)
            for i in cutlass.range_constexpr(PARTS):
                part_sum = cutlass.Uint64(rSums[i])
                rSums[i] = part_sum + prob if x >= rBounds[i] else part_sum
        cute.arch.sync_warp()

    @cute.jit
    def list_range(self, smem: SharedStorage, row: Row, found: Range, limit):
        """List the tokens of a range as candidates, and write what the filters keep up to the last one of them."""
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            smem.sCount[0] = cutlass.Uint32(0)
        # Also for the sums that are in the place of the candidates' probabilities.
        self.cluster.barrier()
        low, end = fixed_point.from_ordered_uint(found.low), fixed_point.from_ordered_uint(found.high)
        self.reader.for_each_logit_of(
            smem, row, row.row_max, partial(is_from, low), partial(self.append_inside, smem, low, end)
        )
        self.cluster.barrier()
        count = cutlass.Int32(self.candidates.count_candidates(smem))
        if self.cluster.rank() == 0:
            self.candidates.gather(smem)
            for i in cutlass.range(thread, count, self.threads, unroll=1):
                smem.sCandProb[i] = self.prob(row, smem.sCandX[i])
        self.cluster.barrier()
        if self.cluster.rank() == 0:
            self.candidates.write_last_kept(smem, row, count, found.above, limit)

    @cute.jit
    def append_inside(self, smem: SharedStorage, low, end, x, token_id):
        """List x if it is in a range. True where shared memory has no space for it."""
        return self.candidates.append(smem, is_inside(x, low, end), x, token_id)

    @cute.jit
    def count_ties(self, smem: SharedStorage, row: Row, found: Range, limit):
        """Write what the filters keep, where the range is one logit that many tokens have."""
        prob = self.prob(row, fixed_point.from_ordered_uint(found.low))
        kept = (limit - found.above + prob - 1) // prob
        removed = cutlass.Uint32(found.inside // prob - kept)
        # Of ties the lowest ids are removed.
        tie_id = self.radix.tie_pivot(smem, row, found.low, removed)
        if self.cluster.rank() == 0 and cute.arch.thread_idx()[0] == 0:
            write_kept(row, found.above + kept * prob, found.low, tie_id)


@cute.jit
def is_inside(x, low, end):
    """Whether x is in a range. The end may be NaN, of a key above infinity's: no logit is at least that."""
    return x >= low and not x >= end


@cute.jit
def is_from(low, x):
    """Whether x may be in a range, for `RowReader.for_each_logit_of`."""
    return x >= low
