# SPDX-License-Identifier: Apache-2.0
"""Kernels that have no other role than the schedule's."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.balanced import BalancedSplitKVTileScheduler
from dsl_backend.attention.cute.scheduler.clc import ClcResponse, ClcTileScheduler
from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import FIELDS


class Record:
    """A mailbox of which every item is kept: posts [blocks, items, fields]."""

    def __init__(self, posts: cute.Tensor):
        self.posts = posts

    @cute.jit
    def produce(self, count, work):
        posts, block = self.posts, cute.arch.block_idx()[0]
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                posts[block, count, field] = work[field]

    def wait_consumed(self, count):
        """Whoever reads does so at once."""


def requests_of(starts, lengths, rows, left, min_seqlen_q, max_seqlen_q) -> Requests:
    """A batch of packed keys, without more than its lengths."""
    right, rows = cutlass.Int32(0), cutlass.Int32(rows)
    return Requests(starts, lengths, None, starts, None, left, right, min_seqlen_q, max_seqlen_q, rows)


class Claiming:
    """Query tiles of a batch, as blocks of one warp claim them."""

    def __init__(self, key, tokens_per_tile: int, tile_n: int):
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n

    @cute.jit
    def __call__(
        self,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        claims: cute.Tensor,
        posts: cute.Tensor,
        left: cutlass.Int32,
        min_seqlen_q: cutlass.Int32,
        max_seqlen_q: cutlass.Int32,
    ):
        requests = requests_of(starts, lengths, self.tokens_per_tile, left, min_seqlen_q, max_seqlen_q)
        self.kernel(requests, claims, posts).launch(grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, claims: cute.Tensor, posts: cute.Tensor):
        DynamicPersistentTileScheduler(
            self.key, Record(posts), self.tokens_per_tile, self.tile_n, requests, claims
        ).run()


class Launching:
    """The same, as blocks of one warp take them off a grid."""

    def __init__(self, key, tokens_per_tile: int, tile_n: int):
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n

    @cute.jit
    def __call__(
        self,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        posts: cute.Tensor,
        left: cutlass.Int32,
        min_seqlen_q: cutlass.Int32,
        max_seqlen_q: cutlass.Int32,
    ):
        requests = requests_of(starts, lengths, self.tokens_per_tile, left, min_seqlen_q, max_seqlen_q)
        self.kernel(requests, posts).launch(grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, posts: cute.Tensor):
        control = ClcResponse.allocate(cutlass.utils.SmemAllocator())
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_init(control.full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        ClcTileScheduler(self.key, Record(posts), self.tokens_per_tile, self.tile_n, requests, control).run()


class Sharing:
    """Equal shares of a batch's key tiles, as blocks of one warp find them, and what they leave to be merged.

    Args:
        cluster: neighbouring blocks that have the same share of neighbouring units.
        folds: whether prompts may be folded.
    """

    def __init__(self, key, tokens_per_tile: int, tile_n: int, least: int, cluster: int = 1, folds: bool = False):
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n
        self.least, self.cluster, self.folds = least, cluster, folds

    @cute.jit
    def __call__(self, starts: cute.Tensor, lengths: cute.Tensor, split_ranges: cute.Tensor, posts: cute.Tensor):
        rows, any_length = self.tokens_per_tile * self.key.pack_gqa, cutlass.Int32(1 << 30)
        requests = requests_of(starts, lengths, rows, cutlass.Int32(0), cutlass.Int32(1), any_length)
        self.kernel(requests, split_ranges, posts).launch(grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, split_ranges: cute.Tensor, posts: cute.Tensor):
        key, posted, tokens = self.key, Record(posts), self.tokens_per_tile
        scheduler = BalancedSplitKVTileScheduler(
            key,
            posted,
            tokens,
            self.tile_n,
            requests,
            split_ranges,
            self.least,
            self.cluster,
            pair_row_tiles=self.folds,
        )
        scheduler.run()
