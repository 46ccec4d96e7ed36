# SPDX-License-Identifier: Apache-2.0
"""The classes of attention problems that `dsl-backend tune` tunes: those of the benchmarks' rows, or of a model."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from dsl_backend.attention import dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.tuned import TUNABLE, TUNED_CONFIGS, problem_of
from dsl_backend.errors import Unsupported
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target

from ..case import TABLE, Case, case_of
from ..sweep import Class, Contest
from . import rows, sweep
from .problems import Problem, dense, latent, packed

GROUPS = (TABLE, "fp8")
DEEPSEEK = (512, 64)  # latent and rope elements of `problems.latent` and `packed`


def usual() -> Iterator[tuple[Operation, Case[Problem]]]:
    """The rows of the benchmarks' default groups."""
    for operation, cases in sweep.KINDS.values():
        yield from ((operation, case) for case in cases(16) if case.group in GROUPS)


def of_model(model: ModelShape) -> Iterator[tuple[Operation, Case[Problem]]]:
    """The default groups' batches with a model's heads; empty if the sizes of its latent are not DeepSeek's."""

    def case(name: str, problem: Problem) -> Case[Problem]:
        dtype = getattr(torch, model.dtype)
        return case_of(name, dataclasses.replace(problem, dtype=dtype, kv_dtype=dtype))

    if model.is_mla:
        if (model.latent_rank, model.rope_dim) != DEEPSEEK:
            return
        name = f"h{model.heads_q}"
        for batch, keys in rows.LATENT_SHAPES:
            problem = latent(model.heads_q, [1] * batch, [keys] * batch)
            yield Operation.MLA_DECODE, case(f"{name}-b{batch}-k{rows.length(keys)}", problem)
        for batch, new in rows.PREFILL_SHAPES:
            yield Operation.PREFILL, case(f"{name}-{batch}x{rows.length(new)}", packed(model.heads_q, [new] * batch))
        return
    heads = (model.head_dim, model.heads_q, model.heads_kv)
    for batch, keys in rows.DECODE_SHAPES:
        problem = dense(*heads, [1] * batch, [keys] * batch)
        yield Operation.DECODE, case(f"{rows.heads(*heads)}-b{batch}-k{rows.length(keys)}", problem)
    for batch, new in rows.PREFILL_SHAPES:
        problem = dense(*heads, [new] * batch, [new] * batch)
        yield Operation.PREFILL, case(f"{rows.heads(*heads)}-{batch}x{rows.length(new)}", problem)


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves."""
    found: dict[Any, list[Contest]] = {}
    asked = usual() if model is None else of_model(model)
    for (operation, case), kernel in itertools.product(asked, ("cute", dispatch.FP8_PRODUCTS)):
        if kernel == dispatch.FP8_PRODUCTS and operation is Operation.DECODE:
            # By that name it has products in 16 bits.
            continue
        try:
            kind = dispatch.choose(operation, case.problem.spec, target, kernel).load()
        except Unsupported:
            continue
        problem = problem_of(case.problem.spec, TUNABLE[kind.default].operation)
        found.setdefault(problem, []).append(sweep.contest(operation, case, target, device, kernel))
    return [Class(TUNED_CONFIGS, problem, tuple(contests)) for problem, contests in found.items()]
