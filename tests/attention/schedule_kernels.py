# SPDX-License-Identifier: Apache-2.0
"""A kernel that has no other role than the schedule's."""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.schedule import ClaimedTiles, Requests
from dsl_backend.attention.parts.work import FIELDS


class Record:
    """A mailbox of which every item is kept: posts [blocks, items, fields]."""

    def __init__(self, posts: cute.Tensor):
        self.posts = posts

    @cute.jit
    def post(self, count, work):
        posts, block = self.posts, cute.arch.block_idx()[0]
        if cute.arch.lane_idx() == 0:
            for field in cutlass.range_constexpr(FIELDS):
                posts[block, count, field] = work[field]

    def wait_read(self, count):
        """Whoever reads does so at once."""


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
        shortest: cutlass.Int32,
        longest: cutlass.Int32,
    ):
        right, rows = cutlass.Int32(0), cutlass.Int32(self.tokens_per_tile)
        requests = Requests(starts, lengths, None, starts, None, left, right, shortest, longest, rows)
        self.kernel(requests, claims, posts).launch(grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, claims: cute.Tensor, posts: cute.Tensor):
        ClaimedTiles(self.key, Record(posts), self.tokens_per_tile, self.tile_n, requests, claims).run()
