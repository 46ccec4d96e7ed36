# SPDX-License-Identifier: Apache-2.0
"""The classes of linear layers that `dsl-backend tune` tunes: those of known models, or of one model."""

import itertools

import torch
from dsl_backend.linear import dispatch
from dsl_backend.linear.precompile import projection_sizes
from dsl_backend.linear.tuned import MOST_ROWS, TUNED_CONFIGS, problem_of
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target

from ..sweep import Class
from .problems import Problem
from .rows import MAIN, PROJECTIONS
from .sweep import contest

# The largest row count of each class; a class starts after the previous one. The largest count represents the class,
# because tiles that hold it also hold fewer rows.
ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


def shapes(model: ModelShape | None) -> list[tuple[int, int, bool]]:
    """(n, k, whether it is gated) of the layers, without the shapes that the benchmark reserves for validation."""
    if model is None:
        gated, plain = list(MAIN.values()), list(PROJECTIONS.values())
    else:
        gated = [(size, model.hidden_size) for size in model.gated_sizes]
        plain = list(projection_sizes(model))
    return [(n, k, True) for n, k in gated] + [(n, k, False) for n, k in plain]


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves."""
    dtype = torch.bfloat16 if model is None else getattr(torch, model.dtype)
    found = []
    for n, k, gated in shapes(model):
        # Of a layer, whatever its rows: with large tiles it takes a second.
        if dispatch.cute(Problem(m=1, n=n, k=k, gated=gated, dtype=dtype).spec, target):
            continue
        of_shape = problem_of(n, k, gated, dtype, target.sm_count)
        for before, rows in itertools.pairwise((0, *ROWS)):
            # vLLM's products of more rows are not replaced.
            if gated or rows <= MOST_ROWS:
                of_rows = contest(Problem(m=rows, n=n, k=k, gated=gated, dtype=dtype), target, device)
                found.append(Class(TUNED_CONFIGS, of_shape.of_rows(before + 1, rows), (of_rows,)))
    return found
