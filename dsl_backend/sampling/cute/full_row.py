# SPDX-License-Identifier: Apache-2.0
"""Sampling by further passes over a row, where the candidates are too many or no filter bounds them."""

from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.copy import load_vector
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import Row, RowReader
from dsl_backend.sampling.cute.scan import WARP, add, cta_inclusive_sum
from dsl_backend.sampling.cute.smem import SharedStorage

# The pivot of top-p where it is off: no distance is as large.
NO_PIVOT = (1 << 31) - 1


class Pivots(NamedTuple):
    """What the filters keep: z from top_k_value on at distances below the end, and some tokens at top-p's pivot.

    Attributes:
        top_k_value: float32, the k-th largest z; -inf where top-k is off.
        distance_end: uint32, the first distance that top-p or min-p removes.
        top_p_distance: uint32, top-p's pivot; NO_PIVOT where top-p is off.
    """

    top_k_value: Any
    distance_end: Any
    top_p_distance: Any


class FullRowSampler:
    """Finds the pivots, sums the kept probabilities of each warp's segment, and searches the segment of the draw."""

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader, radix: RadixSelect):
        self.threads, self.warps, self.vector = config.threads, config.warps, config.vector
        self.cluster, self.reader, self.radix = cluster, reader, radix

    @cute.jit
    def sample(self, smem: SharedStorage, row: Row, token: cute.Pointer):
        """Draw a token from the row."""
        top_k_value = -cutlass.Float32.inf
        if row.top_k < row.vocab:
            top_k_value = fixed_point.from_ordered_uint(self.radix.top_k_pivot(smem, row))
        max_distance = fixed_point.max_distance_of(row.min_prob)
        top_p_distance = cutlass.Uint32(NO_PIVOT)
        removed_ties = cutlass.Uint64(0)
        if row.top_p < 1.0:
            top_p_distance, removed_ties = self.radix.top_p_pivot(smem, row, top_k_value, max_distance)
        pivots = Pivots(top_k_value, cutlass.min(top_p_distance, max_distance + 1), top_p_distance)
        tie_prob = self.tie_prob(pivots)
        self.sum_segments(smem, row, pivots)

        # One thread for each segment of the row.
        thread = cute.arch.thread_idx()[0]
        segment_prob, segment_ties = cutlass.Uint64(0), cutlass.Uint64(0)
        if thread < self.cluster.ctas * self.warps:
            warp, rank = thread % self.warps, thread // self.warps
            segment_prob = self.cluster.load(smem.sWarpProb, warp, rank, cutlass.Uint64)
            ties = self.cluster.load(smem.sWarpTies, warp, rank, cutlass.Uint32)
            segment_ties = cutlass.Uint64(ties)
        self.cluster.wait_for_peer_reads()
        ties_prefix, _ = cta_inclusive_sum(segment_ties, smem.sScratch[None, 0], self.warps)
        ties_before = ties_prefix - segment_ties
        # Of the ties with top-p's pivot, those with the lowest ids are removed.
        removed_from_here = removed_ties - cutlass.min(ties_before, removed_ties)
        kept_ties = segment_ties - cutlass.min(removed_from_here, segment_ties)
        segment_prob = segment_prob + kept_ties * tie_prob
        prefix, prob_sum = cta_inclusive_sum(segment_prob, smem.sScratch[None, 1], self.warps)
        target = fixed_point.sampling_target(row.random_bits, prob_sum)
        if prefix > target and prefix - segment_prob <= target:
            smem.sIndex[0] = cutlass.Uint32(thread)
            smem.sResult[0] = prefix - segment_prob
            smem.sResult[1] = ties_before
        cta_barrier()
        chosen = cutlass.Int32(smem.sIndex[0])
        if chosen // self.warps == self.cluster.rank():
            warp = chosen % self.warps
            target = target - smem.sResult[0]
            self.search_segment(smem, row, warp, target, smem.sResult[1], pivots, removed_ties, token)

    @cute.jit
    def tie_prob(self, pivots: Pivots):
        """The probability of a token at top-p's pivot."""
        distance_mask = cutlass.Uint32((1 << fixed_point.DISTANCE_RANGE_BITS) - 1)
        return fixed_point.prob_of(pivots.top_p_distance & distance_mask)

    @cute.jit
    def sum_segments(self, smem: SharedStorage, row: Row, pivots: Pivots):
        """Sum the kept probabilities of each warp's segment, and count its ties with top-p's pivot."""
        rProb = cute.make_rmem_tensor(1, cutlass.Uint64)
        rTies = cute.make_rmem_tensor(1, cutlass.Uint32)
        rProb[0], rTies[0] = cutlass.Uint64(0), cutlass.Uint32(0)
        self.reader.for_each_logit(row, partial(self.add_logit, row, pivots, rProb, rTies))
        warp_prob = cute.arch.warp_reduction(rProb[0], add)
        warp_ties = cute.arch.warp_reduction(rTies[0], add)
        if cute.arch.lane_idx() == 0:
            smem.sWarpProb[cute.arch.warp_idx()] = warp_prob
            smem.sWarpTies[cute.arch.warp_idx()] = warp_ties
        self.cluster.barrier()

    @cute.jit
    def add_logit(self, row: Row, pivots: Pivots, rProb: cute.Tensor, rTies: cute.Tensor, z):
        prob, is_tie = self.filtered_prob(row, pivots, z)
        rProb[0] = rProb[0] + prob
        rTies[0] = rTies[0] + 1 if is_tie else rTies[0]

    @cute.jit
    def filtered_prob(self, row: Row, pivots: Pivots, z):
        """(probability of z, whether it lies at top-p's pivot). A tie and a masked z have probability 0."""
        kept_by_top_k = z >= pivots.top_k_value
        distance = fixed_point.distance_of_any(z, row.row_max)
        prob = fixed_point.prob_of(distance, kept_by_top_k and distance < pivots.distance_end)
        return prob, kept_by_top_k and distance == pivots.top_p_distance

    @cute.jit
    def search_segment(
        self,
        smem: SharedStorage,
        row: Row,
        warp,
        target,
        ties_before,
        pivots: Pivots,
        removed_ties,
        token: cute.Pointer,
    ):
        """Write the token at which a segment's prefix sum of kept probabilities exceeds the target. By one CTA.

        Args:
            warp: the segment's warp in this CTA.
            ties_before: tokens at top-p's pivot before the segment.
            removed_ties: how many of all of them top-p removes, the first ones.
        """
        tie_prob = self.tie_prob(pivots)
        thread = cute.arch.thread_idx()[0]
        length = row.segment.steps * (WARP * self.vector)
        begin = (self.cluster.rank() * self.warps + warp) * length
        end = cutlass.min(begin + length, row.vocab)
        passed = cutlass.Uint64(0)
        while begin < end and passed <= target:
            token_id = begin + thread
            prob, is_tie = cutlass.Uint64(0), cutlass.Boolean(False)
            if token_id < end:
                rLogit = cute.make_rmem_tensor(1, self.reader.dtype)
                load_vector(row.segment.base, row.segment.offset + token_id, rLogit)
                z = fixed_point.scaled_logit(cutlass.Float32(rLogit[0]), row.temperature)
                prob, is_tie = self.filtered_prob(row, pivots, z)
            tie = cutlass.Uint64(1) if is_tie else cutlass.Uint64(0)
            ties_prefix, ties = cta_inclusive_sum(tie, smem.sScratch[None, 2], self.warps)
            prob = tie_prob if is_tie and ties_before + ties_prefix > removed_ties else prob
            prefix, prob_sum = cta_inclusive_sum(prob, smem.sScratch[None, 3], self.warps)
            prefix = prefix + passed
            if prefix > target and prefix - prob <= target:
                fixed_point.store_token(token, token_id)
            passed = passed + prob_sum
            ties_before = ties_before + ties
            begin = begin + self.threads
