# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a layer of experts on a target: a table of reasons, best kernel first."""

from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.runtime import dispatch
from dsl_backend.runtime.dispatch import Entry, cpu_only, triton_objections
from dsl_backend.runtime.target import Target

OPERATION = "experts"


def triton(spec: ExpertsSpec, target: Target) -> list[str]:
    return triton_objections(target, spec.dtype)


TABLE = (
    Entry("triton", "experts triton", "dsl_backend.experts.triton.kernels:bind", triton),
    Entry("reference", "experts reference", "dsl_backend.experts.reference:bind", cpu_only),
)


def choose(spec: ExpertsSpec, target: Target, kernel: str | None = None) -> Entry[ExpertsSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
