# SPDX-License-Identifier: Apache-2.0
"""The kernels that rotate queries and keys and write keys and values, best first, and what each does not serve."""

from dsl_backend.attention.dispatch import cute_writes, triton_common
from dsl_backend.attention.rope_spec import RopeSpec
from dsl_backend.checks import short
from dsl_backend.runtime import dispatch
from dsl_backend.runtime.dispatch import Entry, cpu_only
from dsl_backend.runtime.target import Target

# Printed by `dsl-backend doctor`.
OPERATION = "attention.rope_write_kv"
# Elements of a thread of the CuTe DSL kernel, and the most of a head, which a warp holds.
PAIR, MOST = 16, 512


def cute(spec: RopeSpec, target: Target) -> list[str]:
    """What the CuTe DSL kernel needs; it has no instruction of one SM alone."""
    reasons = cute_writes(spec.layer, target)
    if target.arch_objections("sm90", "sm100"):
        return reasons
    sizes = (("head size", spec.layer.head_dim), ("value head size", spec.layer.head_dim_v), ("", spec.rotary_dim))
    for name, size in sizes:
        if size % PAIR or size > MOST:
            what = f"{name} {size}" if name else f"{size} rotated elements"
            reasons.append(f"{what}: a multiple of {PAIR} up to {MOST} is needed")
    if spec.norm_dtype not in (None, spec.dtype):
        assert spec.norm_dtype is not None
        reasons.append(f"weights of a norm are {short(spec.norm_dtype)}: {short(spec.dtype)} is needed")
    return reasons


def triton(spec: RopeSpec, target: Target) -> list[str]:
    return triton_common(spec.layer, target)


TABLE = (
    Entry("cute", "rope-write-kv sm90/sm100", "dsl_backend.attention.cute.rope_host:RopeWriteKV", cute),
    Entry("triton", "rope-write-kv triton", "dsl_backend.attention.triton.rope:RopeWriteKV", triton),
    Entry("reference", "rope-write-kv reference", "dsl_backend.attention.rope_reference:RopeWriteKV", cpu_only),
)


def choose(spec: RopeSpec, target: Target, kernel: str | None = None) -> Entry[RopeSpec]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
