# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens of a row and the rank of its token, from the pass that its token is drawn from.

The n likeliest are found as top-k finds its candidates: the maxima of groups of threads bound the n-th largest logit
from below, and only logits of threads and blocks that have one above the bound are read again. One list in shared
memory has these and the candidates of the filters; it holds every logit from some bound on. So the rank of a token in
it is counted there, and for another token the row is read once more, without blocks whose maximum is below it.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.math import log
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.cute.candidates import BUCKETS, LANES_PER_CANDIDATE, MIN_RANGE, CandidateSampler
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.full_row import FullRowSampler
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import Row, RowReader, all_count
from dsl_backend.sampling.cute.scan import add, cta_sum
from dsl_backend.sampling.cute.smem import SharedStorage
from dsl_backend.sampling.spec import LogprobsMode


class Bounds(NamedTuple):
    """Which logits are collected.

    Attributes:
        bucket_scale: of the buckets below the row's maximum.
        likeliest: the last bucket that may have one of the likeliest tokens.
        candidates: the last one that may have a candidate of the filters.
        has_candidates: the row's token is drawn from candidates.
    """

    bucket_scale: Any
    likeliest: Any
    candidates: Any
    has_candidates: Any


class Likeliest:
    """Collects them before a token is drawn, and writes them after it."""

    def __init__(
        self,
        config: ClusterConfig,
        cluster: Cluster,
        reader: RowReader,
        candidates: CandidateSampler,
        full_row: FullRowSampler,
        radix: RadixSelect,
        mode: LogprobsMode | None,
    ):
        self.threads, self.warps = config.threads, config.warps
        self.cluster, self.reader = cluster, reader
        self.candidates, self.full_row, self.radix = candidates, full_row, radix
        self.normalizes = mode is LogprobsMode.RAW_LOGPROBS

    @cute.jit
    def share_exp_sum(self, smem: SharedStorage, exp_sum, thread_max, row_max):
        """Write the CTA's sum of exp(logit - row_max) to every CTA. It is there after the next barrier.

        Args:
            exp_sum: of this thread, below thread_max.
        """
        if cutlass.const_expr(self.normalizes):
            exp_sum = self.reader.rescaled(exp_sum, thread_max, row_max)
            exp_sum = cta_sum(exp_sum, smem.sFloatScratch, self.warps)
            self.cluster.share(exp_sum, smem.sExpSums, self.cluster.rank())

    @cute.jit
    def collect(self, smem: SharedStorage, row: Row, thread_max, lowest_group_max, count, has_candidates):
        """Collect the `count` likeliest tokens and the filters' candidates, and return how many the cluster has.

        More than max_candidates where they do not fit.

        Args:
            has_candidates: the row's filters bound what its token is drawn from.
        """
        bucket_range = cute.arch.fmax(row.row_max - lowest_group_max, cutlass.Float32(MIN_RANGE))
        bucket_scale = cutlass.Float32(BUCKETS - 1) / bucket_range
        self.candidates.count_group_maxima(smem, row, bucket_scale)
        bounded_by_top_k = self.candidates.is_bounded_by_top_k(row)
        of_top_k = self.candidates.bucket_of_rank(smem, row.top_k)
        bounds = Bounds(
            bucket_scale=bucket_scale,
            likeliest=self.candidates.bucket_of_rank(smem, count),
            candidates=of_top_k if bounded_by_top_k else cutlass.Uint32(BUCKETS - 1),
            has_candidates=has_candidates,
        )
        self.reader.for_each_logit_of(
            smem,
            row,
            thread_max,
            partial(self.is_needed, row, bounds),
            partial(self.append_needed, smem, row, bounds),
        )
        self.cluster.barrier()
        return self.candidates.count_candidates(smem)

    @cute.jit
    def is_likely(self, row: Row, bounds: Bounds, x):
        """Whether x may be one of the likeliest."""
        return x > -cutlass.Float32.inf and self.candidates.bucket_of(row, bounds.bucket_scale, x) <= bounds.likeliest

    @cute.jit
    def is_needed(self, row: Row, bounds: Bounds, x):
        """Whether x may be one of the likeliest or a candidate."""
        needed = self.is_likely(row, bounds, x)
        if bounds.has_candidates:
            needed = needed or self.candidates.is_candidate(row, bounds.bucket_scale, bounds.candidates, x)
        return needed

    @cute.jit
    def append_needed(self, smem: SharedStorage, row: Row, bounds: Bounds, x, token_id):
        return self.candidates.append(smem, self.is_needed(row, bounds, x), x, token_id)

    @cute.jit
    def select_exactly(self, smem: SharedStorage, row: Row, count):
        """Collect the `count` likeliest anew, where too many were collected."""
        pivot, ties = self.radix.top_k_pivot(smem, row, count)
        last_id = self.radix.tie_pivot(smem, row, pivot, ties)
        if cute.arch.thread_idx()[0] == 0:
            smem.sCount[0] = cutlass.Uint32(0)
        cta_barrier()
        append = partial(self.append_exactly, smem, pivot, last_id)
        self.reader.for_each_logit_of(smem, row, row.row_max, all_count, append)
        self.cluster.barrier()

    @cute.jit
    def append_exactly(self, smem: SharedStorage, pivot, last_id, x, token_id):
        x = fixed_point.canonical(x)
        key = fixed_point.to_ordered_uint(x)
        needed = key > pivot or (key == pivot and cutlass.Uint32(token_id) <= last_id)
        return self.candidates.append(smem, needed, x, token_id)

    @cute.jit
    def share_rank(self, smem: SharedStorage, row: Row, x):
        """Write how many of the CTA's logits are at least x to every CTA. It is there after the next barrier."""
        count = self.full_row.count_from(smem, row, x)
        self.cluster.share(cutlass.Uint32(count), smem.sRanks, self.cluster.rank())

    @cute.jit
    def rank(self, smem: SharedStorage, row: Row, x, count, is_counted):
        """How many logits of the row are at least x. By the first CTA.

        Args:
            count: collected logits, which the CTA has gathered.
            is_counted: by `share_rank`; else x is one of those that are collected.
        """
        rank = cutlass.Uint32(row.vocab)
        if x > -cutlass.Float32.inf:
            if is_counted:
                lane = cute.arch.lane_idx()
                of_lane = cutlass.Uint32(smem.sRanks[lane]) if lane < self.cluster.ctas else cutlass.Uint32(0)
                rank = cute.arch.warp_reduction(of_lane, add)
            else:
                found = cutlass.Uint64(0)
                for i in cutlass.range(cute.arch.thread_idx()[0], count, self.threads, unroll=1):
                    found = found + 1 if smem.sCandX[i] >= x else found
                rank = cutlass.Uint32(cta_sum(found, smem.sScratch[None, 3], self.warps))
        return rank

    @cute.jit
    def write(self, smem: SharedStorage, row: Row, args: SampleArgs, index, token_id, rank, count):
        """Write the likeliest of the collected logits, the token and its rank. By the first CTA.

        Args:
            index: of the row.
            count: collected logits. Where they are fewer than are asked for, all others of the row are -inf.
        """
        mTopIds, mTopLogprobs = args.top_ids, args.top_logprobs
        log_sum = self.log_sum(smem)
        thread, wanted = cute.arch.thread_idx()[0], cutlass.Int32(mTopIds.shape[1]) - 1
        if thread == 0:
            x = fixed_point.canonical(self.reader.load_logit(row.logits, token_id))
            self.store(mTopIds, mTopLogprobs, index, 0, token_id, self.value(row, x, log_sum))
            args.token_ranks[index] = cutlass.Int32(rank)
        lane = thread % LANES_PER_CANDIDATE
        for first in cutlass.range(0, count, self.threads // LANES_PER_CANDIDATE, unroll=1):
            i = first + thread // LANES_PER_CANDIDATE
            own = cutlass.min(i, count - 1)
            x, own_id = smem.sCandX[own], smem.sCandId[own]
            position = self.candidates.sum_over_candidates(
                lane, count, cutlass.Int32(0), partial(self.add_likelier, smem, x, own_id)
            )
            if lane == 0 and i < count and position < wanted:
                self.store(mTopIds, mTopLogprobs, index, 1 + position, own_id, self.value(row, x, log_sum))
        to_fill = wanted if count < wanted else cutlass.Int32(0)
        for token in cutlass.range(thread, to_fill, self.threads, unroll=1):
            self.write_masked(row, mTopIds, mTopLogprobs, index, token, count)

    @cute.jit
    def write_masked(self, row: Row, mTopIds: cute.Tensor, mTopLogprobs: cute.Tensor, index, token, count):
        """Write a token behind the `count` finite logits, where it is -inf and there is space."""
        if not fixed_point.canonical(self.reader.load_logit(row.logits, token)) > -cutlass.Float32.inf:
            position = count
            for other in cutlass.range(token, unroll=1):
                x = fixed_point.canonical(self.reader.load_logit(row.logits, other))
                position = position if x > -cutlass.Float32.inf else position + 1
            if 1 + position < mTopIds.shape[1]:
                self.store(mTopIds, mTopLogprobs, index, 1 + position, token, -cutlass.Float32.inf)

    @cute.jit
    def add_likelier(self, smem: SharedStorage, x, token_id, partial_sum, other):
        other_x = smem.sCandX[other]
        likelier = other_x > x or (other_x == x and smem.sCandId[other] < token_id)
        return partial_sum + 1 if likelier else partial_sum

    @cute.jit
    def log_sum(self, smem: SharedStorage):
        """The logarithm of the row's sum of exponentials below its maximum; 0 where logits are returned."""
        log_sum = cutlass.Float32(0.0)
        if cutlass.const_expr(self.normalizes):
            lane = cute.arch.lane_idx()
            of_lane = cutlass.Float32(smem.sExpSums[lane]) if lane < self.cluster.ctas else cutlass.Float32(0.0)
            log_sum = log(cute.arch.warp_reduction(of_lane, add))
        return log_sum

    @cute.jit
    def value(self, row: Row, x, log_sum):
        """The log-probability of a logit, or the logit."""
        value = x
        if cutlass.const_expr(self.normalizes):
            below = cutlass.Float32(0.0) if x == row.row_max else x - row.row_max
            # Of a row of -inf too.
            value = below - log_sum if x > -cutlass.Float32.inf else x
        return value

    @cute.jit
    def store(self, mTopIds: cute.Tensor, mTopLogprobs: cute.Tensor, index, column, token_id, value):
        mTopIds[index, column] = cutlass.Int32(token_id)
        mTopLogprobs[index, column] = value
