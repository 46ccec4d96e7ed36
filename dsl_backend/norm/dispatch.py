# SPDX-License-Identifier: Apache-2.0
"""The kernels of RMSNorm, best first, and what each one does not serve."""

from dsl_backend.norm.spec import NormSpec
from dsl_backend.norm.tuned import config_of
from dsl_backend.rows import MAX_CLUSTER
from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, cpu_only, triton_objections
from dsl_backend.runtime.target import Target

OPERATION = "norm"


def cute(spec: NormSpec, target: Target) -> list[str]:
    """It needs clusters and st.async, and is compiled and tested for SM90 and SM100 only."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    config = config_of(spec, target)
    reasons = [*toolkit.missing(), *config.objections(spec, target.smem_bytes)]
    if config.cluster == MAX_CLUSTER and reasons:
        return [f"rows of {spec.width} elements do not fit the registers of a cluster"]
    return reasons


def triton(spec: NormSpec, target: Target) -> list[str]:
    return triton_objections(target, *spec.dtypes)


# One class serves SM90 and SM100: SM100 has no instruction that would make it faster.
TABLE = (
    Entry("cute", "norm one-pass sm90/sm100", "dsl_backend.norm.cute.host:bind", cute),
    Entry("triton", "norm triton", "dsl_backend.norm.triton.kernel:bind", triton),
    Entry("reference", "norm reference", "dsl_backend.norm.reference:bind", cpu_only),
)


def choose(spec: NormSpec, target: Target, kernel: str | None = None) -> Entry[NormSpec]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
