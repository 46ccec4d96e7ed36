# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's kernels for SM90 and SM100, as flash-attn-4 ships them.

The reference is torch in float64; the yardstick is torch in bfloat16, every step of it.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peer_budgets import Expected
from peer_cases import SM90, SM100, Problem, Table, normal

FLASH = Table()
# FA4 for SM100 computes part of its exponentials with a polynomial of degree 3, of relative error 8.8e-5 (the minimax
# error on [0, 1)): as much may the log of their sum be off.
POLYNOMIAL_ERROR = {SM90: 0.0, SM100: 8.8e-5}
# Of tanh.approx, relative: 2^-11 by the ISA, 2^-16.6 at most on an H200 (docs/emulator-chip.md).
TANH_ERROR = 2.0**-16


@dataclass(frozen=True)
class Attention:
    """A dense or ragged problem.

    Attributes:
        queries, keys: lengths, one a sequence of the batch.
        head_dims: of q and k, and of v.
        window: keys to the left and to the right, None without bound.
        absorbed: multi-head latent attention with its weights absorbed: the values are the last elements of the keys.
        options: of the call that the reference does not need.
    """

    queries: tuple[int, ...] = (256,)
    keys: tuple[int, ...] = (256,)
    heads: int = 2
    kv_heads: int = 2
    head_dims: tuple[int, int] = (128, 128)
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sink: bool = False
    absorbed: bool = False
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)


Rows = tuple[torch.Tensor, torch.Tensor]


def reference(
    problem: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    dtype: torch.dtype,
    scale: float | None = None,
) -> Rows:
    """Attention of one sequence, every step in the dtype.

    q: [n, heads, d]; k: [m, kv_heads, d]; v: [m, kv_heads, dv]; sink: [heads].
    Returns: out [n, heads, dv] and log-sum-exp [heads, n] (in float32 at least).
    """
    group = problem.heads // problem.kv_heads
    queries, keys, values = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = queries @ keys.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    n, m = scores.shape[1:]
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    left, right = problem.window
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if problem.causal or right is not None:
        hidden |= distance > (0 if problem.causal else right)
    if left is not None:
        hidden |= distance < -left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink.to(dtype)[:, None, None].expand(-1, n, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        total = torch.cat([scores, column], -1)
    else:
        weights, total = scores.softmax(-1), scores
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    lse = total.to(wide).logsumexp(-1)
    if problem.dtype.itemsize == 1:
        return weighted_in_8_bits(scores, values, problem.dtype).transpose(0, 1), lse
    return (weights.nan_to_num() @ values).transpose(0, 1), lse


KEYS = 128  # of a tile
RAISED, LATE = 8, 4  # powers of two


def weighted_in_8_bits(scores: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What FlashAttention-4 defines for 8-bit inputs: softmax(scores) @ values with weights that are cut off.

    Tiles of keys come from the last to the first. Weights are 2**RAISED times themselves, against a maximum that is
    raised only where it grows by more than 2**LATE: they may be up to 2**12, and beyond e4m3's 448 they become that,
    while their sum takes them whole.

    scores: [heads, n, m]; values: [heads, m, dv].
    """
    scores = scores * math.log2(math.e)
    most = torch.full_like(scores[..., :1], -torch.inf)
    total, out = torch.zeros_like(most), 0 * scores[..., :1] * values[:, :1]
    for start in reversed(range(0, scores.shape[-1], KEYS)):
        tile = scores[..., start : start + KEYS]
        now = tile.amax(-1, keepdim=True)
        raised = torch.where(now - most > LATE, now, most)
        change, most = torch.exp2(most - raised), raised
        weights = torch.exp2(tile - most + RAISED)
        kept = weights.clamp(max=torch.finfo(dtype).max).float().to(dtype).to(scores.dtype)
        total = total * change + weights.sum(-1, keepdim=True)
        out = out * change + kept @ values[:, start : start + KEYS]
    return out / total


Inputs = dict[str, Any]
Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attention(arch: str, problem: Attention, arrange: Callable[[Attention, Inputs], Inputs] | None = None) -> Problem:
    """A problem of `flash_attn.cute`'s forward.

    Sequences of one length are a batch, of several lengths are packed with `cu_seqlens`, unless `arrange` says
    otherwise: it gets the sequences' tensors as lists q, k, v and returns the arguments of the call, with `take`, a
    function that gets each sequence's part of an output.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    d, dv = problem.head_dims
    # torch has few operators for 8 bits: references take what the rounded inputs are in bfloat16, which holds them.
    dtype, wide = problem.dtype, problem.dtype if problem.dtype.itemsize > 1 else torch.bfloat16
    qs = [normal(n, problem.heads, d).to(dtype) for n in problem.queries]
    ks = [normal(m, problem.kv_heads, d).to(dtype) for m in problem.keys]
    vs = [k[..., d - dv :] if problem.absorbed else normal(*k.shape[:2], dv).to(dtype) for k in ks]
    sink = normal(problem.heads).to(torch.bfloat16) if problem.sink else None
    given = (arrange or packed_or_batch)(problem, {"q": qs, "k": ks, "v": vs})
    take = given.pop("take", None) or (lambda out, lse: (out, lse))
    options = {**given, **problem.options}
    if problem.absorbed:
        # What the keys share with the values is not passed twice.
        options["q"], options["qv"] = options["q"].split((d - dv, dv), -1)
        options["k"] = options["k"][..., : d - dv]
    if problem.causal:
        options["causal"] = True
    if problem.window != (None, None):
        options["window_size_left"], options["window_size_right"] = problem.window
    if problem.softcap:
        options["softcap"] = problem.softcap
    if sink is not None:
        options["learnable_sink"] = sink

    def call(**options: Any) -> dict[str, torch.Tensor]:
        out, lse = _flash_attn_fwd(**options, return_lse=True)[:2]
        # The kernel with weights absorbed gives [..., queries, heads], the others [..., heads, queries].
        out, lse = take(out, lse.mT if problem.absorbed else lse)
        return {"out": out, "lse": lse}

    exact, naive, single = (
        [reference(problem, q, k, v, sink, kind) for q, k, v in zip(qs, ks, vs, strict=True)]
        for kind in (torch.float64, wide, torch.float32)
    )
    # The products that a score is the sum of are larger than the sum.
    size = max(float(q.double().abs().max() * k.double().abs().max()) for q, k in zip(qs, ks, strict=True)) * d**-0.5
    # Of the log of their sum no more than of the largest score, which is smaller.
    capped = TANH_ERROR * max(float(one[1].max()) for one in exact) if problem.softcap else 0.0
    return Problem(
        call,
        options,
        {
            "out": Expected(torch.cat([one[0] for one in exact]), torch.cat([one[0] for one in naive])),
            "lse": Expected(
                torch.cat([one[1] for one in exact], 1),
                torch.cat([one[1] for one in single], 1),
                magnitude=size,
                absolute=POLYNOMIAL_ERROR[arch] + capped,
            ),
        },
    )


def packed_or_batch(problem: Attention, inputs: Inputs) -> Inputs:
    if len(set(problem.queries)) == len(set(problem.keys)) == 1:
        return batch(problem, inputs)
    return packed(problem, inputs)


def batch(problem: Attention, inputs: Inputs) -> Inputs:
    """One tensor [batch, length, heads, d] each."""

    def take(out: torch.Tensor, lse: torch.Tensor) -> Rows:
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    return {**{name: torch.stack(parts) for name, parts in inputs.items()}, "take": take}


def packed(problem: Attention, inputs: Inputs) -> Inputs:
    """One tensor [total, heads, d] each, and where each sequence begins."""
    return {
        **{name: torch.cat(parts) for name, parts in inputs.items()},
        "cu_seqlens_q": starts(problem.queries),
        "cu_seqlens_k": starts(problem.keys),
        "max_seqlen_q": max(problem.queries),
        "max_seqlen_k": max(problem.keys),
    }


def padded(problem: Attention, inputs: Inputs) -> Inputs:
    """One tensor [batch, length, heads, d] each, of which the sequences use a part."""

    def pad(parts: list[torch.Tensor], length: int) -> torch.Tensor:
        return torch.stack([torch.cat([x, 9 * torch.ones_like(x[:1]).expand(length - len(x), -1, -1)]) for x in parts])

    lengths = {"q": max(problem.queries), "k": max(problem.keys), "v": max(problem.keys)}

    def take(out: torch.Tensor, lse: torch.Tensor) -> Rows:
        parts = [(one[:n], sums[:, :n]) for one, sums, n in zip(out, lse, problem.queries, strict=True)]
        return torch.cat([one for one, _ in parts]), torch.cat([sums for _, sums in parts], 1)

    return {
        **{name: pad(parts, lengths[name] + 40) for name, parts in inputs.items()},
        "seqused_q": torch.tensor(problem.queries).int(),
        "seqused_k": torch.tensor(problem.keys).int(),
        "take": take,
    }


def paged(page: int) -> Callable[[Attention, Inputs], Inputs]:
    """Queries are packed; keys and values lie in pages of a cache, out of order."""

    def arrange(problem: Attention, inputs: Inputs) -> Inputs:
        counts = [-(-m // page) for m in problem.keys]
        order = torch.randperm(sum(counts)).split(counts)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        caches = {}
        for name in ("k", "v"):
            parts = inputs[name]
            cache = torch.full((sum(counts), page, *parts[0].shape[1:]), 9.0).to(parts[0].dtype)
            for row, (part, pages) in enumerate(zip(parts, order, strict=True)):
                table[row, : len(pages)] = pages
                for index, number in enumerate(pages):
                    piece = part[index * page : (index + 1) * page]
                    cache[number, : len(piece)] = piece
            caches[name] = cache
        return {
            "q": torch.cat(inputs["q"]),
            **caches,
            "page_table": table,
            "cu_seqlens_q": starts(problem.queries),
            "max_seqlen_q": max(problem.queries),
            "seqused_k": torch.tensor(problem.keys).int(),
        }

    return arrange


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@FLASH.case(quick=(SM90, SM100))
def flash_dense(arch: str) -> Problem:
    """One sequence of 256 queries and keys, 2 heads of 128, bfloat16."""
    return attention(arch, Attention())


@FLASH.case()
def flash_causal(arch: str) -> Problem:
    """The same with a causal mask: whole, partial and skipped tiles."""
    return attention(arch, Attention(causal=True))


@FLASH.case(SM100)
def flash_fp8(arch: str) -> Problem:
    """In e4m3, against `weighted_in_8_bits`: exact attention is up to 0.2 away, in rows whose weights are cut off."""
    return attention(arch, Attention(queries=(128,), keys=(384,), dtype=torch.float8_e4m3fn))


@FLASH.case(quick=(SM90,))
def flash_gqa(arch: str) -> Problem:
    """Four heads of queries share one of keys, and a tile; causal."""
    return attention(arch, Attention(heads=4, kv_heads=1, queries=(128,), causal=True))


@FLASH.case()
def flash_hd64(arch: str) -> Problem:
    """Heads of 64."""
    return attention(arch, Attention(head_dims=(64, 64)))


@FLASH.case()
def flash_hd96(arch: str) -> Problem:
    """Heads of 96."""
    return attention(arch, Attention(head_dims=(96, 96)))


@FLASH.case()
def flash_hd192_128(arch: str) -> Problem:
    """Keys of 192 and values of 128; causal."""
    return attention(arch, Attention(head_dims=(192, 128), causal=True))


@FLASH.case()
def flash_f16(arch: str) -> Problem:
    """float16."""
    return attention(arch, Attention(dtype=torch.float16))


@FLASH.case()
def flash_partial_tiles(arch: str) -> Problem:
    """129 queries and 201 keys in a batch of two: tiles that are not full; causal."""
    return attention(arch, Attention(queries=(129,) * 2, keys=(201,) * 2, causal=True))


@FLASH.case()
def flash_varlen(arch: str) -> Problem:
    """Packed sequences of 1, 130 and 64 queries, by `cu_seqlens`; causal, grouped heads."""
    return attention(arch, Attention(queries=(1, 130, 64), keys=(77, 130, 200), heads=2, kv_heads=1, causal=True))


@FLASH.case()
def flash_window(arch: str) -> Problem:
    """A window of 70 keys to the left."""
    return attention(arch, Attention(queries=(256,), keys=(256,), window=(70, 0)))


@FLASH.case()
def flash_softcap(arch: str) -> Problem:
    """Scores are capped by tanh."""
    return attention(arch, Attention(queries=(128,), keys=(256,), softcap=15.0))


@FLASH.case()
def flash_sink(arch: str) -> Problem:
    """A learned sink for each head; causal."""
    return attention(arch, Attention(queries=(128,), keys=(256,), sink=True, causal=True))


@FLASH.case()
def flash_used_lengths(arch: str) -> Problem:
    """Padded batches whose lengths are given by `seqused`; causal."""
    return attention(arch, Attention(queries=(100, 30), keys=(150, 200), causal=True), padded)


@FLASH.case(quick=(SM100,))
def flash_paged(arch: str) -> Problem:
    """Pages as long as a tile of keys, which TMA copies."""
    page = 128
    return attention(arch, Attention(queries=(3, 100), keys=(200, 300), heads=4, kv_heads=2, causal=True), paged(page))


@FLASH.case(known=dict.fromkeys((SM90, SM100), ("PROXY", "RACE")))
def flash_small_pages(arch: str) -> Problem:
    """Pages of 16 keys, which threads gather with cp.async.

    The kernel hands over with cp.async.mbarrier.arrive alone: nothing orders the generic proxy's writes before the
    reads of the tensor core (no fence.proxy.async), and the zeros that ordinary stores write past a sequence's end are
    not what that arrival waits for.
    """
    return attention(arch, Attention(queries=(3, 100), keys=(70, 130), heads=4, kv_heads=2, causal=True), paged(16))


@FLASH.case(known=dict.fromkeys((SM90, SM100), ("UNINITIALISED",)))
def flash_combine(arch: str) -> Problem:
    """The kernel that combines splits of the keys. What makes them does not compile with CuTe DSL 4.6.0.

    Threads of rows past the end branch on sums that nobody has loaded, and throw away what follows.
    """
    from flash_attn.cute.interface import flash_attn_combine

    parts, lse = normal(3, 1, 70, 4, 64), 4 * normal(3, 1, 4, 70).mT
    # A split that saw no key.
    parts[1, :, 5], lse[1, :, 5] = 0.0, -torch.inf

    def want(dtype: torch.dtype) -> Rows:
        weights = lse.to(dtype).softmax(0)
        return (weights[..., None] * parts.to(dtype)).sum(0), lse.to(dtype).logsumexp(0)

    (exact, total), (naive, _), (_, single) = want(torch.float64), want(torch.bfloat16), want(torch.float32)

    def call(parts: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
        out, sums = flash_attn_combine(parts, lse, out_dtype=torch.bfloat16)
        return {"out": out, "lse": sums}

    return Problem(
        call,
        {"parts": parts, "lse": lse},
        {"out": Expected(exact, naive), "lse": Expected(total, single, magnitude=float(lse.max()))},
    )


@FLASH.case(SM100)
def flash_2cta(arch: str) -> Problem:
    """Pairs of CTAs multiply together."""
    return attention(arch, Attention(queries=(512,), keys=(256,), heads=1, kv_heads=1))


@FLASH.case(SM100)
def flash_hd256_2cta(arch: str) -> Problem:
    """Heads of 256, on pairs of CTAs."""
    return attention(arch, Attention(head_dims=(256, 256), heads=1, kv_heads=1))


@FLASH.case(SM90)
def flash_hd256(arch: str) -> Problem:
    """Heads of 256."""
    return attention(arch, Attention(head_dims=(256, 256), queries=(128,), keys=(160,), heads=1, kv_heads=1))


@FLASH.case(SM100, quick=(SM100,))
def flash_absorbed_mla(arch: str) -> Problem:
    """Multi-head latent attention with its weights absorbed: 128 heads, keys of 576, values their last 512."""
    return attention(
        arch, Attention(head_dims=(576, 512), queries=(2,), keys=(200,), heads=128, kv_heads=1, absorbed=True)
    )


@FLASH.case(SM100)
def flash_absorbed_mla_causal(arch: str) -> Problem:
    """The same for 32 heads and 5 queries; causal."""
    return attention(
        arch,
        Attention(head_dims=(576, 512), queries=(5,), keys=(160,), heads=32, kv_heads=1, absorbed=True, causal=True),
    )


@FLASH.case(SM100)
def flash_cluster_launch_control(arch: str) -> Problem:
    """Tiles are handed out by cluster launch control; causal."""
    os.environ["FA_CLC"] = "1"
    return attention(arch, Attention(queries=(512,), keys=(256,), heads=3, kv_heads=3, causal=True))


def backward(arch: str, problem: Attention) -> Problem:
    """Gradients of one sequence, from torch's own output and log-sum-exp."""
    from flash_attn.cute.interface import _flash_attn_bwd

    d, dv = problem.head_dims
    given = [
        normal(length, heads, width).to(problem.dtype)
        for length, heads, width in (
            (problem.queries[0], problem.heads, d),
            (problem.keys[0], problem.kv_heads, d),
            (problem.keys[0], problem.kv_heads, dv),
        )
    ]
    slope = normal(problem.queries[0], problem.heads, dv).to(problem.dtype)

    def want(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], Rows]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        rows = reference(problem, *leaves, None, dtype)
        return torch.autograd.grad(rows[0], leaves, slope.to(dtype)), (rows[0].detach(), rows[1].detach())

    (exact, (out, lse)), (naive, _) = want(torch.float64), want(problem.dtype)
    q, k, v, dout, o = (x[None] for x in (*given, slope, out.to(problem.dtype)))
    inputs = {"q": q, "k": k, "v": v, "out": o, "dout": dout, "lse": lse.float()[None]}

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        made = _flash_attn_bwd(**given, causal=problem.causal)[:3]
        return {name: gradient[0] for name, gradient in zip(("dq", "dk", "dv"), made, strict=True)}

    # A score's gradient is a difference; where it is zero, such as under a single key, float32's rounding remains.
    group = problem.heads // problem.kv_heads
    slopes = torch.einsum("nhd,mhd->hnm", slope.float(), v[0].float().repeat_interleave(group, 1))
    rounding = 4 * torch.finfo(torch.float32).eps * float(slopes.abs().max() * k.abs().max()) * d**-0.5
    names = ("dq", "dk", "dv")
    return Problem(
        call,
        inputs,
        {name: Expected(exact[index], naive[index], absolute=rounding) for index, name in enumerate(names)},
    )


UNFINISHED = ("ALIGNED", "UNFINISHED")


@FLASH.case(known={SM90: ("RACE",), SM100: UNFINISHED})
def flash_backward(arch: str) -> Problem:
    """The backward pass, with the kernels that prepare and finish it.

    On SM100 it elects a lane to make copies for which CuTe DSL elects one again, and ends with a store that it neither
    commits nor waits for. In what prepares it, threads beyond a tile's rows (80 on SM90) write the next tile's
    log-sum-exps as well: the same values.
    """
    return backward(arch, Attention(queries=(128,), keys=(128,)))


@FLASH.case(known={SM90: ("RACE",), SM100: ("RACE", *UNFINISHED)})
def flash_backward_causal_gqa(arch: str) -> Problem:
    """The same over two tiles of queries, and over two of what prepares it (128 rows on SM100).

    So SM100 has the log-sum-exps that are written twice as well.
    """
    return backward(arch, Attention(queries=(200,), keys=(200,), heads=2, kv_heads=1, causal=True))
