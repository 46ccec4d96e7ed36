# SPDX-License-Identifier: Apache-2.0
"""Sampling from the few logits that top-k or min-p can keep, without another pass over the row."""

from functools import partial

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.scan import warp_inclusive_sum
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster, load_peer_smem
from dsl_backend.sampling.cute.row import Row, RowReader, bits_of_draw, top_p_of, write_kept, write_token
from dsl_backend.sampling.cute.scan import WARP, add, cta_sum, load_smem_vector
from dsl_backend.sampling.cute.smem import SharedStorage

# Buckets from the row's maximum down to the lowest group maximum: a candidate is a logit of the first buckets.
BUCKETS = 256
# The least range of the buckets, for rows whose group maxima are all equal.
MIN_RANGE = 1e-30
# Lanes that share the comparisons of one candidate with all others.
LANES_PER_CANDIDATE = 8
# Buckets of the distance below the row's maximum that bound candidates once more: eight for each power of two.
DISTANCE_SHIFT = 20
NEAREST = (127 - BUCKETS // 16) << (23 - DISTANCE_SHIFT)


class CandidateSampler:
    """Collects a row's candidates in the cluster's first CTA, which applies the filters and draws.

    Args:
        narrows: whether the list may lose what top-k does not keep; not where the likeliest tokens are written from it.
        keeps: what the filters keep is written.
    """

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader, *, narrows: bool, keeps: bool):
        self.threads, self.warps = config.threads, config.warps
        self.groups, self.max_candidates = config.groups, config.max_candidates
        self.cluster, self.reader, self.narrows, self.keeps = cluster, reader, narrows, keeps

    @cute.jit
    def collect(self, smem: SharedStorage, row: Row, thread_max, lowest_group_max):
        """Collect the candidates in each CTA's shared memory, and return how many the cluster has.

        More than max_candidates where they do not fit, and where no filter bounds them.
        """
        count = cutlass.Uint32(self.max_candidates + 1)
        bounded_by_top_k = self.is_bounded_by_top_k(row)
        if bounded_by_top_k or row.min_prob > 0:
            bucket_range = cute.arch.fmax(row.row_max - lowest_group_max, cutlass.Float32(MIN_RANGE))
            bucket_scale = cutlass.Float32(BUCKETS - 1) / bucket_range
            last_bucket = cutlass.Uint32(BUCKETS - 1)
            if bounded_by_top_k:
                self.count_group_maxima(smem, row, bucket_scale)
                last_bucket = self.bucket_of_rank(smem, row.top_k)
            append = partial(self.append_candidate, smem, row, bucket_scale, last_bucket)
            if last_bucket >= BUCKETS - 1 and row.vocab <= self.max_candidates:
                # Nothing is bounded, and one warp has read a block.
                self.reader.for_each_logit_once(row, append)
            else:
                self.reader.for_each_logit_of(
                    smem, row, thread_max, partial(self.is_candidate, row, bucket_scale, last_bucket), append
                )
            self.cluster.barrier()
            count = self.count_candidates(smem)
        return count

    @cute.jit
    def is_bounded_by_top_k(self, row: Row):
        """Whether the groups' maxima bound what top-k keeps."""
        top_k = row.top_k
        return top_k < row.vocab and top_k <= self.groups

    @cute.jit
    def bucket_of(self, row: Row, bucket_scale, x):
        """From 0 at the maximum to 255; never less for a smaller x. A product of infinity and 0 gives 255."""
        below_max = cutlass.Float32(0.0) if x == row.row_max else row.row_max - x
        return cutlass.Uint32(cute.arch.fmin(below_max * bucket_scale, cutlass.Float32(BUCKETS - 1)))

    @cute.jit
    def count_group_maxima(self, smem: SharedStorage, row: Row, bucket_scale):
        """Add the group maxima to the histogram of their buckets."""
        for group in cutlass.range(cute.arch.thread_idx()[0], self.groups, self.threads, unroll=1):
            bucket = self.bucket_of(row, bucket_scale, smem.sGroupMax[group])
            cute.arch.atomic_add(smem.sBins.iterator + bucket, cutlass.Uint32(1), sem="relaxed", scope="cta")
        cta_barrier()

    @cute.jit
    def bucket_of_rank(self, smem: SharedStorage, k):
        """The first bucket up to which there are k group maxima; 256 where there are fewer."""
        lane = cute.arch.lane_idx()
        buckets_per_lane = cutlass.const_expr(BUCKETS // WARP)
        lane_sum = cutlass.Uint32(0)
        rBuckets = load_smem_vector(smem.sBins, lane * buckets_per_lane, buckets_per_lane)
        rPrefix = cute.make_rmem_tensor(buckets_per_lane, cutlass.Uint32)
        for i in cutlass.range_constexpr(buckets_per_lane):
            lane_sum = lane_sum + cutlass.Uint32(rBuckets[i])
            rPrefix[i] = lane_sum
        before = warp_inclusive_sum(lane_sum) - lane_sum
        buckets_below_k = cutlass.Uint32(0)
        for i in cutlass.range_constexpr(buckets_per_lane):
            is_below_k = before + rPrefix[i] < cutlass.Uint32(k)
            buckets_below_k = buckets_below_k + 1 if is_below_k else buckets_below_k
        return cute.arch.warp_reduction(buckets_below_k, add)

    @cute.jit
    def is_candidate(self, row: Row, bucket_scale, last_bucket, x):
        """Whether x may be among the k largest and min-p keeps it. False where its probability is 0."""
        prob = fixed_point.prob_of(x, row.reference, row.scale)
        return prob >= row.min_prob and prob > 0 and self.bucket_of(row, bucket_scale, x) <= last_bucket

    @cute.jit
    def append_candidate(self, smem: SharedStorage, row: Row, bucket_scale, last_bucket, x, token_id):
        """Store x if it is a candidate. True where shared memory has no space for it."""
        return self.append(smem, self.is_candidate(row, bucket_scale, last_bucket, x), x, token_id)

    @cute.jit
    def append(self, smem: SharedStorage, needed, x, token_id):
        """Store x if it is needed. True where shared memory has no space for it."""
        full = cutlass.Boolean(False)
        if needed:
            index = cute.arch.atomic_add(smem.sCount.iterator, cutlass.Uint32(1), sem="relaxed", scope="cta")
            if index < self.max_candidates:
                smem.sCandX[index] = x
                smem.sCandId[index] = cutlass.Uint32(token_id)
            else:
                full = cutlass.Boolean(True)
        return full

    @cute.jit
    def count_candidates(self, smem: SharedStorage):
        """The candidates of all CTAs; above max_candidates where one CTA had no space."""
        lane = cute.arch.lane_idx()
        cta_count = cutlass.Uint32(0)
        if lane < self.cluster.ctas:
            cta_count = self.cluster.load(smem.sCount, 0, lane, cutlass.Uint32)
        return cute.arch.warp_reduction(cta_count, add)

    @cute.jit
    def sample(self, smem: SharedStorage, row: Row, count):
        """Draw a token from the candidates of all CTAs."""
        if self.cluster.rank() == 0:
            self.gather(smem)
        self.cluster.wait_for_peer_reads()
        if self.cluster.rank() == 0:
            fewer = cutlass.Int32(count)
            if cutlass.const_expr(self.narrows):
                if self.is_bounded_by_top_k(row) and fewer >= row.top_k + self.threads // LANES_PER_CANDIDATE:
                    fewer = self.narrow(smem, row, fewer)
            self.filter_and_draw(smem, row, fewer)

    @cute.jit
    def narrow(self, smem: SharedStorage, row: Row, count):
        """Keep those of the first CTA's candidates that may be among the k largest, and return how many these are.

        A row of few blocks has fewer group maxima above -inf than k, which bound nothing: every logit is a candidate.
        Two steps compare all pairs of them.

        Args:
            count: more than k.
        """
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range(thread, BUCKETS, self.threads, unroll=1):
            smem.sBins[i] = cutlass.Uint32(0)
        if thread == 0:
            smem.sCount[0] = cutlass.Uint32(0)
        cta_barrier()
        for i in cutlass.range(thread, count, self.threads, unroll=1):
            bucket = self.bucket_of_distance(row, smem.sCandX[i])
            cute.arch.atomic_add(smem.sBins.iterator + bucket, cutlass.Uint32(1), sem="relaxed", scope="cta")
        cta_barrier()
        last_bucket = self.bucket_of_rank(smem, row.top_k)
        for first in cutlass.range(0, count, self.threads, unroll=1):
            own = cutlass.min(first + thread, count - 1)
            x, token_id = smem.sCandX[own], smem.sCandId[own]
            # Those that are kept are written to places that are read by now.
            cta_barrier()
            self.append(smem, first + thread < count and self.bucket_of_distance(row, x) <= last_bucket, x, token_id)
        cta_barrier()
        return cutlass.Int32(smem.sCount[0])

    @cute.jit
    def bucket_of_distance(self, row: Row, x):
        """From 0 at the maximum to 255; never less for a smaller x."""
        below_max = cutlass.Float32(0.0) if x == row.row_max else row.row_max - x
        distance = below_max.bitcast(cutlass.Uint32) >> cutlass.Uint32(DISTANCE_SHIFT)
        nearest = cutlass.Uint32(NEAREST)
        return cutlass.min(cutlass.max(distance, nearest) - nearest, cutlass.Uint32(BUCKETS - 1))

    @cute.jit
    def gather(self, smem: SharedStorage):
        """Copy the candidates of the other CTAs behind those of the first CTA."""
        if cutlass.const_expr(self.cluster.ctas > 1):
            lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
            cta_count = cutlass.Uint32(0)
            if lane < self.cluster.ctas:
                cta_count = load_peer_smem(smem.sCount.iterator, cutlass.Uint32, lane)
            prefix = warp_inclusive_sum(cta_count)
            for peer in cutlass.range(1 + warp, self.cluster.ctas, self.warps, unroll=1):
                count = cute.arch.shuffle_sync(cta_count, peer)
                begin = cute.arch.shuffle_sync(prefix, peer) - count
                for i in cutlass.range(lane, count, WARP, unroll=1):
                    smem.sCandX[begin + i] = load_peer_smem(smem.sCandX.iterator + i, cutlass.Float32, peer)
                    smem.sCandId[begin + i] = load_peer_smem(smem.sCandId.iterator + i, cutlass.Uint32, peer)
        cta_barrier()

    @cute.jit
    def filter_and_draw(self, smem: SharedStorage, row: Row, count):
        """Apply the filters to the first CTA's candidates and draw. Two steps compare all pairs of candidates."""
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range(thread, count, self.threads, unroll=1):
            smem.sCandProb[i] = fixed_point.prob_of(smem.sCandX[i], row.reference, row.scale)
        cta_barrier()
        prob_sum = self.apply_top_k_min_p(smem, row, count)
        top_p = top_p_of(row)
        limit = fixed_point.top_p_limit(top_p, prob_sum)
        if cutlass.const_expr(self.keeps):
            self.write_last_kept(smem, row, count, cutlass.Uint64(0), limit)
        draws = cutlass.Int32(0)
        while draws == 0 or prob_sum >= limit:
            self.draw(smem, count, fixed_point.sampling_target(bits_of_draw(smem, row, draws), prob_sum))
            prob_sum = cutlass.Uint64(0)
            if top_p < 1.0:
                prob_sum = self.keep_likelier(smem, count)
            draws = draws + 1
        if thread == 0:
            write_token(row, smem.sCandId[smem.sIndex[0]])

    @cute.jit
    def apply_top_k_min_p(self, smem: SharedStorage, row: Row, count):
        """Mask the probabilities that top-k or min-p removes, and return the sum of the others."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES_PER_CANDIDATE
        kept, top_k = cutlass.Uint64(0), row.top_k
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            x = smem.sCandX[cutlass.min(i, count - 1)]
            larger = self.sum_over_candidates(lane, count, cutlass.Int32(0), partial(self.add_larger, smem, x))
            if lane == 0 and i < count:
                prob = smem.sCandProb[i]
                prob = prob if larger < top_k and prob >= row.min_prob else cutlass.Uint64(0)
                smem.sCandProb[i] = prob
                kept = kept + prob
        return cta_sum(kept, smem.sScratch[None, 0], self.warps)

    @cute.jit
    def write_last_kept(self, smem: SharedStorage, row: Row, count, above, limit):
        """Write what the filters keep, up to the least likely of the first CTA's candidates that top-p keeps.

        It is the one with which the sum of the likeliest tokens reaches the limit.

        Args:
            above: the sum of the tokens that are likelier than all candidates, uint64.
            limit: of top-p, uint64; more than above, and at most the sum of these and of all candidates.
        """
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES_PER_CANDIDATE
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            own = cutlass.min(i, count - 1)
            x, token_id = smem.sCandX[own], smem.sCandId[own]
            likelier = self.sum_over_candidates(
                lane, count, cutlass.Uint64(0), partial(self.add_likelier, smem, x, token_id)
            )
            if lane == 0 and i < count:
                before = above + likelier
                prob_sum = before + smem.sCandProb[own]
                if before < limit and prob_sum >= limit:
                    write_kept(row, prob_sum, fixed_point.to_ordered_uint(fixed_point.canonical(x)), token_id)

    @cute.jit
    def draw(self, smem: SharedStorage, count, target):
        """Find the first candidate, by token id, whose prefix sum of probabilities exceeds the target."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES_PER_CANDIDATE
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            token_id = smem.sCandId[cutlass.min(i, count - 1)]
            prefix = self.sum_over_candidates(
                lane, count, cutlass.Uint64(0), partial(self.add_up_to_id, smem, token_id)
            )
            if lane == 0 and i < count:
                if prefix > target and prefix - smem.sCandProb[i] <= target:
                    smem.sIndex[0] = cutlass.Uint32(i)
        cta_barrier()

    @cute.jit
    def keep_likelier(self, smem: SharedStorage, count):
        """Mask all that is not likelier than the drawn candidate, and return the sum of the others."""
        drawn = smem.sIndex[0]
        bound, bound_id = smem.sCandX[drawn], smem.sCandId[drawn]
        kept = cutlass.Uint64(0)
        for i in cutlass.range(cute.arch.thread_idx()[0], count, self.threads, unroll=1):
            likelier = fixed_point.is_likelier(smem.sCandX[i], smem.sCandId[i], bound, bound_id)
            prob = smem.sCandProb[i] if likelier else cutlass.Uint64(0)
            smem.sCandProb[i] = prob
            kept = kept + prob
        return cta_sum(kept, smem.sScratch[None, 1], self.warps)

    @cute.jit
    def sum_over_candidates(self, lane, count, zero, add_term: cutlass.Constexpr):
        """A sum over all candidates, computed by the 8 lanes of one candidate together.

        Args:
            lane: of the 8.
            add_term: from a partial sum and the index of a candidate to the next partial sum.
        """
        partial_sum = zero
        for other in cutlass.range(lane, count, LANES_PER_CANDIDATE, unroll=4):
            partial_sum = add_term(partial_sum, other)
        return cute.arch.warp_reduction(partial_sum, add, threads_in_group=LANES_PER_CANDIDATE)

    @cute.jit
    def add_larger(self, smem: SharedStorage, x, partial_sum, other):
        return partial_sum + 1 if smem.sCandX[other] > x else partial_sum

    @cute.jit
    def add_likelier(self, smem: SharedStorage, x, token_id, partial_sum, other):
        likelier = fixed_point.is_likelier(smem.sCandX[other], smem.sCandId[other], x, token_id)
        return partial_sum + smem.sCandProb[other] if likelier else partial_sum

    @cute.jit
    def add_up_to_id(self, smem: SharedStorage, token_id, partial_sum, other):
        return partial_sum + smem.sCandProb[other] if smem.sCandId[other] <= token_id else partial_sum
