# SPDX-License-Identifier: Apache-2.0
"""The merge of a split output tile inside the attention kernel, by the last of its CTAs: no combine kernel follows."""

from typing import cast

import cutlass
from cutlass import cute

from dsl_backend.attention.cute import partial_word
from dsl_backend.attention.cute.args import Arrivals, Outputs
from dsl_backend.attention.cute.combine import MAX_SPLITS_PER_WARP, WARP, CombineThread, SplitKVCombine
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.tiles import TiledKernel


class LastArriver:
    """A thread that stores partial results. It counts its CTA as arrived, and merges if no other CTA is missing.

    The splits are summed in the combine kernel's order, whichever CTA is last, and with the same bits up to 64 splits
    (`CombineThread.combine_many_by_warp`). The last CTA clears the counter for the next launch.

    Args:
        thread: of `threads`, whole warps, which meet at a named barrier of theirs.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
        thread: cutlass.Int32,
        threads: int,
        barrier: int,
    ) -> None:
        self.counters, self.sIsLast = cast("Arrivals", outputs.arrivals)
        combine = SplitKVCombine(kernel.key, kernel.dims_v)
        self.column_blocks, self.threads, self.thread, self.barrier = (
            combine.column_blocks,
            threads,
            thread,
            barrier,
        )
        self.combine = CombineThread(combine, outputs, requests, scoring, None, None)

    @cute.jit
    def arrive(self, work: WorkTile):
        """By all threads, once they have stored the partial result of a work tile."""
        _, source, num_splits = partial_word.unpack(work.partial_idx)
        counters, sIsLast = self.counters, self.sIsLast
        self.sync()
        if self.thread == 0:
            # The barrier and the fence order what all threads stored before the count, and what others stored after it.
            cute.arch.fence_acq_rel_gpu()
            arrived = cute.arch.atomic_add(counters.iterator + source, cutlass.Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            is_last = cutlass.Int32(1) if arrived == num_splits - 1 else cutlass.Int32(0)
            sIsLast[0] = is_last
            if is_last != 0:
                counters[source] = cutlass.Int32(0)
        self.sync()
        if sIsLast[0] != 0:
            self.merge(work, source, num_splits)

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)

    @cute.jit
    def merge(self, work: WorkTile, source: cutlass.Int32, num_splits: cutlass.Int32):
        """All rows of the output tile, each by a warp."""
        first = cute.arch.make_warp_uniform(self.thread // WARP)
        for task in cutlass.range(first, work.num_rows * self.column_blocks, self.threads // WARP, unroll=1):
            if num_splits <= MAX_SPLITS_PER_WARP:
                self.combine.combine_by_warp(source, num_splits, work.q_offset, work.head_block, task)
            else:
                self.combine.combine_many_by_warp(source, num_splits, work.q_offset, work.head_block, task)
