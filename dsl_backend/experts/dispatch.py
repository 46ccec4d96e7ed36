# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a layer of experts on a target: a table of reasons, best kernel first."""

from functools import partial

from dsl_backend.experts import block_scaled_configs, scaled_configs, weight_only_configs
from dsl_backend.experts.configs import KERNEL_ARCHS, Kind, candidates
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.quant.format import MXFP4
from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged, cpu_only, triton_objections
from dsl_backend.runtime.target import Target

OPERATION = "experts"
# Elements in 16 bytes.
VECTOR = 8
# Bytes that rows of x, weights and out start at multiples of, by kernel; others take any.
SCALED = ("cute-scaled", "cute-scaled-decode", "cute-scaled-sm100", "cute-block-scaled")
ALIGNMENT = {
    "cute": 16,
    **dict.fromkeys((*SCALED, "cute-weight-only"), 16),
    **{f"cute-{kind.value}": 16 for kind in Kind},
}

# Kernels whose grouped GEMMs add to the output where `ExpertsSpec.may_add`; for few tokens the sum is in order.
ADDING = ("cute", "cute-grouped", "cute-overlapped")


def weight_alignment(name: str, spec: ExpertsSpec) -> int:
    """Bytes that a kernel's rows of weights start at multiples of."""
    if name == "cute-block-scaled" and spec.weight == MXFP4:
        return block_scaled_configs.UNPACKED_BYTES
    return ALIGNMENT.get(name, 1)


def unscaled(spec: ExpertsSpec) -> list[str]:
    """What kernels for weights in 16 bits need."""
    return [] if spec.weight is None else [f"weights in {spec.weight}: this one's are in 16 bits"]


def unshared(spec: ExpertsSpec) -> list[str]:
    """What kernels without shared experts need."""
    return [f"{spec.shared_experts} shared experts: run them as a layer of their own"] if spec.shared_experts else []


def cute(spec: ExpertsSpec, target: Target, kind: Kind | None = None) -> list[str]:
    """What the CuTe DSL kernels need; those for any number of tokens, or those of a kind."""
    if reasons := target.arch_objections(*KERNEL_ARCHS):
        return reasons
    reasons = [*unscaled(spec), *toolkit.missing()]
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(spec, name)
        if size % VECTOR:
            reasons.append(f"{name} {size} is not a multiple of {VECTOR}")
    if not reasons and not candidates(spec, target, kind):
        reasons.append(f"{target.smem_bytes} bytes of shared memory are too few for every tile")
    return reasons


def cute_scaled(spec: ExpertsSpec, target: Target) -> list[str]:
    """What SM90's kernels for weights in 8 bits need; they were timed, and Triton's were not."""
    return target.arch_objections("sm90") or [*toolkit.missing(), *scaled_configs.objections(spec, target)]


def cute_scaled_decode(spec: ExpertsSpec, target: Target) -> list[str]:
    """The same with kernels of their own for few tokens, which gain in one row alone on an H200."""
    return target.arch_objections("sm90") or [*toolkit.missing(), *scaled_configs.decode_objections(spec, target)]


def cute_scaled_sm100(spec: ExpertsSpec, target: Target) -> list[str]:
    """The same of SM100's, which have not run on a GPU."""
    return target.arch_objections("sm100") or [*toolkit.missing(), *scaled_configs.objections(spec, target)]


def cute_block_scaled(spec: ExpertsSpec, target: Target) -> list[str]:
    """What SM100's kernels whose products apply the scales need; they have not run on a GPU."""
    return target.arch_objections("sm100") or [*toolkit.missing(), *block_scaled_configs.objections(spec, target)]


def cute_weight_only(spec: ExpertsSpec, target: Target) -> list[str]:
    """What kernels for MXFP4 under 16-bit activations need. SM90's are slow for many tokens; SM100's were not timed."""
    return target.arch_objections(*KERNEL_ARCHS) or [*toolkit.missing(), *weight_only_configs.objections(spec, target)]


def triton(spec: ExpertsSpec, target: Target) -> list[str]:
    return unscaled(spec) + unshared(spec) + triton_objections(target, spec.dtype)


def triton_scaled(spec: ExpertsSpec, target: Target) -> list[str]:
    scaled = ["weights in 16 bits: this one's are in 8 bits"] if spec.weight is None else []
    if spec.mma_scaled or spec.weight_only:
        scaled = [f"weights in {spec.weight}: this one's scales are those of e4m3 blocks or channels"]
    return scaled + triton_objections(target, spec.dtype)


TABLE = (
    Entry("cute", "experts sm90/sm100", "dsl_backend.experts.cute.host:bind", cute),
    # The one above chooses between them by the number of tokens.
    *(
        Entry(
            f"cute-{kind.value}",
            f"experts {kind.value}",
            f"dsl_backend.experts.cute.host:bind_{kind.value}",
            partial(cute, kind=kind),
            by_name=True,
        )
        for kind in Kind
    ),
    Entry("cute-scaled", "experts e4m3 sm90", "dsl_backend.experts.cute.scaled_host:bind", cute_scaled),
    Entry(
        "cute-scaled-decode",
        "experts e4m3 decode sm90",
        "dsl_backend.experts.cute.scaled_host:bind_decode",
        cute_scaled_decode,
        by_name=True,
    ),
    Entry(
        "cute-scaled-sm100",
        "experts e4m3 sm100",
        "dsl_backend.experts.cute.scaled_host:bind",
        cute_scaled_sm100,
        by_name=True,
    ),
    Entry(
        "cute-block-scaled",
        "experts mxfp8/mxfp4/nvfp4 sm100",
        "dsl_backend.experts.cute.block_scaled_host:bind",
        cute_block_scaled,
        by_name=True,
    ),
    Entry(
        "cute-weight-only",
        "experts mxfp4 under 16 bits sm90/sm100",
        "dsl_backend.experts.cute.weight_only_host:bind",
        cute_weight_only,
        by_name=True,
    ),
    Entry("triton", "experts triton", "dsl_backend.experts.triton.kernels:bind", triton),
    Entry("triton", "experts e4m3 triton", "dsl_backend.experts.triton.scaled:bind", triton_scaled),
    Entry("reference", "experts reference", "dsl_backend.experts.reference:bind", cpu_only),
)


def judge(spec: ExpertsSpec, target: Target) -> Judged[ExpertsSpec]:
    """Every entry with its objections, best entry first."""
    return dispatch.judge(TABLE, spec, target)


def choose(spec: ExpertsSpec, target: Target, kernel: str | None = None) -> Entry[ExpertsSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
