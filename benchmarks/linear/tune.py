# SPDX-License-Identifier: Apache-2.0
"""The classes of linear layers that `dsl-backend tune` goes through: gated ones of known models, or of one model."""

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

# A class ends at one of these, and begins behind the one before: tiles that hold its most rows hold the others too.
ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


def shapes(model: ModelShape | None) -> list[tuple[int, int]]:
    """(n, k) of gated layers. Those that the benchmark holds out stay so."""
    if model is None:
        return list(MAIN.values())
    return [(size, model.hidden_size) for size in model.gated_sizes]


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """Those that a CuTe DSL kernel serves."""
    dtype = torch.bfloat16 if model is None else getattr(torch, model.dtype)
    found = []
    for (n, k), (before, rows) in itertools.product(shapes(model), itertools.pairwise((0, *ROWS))):
        problem = Problem(m=rows, n=n, k=k, dtype=dtype)
        if not dispatch.cute(problem.spec, target):
            of_shape = problem_of(n, k, True, dtype, target.sm_count)
            found.append(Class(TUNED_CONFIGS, of_shape.of_rows(before + 1, rows), (contest(problem, target, device),)))
    return found
