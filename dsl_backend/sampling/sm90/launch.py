# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the CuTe DSL kernel: its key, its function, its launch."""

from functools import cache
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.sm90.kernel import NUMERIC, Sample, SampleKey
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec


def short(dtype: torch.dtype) -> str:
    """The dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def key_of(spec: SamplingSpec, config: ClusterConfig, k_dtype: torch.dtype = torch.int32) -> SampleKey:
    return SampleKey(dtype=short(spec.dtype), token_dtype=short(spec.token_dtype), k_dtype=short(k_dtype), config=config)


def fake_args(key: SampleKey) -> tuple[Any, ...]:
    rows, vector = cute.sym_int(), key.config.vector
    dtype = NUMERIC[key.dtype]
    logits = make_fake_tensor(
        dtype,
        (rows, cute.sym_int(divisibility=vector)),
        (cute.sym_int64(divisibility=vector), 1),
        assumed_align=vector * dtype.width // 8,
    )

    def one_each(name: str) -> Any:
        return make_fake_tensor(NUMERIC[name], (rows,), (1,), assumed_align=NUMERIC[name].width // 8)

    names = ("int64", "int64", "float32", key.k_dtype, "float32", "float32", key.token_dtype)
    return logits, *map(one_each, names), make_fake_stream(use_tvm_ffi_env_stream=True)


def build(key: SampleKey, target: Target) -> Function:
    """The compiled function: (logits, seeds, positions, temperature, top_k, top_p, min_p, tokens)."""
    return compile_kernel(Sample(key), fake_args(key), key=key, target=target)
