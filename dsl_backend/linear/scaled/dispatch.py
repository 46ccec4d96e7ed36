# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a linear layer of quantised operands on a target: a table of reasons, best kernel first."""

from collections.abc import Callable
from functools import partial

from dsl_backend.gemm.sm90 import scaled_configs as sm90_configs
from dsl_backend.gemm.sm100 import scaled_configs as sm100_configs
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged, cpu_only, triton_objections
from dsl_backend.runtime.target import Target

OPERATION = "scaled_linear"


def mma_scales(spec: ScaledLinearSpec) -> list[str]:
    """Why a kernel without matrix products that have scales of their own does not serve."""
    if spec.x.swizzled:
        return [f"x is {spec.x}: no kernel but SM100's multiplies it"]
    if spec.out is not None and spec.out.swizzled:
        return [f"out is {spec.out}: no kernel but SM100's makes it"]
    return []


def triton(spec: ScaledLinearSpec, target: Target) -> list[str]:
    return mma_scales(spec) + triton_objections(target, spec.dtype)


def cute(
    arch: str, against_tiles: Callable[[ScaledLinearSpec, int], list[str]], spec: ScaledLinearSpec, target: Target
) -> list[str]:
    """What an SM's CuTe DSL kernels need; a launch of its own may quantise the output.

    Args:
        against_tiles: why an SM's tiles do not serve, by the bytes of shared memory.
    """
    if reasons := target.arch_objections(arch):
        return reasons
    reasons = [*toolkit.missing()]
    if not spec.aligned:
        reasons.append("TMA needs rows, and scales of rows, that start at multiples of 16 bytes")
    against = against_tiles(spec, target.smem_bytes)
    if against and spec.may_be_quantised_beside:
        against = against_tiles(spec.in_float32, target.smem_bytes)
    return reasons + against


sm90 = partial(cute, "sm90", sm90_configs.objections)
sm100 = partial(cute, "sm100", sm100_configs.objections)


def reference(spec: ScaledLinearSpec, target: Target) -> list[str]:
    reasons = cpu_only(spec, target)
    if spec.batch_invariant:
        reasons.append("is not batch invariant: torch sums in an order that depends on the number of rows")
    return reasons


TABLE: tuple[Entry[ScaledLinearSpec], ...] = (
    # By name: they were never timed.
    Entry("cute-sm100", "scaled-linear sm100", "dsl_backend.linear.scaled.cute.host:bind", sm100, by_name=True),
    Entry("cute-sm90", "scaled-linear sm90", "dsl_backend.linear.scaled.cute.host:bind", sm90),
    Entry("triton", "scaled-linear triton", "dsl_backend.linear.scaled.triton.gemm:bind", triton),
    Entry("reference", "scaled-linear reference", "dsl_backend.linear.scaled.reference:bind", reference),
)


def judge(spec: ScaledLinearSpec, target: Target) -> Judged[ScaledLinearSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: ScaledLinearSpec, target: Target, kernel: str | None = None) -> Entry[ScaledLinearSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
