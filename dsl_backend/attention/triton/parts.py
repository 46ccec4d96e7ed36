# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels of this folder are made of: where keys lie, which of them a row sees, the online softmax.

Scores are kept in base 2: score · log2(e), so that exp2 serves the softmax. Names: n key positions, m rows of the tile,
d elements of a head.
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
def window_right(causal_ptr, request, CAUSALITY: tl.constexpr, RIGHT: tl.constexpr):
    """How many keys after its own position a query of the request sees."""
    right = RIGHT if RIGHT >= 0 else FAR
    if CAUSALITY == CAUSAL:
        right = 0
    if CAUSALITY == PER_REQUEST:
        right = tl.where(tl.load(causal_ptr + request) != 0, 0, right)
    return right


@triton.jit
def pages_of(table_ptr, n0, kv_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of the keys n0 ... n0 + BLOCK_N - 1: a scalar where one page holds them all, else [BLOCK_N].

    The kernels ask for a tile's pages one tile ahead, so that nobody waits for the table before the keys.
    """
    if PAGE == 0:
        return 0
    elif PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + n0 // PAGE, mask=n0 < kv_len, other=0)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + n // PAGE, mask=n < kv_len, other=0)


@triton.jit
def key_rows(pages, n0, packed_first, page_stride, token_stride, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets [BLOCK_N] int64 of the keys n0 ... n0 + BLOCK_N - 1."""
    n = n0 + tl.arange(0, BLOCK_N)
    if PAGE == 0:
        return (packed_first + n).to(tl.int64) * token_stride
    else:
        return pages.to(tl.int64) * page_stride + (n % PAGE) * token_stride


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
def widen(x, dtype: tl.constexpr):
    """Stored keys in the queries' dtype; uint8 holds e4m3 bits where the target cannot convert them itself."""
    if x.dtype == tl.uint8:
        # e4m3's exponent and mantissa, moved under float32's, make the value times 2^-120; the product is exact.
        bits = x.to(tl.uint32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
        return tl.where((bits & 0x80) != 0, -magnitude, magnitude).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def bend_scores(scores, scale_log2, distance, slopes_ptr, slopes, SOFTCAP: tl.constexpr):
    """Raw q·k [m, n] to base-2 scores: scale, softcap, ALiBi over distance = n - position."""
    scores = scores * scale_log2
    if SOFTCAP > 0:
        # c·tanh(s / c) = c·(1 - 2 / (e^(2s/c) + 1)); overflow to inf still gives ±c.
        scores = SOFTCAP * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0))
    if slopes_ptr is not None:
        scores -= slopes[:, None] * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def visible(n, kv_len, distance, right, CAUSALITY: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """[m, n]: which keys a row sees."""
    keep = (n < kv_len)[None, :]
    if CAUSALITY != FULL or RIGHT >= 0:
        keep = keep & (distance <= right)
    if LEFT >= 0:
        keep = keep & (distance >= -LEFT)
    return keep


@triton.jit
def attend(
    q1,
    q2,
    acc1,
    acc2,
    top,
    total,
    n0,
    pages,
    position,
    kv_len,
    right,
    packed_first,
    slopes,
    scale_log2,
    k_ptr,
    v_ptr,
    slopes_ptr,
    k_page_stride,
    k_token_stride,
    v_page_stride,
    v_token_stride,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSALITY: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One key tile into the running softmax (Milakov and Gimelshein, 2018): acc1, acc2, top, total updated.

    top [m] is the largest base-2 score so far, total [m] the sum of 2^(score - top), acc the same sum over values.
    Unless MASKED, every row sees every key of the tile.
    """
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < kv_len
    k_rows = key_rows(pages, n0, packed_first, k_page_stride, k_token_stride, PAGE, BLOCK_N)
    k1 = widen(load_rows(k_ptr, k_rows, inside, 0, D1, HEAD_DIM, MASKED), q1.dtype)
    scores = dot(q1, tl.trans(k1), tl.zeros([q1.shape[0], BLOCK_N], tl.float32))
    if D2 > 0:
        k2 = widen(load_rows(k_ptr, k_rows, inside, D1, D2, HEAD_DIM, MASKED), q1.dtype)
        scores = dot(q2, tl.trans(k2), scores)
    distance = n[None, :] - position[:, None]
    scores = bend_scores(scores, scale_log2, distance, slopes_ptr, slopes, SOFTCAP)
    if MASKED:
        scores = tl.where(visible(n, kv_len, distance, right, CAUSALITY, LEFT, RIGHT), scores, NEG_INF)
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing keeps -inf; exp2 then needs a finite reference.
    reference = tl.where(new_top == NEG_INF, 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(q1.dtype)
    acc1 = acc1 * shrink[:, None]
    if LATENT:
        acc1 = dot(weights, k1, acc1)
    else:
        v_rows = key_rows(pages, n0, packed_first, v_page_stride, v_token_stride, PAGE, BLOCK_N)
        v1 = widen(load_rows(v_ptr, v_rows, inside, 0, DV1, HEAD_DIM_V, MASKED), q1.dtype)
        acc1 = dot(weights, v1, acc1)
        if DV2 > 0:
            v2 = widen(load_rows(v_ptr, v_rows, inside, DV1, DV2, HEAD_DIM_V, MASKED), q1.dtype)
            acc2 = dot(weights, v2, acc2 * shrink[:, None])
    return acc1, acc2, new_top, total


@triton.jit
def store_rows(ptr, rows, values, keep, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr):
    d = FIRST + tl.arange(0, BLOCK_D)
    mask = keep[:, None] & (d < DIM)[None, :]
    tl.store(ptr + rows[:, None] + d[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def normalizer(top, total, keep, head, sinks_ptr, v_scale_ptr):
    """What turns a row's accumulator into its output, sinks and fp8 scale included; and the row's LSE."""
    shrink = 1.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=keep, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        top = new_top
    # total is 0 where a row saw no key; a NaN stays one.
    factor = tl.where(total == 0.0, 0.0, shrink / total)
    if v_scale_ptr is not None:
        factor *= tl.load(v_scale_ptr)
    return factor, (top + tl.log2(total)) * LN2


@triton.jit
def finish(
    acc1,
    acc2,
    top,
    total,
    keep,
    token,
    head,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    v_scale_ptr,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
):
    """Divide by the softmax's denominator and store the rows that are kept; token, head [m]."""
    factor, lse = normalizer(top, total, keep, head, sinks_ptr, v_scale_ptr)
    rows = token.to(tl.int64) * out_token_stride + head * out_head_stride
    store_rows(out_ptr, rows, acc1 * factor[:, None], keep, 0, DV1, HEAD_DIM_V)
    if DV2 > 0:
        store_rows(out_ptr, rows, acc2 * factor[:, None], keep, DV1, DV2, HEAD_DIM_V)
    if lse_ptr is not None:
        tl.store(lse_ptr + token.to(tl.int64) * lse_token_stride + head * lse_head_stride, lse, mask=keep)
