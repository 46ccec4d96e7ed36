# SPDX-License-Identifier: Apache-2.0
"""Causal attention in Helion. The fastest of a few configurations is chosen; nothing else is searched."""

from functools import cache

import helion
import helion.language as hl
import torch

# Scores are powers of 2.
LOG2_E = 1.4426950408889634
QUERIES = 128


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, scale: float
) -> torch.Tensor:
    """All are [requests, tokens, heads, dim]; a few heads of q share one of keys."""
    requests, tokens, heads, _ = q.size()
    dim = hl.specialize(q.size(3))
    shared = heads // keys.size(2)
    factor = scale * LOG2_E
    step = hl.register_block_size(QUERIES)
    for tile_m, tile_h, tile_r in hl.tile([tokens, heads, requests], block_size=[None, 1, 1]):
        query = q[tile_r.begin, tile_m, tile_h.begin, :]
        top = hl.full([tile_m], float("-inf"), dtype=torch.float32)
        total = hl.zeros([tile_m], dtype=torch.float32)
        result = hl.zeros([tile_m, dim], dtype=torch.float32)
        # Keys that all queries of the tile see. Not hl.tile, which masks each step, since it may end within one.
        for first in hl.grid(0, tile_m.begin, step):
            column = first + hl.arange(step)
            key = keys[tile_r.begin, column, tile_h.begin // shared, :]
            scores = hl.dot(query, key.T, out_dtype=torch.float32) * factor
            higher = torch.maximum(top, torch.amax(scores, 1))
            powers = torch.exp2(scores - higher[:, None])
            kept = torch.exp2(top - higher)
            total = total * kept + torch.sum(powers, 1)
            value = values[tile_r.begin, column, tile_h.begin // shared, :]
            result = hl.dot(powers.to(value.dtype), value, acc=result * kept[:, None])
            top = higher
        for first in hl.grid(tile_m.begin, tile_m.end, step):
            column = first + hl.arange(step)
            key = keys[tile_r.begin, column, tile_h.begin // shared, :]
            scores = hl.dot(query, key.T, out_dtype=torch.float32) * factor
            scores = torch.where(tile_m.index[:, None] >= column[None, :], scores, float("-inf"))
            higher = torch.maximum(top, torch.amax(scores, 1))
            powers = torch.exp2(scores - higher[:, None])
            kept = torch.exp2(top - higher)
            total = total * kept + torch.sum(powers, 1)
            value = values[tile_r.begin, column, tile_h.begin // shared, :]
            result = hl.dot(powers.to(value.dtype), value, acc=result * kept[:, None])
            top = higher
        out[tile_r.begin, tile_m, tile_h.begin, :] = (result / total[:, None]).to(out.dtype)
    return out


@cache
def causal() -> helion.Kernel:
    """A kernel (q, keys, values, out, scale). Its tokens are a multiple of `QUERIES`."""
    return helion.kernel(
        attention,
        configs=[
            # Helion 1.5.1 has no TMA for loops whose end depends on the tile of queries.
            helion.Config(block_sizes=[keys, QUERIES], num_warps=8, num_stages=stages, indexing="pointer")
            for keys, stages in ((128, 2), (128, 3), (64, 3))
        ],
    )
