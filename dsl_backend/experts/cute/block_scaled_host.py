# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the kernels of experts in MXFP8, MXFP4 and NVFP4: keys, compiled functions, launches."""

from typing import Any

import torch
from cutlass import Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.checks import require
from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.block_scaled_configs import UNPACKED_BYTES, choose, products
from dsl_backend.experts.configs import ExpertsConfig
from dsl_backend.experts.cute import host
from dsl_backend.experts.cute.binding import binding
from dsl_backend.experts.cute.block_scaled_layer import BlockScaledExpertsKey, BlockScaledExpertsLayer
from dsl_backend.experts.cute.scaled_args import ScaledExpertsArgs, ScaledScratch
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.args import require_dynamic
from dsl_backend.gemm.host import ALIGNMENT, matrix
from dsl_backend.quant.format import MXFP4, SWIZZLED_ROWS, ScaledFormat
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Part, Workspace

BYTES = torch.uint8


def key_of(spec: ExpertsSpec, config: ExpertsConfig) -> BlockScaledExpertsKey:
    """The kernels of a layer."""
    assert spec.weight is not None
    assert spec.activations is not None
    first, second = products(spec)
    return BlockScaledExpertsKey(
        **vars(host.key_of(spec, config)),
        weight=spec.weight,
        activations=spec.activations,
        first_gemm=first,
        second_gemm=second,
    )


def fake_scale(*rows: Any) -> Any:
    """A fake tensor of swizzled scales of a matrix, or of a stack of matrices."""
    shape = (*rows, cute.sym_int(divisibility=SWIZZLED_ROWS), cute.sym_int(divisibility=4))
    strides = (*(cute.sym_int64(divisibility=4) for _ in shape[1:]), 1)
    return make_fake_tensor(Uint8, shape, strides, assumed_align=ALIGNMENT)


def fake_args(key: BlockScaledExpertsKey) -> ScaledExpertsArgs:
    """What the kernels are compiled for: sizes that are multiples of 16 bytes."""
    pairs, packed = cute.sym_int(), key.activations.packed
    operands, tokens, hidden, width, rows = host.fake_operands(key, BYTES)
    # Bytes of packed rows have sizes of their own.
    half_hidden, half_width = (cute.sym_int(divisibility=ALIGNMENT) for _ in range(2))
    row_hidden, row_width = half_hidden, half_width
    if key.weight == MXFP4:
        row_hidden, row_width = (cute.sym_int(divisibility=UNPACKED_BYTES) for _ in range(2))
    whole = packed > 1
    scales = ExpertsScales(
        w13=fake_scale(key.num_experts),
        w2=fake_scale(key.num_experts),
        w13_global=host.vector(Float32, key.num_experts) if whole else None,
        w2_global=host.vector(Float32, key.num_experts) if whole else None,
        x_global=host.vector(Float32, 1) if whole else None,
        hidden_global=host.vector(Float32, 1) if whole else None,
    )
    scratch = ScaledScratch(
        **host.fake_routing(key.num_experts, pairs),
        hidden=matrix(BYTES, pairs, half_width if whole else width),
        hidden_scale=fake_scale(),
        wide=None,
        x=matrix(BYTES, tokens, half_hidden if whole else hidden),
        x_scale=make_fake_tensor(
            Uint8, (tokens, cute.sym_int(divisibility=4)), (cute.sym_int64(divisibility=4), 1), assumed_align=ALIGNMENT
        ),
        made=matrix(key.dtype, pairs, hidden),
    )
    operands = operands._replace(x=matrix(key.dtype, tokens, hidden), scales=scales)
    if key.weight.packed > 1:
        operands = operands._replace(
            w13=host.matrices(BYTES, key.num_experts, rows, row_hidden),
            w2=host.matrices(BYTES, key.num_experts, hidden, row_width),
        )
    args = ScaledExpertsArgs(operands, scratch, Int32(1), Int32(1), Int32(1))
    require_dynamic(args)
    return args


def build(key: BlockScaledExpertsKey, target: Target) -> Function:
    """The compiled function of x and `ScaledExpertsArgs`; it launches on torch's current stream."""
    args = fake_args(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_kernel(BlockScaledExpertsLayer(key), (args.operands.x, args, stream), key=key, target=target)


def scratch_of(
    spec: ExpertsSpec, config: ExpertsConfig, tokens: int, routing_ctas: int, workspace: Workspace
) -> ScaledScratch:
    """A launch's part of the workspace."""
    kind = spec.activations
    assert kind is not None
    pairs, hidden, width = tokens * spec.topk, spec.hidden_size, spec.intermediate_size
    tiles = config.work_tiles(spec, tokens)
    parts = {
        "hidden": Part(BYTES, (pairs, width // kind.packed)),
        "hidden_scale": Part(BYTES, kind.scale_shape(tiles * SWIZZLED_ROWS, width)),
        "x": Part(BYTES, (tokens, hidden // kind.packed)),
        "x_scale": Part(BYTES, (tokens, scale_columns(kind, hidden))),
        "made": Part(spec.dtype, (pairs, hidden)),
    }
    values = dict(zip(parts, workspace.tensors(list(parts.values())), strict=True))
    return ScaledScratch(**host.routing_of(spec, tiles, tokens, routing_ctas, workspace), wide=None, **values)


def scale_columns(kind: ScaledFormat, columns: int) -> int:
    """Scale factors of a row, in fours."""
    return kind.scale_shape(1, columns)[1]


def as_bytes(operands: ExpertsOperands, kind: ScaledFormat) -> ExpertsOperands:
    """The operands as kernels see them."""
    scales = ExpertsScales(
        *(None if one is None else one.view(BYTES) if one.itemsize == 1 else one for one in operands.scales)
    )
    weights = [one.view(BYTES) for one in (operands.w13, operands.w2)]
    if kind == MXFP4:
        weights = [with_padding(one) for one in weights]
    return operands._replace(w13=weights[0], w2=weights[1], scales=scales)


def with_padding(weight: torch.Tensor) -> torch.Tensor:
    """MXFP4 weights [E, rows, bytes] whose rows end where TMA stops reading, which is before the next row begins."""
    experts, rows, width = weight.shape
    missing = -width % UNPACKED_BYTES
    if not missing:
        return weight
    end = weight.storage_offset() + (experts - 1) * weight.stride(0) + (rows - 1) * weight.stride(1) + width + missing
    require(
        end <= weight.untyped_storage().nbytes(),
        f"weights of rows of {width} bytes end with their memory: {width + missing} are read, pad their rows",
    )
    return weight.as_strided((experts, rows, width + missing), weight.stride())


def run(
    function: Function,
    spec: ExpertsSpec,
    config: ExpertsConfig,
    operands: ExpertsOperands,
    ctas: tuple[int, int, int],
    workspace: Workspace,
) -> None:
    """Launch a function of `build`; `ctas` as the configuration has them."""
    scratch = scratch_of(spec, config, operands.x.shape[0], ctas[0], workspace)
    assert spec.weight is not None
    given = as_bytes(operands, spec.weight)
    function(given.x, ScaledExpertsArgs(given, scratch, *ctas))


bind = binding(choose, key_of, build, run)
