# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the kernels of experts whose weights are in 8 bits: keys, compiled functions, launches."""

from typing import Any

import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.cute import host
from dsl_backend.experts.cute.binding import binding
from dsl_backend.experts.cute.scaled_args import ScaledDecodeArgs, ScaledDecodeScratch, ScaledExpertsArgs, ScaledScratch
from dsl_backend.experts.cute.scaled_layer import ScaledExpertsKey, layer_of
from dsl_backend.experts.scaled_configs import (
    Config,
    ScaledDecodeConfig,
    ScaledExpertsConfig,
    choose,
    choose_decode,
    products,
)
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.args import require_dynamic
from dsl_backend.gemm.host import ALIGNMENT, matrix
from dsl_backend.quant.format import E4M3, ScaledFormat
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Part, Workspace


def key_of(spec: ExpertsSpec, config: Config) -> ScaledExpertsKey:
    """The kernels of a layer."""
    assert spec.weight is not None
    assert spec.activations is not None
    first, second = products(spec, config.beside)
    return ScaledExpertsKey(
        **vars(host.key_of(spec, config)),
        weight=spec.weight,
        activations=spec.activations,
        x_given=spec.x is not None,
        beside=config.beside,
        first_gemm=first,
        second_gemm=second,
    )


def fake_scale(kind: ScaledFormat, *rows: Any) -> Any:
    """A fake contiguous tensor of the scales of a matrix, or of a stack of matrices."""
    shape = (*rows[:-1], cute.sym_int(), cute.sym_int()) if kind.block_rows != 1 else (*rows, cute.sym_int())
    if not kind.blocked:
        shape = rows
    strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
    return make_fake_tensor(Float32, shape, strides, assumed_align=4)


def fake_args(key: ScaledExpertsKey) -> ScaledExpertsArgs | ScaledDecodeArgs:
    """What the kernels are compiled for: sizes that are multiples of 16."""
    e4m3, acts, pairs, listed = E4M3.dtype, key.activations, cute.sym_int(), cute.sym_int()
    operands, tokens, hidden, width, rows = host.fake_operands(key, e4m3)
    if not key.x_given:
        operands = operands._replace(x=matrix(key.dtype, tokens, hidden))
    scales = ExpertsScales(
        w13=fake_scale(key.weight, key.num_experts, rows),
        w2=fake_scale(key.weight, key.num_experts, hidden),
        x=fake_scale(acts, tokens) if key.x_given else None,
    )
    operands = operands._replace(scales=scales)
    of_x = {
        "x": None if key.x_given else matrix(e4m3, tokens, hidden),
        "x_scale": None if key.x_given else fake_scale(acts, tokens),
    }
    args: ScaledExpertsArgs | ScaledDecodeArgs
    if key.decodes:
        decode_scratch = ScaledDecodeScratch(
            hidden=host.matrices(e4m3, listed, tokens, width),
            hidden_scale=fake_scale(acts, cute.sym_int()),
            wide=host.matrices(key.dtype, listed, tokens, width),
            rows=host.vector(Int32, pairs),
            factors=host.vector(Float32, pairs),
            partials=host.vector(Float32, cute.sym_int(), ALIGNMENT),
            flags=host.vector(Int32, cute.sym_int()),
            **of_x,
        )
        args = ScaledDecodeArgs(operands, decode_scratch, Int32(1))
    else:
        scratch = ScaledScratch(
            **host.fake_routing(key.num_experts, pairs),
            hidden=matrix(e4m3, pairs, width),
            hidden_scale=fake_scale(acts, pairs),
            wide=matrix(key.dtype, pairs, width) if key.beside else None,
            made=matrix(key.dtype, pairs, hidden),
            **of_x,
        )
        args = ScaledExpertsArgs(operands, scratch, Int32(1), Int32(1), Int32(1))
    require_dynamic(args)
    return args


def build(key: ScaledExpertsKey, target: Target) -> Function:
    """The compiled function of x and the layer's arguments; it launches on torch's current stream."""
    args = fake_args(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    layer = layer_of(key, target.kernel_arch or "")
    return compile_kernel(layer, (args.operands.x, args, stream), key=key, target=target)


def parts_of_x(spec: ExpertsSpec, tokens: int) -> dict[str, Part]:
    """Of the workspace, where x is quantised here."""
    if spec.x is not None:
        return {}
    assert spec.activations is not None
    return {
        "x": Part(torch.uint8, (tokens, spec.hidden_size)),
        "x_scale": Part(torch.float32, spec.activations.scale_shape(tokens, spec.hidden_size)),
    }


def scratch_of(
    spec: ExpertsSpec, config: ScaledExpertsConfig, tokens: int, routing_ctas: int, workspace: Workspace
) -> ScaledScratch:
    """A launch's part of the workspace."""
    assert spec.activations is not None
    pairs, hidden, width, acts = tokens * spec.topk, spec.hidden_size, spec.intermediate_size, spec.activations
    parts = {
        "hidden": Part(torch.uint8, (pairs, width)),
        "hidden_scale": Part(torch.float32, acts.scale_shape(pairs, width)),
        "made": Part(spec.dtype, (pairs, hidden)),
    }
    if config.beside:
        parts["wide"] = Part(spec.dtype, (pairs, width))
    parts |= parts_of_x(spec, tokens)
    values: dict[str, torch.Tensor | None] = {"wide": None, "x": None, "x_scale": None}
    values |= zip(parts, workspace.tensors(list(parts.values())), strict=True)
    return ScaledScratch(
        **host.routing_of(spec, config.work_tiles(spec, tokens), tokens, routing_ctas, workspace), **values
    )


def decode_scratch_of(
    spec: ExpertsSpec, config: ScaledDecodeConfig, tokens: int, ctas: int, workspace: Workspace
) -> ScaledDecodeScratch:
    """The same for few tokens."""
    assert spec.activations is not None
    pairs, width = tokens * spec.topk, spec.intermediate_size
    listed = min(spec.num_experts, pairs)
    parts = {
        "hidden": Part(torch.uint8, (listed, tokens, width)),
        "hidden_scale": Part(torch.float32, spec.activations.scale_shape(listed * tokens, width)),
        "wide": Part(spec.dtype, (listed, tokens, width)),
        "rows": Part(torch.int32, (pairs,)),
        "factors": Part(torch.float32, (pairs,)),
        "partials": Part(torch.float32, (ctas * config.partials,)),
    }
    parts |= parts_of_x(spec, tokens)
    values: dict[str, torch.Tensor | None] = {"x": None, "x_scale": None}
    values |= zip(parts, workspace.tensors(list(parts.values())), strict=True)
    return ScaledDecodeScratch(**values, flags=workspace.flags(ctas * host.MOST_GROUPS))


def as_bytes(operands: ExpertsOperands) -> ExpertsOperands:
    """The operands as kernels see them."""
    x = operands.x.view(torch.uint8) if operands.x.itemsize == 1 else operands.x
    return operands._replace(x=x, w13=operands.w13.view(torch.uint8), w2=operands.w2.view(torch.uint8))


def run(
    function: Function,
    spec: ExpertsSpec,
    config: Config,
    operands: ExpertsOperands,
    ctas: tuple[int, ...],
    workspace: Workspace,
) -> None:
    """Launch a function of `build`; `ctas` as the configuration has them."""
    tokens, given = operands.x.shape[0], as_bytes(operands)
    if isinstance(config, ScaledDecodeConfig):
        decode_scratch = decode_scratch_of(spec, config, tokens, ctas[0], workspace)
        function(given.x, ScaledDecodeArgs(given, decode_scratch, *ctas))
    else:
        scratch = scratch_of(spec, config, tokens, ctas[0], workspace)
        function(given.x, ScaledExpertsArgs(given, scratch, *ctas))


bind = binding(choose, key_of, build, run)
bind_decode = binding(choose_decode, key_of, build, run)
