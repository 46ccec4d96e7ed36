# SPDX-License-Identifier: Apache-2.0
"""The kernels of softmax, best first, and what each one does not serve."""

from collections.abc import Callable
from functools import cache

import torch

from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.configs import default_config
from dsl_backend.softmax.spec import SoftmaxSpec

OPERATION = "softmax"
Run = Callable[[torch.Tensor, torch.Tensor, SoftmaxSpec, Target], None]


def cute_one_pass(spec: SoftmaxSpec, target: Target) -> list[str]:
    """It reads a row once, so the row has to fit the registers of a cluster."""
    if (reasons := cute(spec, target)) or not default_config(spec).two_pass:
        return reasons
    return [f"rows of {spec.width} elements do not fit the registers of a cluster"]


def cute_two_pass(spec: SoftmaxSpec, target: Target) -> list[str]:
    """It reads a row twice."""
    if (reasons := cute(spec, target)) or default_config(spec).two_pass:
        return reasons
    return [f"rows of {spec.width} elements fit the registers of a cluster: one pass serves them"]


def cute(spec: SoftmaxSpec, target: Target) -> list[str]:
    """Both need clusters and st.async, and are compiled and tested for SM90 and SM100 only."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    reasons = [*toolkit.missing()]
    return reasons + default_config(spec).objections(spec, target.smem_bytes)


def triton(spec: SoftmaxSpec, target: Target) -> list[str]:
    reasons = []
    if target.is_cpu and not target.interpreted:
        reasons.append("runs on a CUDA device, this is a CPU (TRITON_INTERPRET=1 interprets it)")
    if target.capability is not None and target.capability < (7, 5):
        reasons.append(f"needs compute capability 7.5 or newer, this is {target.arch}")
    if torch.bfloat16 in (spec.dtype, spec.out_dtype) and not target.is_cpu and not target.native_bf16:
        reasons.append(f"bfloat16 needs compute capability 8.0 or newer, this is {target.arch}: use float16")
    return reasons


def cpu_only(spec: SoftmaxSpec, target: Target) -> list[str]:
    return [] if target.is_cpu else [f"is for CPUs, this is {target.arch}"]


# One class serves SM90 and SM100: SM100 has no instruction that would make it faster.
TABLE = (
    Entry("cute", "softmax one-pass sm90/sm100", "dsl_backend.softmax.cute.host:softmax", cute_one_pass),
    Entry("cute", "softmax two-pass sm90/sm100", "dsl_backend.softmax.cute.host:softmax", cute_two_pass),
    Entry("triton", "softmax triton", "dsl_backend.softmax.triton.kernel:softmax", triton),
    Entry("reference", "softmax reference", "dsl_backend.softmax.reference:softmax", cpu_only),
)


def judge(spec: SoftmaxSpec, target: Target) -> Judged[SoftmaxSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: SoftmaxSpec, target: Target, kernel: str | None = None) -> Entry[SoftmaxSpec]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)


@cache
def chosen(spec: SoftmaxSpec, target: Target, kernel: str | None) -> Run:
    """The function that serves. Cached, because every call needs it."""
    run: Run = choose(spec, target, kernel).load()
    return run
