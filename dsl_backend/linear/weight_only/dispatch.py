# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a linear layer of packed weights on a target: a table of reasons, best kernel first."""

from dsl_backend.gemm.sm90 import weight_only_configs
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged, cpu_only
from dsl_backend.runtime.target import Target

OPERATION = "weight_only_linear"


def sm90(spec: WeightOnlyGemmSpec, target: Target) -> list[str]:
    if reasons := target.arch_objections("sm90"):
        return reasons
    return [*toolkit.missing(), *weight_only_configs.objections(spec, target.smem_bytes)]


TABLE: tuple[Entry[WeightOnlyGemmSpec], ...] = (
    Entry("cute-sm90", "weight-only-linear sm90", "dsl_backend.linear.weight_only.cute.host:bind", sm90),
    Entry("reference", "weight-only-linear reference", "dsl_backend.linear.weight_only.reference:bind", cpu_only),
)


def judge(spec: WeightOnlyGemmSpec, target: Target) -> Judged[WeightOnlyGemmSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: WeightOnlyGemmSpec, target: Target, kernel: str | None = None) -> Entry[WeightOnlyGemmSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
