# SPDX-License-Identifier: Apache-2.0
"""dsl_backend's own kernels as providers; `kernel` is a name from the dispatch table, or None for dispatch's choice."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.spec import Batch, HostLengths
from dsl_backend.providers import Limits, Run, provider
from dsl_backend.runtime import target as targets

from ..check import FP8_LIMITS
from ..columns import own_triton, reasons
from .inputs import Inputs
from .problems import Problem, WriteProblem
from .writes import WriteInputs


def objections(operation: Operation, problem: Problem | WriteProblem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(operation, problem.spec, targets.detect(), kernel))


def with_lengths(problem: Problem, batch: Batch) -> Batch:
    """The batch as vLLM's plugin gives it to plans by default: on an SM90 they know each request's lengths.

    They are not read where queries are short, and not given for MLA and packed keys.
    """
    if targets.detect(batch.device).kernel_arch != "sm90" or problem.mla or problem.page_size is None:
        return batch
    return replace(batch, host_lengths=HostLengths(np.array(problem.q_lens), np.array(problem.kv_lens)))


def attention(problem: Problem, inputs: Inputs, kernel: str | None = None, by_bounds: bool = False) -> Run:
    """`api.plan` once, `api.run` for each layer.

    Args:
        by_bounds: plans know the longest lengths alone, as in a captured graph.
    """
    batch = inputs.batch if by_bounds else with_lengths(problem, inputs.batch)
    plan = api.plan(problem.spec, batch, kernel=kernel)
    scale = inputs.one if problem.is_fp8_kv else None

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.run(plan, layer.q, layer.keys, layer.values, out=layer.out, k_scale=scale, v_scale=scale)

    return run


def fp8_limits(problem: Problem) -> Limits:
    """Of the kernel with products in 8 bits."""
    return FP8_LIMITS


def ordinary(problem: Problem) -> Problem:
    """The problem of a row of batch-invariant mode, without this mode."""
    return replace(problem, batch_invariant=False)


def ordinary_objections(operation: Operation, problem: Problem) -> list[str]:
    if not problem.batch_invariant:
        return ["the row is not of batch-invariant mode"]
    return objections(operation, ordinary(problem))


def ordinary_attention(problem: Problem, inputs: Inputs) -> Run:
    """What batch-invariant mode is to be nearly as fast as, in the same run."""
    return attention(ordinary(problem), inputs)


def write_kv(problem: WriteProblem, inputs: WriteInputs, kernel: str | None = None) -> Run:
    """`api.write_kv`."""
    spec, scale = problem.spec, inputs.one if problem.kv_dtype != problem.dtype else None

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        api.write_kv(
            spec,
            layer.key,
            layer.value,
            layer.key_cache,
            layer.value_cache,
            inputs.slots,
            k_scale=scale,
            v_scale=scale,
            kernel=kernel,
        )
        return layer.cache

    return run


own_triton(
    "prefill",
    attention,
    partial(objections, Operation.PREFILL),
    "attention/triton/prefill.py",
    "attention/triton/tiles.py",
    default=False,
)

provider(
    "prefill",
    name="by bounds",
    objections=partial(objections, Operation.PREFILL),
    default=False,
    package="dsl-backend",
)(partial(attention, by_bounds=True))

for name, operation in (("prefill", Operation.PREFILL), ("mla-decode", Operation.MLA_DECODE)):
    provider(
        name,
        name="e4m3",
        objections=partial(objections, operation, kernel=dispatch.FP8_PRODUCTS),
        limits=fp8_limits,
        default=False,
        package="dsl-backend",
    )(partial(attention, kernel=dispatch.FP8_PRODUCTS))

for name, operation in (
    ("decode", Operation.DECODE),
    ("prefill", Operation.PREFILL),
    ("mla-decode", Operation.MLA_DECODE),
):
    provider(
        name,
        name="ordinary",
        objections=partial(ordinary_objections, operation),
        default=False,
        package="dsl-backend",
    )(ordinary_attention)
