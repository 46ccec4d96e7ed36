# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a linear layer on a target: a table of reasons, best kernel first."""

from dsl_backend.gemm.configs import ARCH_KERNELS, candidates
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged, cpu_only, triton_objections
from dsl_backend.runtime.target import Target

OPERATION = "linear"
# Elements in 16 bytes.
TMA_VECTOR = 8


def cute(spec: LinearSpec, target: Target) -> list[str]:
    """Requirements of the CuTe DSL kernels, the same on all SMs."""
    if reasons := target.arch_objections(*ARCH_KERNELS):
        return reasons
    reasons = [*toolkit.missing(), *spec.dtypes.objections()]
    if spec.vector < TMA_VECTOR:
        reasons.append(
            f"TMA needs rows that start at multiples of {TMA_VECTOR} elements, and n and k that are multiples of "
            f"{TMA_VECTOR}: here it is {spec.vector}"
        )
    if not candidates(spec, target):
        reasons.append(f"{target.smem_bytes} bytes of shared memory are too few for every tile")
    return reasons


def triton(spec: LinearSpec, target: Target) -> list[str]:
    return spec.dtypes.objections() + triton_objections(target, spec.dtypes.x)


def reference(spec: LinearSpec, target: Target) -> list[str]:
    reasons = cpu_only(spec, target)
    if spec.batch_invariant:
        reasons.append("is not batch invariant: torch sums in an order that depends on the number of rows")
    return reasons


TABLE = (
    Entry("cute", "linear sm90/sm100", "dsl_backend.linear.cute.host:bind", cute),
    Entry("triton", "linear triton", "dsl_backend.linear.triton.gemm:bind", triton),
    Entry("reference", "linear reference", "dsl_backend.linear.reference:bind", reference),
)


def judge(spec: LinearSpec, target: Target) -> Judged[LinearSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: LinearSpec, target: Target, kernel: str | None = None) -> Entry[LinearSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
