# SPDX-License-Identifier: Apache-2.0
"""Error budgets that are computed from the problem: how wrong may a kernel be?"""

import torch

from dsl_backend.quant.format import E2M1_MAX, is_fp8
from dsl_backend.quant.reference import E2M1


def per_row(values: torch.Tensor) -> torch.Tensor:
    """The largest value of each row: [rows, ...] -> [rows]; 0 for rows without elements."""
    return values.flatten(1).amax(1) if values[:1].numel() else values.new_zeros(values.shape[0])


def assert_same_non_finite(out: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """NaN exactly where the oracle is NaN, and the same infinities."""
    for kind, found, expected in (
        ("NaN", out.isnan(), exact.isnan()),
        ("+inf", out == torch.inf, exact == torch.inf),
        ("-inf", out == -torch.inf, exact == -torch.inf),
    ):
        wrong = found != expected
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {kind} differs at {int(wrong.sum())} of {wrong.numel()} elements, in rows "
                f"{ranges(wrong)}; first at {where}: {float(out[where])} where {float(exact[where])} is right"
            )


def ranges(wrong: torch.Tensor) -> str:
    """Rows with an element set, as text: `0-3, 7`. wrong: bool [rows] or [rows, ...]."""
    rows = wrong[:, None].flatten(1).any(1).nonzero().flatten().tolist()
    spans: list[list[int]] = []
    for row in rows:
        if spans and spans[-1][1] == row - 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    text = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(text[:12]) + (f", ... ({len(rows)} rows)" if len(text) > 12 else "")


def assert_errors_fit(out: torch.Tensor, exact: torch.Tensor, budget: torch.Tensor, what: str) -> None:
    """|out - exact| <= budget where both are finite. out, exact: [rows, ...]; budget: [rows] or of out's shape."""
    out = out.double()
    finite = exact.isfinite() & out.isfinite()
    error = torch.where(finite, (out.double() - exact.double()).abs(), 0.0)
    if budget.dim() == 1:
        budget = budget.view(-1, *[1] * (out.dim() - 1))
    excess = error - budget.expand_as(error)
    wrong = excess > 0
    if wrong.any():
        where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are further from the oracle than the budget, "
            f"in rows {ranges(wrong)}; "
            f"worst at {where}: {float(out[where]):.6g} where {float(exact[where]):.6g} is right, "
            f"error {float(error[where]):.3g}, budget {float(budget.expand_as(error)[where]):.3g}"
        )


def before_rounding(stored: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The numbers, float64, of which `stored` are the nearest in e4m3, saturated, and which are nearest to `exact`."""
    values = stored.double()
    # Half of the distance to the next number, of subnormals too. That to a smaller one may be half of it.
    exponent = torch.where(values == 0, -5, torch.frexp(values.nan_to_num()).exponent.clamp(min=-5))
    half = torch.exp2(exponent.double() - 5)
    limit = torch.finfo(stored.dtype).max
    low = torch.where(values == -limit, -torch.inf, values - half)
    high = torch.where(values == limit, torch.inf, values + half)
    return torch.where(exact.isnan() | values.isnan(), values, exact.clamp(low, high))


def block_before_rounding(elements: torch.Tensor, scales: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The numbers, float64, that `elements` with `scales` are in NVFP4, and which are nearest to `exact`.

    The largest magnitude of a block was within half a step of its scale as well: its number is the worse of both.

    Args:
        elements: [..., dim / 2] bytes. scales: [..., dim / 16] e4m3. exact: [..., dim], times the scale of outputs.
    """
    codes = torch.stack((elements & 15, elements >> 4), -1).flatten(-2).long()
    known = torch.tensor(E2M1, dtype=torch.float64, device=exact.device)
    middles = (known[1:] + known[:-1]) / 2
    infinite = known.new_tensor([torch.inf])
    low, high = torch.cat([-middles[:1], middles])[codes & 7], torch.cat([middles, infinite])[codes & 7]
    negative = codes > 7
    low, high = torch.where(negative, -high, low), torch.where(negative, -low, high)
    blocks, scale = exact.unflatten(-1, (-1, 16)), scales.double()[..., None]
    low, high = (bound.unflatten(-1, (-1, 16)) * scale for bound in (low, high))
    # A scale of 0 says nothing about the elements.
    low, high = low.masked_fill(scale == 0, -torch.inf), high.masked_fill(scale == 0, torch.inf)
    found = torch.where(blocks.isnan(), blocks, blocks.clamp(low, high))
    largest, where = blocks.abs().max(-1, keepdim=True)
    by_scale = E2M1_MAX * before_rounding(scales, (largest / E2M1_MAX).squeeze(-1))[..., None]
    by_scale = by_scale.copysign(blocks.gather(-1, where))
    own, exactly = found.gather(-1, where), blocks.gather(-1, where)
    worse = torch.where((by_scale - exactly).abs() > (own - exactly).abs(), by_scale, own)
    found = found.scatter(-1, where, worse)
    # One NaN makes its block's scale one.
    return torch.where(scale.isnan(), torch.nan, found).flatten(-2)


def assert_within_budget(
    out: torch.Tensor,
    exact: torch.Tensor,
    naive: torch.Tensor,
    ulps: float = 2,
    factor: float = 2,
    *,
    what: str = "out",
) -> None:
    """An output's error is at most `factor` times that of eager torch in the output's dtype, plus `ulps`.

    The budget is taken row by row, from the row's largest naive error and its largest exact magnitude: a query that
    sees one key has outputs tens of times larger than one that averages a thousand, and would hide its errors.

    Args:
        out: [rows, ...], what is judged.
        exact: the float64 oracle, out's shape. Where it is NaN or infinite, out must be the same; nowhere else.
        naive: the same maths in torch with every intermediate in out's dtype, out's shape.

    Raises:
        AssertionError: says where, how much, and what the budget was.
    """
    assert out.shape == exact.shape == naive.shape, f"{what}: {out.shape=}, {exact.shape=}, {naive.shape=}"
    assert_same_non_finite(out, exact, what)
    if out.numel() == 0:
        return
    exact = exact.double()
    assert_errors_fit(out, exact, error_budget(out.dtype, exact, naive, ulps, factor), what)


def error_budget(
    dtype: torch.dtype, exact: torch.Tensor, naive: torch.Tensor, ulps: float = 2, factor: float = 2
) -> torch.Tensor:
    """[rows] float64: the largest error of `assert_within_budget`, for outputs of a dtype."""
    # A naive computation that overflowed says nothing about its rounding.
    usable = exact.isfinite() & naive.isfinite()
    error = per_row(torch.where(usable, (naive.double() - exact.double()).abs(), 0.0))
    largest = per_row(torch.where(exact.isfinite(), exact.double().abs(), 0.0))
    return factor * error + ulps * torch.finfo(dtype).eps * largest


def error_over_budget(out: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor, ulps: float = 2) -> float:
    """The largest error of an output as a share of its budget: at most 1 where `assert_within_budget` accepts it.

    Raises:
        AssertionError: NaN or infinities differ.
    """
    assert_same_non_finite(out, exact, "out")
    if out.numel() == 0:
        return 0.0
    exact = exact.double()
    error = per_row(torch.where(exact.isfinite(), (out.double() - exact).abs(), 0.0))
    share = error / error_budget(out.dtype, exact, naive, ulps)
    return float(torch.where(error == 0, 0.0, share).max())


def assert_lse_within_budget(
    lse: torch.Tensor,
    exact: torch.Tensor,
    single: torch.Tensor,
    magnitude: torch.Tensor,
    ulps: float = 2,
    factor: float = 2,
    *,
    what: str = "lse",
) -> None:
    """A log-sum-exp's absolute error fits float32 arithmetic, not that of the 16-bit outputs.

    It is a float32 result by which outputs are combined later, and it shows best a wrongly masked
    key: one of two thousand moves it by 5e-4, which 16-bit arithmetic would forgive. The yardstick is therefore the
    same maths in torch in float32 (the dtype of the result), plus the rounding that another order of summation may
    bring: `ulps` of float32 at the size of the sums on the way, `magnitude`.

    Args:
        lse: [rows, heads] float32, what is judged.
        exact: float64 oracle.
        single: the reference in float32.
        magnitude: [rows], from `inputs.Problem.score_magnitude`: a bound on the scores' partial sums, times the root
            of their number of terms (the probabilistic rounding bound of Higham & Mary, 2019).
    """
    assert lse.shape == exact.shape == single.shape, f"{what}: {lse.shape=}, {exact.shape=}, {single.shape=}"
    assert_same_non_finite(lse, exact, what)
    if lse.numel() == 0:
        return
    usable = exact.isfinite() & single.isfinite()
    error = per_row(torch.where(usable, (single.double() - exact).abs(), 0.0))
    largest = per_row(torch.where(exact.isfinite(), exact.abs(), 0.0))
    finite_magnitude = torch.where(magnitude.isfinite(), magnitude.double(), 0.0)
    budget = factor * error + ulps * torch.finfo(torch.float32).eps * (largest + finite_magnitude)
    assert_errors_fit(lse, exact, budget, what)


def assert_rounded_once(
    out: torch.Tensor,
    exact: torch.Tensor,
    single: torch.Tensor,
    ulps: float = 2,
    factor: float = 2,
    *,
    truncated: bool = False,
    what: str,
) -> None:
    """An output is a float32 result that was rounded once to its dtype.

    Its error is at most that of the nearest number of its dtype, and `factor` times that of float32 arithmetic in
    torch, plus `ulps` of float32 at the row's largest magnitude. An output that was rounded to 16 bits on the way, or
    truncated, is found.

    Args:
        out: [rows, ...], what is judged; e4m3 is saturated.
        exact: the float64 oracle, out's shape. Where it is NaN, or infinite in out's dtype, out must be the same;
            nowhere else.
        single: the same maths in float32, out's shape.
        truncated: bfloat16 is, as in Triton's interpreter.

    Raises:
        AssertionError: says where, how much, and what the budget was.
    """
    assert out.shape == exact.shape == single.shape, f"{what}: {out.shape=}, {exact.shape=}, {single.shape=}"
    exact, single = exact.double(), single.double()
    if is_fp8(out.dtype):
        largest_number = torch.finfo(out.dtype).max
        exact, single = (one.clamp(-largest_number, largest_number) for one in (exact, single))
    # By way of float32: torch rounds float64 to the narrower types by way of it as well.
    nearest = exact.float().to(out.dtype).double()
    exact = torch.where(nearest.isinf(), nearest, exact)
    assert_same_non_finite(out.double(), exact, what)
    if out.numel() == 0:
        return
    usable = exact.isfinite() & single.isfinite()
    error = per_row(torch.where(usable, (single - exact).abs(), 0.0))
    largest = per_row(torch.where(exact.isfinite(), exact.abs(), 0.0))
    budget = factor * error + ulps * torch.finfo(torch.float32).eps * largest
    rounding = torch.where(exact.isfinite(), (nearest - exact).abs(), 0.0)
    if truncated and out.dtype == torch.bfloat16:
        rounding = torch.where(exact.isfinite(), torch.finfo(out.dtype).eps * exact.abs(), 0.0)
    assert_errors_fit(out, exact, rounding + budget.view(-1, *[1] * (out.dim() - 1)), what)
