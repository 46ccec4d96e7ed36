# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the CuTe DSL kernel: its key, its function, its launch."""

import math
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ACCESS_BYTES, ClusterConfig, cluster_configs, widest_vector
from dsl_backend.sampling.cute.kernel import NUMERIC, Sample, SampleKey
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec


def short(dtype: torch.dtype) -> str:
    """The dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def key_of(spec: SamplingSpec, config: ClusterConfig, k_dtype: torch.dtype = torch.int32) -> SampleKey:
    """The kernel for a problem; all vocabularies share one."""
    return SampleKey(
        dtype=short(spec.dtype), token_dtype=short(spec.token_dtype), k_dtype=short(k_dtype), config=config
    )


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


def strided(logits: torch.Tensor) -> torch.Tensor:
    """The same rows with the strides that the kernel expects: of one row, or of rows of one logit, any is allowed."""
    rows, vocab = logits.shape
    if (vocab > 1 or logits.stride(1) == 1) and rows > 1:
        return logits
    return logits.as_strided((rows, vocab), (logits.stride(0) if rows > 1 else vocab, 1))


def common_vector(logits: torch.Tensor) -> int:
    """Neighbours that may be accessed at once in every row."""
    size = logits.element_size()
    return math.gcd(ACCESS_BYTES // size, logits.shape[1], logits.stride(0), logits.data_ptr() // size)


class CuteSampler:
    """The sampler on a CUDA device of SM90 or SM100. What packed, aligned logits need is compiled here."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec, self.target = spec, target
        self.functions: dict[SampleKey, Function] = {}
        for config in cluster_configs(spec, target, max_rows, widest_vector(spec)):
            self.function(key_of(spec, config))
        # What stands for a parameter that is off for all rows.
        self.ones = torch.ones(max_rows, device=device)
        self.zeros = torch.zeros(max_rows, device=device)
        self.no_k = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def function(self, key: SampleKey) -> Function:
        found = self.functions.get(key)
        if found is None:
            found = self.functions[key] = build(key, self.target)
        return found

    def launch(self, logits: torch.Tensor, rows: Parameters, out: Sampled) -> None:
        count = len(logits)
        logits = strided(logits)
        bounded = rows.top_k is not None or rows.min_p is not None
        config = ClusterConfig.default(self.spec, self.target, count, common_vector(logits), bounded)
        top_k = self.no_k[:count] if rows.top_k is None else rows.top_k
        self.function(key_of(self.spec, config, top_k.dtype))(
            logits,
            rows.seeds,
            rows.positions,
            self.ones[:count] if rows.temperature is None else rows.temperature,
            top_k,
            self.ones[:count] if rows.top_p is None else rows.top_p,
            self.zeros[:count] if rows.min_p is None else rows.min_p,
            out.tokens,
        )
