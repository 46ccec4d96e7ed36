# SPDX-License-Identifier: Apache-2.0
"""Cases of absorbed MLA on the emulator, for the kernels of every SM."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import emulator
from dsl_backend.attention.cute.host import MlaKernel
from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import Causality
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import FP16, Case, by_id, mla
from dsl_backend.testing.cases.absorbed_mla import LATENT
from dsl_backend.testing.check import Result
from dsl_backend.testing.inputs import Problem
from emulator.machine.profile import Profile
from tests.attention.unseen import expected_of

SCHEDULES = ("eager", "lazy", "random")
SMS = 4


@dataclass(frozen=True)
class Run:
    """A case and how it is run: on one of the schedules, split or in whole ranges, with a kernel's configuration."""

    case: Case
    schedule: str
    split: bool = True
    config: Any = None

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.schedule}-{'split' if self.split else 'whole'}"


def launched(
    kernel: MlaKernel, problem: Problem, arch: str, *, sms: int, schedule: str, seed: int, split_q: bool = False
) -> tuple[Result, Profile]:
    """A problem's results, and what the emulator counted; any finding or warning raises."""
    result = check.empty_result(problem)
    q, q_rope = problem.split_q if split_q else (problem.q, None)
    scales = (problem.k_scale, problem.v_scale, problem.q_scale)
    operands = Operands(q, q_rope, problem.keys, problem.values, result.out, result.lse, problem.sinks, None, *scales)
    with emulator.device(arch=arch, sms=sms, schedule=schedule, seed=seed, strict=True) as machine:
        kernel.bind(problem.batch, 0, problem.batch.max_query_len)(operands)
    assert machine.profile is not None
    return result, machine.profile


def emulate(
    run: Run,
    seed: int,
    arch: str,
    kernel_type: type[MlaKernel],
    config: Any,
    nan_below: bool = False,
    change: Callable[[Problem], None] = lambda problem: None,
) -> Profile:
    """Run a case and judge the result; any finding or warning raises.

    Args:
        config: the kernel's, where the run names none.
        nan_below: there is NaN below the windows of all of a request's rows.
        change: of the case's problem, before it is run.
    """
    problem = run.case.problem()
    change(problem)
    expected, magnitude = expected_of(problem, nan_below)
    target = replace(from_arch(arch), sm_count=SMS)
    kernel = kernel_type(problem.spec, target, Workspace(torch.device("cpu")), run.config or config)
    assert not kernel.config.objections(problem.spec, target.smem_bytes)
    result, profile = launched(
        kernel, problem, arch, sms=SMS, schedule=run.schedule, seed=seed, split_q=run.case.split_q
    )
    check.judge(result, expected, magnitude)
    return profile


RAGGED = mla(
    16,
    id="ragged",
    q_lens=(1, 1, 0, 1, 1),
    kv_lens=(700, 33, 0, 300, 20),
    q_gain=8.0,
    why="rings wrap, parts merge, rows' largest scores grow by more than sums bear",
)
HEADS_128 = mla(
    128, id="heads-128", q_lens=(2,), kv_lens=(330,), page=64, why="two CTAs share key tiles, for two tokens"
)
PIECES = mla(16, id="pieces", q_lens=(70, 1, 33), kv_lens=(150, 90, 33), why="pieces of prompts beside a decode")
# With tiles of 32 keys; pieces are longer than a tile, and their row tiles lie in pairs.
PIECES_128 = mla(
    128, id="pieces-128", q_lens=(35, 1), kv_lens=(50, 90), page=32, why="clusters have the same pairs of row tiles"
)
PAGES_OF_16 = mla(96, id="pages-of-16", q_lens=(1, 2), kv_lens=(330, 64), why="two boxes for each of two CTAs")
CLUSTERS = mla(128, id="clusters", q_lens=(3, 1), kv_lens=(300, 1), page=48, why="whole ranges of neighbouring units")
WHOLE_320 = replace(by_id("mla-320"), kv_lens=(350, 70), split_q=True)

FP8_RAGGED = replace(RAGGED, id="fp8-ragged", kv_lens=(420, 33, 0, 130, 20), fp8=True)
FP8 = (
    *(Run(by_id("mla-fp8"), schedule) for schedule in SCHEDULES),
    *(Run(by_id("mla-fp8-queries"), schedule) for schedule in SCHEDULES[:2]),
    Run(replace(by_id("mla-fp8-queries"), id="mla-fp8-queries-in-one", split_q=False), SCHEDULES[2]),
    *(Run(FP8_RAGGED, schedule) for schedule in SCHEDULES),
    Run(replace(WHOLE_320, id="fp8-320", fp8=True), "eager", False),
    Run(replace(by_id("mla-288"), id="fp8-288", fp8=True, dtype=FP16), "lazy"),
    Run(
        mla(16, id="fp8-nan", q_lens=(1, 4), kv_lens=(65, 33), nan_request=1, fp8=True, why="a NaN stays a request's"),
        "random",
    ),
    Run(
        mla(
            16,
            id="fp8-score-mod",
            q_lens=(1, 4),
            kv_lens=(200, 150),
            fp8=True,
            window=(70, None),
            sinks=True,
            softcap=5.0,
            why="the scale goes into every score modification",
        ),
        "lazy",
    ),
)
# Blocks of a cluster load bytes for each other.
FP8_CLUSTERS = (
    Run(replace(PAGES_OF_16, id="fp8-pages-of-16", fp8=True), "random"),
    Run(replace(CLUSTERS, id="fp8-clusters", fp8=True), "lazy", False),
)

# On the kernels of every SM, with configurations that need no choice.
EVERYWHERE = (
    *(
        Run(case, SCHEDULES[index % 3])
        for index, case in enumerate(LATENT)
        if not case.fp8 and case.dim == 576 and case.id != "mla-8-ragged"
    ),
    Run(by_id("mla-mixed"), "random", False),
    Run(mla(40, id="heads-40", q_lens=(1, 2), kv_lens=(200, 64), dtype=FP16, page=48, why="24 rows idle"), "random"),
    Run(mla(67, id="heads-67", q_lens=(1, 1), kv_lens=(65, 33), why="a prime: one head a tile"), "eager"),
    Run(mla(20, id="no-keys", q_lens=(1, 8, 3), kv_lens=(0, 8, 129), why="a query that sees nothing"), "eager"),
    Run(
        mla(
            16, id="nan", q_lens=(1, 1, 1), kv_lens=(65, 33, 200), nan_request=1, why="one request's NaN stays its own"
        ),
        "random",
    ),
    Run(
        mla(16, id="window", q_lens=(1, 4), kv_lens=(300, 150), window=(70, None), why="tiles before a window"),
        "random",
    ),
    Run(
        mla(
            16,
            id="sinks-softcap",
            q_lens=(1, 4),
            kv_lens=(300, 150),
            sinks=True,
            softcap=5.0,
            why="score modifications",
        ),
        "lazy",
    ),
    Run(
        mla(16, id="full", q_lens=(1, 4), kv_lens=(300, 150), causality=Causality.FULL, why="later keys count"), "eager"
    ),
)
