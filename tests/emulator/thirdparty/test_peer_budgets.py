# SPDX-License-Identifier: Apache-2.0
"""Budgets of the cases of others' kernels: what they let through and what not."""

import pytest
import torch
from peer_budgets import Expected, judge

EXACT = torch.tensor([[1.0, -2.0, 3.0], [100.0, 200.0, 300.0]], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def moved(by: float) -> torch.Tensor:
    out = EXACT.float()
    out[0, 0] += by
    return out


@pytest.mark.parametrize(("ulps", "wrong"), [(0, 0), (5, 0), (8, 1)])
def test_two_units_of_the_rows_largest(ulps: int, wrong: int) -> None:
    verdict = judge(moved(ulps * EPS), Expected(EXACT))
    assert verdict.wrong == wrong
    assert verdict.largest_error == pytest.approx(ulps * EPS)


@pytest.mark.parametrize(("error", "wrong"), [(0.19, 0), (0.21, 1)])
def test_twice_torchs_own_error(error: float, wrong: int) -> None:
    for row, expected in ((0, wrong), (1, 1)):  # another row's error is no excuse
        naive = EXACT.float()
        naive[row, 1] += 0.1
        assert judge(moved(error), Expected(EXACT, naive)).wrong == expected


@pytest.mark.parametrize(("error", "wrong"), [(0.49, 0), (0.51, 1)])
def test_an_absolute_budget(error: float, wrong: int) -> None:
    assert judge(moved(error), Expected(EXACT, absolute=0.5)).wrong == wrong


def test_magnitude_of_what_was_summed() -> None:
    assert judge(moved(100 * EPS), Expected(EXACT)).wrong == 1
    assert judge(moved(100 * EPS), Expected(EXACT, magnitude=60.0)).wrong == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_has_to_be_so_in_both(value: float) -> None:
    out, exact = moved(0.0), EXACT.clone()
    out[1, 2] = value
    assert judge(out, Expected(exact)).wrong == 1
    exact[1, 2] = value
    assert judge(out, Expected(exact)).wrong == 0
    assert judge(moved(0.0), Expected(exact)).wrong == 1
    assert judge(-out, Expected(exact)).wrong > 0


def test_another_shape() -> None:
    with pytest.raises(AssertionError, match=r"\(2, 2\) where \(2, 3\) is right"):
        judge(torch.zeros(2, 2), Expected(EXACT))
