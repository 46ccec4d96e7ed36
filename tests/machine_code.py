# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the CuTe DSL kernels: `python -m tests.machine_code [EVERY] [ID ...]`.

Neither an emulator nor a test of results sees registers that spill, or matrix products that ptxas lets run one at a
time because it found no registers for them in flight (its C7512): the code is right, and slow. One line of JSON for
each kernel of the default configurations, made for a GPU that need not be there.

It takes a process of its own, in which CuTe DSL keeps its machine code: that is decided when it is imported.
"""

import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import SWIGLU_OAI, Geglu, Swiglu
from dsl_backend.gemm.sm90.configs import SwapABConfig
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    BLOCK_SCALED_E8M0,
    GROUP_SCALED,
    GROUP_SCALED_E8M0,
    MXFP4,
    MXFP4_TILED,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    TENSOR_SCALED,
)
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime import registry
from dsl_backend.sampling.spec import LogprobsMode, SamplingSpec
from dsl_backend.testing.cases import FP16, FULL, Case, mla

# NVIDIA's cuda-binary format: .nv.info has attributes (format, kind, size or value), some of them of a kernel's symbol.
TEXT, INFO = ".text.", ".nv.info"
SIZED, FRAME_SIZE, REGISTERS = 4, 0x11, 0x2F
# ELF's own.
SYMBOL_BYTES, NO_CONTENTS = 24, 8


@dataclass(frozen=True, kw_only=True)
class Code:
    """A kernel's machine code.

    Attributes:
        id: of the subject.
        kernel: the first or a later kernel of the function; the merge kernel comes behind the one that it merges for.
        registers: of a thread when it starts; warps trade them later.
        stack: bytes of local memory of a thread: what spills, and arrays that are indexed at run time.
        products: warpgroup products of SM90; None where no disassembler is at hand.
        waits: for products. Where products run one at a time there are as many.
        shared_bytes, tensor_columns: of a block, by its configuration; None for the merge kernel and linear layers.
    """

    id: str
    arch: str
    config: str
    kernel: int
    registers: int
    stack: int
    products: int | None
    waits: int | None
    shared_bytes: int | None = None
    tensor_columns: int | None = None

    @property
    def serialised(self) -> bool:
        """Whether products run one at a time. Where O has two levels, every second product of P V is waited for."""
        return bool(self.products and self.waits is not None and 5 * self.waits > 3 * self.products)


class Made(NamedTuple):
    """A kernel that can be compiled: its configuration, how, and what a block has by it (see `Code`)."""

    config: object
    compile: Callable[[], object]
    shared_bytes: int | None = None
    tensor_columns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A layer and those of its kernels that are looked at."""

    id: str
    arch: str
    kernels: Callable[[], Iterator[Made]]


def dense(name: str, **facts: Any) -> tuple[Case, str]:
    return Case(id=name, q_lens=(1,), kv_lens=(1,), **facts), name


LAYERS = (
    dense("hd64", heads=(64, 8), dim=64),
    dense("hd80", heads=(32, 8), dim=80),
    dense("hd96", heads=(32, 8), dim=96),
    dense("hd128", heads=(32, 8), dim=128),
    dense(
        "hd128-fp16-window-softcap-sinks",
        heads=(32, 8),
        dim=128,
        dtype=FP16,
        window=(99, None),
        softcap=5.0,
        sinks=True,
    ),
    dense("hd128-alibi-full", heads=(32, 32), dim=128, alibi=True, causality=FULL),
    dense("hd256", heads=(16, 2), dim=256),
    dense("hd512", heads=(16, 2), dim=512),
    dense("hd192x128-packed", heads=(16, 16), dim=192, dim_v=128, page=None),
    dense("hd128-fp8", heads=(32, 8), dim=128, fp8=True),
    dense("hd256-fp8", heads=(16, 2), dim=256, fp8=True),
    dense("hd128-fp8-queries", heads=(32, 8), dim=128, fp8=True, fp8_q=True, fp8_out=True, scales_by_request=True),
    dense("hd128-nvfp4-outputs", heads=(32, 8), dim=128, nvfp4_out=True),
    dense("hd64-fp8-window-softcap-sinks", heads=(64, 8), dim=64, fp8=True, window=(99, None), softcap=5.0, sinks=True),
    dense("hd192x128-fp8-packed", heads=(16, 16), dim=192, dim_v=128, page=None, fp8=True),
    dense("hd64-invariant", heads=(64, 8), dim=64, batch_invariant=True),
    dense("hd128-invariant", heads=(32, 8), dim=128, batch_invariant=True),
    dense("hd192x128-invariant", heads=(16, 16), dim=192, dim_v=128, page=None, batch_invariant=True),
    dense("hd128-fp8-invariant", heads=(32, 8), dim=128, fp8=True, batch_invariant=True),
    (mla(16, q_lens=(1,), kv_lens=(1,)), "mla16"),
    (mla(128, q_lens=(1,), kv_lens=(1,)), "mla128"),
    (mla(16, q_lens=(1,), kv_lens=(1,), fp8=True), "mla16-fp8"),
    (mla(128, q_lens=(1,), kv_lens=(1,), fp8=True), "mla128-fp8"),
    (replace(mla(16, q_lens=(1,), kv_lens=(1,)), batch_invariant=True), "mla16-invariant"),
    (replace(mla(128, q_lens=(1,), kv_lens=(1,)), batch_invariant=True), "mla128-invariant"),
)
SIZES = {"n": 4096, "k": 4096, "dtypes": Dtypes.of(torch.bfloat16)}
ALL = SIZES | {"bias": True, "residual": True}
LINEAR_LAYERS: dict[str, dict[str, Any]] = {
    "product": SIZES,
    "swiglu": SIZES | {"activation": Swiglu()},
    "swiglu-all": ALL | {"activation": Swiglu()},
    "swiglu-oai-all": ALL | {"activation": SWIGLU_OAI, "interleaved": True},
    "geglu-all": ALL | {"activation": Geglu()},
    "geglu-tanh-all": ALL | {"activation": Geglu(tanh=True)},
}
SIZES_OF_SCALED: dict[str, Any] = {"n": 4096, "k": 4096, "x": ROW_SCALED, "weight": ROW_SCALED}
SCALED_LAYERS: dict[str, dict[str, Any]] = {
    "rows": {},
    "swiglu-oai-all": {"activation": SWIGLU_OAI, "interleaved": True, "bias": True},
    "geglu-all": {"activation": Geglu(), "bias": True},
    "mxfp8": {"x": MXFP8, "weight": MXFP8, "activation": Swiglu(), "bias": True},
    "nvfp4": {"x": NVFP4, "weight": NVFP4, "activation": Swiglu(), "bias": True},
    "mxfp8-to-mxfp8": {"x": MXFP8, "weight": MXFP8, "activation": Swiglu(), "out": MXFP8},
    "nvfp4-to-nvfp4": {"x": NVFP4, "weight": NVFP4, "activation": Swiglu(), "out": NVFP4},
    "blocks-to-tensor": {"x": GROUP_SCALED, "weight": BLOCK_SCALED, "activation": Swiglu(), "out": TENSOR_SCALED},
    "nvfp4-plain": {"x": NVFP4, "weight": NVFP4},
    "blocks": {"x": GROUP_SCALED, "weight": BLOCK_SCALED, "bias": True},
    "blocks-geglu": {"x": GROUP_SCALED_E8M0, "weight": BLOCK_SCALED_E8M0, "activation": Geglu(), "bias": True},
}
BY_ROW: dict[str, Any] = {"x": ROW_SCALED, "weight": ROW_SCALED}
BY_BLOCK: dict[str, Any] = {"x": GROUP_SCALED, "weight": BLOCK_SCALED, "column_major": True}
SM90_SCALED_LAYERS: dict[str, dict[str, Any]] = {
    "product": BY_ROW | {"bias": True},
    "swiglu": BY_ROW | {"activation": Swiglu(), "bias": True},
    "swiglu-tensor": BY_ROW | {"activation": Swiglu(), "out": TENSOR_SCALED},
    "blocks": BY_BLOCK,
    "blocks-swiglu": BY_BLOCK | {"activation": Swiglu(), "bias": True},
    "blocks-swiglu-row-major": BY_BLOCK | {"activation": Swiglu(), "bias": True, "column_major": False},
    "blocks-swiglu-groups": BY_BLOCK | {"activation": Swiglu(), "out": GROUP_SCALED},
    "blocks-swiglu-wide": BY_BLOCK | {"activation": Swiglu(), "wide": True},
}
EXPERTS: dict[str, Any] = {"num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880, "dtype": torch.bfloat16}
EXPERTS_LAYERS: dict[str, dict[str, Any]] = {
    "swiglu": EXPERTS | {"topk": 4},
    "swiglu-added": EXPERTS | {"topk": 4, "deterministic": False},
    "swiglu-oai-biases": EXPERTS
    | {"topk": 4, "activation": SWIGLU_OAI, "interleaved": True, "w13_bias": True, "w2_bias": True},
    "geglu-tanh-input": EXPERTS
    | {"topk": 1, "activation": Geglu(tanh=True), "w13_bias": True, "router_weights": RouterWeights.INPUT},
    "e4m3-blocks": EXPERTS | {"topk": 4, "intermediate_size": 2816, "weight": BLOCK_SCALED},
    "e4m3-channels": EXPERTS | {"topk": 4, "weight": ROW_SCALED, "activation": SWIGLU_OAI, "interleaved": True},
}
EXPERTS_LAYERS["mxfp4-tiled-oai-biases"] = EXPERTS_LAYERS["swiglu-oai-biases"] | {"weight": MXFP4_TILED}
# Of one architecture alone.
BLOCK_SCALED_LAYERS: dict[str, dict[str, Any]] = {
    "mxfp8": EXPERTS | {"topk": 4, "weight": MXFP8},
    "mxfp4-oai-biases": EXPERTS_LAYERS["swiglu-oai-biases"] | {"weight": MXFP4},
    "nvfp4-oai-biases": EXPERTS_LAYERS["swiglu-oai-biases"] | {"weight": NVFP4},
}
ARCHS = tuple(arch.name for arch in registry.with_kernels())
LIMIT_S = 300
MANY_ROWS_GROUP = 16  # query heads of a key head, of which short queries have more than 64 rows


def attention_subjects() -> Iterator[Subject]:
    """Layers that a CuTe DSL kernel serves: short queries; long ones by claims, CLC or splits; the longest."""
    from dsl_backend.attention import dispatch
    from dsl_backend.attention.cute.sm90.dense_configs import extend_config, long_query_config
    from dsl_backend.attention.cute.sm90.fp8_configs import long_query_fp8_config
    from dsl_backend.attention.cute.sm100 import dense_configs as sm100
    from dsl_backend.runtime.target import from_arch

    for arch in ARCHS:
        kernel_arch = from_arch(arch).kernel_arch
        for case, name in LAYERS:
            for operation in dispatch.attention_of(case.spec):
                judged = dispatch.judge(operation, case.spec, from_arch(arch))
                if any(entry.name == "cute" and not why for entry, why in judged):
                    short = operation is not dispatch.Operation.PREFILL
                    kinds = ["decode" if short else "prefill"]
                    if kernel_arch == "sm90" and not short:
                        kinds += ["longest"] if long_query_config(case.spec) else []
                        # On SM100 it is the kernel for short queries.
                        kinds += ["extend"] if extend_config(case.spec) else []
                        if not dispatch.fp8_products(case.spec):
                            kinds += ["e4m3", "e4m3-longest"] if long_query_fp8_config(case.spec) else ["e4m3"]
                    if kernel_arch == "sm100" and not short:
                        kinds += ["e4m3"] if not dispatch.fp8_products_sm100(case.spec) else []
                    if short and not case.spec.mla:
                        served = {"sm90": dispatch.fp8_products, "sm100": dispatch.fp8_products_sm100}[kernel_arch]
                        kinds += ["e4m3-many"] if not served(case.spec) else []
                    if case.spec.mla:
                        kinds += ["e4m3"] if not dispatch.fp8_mla(case.spec) else []
                    if kernel_arch == "sm100" and short and not case.spec.mla:
                        smem_bytes = from_arch(arch).smem_bytes
                        kinds += ["few"] if sm100.few_rows_config(case.spec, smem_bytes) else []
                    if arch == "sm_100a" and not short and not sm100.default_config(case.spec).two_cta:
                        kinds.append("launched")
                    for kind in kinds:
                        kernels = partial(attention_kernel, arch, case, kind)
                        yield Subject(id=f"{arch}-{name}-{kind}", arch=arch, kernels=kernels)


def attention_kernel(arch: str, case: Case, kind: str) -> Iterator[Made]:
    from dsl_backend.attention.dispatch import FP8_PRODUCTS
    from dsl_backend.attention.plan import Planner
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace

    spec: AttentionSpec = case.spec
    if kind == "e4m3-many":
        spec = replace(spec, heads_q=MANY_ROWS_GROUP * spec.heads_kv)
    name = FP8_PRODUCTS if kind.startswith("e4m3") else "cute"
    planner = Planner(spec, from_arch(arch), Workspace(torch.device("cpu")), name)
    kernel: Any = (planner.short if kind in ("decode", "few", "e4m3-many") else planner.long)[2]
    if kind in ("longest", "e4m3-longest", "few", "e4m3-many"):
        kernel = kernel.other
    elif kind == "extend":
        kernel = kernel.extend
    if kind == "launched":
        controlled = replace(kernel.config, use_clc=True)
        kernel = type(kernel)(spec, kernel.target, kernel.workspace, controlled)
    sinks = torch.float32 if case.sinks else None
    config = kernel.config
    columns = config.tmem_columns(spec) if kernel.target.tcgen05 else None
    yield Made(config, lambda: kernel.function(spec.mla, sinks), config.smem_bytes(spec), columns)


WEIGHT_ONLY = {
    "w4a16": WeightOnlyFormat(),
    "w4a16-zero-points": WeightOnlyFormat(zero_points=True),
    "w8a16": WeightOnlyFormat(bits=8),
}


def linear_subjects() -> Iterator[Subject]:
    """All configurations of a layer each, of products also those of split-K; those with swapped operands apart."""
    for arch in ARCHS:
        for name, facts in LINEAR_LAYERS.items():
            yield Subject(id=f"{arch}-{name}", arch=arch, kernels=partial(linear_kernels, arch, LinearSpec(**facts)))
    spec = LinearSpec(**LINEAR_LAYERS["swiglu"])
    for name, facts in SCALED_LAYERS.items():
        spec_of = partial(ScaledLinearSpec, **SIZES_OF_SCALED | facts)
        yield Subject(id=f"sm_100a-scaled-{name}", arch="sm_100a", kernels=partial(scaled_kernels, spec_of()))
    for name, facts in SM90_SCALED_LAYERS.items():
        spec_of = partial(ScaledLinearSpec, n=4096, k=4096, **facts)
        yield Subject(id=f"sm_90a-scaled-{name}", arch="sm_90a", kernels=partial(sm90_scaled_kernels, spec_of()))
    for name, kind in WEIGHT_ONLY.items():
        yield Subject(id=f"sm_90a-{name}", arch="sm_90a", kernels=partial(weight_only_kernels, kind))
    yield Subject(id="sm_90a-swapped", arch="sm_90a", kernels=partial(linear_kernels, "sm_90a", spec, swapped=True))


def linear_kernels(arch: str, spec: LinearSpec, swapped: bool = False) -> Iterator[Made]:
    from dsl_backend.gemm import host
    from dsl_backend.gemm.configs import deepest, fitting
    from dsl_backend.gemm.tiles import SmallMTiles
    from dsl_backend.runtime.target import from_arch

    target = from_arch(arch)
    configs = fitting(spec, target)
    if spec.activation is None:
        # Of no more rows than are tried.
        few = [one for one in configs if isinstance(one, SmallMTiles) and one.stream_k and one.tile_tokens <= 64]
        split = (replace(one, num_splits=4) for one in few)
        configs += [config for one in split if (config := deepest(one, spec, target.smem_bytes)) is not None]
    for config in dict.fromkeys(configs):
        if isinstance(config, SwapABConfig) != swapped:
            continue
        build = partial(host.build, host.key_of(spec, config), target)
        yield Made(config, build)


def scaled_kernels(spec: ScaledLinearSpec) -> Iterator[Made]:
    from dsl_backend.gemm import scaled_host
    from dsl_backend.gemm.sm100 import scaled_configs
    from dsl_backend.runtime.target import from_arch

    target = from_arch("sm_100a")
    for config in scaled_configs.fitting(spec, target.smem_bytes):
        key = scaled_host.key_of(spec, config, spec.column_major)
        yield Made(config, partial(scaled_host.build, scaled_configs.kernel(key), key, target))


def sm90_scaled_kernels(spec: ScaledLinearSpec) -> Iterator[Made]:
    from dsl_backend.gemm import scaled_host
    from dsl_backend.gemm.sm90 import scaled_configs
    from dsl_backend.runtime.target import from_arch

    target = from_arch("sm_90a")
    for config in scaled_configs.fitting(spec, target.smem_bytes):
        key = scaled_host.key_of(spec, config, spec.column_major)
        yield Made(config, partial(scaled_host.build, scaled_configs.kernel(key), key, target))


def weight_only_kernels(kind: WeightOnlyFormat) -> Iterator[Made]:
    from dsl_backend.gemm import weight_only_host
    from dsl_backend.gemm.sm90 import weight_only_configs
    from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
    from dsl_backend.runtime.target import from_arch

    target = from_arch("sm_90a")
    spec = WeightOnlyGemmSpec(n=4096, k=4096, dtype=torch.bfloat16, kind=kind)
    for config in (
        *weight_only_configs.gemms(spec, target.smem_bytes),
        *weight_only_configs.fitting(spec, target.smem_bytes),
    ):
        yield Made(config, partial(weight_only_host.build, weight_only_host.key_of(spec, config), target))


def experts_subjects() -> Iterator[Subject]:
    """All pairs of tiles that are chosen for a layer."""
    for arch in ("sm_90a", "sm_100a"):
        of_arch = BLOCK_SCALED_LAYERS if arch == "sm_100a" else {}
        for name, facts in (EXPERTS_LAYERS | of_arch).items():
            kernels = partial(experts_kernels, arch, ExpertsSpec(**facts))
            yield Subject(id=f"{arch}-experts-{name}", arch=arch, kernels=kernels)


def experts_kernels(arch: str, spec: ExpertsSpec) -> Iterator[Made]:
    from dsl_backend.experts import block_scaled_configs, scaled_configs
    from dsl_backend.experts.cute import block_scaled_host, scaled_host
    from dsl_backend.experts.precompile import precompile_specs_of
    from dsl_backend.runtime.target import from_arch

    target = from_arch(arch)
    if spec.weight is None or spec.weight_only:
        for unit in precompile_specs_of(spec, target, "cute-weight-only" if spec.weight_only else None):
            yield Made((unit.key.first, unit.key.second), unit.compile)
        return
    if spec.mma_scaled:
        for tiles in block_scaled_configs.candidates(spec, target):
            block_key = block_scaled_host.key_of(spec, tiles)
            yield Made((block_key.first, block_key.second), partial(block_scaled_host.build, block_key, target))
        return
    configs: tuple[scaled_configs.Config, ...] = scaled_configs.candidates(spec, target)
    if arch == "sm_90a":
        configs = (*configs, *scaled_configs.few(spec, target))
    for config in configs:
        key = scaled_host.key_of(spec, config)
        yield Made((key.first, key.second), partial(scaled_host.build, key, target))


FINISHING = "bounds-finish-8"


def sampling_subjects() -> Iterator[Subject]:
    """By the logits' type; tokens alone, with the likeliest tokens, and with what the filters keep."""
    for arch in ARCHS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for mode in (None, LogprobsMode.RAW_LOGPROBS):
                spec = SamplingSpec(vocab=151936, dtype=dtype, logprobs_mode=mode)
                name = f"{arch}-sampling-{checks.short(dtype)}{'' if mode is None else '-likeliest'}"
                yield Subject(id=name, arch=arch, kernels=partial(sampling_kernels, arch, spec))
            spec = SamplingSpec(vocab=151936, dtype=dtype, kept=True)
            name = f"{arch}-sampling-{checks.short(dtype)}-kept"
            yield Subject(id=name, arch=arch, kernels=partial(sampling_kernels, arch, spec))


def sampling_kernels(arch: str, spec: SamplingSpec) -> Iterator[Made]:
    """One CTA for a row, and eight."""
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.sampling import candidates
    from dsl_backend.sampling.configs import cluster_configs, widest_vector
    from dsl_backend.sampling.cute import host

    target = from_arch(arch)
    vector = widest_vector(spec)
    configs = [config for config in cluster_configs(spec, target, 1024, vector) if config.cluster in (1, 8)]
    # With top-p alone: bounds of lanes, and a second launch.
    named = candidates.named(spec, target, 1024, vector, top_p_alone=True)
    configs += [one for name, one in named.items() if name == FINISHING]
    # Configurations with the same key have one kernel, which is compiled once.
    for key, config in {host.key_of(spec, config): config for config in configs}.items():
        yield Made(config, partial(host.build, key, target), config.smem_bytes)


def rope_subjects() -> Iterator[Subject]:
    """Rotation and cache write with all that takes registers: a norm, a float32 table, an fp8 cache."""
    for arch in ARCHS:
        yield Subject(id=f"{arch}-rope", arch=arch, kernels=partial(rope_kernels, arch))


def rope_kernels(arch: str) -> Iterator[Made]:
    from dsl_backend.attention.cute import mla_rope_host, rope_host
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.testing.mla_rope_writes import DEEPSEEK, MLARopeCase
    from dsl_backend.testing.rope_writes import RopeCase

    for facts in ({}, {"norm": True, "wide_table": True, "fp8": True, "scales_by_head": True}):
        key = rope_host.key_of(RopeCase(dim=128, heads=(32, 8), **facts).spec)
        yield Made(key, partial(rope_host.build, key, from_arch(arch)))
    latent = mla_rope_host.key_of(MLARopeCase(**DEEPSEEK, heads=128, wide_table=True, fp8=True).spec)
    yield Made(latent, partial(mla_rope_host.build, latent, from_arch(arch)))


NORM_WIDTHS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)


def norm_subjects() -> Iterator[Subject]:
    """The default of each width, with and without a residual; and softmax of the same widths."""
    for arch in ARCHS:
        for name, kernels in (("norm", norm_kernels), ("softmax", softmax_kernels)):
            yield Subject(id=f"{arch}-{name}", arch=arch, kernels=partial(kernels, arch))


def norm_kernels(arch: str) -> Iterator[Made]:
    from dsl_backend.norm.configs import default_config
    from dsl_backend.norm.cute import host
    from dsl_backend.norm.spec import NormSpec, Scaling
    from dsl_backend.quant.format import GROUP
    from dsl_backend.runtime.target import from_arch

    dtype = torch.bfloat16
    plain: dict[str, Any] = {"dtype": dtype, "out_dtype": dtype, "weight_dtype": dtype, "vector": 8}
    quantized = {"residual": True, "out_dtype": torch.float8_e4m3fn, "scaling": Scaling.TOKEN}
    for width in (128, 7168, *NORM_WIDTHS):
        # A row of one group has one scale.
        by_group = [] if width == GROUP else [quantized | {"scaling": Scaling.GROUP}]
        for facts in ({}, {"residual": True}, quantized, *by_group):
            spec = NormSpec(**{**plain, **facts, "width": width})
            config = default_config(spec)
            yield Made(config, partial(host.build, host.key_of(spec, config), from_arch(arch)))


def softmax_kernels(arch: str) -> Iterator[Made]:
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.softmax.configs import default_config
    from dsl_backend.softmax.cute import host
    from dsl_backend.softmax.spec import SoftmaxSpec

    target = from_arch(arch)
    for dtype in (torch.bfloat16, torch.float32):
        for width in (*NORM_WIDTHS, 20552, 26240):
            spec = SoftmaxSpec(width=width, dtype=dtype, out_dtype=dtype, vector=8)
            config = default_config(spec, target.chips[0])
            yield Made(config, partial(host.build, host.key_of(spec, config), target))


def subjects() -> Iterator[Subject]:
    yield from attention_subjects()
    yield from linear_subjects()
    yield from experts_subjects()
    yield from sampling_subjects()
    yield from rope_subjects()
    yield from norm_subjects()


def compiled(subject: Subject, folder: Path, every: int = 1) -> Iterator[Code]:
    """Compile a subject's kernels, or one of `every`, and read what came out."""
    for made in itertools.islice(subject.kernels(), 0, None, every):
        for old in folder.glob("*.cubin"):
            old.unlink()
        made.compile()
        (file,) = folder.glob("*.cubin")
        for place, (registers, stack) in enumerate(kernels_of(file.read_bytes())):
            first = place == 0
            products, waits = counted(file) if first else (None, None)
            yield Code(
                id=subject.id,
                arch=subject.arch,
                config=str(made.config),
                kernel=place,
                registers=registers,
                stack=stack,
                products=products,
                waits=waits,
                shared_bytes=made.shared_bytes if first else None,
                tensor_columns=made.tensor_columns if first else None,
            )


def found(subject: str, every: int = 1) -> list[Code]:
    """A subject's kernels, by its id; compiled in a process of their own. `every`: one of so many kernels.

    Raises:
        RuntimeError: nothing was compiled.
    """
    command = [sys.executable, "-m", "tests.machine_code", str(every), subject]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    codes = [Code(**json.loads(line)) for line in done.stdout.splitlines()]
    if done.returncode or not codes:
        raise RuntimeError(f"{subject}: {done.stderr[-4000:]}")
    return codes


def kernels_of(image: bytes) -> list[tuple[int, int]]:
    """(registers, bytes of stack) of each kernel, the largest code first."""
    sections = list(sections_of(image))
    names, symbols = (next(data for name, data, _ in sections if name == wanted) for wanted in (".strtab", ".symtab"))
    facts: dict[tuple[str, int], int] = {}
    for name, data, _ in sections:
        if name == INFO:
            for kind, symbol, value in facts_of(data):
                (place,) = struct.unpack_from("<I", symbols, SYMBOL_BYTES * symbol)
                facts[names[place : names.index(b"\0", place)].decode(), kind] = value
    code = sorted(((len(data), name.removeprefix(TEXT)) for name, data, _ in sections if name.startswith(TEXT)))
    return [(facts[name, REGISTERS], facts[name, FRAME_SIZE]) for _, name in reversed(code)]


def sections_of(image: bytes) -> Iterator[tuple[str, bytes, int]]:
    """(name, contents, type) of an ELF file's sections."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, named = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + size * i) for i in range(count)]
    texts = headers[named]
    for name, kind, _, _, offset, length, *_ in headers:
        start = texts[4] + name
        data = b"" if kind == NO_CONTENTS else image[offset : offset + length]
        yield image[start : image.index(b"\0", start)].decode(), data, kind


def facts_of(attributes: bytes) -> Iterator[tuple[int, int, int]]:
    """(kind, symbol, value) of the attributes that are a number of a kernel."""
    place = 0
    while place < len(attributes):
        form, kind, size = struct.unpack_from("<BBH", attributes, place)
        place += 4
        if form == SIZED:
            if kind in (FRAME_SIZE, REGISTERS):
                yield kind, *struct.unpack_from("<II", attributes, place)
            place += size


def disassembler() -> str | None:
    """NVIDIA's nvdisasm: on the path, or in the package of that name."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, packaged), None)


def counted(file: Path) -> tuple[int | None, int | None]:
    """(products, waits for them) in a file's code."""
    program = disassembler()
    if program is None:
        return None, None
    text = subprocess.run([program, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    # A product of no size only closes a batch of them.
    products = len(re.findall(r"[HQ]GMMA\.64x\d+x\d+\.F32", text))
    return products, len(re.findall(r"WARPGROUP\.DEPBAR", text))


def main(ids: list[str]) -> int:
    """The kernels of these subjects, or of all; with a number in front, one of so many."""
    every = int(ids.pop(0)) if ids and ids[0].isdigit() else 1
    with tempfile.TemporaryDirectory(prefix="machine-code-") as folder:
        os.environ.update(CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder, DSL_BACKEND_CACHE="0")
        for subject in subjects():
            if not ids or subject.id in ids:
                for code in compiled(subject, Path(folder), every):
                    print(json.dumps(asdict(code)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
