# SPDX-License-Identifier: Apache-2.0
"""The classes of linear layers that `dsl-backend tune` tunes: gated layers of known models, or of one model."""

import itertools

import torch
from dsl_backend.linear import dispatch
from dsl_backend.linear.tuned import TUNED_CONFIGS, problem_of
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target

from ..sweep import Class
from .problems import Problem
from .rows import MAIN
from .sweep import contest

# The largest row count of each class; a class starts after the previous one. The largest count represents the class,
# because tiles that hold it also hold fewer rows.
ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


def shapes(model: ModelShape | None) -> list[tuple[int, int]]:
    """(n, k) of the gated layers, without the shapes that the benchmark reserves for validation."""
    if model is None:
        return list(MAIN.values())
    return [(size, model.hidden_size) for size in model.gated_sizes]


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves."""
    dtype = torch.bfloat16 if model is None else getattr(torch, model.dtype)
    found = []
    for (n, k), (before, rows) in itertools.product(shapes(model), itertools.pairwise((0, *ROWS))):
        problem = Problem(m=rows, n=n, k=k, dtype=dtype)
        if not dispatch.cute(problem.spec, target):
            of_shape = problem_of(n, k, True, dtype, target.sm_count)
            found.append(Class(TUNED_CONFIGS, of_shape.of_rows(before + 1, rows), (contest(problem, target, device),)))
    return found
