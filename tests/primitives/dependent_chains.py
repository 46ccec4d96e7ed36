# SPDX-License-Identifier: Apache-2.0
"""Chains of kernels on the emulator: launched so that they overlap, and one by one."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

import emulator
from dsl_backend.attention import api, rope
from dsl_backend.attention.cute.sm90 import dense_configs as sm90_dense
from dsl_backend.attention.cute.sm90 import dense_host as sm90_host
from dsl_backend.attention.cute.sm90 import mla_configs as sm90_mla
from dsl_backend.attention.cute.sm90 import mla_host as sm90_mla_host
from dsl_backend.attention.cute.sm100 import dense_configs as sm100_dense
from dsl_backend.attention.cute.sm100 import dense_host as sm100_host
from dsl_backend.attention.cute.sm100 import mla_configs as sm100_mla
from dsl_backend.attention.cute.sm100 import mla_host as sm100_mla_host
from dsl_backend.attention.protocol import Operands
from dsl_backend.gemm import host as gemm_host
from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.configs import Config
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm90 import scaled_configs as sm90_scaled
from dsl_backend.gemm.sm90.configs import GemmConfig, SmallMConfig
from dsl_backend.gemm.sm100 import configs as sm100_gemm
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.scaled.cute.host import build_products
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.norm.configs import default_config
from dsl_backend.norm.cute import host as norm_host
from dsl_backend.norm.spec import NormSpec, NormTensors
from dsl_backend.primitives import dependent_launch
from dsl_backend.quant.cute import host as quantising
from dsl_backend.quant.format import ROW_SCALED
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.sampling.cute import host as sampling_host
from dsl_backend.sampling.cute import verification_host
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.cute.verification import VerifyArgs
from dsl_backend.sampling.spec import SamplingSpec
from dsl_backend.sampling.verification import Known
from dsl_backend.softmax.cute import host as softmax_host
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.mla_rope_writes import MLARopeCase
from dsl_backend.testing.mla_rope_writes import build as build_mla_rope
from dsl_backend.testing.rope_writes import RopeCase
from dsl_backend.testing.rope_writes import build as build_rope
from dsl_backend.testing.sampling import ONE
from dsl_backend.testing.scaled import ScaledCase
from dsl_backend.testing.scaled import tensors as scaled_tensors
from dsl_backend.testing.softmax import spread
from dsl_backend.testing.verification import random_step
from emulator.host.launch import Launch
from emulator.machine import Machine

ARCHS = ("sm_90a", "sm_100a")
SCHEDULES = ("eager", "lazy", "random")
SMS = 4
BF16 = torch.bfloat16
CPU = torch.device("cpu")


@dataclass
class Chain:
    """Launches in their order, and the tensors that they write.

    Attributes:
        between: tensors that a launch writes and a later one reads.
        outputs: tensors that the chain is run for.
    """

    launches: list[Callable[[], None]] = field(default_factory=list)
    between: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


# Builds a chain's kernels and tensors, with the device active. The tensors are the same each time.
Builder = Callable[[Target], Chain]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def run(builder: Builder, arch: str, schedule: str, seed: int = 0, *, overlap: bool = True) -> list[torch.Tensor]:
    """A chain's outputs; any finding or warning raises, and a load that may see an older copy in a cache."""
    chain, machine = execute(builder, arch, schedule, seed, overlap=overlap)
    assert not len(machine.findings), "\n".join(map(str, machine.findings))
    assert not any("ld.global.nc" in kernel_of(launch) for launch in machine.launches)
    return chain.outputs


def execute(
    builder: Builder,
    arch: str,
    schedule: str,
    seed: int = 0,
    *,
    overlap: bool = True,
    mistake: "Mistake | None" = None,
) -> "tuple[Chain, Recording]":
    """Run a chain; and the machine, which keeps what it found."""
    target = replace(from_arch(arch), sm_count=SMS)
    machine = Recording(arch, schedule, seed, mistake)
    with emulator.device(arch, sms=SMS, schedule=schedule, seed=seed, machine=machine, keep_findings=True) as device:
        chain = builder(target)
        for tensor in chain.between:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        with device.capture() if overlap else nullcontext():
            for launch in chain.launches:
                launch()
    return chain, machine


# ------------------------------------------------------------------ mistakes

WAIT, LAUNCH_DEPENDENTS = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
ACCESS = re.compile(r"^.*\b(ld\.global|st\.global|cp\.async\.bulk\.tensor)\b.*;$", re.MULTILINE)
INSTRUCTION = re.compile(r"^\t(?!\.)[^/\n]*;$", re.MULTILINE)


@dataclass(frozen=True)
class Mistake:
    """A change of one launch.

    Attributes:
        launch: its number in the chain.
        edit: changes the PTX of its kernel.
    """

    launch: int
    edit: Callable[[str], str]


class Recording(Machine):
    """Keeps its launches, and runs one of them with a mistake."""

    def __init__(self, arch: str, schedule: str, seed: int, mistake: Mistake | None) -> None:
        super().__init__(arch, SMS, schedule, seed)
        self.mistake = mistake
        self.launches: list[Launch] = []

    def launch(self, launch: Launch) -> None:
        super().launch(self.changed(launch))

    def overlap(self, launches: Sequence[Launch]) -> None:
        super().overlap([self.changed(launch) for launch in launches])

    def changed(self, launch: Launch) -> Launch:
        number = len(self.launches)
        self.launches.append(launch)
        if self.mistake is None or self.mistake.launch != number:
            return launch
        kernel = kernel_of(launch)
        assert launch.ptx.count(kernel) == 1
        return replace(launch, ptx=launch.ptx.replace(kernel, self.mistake.edit(kernel)))


def kernel_of(launch: Launch) -> str:
    """The PTX of a launch's kernel, without others of its module."""
    start = launch.ptx.index(f".entry {launch.kernel}(")
    return launch.ptx[start : launch.ptx.index("\n}", start)]


def without_wait(ptx: str, number: int) -> str:
    """Without its wait of this number."""
    parts = ptx.split(WAIT)
    return WAIT.join([*parts[:number], parts[number] + parts[number + 1], *parts[number + 2 :]])


def without_waits(ptx: str) -> str:
    """Without any wait."""
    return ptx.replace(WAIT, "")


def with_late_wait(ptx: str, number: int) -> str:
    """Its wait of this number comes behind the next access to global memory."""
    before = len(WAIT.join(ptx.split(WAIT)[: number + 1]))
    rest = without_wait(ptx, number)
    access = ACCESS.search(rest, before)
    assert access is not None
    return f"{rest[: access.end()]}\n\t{WAIT}{rest[access.end() :]}"


def with_early_launch(ptx: str) -> str:
    """Launch_dependents comes first."""
    first = INSTRUCTION.search(ptx)
    assert first is not None
    return f"{ptx[: first.start()]}\t{LAUNCH_DEPENDENTS}\n{ptx[first.start() :].replace(LAUNCH_DEPENDENTS, '')}"


# ------------------------------------------------------------------ linear layers


def linear(
    target: Target, config: Config, operands: GemmOperands, workspace: Workspace, activation: Any = None
) -> Callable[[], None]:
    out = operands.out
    assert operands.x is not None
    spec = LinearSpec(
        n=out.shape[1],
        k=operands.x.shape[1],
        dtypes=Dtypes.of(BF16),
        activation=activation,
        bias=operands.bias is not None,
        residual=operands.residual is not None,
    )
    assert not config.objections(spec, target.smem_bytes)
    function = gemm_host.build(gemm_host.key_of(spec, config), target)
    return lambda: gemm_host.run(function, config, operands, SMS, workspace)


def small_m(target: Target) -> Config:
    return sm100_gemm.SmallMConfig(tokens=16, stages=2) if target.tcgen05 else SmallMConfig(tokens=16, stages=2)


def many_rows(target: Target) -> Config:
    if target.tcgen05:
        return sm100_gemm.GemmConfig(box_n=32, stages=2, two_cta=True)
    return GemmConfig(tile_m=128, box_n=16, stages=2)


def mlp(
    target: Target,
    config: Config,
    x: torch.Tensor,
    workspace: Workspace,
    width: int = 72,
    residual: torch.Tensor | None = None,
) -> Chain:
    """Gate and up, then down with a bias and the residual; the second one's weights are asked for before it waits."""
    rows, hidden = x.shape
    between, out = torch.empty(rows, width, dtype=BF16), torch.empty(rows, hidden, dtype=BF16)
    up = GemmOperands(x, normal(2 * width, hidden, seed=1, scale=0.1), None, None, between)
    down = GemmOperands(
        between,
        normal(hidden, width, seed=2, scale=0.1),
        normal(hidden, seed=3),
        x if residual is None else residual,
        out,
    )
    return Chain(
        [linear(target, config, up, workspace, Swiglu()), linear(target, config, down, workspace)],
        [between, out],
        [out],
    )


def two_mlps(target: Target) -> Chain:
    """The second reads what the first wrote as input and as residual; all share flags and partial sums."""
    workspace = Workspace(CPU)
    first = mlp(target, small_m(target), normal(5, 328), workspace)
    second = mlp(target, small_m(target), first.outputs[0], workspace)
    return Chain(first.launches + second.launches, first.between + second.between, second.outputs)


def split_k(target: Target) -> Chain:
    """Products by clusters whose CTAs send each other sums, with norms between them: o, norm, a projection, o again."""
    workspace, config = Workspace(CPU), replace(small_m(target), num_splits=2)
    x, residual, hidden = normal(5, 328), normal(5, 136, seed=5), torch.empty(5, 136, dtype=BF16)
    first = GemmOperands(x, normal(136, 328, seed=4, scale=0.1), None, None, hidden)
    normed = norm(target, hidden, residual)
    wide, out = torch.empty(5, 200, dtype=BF16), torch.empty(5, 136, dtype=BF16)
    second = GemmOperands(normed.outputs[0], normal(200, 136, seed=6, scale=0.1), normal(200, seed=7), None, wide)
    third = GemmOperands(wide, normal(136, 200, seed=8, scale=0.1), None, residual, out)
    products = [linear(target, config, one, workspace) for one in (first, second, third)]
    return Chain([products[0], *normed.launches, *products[1:]], [hidden, *normed.between, wide, out], [residual, out])


def scaled(target: Target) -> Chain:
    """A matrix in float32 to e4m3 with a scale for each row, two products of it, a norm of what the first one wrote."""
    workspace, case = Workspace(CPU), ScaledCase(rows=5, n=144, k=208)
    spec, given = case.spec, scaled_tensors(case, "cpu")
    wide = torch.randn(5, 208, generator=torch.Generator().manual_seed(14))
    x, scale = torch.empty(5, 208, dtype=torch.float8_e4m3fn), torch.empty(5)
    quantise = quantising.build(ROW_SCALED, target)
    configs: list[Any] = (
        [sm100_gemm.ScaledSmallMConfig(tokens=16, stages=2), sm100_gemm.GemmConfig(box_n=32, stages=2)]
        if target.tcgen05
        else [sm90_scaled.ScaledSmallMConfig(tokens=16, stages=2), sm90_scaled.ScaledGemmConfig(box_n=32, stages=2)]
    )
    outs, products = [], []
    for config in configs:
        assert not config.objections(spec, target.smem_bytes)
        outs.append(torch.empty(5, 144, dtype=BF16))
        operands = ScaledOperands(x, scale, given.weight.values, given.weight.scale, None, outs[-1], None)
        function = build_products(scaled_host.key_of(spec, config, spec.column_major), target)
        products.append(partial(scaled_host.run, function, config, operands, SMS, workspace))
    residual = normal(5, 144, seed=15)
    normed = norm(target, outs[0], residual)
    return Chain(
        [*copies(wide), lambda: quantising.quantise(quantise, wide, x, scale), *products, *normed.launches],
        [x, scale, *outs, *normed.between],
        [*outs, residual, *normed.outputs],
    )


def tall_mlp(target: Target) -> Chain:
    return mlp(target, many_rows(target), normal(150, 136), Workspace(CPU))


# ------------------------------------------------------------------ attention


class Copy:
    """Copies a vector, as a step's preparation may write lengths, page tables and slots in front of the layers."""

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor):
        self.kernel(source, target).launch(grid=(1, 1, 1), block=(128, 1, 1), use_pdl=True)

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor):
        dependent_launch.launch_dependents()
        dependent_launch.wait()
        for index in cutlass.range(cute.arch.thread_idx()[0], cute.size(target), 128):
            target[index] = source[index]


def copies(*tensors: torch.Tensor) -> list[Callable[[], None]]:
    """Launches that write what the tensors hold, and now no longer do."""
    launches = []
    for tensor in tensors:
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor.as_strided((span,), (1,))
        views = [from_dlpack(one) for one in (memory.clone(), memory)]
        memory.fill_(0)
        launches.append(partial(cute.compile(Copy(), *views), *views))
    return launches


def attention(
    target: Target, case: Case, kernel_type: Any, config: Any, workspace: Workspace
) -> tuple[Chain, torch.Tensor]:
    """The last key of each request is projected and written to the cache, then attention; and the output.

    In front of it, what the step knows of its requests is written as well.
    """
    problem = case.problem()
    spec, batch = problem.spec, problem.batch
    table = batch.block_table
    assert table is not None
    last = batch.seq_lens.long() - 1
    pages, places = table[torch.arange(len(last)), last // case.page].long(), last % case.page
    rope = spec.head_dim - spec.head_dim_v if spec.mla else 0
    # Views of the cache's two parts, as the write kernel takes them.
    parts = problem.keys.split((spec.head_dim_v, rope), -1) if spec.mla else (problem.keys, problem.values)
    key, value = (torch.empty_like(part[pages, places]) for part in parts)
    value.copy_(parts[1][pages, places])
    for part in parts:
        part[pages, places] = torch.nan
    rows, width = len(last), key[0].numel()
    x = normal(rows, 72, seed=8)
    projection = GemmOperands(x, normal(width, 72, seed=9, scale=0.1), None, None, key.view(rows, width))
    writer = api.Writer(spec, lambda: target, "cute")
    out = torch.zeros(problem.q.shape[0], spec.heads_q, spec.head_dim_v, dtype=spec.dtype)
    kernel = kernel_type(spec, target, workspace, config)
    assert not config.objections(spec, target.smem_bytes)
    operands = Operands(problem.q, None, problem.keys, problem.values, out, None, *[None] * 4)
    launch = kernel.bind(batch, 0, batch.max_query_len)
    slots = pages * case.page + places
    prepare = copies(slots, batch.query_start_loc, batch.seq_lens, table, x)
    return (
        Chain(
            [
                *prepare,
                linear(target, small_m(target), projection, workspace),
                lambda: writer(key, value, *parts, slots, None, None),
                lambda: launch(operands),
            ],
            [key],
            [out],
        ),
        out,
    )


DENSE = Case(q_lens=(1, 1, 1), kv_lens=(300, 70, 33), heads=(4, 2), dim=64, page=16)
MLA = mla(16, q_lens=(1, 1), kv_lens=(260, 70), page=16)


def dense(target: Target, workspace: Workspace) -> tuple[Chain, torch.Tensor]:
    if target.tcgen05:
        return attention(
            target,
            DENSE,
            sm100_host.SplitKV,
            sm100_dense.DenseConfig(alternate=True, tile_n=32, query_stages=2, min_split_tiles=1),
            workspace,
        )
    config = sm90_dense.DenseConfig(groups=1, tile_n=32, stages=2, min_split_tiles=1)
    return attention(target, DENSE, sm90_host.SplitKV, config, workspace)


def norm(target: Target, x: torch.Tensor, residual: torch.Tensor) -> Chain:
    """RMSNorm of x + residual, whose weights are loaded before the wait; the sum is the residual's new value."""
    out = torch.empty_like(x)
    tensors = NormTensors(x, residual, normal(x.shape[1], seed=10), None, out, residual, None)
    spec = NormSpec(width=x.shape[1], dtype=BF16, out_dtype=BF16, weight_dtype=BF16, residual=True, vector=8)
    function = norm_host.build(norm_host.key_of(spec, default_config(spec)), target)
    return Chain([lambda: function(*tensors, 1e-6)], [out], [out])


def decode(target: Target) -> Chain:
    """A decode step of a layer: projection, cache write, attention, its combine kernel, projection, norm, MLP."""
    workspace = Workspace(CPU)
    layer, out = dense(target, workspace)
    rows, width = out.shape[0], out.shape[1] * out.shape[2]
    hidden = torch.empty(rows, 136, dtype=BF16)
    projection = GemmOperands(out.view(rows, width), normal(136, width, seed=4, scale=0.1), None, None, hidden)
    residual = normal(rows, 136, seed=5)
    normed = norm(target, hidden, residual)
    rest = mlp(target, small_m(target), normed.outputs[0], workspace, residual=residual)
    return Chain(
        [*layer.launches, linear(target, small_m(target), projection, workspace), *normed.launches, *rest.launches],
        [hidden, *normed.between, *rest.between],
        [out, residual, *rest.outputs],
    )


def rotation(target: Target) -> Chain:
    """Positions and slots, a projection, its rotation and cache write, and a norm of the queries."""
    case = RopeCase(tokens=5, padding_tokens=0, heads=(2, 1), norm=True, skipped=1)
    given = build_rope(case, CPU)
    qkv = torch.empty(5, 4 * 64, dtype=BF16)
    q, key, value = (one.unflatten(1, (-1, 64)) for one in qkv.split((128, 64, 64), 1))
    tensors = given._replace(q=q, key=key, value=value)
    for cache in (tensors.key_cache, tensors.value_cache):
        cache.fill_(0.0)
    x = normal(5, 72, seed=11)
    projection = GemmOperands(x, normal(256, 72, seed=12, scale=0.1), None, None, qkv)
    queries, residual = tensors.q_out.view(5, 128), normal(5, 128, seed=13)
    writer = rope.RopeWriter(case.spec, lambda: target, "cute")
    normed = norm(target, queries, residual)
    return Chain(
        [
            *copies(tensors.positions, tensors.slots),
            linear(target, small_m(target), projection, Workspace(CPU)),
            lambda: writer(tensors, 1e-6),
            *normed.launches,
        ],
        [qkv, queries, *normed.between],
        [residual, tensors.key_cache, tensors.value_cache, *normed.outputs],
    )


def latent_rotation(target: Target) -> Chain:
    """Positions and slots, a projection to latent and rope parts, their norm, rotation and cache write, and a norm."""
    case = MLARopeCase(tokens=5, padding_tokens=0, heads=3, latent=64, rope=32, nope=0, skipped=1, in_place=False)
    given = build_mla_rope(case, CPU)
    keys = torch.empty(5, 96, dtype=BF16)
    tensors = given._replace(latent=keys[:, :64], rope=keys[:, 64:])
    tensors.cache.fill_(0.0)
    x = normal(5, 72, seed=11)
    projection = GemmOperands(x, normal(96, 72, seed=12, scale=0.1), None, None, keys)
    writer = rope.RopeWriter(case.spec, lambda: target, "cute")
    normed = norm(target, tensors.latent_out, normal(5, 64, seed=13))
    return Chain(
        [
            *copies(tensors.positions, tensors.slots),
            linear(target, small_m(target), projection, Workspace(CPU)),
            lambda: writer(tensors, 1e-6),
            *normed.launches,
        ],
        [keys, tensors.q_out, tensors.latent_out, tensors.rope_out, *normed.between],
        [tensors.cache, *normed.outputs],
    )


def swap_ab(target: Target) -> Chain:
    config = sm100_dense.DenseConfig(alternate=True, swap_ab=16, query_stages=2, ex2_emulation=0, min_split_tiles=1)
    return attention(
        target, replace(DENSE, dim=128, kv_lens=(600, 70, 33)), sm100_host.SplitKV, config, Workspace(CPU)
    )[0]


def latent(target: Target) -> Chain:
    kernel_type, config_type = (
        (sm100_mla_host.MlaSplitKV, sm100_mla.MlaConfig)
        if target.tcgen05
        else (sm90_mla_host.MlaSplitKV, sm90_mla.MlaConfig)
    )
    config = config_type(tile_n=32, stages=3, min_split_tiles=1)
    return attention(target, MLA, kernel_type, config, Workspace(CPU))[0]


# ------------------------------------------------------------------ softmax and sampling


def softmaxes(target: Target) -> Chain:
    """A softmax, and in its place two more."""
    x, out = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)), torch.empty(9, 512)
    config = spread(512, 2, 64, use_pdl=True)
    specs = [SoftmaxSpec(width=512, dtype=x.dtype, out_dtype=x.dtype, log=log, vector=4) for log in (False, True)]
    functions = [softmax_host.build(softmax_host.key_of(spec, config), target) for spec in specs]
    return Chain(
        [lambda: functions[0](x, out), lambda: functions[1](out, out), lambda: functions[0](out, out)], [out], [out]
    )


def verification(target: Target) -> Chain:
    """Logits, the sampler, and the verification of drafts."""
    step = random_step(0, Known.TOKENS, 200, CPU)
    rows = len(step.drawn.tokens)
    logits = torch.empty(rows, 200, dtype=BF16)
    head = GemmOperands(normal(rows, 72, seed=6), normal(200, 72, seed=7), None, None, logits)
    sampled = torch.full((rows,), -1)
    sampling = SamplingSpec(vocab=200, dtype=BF16)
    sample = sampling_host.build(sampling_host.key_of(sampling, ONE[2]), target)
    verify = verification_host.build(verification_host.key_of(step.spec), target)
    tokens = torch.full((step.drafts.requests, step.spec.max_drafts + 1), -1)
    counts = torch.full((step.drafts.requests,), -1, dtype=torch.int32)
    config = replace(small_m(target), tokens=32)
    parameters = {**vars(step.parameters), "min_p": torch.zeros(rows)}
    return Chain(
        [
            linear(target, config, head, Workspace(CPU)),
            lambda: sample(*SampleArgs(logits=logits, **parameters, tokens=sampled).tensors),
            lambda: verify(*VerifyArgs(sampled, step.drafts.inputs, step.drafts.cu_rows, tokens, counts)),
        ],
        [logits, sampled, tokens, counts],
        [sampled, tokens, counts],
    )


# Each, and the architectures that have its kernels.
CHAINS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "two_mlps": (two_mlps, ARCHS),
    "split_k": (split_k, ARCHS),
    "tall_mlp": (tall_mlp, ARCHS),
    "decode": (decode, ARCHS),
    "rotation": (rotation, ARCHS),
    "latent_rotation": (latent_rotation, ARCHS),
    "latent": (latent, ARCHS),
    "swap_ab": (swap_ab, ("sm_100a",)),
    "softmaxes": (softmaxes, ARCHS),
    "verification": (verification, ARCHS),
    "scaled": (scaled, ARCHS),
}
