# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a layer of experts on a target: a table of reasons, best kernel first."""

import torch

from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.runtime import dispatch
from dsl_backend.runtime.dispatch import Entry, Judged
from dsl_backend.runtime.target import Target

OPERATION = "experts"


def triton(spec: ExpertsSpec, target: Target) -> list[str]:
    reasons = []
    if target.is_cpu and not target.interpreted:
        reasons.append("runs on a CUDA device, this is a CPU (TRITON_INTERPRET=1 interprets it)")
    if target.capability is not None and target.capability < (7, 5):
        reasons.append(f"needs compute capability 7.5 or newer, this is {target.arch}")
    if spec.dtype == torch.bfloat16 and not target.is_cpu and not target.native_bf16:
        reasons.append(f"bfloat16 needs compute capability 8.0 or newer, this is {target.arch}: use float16")
    return reasons


def cpu_only(spec: ExpertsSpec, target: Target) -> list[str]:
    return [] if target.is_cpu else [f"is for CPUs, this is {target.arch}"]


TABLE = (
    Entry("triton", "experts triton", "dsl_backend.experts.triton.kernels:bind", triton),
    Entry("reference", "experts reference", "dsl_backend.experts.reference:bind", cpu_only),
)


def judge(spec: ExpertsSpec, target: Target) -> Judged[ExpertsSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: ExpertsSpec, target: Target, kernel: str | None = None) -> Entry[ExpertsSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
