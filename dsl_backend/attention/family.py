# SPDX-License-Identifier: Apache-2.0
"""Attention as an operator family: what commands and plugin need to know."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from dsl_backend.attention import dispatch, precompile, rope_dispatch
from dsl_backend.attention.rope_spec import MLARopeSpec, RopeSpec, RopeStyle
from dsl_backend.attention.spec import AttentionSpec, Causality
from dsl_backend.attention.tuned import TUNED_CONFIGS
from dsl_backend.quant.format import NVFP4, NVFP4_KV
from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target

LayerSpec = AttentionSpec | RopeSpec | MLARopeSpec


def typical_layers(target: Target) -> dict[str, LayerSpec]:
    """Layers of published models, in bf16 where the target has it."""
    dtype = target.usual_dtype

    def dense(head_dim: int) -> AttentionSpec:
        return AttentionSpec(
            heads_q=32,
            heads_kv=8,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=dtype,
            kv_dtype=dtype,
            page_size=16,
            scale=1 / math.sqrt(head_dim),
        )

    usual = dense(128)
    rotated = RopeSpec(layer=usual, rotary_dim=128, style=RopeStyle.NEOX, table_dtype=dtype)
    latent = replace(usual, heads_q=128, heads_kv=1, head_dim=576, head_dim_v=512, mla=True, page_size=64)
    latent_rows = MLARopeSpec(layer=latent, style=RopeStyle.GPTJ, table_dtype=dtype, norm_dtype=dtype)
    return {
        "head size 64": dense(64),
        "head size 128": usual,
        "head size 256": dense(256),
        "head size 512": dense(512),
        "fp8 cache": replace(usual, kv_dtype=torch.float8_e4m3fn),
        "NVFP4 cache": replace(usual, kv_dtype=NVFP4_KV.dtype),
        "outputs in NVFP4": replace(usual, out_format=NVFP4),
        "window": replace(usual, window_left=4095, window_right=0),
        "sinks and window": replace(dense(64), heads_q=64, sinks=True, window_left=127, window_right=0),
        "softcap": replace(dense(256), heads_q=16, softcap=50.0),
        "ALiBi": replace(usual, heads_kv=32, alibi=True),
        "encoder, packed": replace(dense(64), heads_kv=32, page_size=None, causality=Causality.FULL),
        "MLA 576/512": latent,
        "MLA 576/512, fp8 cache": replace(latent, kv_dtype=torch.float8_e4m3fn),
        "MLA prefill 192/128": replace(
            usual, heads_q=128, heads_kv=128, head_dim=192, page_size=None, scale=1 / math.sqrt(192)
        ),
        "float32": replace(usual, dtype=torch.float32, kv_dtype=torch.float32),
        "rotated queries and keys": rotated,
        "normalised and rotated queries and keys": replace(rotated, norm_dtype=dtype),
        "normalised and rotated latent rows": latent_rows,
    }


def operations_of(spec: LayerSpec) -> Sequence[str]:
    if not isinstance(spec, AttentionSpec):
        return (rope_dispatch.operation_of(spec),)
    return [operation.value for operation in dispatch.operations_of(spec)]


FAMILY = Family(
    name="attention",
    tables={
        **{operation.value: table for operation, table in dispatch.TABLE.items()},
        rope_dispatch.OPERATION: rope_dispatch.TABLE,
        rope_dispatch.MLA_OPERATION: rope_dispatch.MLA_TABLE,
    },
    naming_options={operation.value: "attention_kernel" for operation in dispatch.TABLE},
    serving_options={rope_dispatch.OPERATION: "rope", rope_dispatch.MLA_OPERATION: "rope"},
    typical_layers=typical_layers,
    operations_of=operations_of,
    precompile_specs=precompile.precompile_specs,
    # Metadata builders compile it, since they know the cache.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(TUNED_CONFIGS,),
    checks={
        "prefill": Check(
            "attention.prefill",
            (
                Benchmark("prefill", r"^(fp8-)?hd128-h32x8-\d+x\d+k$|^hd(64|256)-.*-4x4k$", r"^hd128-h32x8-4x4k$"),
                Benchmark("mla-prefill", r"^h16-\d+x\d+k$", r"^h16-4x4k$"),
            ),
        ),
        "decode": Check(
            "attention.decode",
            (
                Benchmark(
                    "decode",
                    r"^hd128-h32x8-(b1-k8k|b1-k128k|b8-k8k|b64-k8k|b256-k2k)$|^(fp8-hd128-h32x8|hd64-h64x8)-b64-k8k$",
                    r"^hd128-h32x8-(b1|b64)-k8k$",
                ),
            ),
        ),
        "mla": Check(
            "attention.mla_decode",
            (Benchmark("mla-decode", r"^h(16|128)-b\d+-k\d+k-q1$|^h128-b64-k4k-q2$", r"^h128-b64-k4k-q1$"),),
        ),
        "write_kv": Check("attention.write_kv", (Benchmark("write-kv", r"-t(64|8k)$", r"^hd128-h8-t64$"),)),
        "rope_write_kv": Check(
            rope_dispatch.OPERATION,
            (Benchmark("rope-write-kv", r"^(llama|qwen3)-t(1|64|8192)$", r"^qwen3-t64$"),),
        ),
        "rope_write_mla": Check(
            rope_dispatch.MLA_OPERATION,
            (Benchmark("rope-write-mla", r"^h(16|128)-t(1|64|2048)$", r"^h16-t64$"),),
        ),
    },
)
