# SPDX-License-Identifier: Apache-2.0
"""Kernels that have no other role than the schedule's."""

from collections.abc import Sequence
from itertools import accumulate

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

import emulator
from dsl_backend.attention.parts.cuts import Cuts
from dsl_backend.attention.parts.merge import READ, THREADS
from dsl_backend.attention.parts.schedule import ClaimedTiles, Cut, KeyShares, Requests
from dsl_backend.attention.parts.work import FIELDS
from dsl_backend.attention.sm100.launch_control import LaunchControl, LaunchedTiles


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


def requests_of(starts, lengths, rows, left, shortest, longest) -> Requests:
    """A batch of packed keys, without more than its lengths."""
    right, rows = cutlass.Int32(0), cutlass.Int32(rows)
    return Requests(starts, lengths, None, starts, None, left, right, shortest, longest, rows)


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
        requests = requests_of(starts, lengths, self.tokens_per_tile, left, shortest, longest)
        self.kernel(requests, claims, posts).launch(grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, claims: cute.Tensor, posts: cute.Tensor):
        ClaimedTiles(self.key, Record(posts), self.tokens_per_tile, self.tile_n, requests, claims).run()


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
        shortest: cutlass.Int32,
        longest: cutlass.Int32,
    ):
        requests = requests_of(starts, lengths, self.tokens_per_tile, left, shortest, longest)
        self.kernel(requests, posts).launch(grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, posts: cute.Tensor):
        control = LaunchControl.allocate(cutlass.utils.SmemAllocator())
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_init(control.full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        LaunchedTiles(self.key, Record(posts), self.tokens_per_tile, self.tile_n, requests, control).run()


class Sharing:
    """Equal shares of a batch's key tiles, as blocks of one warp find them.

    Args:
        cluster: neighbouring blocks that have the same share of neighbouring units.
        rows: of a partial result; a whole tile's by default.
    """

    def __init__(self, key, tokens_per_tile: int, tile_n: int, least: int, cluster: int = 1, rows: int | None = None):
        self.key, self.tokens_per_tile, self.tile_n = key, tokens_per_tile, tile_n
        self.least, self.cluster = least, cluster
        self.rows = tokens_per_tile * key.pack if rows is None else rows

    @cute.jit
    def __call__(self, starts: cute.Tensor, lengths: cute.Tensor, posts: cute.Tensor):
        self.kernel(self.requests(starts, lengths), posts).launch(
            grid=(cute.size(posts, mode=[0]), 1, 1), block=(32, 1, 1)
        )

    def requests(self, starts, lengths) -> Requests:
        """Of all query lengths."""
        return requests_of(starts, lengths, self.rows, cutlass.Int32(0), cutlass.Int32(1), cutlass.Int32(1 << 30))

    def shares(self, mailbox, requests: Requests) -> KeyShares:
        return KeyShares(self.key, mailbox, self.tokens_per_tile, self.tile_n, requests, self.least, self.cluster)

    @cute.kernel
    def kernel(self, requests: Requests, posts: cute.Tensor):
        self.shares(Record(posts), requests).run()


class Cutting(Sharing):
    """What the blocks leave to be merged, as who merges finds it: cuts [blocks, fields]."""

    @cute.jit
    def __call__(self, starts: cute.Tensor, lengths: cute.Tensor, cuts: cute.Tensor):
        grid = (cute.ceil_div(cute.size(cuts, mode=[0]), READ * THREADS), 1, 1)
        self.kernel(self.requests(starts, lengths), cuts).launch(grid=grid, block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, requests: Requests, cuts: cute.Tensor):
        blocks = cutlass.Int32(cute.size(cuts, mode=[0]))
        finder = Cuts(self.shares(None, requests), cutlass.utils.SmemAllocator(), THREADS)
        first = (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]) * READ
        found = finder.find(blocks, first, READ)
        for i in cutlass.range_constexpr(READ):
            if first + i < blocks:
                for field in cutlass.range_constexpr(len(Cut._fields)):
                    cuts[first + i, field] = found[i][field]


def rows_of(q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch's first query rows, and its keys."""
    int32 = {"dtype": torch.int32}
    return torch.tensor([0, *accumulate(q_lens)], **int32), torch.tensor(kv_lens, **int32)


def cuts_of(cutting: Cutting, q_lens: Sequence[int], kv_lens: Sequence[int], blocks: int) -> list[Cut]:
    """What each block leaves to be merged; of clusters, all first ones before all second ones."""
    cuts = torch.full((blocks, len(Cut._fields)), -7, dtype=torch.int32)
    with emulator.device(arch="sm_90a", sms=1, strict=True):
        cutting(*(from_dlpack(one) for one in (*rows_of(q_lens, kv_lens), cuts)))
    return [Cut(*fields) for fields in cuts.tolist()]
