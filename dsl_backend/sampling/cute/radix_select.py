# SPDX-License-Identifier: Apache-2.0
"""The k-th largest logit of a row by radix select: one histogram of a digit at a time."""

from functools import partial

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.sampling.configs import HISTOGRAM_BINS, ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.row import Row, RowReader, all_count
from dsl_backend.sampling.cute.scan import cta_inclusive_sum
from dsl_backend.sampling.cute.smem import SharedStorage

DIGIT_BITS = 8


class RadixSelect:
    """Finds the pivot of top-k from the highest digit on."""

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader):
        self.threads, self.warps = config.threads, config.warps
        self.bins_per_thread = max(1, HISTOGRAM_BINS // config.threads)
        self.cluster, self.reader = cluster, reader

    @cute.jit
    def clear(self, smem: SharedStorage):
        """Zero the CTA's histogram."""
        for i in cutlass.range(cute.arch.thread_idx()[0], HISTOGRAM_BINS, self.threads, unroll=1):
            smem.sBins[i] = cutlass.Uint32(0)

    @cute.jit
    def top_k_pivot(self, smem: SharedStorage, row: Row, k):
        """(the k-th largest logit of the row as `to_ordered_uint`, how many logits equal to it rank before it).

        Four digits of 8 bits.
        """
        pivot = cutlass.Uint32(0)
        # The digit is the one at which the count of that digit and above reaches k: it exceeds k - 1.
        remaining = cutlass.Uint32(k - 1)
        for i in cutlass.range(32 // DIGIT_BITS, unroll=1):
            shift = cutlass.Uint32(32 - DIGIT_BITS - DIGIT_BITS * i)
            self.clear(smem)
            cta_barrier()
            self.reader.for_each_logit(row, partial(self.count_digit, smem, pivot, shift))
            digit, remaining = self.find_bin(smem, remaining)
            pivot = pivot | (digit << shift)
        return pivot, remaining

    @cute.jit
    def count_digit(self, smem: SharedStorage, pivot, shift, x):
        """Count x where its higher digits are the pivot's."""
        self.count_key(smem, fixed_point.to_ordered_uint(fixed_point.canonical(x)), pivot, shift)

    @cute.jit
    def count_key(self, smem: SharedStorage, key, pivot, shift):
        """Count a key where its higher digits are the pivot's."""
        if (key ^ pivot) >> shift < HISTOGRAM_BINS:
            digit = (key >> shift) & (HISTOGRAM_BINS - 1)
            cute.arch.atomic_add(smem.sBins.iterator + digit, cutlass.Uint32(1), sem="relaxed", scope="cta")

    @cute.jit
    def tie_pivot(self, smem: SharedStorage, row: Row, pivot, remaining):
        """The id up to which as many logits equal a pivot as `top_k_pivot` says, and one more."""
        key_pivot = cutlass.Uint32(0)
        for i in cutlass.range(32 // DIGIT_BITS, unroll=1):
            shift = cutlass.Uint32(32 - DIGIT_BITS - DIGIT_BITS * i)
            self.clear(smem)
            cta_barrier()
            self.reader.for_each_logit_of(
                smem, row, row.row_max, all_count, partial(self.count_tie, smem, pivot, key_pivot, shift)
            )
            digit, remaining = self.find_bin(smem, remaining)
            key_pivot = key_pivot | (digit << shift)
        return ~key_pivot

    @cute.jit
    def count_tie(self, smem: SharedStorage, pivot, key_pivot, shift, x, token_id):
        """Count a token's id, of which the lowest is the largest key, where its logit is the pivot."""
        if fixed_point.to_ordered_uint(fixed_point.canonical(x)) == pivot:
            self.count_key(smem, ~cutlass.Uint32(token_id), key_pivot, shift)
        return cutlass.Boolean(False)

    @cute.jit
    def find_bin(self, smem: SharedStorage, budget):
        """(bin, remaining budget) where the cluster's count from the last bin down exceeds a budget below the total."""
        self.cluster.barrier()
        thread = cute.arch.thread_idx()[0]
        rBins = cute.make_rmem_tensor(self.bins_per_thread, cutlass.Uint32)
        thread_sum = cutlass.Uint32(0)
        for i in cutlass.range_constexpr(self.bins_per_thread):
            index = thread * self.bins_per_thread + i
            rBins[i] = cutlass.Uint32(0)
            if index < HISTOGRAM_BINS:
                for peer in cutlass.range_constexpr(self.cluster.ctas):
                    rBins[i] = rBins[i] + self.cluster.load(smem.sBins, index, peer, cutlass.Uint32)
            thread_sum = thread_sum + rBins[i]
        self.cluster.wait_for_peer_reads()
        prefix, total = cta_inclusive_sum(cutlass.Uint64(thread_sum), smem.sScratch[None, 2], self.warps)
        above = cutlass.Uint32(total - prefix)
        for i in cutlass.range_constexpr(self.bins_per_thread - 1, -1, -1):
            count = cutlass.Uint32(rBins[i])
            if above <= budget and above + count > budget:
                smem.sIndex[0] = cutlass.Uint32(thread * self.bins_per_thread + i)
                smem.sIndex[1] = budget - above
            above = above + count
        cta_barrier()
        return cutlass.Uint32(smem.sIndex[0]), cutlass.Uint32(smem.sIndex[1])
