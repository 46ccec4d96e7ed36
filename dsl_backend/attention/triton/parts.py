# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels of this folder are made of: where keys lie, which of them a row sees, the online softmax.

Scores are kept in base 2: score · log2(e), so that exp2 serves the softmax. Names: n key positions, m rows of the tile,
d elements of a head. Bundles are those of `arguments`.
"""

import triton
import triton.language as tl

from dsl_backend.runtime.target import triton_interpreted

INTERPRETED = tl.constexpr(triton_interpreted())
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
FAR = tl.constexpr(1 << 30)  # a window that ends nowhere

FULL = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
PER_REQUEST = tl.constexpr(2)


@triton.jit
def dot(a, b, acc):
    """The sum acc + a @ b in float32.

    Triton's interpreter multiplies bfloat16 as integers: there it is widened first.
    """
    if INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def query_range(requests, request, inside):
    """First row of q and query length of requests, a scalar or a vector; 0 where not inside."""
    first = tl.load(requests.starts + request, mask=inside, other=0)
    return first, tl.load(requests.starts + request + 1, mask=inside, other=0) - first


@triton.jit
def locate(place, requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, WORK_OF: tl.constexpr):
    """The request that piece of work `place` of the batch belongs to, and the pieces of the requests before it.

    WORK_OF(request, inside, requests, shortest, longest, LAYER, TILES) is how many pieces requests have. Past the last
    piece the request is num_requests.
    """
    request = 0
    base = 0
    seen = 0
    for chunk in range(0, num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        work = WORK_OF(r, r < num_requests, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES)
        through = seen + tl.cumsum(work, 0)
        before = (through <= place) & (r < num_requests)
        request += tl.sum(before.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(before, through, 0)))
        seen += tl.sum(work)
    return request, base


@triton.jit
def window_right(requests, request, LAYER):
    """How many keys after its own position a query of the request sees."""
    right = FAR
    if LAYER.right >= 0:
        right = LAYER.right
    if LAYER.causality == CAUSAL:
        right = 0
    if LAYER.causality == PER_REQUEST:
        right = tl.where(tl.load(requests.causal + request) != 0, 0, right)
    return right


@triton.jit
def key_source(requests, request, LAYER):
    """Where a request's keys are: its row of the page table, or the first of its packed tokens."""
    if LAYER.page > 0:
        return requests.table + request.to(tl.int64) * requests.table_stride, 0
    else:
        # No table: nobody reads what stands in for its row, which cannot be None.
        return requests.starts, tl.load(requests.packed_starts + request)


@triton.jit
def pages_of(table_row, n0, kv_len, LAYER, BLOCK_N: tl.constexpr):
    """The pages of the keys n0 ... n0 + BLOCK_N - 1: a scalar where one page holds them all, else [BLOCK_N].

    The kernels ask for a tile's pages one tile ahead, so that nobody waits for the table before the keys.
    """
    if LAYER.page == 0:
        return 0
    elif LAYER.page % BLOCK_N == 0:
        return tl.load(table_row + n0 // LAYER.page, mask=n0 < kv_len, other=0)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        return tl.load(table_row + n // LAYER.page, mask=n < kv_len, other=0)


@triton.jit
def key_rows(cache, head, pages, n0, packed_first, LAYER, BLOCK_N: tl.constexpr):
    """Element offsets [BLOCK_N] int64 of the keys n0 ... n0 + BLOCK_N - 1 of a key head."""
    n = n0 + tl.arange(0, BLOCK_N)
    in_head = head.to(tl.int64) * cache.head_stride
    if LAYER.page == 0:
        return in_head + (packed_first + n).to(tl.int64) * cache.token_stride
    else:
        return in_head + pages.to(tl.int64) * cache.page_stride + (n % LAYER.page) * cache.token_stride


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
def load_queries(q, q2, token, head, keep, LAYER):
    """The two blocks of the rows' queries; the second is the first again where the layer has one. token, head [m]."""
    token = token.to(tl.int64)
    q1 = load_rows(q.ptr, token * q.token_stride + head * q.head_stride, keep, 0, LAYER.d1, LAYER.head_dim, MASKED=True)
    if LAYER.d2 > 0:
        rows = token * q2.token_stride + head * q2.head_stride
        return q1, load_rows(q2.ptr, rows, keep, 0, LAYER.d2, LAYER.head_dim - LAYER.d1, MASKED=True)
    else:
        return q1, q1


@triton.jit
def widen(x, dtype: tl.constexpr, E5M2: tl.constexpr):
    """Stored keys in the queries' dtype; uint8 holds e5m2 bits, or e4m3's where the target has no conversion."""
    if x.dtype == tl.uint8 and E5M2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif x.dtype == tl.uint8:
        # e4m3's exponent and mantissa, moved under float32's, make the value times 2^-120; the product is exact.
        bits = x.to(tl.uint32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
        return tl.where((bits & 0x80) != 0, -magnitude, magnitude).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def bend_scores(scores, scale_log2, distance, scoring, slopes, LAYER):
    """Raw q·k [m, n] to base-2 scores: scale, softcap, ALiBi over distance = n - position."""
    scores = scores * scale_log2
    if LAYER.softcap > 0:
        # c·tanh(s / c) = c·(1 - 2 / (e^(2s/c) + 1)); overflow to inf still gives ±c.
        scores = LAYER.softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / LAYER.softcap)) + 1.0))
    if scoring.slopes is not None:
        scores -= slopes[:, None] * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def visible(n, kv_len, distance, right, LAYER):
    """[m, n]: which keys a row sees."""
    keep = (n < kv_len)[None, :]
    if LAYER.causality != FULL or LAYER.right >= 0:
        keep = keep & (distance <= right)
    if LAYER.left >= 0:
        keep = keep & (distance >= -LAYER.left)
    return keep


@triton.jit
def attend(
    acc1,
    acc2,
    top,
    total,
    q1,
    q2,
    n0,
    pages,
    head,
    position,
    right,
    kv_len,
    packed_first,
    slopes,
    scale,
    keys,
    values,
    scoring,
    LAYER,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One key tile into the running softmax (Milakov and Gimelshein, 2018): acc1, acc2, top, total updated.

    top [m] is the largest base-2 score so far, total [m] the sum of 2^(score - top), acc the same sum over values.
    Unless MASKED, every row sees every key of the tile.
    """
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < kv_len
    if LAYER.left >= 0:
        # Pages in front of the first row's window may be another request's by now: a weight of 0 keeps a NaN.
        inside = inside & (n >= tl.min(position, 0) - LAYER.left)
    k_rows = key_rows(keys, head, pages, n0, packed_first, LAYER, BLOCK_N)
    k1 = widen(load_rows(keys.ptr, k_rows, inside, 0, LAYER.d1, LAYER.head_dim, MASKED), q1.dtype, LAYER.e5m2)
    scores = dot(q1, tl.trans(k1), tl.zeros([q1.shape[0], BLOCK_N], tl.float32))
    if LAYER.d2 > 0:
        k2 = widen(
            load_rows(keys.ptr, k_rows, inside, LAYER.d1, LAYER.d2, LAYER.head_dim, MASKED), q1.dtype, LAYER.e5m2
        )
        scores = dot(q2, tl.trans(k2), scores)
    distance = n[None, :] - position[:, None]
    scores = bend_scores(scores, scale, distance, scoring, slopes, LAYER)
    if MASKED:
        scores = tl.where(visible(n, kv_len, distance, right, LAYER), scores, NEG_INF)
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing keeps -inf; exp2 then needs a finite reference.
    reference = tl.where(new_top == NEG_INF, 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(q1.dtype)
    acc1 = acc1 * shrink[:, None]
    if LAYER.latent:
        acc1 = dot(weights, k1, acc1)
    else:
        v_rows = key_rows(values, head, pages, n0, packed_first, LAYER, BLOCK_N)
        v1 = widen(load_rows(values.ptr, v_rows, inside, 0, LAYER.dv1, LAYER.head_dim_v, MASKED), q1.dtype, LAYER.e5m2)
        acc1 = dot(weights, v1, acc1)
        if LAYER.dv2 > 0:
            v2 = widen(
                load_rows(values.ptr, v_rows, inside, LAYER.dv1, LAYER.dv2, LAYER.head_dim_v, MASKED),
                q1.dtype,
                LAYER.e5m2,
            )
            acc2 = dot(weights, v2, acc2 * shrink[:, None])
    return acc1, acc2, new_top, total


@triton.jit
def normalizer(top, total, keep, head, scoring, v_scale_stride, LAYER):
    """What turns a row's accumulator into its output, sinks and fp8 scale included; and the row's LSE."""
    shrink = 1.0
    if scoring.sinks is not None:
        sink = tl.load(scoring.sinks + head, mask=keep, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        top = new_top
    # total is 0 where a row saw no key; a NaN stays one.
    factor = tl.where(total == 0.0, 0.0, shrink / total)
    if scoring.v_scale is not None:
        factor *= tl.load(scoring.v_scale + head // LAYER.group * v_scale_stride, mask=keep, other=1.0)
    return factor, (top + tl.log2(total)) * LN2


@triton.jit
def store_rows(ptr, rows, values, keep, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr):
    d = FIRST + tl.arange(0, BLOCK_D)
    mask = keep[:, None] & (d < DIM)[None, :]
    tl.store(ptr + rows[:, None] + d[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish(acc1, acc2, top, total, keep, token, head, out, lse, scoring, v_scale_stride, LAYER):
    """Divide by the softmax's denominator and store the rows that are kept; token, head [m]."""
    factor, row_lse = normalizer(top, total, keep, head, scoring, v_scale_stride, LAYER)
    token = token.to(tl.int64)
    rows = token * out.token_stride + head * out.head_stride
    store_rows(out.ptr, rows, acc1 * factor[:, None], keep, 0, LAYER.dv1, LAYER.head_dim_v)
    if LAYER.dv2 > 0:
        store_rows(out.ptr, rows, acc2 * factor[:, None], keep, LAYER.dv1, LAYER.dv2, LAYER.head_dim_v)
    if lse.ptr is not None:
        tl.store(lse.ptr + token * lse.token_stride + head * lse.head_stride, row_lse, mask=keep)
