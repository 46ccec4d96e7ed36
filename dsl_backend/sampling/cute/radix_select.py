# SPDX-License-Identifier: Apache-2.0
"""The pivots of top-k and top-p by radix select over a whole row: one histogram of a digit at a time."""

from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.sampling.configs import HISTOGRAM_BINS, ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.row import Row, RowReader
from dsl_backend.sampling.cute.scan import cta_inclusive_sum
from dsl_backend.sampling.cute.smem import SharedStorage


class Histogram(NamedTuple):
    """The cluster's histogram, in the registers of each CTA's threads.

    Attributes:
        rBins: uint64, adjacent bins of this thread.
        above: the sum of all bins above them.
        total: the sum of all bins.
    """

    rBins: cute.Tensor
    above: Any
    total: Any


class RadixSelect:
    """Finds pivots from the highest digit on: top-k's by counts, top-p's by sums of probabilities."""

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader):
        self.threads, self.warps = config.threads, config.warps
        self.cluster, self.reader = cluster, reader

    @cute.jit
    def clear(self, smem: SharedStorage):
        """Zero the CTA's histogram."""
        for i in cutlass.range(cute.arch.thread_idx()[0], HISTOGRAM_BINS, self.threads):
            smem.sBinLow[i] = cutlass.Uint32(0)
            smem.sBinHigh[i] = cutlass.Uint32(0)

    @cute.jit
    def top_k_pivot(self, smem: SharedStorage, row: Row):
        """The k-th largest z of the row, as `to_ordered_uint`; four digits of 8 bits."""
        pivot = cutlass.Uint32(0)
        # The digit is the one at which the count of that digit and above reaches k: it exceeds k - 1.
        remaining = cutlass.Uint64(row.top_k - 1)
        for i in cutlass.range(4, unroll=1):
            shift = cutlass.Uint32(24 - 8 * i)
            self.clear(smem)
            cta_barrier()
            self.reader.for_each_logit(row, partial(self.count_top_k_digit, smem, pivot, shift))
            digit, remaining = self.find_bin(smem, self.reduce(smem), remaining)
            pivot = pivot | (digit << shift)
        return pivot

    @cute.jit
    def count_top_k_digit(self, smem: SharedStorage, pivot, shift, z):
        """Count z where its higher digits are the pivot's."""
        key = fixed_point.to_ordered_uint(fixed_point.canonical(z))
        if (key ^ pivot) >> shift <= 255:
            digit = (key >> shift) & 255
            cute.arch.atomic_add(smem.sBinLow.iterator + digit, cutlass.Uint32(1), sem="relaxed", scope="cta")

    @cute.jit
    def top_p_pivot(self, smem: SharedStorage, row: Row, top_k_value, max_distance):
        """(the distance at which top-p's budget ends, how many tokens of that distance it removes).

        Three digits of 10 bits. z below top_k_value and distances above max_distance are masked already.
        """
        pivot = cutlass.Uint32(0)
        remaining = cutlass.Uint64(0)
        for i in cutlass.range(3, unroll=1):
            shift = cutlass.Uint32(20 - 10 * i)
            self.clear(smem)
            cta_barrier()
            add_digit = partial(self.add_top_p_digit, smem, row, top_k_value, max_distance, pivot, shift)
            self.reader.for_each_logit(row, add_digit)
            histogram = self.reduce(smem)
            # The first histogram sums all that top-k and min-p keep, of which the budget is a share.
            remaining = fixed_point.top_p_budget(row.top_p, histogram.total) if i == 0 else remaining
            digit, remaining = self.find_bin(smem, histogram, remaining)
            pivot = pivot | (digit << shift)
        return pivot, remaining // fixed_point.prob_of(pivot)

    @cute.jit
    def add_top_p_digit(self, smem: SharedStorage, row: Row, top_k_value, max_distance, pivot, shift, z):
        """Add the probability of z where the higher digits of its distance are the pivot's."""
        distance = fixed_point.distance_of_any(z, row.row_max)
        if (distance ^ pivot) >> shift < HISTOGRAM_BINS and distance <= max_distance and z >= top_k_value:
            prob = fixed_point.prob_of(distance)
            if prob > 0:
                digit = (distance >> shift) & (HISTOGRAM_BINS - 1)
                low = cutlass.Uint32(prob & fixed_point.LOW_32)
                before = cute.arch.atomic_add(smem.sBinLow.iterator + digit, low, sem="relaxed", scope="cta")
                # The addition that overflows the low word also adds its carry to the high word.
                high = cutlass.Uint32(prob >> 32) + (cutlass.Uint32(1) if before + low < low else cutlass.Uint32(0))
                if high > 0:
                    cute.arch.atomic_add(smem.sBinHigh.iterator + digit, high, sem="relaxed", scope="cta")

    @cute.jit
    def reduce(self, smem: SharedStorage) -> Histogram:
        """Add the histograms of the cluster's CTAs; every CTA gets the sum, each thread some adjacent bins."""
        self.cluster.barrier()
        bins_per_thread = cutlass.const_expr(HISTOGRAM_BINS // self.threads)
        rBins = cute.make_rmem_tensor(bins_per_thread, cutlass.Uint64)
        thread_sum = cutlass.Uint64(0)
        for i in cutlass.range_constexpr(bins_per_thread):
            index = cute.arch.thread_idx()[0] * bins_per_thread + i
            rBins[i] = cutlass.Uint64(0)
            for peer in cutlass.range_constexpr(self.cluster.ctas):
                low = self.cluster.load(smem.sBinLow, index, peer, cutlass.Uint32)
                high = self.cluster.load(smem.sBinHigh, index, peer, cutlass.Uint32)
                rBins[i] = rBins[i] + (cutlass.Uint64(low) | cutlass.Uint64(high) << 32)
            thread_sum = thread_sum + rBins[i]
        self.cluster.wait_for_peer_reads()
        prefix, total = cta_inclusive_sum(thread_sum, smem.sScratch[None, 2], self.warps)
        return Histogram(rBins, total - prefix, total)

    @cute.jit
    def find_bin(self, smem: SharedStorage, histogram: Histogram, budget):
        """(bin, remaining budget) where the sum from the last bin down exceeds a budget that is below the total."""
        bins_per_thread = cutlass.const_expr(HISTOGRAM_BINS // self.threads)
        above = histogram.above
        for i in cutlass.range_constexpr(bins_per_thread - 1, -1, -1):
            if above <= budget and above + histogram.rBins[i] > budget:
                smem.sIndex[0] = cutlass.Uint32(cute.arch.thread_idx()[0] * bins_per_thread + i)
                smem.sResult[0] = budget - above
            above = above + histogram.rBins[i]
        cta_barrier()
        return smem.sIndex[0], smem.sResult[0]
