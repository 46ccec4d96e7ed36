# SPDX-License-Identifier: Apache-2.0
"""Attention for short queries over long key ranges: decode, speculative decode, absorbed MLA.

Balanced split-KV, in the manner of stream-K (Osama et al., 2023): every program processes a contiguous, equal number of
all key tiles of the batch. Programs find their ranges on the device from the lengths of the requests, so one long
request among short ones keeps no program waiting. The query heads of a key head are packed into the rows of a tile. The
range of a row tile that several programs process is split: each leaves a partial result, and a second kernel combines
them. On SM90 and newer the launch of that kernel overlaps the first one (programmatic dependent launch).
"""

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsl_backend.attention.protocol import Kernel, Launch, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.args import (
    SCALE_STRIDES,
    STEP_ARGUMENTS,
    Layer,
    Scratch,
    Splits,
    Tiles,
    constants,
    launch_arguments,
    layer_of,
    outputs_of,
    scale_stride,
    score_mod_of,
    tiles_of,
)
from dsl_backend.attention.triton.configs import SplitKVConfig
from dsl_backend.attention.triton.scheduler import Step, batch_work, load_request, locate, request_tiles, request_work
from dsl_backend.attention.triton.tiles import (
    NEG_INF,
    Scores,
    attend,
    empty_softmax,
    epilogue,
    load_query_tile,
    lse_pointers,
    normalizer,
    store_blocks,
    store_partial,
)
from dsl_backend.attention.triton.warm_up import operands_of, warm_up
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# int32s that a program leaves for the combine kernel: splits (0: nothing to combine), first query row, key head, first
# row, rows, request.
COMBINE_FIELDS = tl.constexpr(6)


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS, *SCALE_STRIDES])
def split_kv_kernel(
    tensors,
    requests,
    score_mod,
    k_scale_stride,
    v_scale_stride,
    num_requests,
    min_seqlen_q,
    max_seqlen_q,
    scratch,
    LAYER,
    TILES,
    SPLITS,
):
    PARTIAL: tl.constexpr = TILES.m * (LAYER.dv1 + LAYER.dv2 + 2)
    if SPLITS.overlap:
        gdc_launch_dependents()  # programs of the combine kernel may start beside these, and wait there
    step = Step(requests, num_requests, min_seqlen_q, max_seqlen_q)
    scores = Scores(score_mod, k_scale_stride, v_scale_stride)
    program = tl.program_id(0)
    work = batch_work(step, LAYER, TILES).to(tl.int32)
    program_work = tl.maximum(tl.cdiv(work, tl.num_programs(0)), SPLITS.tiles)
    tile_idx = program * program_work
    end = tl.minimum(tile_idx + program_work, work)
    request_idx, base = locate(tile_idx, step, LAYER, TILES, request_work)

    # What the combine kernel has to do for the row tile whose range this program begins and another one ends.
    combine_ptr = scratch.combines + program * COMBINE_FIELDS
    splits = 0

    while tile_idx < end:
        row_tiles, first, last = request_tiles(request_idx, True, step, LAYER, TILES)
        tiles = last - first + 1  # of a row tile
        if tile_idx - base >= row_tiles * tiles:
            base += row_tiles * tiles
            request_idx += 1
        else:
            request = load_request(request_idx, True, requests)
            row_tile = (tile_idx - base) // tiles
            in_range = (tile_idx - base) % tiles
            count = tl.minimum(tiles - in_range, end - tile_idx)
            head_kv = row_tile // (row_tiles // LAYER.heads_kv)
            first_row = (row_tile % (row_tiles // LAYER.heads_kv)) * TILES.m
            tile = load_query_tile(
                first_row, head_kv * LAYER.group, head_kv, request, requests, tensors, scores, LAYER.group, LAYER, TILES
            )
            begin = first + in_range
            softmax = empty_softmax(TILES.m, LAYER)
            softmax = attend(softmax, tile, begin, begin + count, tensors, LAYER, TILES.n, True)
            if count == tiles:
                epilogue(softmax, tile.token, tile.head, tile.keep, request_idx, tensors.outputs, scores, LAYER)
            else:
                # A program leaves at most two partial results: of a range that an earlier program began, and of one
                # that a later program ends.
                range_begin = base + row_tile * tiles
                began_here = range_begin // program_work == program
                partial_idx = (2 * program + tl.where(began_here, 1, 0)).to(tl.int64)
                store_partial(softmax, tile.keep, scratch.partials + partial_idx * PARTIAL, TILES.m, LAYER, TILES)
                if began_here:
                    splits = (range_begin + tiles - 1) // program_work - range_begin // program_work + 1
                    tl.store(combine_ptr + 1, request.first_query)
                    tl.store(combine_ptr + 2, head_kv)
                    tl.store(combine_ptr + 3, first_row)
                    tl.store(combine_ptr + 4, tl.minimum(request.q_len * LAYER.group - first_row, TILES.m))
                    tl.store(combine_ptr + 5, request_idx)
            tile_idx += count
    tl.store(combine_ptr, splits)


@triton.jit(do_not_specialize=SCALE_STRIDES)
def combine_kernel(
    outputs, score_mod, v_scale_stride, scratch, LAYER, TILES, SPLITS, COLUMNS: tl.constexpr, AT_A_TIME: tl.constexpr
):
    """Combine the splits of the row tile whose range program program_id(0) of the first kernel began, if it was split.

    Each program combines COLUMNS elements of row program_id(1) of the tile, AT_A_TIME splits at a time.
    """
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    PARTIAL: tl.constexpr = TILES.m * (DV + 2)
    if SPLITS.overlap:
        # Before any exit: a kernel that ends early would let the next one start beside the split kernel.
        gdc_wait()
    program = tl.program_id(0)
    row = tl.program_id(1)
    combine_ptr = scratch.combines + program * COMBINE_FIELDS
    splits = tl.load(combine_ptr)
    first_query = tl.load(combine_ptr + 1)
    head_kv = tl.load(combine_ptr + 2)
    first_row = tl.load(combine_ptr + 3)
    if (splits == 0) | (row >= tl.load(combine_ptr + 4)):
        return
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row_max = tl.full([1], NEG_INF, tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for chunk in range(0, splits, AT_A_TIME):
        split = chunk + tl.arange(0, AT_A_TIME)
        partial_idx = 2 * (program + split) + tl.where(split == 0, 1, 0)
        partial = scratch.partials + partial_idx.to(tl.int64) * PARTIAL
        inside = split < splits
        split_max = tl.load(partial + TILES.m * DV + row, mask=inside, other=NEG_INF)
        split_sum = tl.load(partial + TILES.m * (DV + 1) + row, mask=inside, other=0.0)
        o_partial = tl.load(partial[:, None] + row * DV + column[None, :], mask=inside[:, None], other=0.0)
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        reference = tl.where(new_max == NEG_INF, 0.0, new_max)
        split_scale = tl.exp2(split_max - reference)
        acc_scale = tl.exp2(row_max - reference)
        row_sum = row_sum * acc_scale + tl.sum(split_scale * split_sum, 0)
        acc = acc * acc_scale + tl.sum(split_scale[:, None] * o_partial, 0)
        row_max = new_max

    m = first_row + row
    token = (first_query + m // LAYER.group).to(tl.int64)
    head = (head_kv * LAYER.group + m % LAYER.group).to(tl.int64)
    request = tl.load(combine_ptr + 5)
    factor, row_lse = normalizer(row_max, row_sum, True, head, request, Scores(score_mod, 0, v_scale_stride), LAYER)
    out = outputs.out
    lse = outputs.lse
    if LAYER.nvfp4_out:
        zero = tl.zeros([1], tl.int64)
        values = (acc * factor)[None, :]
        store_blocks(outputs, zero + token, zero + head, values, zero == 0, tl.program_id(2) * COLUMNS, COLUMNS, LAYER)
    else:
        pointers = out.ptr + token * out.token_stride + head * out.head_stride + column
        tl.store(pointers, quantize(acc * factor, out.ptr.dtype.element_ty, False), mask=column < LAYER.head_dim_v)
    if lse.ptr is not None:
        if tl.program_id(2) == 0:
            tl.store(lse_pointers(lse, token, head) + tl.arange(0, 1), row_lse)


class SplitKV(Kernel):
    """Split-KV attention of one layer spec; see the module."""

    def __init__(
        self, spec: AttentionSpec, target: Target, workspace: Workspace, config: SplitKVConfig | None = None
    ) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self._config = config
        self._chosen: dict[int, SplitKVConfig] = {}
        self._bundles: dict[int, tuple[Layer, Tiles, Splits]] = {}
        self.layer = layer_of(spec)
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.dv = self.layer.dv1.value + self.layer.dv2.value
        self.scratch(self.config(self.max_query_len_served() or 64))  # now, and not while a graph is captured

    def max_query_len_served(self) -> int | None:
        """The queries whose rows fill a tile of 64, at most 16; the prefill kernel serves longer ones."""
        return None if self.spec.mla else min(16, max(1, 64 // self.spec.group))

    def config(self, max_query_len: int) -> SplitKVConfig:
        """The configuration for requests of up to max_query_len queries; chosen once, since every launch asks."""
        if self._config is not None:
            return self._config
        config = self._chosen.get(max_query_len)
        if config is None:
            config = self._chosen[max_query_len] = SplitKVConfig.default(self.spec, self.target, max_query_len)
        return config

    def scratch(self, config: SplitKVConfig) -> Scratch:
        return Scratch(
            self.workspace.partials(2 * config.num_programs * config.block_m * (self.dv + 2)),
            self.workspace.integers(config.num_programs * COMBINE_FIELDS.value),
        )

    def bundles(self, max_query_len: int) -> tuple[Layer, Tiles, Splits]:
        """What is compiled in; kept, since every launch asks."""
        if max_query_len not in self._bundles:
            config = self.config(max_query_len)
            splits = constants(Splits, config.min_split_tiles, None, None, None, self.overlap)
            self._bundles[max_query_len] = (self.layer, tiles_of(config, config.scan), splits)
        return self._bundles[max_query_len]

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        if self.target.is_cpu:
            return
        longest = self.max_query_len_served() or 64  # a tile has at most 64 rows
        one_of_each = {self.config(length): length for length in range(1, longest + 1)}
        for length in one_of_each.values():
            warm_up(self.attend, length, operands_of(self.spec, self.workspace.device, lse, sinks), self.spec)

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        return partial(self.attend, batch, min_seqlen_q, max_seqlen_q)

    def attend(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int, operands: Operands) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        longest = min(max_seqlen_q, batch.max_query_len)
        config, compiled_in = self.config(longest), self.bundles(longest)
        scratch = self.scratch(config)
        split_kv_kernel[(config.num_programs,)](
            *launch_arguments(self.spec, self.target, batch, operands),
            min_seqlen_q,
            max_seqlen_q,
            scratch,
            *compiled_in,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        rows = min(config.block_m, longest * self.spec.group)
        columns = min(256, self.dv & -self.dv)  # the largest power of two that divides a row
        combine_kernel[(config.num_programs, rows, self.dv // columns)](
            outputs_of(self.target, operands),
            score_mod_of(self.spec, operands),
            scale_stride(operands.v_scale),
            scratch,
            *compiled_in,
            COLUMNS=columns,
            AT_A_TIME=min(64, 4096 // columns),  # 32 float32 a thread, so that all loads are in flight
            num_warps=4,
            **({"launch_pdl": True} if self.overlap else {}),
        )
