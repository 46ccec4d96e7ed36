# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a linear layer of quantised operands on a target: a table of reasons, best kernel first."""

from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime import dispatch
from dsl_backend.runtime.dispatch import Entry, Judged, cpu_only, triton_objections
from dsl_backend.runtime.target import Target

OPERATION = "scaled_linear"


def triton(spec: ScaledLinearSpec, target: Target) -> list[str]:
    return triton_objections(target, spec.dtype)


def reference(spec: ScaledLinearSpec, target: Target) -> list[str]:
    reasons = cpu_only(spec, target)
    if spec.batch_invariant:
        reasons.append("is not batch invariant: torch sums in an order that depends on the number of rows")
    return reasons


TABLE: tuple[Entry[ScaledLinearSpec], ...] = (
    Entry("triton", "scaled-linear triton", "dsl_backend.linear.scaled.triton.gemm:bind", triton),
    Entry("reference", "scaled-linear reference", "dsl_backend.linear.scaled.reference:bind", reference),
)


def judge(spec: ScaledLinearSpec, target: Target) -> Judged[ScaledLinearSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: ScaledLinearSpec, target: Target, kernel: str | None = None) -> Entry[ScaledLinearSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
