# SPDX-License-Identifier: Apache-2.0
"""Which kernel samples on a target: a table of reasons, best kernel first."""

import enum

from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ClusterConfig, widest_vector
from dsl_backend.sampling.spec import SamplingSpec


class Operation(enum.Enum):
    """The operations of this family, by the names that `dsl-backend doctor` prints."""

    SAMPLE = "sampling.sample"


def cute(spec: SamplingSpec, target: Target) -> list[str]:
    """The kernel needs clusters; it is compiled for and proven on SM90 and SM100."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    reasons = [*toolkit.missing()]
    if spec.logprobs:
        reasons.append("gives tokens alone: logprobs=False is needed")
    config = ClusterConfig.default(spec, target, 1, widest_vector(spec))
    return reasons + config.objections(spec, target)


def triton(spec: SamplingSpec, target: Target) -> list[str]:
    reasons = []
    if target.is_cpu and not target.interpreted:
        reasons.append("runs on a CUDA device, this is a CPU (TRITON_INTERPRET=1 interprets it)")
    if not target.is_cpu and target.capability is not None and target.capability < (7, 5):
        reasons.append(f"needs compute capability 7.5 or newer, this is {target.arch}")
    return reasons


def cpu_only(spec: SamplingSpec, target: Target) -> list[str]:
    """The reference sorts and allocates at every step."""
    return [] if target.is_cpu else [f"is for CPUs, this is {target.arch}"]


TABLE: dict[Operation, tuple[Entry[SamplingSpec], ...]] = {
    # sm90's kernel uses nothing that SM100 lacks or does better: one class serves both.
    Operation.SAMPLE: (
        Entry("cute", "sampling sm90/sm100", "dsl_backend.sampling.cute.host:CuteSampler", cute),
        Entry("triton", "sampling triton", "dsl_backend.sampling.triton.sample:TritonSampler", triton),
        Entry("reference", "sampling reference", "dsl_backend.sampling.reference:ReferenceSampler", cpu_only),
    )
}


def judge(operation: Operation, spec: SamplingSpec, target: Target) -> Judged[SamplingSpec]:
    """Every entry of the operation with its objections, best entry first."""
    return dispatch.judge(TABLE[operation], spec, target)


def choose(operation: Operation, spec: SamplingSpec, target: Target, kernel: str | None = None) -> Entry[SamplingSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(operation.value, TABLE[operation], spec, target, kernel)
