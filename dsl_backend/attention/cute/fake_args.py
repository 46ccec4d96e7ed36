# SPDX-License-Identifier: Apache-2.0
"""What attention kernels are compiled with: fake tensors with the alignments that kernels rely on."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.attention.cute.args import DenseTensors, MlaTensors, Nvfp4Tensors, int32s
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import FIXED_SPLIT_RANGE_FIELDS
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.tiles import NUMERIC, LayerKey
from dsl_backend.attention.protocol import COUNTERS
from dsl_backend.attention.spec import Causality
from dsl_backend.quant.format import NVFP4

ALIGNMENT = 16  # bytes: of the addresses and strides that TMA takes
SINKS = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def fake_args(key: LayerKey, tensors: DenseTensors | Nvfp4Tensors | MlaTensors) -> tuple[Any, ...]:
    """What a kernel's `__call__` takes."""
    has_partials = key.split or key.has_fold_workspace
    partials = fake_vector(cutlass.Float32, cute.sym_int(), ALIGNMENT) if has_partials else None
    return (
        tensors,
        *fake_outputs(key),
        partials,
        fake_scheduler_workspace(key),
        fake_requests(key),
        fake_score_mod_args(key),
        *int32s(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def fake_query(key: LayerKey) -> Any:
    """The type of the elements of queries."""
    return cutlass.Uint8 if key.fp8_q and key.reads_fp8_q else NUMERIC[key.dtype]


def fake_dense_tensors(key: LayerKey) -> DenseTensors:
    lead = fake_pages(key)
    stored = cutlass.Uint8 if key.kv.fp8 else NUMERIC[key.dtype]
    return DenseTensors(
        fake_rows(fake_query(key), key.head_dim, key.heads_q, cute.sym_int()),
        fake_rows(stored, key.head_dim, key.heads_kv, *lead),
        fake_rows(stored, key.head_dim_v, key.heads_kv, *lead),
    )


def fake_mla_tensors(key: LayerKey) -> MlaTensors:
    query, stored = fake_query(key), cutlass.Uint8 if key.kv.fp8 else NUMERIC[key.dtype]
    return MlaTensors(
        fake_rows(query, key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(query, key.head_dim - key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(stored, key.head_dim, key.heads_kv, *fake_pages(key)),
    )


def fake_outputs(key: LayerKey) -> tuple[Any, Any]:
    """`out` and `lse`."""
    width, numeric = key.head_dim_v, NUMERIC[key.dtype]
    if key.out_format is not None:
        width, numeric = width // key.out_format.packed, cutlass.Uint8
    out = fake_rows(numeric, width, key.heads_q, cute.sym_int())
    if not key.lse:
        return out, None
    strides = (cute.sym_int64(), cute.sym_int64())
    return out, make_fake_tensor(cutlass.Float32, (cute.sym_int(), key.heads_q), strides, assumed_align=4)


def fake_requests(key: LayerKey) -> Requests:
    many = cute.sym_int
    page_table = make_fake_tensor(cutlass.Int32, (many(), many()), (cute.sym_int64(), 1), assumed_align=4)
    return Requests(
        fake_vector(cutlass.Int32, many()),
        fake_vector(cutlass.Int32, many()),
        page_table if key.page_size else None,
        None if key.page_size else fake_vector(cutlass.Int32, many()),
        fake_flags() if key.causality == Causality.PER_REQUEST.value else None,
        *int32s(7),
    )


def fake_score_mod_args(key: LayerKey) -> ScoreModArgs:
    sinks = key.scores.sinks
    return ScoreModArgs(
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        fake_vector(SINKS[sinks], key.heads_q, SINKS[sinks].width // 8) if sinks else None,
        fake_vector(cutlass.Float32, key.heads_q) if key.scores.alibi else None,
        fake_layer_scale(key) if key.kv.quantized else None,
        fake_layer_scale(key) if key.kv.quantized else None,
        fake_layer_scale(key) if key.fp8_q else None,
        fake_vector(cutlass.Float32, 1) if key.out_format is not None else None,
        fake_block_scale(key) if key.nvfp4_out else None,
    )


def fake_block_scale(key: LayerKey) -> Any:
    """Scales of the blocks of NVFP4 outputs, a byte each."""
    width = NVFP4.scale_shape(1, key.heads_q * key.head_dim_v)[1]
    return make_fake_tensor(cutlass.Uint8, (cute.sym_int(), width), (width, 1), assumed_align=4)


def fake_scheduler_workspace(key: LayerKey) -> Any:
    """What a tile scheduler keeps in global memory; see `args.py`."""
    if key.split:
        fields = FIXED_SPLIT_RANGE_FIELDS if key.tiles_per_split else SPLIT_RANGE_FIELDS
        return make_fake_tensor(cutlass.Int32, (cute.sym_int(), fields), (fields, 1), assumed_align=ALIGNMENT)
    return make_fake_tensor(cutlass.Int32, (COUNTERS,), (1,), assumed_align=4) if key.dynamic_scheduler else None


def fake_rows(numeric: Any, dim: int, heads: int, *lead: Any) -> Any:
    """[*lead, heads, dim]."""
    strides = tuple(cute.sym_int64(divisibility=ALIGNMENT * 8 // numeric.width) for _ in (*lead, heads))
    return make_fake_tensor(numeric, (*lead, heads, dim), (*strides, 1), assumed_align=ALIGNMENT)


def fake_pages(key: LayerKey) -> tuple[Any, ...]:
    """The leading dimensions of keys."""
    return (cute.sym_int(), key.page_size) if key.page_size else (cute.sym_int(),)


def fake_vector(numeric: Any, length: Any, align: int = 4) -> Any:
    return make_fake_tensor(numeric, (length,), (1,), assumed_align=align)


def fake_layer_scale(key: LayerKey) -> Any:
    """A layer's scale: `fake_scale`, or with scales by request (request, key head)."""
    if not key.scales_by_request:
        return fake_scale(key.heads_kv)
    strides = (cute.sym_int64(), cute.sym_int64())
    return make_fake_tensor(cutlass.Float32, (cute.sym_int(), key.heads_kv), strides, assumed_align=4)


def fake_scale(heads_kv: int) -> Any:
    """Of each key head, at any stride: 0 where all have the same."""
    stride = 1 if heads_kv == 1 else cute.sym_int64()
    return make_fake_tensor(cutlass.Float32, (heads_kv,), (stride,), assumed_align=4)


def fake_flags() -> Any:
    """A byte for each request, at any stride."""
    return make_fake_tensor(cutlass.Uint8, (cute.sym_int(),), (cute.sym_int64(),), assumed_align=1)
