# SPDX-License-Identifier: Apache-2.0
"""Keys, compiled functions and launches of the CuTe DSL sampler."""

import math
from dataclasses import replace
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.checks import short
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ACCESS_BYTES, ClusterConfig, blocks_of, widest_vector
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.cute.kernel import NUMERIC, Sample, SampleKey
from dsl_backend.sampling.spec import (
    Kept,
    LogprobsMode,
    Parameters,
    Sampled,
    SamplingSpec,
    first_rows,
    parameters_off,
)
from dsl_backend.sampling.triton.logprobs_host import ProcessedRows
from dsl_backend.sampling.tuned import config_of, configs_of

# Numbers of a row in SampleArgs.pending.
PENDING = 3


def key_of(spec: SamplingSpec, config: ClusterConfig, k_dtype: torch.dtype = torch.int32) -> SampleKey:
    """The kernel of a problem. It serves every vocabulary that its vectors divide."""
    return SampleKey(
        dtype=short(spec.dtype),
        token_dtype=short(spec.token_dtype),
        k_dtype=short(k_dtype),
        logprobs_mode=spec.logprobs_mode,
        keeps=spec.kept,
        config=config,
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

    def per_row(name: str) -> Any:
        return make_fake_tensor(NUMERIC[name], (rows,), (1,), assumed_align=NUMERIC[name].width // 8)

    args = SampleArgs(
        logits=logits,
        seeds=per_row("int64"),
        positions=per_row("int64"),
        temperature=per_row("float32"),
        top_k=per_row(key.k_dtype),
        top_p=per_row("float32"),
        min_p=per_row("float32"),
        tokens=per_row(key.token_dtype),
    )
    if key.config.finish_cluster:
        scratch = make_fake_tensor(NUMERIC["int64"], (rows, PENDING), (PENDING, 1), assumed_align=8)
        shape, strides = (rows, cute.sym_int()), (cute.sym_int64(), 1)
        block_max = make_fake_tensor(NUMERIC["float32"], shape, strides, assumed_align=4)
        args = args._replace(pending=scratch, block_max=block_max)
    if key.logprobs_mode is not None:
        columns, stride = cute.sym_int(), cute.sym_int64()
        args = args._replace(
            top_ids=make_fake_tensor(NUMERIC["int32"], (rows, columns), (stride, 1), assumed_align=4),
            top_logprobs=make_fake_tensor(NUMERIC["float32"], (rows, columns), (stride, 1), assumed_align=4),
            token_ranks=per_row("int32"),
        )
    if key.keeps:
        kept = ("float32", "int64", "int64", "int32", "int64")
        args = args._replace(**{name: per_row(dtype) for name, dtype in zip(Kept._fields, kept, strict=True)})
    return make_fake_stream(use_tvm_ffi_env_stream=True), *args.tensors


def build(key: SampleKey, target: Target) -> Function:
    """The compiled function of SampleArgs, one by one."""
    return compile_kernel(Sample(key), fake_args(key), key=key, target=target)


def drawn_by_kernel(spec: SamplingSpec) -> SamplingSpec:
    """The part of a problem that the kernel serves: tokens, and the likeliest tokens of raw logits."""
    if spec.logprobs_mode is LogprobsMode.PROCESSED_LOGPROBS:
        spec = replace(spec, logprobs_mode=None, num_logprobs=0)
    return replace(spec, logprobs=False)


def scratch(spec: SamplingSpec, max_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`SampleArgs.pending` and `SampleArgs.block_max`."""
    pending = torch.zeros(max_rows, PENDING, dtype=torch.int64, device=device)
    return pending, torch.zeros(max_rows, blocks_of(spec.vocab, 1), device=device)


def with_scratch(args: SampleArgs, spec: SamplingSpec, config: ClusterConfig) -> SampleArgs:
    """Arguments of one launch of a configuration, with new scratch if it has a second launch."""
    if not config.finish_cluster:
        return args
    pending, block_max = scratch(spec, len(args.logits), args.logits.device)
    return args._replace(pending=pending, block_max=block_max)


def with_expected_strides(logits: torch.Tensor) -> torch.Tensor:
    """A view of the same rows with the strides that the kernel expects.

    torch allows any row stride of a single row, and any column stride of rows of a single logit.
    """
    rows, vocab = logits.shape
    if logits.stride() == (vocab, 1) or ((vocab > 1 or logits.stride(1) == 1) and rows > 1):
        return logits
    return logits.as_strided((rows, vocab), (logits.stride(0) if rows > 1 else vocab, 1))


def common_vector(logits: torch.Tensor) -> int:
    """Adjacent logits that one access may load in every row."""
    size = logits.element_size()
    return math.gcd(ACCESS_BYTES // size, logits.shape[1], logits.stride(0), logits.data_ptr() // size)


class CuteSampler:
    """The sampler on a CUDA device of SM90 or SM100.

    The kernels of contiguous, aligned logits are compiled here; those of other strides at their first launch. Triton's
    launches over blocks follow where a spec asks for the log-probabilities of whole rows. Steps that ask for what the
    filters keep have kernels of their own.
    """

    returns_kept = True

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.processed = ProcessedRows(spec, target, max_rows, device) if spec.logprobs else None
        self.target = target
        # Of steps that ask for what the filters keep, and of others.
        self.keeping = drawn_by_kernel(spec)
        self.spec = spec = replace(self.keeping, kept=False)
        self.functions: dict[SampleKey, Function] = {}
        # Key: the arguments of `chosen`.
        self.choices: dict[tuple[int, int, bool, torch.dtype, bool], tuple[Function, bool]] = {}
        for each in dict.fromkeys((spec, self.keeping)):
            for config in configs_of(each, target, max_rows, widest_vector(each)):
                self.function(key_of(each, config))
        # Operands for parameters that are off for all rows.
        self.off = first_rows(parameters_off(max_rows, device))
        finishes = any(key.config.finish_cluster for key in self.functions)
        self.scratch = scratch(spec, max_rows, device) if finishes else None

    def function(self, key: SampleKey) -> Function:
        function = self.functions.get(key)
        if function is None:
            function = self.functions[key] = build(key, self.target)
        return function

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        count = logits.shape[0]
        logits = with_expected_strides(logits)
        temperature, top_k, top_p, min_p = (
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
        )
        top_p_alone = top_p is not None and top_k is None and min_p is None
        off = self.off(count)
        if top_k is None:
            top_k = off["top_k"]
        likeliest = self.spec.logprobs_mode is not None
        args = SampleArgs(
            logits=logits,
            seeds=parameters.seeds,
            positions=parameters.positions,
            temperature=off["temperature"] if temperature is None else temperature,
            top_k=top_k,
            top_p=off["top_p"] if top_p is None else top_p,
            min_p=off["min_p"] if min_p is None else min_p,
            tokens=out.tokens,
            top_ids=out.top_ids if likeliest else None,
            top_logprobs=out.top_logprobs if likeliest else None,
            token_ranks=out.token_ranks if likeliest else None,
            **({} if out.kept is None else out.kept._asdict()),
        )
        keeps = out.kept is not None
        function, finishes = self.chosen(count, common_vector(logits), top_p_alone, top_k.dtype, keeps)
        if finishes and self.scratch is not None:
            pending, block_max = self.scratch
            args = args._replace(pending=pending[:count], block_max=block_max[:count])
        function(*args.tensors)
        if self.processed is not None:
            self.processed.launch(logits, parameters, out)

    def chosen(
        self, rows: int, vector: int, top_p_alone: bool, k_dtype: torch.dtype, keeps: bool
    ) -> tuple[Function, bool]:
        """The function of a launch, and whether it has a second one.

        All that the choice depends on is in the arguments, so it is made once for them.
        """
        asked = rows, vector, top_p_alone, k_dtype, keeps
        choice = self.choices.get(asked)
        if choice is None:
            spec = self.keeping if keeps else self.spec
            config = config_of(spec, self.target, rows, vector, top_p_alone)
            function = self.function(key_of(spec, config, k_dtype))
            choice = self.choices[asked] = function, config.finish_cluster > 0
        return choice
