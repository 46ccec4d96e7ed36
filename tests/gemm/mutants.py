# SPDX-License-Identifier: Apache-2.0
"""SM90's GEMMs of 8-bit operands as kernels whose mutants are judged. In their problems rings go round twice."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from judge import Kernel
from suite import Rows, Suite

from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm90 import scaled_configs
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.scaled import tensors

sys.path.append(str(Path(__file__).resolve().parent))

import scaled_cases

BY_ID = {one.id: one for one in scaled_cases.CASES}


def call(one: scaled_cases.ScaledEmulated) -> Callable[[], bool]:
    """A call of the kernel that says whether its results are right."""
    given, spec, workspace = tensors(one.case, "cpu"), one.products, Workspace(torch.device("cpu"))
    built = list[Function]()

    def run() -> bool:
        key = scaled_host.key_of(spec, one.config, spec.column_major)
        if not built:
            built.append(scaled_host.build(scaled_configs.kernel(key), key, from_arch(scaled_cases.ARCH)))
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


def subject(name: str, case: str, **changes: int) -> Kernel:
    """A kernel, with its call built when it is judged.

    Args:
        case: of the kernel's tests.
        changes: fields of that case with another value.
    """
    one = replace(BY_ID[case], **changes)
    calls: list[Callable[[], bool]] = []

    def run() -> bool:
        if not calls:
            calls.append(call(one))
        return calls[0]()

    return Kernel(name, scaled_cases.ARCH, run, sms=one.sms, most=1, by_instruction=True)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        subject("SM90 blocks, boxes in turns", "turns-gated"),
        # A CTA has four tiles: each ring goes on from tile to tile, and a store follows another.
        subject("SM90 channels, overlapped additions", "overlap", sms=1),
        subject("SM90 blocks, few rows", "few-blocks-gated"),
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
        "SM90",
        r"drop: .*fence.mbarrier_init.*\(gemm.py",
        "there is no cluster, and the same thread fences for the async proxy behind it, before the CTA's barrier",
    ),
    (
        "SM90",
        r"swap: .*fence.proxy.async.*behind `bar.sync .*in store_rows",
        "the thread that stores the rows fences behind the barrier, and so behind the other threads' writes",
    ),
    (
        "SM90 channels",
        "elect: .*cp.async.bulk.tensor.2d.global.shared::cta",
        "all lanes store the same bytes to the same place, and each waits for its own store",
    ),
    (
        "SM90 blocks, few rows",
        r"relaxed: .*mbarrier.try_wait.*in producer_acquire\)",
        "in the ring's first round nobody has read a stage",
    ),
    (
        "SM90 blocks, few rows",
        "drop: .*wgmma.wait_group.*in mma_stream_k",
        "each block of k has waited for its products, which are promoted; none is left behind the last block",
    ),
]
UNSEEN: Rows = [
    (
        "SM",
        "(drop: .*bar.warp.sync|swap: .*behind `bar.warp.sync)",
        "order between lanes of a warp: a warp has one clock",
    ),
]
HEAD = """# Mutants of SM90's 8-bit GEMM

This page shows which mistakes in SM90's GEMMs of 8-bit operands, for many rows and for few, the emulator finds. The
mistakes are those of [emulator-mutants.md](emulator-mutants.md), one at a time in the PTX of a kernel. Tiles are small,
and problems are long enough for each ring of stages to wrap around more than twice.

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
