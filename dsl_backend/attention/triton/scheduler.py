# SPDX-License-Identifier: Apache-2.0
"""Tile scheduling on the device: from the lengths of a batch's requests to the tiles that a program processes.

A request may be a scalar or a vector of them. Requests whose query lengths another kernel serves have no tiles.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Step(NamedTuple):
    """The requests of a launch: those with min_seqlen_q to max_seqlen_q queries are served."""

    requests: Any
    num_requests: Any
    min_seqlen_q: Any
    max_seqlen_q: Any


class Request(NamedTuple):
    """A request's number, its first row of q, and its numbers of queries and keys."""

    idx: Any
    first_query: Any
    q_len: Any
    kv_len: Any


@triton.jit
def load_request(request, inside, requests):
    """A Request; its lengths are 0 where not inside."""
    first = tl.load(requests.cu_seqlens_q + request, mask=inside, other=0)
    stop = tl.load(requests.cu_seqlens_q + request + 1, mask=inside, other=0)
    return Request(request, first, stop - first, tl.load(requests.seqused_k + request, mask=inside, other=0))


@triton.jit
def is_served(request, step):
    return (request.q_len > 0) & (request.q_len >= step.min_seqlen_q) & (request.q_len <= step.max_seqlen_q)


@triton.jit
def request_tiles(request, inside, step, LAYER, TILES):
    """Row tiles of a request over all key heads, with packed query heads; its first and last key tile.

    A request that is served has at least one key tile, so that all of its rows are written.
    """
    at = load_request(request, inside, step.requests)
    row_tiles = tl.where(is_served(at, step), LAYER.heads_kv * tl.cdiv(at.q_len * LAYER.group, TILES.m), 0)
    first = at.q_len * 0
    if LAYER.window_size_left >= 0:
        first = tl.maximum(at.kv_len - at.q_len - LAYER.window_size_left, 0) // TILES.n
    return row_tiles, first, tl.maximum((at.kv_len - 1) // TILES.n, first)


@triton.jit
def request_work(request, inside, step, LAYER, TILES):
    """Key tiles of all row tiles of a request."""
    row_tiles, first, last = request_tiles(request, inside, step, LAYER, TILES)
    return row_tiles * (last - first + 1)


@triton.jit
def batch_work(step, LAYER, TILES):
    """Key tiles of all row tiles of a batch: int64."""
    # Triton 3.9.0 did not pipeline the split kernel's key loads where this was a vector that was summed after the loop.
    work = tl.zeros([], tl.int64)
    for chunk in range(0, step.num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        row_tiles, first, last = request_tiles(r, r < step.num_requests, step, LAYER, TILES)
        work += tl.sum(row_tiles.to(tl.int64) * (last - first + 1))
    return work


@triton.jit
def locate(tile_idx, step, LAYER, TILES, WORK_OF: tl.constexpr):
    """The request that work tile tile_idx of the batch belongs to, and the work tiles of the requests before it.

    WORK_OF(request, inside, step, LAYER, TILES) returns the work tiles of requests. Past the last work tile the request
    is num_requests.
    """
    request = 0
    base = 0
    seen = 0
    for chunk in range(0, step.num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        work = WORK_OF(r, r < step.num_requests, step, LAYER, TILES)
        through = seen + tl.cumsum(work, 0)
        before = (through <= tile_idx) & (r < step.num_requests)
        request += tl.sum(before.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(before, through, 0)))
        seen += tl.sum(work)
    return request, base
