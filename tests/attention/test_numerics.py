# SPDX-License-Identifier: Apache-2.0
"""The judges: right results pass, and each kind of wrong result is caught and located."""

import math
from collections.abc import Callable

import pytest
import torch

from dsl_backend.testing import check
from dsl_backend.testing.cases import BF16, FULL, Case
from dsl_backend.testing.inputs import SENTINEL, Expected, Problem
from dsl_backend.testing.numerics import assert_lse_within_budget, assert_within_budget, ranges

CASE = Case(q_lens=(1, 20), kv_lens=(300, 40), causality=FULL)


def right(problem: Problem, expected: Expected) -> check.Result:
    """A correctly rounded result."""
    result = check.empty_result(problem)
    result.out[expected.owned] = expected.out[expected.owned].to(result.out.dtype)
    result.lse[expected.owned] = expected.lse[expected.owned].float()
    return result


def judge(spoil: Callable[[Problem, Expected, check.Result], None], case: Case = CASE) -> None:
    problem = case.problem()
    expected = problem.expected()
    result = right(problem, expected)
    spoil(problem, expected, result)
    check.judge(result, expected, problem.score_magnitude())


def test_a_rounded_oracle_passes() -> None:
    judge(lambda problem, expected, result: None)


def test_the_naive_result_passes() -> None:
    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.out[expected.owned] = expected.naive[expected.owned]

    judge(spoil)


def test_one_wrong_element_is_located() -> None:
    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.out[4, 2, 33] += 0.25

    with pytest.raises(AssertionError, match=r"out: 1 of 5376 elements .* in rows 4; worst at \(4, 2, 33\)"):
        judge(spoil)


def test_a_long_row_is_not_excused_by_short_ones() -> None:
    """Row 0 averages 300 keys: an error of 3 % of the largest output elsewhere is too much there."""

    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.out[0, 0, 0] += 0.03

    with pytest.raises(AssertionError, match="in rows 0;"):
        judge(spoil)


def test_a_missed_key_shows() -> None:
    """One of 300 keys left out: lse, or the output, must give it away."""

    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        shorter = Case(q_lens=(1, 20), kv_lens=(299, 40), causality=FULL).problem()
        for name in ("q", "keys", "values", "batch"):
            setattr(shorter, name, getattr(problem, name))
        problem.batch.seq_lens[0] = 299
        missed = problem.expected()
        result.lse[0] = missed.lse[0].float()

    with pytest.raises(AssertionError, match=r"lse: .* in rows 0;"):
        judge(spoil)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_caught(value: float) -> None:
    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.out[7, 1, 5] = value

    with pytest.raises(
        AssertionError, match=r"(NaN|inf) differs at 1 of 5376 elements, in rows 7; first at \(7, 1, 5\)"
    ):
        judge(spoil)


def test_a_lost_nan_is_caught() -> None:
    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.out[1, 0] = 0

    with pytest.raises(AssertionError, match="NaN differs at 64"):
        judge(spoil, Case(q_lens=(1, 3), kv_lens=(20, 20), nan_request=1))


def test_rows_of_no_request_must_be_left_alone() -> None:
    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        assert (result.out[-1] == SENTINEL).all()
        result.out[-1, 0, 0] = 0

    with pytest.raises(AssertionError, match="rows of no request were written"):
        judge(spoil)


def test_a_row_without_keys_is_exact() -> None:
    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.out[0, 0, 0] = 1e-30

    with pytest.raises(AssertionError, match="budget 0"):
        judge(spoil, Case(q_lens=(2,), kv_lens=(0,), causality=FULL))


def test_lse_is_held_to_float32() -> None:
    """An lse of 16-bit precision is wrong, whatever the outputs' dtype."""

    def spoil(problem: Problem, expected: Expected, result: check.Result) -> None:
        result.lse[expected.owned] = result.lse[expected.owned].to(BF16).float()

    with pytest.raises(AssertionError, match="lse: "):
        judge(spoil)


def test_budgets_follow_the_dtype() -> None:
    exact = torch.linspace(1, 2, 64, dtype=torch.float64).view(4, 16)
    for dtype in (torch.bfloat16, torch.float16):
        step = torch.finfo(dtype).eps * exact.max()
        naive = exact.to(dtype)
        assert_within_budget((exact + step).to(dtype), exact, naive)
        with pytest.raises(AssertionError):
            assert_within_budget((exact + 5 * step).to(dtype), exact, naive)


def test_an_overflowing_naive_result_gives_no_budget() -> None:
    exact = torch.ones(2, 4, dtype=torch.float64)
    naive = torch.full((2, 4), math.nan).to(BF16)
    with pytest.raises(AssertionError, match="further from the oracle"):
        assert_within_budget(torch.full((2, 4), 1.5).to(BF16), exact, naive)


def test_empty_results_pass() -> None:
    nothing = torch.zeros(0, 2, 4)
    assert_within_budget(nothing, nothing.double(), nothing)
    lse = torch.zeros(0, 2)
    assert_lse_within_budget(lse, lse.double(), lse, torch.zeros(0))


def test_ranges_in_words() -> None:
    assert ranges(torch.tensor([True, True, False, True, False])[:, None]) == "0-1, 3"
    assert ranges(torch.zeros(40, 1, dtype=torch.bool)) == ""
    assert ranges((torch.arange(60) % 2 == 0)[:, None]).endswith("... (30 rows)")
    assert ranges(torch.tensor([True, False, True])) == "0, 2"
