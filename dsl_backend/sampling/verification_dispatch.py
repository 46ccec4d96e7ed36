# SPDX-License-Identifier: Apache-2.0
"""The kernels that verify drafts, best first, and what each one does not serve."""

from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry
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
    reasons = []
    if target.is_cpu and not target.interpreted:
        reasons.append("runs on a CUDA device, this is a CPU (TRITON_INTERPRET=1 interprets it)")
    if not target.is_cpu and target.capability is not None and target.capability < (7, 5):
        reasons.append(f"needs compute capability 7.5 or newer, this is {target.arch}")
    return reasons


def cpu_only(spec: VerificationSpec, target: Target) -> list[str]:
    """It allocates memory at every step."""
    return [] if target.is_cpu else [f"is for CPUs, this is {target.arch}"]


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
