# SPDX-License-Identifier: Apache-2.0
"""Kernels that run a tile scheduler alone, and record its work tiles."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.balanced import BalancedSplitKVTileScheduler, SplitRule
from dsl_backend.attention.cute.scheduler.clc import ClcResponse, ClcTileScheduler
from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import FIELDS
from dsl_backend.primitives.moved import SmemAllocator


class RecordingPipeline:
    """A work-tile pipeline that keeps every work tile: recorded [CTAs, work tiles, fields]."""

    def __init__(self, recorded: cute.Tensor):
        self.recorded = recorded

    @cute.jit
    def produce(self, count, work):
        recorded, cta = self.recorded, cute.arch.block_idx()[0]
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                recorded[cta, count, field] = work[field]

    def wait_consumed(self, count):
        """There is no consumer to wait for."""


def requests_of(
    cu_seqlens_q, seqused_k, rows, window_size_left, min_seqlen_q, max_seqlen_q, row_group=1, row_group_iters=100
) -> Requests:
    """A batch of packed keys, of which no kernel here reads any: cu_seqlens_q serves as cu_seqlens_k."""
    window_size_right, rows = cutlass.Int32(0), cutlass.Int32(rows)
    return Requests(
        cu_seqlens_q,
        seqused_k,
        None,
        cu_seqlens_q,
        None,
        window_size_left,
        window_size_right,
        min_seqlen_q,
        max_seqlen_q,
        rows,
        cutlass.Int32(row_group),
        cutlass.Int32(row_group_iters),
    )


class DynamicSchedule:
    """The dynamic persistent tile scheduler, in CTAs of one warp."""

    def __init__(self, key, tokens_per_tile: int, tile_n: int):
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor,
        seqused_k: cute.Tensor,
        tile_count_semaphore: cute.Tensor,
        recorded: cute.Tensor,
        window_size_left: cutlass.Int32,
        min_seqlen_q: cutlass.Int32,
        max_seqlen_q: cutlass.Int32,
    ):
        requests = requests_of(
            cu_seqlens_q, seqused_k, self.tokens_per_tile, window_size_left, min_seqlen_q, max_seqlen_q
        )
        self.kernel(requests, tile_count_semaphore, recorded).launch(
            grid=(cute.size(recorded, mode=[0]), 1, 1), block=(32, 1, 1)
        )

    @cute.kernel
    def kernel(self, requests: Requests, tile_count_semaphore: cute.Tensor, recorded: cute.Tensor):
        DynamicPersistentTileScheduler(
            self.key, RecordingPipeline(recorded), self.tokens_per_tile, self.tile_n, requests, tile_count_semaphore
        ).run()


class ClcSchedule:
    """The tile scheduler by cluster launch clc, in CTAs of one warp."""

    def __init__(self, key, tokens_per_tile: int, tile_n: int):
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor,
        seqused_k: cute.Tensor,
        recorded: cute.Tensor,
        window_size_left: cutlass.Int32,
        min_seqlen_q: cutlass.Int32,
        max_seqlen_q: cutlass.Int32,
    ):
        requests = requests_of(
            cu_seqlens_q, seqused_k, self.tokens_per_tile, window_size_left, min_seqlen_q, max_seqlen_q
        )
        self.kernel(requests, recorded).launch(grid=(cute.size(recorded, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, recorded: cute.Tensor):
        clc = ClcResponse.allocate(SmemAllocator())
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_init(clc.full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        ClcTileScheduler(self.key, RecordingPipeline(recorded), self.tokens_per_tile, self.tile_n, requests, clc).run()


class BalancedSchedule:
    """The balanced split-KV tile scheduler, in CTAs of one warp, and the split ranges that it writes.

    Args:
        cluster: CTAs that have the same share of neighbouring head blocks.
        pair_row_tiles: prompts may be paired. exact_pairs: a row tile without a partner is no pair.
        row_group: clusters of a row group; 0 for a scheduler without them. row_group_iters: as in Requests.
    """

    def __init__(
        self,
        key,
        tokens_per_tile: int,
        tile_n: int,
        rule: SplitRule,
        cluster: int = 1,
        pair_row_tiles: bool = False,
        row_group: int = 0,
        row_group_iters: int = 100,
        kept_chunks: int = 1,
        exact_pairs: bool = False,
    ):
        self.rule, self.kept_chunks, self.exact_pairs = rule, kept_chunks, exact_pairs
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n
        self.row_group, self.row_group_iters = row_group, row_group_iters
        self.cluster, self.pair_row_tiles = cluster, pair_row_tiles

    @cute.jit
    def __call__(
        self, cu_seqlens_q: cute.Tensor, seqused_k: cute.Tensor, split_ranges: cute.Tensor, recorded: cute.Tensor
    ):
        rows, any_length = self.tokens_per_tile * self.key.pack_gqa, cutlass.Int32(1 << 30)
        requests = requests_of(
            cu_seqlens_q,
            seqused_k,
            rows,
            cutlass.Int32(0),
            cutlass.Int32(1),
            any_length,
            max(self.row_group, 1),
            self.row_group_iters,
        )
        self.kernel(requests, split_ranges, recorded).launch(
            grid=(cute.size(recorded, mode=[0]), 1, 1), block=(32, 1, 1)
        )

    @cute.kernel
    def kernel(self, requests: Requests, split_ranges: cute.Tensor, recorded: cute.Tensor):
        key, pipeline, tokens = self.key, RecordingPipeline(recorded), self.tokens_per_tile
        scheduler = BalancedSplitKVTileScheduler(
            key,
            pipeline,
            tokens,
            self.tile_n,
            requests,
            split_ranges,
            self.rule,
            self.cluster,
            pair_row_tiles=self.pair_row_tiles,
            row_groups=self.row_group > 0,
            kept_chunks=self.kept_chunks,
            exact_pairs=self.exact_pairs,
        )
        scheduler.run()
