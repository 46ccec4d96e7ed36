# SPDX-License-Identifier: Apache-2.0
"""What every attention kernel of this folder is launched with."""

import math
from typing import Any

import torch

from dsl_backend.attention.configs import key_blocks, value_blocks
from dsl_backend.attention.kernel import Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.runtime.target import Target

# Change from step to step: a kernel compiled for one value of these serves them all.
STEP_ARGUMENTS = ["num_requests", "shortest", "longest", "table_stride"]
CAUSALITY_CODES = {Causality.FULL: 0, Causality.CAUSAL: 1, Causality.PER_REQUEST: 2}


def window(width: int | None) -> int:
    """A window as the kernels take it: -1 is unbounded, and so is what int32 positions could not be added to."""
    return -1 if width is None or width >= 1 << 30 else width


def layer_constants(spec: AttentionSpec) -> dict[str, Any]:
    """The compile-time arguments that a layer's spec decides."""
    d1, d2 = key_blocks(spec)
    dv1, dv2 = value_blocks(spec)
    return {
        "HEADS_KV": spec.heads_kv,
        "GROUP": spec.group,
        "D1": d1,
        "D2": d2,
        "DV1": dv1,
        "DV2": dv2,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "PAGE": spec.page_size or 0,
        "CAUSALITY": CAUSALITY_CODES[spec.causality],
        "LEFT": window(spec.window_left),
        "RIGHT": window(spec.window_right),
        "SOFTCAP": float(spec.softcap),
        "LATENT": spec.latent,
    }


def key_storage(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """fp8 keys as the target reads them: bytes where it has no conversion of its own."""
    if tensor.dtype == torch.float8_e4m3fn and not target.native_fp8:
        return tensor.view(torch.uint8)
    return tensor


def layer_arguments(
    spec: AttentionSpec, target: Target, batch: Batch, operands: Operands, shortest: int, longest: int
) -> tuple[Any, ...]:
    """The run-time arguments that the kernels have in common, in their order."""
    q, q2 = operands.q, operands.q_rope
    if q2 is None:
        q2 = q[..., key_blocks(spec)[0] :]
    lse = operands.lse
    # Packed keys are [tokens, heads, dim]; the page stride is then unused.
    k_strides = operands.keys.stride() if spec.page_size is not None else (0, *operands.keys.stride())
    v_strides = operands.values.stride() if spec.page_size is not None else (0, *operands.values.stride())
    return (
        q,
        q2,
        key_storage(operands.keys, target),
        key_storage(operands.values, target),
        operands.out,
        lse,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.kv_start_loc,
        batch.causal if spec.causality is Causality.PER_REQUEST else None,
        operands.sinks,
        operands.alibi_slopes,
        operands.k_scale if spec.is_fp8_kv else None,
        operands.v_scale if spec.is_fp8_kv else None,
        spec.scale / math.log(2),
        batch.num_requests,
        shortest,
        longest,
        q.stride(0),
        q.stride(1),
        q2.stride(0),
        q2.stride(1),
        *k_strides[:3],
        *v_strides[:3],
        operands.out.stride(0),
        operands.out.stride(1),
        *((0, 0) if lse is None else lse.stride()),
        0 if batch.block_table is None else batch.block_table.stride(0),
    )
