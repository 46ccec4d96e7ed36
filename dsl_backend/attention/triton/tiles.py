# SPDX-License-Identifier: Apache-2.0
"""A tile of query rows against tiles of keys: loads, mask, score_mod, online softmax, partial results and epilogue.

Scores are kept in base 2: score * log2(e), so that softmax needs exp2 alone. Names: n are key positions, m rows of the
tile, d elements of a head. Bundles are those of `args`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsl_backend.attention.triton.args import number_of
from dsl_backend.quant.triton.convert import dequantize, e2m1_pair_to_f32, f32_to_e2m1, nvfp4_scale, quantize
from dsl_backend.runtime.target import triton_interpreted

INTERPRETED = tl.constexpr(triton_interpreted())
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
UNBOUNDED = tl.constexpr(1 << 30)

FULL = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
PER_REQUEST = tl.constexpr(2)


class Scores(NamedTuple):
    """A launch's ScoreModArgs, and its strides of fp8 scales, which are arguments of their own."""

    args: Any
    k_scale_stride: Any
    v_scale_stride: Any


class QueryTile(NamedTuple):
    """A tile's query rows, and where its keys lie.

    Attributes:
        q1, q2: [m, d], the two blocks of the rows' queries; q2 is q1 where the layer has one block.
        token, head, position: [m], of each row.
        keep: [m], which rows belong to the request.
        alibi_slopes: [m], times log2(e).
        scale_log2: of scores, the fp8 scale of keys included.
        right: how many keys after its own position a row sees.
        page_table, first_key: the request's row of the page table; the first of its packed keys.
    """

    q1: Any
    q2: Any
    token: Any
    head: Any
    position: Any
    keep: Any
    alibi_slopes: Any
    scale_log2: Any
    right: Any
    head_kv: Any
    kv_len: Any
    page_table: Any
    first_key: Any


class Softmax(NamedTuple):
    """The state of the online softmax, float32.

    acc1, acc2 [m, d] are the two blocks of O, not normalized; row_max [m] is the largest base-2 score so far, row_sum
    [m] the sum of 2^(score - row_max).
    """

    acc1: Any
    acc2: Any
    row_max: Any
    row_sum: Any


@triton.jit
def empty_softmax(M: tl.constexpr, LAYER):
    """The state before the first key."""
    return Softmax(
        tl.zeros([M, LAYER.dv1], tl.float32),
        tl.zeros([M, LAYER.dv2 if LAYER.dv2 > 0 else 16], tl.float32),
        tl.full([M], NEG_INF, tl.float32),
        tl.zeros([M], tl.float32),
    )


@triton.jit
def dot(a, b, acc):
    """The sum acc + a @ b in float32.

    Triton's interpreter multiplies bfloat16 as integers: there they are converted first.
    """
    if INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def window_right(request, requests, LAYER):
    """How many keys after its own position a query of the request sees."""
    right = UNBOUNDED
    if LAYER.window_size_right >= 0:
        right = LAYER.window_size_right
    if LAYER.causality == CAUSAL:
        right = 0
    if LAYER.causality == PER_REQUEST:
        right = tl.where(tl.load(requests.causal + request) != 0, 0, right)
    return right


@triton.jit
def key_source(request, requests, LAYER):
    """A request's row of the page table, or the first of its packed keys."""
    if LAYER.page_size > 0:
        return requests.page_table + request.to(tl.int64) * number_of(requests.page_table_stride), 0
    else:
        # Packed keys have no page table, and None cannot be returned: this pointer is not read.
        return requests.cu_seqlens_q, tl.load(requests.cu_seqlens_k + request)


@triton.jit
def key_range(first_row, request, right, GROUP: tl.constexpr, LAYER, TILES):
    """n_block_min, n_block_full_min, n_block_full_max, n_block_max of a row tile (as in FA4).

    Some row of the tile sees a key of the blocks from min to max; every row sees all keys of those from full_min to
    full_max. GROUP rows have the same position.
    """
    shift = request.kv_len - request.q_len
    first_position = shift + first_row // GROUP
    last_position = shift + (tl.minimum(first_row + TILES.m, request.q_len * GROUP) - 1) // GROUP
    stop = request.kv_len
    full_stop = request.kv_len
    if LAYER.causality != FULL or LAYER.window_size_right >= 0:
        stop = tl.minimum(request.kv_len, tl.maximum(last_position + right + 1, 0))
        full_stop = tl.minimum(request.kv_len, tl.maximum(first_position + right + 1, 0))
    block_min = 0
    full_min = 0
    if LAYER.window_size_left >= 0:
        block_min = tl.maximum(first_position - LAYER.window_size_left, 0) // TILES.n
        full_min = tl.cdiv(tl.maximum(last_position - LAYER.window_size_left, 0), TILES.n)
    full_max = tl.maximum(full_stop // TILES.n, block_min)
    return block_min, tl.minimum(full_min, full_max), full_max, tl.cdiv(stop, TILES.n)


@triton.jit
def load_query_tile(
    first_row, first_head, head_kv, request, requests, tensors, scores, GROUP: tl.constexpr, LAYER, TILES
):
    """The QueryTile of rows first_row ... first_row + TILES.m - 1 of a request: GROUP heads of each token in turn."""
    m = first_row + tl.arange(0, TILES.m)
    keep = m < request.q_len * GROUP
    token = (request.first_query + m // GROUP).to(tl.int64)
    head = (first_head + m % GROUP).to(tl.int64)
    q1, q2 = load_queries(tensors, token, head, keep, LAYER)
    alibi_slopes = tl.zeros([TILES.m], tl.float32)
    if LAYER.alibi:
        alibi_slopes = tl.load(scores.args.alibi_slopes + head, mask=keep, other=0.0) * LOG2E
    scale_log2 = scores.args.softmax_scale_log2
    if scores.args.k_scale is not None:
        of_request = request_scales(request.idx, scores.args.k_request_stride, LAYER)
        scale_log2 *= tl.load(scores.args.k_scale + of_request + head_kv * scores.k_scale_stride)
    if scores.args.q_scale is not None:
        of_request = request_scales(request.idx, scores.args.q_request_stride, LAYER)
        scale_log2 *= tl.load(scores.args.q_scale + of_request + head_kv * number_of(scores.args.q_scale_stride))
    page_table, first_key = key_source(request.idx, requests, LAYER)
    return QueryTile(
        q1,
        q2,
        token,
        head,
        request.kv_len - request.q_len + m // GROUP,
        keep,
        alibi_slopes,
        scale_log2,
        window_right(request.idx, requests, LAYER),
        head_kv,
        request.kv_len,
        page_table,
        first_key,
    )


@triton.jit
def request_scales(request, stride, LAYER):
    """Where a request's fp8 scales begin, in elements; stride as `args.ScoreModArgs` has it."""
    if LAYER.scales_by_request:
        return request.to(tl.int64) * number_of(stride)
    else:
        return 0


@triton.jit
def converted(q, LAYER):
    """Queries in the layer's dtype; those of e4m3 without their scale."""
    if not LAYER.fp8_q:
        return q
    elif LAYER.bf16:
        return dequantize(q, tl.bfloat16, False)
    else:
        return dequantize(q, tl.float16, False)


@triton.jit
def load_queries(tensors, token, head, keep, LAYER):
    """The two blocks of the rows' queries, not scaled; the second is the first again where the layer has one block."""
    rows = token * tensors.q1.token_stride + head * tensors.q1.head_stride
    q1 = load_rows(tensors.q1.ptr, rows, keep, 0, LAYER.d1, LAYER.head_dim, MASKED=True)
    q1 = converted(q1, LAYER)
    if LAYER.d2 > 0:
        rows = token * tensors.q2.token_stride + head * tensors.q2.head_stride
        q2 = load_rows(tensors.q2.ptr, rows, keep, 0, LAYER.d2, LAYER.head_dim - LAYER.d1, MASKED=True)
        return q1, converted(q2, LAYER)
    else:
        return q1, q1


@triton.jit
def load_rows(ptr, rows, inside, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Elements FIRST ... FIRST + BLOCK_D - 1 of the rows: [rows, BLOCK_D], 0 where not inside or past DIM."""
    d = FIRST + tl.arange(0, BLOCK_D)
    pointers = ptr + rows[:, None] + d[None, :]
    if FIRST + BLOCK_D > DIM:
        if MASKED:
            return tl.load(pointers, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_pages(tile, n0, LAYER, BLOCK_N: tl.constexpr):
    """The pages of the keys n0 ... n0 + BLOCK_N - 1: a scalar where one page holds them all, else [BLOCK_N]."""
    if LAYER.page_size == 0:
        return 0
    elif LAYER.page_size % BLOCK_N == 0:
        return tl.load(tile.page_table + n0 // LAYER.page_size, mask=n0 < tile.kv_len, other=0)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        return tl.load(tile.page_table + n // LAYER.page_size, mask=n < tile.kv_len, other=0)


@triton.jit
def key_rows(cache, tile, n0, pages, LAYER, BLOCK_N: tl.constexpr):
    """Element offsets [BLOCK_N] int64 of the keys n0 ... n0 + BLOCK_N - 1 of the tile's key head."""
    n = n0 + tl.arange(0, BLOCK_N)
    in_head = tile.head_kv.to(tl.int64) * cache.head_stride
    if LAYER.page_size == 0:
        return in_head + (tile.first_key + n).to(tl.int64) * cache.token_stride
    else:
        return in_head + pages.to(tl.int64) * cache.page_stride + (n % LAYER.page_size) * cache.token_stride


@triton.constexpr_function
def pow2_factor(number):
    """The largest power of two that divides a number."""
    return number & -number


@triton.jit
def load_kv(
    cache,
    tile,
    n0,
    pages,
    inside,
    FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    dtype: tl.constexpr,
    LAYER,
    BLOCK_N: tl.constexpr,
):
    """Elements FIRST ... FIRST + BLOCK_D - 1 of the keys or values n0 ... n0 + BLOCK_N - 1, in `dtype`, as `load_rows`.

    Scales of NVFP4's blocks are multiplied with, those of the tensor or the head are not.
    """
    rows = key_rows(cache, tile, n0, pages, LAYER, BLOCK_N)
    if LAYER.nvfp4:
        # A thread has whole blocks of 16 elements: 8 bytes and a scale.
        block = FIRST // 16 + tl.arange(0, BLOCK_D // 16)
        keep = (block < DIM // 16)[None, :]
        if MASKED:
            keep = keep & inside[:, None]
        offsets = rows[:, None, None] + (block * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
        packed = tl.load(cache.ptr + offsets, mask=keep[:, :, None], other=0)
        # Scales lie behind the page's elements, in the same order: an eighth as far apart.
        page = pages.to(tl.int64) * cache.page_stride
        in_page = LAYER.page_size * LAYER.heads_kv * (DIM // 2) + (rows - page) // 8
        scale_rows = page + tl.multiple_of(in_page, pow2_factor(DIM // 16))
        scales = tl.load(cache.ptr + scale_rows[:, None] + block[None, :], mask=keep, other=0)
        factors = dequantize(scales, tl.float32, False)[:, :, None]
        low, high = e2m1_pair_to_f32(packed)
        elements = tl.join((low * factors).to(dtype), (high * factors).to(dtype))
        return elements.reshape(BLOCK_N, BLOCK_D)
    else:
        stored = load_rows(cache.ptr, rows, inside, FIRST, BLOCK_D, DIM, MASKED)
        return dequantize(stored, dtype, LAYER.e5m2)


@triton.jit
def score_mod(acc_s, tile, distance, LAYER):
    """q·k [m, n] to base-2 scores: scale, softcap, ALiBi over distance = n - position."""
    scores = acc_s * tile.scale_log2
    if LAYER.softcap > 0:
        # c·tanh(s / c) = c·(1 - 2 / (e^(2s/c) + 1)); overflow to inf still gives ±c.
        scores = LAYER.softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / LAYER.softcap)) + 1.0))
    if LAYER.alibi:
        scores -= tile.alibi_slopes[:, None] * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def mask(n, tile, distance, LAYER):
    """[m, n]: which keys a row sees."""
    seen = (n < tile.kv_len)[None, :]
    if LAYER.causality != FULL or LAYER.window_size_right >= 0:
        seen = seen & (distance <= tile.right)
    if LAYER.window_size_left >= 0:
        seen = seen & (distance >= -LAYER.window_size_left)
    return seen


@triton.jit
def attend_tile(softmax, tile, n0, pages, tensors, LAYER, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """The softmax state after one more key tile (online softmax: Milakov and Gimelshein, 2018).

    Unless MASKED, every row sees every key of the tile.
    """
    dtype: tl.constexpr = tile.q1.dtype
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < tile.kv_len
    if LAYER.window_size_left >= 0:
        # Pages below the first row's window may belong to another request by now: a P of 0 times NaN is NaN.
        inside = inside & (n >= tl.min(tile.position, 0) - LAYER.window_size_left)
    k1 = load_kv(tensors.k, tile, n0, pages, inside, 0, LAYER.d1, LAYER.head_dim, MASKED, dtype, LAYER, BLOCK_N)
    acc_s = dot(tile.q1, tl.trans(k1), tl.zeros([tile.q1.shape[0], BLOCK_N], tl.float32))
    if LAYER.d2 > 0:
        k2 = load_kv(
            tensors.k, tile, n0, pages, inside, LAYER.d1, LAYER.d2, LAYER.head_dim, MASKED, dtype, LAYER, BLOCK_N
        )
        acc_s = dot(tile.q2, tl.trans(k2), acc_s)
    distance = n[None, :] - tile.position[:, None]
    scores = score_mod(acc_s, tile, distance, LAYER)
    if MASKED:
        scores = tl.where(mask(n, tile, distance, LAYER), scores, NEG_INF)
    row_max = tl.maximum(softmax.row_max, tl.max(scores, 1))
    # A row that has seen no key keeps -inf; exp2 then needs a finite reference.
    reference = tl.where(row_max == NEG_INF, 0.0, row_max) if MASKED else row_max
    probs = tl.exp2(scores - reference[:, None])
    acc_scale = tl.exp2(softmax.row_max - reference)
    row_sum = softmax.row_sum * acc_scale + tl.sum(probs, 1)
    probs = probs.to(dtype)
    acc1 = softmax.acc1 * acc_scale[:, None]
    acc2 = softmax.acc2
    if LAYER.mla:
        acc1 = dot(probs, k1, acc1)
    else:
        v1 = load_kv(tensors.v, tile, n0, pages, inside, 0, LAYER.dv1, LAYER.head_dim_v, MASKED, dtype, LAYER, BLOCK_N)
        acc1 = dot(probs, v1, acc1)
        if LAYER.dv2 > 0:
            v2 = load_kv(
                tensors.v,
                tile,
                n0,
                pages,
                inside,
                LAYER.dv1,
                LAYER.dv2,
                LAYER.head_dim_v,
                MASKED,
                dtype,
                LAYER,
                BLOCK_N,
            )
            acc2 = dot(probs, v2, acc2 * acc_scale[:, None])
    return Softmax(acc1, acc2, row_max, row_sum)


@triton.jit
def attend(softmax, tile, begin, end, tensors, LAYER, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """The softmax state after the key tiles begin ... end - 1, in ascending order.

    The pages of a key tile are loaded one tile ahead, so that loads of keys do not wait for the page table.
    """
    pages = load_pages(tile, begin * BLOCK_N, LAYER, BLOCK_N)
    for t in range(begin, end):
        next_pages = load_pages(tile, (t + 1) * BLOCK_N, LAYER, BLOCK_N)
        softmax = attend_tile(softmax, tile, t * BLOCK_N, pages, tensors, LAYER, BLOCK_N, MASKED)
        pages = next_pages
    return softmax


@triton.jit
def store_partial(softmax, keep, partial, ROWS, LAYER, TILES):
    """Store the state of an unfinished tile, with room for ROWS rows: O's rows, then row_max, then row_sum."""
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    rows = tl.arange(0, TILES.m)
    tl.store(partial + rows[:, None] * DV + tl.arange(0, LAYER.dv1)[None, :], softmax.acc1, mask=keep[:, None])
    if LAYER.dv2 > 0:
        columns = LAYER.dv1 + tl.arange(0, LAYER.dv2)
        tl.store(partial + rows[:, None] * DV + columns[None, :], softmax.acc2, mask=keep[:, None])
    tl.store(partial + ROWS * DV + rows, softmax.row_max, mask=keep)
    tl.store(partial + ROWS * (DV + 1) + rows, softmax.row_sum, mask=keep)


@triton.jit
def normalizer(row_max, row_sum, keep, head, request, scores, LAYER):
    """The factor from a row's accumulator to its output, sinks and fp8 scales included; and the row's LSE.

    request: read only where each has scales of its own.
    """
    acc_scale = 1.0
    if scores.args.sinks is not None:
        sink = tl.load(scores.args.sinks + head, mask=keep, other=0.0).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        # A row without a key, and a sink that is none.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        acc_scale = tl.exp2(row_max - shift)
        row_sum = row_sum * acc_scale + tl.exp2(sink - shift)
        row_max = new_max
    # row_sum is 0 where a row saw no key; a NaN stays one.
    factor = tl.where(row_sum == 0.0, 0.0, acc_scale / row_sum)
    if scores.args.v_scale is not None:
        of_request = request_scales(request, scores.args.v_request_stride, LAYER)
        of_head = head // LAYER.group * scores.v_scale_stride
        factor *= tl.load(scores.args.v_scale + of_request + of_head, mask=keep, other=1.0)
    if scores.args.out_scale is not None:
        out_scale = tl.load(scores.args.out_scale)
        if LAYER.nvfp4_out:
            factor *= out_scale
        else:
            factor *= 1.0 / out_scale
    return factor, (row_max + tl.log2(row_sum)) * LN2


@triton.jit
def store_rows(ptr, rows, values, keep, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr):
    d = FIRST + tl.arange(0, BLOCK_D)
    inside = keep[:, None] & (d < DIM)[None, :]
    tl.store(ptr + rows[:, None] + d[None, :], quantize(values, ptr.dtype.element_ty, False), mask=inside)


@triton.jit
def store_blocks(outputs, token, head, values, keep, first, BLOCK_D: tl.constexpr, LAYER):
    """Store columns of rows in NVFP4, and the scales of their blocks in the order of `quant.reference.swizzled`.

    Args:
        token, head: [m] int64.
        values: [m, BLOCK_D] float32, of the columns from `first` on, times the scale of outputs.
    """
    M: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = BLOCK_D // 16
    blocks = tl.reshape(values, [M, BLOCKS, 16])
    is_nan = blocks != blocks
    code, rounded = nvfp4_scale(tl.max(tl.where(is_nan, 0.0, tl.abs(blocks)), 2), tl.max(is_nan.to(tl.int32), 2))
    # Of a block whose scale is 0, or NaN, all elements are 0.
    divisor = tl.where(rounded > 0.0, rounded, float("inf"))
    elements = f32_to_e2m1(tl.div_rn(blocks, tl.broadcast_to(divisor[:, :, None], blocks.shape)))
    low, high = tl.split(tl.reshape(elements, [M, BLOCK_D // 2, 2]))
    out = outputs.out
    rows = out.ptr + token * out.token_stride + head * out.head_stride
    pair = first // 2 + tl.arange(0, BLOCK_D // 2)
    inside = keep[:, None] & (pair < LAYER.head_dim_v // 2)[None, :]
    tl.store(rows[:, None] + pair[None, :], (low | high << 4).to(tl.uint8), mask=inside)
    ROW_BLOCKS: tl.constexpr = LAYER.heads_kv * LAYER.group * LAYER.head_dim_v // 16
    own = first // 16 + tl.arange(0, BLOCKS)
    block = (head * (LAYER.head_dim_v // 16))[:, None] + own[None, :]
    of_row = token // 128 * (ROW_BLOCKS * 128) + token % 32 * 16 + token % 128 // 32 * 4
    inside = keep[:, None] & (own < LAYER.head_dim_v // 16)[None, :]
    tl.store(outputs.block_scale + of_row[:, None] + block // 4 * 512 + block % 4, code, mask=inside)


@triton.jit
def lse_pointers(lse, token, head):
    """Of rows of the LSE; token, head int64."""
    return lse.ptr + token * number_of(lse.token_stride) + head * number_of(lse.head_stride)


@triton.jit
def epilogue(softmax, token, head, keep, request, outputs, scores, LAYER):
    """Normalize O, and store the rows that are kept and their LSE; token, head [m] int64."""
    factor, row_lse = normalizer(softmax.row_max, softmax.row_sum, keep, head, request, scores, LAYER)
    out = outputs.out
    lse = outputs.lse
    if LAYER.nvfp4_out:
        store_blocks(outputs, token, head, softmax.acc1 * factor[:, None], keep, 0, LAYER.dv1, LAYER)
        if LAYER.dv2 > 0:
            store_blocks(outputs, token, head, softmax.acc2 * factor[:, None], keep, LAYER.dv1, LAYER.dv2, LAYER)
    else:
        rows = token * out.token_stride + head * out.head_stride
        store_rows(out.ptr, rows, softmax.acc1 * factor[:, None], keep, 0, LAYER.dv1, LAYER.head_dim_v)
        if LAYER.dv2 > 0:
            store_rows(out.ptr, rows, softmax.acc2 * factor[:, None], keep, LAYER.dv1, LAYER.dv2, LAYER.head_dim_v)
    if lse.ptr is not None:
        tl.store(lse_pointers(lse, token, head), row_lse, mask=keep)
