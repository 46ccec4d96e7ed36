# SPDX-License-Identifier: Apache-2.0
"""Sampling from the few logits that top-k or min-p can keep, without another pass over the row."""

from functools import partial

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.scan import warp_inclusive_sum
from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster, load_peer_smem
from dsl_backend.sampling.cute.row import Row, RowReader
from dsl_backend.sampling.cute.scan import WARP, add, cta_sum, load_smem_vector
from dsl_backend.sampling.cute.smem import SharedStorage

# Buckets from the row's maximum down to the lowest group maximum: a candidate is a logit of the first buckets.
BUCKETS = 256
# The least range of the buckets, for rows whose group maxima are all equal.
MIN_RANGE = 1e-30
# Lanes that share the comparisons of one candidate with all others.
LANES_PER_CANDIDATE = 8


class CandidateSampler:
    """Collects a row's candidates in the cluster's first CTA, which applies the filters and draws."""

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader):
        self.threads, self.warps = config.threads, config.warps
        self.groups, self.max_candidates = config.groups, config.max_candidates
        self.cluster, self.reader = cluster, reader

    @cute.jit
    def collect(self, smem: SharedStorage, row: Row, thread_max, lowest_group_max):
        """Collect the candidates in each CTA's shared memory, and return how many the cluster has.

        More than max_candidates where they do not fit, and where no filter bounds them.
        """
        count = cutlass.Uint32(self.max_candidates + 1)
        bounded_by_top_k = row.top_k <= self.groups
        if bounded_by_top_k or row.min_prob > 0:
            bucket_range = cute.arch.fmax(row.row_max - lowest_group_max, cutlass.Float32(MIN_RANGE))
            bucket_scale = cutlass.Float32(BUCKETS - 1) / bucket_range
            last_bucket = cutlass.Uint32(BUCKETS - 1)
            if bounded_by_top_k:
                last_bucket = self.top_k_bucket(smem, row, bucket_scale)
            self.reader.for_each_logit_of(
                row,
                self.is_candidate(row, bucket_scale, last_bucket, thread_max),
                partial(self.append_candidate, smem, row, bucket_scale, last_bucket),
            )
            self.cluster.barrier()
            count = self.count_candidates(smem)
        return count

    @cute.jit
    def bucket_of(self, row: Row, bucket_scale, z):
        """From 0 at the maximum to 255; never less for a smaller z. A product of infinity and 0 gives 255."""
        bucket = cute.arch.fmin(fixed_point.below_max(z, row.row_max) * bucket_scale, cutlass.Float32(BUCKETS - 1))
        return cutlass.Uint32(bucket)

    @cute.jit
    def top_k_bucket(self, smem: SharedStorage, row: Row, bucket_scale):
        """The first bucket up to which there are k group maxima."""
        for group in cutlass.range(cute.arch.thread_idx()[0], self.groups, self.threads, unroll=1):
            bucket = self.bucket_of(row, bucket_scale, smem.sGroupMax[group])
            cute.arch.atomic_add(smem.sBinLow.iterator + bucket, cutlass.Uint32(1), sem="relaxed", scope="cta")
        cta_barrier()
        lane = cute.arch.lane_idx()
        buckets_per_lane = cutlass.const_expr(BUCKETS // WARP)
        lane_sum = cutlass.Uint32(0)
        rBuckets = load_smem_vector(smem.sBinLow, lane * buckets_per_lane, buckets_per_lane)
        rPrefix = cute.make_rmem_tensor(buckets_per_lane, cutlass.Uint32)
        for i in cutlass.range_constexpr(buckets_per_lane):
            lane_sum = lane_sum + cutlass.Uint32(rBuckets[i])
            rPrefix[i] = lane_sum
        before = warp_inclusive_sum(lane_sum) - lane_sum
        buckets_below_k = cutlass.Uint32(0)
        for i in cutlass.range_constexpr(buckets_per_lane):
            is_below_k = before + rPrefix[i] < cutlass.Uint32(row.top_k)
            buckets_below_k = buckets_below_k + 1 if is_below_k else buckets_below_k
        return cute.arch.warp_reduction(buckets_below_k, add)

    @cute.jit
    def is_candidate(self, row: Row, bucket_scale, last_bucket, z):
        """Whether z may be among the k largest and min-p keeps it. False where its probability is 0."""
        kept_by_min_p = (
            row.min_prob == 0 or fixed_point.prob_of(fixed_point.distance_of(z, row.row_max)) >= row.min_prob
        )
        in_range = fixed_point.below_max(z, row.row_max) < cutlass.Float32(constants.MAX_DISTANCE)
        return kept_by_min_p and in_range and self.bucket_of(row, bucket_scale, z) <= last_bucket

    @cute.jit
    def append_candidate(self, smem: SharedStorage, row: Row, bucket_scale, last_bucket, z, token_id):
        """Store z if it is a candidate. True where shared memory has no space for it."""
        full = cutlass.Boolean(False)
        if self.is_candidate(row, bucket_scale, last_bucket, z):
            index = cute.arch.atomic_add(smem.sCount.iterator, cutlass.Uint32(1), sem="relaxed", scope="cta")
            if index < self.max_candidates:
                smem.sCandZ[index] = z
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
    def sample(self, smem: SharedStorage, row: Row, count, token: cute.Pointer):
        """Draw a token from the candidates of all CTAs."""
        if self.cluster.rank() == 0:
            self.gather(smem)
        self.cluster.wait_for_peer_reads()
        if self.cluster.rank() == 0:
            self.filter_and_draw(smem, row, cutlass.Int32(count), token)

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
                    smem.sCandZ[begin + i] = load_peer_smem(smem.sCandZ.iterator + i, cutlass.Float32, peer)
                    smem.sCandId[begin + i] = load_peer_smem(smem.sCandId.iterator + i, cutlass.Uint32, peer)
        cta_barrier()

    @cute.jit
    def filter_and_draw(self, smem: SharedStorage, row: Row, count, token: cute.Pointer):
        """Apply the filters to the first CTA's candidates and draw. Each step compares all pairs of candidates."""
        for i in cutlass.range(cute.arch.thread_idx()[0], count, self.threads, unroll=1):
            distance = fixed_point.distance_of(smem.sCandZ[i], row.row_max)
            smem.sCandDistance[i] = distance
            smem.sCandProb[i] = fixed_point.prob_of(distance)
        cta_barrier()
        prob_sum = self.apply_top_k_min_p(smem, row, count)
        if row.top_p < 1.0:
            prob_sum = self.apply_top_p(smem, row, count, fixed_point.top_p_budget(row.top_p, prob_sum))
        self.draw(smem, count, fixed_point.sampling_target(row.random_bits, prob_sum), token)

    @cute.jit
    def apply_top_k_min_p(self, smem: SharedStorage, row: Row, count):
        """Mask the probabilities that top-k or min-p removes, and return the sum of the others."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES_PER_CANDIDATE
        kept = cutlass.Uint64(0)
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            z = smem.sCandZ[cutlass.min(i, count - 1)]
            larger = self.sum_over_candidates(lane, count, cutlass.Int32(0), partial(self.add_larger, smem, z))
            if lane == 0 and i < count:
                prob = smem.sCandProb[i]
                prob = prob if larger < row.top_k and prob >= row.min_prob else cutlass.Uint64(0)
                smem.sCandProb[i] = prob
                smem.sCandKept[i] = prob
                kept = kept + prob
        return cta_sum(kept, smem.sScratch[None, 0], self.warps)

    @cute.jit
    def apply_top_p(self, smem: SharedStorage, row: Row, count, budget):
        """Mask the probabilities that top-p removes, and return the sum of the others."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES_PER_CANDIDATE
        kept = cutlass.Uint64(0)
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            safe = cutlass.min(i, count - 1)
            distance, token_id = smem.sCandDistance[safe], smem.sCandId[safe]
            add_term = partial(self.add_removed_before, smem, distance, token_id)
            removed = self.sum_over_candidates(lane, count, cutlass.Uint64(0), add_term)
            if lane == 0 and i < count:
                prob = smem.sCandProb[i] if removed > budget else cutlass.Uint64(0)
                smem.sCandKept[i] = prob
                kept = kept + prob
        return cta_sum(kept, smem.sScratch[None, 1], self.warps)

    @cute.jit
    def draw(self, smem: SharedStorage, count, target, token: cute.Pointer):
        """Write the first token, by id, whose prefix sum of kept probabilities exceeds the target."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES_PER_CANDIDATE
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            token_id = smem.sCandId[cutlass.min(i, count - 1)]
            prefix = self.sum_over_candidates(
                lane, count, cutlass.Uint64(0), partial(self.add_up_to_id, smem, token_id)
            )
            if lane == 0 and i < count:
                if prefix > target and prefix - smem.sCandKept[i] <= target:
                    fixed_point.store_token(token, token_id)

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
    def add_larger(self, smem: SharedStorage, z, partial_sum, other):
        return partial_sum + 1 if smem.sCandZ[other] > z else partial_sum

    @cute.jit
    def add_removed_before(self, smem: SharedStorage, distance, token_id, partial_sum, other):
        """Top-p removes the farthest first; of equal distances, the lowest id first."""
        removed_before = smem.sCandDistance[other] > distance or (
            smem.sCandDistance[other] == distance and smem.sCandId[other] <= token_id
        )
        return partial_sum + smem.sCandProb[other] if removed_before else partial_sum

    @cute.jit
    def add_up_to_id(self, smem: SharedStorage, token_id, partial_sum, other):
        return partial_sum + smem.sCandKept[other] if smem.sCandId[other] <= token_id else partial_sum
