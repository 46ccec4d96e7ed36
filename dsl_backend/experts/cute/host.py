# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the kernels of experts: their keys, compiled functions, launches."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.configs import DECODE_TOKENS, Config, DecodeConfig, ExpertsConfig, Kind, choose
from dsl_backend.experts.cute.args import RECORD, DecodeArgs, DecodeScratch, ExpertsArgs, ExpertsScratch
from dsl_backend.experts.cute.binding import binding
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.layer import layer_of
from dsl_backend.experts.kernel import Launch
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.args import require_dynamic
from dsl_backend.gemm.host import ALIGNMENT, matrix
from dsl_backend.gemm.views import NUMERIC
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Flags of a CTA. As many for any configuration: they cannot grow while a graph is captured.
MOST_GROUPS = 2
IDS = {torch.int32: Int32, torch.int64: Int64}


def key_of(spec: ExpertsSpec, config: Config) -> ExpertsKey:
    """The kernels of a layer."""
    return ExpertsKey(
        num_experts=spec.num_experts,
        topk=spec.topk,
        dtype=spec.dtype,
        ids_dtype=spec.ids_dtype,
        activation=spec.activation,
        interleaved=spec.interleaved,
        w13_bias=spec.w13_bias,
        w2_bias=spec.w2_bias,
        router_weights=spec.router_weights,
        mapped=spec.global_experts is not None,
        first=config.first,
        second=config.second,
        prefetches=config.prefetches,
        trims=isinstance(config, ExpertsConfig) and config.trims,
        shared_experts=spec.shared_experts,
        shared_weight=spec.shared_weight,
        adds=spec.may_add and isinstance(config, ExpertsConfig),
    )


def rows_of(numeric: Any, rows: Any, width: Any, align: int) -> Any:
    """A fake contiguous matrix."""
    return make_fake_tensor(numeric, (rows, width), (cute.sym_int64(), 1), assumed_align=align)


def vector(numeric: Any, size: Any, align: int = 4) -> Any:
    return make_fake_tensor(numeric, (size,), (1,), assumed_align=align)


def fake_operands(key: ExpertsKey, weights: torch.dtype) -> tuple[ExpertsOperands, Any, Any, Any, Any]:
    """(operands, M, H, I, rows of w13) of any sizes that are multiples of 16 bytes; x has the weights' dtype."""
    numeric, experts, topk = NUMERIC[key.dtype], key.num_experts, key.topk
    lanes = ALIGNMENT // weights.itemsize
    tokens = cute.sym_int()
    hidden, width, rows = (cute.sym_int(divisibility=lanes) for _ in range(3))
    operands = ExpertsOperands(
        x=matrix(weights, tokens, hidden),
        w13=matrices(weights, experts, rows, hidden),
        w2=matrices(weights, experts, hidden, width),
        topk_weights=None if key.router_weights is RouterWeights.NONE else rows_of(Float32, tokens, topk, 4),
        topk_ids=rows_of(IDS[key.ids_dtype], tokens, topk, key.ids_dtype.itemsize),
        w13_bias=rows_of(numeric, experts, rows, key.dtype.itemsize) if key.w13_bias else None,
        w2_bias=rows_of(numeric, experts, hidden, key.dtype.itemsize) if key.w2_bias else None,
        expert_map=vector(Int32, cute.sym_int()) if key.mapped else None,
        out=matrix(key.dtype, tokens, hidden),
        shared_w13=matrix(weights, cute.sym_int(divisibility=lanes), hidden) if key.shared_experts else None,
        shared_w2=matrix(weights, hidden, cute.sym_int(divisibility=lanes)) if key.shared_experts else None,
    )
    return operands, tokens, hidden, width, rows


def fake_routing(experts: int, pairs: Any) -> dict[str, Any]:
    """What routing leaves in scratch, by name."""
    return {
        "tiles": make_fake_tensor(Int32, (cute.sym_int(), RECORD), (RECORD, 1), assumed_align=ALIGNMENT),
        "tile_count": vector(Int32, 2),
        "counts": make_fake_tensor(Int32, (cute.sym_int(), experts), (experts, 1), assumed_align=4),
        "pairs": vector(Int32, pairs),
    }


def routing_of(
    spec: ExpertsSpec, work_tiles: int, tokens: int, routing_ctas: int, workspace: Workspace
) -> dict[str, torch.Tensor]:
    """The same of a launch, of the workspace's integers."""
    sizes = (work_tiles * RECORD, 2, routing_ctas * spec.all_experts, tokens * spec.slots)
    tiles, tile_count, counts, pairs = workspace.integers(sum(sizes))[: sum(sizes)].split(sizes)
    return {
        "tiles": tiles.view(work_tiles, RECORD),
        "tile_count": tile_count,
        "counts": counts.view(routing_ctas, spec.all_experts),
        "pairs": pairs,
    }


def matrices(dtype: torch.dtype, count: Any, rows: Any, width: Any) -> Any:
    """A fake stack of matrices whose rows start at aligned addresses."""
    lanes = ALIGNMENT // dtype.itemsize
    strides = (cute.sym_int64(divisibility=lanes), cute.sym_int64(divisibility=lanes), 1)
    return make_fake_tensor(NUMERIC[dtype], (count, rows, width), strides, assumed_align=ALIGNMENT)


def fake_args(key: ExpertsKey, **weights: Any) -> ExpertsArgs | DecodeArgs:
    """What the kernels are compiled for; `weights` are in place of those in 16 bits."""
    operands, tokens, hidden, width, _ = fake_operands(key, key.dtype)
    operands, dtype = operands._replace(**weights), key.dtype
    args: ExpertsArgs | DecodeArgs
    if key.decodes:
        decode_scratch = DecodeScratch(
            hidden=matrices(dtype, cute.sym_int(), tokens, width),
            partials=vector(Float32, cute.sym_int(), ALIGNMENT),
            flags=vector(Int32, cute.sym_int(), ALIGNMENT),
        )
        args = DecodeArgs(operands, decode_scratch, Int32(1))
    else:
        pairs = cute.sym_int()
        scratch = ExpertsScratch(
            **fake_routing(key.slots.all_experts, pairs),
            hidden=matrix(dtype, pairs, width),
            made=None if key.adds else matrix(dtype, pairs, hidden),
        )
        args = ExpertsArgs(operands, scratch, Int32(1), Int32(1), Int32(1))
    require_dynamic(args)
    return args


def build(key: ExpertsKey, target: Target) -> Function:
    """The compiled function of x and `ExpertsArgs` or `DecodeArgs`; it launches on torch's current stream."""
    args = fake_args(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = layer_of(key, target.kernel_arch or "")
    return compile_kernel(kernel, (args.operands.x, args, stream), key=key, target=target)


def scratch_of(
    spec: ExpertsSpec, config: ExpertsConfig, tokens: int, routing_ctas: int, workspace: Workspace
) -> ExpertsScratch:
    """A launch's part of the workspace."""
    pairs, width = tokens * spec.slots, spec.intermediate_size
    hidden = 0 if spec.may_add else spec.hidden_size
    # Elements of 2 bytes in a buffer of 4; both products' rows are multiples of 16 bytes.
    values = workspace.partials(pairs * (hidden + width) // 2).view(spec.dtype)
    return ExpertsScratch(
        **routing_of(spec, config.work_tiles(spec, tokens), tokens, routing_ctas, workspace),
        hidden=values[: pairs * width].view(pairs, width),
        made=values[pairs * width : pairs * (width + hidden)].view(pairs, hidden) if hidden else None,
    )


def decode_scratch_of(
    spec: ExpertsSpec, config: DecodeConfig, tokens: int, ctas: int, workspace: Workspace
) -> DecodeScratch:
    """A launch's part of the workspace."""
    listed = min(spec.num_experts, tokens * spec.topk) + spec.shared_experts
    width = spec.intermediate_size
    # Elements of 2 bytes in a buffer of 4; rows are multiples of 16 bytes.
    of_hidden, of_partials = listed * tokens * width // 2, ctas * config.partials
    values = workspace.partials(of_hidden + of_partials)
    return DecodeScratch(
        hidden=values[:of_hidden].view(spec.dtype).view(listed, tokens, width),
        partials=values[of_hidden : of_hidden + of_partials],
        flags=workspace.flags(ctas * MOST_GROUPS),
    )


def run(
    function: Function,
    spec: ExpertsSpec,
    config: Config,
    operands: ExpertsOperands,
    ctas: tuple[int, ...],
    workspace: Workspace,
) -> None:
    """Launch a function of `build`; `ctas` as the configuration has them."""
    tokens = operands.x.shape[0]
    if isinstance(config, DecodeConfig):
        decode_scratch = decode_scratch_of(spec, config, tokens, ctas[0], workspace)
        function(operands.x, DecodeArgs(operands, decode_scratch, *ctas))
    else:
        scratch = scratch_of(spec, config, tokens, ctas[0], workspace)
        function(operands.x, ExpertsArgs(operands, scratch, *ctas))


def parts_of(operands: ExpertsOperands, most: int) -> Iterator[ExpertsOperands]:
    """The layer of up to `most` tokens at a time."""
    weights = operands.topk_weights
    for first in range(0, operands.x.shape[0], most):
        part = slice(first, first + most)
        yield operands._replace(
            x=operands.x[part],
            topk_weights=None if weights is None else weights[part],
            topk_ids=operands.topk_ids[part],
            out=operands.out[part],
        )


bind = binding(choose, key_of, build, run)
bind_grouped = binding(partial(choose, kind=Kind.GROUPED), key_of, build, run)
bind_overlapped = binding(partial(choose, kind=Kind.OVERLAPPED), key_of, build, run)
of_few = binding(partial(choose, kind=Kind.DECODE), key_of, build, run)


def bind_decode(spec: ExpertsSpec, target: Target, workspace: Workspace) -> Launch:
    """The kernels for few tokens, launched for each part of many."""
    once = of_few(spec, target, workspace)

    def launch(operands: ExpertsOperands) -> None:
        for part in parts_of(operands, DECODE_TOKENS):
            once(part)

    return launch
