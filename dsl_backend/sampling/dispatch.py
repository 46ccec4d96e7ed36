# SPDX-License-Identifier: Apache-2.0
"""The sampler's kernels, best first, and what each one does not serve."""

from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, cpu_only, triton_objections
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ClusterConfig, widest_vector
from dsl_backend.sampling.spec import SamplingSpec

# Printed by `dsl-backend doctor`.
OPERATION = "sampling.sample"


def cute(spec: SamplingSpec, target: Target) -> list[str]:
    """It needs thread block clusters, and is compiled and tested for SM90 and SM100 only."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    reasons = [*toolkit.missing()]
    config = ClusterConfig.default(spec, target, 1, widest_vector(spec))
    return reasons + config.objections(spec, target)


def triton(spec: SamplingSpec, target: Target) -> list[str]:
    return triton_objections(target)


# One class serves SM90 and SM100: SM100 has no instruction that would make it faster.
TABLE = (
    Entry("cute", "sampling cluster-per-row sm90/sm100", "dsl_backend.sampling.cute.host:CuteSampler", cute),
    Entry("triton", "sampling program-per-row triton", "dsl_backend.sampling.triton.host:TritonSampler", triton),
    Entry("reference", "sampling reference", "dsl_backend.sampling.reference:ReferenceSampler", cpu_only),
)


def choose(spec: SamplingSpec, target: Target, kernel: str | None = None) -> Entry[SamplingSpec]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
