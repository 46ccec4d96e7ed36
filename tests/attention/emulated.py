# SPDX-License-Identifier: Apache-2.0
"""Cases of dense attention on the emulator: tiles that small problems fill, and rings that they go around."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import emulator
from dsl_backend.attention.kernel import Kernel, Workspace
from dsl_backend.attention.plan import Planner
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import CASES, Case
from emulator.machine.profile import Profile

SCHEDULES = ("eager", "lazy", "random")
SMS = 4
# Makes a planner's kernel for short or for long queries: (planner, for short ones) -> kernel.
Maker = Callable[[Planner, bool], Kernel]


def emulate(case: Case, arch: str, make: Maker, index: int, **device: Any) -> Profile:
    """Run a case on kernels of the maker's, and judge the result; any finding or warning raises."""
    problem = case.problem()

    def adjust(planner: Planner) -> None:
        planner.short = (*planner.short[:2], make(planner, True))
        planner.long = (*planner.long[:2], make(planner, False))

    target = replace(from_arch(arch), sm_count=SMS)
    schedule = SCHEDULES[index % len(SCHEDULES)]
    with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=index, strict=True, **device) as machine:
        result = check.run(problem, "cute", adjust=adjust, target=target)
    check.judge(result, problem.expected(), problem.score_magnitude())
    assert machine.profile is not None
    return machine.profile


def scratch() -> Workspace:
    return Workspace(torch.device("cpu"))


def served(case: Case) -> bool:
    """Whether the dense kernels are meant for a case, fp8 keys apart, and the emulator for its size."""
    spec = case.spec
    return not (spec.latent or spec.head_dim > 256 or case.tier == "gpu")


SERVED = [case for case in CASES if served(case) and not case.fp8]
SERVED_FP8 = [case for case in CASES if served(case) and case.fp8]
