# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves an attention problem on a target: a table of kernels with their objections, best first."""

import enum
from collections.abc import Callable, Sequence

import torch

from dsl_backend.attention import variants
from dsl_backend.attention.cute.mla_configs import without_fp8_products
from dsl_backend.attention.cute.sm90 import dense_configs as sm90
from dsl_backend.attention.cute.sm90 import fp8_configs as fp8_sm90
from dsl_backend.attention.cute.sm90 import mla_configs as mla_sm90
from dsl_backend.attention.cute.sm90 import mla_fp8_configs as mla_fp8_sm90
from dsl_backend.attention.cute.sm100 import dense_configs as sm100
from dsl_backend.attention.cute.sm100 import fp8_configs as fp8_sm100
from dsl_backend.attention.cute.sm100 import mla_configs as mla_sm100
from dsl_backend.attention.cute.sm100 import mla_fp8_configs as mla_fp8_sm100
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.attention.tuned import Heuristic, config_of
from dsl_backend.checks import short
from dsl_backend.errors import by_reason
from dsl_backend.quant.format import FP8, KV_BLOCK
from dsl_backend.runtime import dispatch, toolkit
from dsl_backend.runtime.dispatch import Entry, Judged, Variant, cpu_only
from dsl_backend.runtime.target import Target


class Operation(enum.Enum):
    """The operations of this family, by the names that `dsl-backend doctor` prints."""

    PREFILL = "attention.prefill"
    DECODE = "attention.decode"
    MLA_DECODE = "attention.mla_decode"
    WRITE_KV = "attention.write_kv"


def stored_types(spec: AttentionSpec, nvfp4: bool = False) -> list[str]:
    """The storage types of keys and values that every GPU kernel accepts: the queries' dtype, and fp8.

    Args:
        nvfp4: the kernel takes NVFP4 too.
    """
    if spec.kv.nvfp4:
        return nvfp4_rows(spec) if nvfp4 else ["has no NVFP4 cache"]
    if spec.kv_dtype == spec.dtype or spec.kv.fp8:
        return []
    return [f"keys of {short(spec.kv_dtype)} are none of {short(spec.dtype)}, {', '.join(kind.name for kind in FP8)}"]


def nvfp4_rows(spec: AttentionSpec) -> list[str]:
    """What an NVFP4 cache needs: nothing of a layer with another one."""
    if not spec.kv.nvfp4:
        return []
    reasons = []
    for name, dim in (("head size", spec.head_dim), ("value head size", spec.head_dim_v)):
        if dim % KV_BLOCK:
            reasons.append(f"{name} {dim} is not a multiple of {KV_BLOCK}, the elements of a block of an NVFP4 cache")
    if spec.page_size is None:
        reasons.append("an NVFP4 cache has pages")
    if spec.mla:
        reasons.append("an NVFP4 cache has keys and values of their own, not the latent ones of MLA")
    return reasons


def float_types(spec: AttentionSpec, nvfp4: bool = False) -> list[str]:
    """The dtypes that every GPU kernel accepts: of queries, and of stored keys and values."""
    if spec.dtype in (torch.float16, torch.bfloat16):
        return stored_types(spec, nvfp4)
    return [f"dtype {short(spec.dtype)} is not one of float16, bfloat16", *stored_types(spec, nvfp4)]


def storage(spec: AttentionSpec, nvfp4: bool = False) -> list[str]:
    """The dtypes and page sizes that every GPU kernel that attends accepts."""
    if spec.page_size is None or spec.page_size % 16 == 0:
        return float_types(spec, nvfp4)
    return [*float_types(spec, nvfp4), f"page size {spec.page_size} is not a multiple of 16"]


def triton_common(spec: AttentionSpec, target: Target, nvfp4: bool = False) -> list[str]:
    """What every Triton kernel of this family needs."""
    return dispatch.triton_objections(target, spec.dtype) + storage(spec, nvfp4)


def triton_writes(spec: AttentionSpec, target: Target) -> list[str]:
    return triton_common(spec, target, nvfp4=True)


def on_cpu(spec: AttentionSpec, target: Target) -> list[str]:
    """What the references need."""
    return cpu_only(spec, target) + nvfp4_rows(spec)


def dense_head_dims(spec: AttentionSpec) -> list[str]:
    reasons = []
    for name, dim in (("head size", spec.head_dim), ("value head size", spec.head_dim_v)):
        if not (dim % 8 == 0 and (64 <= dim <= 256 or dim == 512)):
            reasons.append(f"{name} {dim} is not a multiple of 8 from 64 to 256, or 512")
    if spec.mla:
        reasons.append("serves keys and values of their own, not the latent ones of MLA")
    return reasons


# latent and rope elements of the models that use absorbed MLA: DeepSeek V2/V3, Kimi (512 + 64), MiniCPM3 (256 + 32)
# and 320/256.
LATENT_DIMS = ((576, 512), (320, 256), (288, 256))


def triton_dense(spec: AttentionSpec, target: Target) -> list[str]:
    return triton_common(spec, target, nvfp4=True) + dense_head_dims(spec)


def latent_only(spec: AttentionSpec) -> list[str]:
    """What kernels of absorbed MLA need."""
    reasons = []
    if not spec.mla:
        reasons.append("serves the latent keys of MLA only")
    if (spec.head_dim, spec.head_dim_v) not in LATENT_DIMS:
        known = ", ".join(f"{a}/{b}" for a, b in LATENT_DIMS)
        reasons.append(f"latent sizes {spec.head_dim}/{spec.head_dim_v} are not one of {known}")
    if spec.page_size is None:
        reasons.append("needs paged keys")
    return reasons


def triton_mla(spec: AttentionSpec, target: Target) -> list[str]:
    return triton_common(spec, target) + latent_only(spec)


def cute_mla(spec: AttentionSpec) -> list[str]:
    """What the CuTe DSL kernels of absorbed MLA need."""
    return [*toolkit.missing(), *storage(spec), *latent_only(spec)]


# Head sizes whose values are split: a split must have the swizzled chunks of queries, since outputs reuse their smem.
WIDE_DIMS = (384, 512)


def cute_dense(spec: AttentionSpec, nvfp4: bool = False) -> list[str]:
    """What the CuTe DSL kernels of dense attention need, on any SM; nvfp4: it has conversions from and to NVFP4."""
    reasons = [*toolkit.missing(), *storage(spec, nvfp4)]
    # TMA and vectors of 16 bytes: of values for their outputs too.
    unit = 16 if spec.is_fp8_kv else 8
    units = unit, 32 if spec.is_nvfp4_out else 16 if spec.is_quantized_out else unit
    dims = ("head size", spec.head_dim), ("value head size", spec.head_dim_v)
    for (name, dim), unit in zip(dims, units, strict=True):
        if (dim % unit or not 16 <= dim <= 256) and dim not in WIDE_DIMS:
            wide = " or ".join(map(str, WIDE_DIMS))
            reasons.append(f"{name} {dim} is not a multiple of {unit} from 16 to 256, {wide}")
    if spec.mla:
        reasons.append("serves keys and values of their own, not the latent ones of MLA")
    return reasons + ([] if nvfp4 else nvfp4_outputs(spec))


def nvfp4_outputs(spec: AttentionSpec) -> list[str]:
    """Outputs that SM90 has no conversion to, nor a matrix product that would read them."""
    return ["outputs in nvfp4 are those of SM100, which has instructions for e2m1"] if spec.is_nvfp4_out else []


def cute_dense_sm100(spec: AttentionSpec) -> list[str]:
    """What SM100's need, which dequantize NVFP4 too."""
    reasons = cute_dense(spec, nvfp4=True)
    for name, dim in (("head size", spec.head_dim), ("value head size", spec.head_dim_v)):
        if spec.kv.nvfp4 and (dim % 32 or not 32 <= dim <= 256):
            reasons.append(f"{name} {dim} of an NVFP4 cache is not a multiple of 32 up to 256")
    return reasons


def fp8_dense(spec: AttentionSpec, unserved: list[str]) -> list[str]:
    """What the kernels with products in 8 bits need, besides an architecture's own needs."""
    reasons = [*toolkit.missing(), *storage(spec), *unserved]
    if spec.mla:
        reasons.append("serves keys and values of their own, not the latent ones of MLA")
    return reasons


def fp8_products(spec: AttentionSpec) -> list[str]:
    """What SM90's kernel with products in 8 bits needs."""
    return fp8_dense(spec, fp8_sm90.unserved(spec) + nvfp4_outputs(spec))


def fp8_products_sm100(spec: AttentionSpec) -> list[str]:
    """What SM100's needs."""
    return fp8_dense(spec, fp8_sm100.unserved(spec))


def fp8_decode(spec: AttentionSpec) -> list[str]:
    """The short queries of layers whose long ones have products in 8 bits."""
    return fp8_products(spec) or cute_dense(spec)


def fp8_decode_sm100(spec: AttentionSpec) -> list[str]:
    return fp8_products_sm100(spec) or cute_dense_sm100(spec)


def fp8_mla(spec: AttentionSpec) -> list[str]:
    """What the kernel of absorbed MLA with products in 8 bits needs."""
    return cute_mla(spec) or without_fp8_products(spec)


def cute_writes(spec: AttentionSpec, target: Target) -> list[str]:
    """What the CuTe DSL kernel that writes keys and values needs; it has no instruction of one SM alone."""
    if reasons := target.arch_objections("sm90", "sm100"):
        return reasons
    reasons = [*toolkit.missing(), *float_types(spec)]
    for name, dim in zip(("key", "value"), spec.written_dims, strict=True):
        if dim % 8:
            reasons.append(f"{name}s of {dim} elements are not a multiple of 8")
    if spec.page_size is None:
        reasons.append("needs paged keys")
    return reasons


def cute(
    kernel_arch: str,
    title: str,
    kernel: str,
    needs: Callable[[AttentionSpec], list[str]],
    default: Heuristic,
    variants_of: Callable[[AttentionSpec, Target], list[Variant]],
    by_name: str | None = None,
) -> Entry[AttentionSpec]:
    """A kernel of one architecture. It objects to other ones, then by its needs, then by its configuration's.

    Args:
        by_name: the kernel is used only if a user gives this name.
    """

    def objections(spec: AttentionSpec, target: Target) -> list[str]:
        if reasons := target.arch_objections(kernel_arch):
            return reasons
        return needs(spec) or config_of(spec, target, default).objections(spec, target.smem_bytes)

    path = f"dsl_backend.attention.cute.{kernel_arch}.{kernel}"
    return Entry(by_name or "cute", f"{title} {kernel_arch}", path, objections, variants_of, by_name is not None)


# The kernels of fp8 caches with products in 8 bits, which are less exact: by name. Short queries of dense layers have
# products in 16 bits, as by default, up to 64 rows: heads of a group times tokens.
FP8_PRODUCTS = "cute-fp8"


def reference(title: str) -> Entry[AttentionSpec]:
    return Entry("reference", title, "dsl_backend.attention.reference:ReferenceKernel", on_cpu)


TABLE: dict[Operation, tuple[Entry[AttentionSpec], ...]] = {
    # Kernels in CuTe DSL, one for each SM, come first; with fp8 keys too (H200: 1.4 to 3.75 times as fast as Triton).
    Operation.PREFILL: (
        cute("sm90", "dense-prefill", "dense_host:Prefill", cute_dense, sm90.default_config, variants.SM90_PREFILL),
        cute(
            "sm100",
            "dense-prefill",
            "dense_host:Prefill",
            cute_dense_sm100,
            sm100.default_config,
            variants.SM100_PREFILL,
        ),
        cute(
            "sm90",
            "dense-prefill e4m3",
            "dense_host:Fp8Prefill",
            fp8_products,
            fp8_sm90.default_fp8_config,
            variants.SM90_FP8_PREFILL,
            FP8_PRODUCTS,
        ),
        cute(
            "sm100",
            "dense-prefill e4m3",
            "dense_host:Fp8Prefill",
            fp8_products_sm100,
            fp8_sm100.default_fp8_config,
            variants.SM100_FP8_PREFILL,
            FP8_PRODUCTS,
        ),
        Entry("triton", "dense-prefill triton", "dsl_backend.attention.triton.build:prefill", triton_dense),
        reference("dense-prefill reference"),
    ),
    Operation.DECODE: (
        cute("sm90", "dense-decode", "dense_host:SplitKV", cute_dense, sm90.default_split_config, variants.SM90_DECODE),
        cute(
            "sm100",
            "dense-decode",
            "dense_host:SplitKV",
            cute_dense_sm100,
            sm100.default_split_config,
            variants.SM100_DECODE,
        ),
        cute(
            "sm90",
            "dense-decode e4m3-from-65-rows",
            "dense_host:fp8_decode",
            fp8_decode,
            sm90.default_split_config,
            variants.SM90_FP8_DECODE,
            FP8_PRODUCTS,
        ),
        cute(
            "sm100",
            "dense-decode e4m3-from-65-rows",
            "dense_host:fp8_decode",
            fp8_decode_sm100,
            sm100.default_split_config,
            variants.SM100_FP8_DECODE,
            FP8_PRODUCTS,
        ),
        Entry("triton", "dense-decode triton", "dsl_backend.attention.triton.build:decode", triton_dense),
        reference("dense-decode reference"),
    ),
    Operation.MLA_DECODE: (
        cute("sm90", "mla-decode", "mla_host:MlaSplitKV", cute_mla, mla_sm90.default_mla_config, variants.SM90_MLA),
        cute("sm100", "mla-decode", "mla_host:MlaSplitKV", cute_mla, mla_sm100.default_mla_config, variants.SM100_MLA),
        cute(
            "sm90",
            "mla-decode e4m3",
            "mla_host:Fp8MlaSplitKV",
            fp8_mla,
            mla_fp8_sm90.default_fp8_mla_config,
            variants.SM90_FP8_MLA,
            FP8_PRODUCTS,
        ),
        cute(
            "sm100",
            "mla-decode e4m3",
            "mla_host:Fp8MlaSplitKV",
            fp8_mla,
            mla_fp8_sm100.default_fp8_mla_config,
            variants.SM100_FP8_MLA,
            FP8_PRODUCTS,
        ),
        Entry("triton", "mla-decode triton", "dsl_backend.attention.triton.build:decode", triton_mla),
        reference("mla-decode reference"),
    ),
    Operation.WRITE_KV: (
        Entry("cute", "write-kv sm90/sm100", "dsl_backend.attention.cute.write_kv_host:WriteKV", cute_writes),
        Entry("triton", "write-kv triton", "dsl_backend.attention.triton.write_kv:WriteKV", triton_writes),
        Entry("reference", "write-kv reference", "dsl_backend.attention.reference:WriteKV", on_cpu),
    ),
}


def judge(operation: Operation, spec: AttentionSpec, target: Target) -> Judged[AttentionSpec]:
    """Every entry of the operation with its objections, best entry first."""
    return dispatch.judge(TABLE[operation], spec, target)


def choose(
    operation: Operation, spec: AttentionSpec, target: Target, kernel: str | None = None
) -> Entry[AttentionSpec]:
    """The first entry that does not object; arguments and errors as in `runtime.dispatch`."""
    return dispatch.choose(operation.value, TABLE[operation], spec, target, kernel)


def attention_of(spec: AttentionSpec) -> tuple[Operation, ...]:
    """The operations by which a layer of this spec attends."""
    return (Operation.MLA_DECODE,) if spec.mla else (Operation.PREFILL, Operation.DECODE)


def operations_of(spec: AttentionSpec) -> Sequence[Operation]:
    """The operations that a layer of this spec needs."""
    attend = attention_of(spec)
    return attend if spec.page_size is None else (*attend, Operation.WRITE_KV)


def anything(operation: Operation) -> str | None:
    """No kernel is asked for by name."""
    return None


def reasons_against(
    spec: AttentionSpec, target: Target, named: Callable[[Operation], str | None] = anything
) -> list[str]:
    """Why a layer of this spec cannot be served on the target: empty where every operation has a kernel.

    Each reason appears once, with the kernels that give it.

    Args:
        named: the kernel that must serve an operation, by its name; None where any may.
    """
    objections: dict[str, list[str]] = {}
    for operation in operations_of(spec):
        name = named(operation)
        if name is None:
            judged = judge(operation, spec, target)
        else:
            judged = [(entry, entry.objections(spec, target)) for entry in TABLE[operation] if entry.name == name]
        if not judged:
            objections.setdefault(str(name), []).append(f"{operation.value} has no kernel of that name")
        if all(reasons for _, reasons in judged):
            for entry, why in judged:
                objections.setdefault(entry.title, []).extend(why)
    return [f"{', '.join(kernels)}: {reason}" for reason, kernels in by_reason(objections).items()]
