# SPDX-License-Identifier: Apache-2.0
"""Attention for long queries: prefill and extend, over paged or packed keys (FlashAttention-2: Dao, 2023).

One program for each query tile and head. Programs of neighbouring heads run at the same time and share keys in L2. The
last tiles of a request, which see the most keys, start first. Only key tiles that some row sees in part are masked.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from dsl_backend.attention.protocol import Kernel, Launch, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.args import SCALE_STRIDES, STEP_ARGUMENTS, launch_arguments, layer_of, tiles_of
from dsl_backend.attention.triton.configs import PrefillConfig
from dsl_backend.attention.triton.scheduler import Step, is_served, load_request, locate
from dsl_backend.attention.triton.tiles import (
    Scores,
    attend,
    empty_softmax,
    epilogue,
    key_range,
    load_query_tile,
    window_right,
)
from dsl_backend.attention.triton.warm_up import operands_of, warm_up
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


@triton.jit
def query_tiles(request, inside, step, LAYER, TILES):
    """Query tiles of requests [scan], of one head."""
    at = load_request(request, inside, step.requests)
    return tl.where(is_served(at, step), tl.cdiv(at.q_len, TILES.m), 0)


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS, *SCALE_STRIDES])
def prefill_kernel(
    tensors, requests, score_mod, k_scale_stride, v_scale_stride, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES
):
    HEADS: tl.constexpr = LAYER.heads_kv * LAYER.group
    step = Step(requests, num_requests, min_seqlen_q, max_seqlen_q)
    scores = Scores(score_mod, k_scale_stride, v_scale_stride)
    head = tl.program_id(0) % HEADS
    tile_idx = tl.program_id(0) // HEADS
    request_idx, base = locate(tile_idx, step, LAYER, TILES, query_tiles)
    if request_idx >= num_requests:
        return

    request = load_request(request_idx, True, requests)
    # The last tiles of a request see the most keys: they start first.
    first_row = (tl.cdiv(request.q_len, TILES.m) - 1 - (tile_idx - base)) * TILES.m
    right = window_right(request_idx, requests, LAYER)
    block_min, full_min, full_max, block_max = key_range(first_row, request, right, 1, LAYER, TILES)
    tile = load_query_tile(first_row, head, head // LAYER.group, request, requests, tensors, scores, 1, LAYER, TILES)
    softmax = empty_softmax(TILES.m, LAYER)
    if LAYER.window_size_left >= 0:
        softmax = attend(softmax, tile, block_min, full_min, tensors, LAYER, TILES.n, True)
    softmax = attend(softmax, tile, full_min, full_max, tensors, LAYER, TILES.n, False)
    softmax = attend(softmax, tile, full_max, block_max, tensors, LAYER, TILES.n, True)
    epilogue(softmax, tile.token, tile.head, tile.keep, request_idx, tensors.outputs, scores, LAYER)


class Prefill(Kernel):
    """Attention of long queries for one layer spec; see the module."""

    def __init__(
        self, spec: AttentionSpec, target: Target, workspace: Workspace, config: PrefillConfig | None = None
    ) -> None:
        self.spec, self.target, self.device = spec, target, workspace.device
        self.config = config or PrefillConfig.default(spec, target)
        self.constants = (layer_of(spec), tiles_of(self.config, scan=4 if target.is_cpu else 128))

    def max_query_len_served(self) -> int | None:
        return None

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        if not self.target.is_cpu:
            warm_up(self.attend, 1, operands_of(self.spec, self.device, lse, sinks), self.spec)

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        return partial(self.attend, batch, min_seqlen_q, max_seqlen_q)

    def attend(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int, operands: Operands) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        # Each served request ends with at most one tile that is not full.
        served = min(batch.num_requests, batch.num_tokens // max(1, min_seqlen_q))
        tiles = batch.num_tokens // self.config.block_m + served
        if tiles == 0:
            return
        prefill_kernel[(tiles * self.spec.heads_q,)](
            *launch_arguments(self.spec, self.target, batch, operands),
            min_seqlen_q,
            max_seqlen_q,
            *self.constants,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
        )
