# SPDX-License-Identifier: Apache-2.0
"""TMA boxes with all columns of a page's keys, for which pages and heads are one dimension of the tensor map."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from dsl_backend.attention.cute.host import Alignment
from dsl_backend.attention.cute.sm90 import dense_host as sm90
from dsl_backend.attention.cute.sm100 import dense_host as sm100
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel, Misaligned
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import Case
from dsl_backend.testing.inputs import Layout, Problem, Surroundings
from tests.attention.emulated import emulate, executed, far_apart, scratch

HOSTS: dict[str, Any] = {"sm_90a": sm90, "sm_100a": sm100}
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
    host = HOSTS[planner.target.arch]
    return (host.SplitKV if short else host.Prefill)(planner.spec, planner.target, scratch())


@pytest.mark.parametrize("arch", HOSTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case, arch: str) -> None:
    emulate(case, arch, make, CASES.index(case))


@pytest.mark.parametrize("arch", HOSTS)
def test_pages_of_values_are_further_apart(arch: str) -> None:
    def spread(problem: Problem) -> None:
        problem.values = far_apart(problem.values, 3 * problem.values.stride(0))

    emulate(CASES[0], arch, make, 1, spoil=spread)


PACKED = replace(CASES[0], page=None, around=Surroundings(layout=Layout.SEPARATE))


@pytest.mark.parametrize(
    ("arch", "case", "boxes"),
    [
        ("sm_90a", CASES[0], True),
        ("sm_90a", CASES[3], True),
        ("sm_90a", PACKED, False),
        ("sm_90a", replace(CASES[0], fp8=True), False),
        ("sm_90a", replace(CASES[0], dim=72), False),
        ("sm_90a", replace(CASES[0], dim=512), False),
        ("sm_100a", CASES[0], True),
        ("sm_100a", CASES[3], False),
        ("sm_100a", PACKED, False),
        ("sm_100a", replace(CASES[0], dim=256), False),
    ],
    ids=[
        "paged",
        "narrow values",
        "packed",
        "fp8",
        "padded columns",
        "values in splits",
        "SM100",
        "SM100, shared stages of two widths",
        "SM100, packed",
        "SM100, 2-CTA",
    ],
)
def test_what_has_page_boxes(arch: str, case: Case, boxes: bool) -> None:
    """What pages must begin at is asked for by the kernels with such boxes alone."""
    kernel = HOSTS[arch].Prefill(case.spec, from_arch(arch), scratch())
    assert kernel.alignment.head_steps == boxes


@pytest.mark.parametrize("arch", HOSTS)
def test_a_page_is_one_box(arch: str) -> None:
    """A prompt of 128 keys of 128 elements: a copy for each of 8 pages, of K and of V, and for two chunks of each Q."""
    case = Case(q_lens=(128,), kv_lens=(128,), heads=(1, 1), dim=128)
    profile = emulate(case, arch, make, 0, sms=1)
    assert executed(profile, "cp.async.bulk.tensor") == 2 + 2 * 128 // 16


def cache(strides: tuple[int, int, int, int], heads: int = 2) -> torch.Tensor:
    shape = (3, 16, heads, 64)
    size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return torch.zeros(size, dtype=torch.bfloat16).as_strided(shape, strides)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (cache((16 * 256, 256, 128, 1)), True),
        (cache((16 * 256 + 64, 256, 128, 1)), False),
        (cache((16 * 256 + 64, 256, 128, 1), heads=1), True),
        (cache((64 * 16, 64, 3 * 64 * 16, 1)), False),
        (cache((16 * 64, 64, 0, 1)), False),
    ],
    ids=["heads of pages", "pages between heads", "one head", "heads outside of pages", "heads alike"],
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
