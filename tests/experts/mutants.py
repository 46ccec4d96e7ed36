# SPDX-License-Identifier: Apache-2.0
"""Experts' main kernels as kernels whose mutants are judged. In their problems every ring goes round twice."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from judge import Kernel
from suite import Rows, Suite

from dsl_backend.experts.configs import DecodeConfig, ExpertsConfig
from dsl_backend.experts.cute import host, scaled_host
from dsl_backend.experts.scaled_configs import ScaledExpertsConfig, SideBySideConfig
from dsl_backend.quant.format import BLOCK_SCALED
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import PLAIN, ExpertsCase, judge, tensors

sys.path.append(str(Path(__file__).resolve().parent))

from experts_cases import SMS, TARGETS, Emulated

SM90 = "sm_90a"
# The first product's launch. Without the kernels for few tokens one before it sorts the pairs by expert.
FIRST, DECODE_FIRST = 1, 0

# Several tiles for each of a few experts, and one expert without a row; K is five stages and a part of one.
ROUTED = replace(PLAIN, tokens=80, num_experts=3, hidden=264, width=264, topk=2, biases=True)
# Shares of all weights begin and end in the middle of an expert's tiles; tiles of several CTAs are summed. More pairs
# than a warp has lanes.
FEW = replace(PLAIN, tokens=9, num_experts=5, hidden=328, width=136, topk=4, biases=True)


# Several tiles of rows and of columns for a CTA, whose consumers have half of a group of the output each; K is five
# stages and a part of one.
BLOCKS = ExpertsCase(
    tokens=100, num_experts=2, hidden=656, width=256, topk=2, weight=BLOCK_SCALED, x_given=True, routing="zipf"
)
SIDE_BY_SIDE = ScaledExpertsConfig(
    first=SideBySideConfig(stages=2), second=SideBySideConfig(stages=2), prefetches=True, trims=True
)


def call(
    module: ModuleType, case: ExpertsCase, config: ExpertsConfig | DecodeConfig, ctas: tuple[int, ...]
) -> Callable[[], bool]:
    """A call of an operator's kernels that says whether its results are right.

    Args:
        module: that builds and launches them.
        ctas: of its launches.
    """
    given, spec = tensors(case, "cpu"), case.spec
    workspace, built = Workspace(torch.device("cpu")), list[Function]()

    def run() -> bool:
        if not built:
            built.append(module.build(module.key_of(spec, config), TARGETS[SM90]))
        # A mutant that was stopped in the middle of a launch leaves them as they were there.
        workspace.reset()
        given.out.fill_(torch.nan)
        module.run(built[0], spec, config, given, ctas, workspace)
        try:
            judge(case, given)
        except AssertionError:
            return False
        return not workspace.flags(0).any()

    return run


def of_16_bits(one: Emulated) -> Callable[[], bool]:
    return call(host, one.case, one.tiles(), one.ctas())


def of_blocks() -> Callable[[], bool]:
    ctas = SIDE_BY_SIDE.ctas(BLOCKS.spec, BLOCKS.tokens, TARGETS[SM90])
    return call(scaled_host, BLOCKS, SIDE_BY_SIDE, (1, *ctas[1:]))


def subject(name: str, number: int, prepared: Callable[[], Callable[[], bool]]) -> Kernel:
    """A kernel, with its call built when it is judged."""
    calls: list[Callable[[], bool]] = []

    def run() -> bool:
        if not calls:
            calls.append(prepared())
        return calls[0]()

    return Kernel(name, SM90, run, sms=SMS, number=number, most=2, by_instruction=True)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        subject(
            "SM90 gate and up",
            FIRST,
            partial(of_16_bits, Emulated(id="rows", why="mutants", case=ROUTED, config="pingpong")),
        ),
        subject(
            "SM90 decode gate and up",
            DECODE_FIRST,
            partial(of_16_bits, Emulated(id="few", why="mutants", case=FEW, config="rows", decodes=True)),
        ),
        subject("SM90 e4m3 gate and up", FIRST, of_blocks),
    )
}
# (pattern of the kernel, pattern of `kind: what`, reason)
EQUIVALENT: Rows = [
    (
        "SM90",
        "descriptor leading: .*4611686293305360384",
        "the leading dimension's offset has no meaning for K-major operands with a swizzle (9.7.15.5.1.2)",
    ),
    (
        "SM90",
        "drop: .*setmaxnreg",
        "all warps together ask for fewer registers than the SM has, in either order; values do not depend on it",
    ),
    (
        "SM90 (e4m3 )?gate and up",
        r"drop: .*fence.mbarrier_init.*\(grouped.py",
        "there is no cluster, and the same thread fences for the async proxy behind it, before the CTA's barrier",
    ),
    (
        "SM90 (e4m3 )?gate and up",
        r"(drop|swap): .*fence.proxy.async.*in clear_stages",
        "every consumer fences behind the full barrier, before its products",
    ),
    (
        "SM90 (e4m3 )?gate and up",
        "swap: .*fence.proxy.async.*behind `wgmma.fence",
        "the fence still comes before the products",
    ),
    (
        "SM90 gate and up",
        r"(drop|swap): .*bar.sync %r\d+, 128.*in epilogue\)",
        "warpgroups that take turns, with one block of rows a tile, meet in another barrier between two stores",
    ),
    (
        "SM90 e4m3",
        r"swap: .*wgmma.commit_group.*behind `ld.global.b32 .*in issue\)",
        "a scale is loaded between the products and their group's end",
    ),
    (
        "SM90 decode",
        "drop: .*wgmma.fence",
        "between the products of two stages nothing but products of this shape touches the accumulators",
    ),
    (
        "SM90 decode",
        r"relaxed: .*mbarrier.try_wait.*in producer_acquire\)",
        "in the ring's first round nobody has read a stage",
    ),
]
UNSEEN: Rows = [
    (
        "SM",
        "(drop: .*bar.warp.sync|swap: .*behind `bar.warp.sync)",
        "order between lanes of a warp: a warp has one clock",
    ),
]
HEAD = """# Mutants of the experts' kernels

This page shows which mistakes in the first products of routed experts, for many tokens, for few, and of e4m3 weights,
the emulator finds. The mistakes are those of
[emulator-mutants.md](emulator-mutants.md), one at a time in the PTX of a kernel. Tiles are small, and problems are long
enough for each ring of stages to wrap around more than twice.

- Of each kind of mistake and each instruction at most two mutants are taken, by a fixed seed.
- A mutant is found by "check" if one of the emulator's checks reports it, and by "value" if no check does and the
  error of the result is above the computed tolerance.
- Kernels run on a strict device, where a warning is a finding.
- The schedules lazy, eager and random run in this order until one finds the mutant.
- Files, functions and lines are those of the commit at which the page was made.

Made by `python tests/emulator/mutants/report.py --suite tests.experts.mutants > docs/experts-mutants.md`. The same
mutants are tests: `pytest tests/experts/test_ptx_mutants.py` runs all of them, `-m 'not full'` a selection.
"""

SUITE = Suite([*KERNELS], KERNELS.__getitem__, EQUIVALENT, UNSEEN, HEAD)
