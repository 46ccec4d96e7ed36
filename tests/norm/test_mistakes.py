# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in the source of RMSNorm, and of the reduction that it shares with softmax."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import emulator
from dsl_backend.norm import launch
from dsl_backend.norm.configs import default_config
from dsl_backend.norm.cute import host, kernel
from dsl_backend.primitives import reduce
from dsl_backend.runtime import toolkit
from dsl_backend.testing.norm import CASES, EPS, NormCase, judge, spec_of, spread, tensors
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, spoilt

BY_ID = {case.id: case for case in CASES}
# A CTA of four rows, the last one missing; in place.
ROWS = replace(BY_ID["head"], rows=7, width=62)
WARPS = replace(ROWS, rows=2, width=250, config=spread(250, 1, 64))
KEPT = replace(BY_ID["evict-last-special"], rows=2, special=False)
CLUSTER = replace(BY_ID["cluster-4-token"], rows=5)
GROUPS = replace(BY_ID["e4m3-groups"], rows=3)
SPECIAL_GROUPS = BY_ID["special-groups"]


@dataclass(frozen=True)
class Found:
    """A mistake, and the case that shows it."""

    mistake: Mistake
    case: NormCase


STORED = "self.in_columns(i, first, width):\n                store_vector(rOut"
IN_KERNEL = (
    ("a maximum without signs", "tree_max([absolute(value) for", "tree_max([value for", CLUSTER),
    (
        "a maximum without weights",
        "elements(self.weighted(rZ, rW, i))",
        "elements(self.weighted(rZ, None, i))",
        CLUSTER,
    ),
    ("another thread's vector past the end", "else start + first\n", "else start\n", WARPS),
    ("columns past the end are added", "rZ[None, i].fill(self.dtype(0.0))", "pass", ROWS),
    ("rows past the end are written", f"if in_rows and {STORED}", f"if {STORED}", ROWS),
    ("the residual is subtracted", "+ to_float32(rR[None, i])", "- to_float32(rR[None, i])", ROWS),
    ("the first row again", "rZ = self.load(args.x, row_start(args.x, row)", "rZ = self.load(args.x, 0", KEPT),
    ("a scale of half a group", "lanes_of_group(self.vector))", "lanes_of_group(self.vector) // 2)", GROUPS),
    (
        "a scale at another group's place",
        "column // GROUP] = scale",
        "column // GROUP // 2] = scale",
        GROUPS,
    ),
    (
        "a NaN that a group hides",
        "absolute(value) for value in elements(values)], math.fmax_nan)",
        "absolute(value) for value in elements(values)], cute.arch.fmax)",
        SPECIAL_GROUPS,
    ),
    ("a weight without offset", "weight + self.weight_offset if", "weight if", replace(ROWS, weight_offset=1.0)),
)
IN_REDUCE = (
    ("bytes of one number", "warps * cluster * len(state) * 4", "warps * cluster * 4", CLUSTER),
    ("the slots of the first CTA", "_in_cluster() * warps + warp", "_in_cluster() * 0 + warp", CLUSTER),
    ("mbarriers of peers before they are there", "    cute.arch.cluster_wait()\n", "    pass\n", CLUSTER),
    ("states before they arrive", "    cute.arch.mbarrier_wait(mbar, 0)\n", "    pass\n", CLUSTER),
)
FOUND = tuple(
    Found(Mistake(name, module, said, wrong), case)
    for module, mistakes in ((kernel, IN_KERNEL), (reduce, IN_REDUCE))
    for name, said, wrong, case in mistakes
)
QUICK = ("bytes of one number",)


def run(case: NormCase, made: Callable[..., object]) -> None:
    """Run a case on a kernel that is compiled again: a cached one has other source."""
    function = None
    for schedule in ("lazy", "random"):
        given = tensors(case)
        spec = spec_of(case, given)
        key = host.key_of(spec, case.config or default_config(spec))
        with emulator.device(arch="sm_90a", sms=4, schedule=schedule, strict=True):
            function = function or toolkit.compiled(made(key), host.fake_args(key), "sm_90a", "")
            function(*host.arguments_of(launch.prepared(given)), EPS)
        judge(case, tensors(case), given)


@pytest.mark.rest
@pytest.mark.parametrize("case", [ROWS, WARPS, CLUSTER, KEPT, GROUPS, SPECIAL_GROUPS], ids=lambda case: case.id)
def test_right_without_a_mistake(case: NormCase) -> None:
    run(case, kernel.RMSNorm)


@pytest.mark.parametrize(
    "found",
    [pytest.param(one, id=one.mistake.id, marks=() if one.mistake.id in QUICK else pytest.mark.rest) for one in FOUND],
)
def test_mistake_is_found(found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(found.mistake, tmp_path)
    made = kernel.RMSNorm
    if found.mistake.module is reduce:
        monkeypatch.setattr(kernel, "reduce", module)
        monkeypatch.setattr(kernel, "SumMax", module.SumMax)
        monkeypatch.setattr(kernel, "Sum", module.Sum)
    else:
        made = module.RMSNorm
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(found.case, made)
    assert not isinstance(raised.value, HostError), "it ran"
