# SPDX-License-Identifier: Apache-2.0
"""The kernels that verify drafts, best first, and what each one does not serve."""

from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, cpu_only, triton_objections
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.verification_spec import Known, VerificationSpec

# Printed by `dsl-backend doctor`.
OPERATION = "sampling.verify"


def cute(spec: VerificationSpec, target: Target) -> list[str]:
    """It is compiled and tested for SM90 and SM100 only."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    reasons = [*toolkit.missing()]
    if spec.known is not Known.TOKENS:
        reasons.append(f"has no ratio test: {Known.TOKENS} is needed, this is {spec.known}")
    return reasons


def triton(spec: VerificationSpec, target: Target) -> list[str]:
    return triton_objections(target)


TABLE = (
    Entry(
        "cute",
        "verification warp-per-request sm90/sm100",
        "dsl_backend.sampling.cute.verification_host:CuteVerifier",
        cute,
    ),
    Entry(
        "triton",
        "verification program-per-request triton",
        "dsl_backend.sampling.triton.verification_host:TritonVerifier",
        triton,
    ),
    Entry(
        "reference",
        "verification reference",
        "dsl_backend.sampling.verification_reference:ReferenceVerifier",
        cpu_only,
    ),
)


def choose(spec: VerificationSpec, target: Target, kernel: str | None = None) -> Entry[VerificationSpec]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
