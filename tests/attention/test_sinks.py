# SPDX-License-Identifier: Apache-2.0
"""A sink of -inf is none: a row without a key is 0 with an LSE of -inf, and others are as without a sink."""

from dataclasses import replace

import pytest
import torch

import emulator
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.inputs import Problem

# Rows of the first request see no key, as the first ones of the second.
SHORT = Case(id="short", q_lens=(1, 4, 3), kv_lens=(0, 2, 150), heads=(2, 1), dim=64, sinks=True)
CASES = {
    "short": SHORT,
    "long": replace(SHORT, q_lens=(3, 100, 70), kv_lens=(0, 80, 150)),
    "mla": mla(16, id="mla", q_lens=(1, 4, 1), kv_lens=(0, 2, 150), page=64, sinks=True),
}


def without_sink(case: Case) -> Problem:
    """The first head has none."""
    problem = case.problem()
    assert problem.sinks is not None
    problem.sinks[0] = -torch.inf
    return problem


def judge(problem: Problem, result: check.Result) -> None:
    expected = problem.expected()
    check.judge(result, expected, problem.score_magnitude())
    # The first request's row.
    assert (result.out[:1].float() == 0).all()
    assert result.lse[0, 0] == -torch.inf
    assert result.lse[0, 1].isfinite()


def test_the_definition() -> None:
    """Beside the same layer without sinks."""
    problem = without_sink(SHORT)
    bare = Problem(**(vars(problem) | {"spec": replace(problem.spec, sinks=False), "sinks": None}))
    found, plain = problem.expected(), bare.expected()
    assert torch.equal(found.out[:, 0], plain.out[:, 0])
    assert torch.equal(found.lse[:, 0], plain.lse[:, 0])
    assert found.out.isfinite().all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_on_a_cpu(name: str, kernel: str) -> None:
    problem = without_sink(CASES[name])
    judge(problem, check.run(problem, kernel))


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "short" else pytest.mark.rest) for name in CASES]
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cute(arch: str, name: str) -> None:
    problem = without_sink(CASES[name])
    with emulator.device(arch=arch, sms=4, schedule="random", strict=True):
        judge(problem, check.run(problem, "cute", target=replace(from_arch(arch), sm_count=4)))
