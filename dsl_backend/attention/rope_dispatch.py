# SPDX-License-Identifier: Apache-2.0
"""The kernels that rotate queries and keys and write keys and values, best first, and what each does not serve."""

from typing import Any

from dsl_backend.attention.dispatch import cute_writes, stored_types, triton_common
from dsl_backend.attention.rope_spec import AnySpec, MLARopeSpec, RopeSpec
from dsl_backend.checks import short
from dsl_backend.runtime import dispatch
from dsl_backend.runtime.dispatch import Entry, cpu_only
from dsl_backend.runtime.target import Target

# Printed by `dsl-backend doctor`.
OPERATION, MLA_OPERATION = "attention.rope_write_kv", "attention.rope_write_mla"
# Elements of a thread of the CuTe DSL kernel, and the most of a head, which a warp holds.
PAIR, MOST = 16, 512


def cute(spec: RopeSpec, target: Target) -> list[str]:
    """What the CuTe DSL kernel needs; it has no instruction of one SM alone."""
    reasons = cute_writes(spec.layer, target)
    if target.arch_objections("sm90", "sm100"):
        return reasons
    sizes = (("head size", spec.layer.head_dim), ("value head size", spec.layer.head_dim_v), ("", spec.rotary_dim))
    for name, size in sizes:
        what = f"{name} {size}" if name else f"{size} rotated elements"
        reasons += against_size(what, size)
    if spec.norm_dtype not in (None, spec.dtype):
        assert spec.norm_dtype is not None
        reasons.append(f"weights of a norm are {short(spec.norm_dtype)}: {short(spec.dtype)} is needed")
    return reasons


def triton(spec: RopeSpec, target: Target) -> list[str]:
    return triton_common(spec.layer, target)


def against_size(what: str, size: int) -> list[str]:
    """Why a warp's threads do not hold so many elements."""
    return [f"{what}: a multiple of {PAIR} up to {MOST} is needed"] if size % PAIR or size > MOST else []


def mla_cute(spec: MLARopeSpec, target: Target) -> list[str]:
    """What the CuTe DSL kernel for MLA needs; it has no instruction of one SM alone either."""
    reasons = cute_writes(spec.layer, target)
    if target.arch_objections("sm90", "sm100"):
        return reasons
    reasons += against_size(f"latent size {spec.latent_dim}", spec.latent_dim)
    reasons += against_size(f"{spec.rope_dim} rotated elements", spec.rope_dim)
    if spec.norm_dtype != spec.dtype:
        reasons.append(f"weights of the norm are {short(spec.norm_dtype)}: {short(spec.dtype)} is needed")
    return reasons


def mla_triton(spec: MLARopeSpec, target: Target) -> list[str]:
    return triton_common(spec.layer, target)


def on_cpu(spec: AnySpec, target: Target) -> list[str]:
    """What the references need, which take what a CPU computes with, and no NVFP4 cache either."""
    return cpu_only(spec, target) + (stored_types(spec.layer) if spec.layer.kv.nvfp4 else [])


TABLE = (
    Entry("cute", "rope-write-kv sm90/sm100", "dsl_backend.attention.cute.rope_host:RopeWriteKV", cute),
    Entry("triton", "rope-write-kv triton", "dsl_backend.attention.triton.rope:RopeWriteKV", triton),
    Entry("reference", "rope-write-kv reference", "dsl_backend.attention.rope_reference:RopeWriteKV", on_cpu),
)
MLA_TABLE = (
    Entry("cute", "rope-write-mla sm90/sm100", "dsl_backend.attention.cute.mla_rope_host:RopeWriteMLA", mla_cute),
    Entry("triton", "rope-write-mla triton", "dsl_backend.attention.triton.mla_rope:RopeWriteMLA", mla_triton),
    Entry("reference", "rope-write-mla reference", "dsl_backend.attention.rope_reference:RopeWriteMLA", on_cpu),
)


def operation_of(spec: AnySpec) -> str:
    return OPERATION if isinstance(spec, RopeSpec) else MLA_OPERATION


def judge(spec: AnySpec, target: Target) -> list[tuple[Entry[Any], list[str]]]:
    """Each kernel for layers like the spec's, best first, and what it objects to."""
    table: tuple[Entry[Any], ...] = TABLE if isinstance(spec, RopeSpec) else MLA_TABLE
    return [(entry, entry.objections(spec, target)) for entry in table]


def choose(spec: AnySpec, target: Target, kernel: str | None = None) -> Entry[Any]:
    """The first entry without objections; arguments and errors as in `runtime.dispatch`."""
    if isinstance(spec, RopeSpec):
        return dispatch.choose(OPERATION, TABLE, spec, target, kernel)
    return dispatch.choose(MLA_OPERATION, MLA_TABLE, spec, target, kernel)
