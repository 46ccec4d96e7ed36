# SPDX-License-Identifier: Apache-2.0
"""The kernels of softmax, best first, and what each one does not serve."""

from collections.abc import Callable
from functools import cache

import torch

from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, cpu_only, triton_objections
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import config_of

OPERATION = "softmax"
Run = Callable[[torch.Tensor, torch.Tensor, SoftmaxSpec, Target], None]


def cute_one_pass(spec: SoftmaxSpec, target: Target) -> list[str]:
    """It reads a row once, so the row has to fit the registers of a cluster."""
    if (reasons := cute(spec, target)) or not config_of(spec, target).two_pass:
        return reasons
    return [f"rows of {spec.width} elements do not fit the registers of a cluster"]


def cute_two_pass(spec: SoftmaxSpec, target: Target) -> list[str]:
    """It reads a row twice."""
    if (reasons := cute(spec, target)) or config_of(spec, target).two_pass:
        return reasons
    return [f"rows of {spec.width} elements fit the registers of a cluster: one pass serves them"]


def cute(spec: SoftmaxSpec, target: Target) -> list[str]:
    """Both need clusters and st.async, and are compiled and tested for SM90 and SM100 only."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    reasons = [*toolkit.missing()]
    return reasons + config_of(spec, target).objections(spec, target.smem_bytes)


def triton(spec: SoftmaxSpec, target: Target) -> list[str]:
    return triton_objections(target, spec.dtype, spec.out_dtype)


# One class serves SM90 and SM100: SM100 has no instruction that would make it faster.
TABLE = (
    Entry("cute", "softmax one-pass sm90/sm100", "dsl_backend.softmax.cute.host:softmax", cute_one_pass),
    Entry("cute", "softmax two-pass sm90/sm100", "dsl_backend.softmax.cute.host:softmax", cute_two_pass),
    Entry("triton", "softmax triton", "dsl_backend.softmax.triton.kernel:softmax", triton),
    Entry("reference", "softmax reference", "dsl_backend.softmax.reference:softmax", cpu_only),
)


def choose(spec: SoftmaxSpec, target: Target, kernel: str | None = None) -> Entry[SoftmaxSpec]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)


@cache
def chosen(spec: SoftmaxSpec, target: Target, kernel: str | None) -> Run:
    """The function that serves. Cached, because every call needs it."""
    run: Run = choose(spec, target, kernel).load()
    return run
