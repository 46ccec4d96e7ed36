# SPDX-License-Identifier: Apache-2.0
"""Attention with products in 8 bits, in torch: what a kernel that rounds in these places computes, and its budget.

The oracle of `reference.attention` says how far 8 bits are from exact attention. This says whether a kernel computes
what it means to: its errors against it are those of float32, except for a P that lies between two numbers of e4m3.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsl_backend.attention import reference
from dsl_backend.testing.check import Result, assert_others_kept
from dsl_backend.testing.inputs import Problem
from dsl_backend.testing.numerics import assert_errors_fit, assert_same_non_finite

LARGEST = 448.0  # of e4m3
LOG2_E = math.log2(math.e)
WGMMA_K = 32  # addends of one product in 8 bits, besides the accumulator
BITS = 13  # that SM90 keeps of a sum behind the first
SMALLEST_NORMAL, NO_EXPONENT = -6, -500  # exponents: of e4m3; of what has none
P_ULP = 2.0**-3  # of e4m3, relative at most
INVERSE_ERROR = 2.0**-21  # of a quotient that is a product with an inverse, relative
SUM_ROUNDING = 2.0**-9  # of row sums, whose first additions are in float16
# Rows that may have a P which float32 rounded to the other side: so many, and a part of all.
FLIPPED_ROWS, FLIPPED_PART = 2, 0.02


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Where a kernel rounds.

    Attributes:
        q: what shares a scale of the queries that the kernel quantizes: `row`, `head` or `tensor`; None for queries as
            they are, as always for those that arrive quantized.
        tile_n: keys of a tile.
        p_offset: P is e4m3, and 2^p_offset at row_max. None: P is float16, and 1 there.
        rescale_threshold: how far, in base 2, a score may exceed row_max before that follows.
        rounded_sums: row sums are those of the rounded P.
        accumulate_period: key tiles whose P V are summed in the accumulator of the tensor cores; 0: all.
        accumulator_bits: of a sum of 8-bit products in the tensor cores, behind the first one; None: exact.
        in_turn: parts that have key tiles in turn, the last key tile first, each with a row_max of its own. A request
            with several row tiles has them from where its causal mask ends, which is not modelled.
    """

    q: str | None = "row"
    tile_n: int = 64
    p_offset: float | None = 8.0
    rescale_threshold: float = 0.8
    rounded_sums: bool = True
    accumulate_period: int = 4
    accumulator_bits: int | None = BITS
    in_turn: int = 1


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3, saturated; in the same dtype."""
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype)


def quantized_q(q: torch.Tensor, shared_by: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads, dim] as e4m3 values and their scales [.., .., 1]; as they are with a scale of 1."""
    if shared_by is None:
        return q, q.new_ones(1, 1, 1)
    dims = {"row": (-1,), "head": (0, -1), "tensor": (0, 1, 2)}[shared_by]
    finite = q.abs().nan_to_num(0.0, 0.0, 0.0)
    scale = finite.amax(dims, keepdim=True).clamp(min=2.0**-100) / LARGEST
    return to_e4m3(q / scale), scale


def midway(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """By how much an element of the quantized queries may be another number, times its scale; 0 for most."""
    low, high = (to_e4m3(q / scale * (1 + side * INVERSE_ERROR)) for side in (-1, 1))
    return ((high - low).abs() * scale).nan_to_num(0.0, 0.0, 0.0)


class Online(NamedTuple):
    """Results of `online`: out [..., rows, dim_v], lse and the largest weight of a key [..., rows].

    Of `attention`, also how far scores of a row may be off, because an element of Q lies midway between two numbers of
    e4m3: the last bit of the kernel's inverse of a scale says to which of them it goes.
    """

    out: torch.Tensor
    lse: torch.Tensor
    largest_weight: torch.Tensor
    score_doubt: torch.Tensor | None = None


def tiles(keys: int, tile_n: int) -> Iterator[tuple[int, slice]]:
    """Key tiles from the last to the first: number and keys."""
    for tile in reversed(range(-(-keys // tile_n))):
        yield tile, slice(tile * tile_n, min(keys, (tile + 1) * tile_n))


def online(scores: torch.Tensor, v: torch.Tensor, arithmetic: Arithmetic, sink: torch.Tensor | None = None) -> Online:
    """Softmax of scores times V, tile by tile.

    Args:
        scores: [..., rows, keys] natural, -inf where masked; float64. v: [..., keys, dim_v], as they are stored.
        sink: [..., rows], a logit that joins the denominator.
    """
    all_tiles = list(tiles(scores.shape[-1], arithmetic.tile_n))
    parts = [partial(scores, v, arithmetic, all_tiles[one :: arithmetic.in_turn]) for one in range(arithmetic.in_turn)]
    return finished(*merged(parts), sink)


class Partial(NamedTuple):
    """Of some key tiles: O, row_max in base 2 as P is relative to it, row_sum, and the largest P."""

    acc: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    largest: torch.Tensor


def partial(
    scores: torch.Tensor, v: torch.Tensor, arithmetic: Arithmetic, some_tiles: Sequence[tuple[int, slice]]
) -> Partial:
    """What `online` gives before the division, of some key tiles; its arguments."""
    scores, offset = scores * LOG2_E, arithmetic.p_offset or 0.0
    row_max = scores.new_full(scores.shape[:-1], -torch.inf)
    row_sum, largest = torch.zeros_like(row_max), torch.zeros_like(row_max)
    total = scores.new_zeros((*scores.shape[:-1], v.shape[-1]))
    acc = total.clone()
    for tile, keys in some_tiles:
        s = scores[..., keys]
        tile_max = s.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1)
        moves = ~(tile_max - row_max <= arithmetic.rescale_threshold) & (tile_max > -torch.inf)
        moved = torch.where(moves, tile_max, row_max)
        rescale = torch.where(moves, torch.exp2(row_max - moved), 1.0)
        row_max = moved
        p = torch.exp2(s - torch.where(row_max.isinf(), 0.0, row_max)[..., None] + offset)
        rounded = p.half().double() if arithmetic.p_offset is None else to_e4m3(p)
        row_sum = row_sum * rescale + (rounded if arithmetic.rounded_sums else p).sum(-1)
        largest = torch.maximum(largest * rescale, p.nan_to_num(0.0).amax(-1))
        total, acc = total * rescale[..., None], acc * rescale[..., None]
        bits = None if arithmetic.p_offset is None else arithmetic.accumulator_bits
        acc = product(rounded, v[..., keys, :], bits, acc)
        if arithmetic.accumulate_period and tile % arithmetic.accumulate_period == 0:
            total, acc = total + acc, torch.zeros_like(acc)
    return Partial(total + acc, row_max - offset, row_sum, largest)


def merged(parts: Sequence[Partial]) -> Partial:
    """Partial results of the same rows, together."""
    if len(parts) == 1:
        return parts[0]
    row_max = torch.stack([one.row_max for one in parts]).amax(0)
    # Where no key is seen, row_max is -inf.
    scales = [torch.exp2(one.row_max - torch.where(row_max.isinf(), 0.0, row_max)) for one in parts]
    scaled = [
        (scale[..., None] * one.acc, scale * one.row_sum, scale * one.largest)
        for scale, one in zip(scales, parts, strict=True)
    ]
    acc, row_sum, largest = (torch.stack(list(each)) for each in zip(*scaled, strict=True))
    return Partial(acc.sum(0), row_max, row_sum.sum(0), largest.amax(0))


def finished(
    acc: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, largest: torch.Tensor, sink: torch.Tensor | None
) -> Online:
    """Divide O by the row sum, which a sink joins."""
    if sink is not None:
        row_sum = row_sum + torch.exp2(sink * LOG2_E - torch.where(row_max.isinf(), sink * LOG2_E, row_max))
        row_max = torch.where(row_max.isinf(), sink * LOG2_E, row_max)
    empty = row_sum == 0
    out = torch.where(empty[..., None], 0.0, acc / torch.where(empty, 1.0, row_sum)[..., None])
    return Online(out, (row_max + row_sum.log2()) / LOG2_E, torch.where(empty, 0.0, largest / row_sum))


def product(a: torch.Tensor, b: torch.Tensor, bits: int | None, acc: torch.Tensor | None = None) -> torch.Tensor:
    """Acc + a [..., m, k] times b [..., k, n] of e4m3 values, float64, as SM90 adds: 32 of k at once.

    An H200's sums are these, bit for bit (emulator/machine/narrow_sums.py). Addends and the accumulator are cut `bits`
    below the largest exponent, which of a product is the sum of its factors'. The sum is cut below its own first bit.
    """
    acc = a.new_zeros((*a.shape[:-1], b.shape[-1])) if acc is None else acc
    if bits is None:
        return acc + a @ b
    for first in range(0, a.shape[-1], WGMMA_K):
        one, other = a[..., first : first + WGMMA_K], b[..., first : first + WGMMA_K, :]
        exponents = exponents_of(one)[..., None] + exponents_of(other)[..., None, :, :]
        unit = torch.exp2(torch.maximum(exponents.amax(-2), leading(acc)).double() - bits)
        addends = torch.trunc(one[..., None] * other[..., None, :, :] / unit[..., None, :])
        total = (addends.sum(-2) + torch.trunc(acc / unit)) * unit
        unit = torch.exp2(leading(total).double() - bits)
        acc = torch.trunc(total / unit) * unit
    return acc


def exponents_of(factors: torch.Tensor) -> torch.Tensor:
    """Of e4m3 values, those of subnormals that of the smallest normal; far below all others of 0 and NaN."""
    found = leading(factors)
    return torch.where(found > NO_EXPONENT, found.clamp(min=SMALLEST_NORMAL), NO_EXPONENT)


def leading(values: torch.Tensor) -> torch.Tensor:
    """The exponent of the first bit; NO_EXPONENT of 0 and NaN."""
    usable = values.isfinite() & (values != 0)
    return torch.where(usable, torch.frexp(values.nan_to_num()).exponent - 1, NO_EXPONENT)


def attention(problem: Problem, arithmetic: Arithmetic) -> Online:
    """A problem's attention; out [rows, heads_q, head_dim_v], lse and largest weight [rows, heads_q], float64."""
    spec, batch = problem.spec, problem.batch
    assert problem.k_scale is not None
    assert problem.v_scale is not None
    shared_by = None if spec.is_fp8_q else arithmetic.q
    q, q_scale = quantized_q(problem.q.double(), shared_by)
    q_scale = q_scale.expand(*q.shape[:2], 1)
    moved = torch.zeros_like(q) if shared_by is None else midway(problem.q.double(), q_scale)
    out = q.new_zeros((*q.shape[:2], spec.head_dim_v))
    lse, largest, doubt = (torch.full_like(out[..., 0], value) for value in (-torch.inf, 0.0, 0.0))
    first = 0
    for request, (q_len, kv_len) in enumerate(zip(problem.q_lens, problem.kv_lens, strict=True)):
        mine, first = slice(first, first + q_len), first + q_len
        if not q_len:
            continue
        k, v = (
            reference.gather_keys(rows, spec, batch, request, kv_len).double()
            for rows in (problem.keys, problem.values)
        )
        rows, scale, gaps = (
            one[mine].unflatten(1, (spec.heads_kv, spec.group)).permute(1, 2, 0, 3) for one in (q, q_scale, moved)
        )
        products = product(rows, k.permute(1, 2, 0)[:, None], arithmetic.accumulator_bits) * scale
        for stored in (problem.k_scale, problem.q_scale):
            if stored is not None:
                products = products * reference.own_scale(spec, stored, request).double()[:, None, None]
        scores, keep = reference.masked_scores(spec, batch, request, products, problem.alibi_slopes)
        # The kernel sets what no query sees to 0.
        v = torch.where(keep.any(0)[:, None, None], v, 0.0).transpose(0, 1)[:, None]
        sink = None
        if problem.sinks is not None:
            sink = problem.sinks.double().view(spec.heads_kv, spec.group, 1).expand(-1, -1, q_len)
        found = online(scores, v, arithmetic, sink)
        values = found.out * reference.own_scale(spec, problem.v_scale, request).double()[:, None, None]
        out[mine] = values.permute(2, 0, 1, 3).flatten(1, 2)
        # A request may have no keys.
        most = torch.cat([k.new_zeros(1, *k.shape[1:]), k.abs().nan_to_num(0.0, 0.0, 0.0)]).amax(0)
        most = most * reference.own_scale(spec, problem.k_scale, request).double() * abs(spec.scale)
        doubts = (gaps * most[:, None, None]).sum(-1)
        for target, source in ((lse, found.lse), (largest, found.largest_weight), (doubt, doubts)):
            target[mine] = source.permute(2, 0, 1).flatten(1, 2)
    return Online(out, lse, largest, doubt)


def judge(result: Result, problem: Problem, arithmetic: Arithmetic, flipped_part: float = FLIPPED_PART) -> None:
    """Raises AssertionError where a result is not what the arithmetic gives.

    Each row has the budget of its output's rounding and of the row sum's, and of scores that are in doubt. Some may
    have that of one P, the largest, rounded to the other side.

    Args:
        flipped_part: such rows, as a part of all.
    """
    mine, expected = problem.owned(), attention(problem, arithmetic)
    assert_others_kept(result, mine)
    out, exact = result.out_near(expected.out)[mine].flatten(0, 1).double(), expected.out[mine].flatten(0, 1)
    lse, exact_lse = result.lse[mine].flatten().double(), expected.lse[mine].flatten()
    assert_same_non_finite(out, exact, "out")
    assert_same_non_finite(lse, exact_lse, "lse")
    largest = torch.where(exact.isfinite(), exact.abs(), 0.0).amax(-1)
    values = largest_value(problem)
    assert expected.score_doubt is not None
    doubt = expected.score_doubt[mine].flatten()
    flip = 2 * P_ULP * expected.largest_weight[mine].flatten()
    strict = (2 * torch.finfo(problem.spec.dtype).eps + SUM_ROUNDING) * largest + 1e-3 * values * flip
    strict_lse = SUM_ROUNDING + 1e-6 * exact_lse.nan_to_num(0.0, 0.0, 0.0).abs()
    # P of scores that are off are rounded to other numbers too.
    strict += (torch.expm1(2 * doubt) + (doubt > 0) * P_ULP) * values
    strict_lse += doubt + (doubt > 0) * P_ULP
    for what, found, right, budget, flipped in (
        ("out", out, exact, strict, flip * values),
        ("lse", lse[:, None], exact_lse[:, None], strict_lse, flip),
    ):
        assert_errors_fit(found, right, budget + flipped, what)
        error = torch.where(right.isfinite(), (found - right).abs(), 0.0).amax(-1)
        count, rows = int((error > budget).sum()), len(error)
        assert count <= FLIPPED_ROWS + flipped_part * rows, (
            f"{what}: {count} of {rows} rows are further off than rounding explains"
        )


def largest_value(problem: Problem) -> float:
    """The largest finite magnitude of the values that a request has."""
    found = 0.0
    assert problem.v_scale is not None
    for request, (q_len, kv_len) in enumerate(zip(problem.q_lens, problem.kv_lens, strict=True)):
        if q_len and kv_len:
            rows = reference.gather_keys(problem.values, problem.spec, problem.batch, request, kv_len).double()
            v_scale = reference.own_scale(problem.spec, problem.v_scale, request).double()
            finite = (rows * v_scale)[problem.first_key(q_len, kv_len) :]
            found = max(found, float(finite.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if finite.numel() else 0.0)
    return found
