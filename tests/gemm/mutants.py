# SPDX-License-Identifier: Apache-2.0
"""The main GEMMs of quantised operands as kernels whose mutants are judged. In their problems rings go round twice."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from judge import Kernel
from suite import Rows, Suite

from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm90 import scaled_configs as sm90_configs
from dsl_backend.gemm.sm100 import scaled_configs as sm100_configs
from dsl_backend.quant.reference import Quantized
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.scaled import Outputs, budget_of, tensors

sys.path.append(str(Path(__file__).resolve().parent))

import scaled_cases
import scaled_cases_sm100 as cases_sm100

SM90, SM100 = "sm_90a", "sm_100a"
# Of the cases of the tests: the kernel's, and which it is.
BY_ID = {one.id: one for one in scaled_cases.CASES}
SM100_BY_ID = {one.id: one for one in cases_sm100.CASES}


def of_sm90(one: scaled_cases.ScaledEmulated) -> Callable[[], bool]:
    """A call of SM90's kernel that says whether its results are right."""
    given, spec, workspace = tensors(one.case, "cpu"), one.products, Workspace(torch.device("cpu"))
    built = list[Function]()

    def run() -> bool:
        key = scaled_host.key_of(spec, one.config, spec.column_major)
        if not built:
            built.append(scaled_host.build(sm90_configs.kernel(key), key, from_arch(SM90)))
        # A mutant that was stopped in the middle of a launch leaves them as they were there.
        workspace.reset()
        found = scaled_cases.outputs(one.case, given.out_scale)
        matrices = given.x.values, given.x.scale, given.weight.values, given.weight.scale
        operands = ScaledOperands(*matrices, given.bias, found.out, found.scale)
        scaled_host.run(built[0], one.config, operands, one.sms, workspace)
        try:
            scaled_cases.judge(one.case, found, one.config.promotion)
        except AssertionError:
            return False
        return not workspace.flags(0).any()

    return run


def of_sm100(one: cases_sm100.Emulated) -> Callable[[], bool]:
    """The same of SM100's."""
    spec, workspace, built = one.case.spec, Workspace(torch.device("cpu")), list[Function]()
    given, meant, alpha = cases_sm100.operands_of(one.case)
    budget = budget_of(one.case, meant)

    def run() -> bool:
        key = scaled_host.key_of(spec, one.config, spec.column_major)
        if not built:
            built.append(scaled_host.build(sm100_configs.kernel(key), key, from_arch(SM100)))
        workspace.reset()
        out, out_scale, whole = cases_sm100.outputs(one.case, spec, given.out_scale, budget)
        matrices = given.x.values, given.x.scale, given.weight.values, given.weight.scale
        operands = ScaledOperands(*matrices, given.bias, out, out_scale, alpha, whole)
        scaled_host.run(built[0], one.config, operands, one.sms, workspace)
        try:
            if spec.out is not None and spec.out.swizzled:
                assert out_scale is not None
                cases_sm100.check_blocks(one.case, Quantized(out, out_scale, spec.out), budget)
            else:
                cases_sm100.check_outputs(one.case, Outputs(out, out_scale), budget)
        except AssertionError:
            return False
        return True

    return run


def subject(name: str, arch: str, sms: int, made: Callable[[], Callable[[], bool]]) -> Kernel:
    """A kernel, with its call built when it is judged."""
    calls: list[Callable[[], bool]] = []

    def run() -> bool:
        if not calls:
            calls.append(made())
        return calls[0]()

    return Kernel(name, arch, run, sms=sms, most=1, by_instruction=True)


def sm90(name: str, case: str) -> Kernel:
    one = BY_ID[case]
    return subject(name, SM90, one.sms, lambda: of_sm90(one))


def sm100(name: str, case: str, **changes: int) -> Kernel:
    one = SM100_BY_ID[case]
    one = replace(one, case=replace(one.case, **changes)) if changes else one
    return subject(name, SM100, one.sms, lambda: of_sm100(one))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        sm90("SM90 blocks, boxes in turns", "turns-gated"),
        sm90("SM90 channels, overlapped additions", "overlap"),
        sm90("SM90 blocks, few rows", "few-blocks-gated"),
        sm100("SM100 blocks", "blocks-two-cta"),
        sm100("SM100 NVFP4 to NVFP4", "nvfp4-to-nvfp4"),
    )
}
# (pattern of the kernel, pattern of `kind: what`, reason)
EQUIVALENT: Rows = []
UNSEEN: Rows = [
    (
        "SM",
        "(drop: .*bar.warp.sync|swap: .*behind `bar.warp.sync)",
        "order between lanes of a warp: a warp has one clock",
    ),
]
HEAD = """# Mutants of the 8- and 4-bit GEMMs

This page shows which mistakes in the GEMMs of quantised operands the emulator finds. The mistakes are those of
[emulator-mutants.md](emulator-mutants.md), one at a time in the PTX of a kernel. Tiles are small, and problems are long
enough for each ring of stages to wrap around more than twice.

- Of each kind of mistake and each instruction one mutant is taken, by a fixed seed.
- A mutant is found by "check" if one of the emulator's checks reports it, and by "value" if no check does and the
  error of the result is above the computed budget.
- Kernels run on a strict device, where a warning is a finding.
- The schedules lazy, eager and random run in this order until one finds the mutant.
- Files, functions and lines are those of the commit at which the page was made.

Made by `python tests/emulator/mutants/report.py --suite tests.gemm.mutants > docs/scaled-gemm-mutants.md`. The same
mutants are tests: `pytest tests/gemm/test_scaled_ptx_mutants.py` runs all of them, `-m 'not full'` a selection.
"""

SUITE = Suite([*KERNELS], KERNELS.__getitem__, EQUIVALENT, UNSEEN, HEAD)
