# SPDX-License-Identifier: Apache-2.0
"""TMA boxes with all columns of a page's keys, for which pages and heads are one dimension of the tensor map."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.host import Alignment
from dsl_backend.attention.cute.sm90.dense_host import Prefill, SplitKV
from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel, Misaligned
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import Case
from dsl_backend.testing.inputs import Layout, Problem, Surroundings
from tests.attention.emulated import emulate, far_apart, scratch

LENGTHS = {"q_lens": (150, 1, 20), "kv_lens": (220, 33, 20)}
CASES = (
    Case(id="two-heads", heads=(4, 2), dim=128, **LENGTHS),
    Case(id="chunks-of-32", heads=(6, 3), dim=96, **LENGTHS),
    Case(id="chunks-of-16", heads=(2, 2), dim=48, page=32, **LENGTHS),
    Case(id="narrow-values", heads=(2, 2), dim=192, dim_v=128, **LENGTHS),
    Case(id="one-head", heads=(2, 1), dim=128, page=64, **LENGTHS),
    Case(id="separate", heads=(4, 2), dim=128, around=Surroundings(layout=Layout.SEPARATE), **LENGTHS),
    Case(id="heads-first", heads=(4, 2), dim=128, around=Surroundings(layout=Layout.HEADS_FIRST), **LENGTHS),
)


def make(planner: Planner, short: bool) -> Kernel:
    return (SplitKV if short else Prefill)(planner.spec, planner.target, scratch())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    emulate(case, "sm_90a", make, CASES.index(case))


def test_pages_of_values_are_further_apart() -> None:
    def spread(problem: Problem) -> None:
        problem.values = far_apart(problem.values, 3 * problem.values.stride(0))

    emulate(CASES[0], "sm_90a", make, 1, spoil=spread)


@pytest.mark.parametrize(
    ("case", "boxes"),
    [
        (CASES[0], True),
        (replace(CASES[0], page=None, around=Surroundings(layout=Layout.SEPARATE)), False),
        (replace(CASES[0], fp8=True), False),
        (replace(CASES[0], dim=72), False),
        (replace(CASES[0], dim=512), False),
    ],
    ids=["paged", "packed", "fp8", "padded columns", "values in splits"],
)
def test_what_has_page_boxes(case: Case, boxes: bool) -> None:
    kernel = Prefill(case.spec, from_arch("sm_90a"), scratch())
    assert DenseForward(kernel.key(False, None)).page_boxes == boxes
    assert kernel.alignment.head_steps == boxes


def test_a_page_is_one_box() -> None:
    """A prompt of 128 keys of 128 elements has a copy for each of 8 pages, of K and of V, and two chunks of Q."""
    case = Case(q_lens=(128,), kv_lens=(128,), heads=(1, 1), dim=128)
    profile = emulate(case, "sm_90a", make, 0, sms=1)
    copies = 0
    for kernel in profile.kernels.values():
        tensor_copies = ["cp.async.bulk.tensor" in str(instruction) for instruction in kernel.program.instrs]
        copies += sum(int(counts[tensor_copies].sum()) for counts in kernel.executed.values())
    assert copies == 2 + 2 * 128 // 16


def cache(strides: tuple[int, int, int, int], pages: int = 3, heads: int = 2) -> torch.Tensor:
    shape = (pages, 16, heads, 64)
    size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return torch.zeros(size, dtype=torch.bfloat16).as_strided(shape, strides)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (cache((16 * 256, 256, 128, 1)), True),
        (cache((16 * 256 + 64, 256, 128, 1)), False),
        (cache((16 * 256 + 64, 256, 128, 1), pages=1), True),
        (cache((16 * 256 + 64, 256, 128, 1), heads=1), True),
        (cache((64 * 16, 64, 3 * 64 * 16, 1)), False),
        (cache((16 * 64, 64, 0, 1)), False),
    ],
    ids=["heads of pages", "pages between heads", "one page", "one head", "heads outside of pages", "heads alike"],
)
def test_pages_begin_at_a_step_of_heads(keys: torch.Tensor, taken: bool) -> None:
    alignment = Alignment(head_steps=True)
    Alignment().check(("q", "keys"), (keys[:, 0], keys))
    for _ in range(2):
        if taken:
            alignment.check(("q", "keys"), (keys[:, 0], keys))
        else:
            with pytest.raises(Misaligned, match=r"keys has pages that begin \d+ elements apart, and heads \d+"):
                alignment.check(("q", "keys"), (keys[:, 0], keys))
