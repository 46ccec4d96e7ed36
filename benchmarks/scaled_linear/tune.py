# SPDX-License-Identifier: Apache-2.0
"""The classes of layers in e4m3 that `dsl-backend tune` compares with vLLM's own kernels.

Where this package wins, a server with `scaled_linears` `measured` has it serve these numbers of rows.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from dsl_backend.linear.precompile import projection_sizes
from dsl_backend.linear.scaled import dispatch
from dsl_backend.linear.scaled.tuned import KERNELS, TUNED_CONFIGS, problem_of
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target

from ..case import case_of
from ..columns import reasons
from ..held_out.compile_ahead import Task
from ..sweep import Class
from . import operators
from .problems import Problem
from .providers import DEEP_GEMM, deep_gemm_product
from .rows import TUNED
from .sweep import candidates, contest, theirs_product

# The largest number of rows of each class; a class starts after the previous one, and both its ends are timed. Decode
# steps that are padded to a CUDA graph's size, and prompts in chunks, have the largest ones.
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SCHEMES = ("channels", "blocks")
# Configurations of a class besides what the cost model chooses.
MOST = 4
# Of a launch that may compile.
LAUNCH_SECONDS = 120.0


def shapes(model: ModelShape | None) -> list[tuple[int, int, bool]]:
    """(n, k, whether it is gated) of the layers of some models, or of one."""
    if model is None:
        return list(TUNED.values())
    gated = [(size, model.hidden_size, True) for size in model.gated_sizes]
    # The logits' projection is in 16 bits.
    plain = list(projection_sizes(model))[:-1]
    return [*gated, *((n, k, False) for n, k in plain)]


def ends(before: int, most: int, **facts: object) -> list[Problem]:
    """The first and the last number of rows of a class."""
    return [Problem(m=m, **facts) for m in dict.fromkeys((before + 1, most))]  # type: ignore[arg-type]


def launches(rows: Sequence[Problem]) -> tuple[Task, ...]:
    """Launches of vLLM's product that compile it: DeepGEMM does so at the first launch of a layer's sizes and tile."""
    if theirs_product(rows[0]) is not deep_gemm_product:
        return ()
    (operator,) = operators().values()
    (provider,) = (one for one in operator.providers([]) if one.name == DEEP_GEMM)
    return tuple(Task(operator, case_of(f"{row.m}", row), provider, "cuda", LAUNCH_SECONDS) for row in rows)


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a kernel with records serves, where vLLM has one beside it; few rows of all layers first."""
    kernel = KERNELS.get(target.kernel_arch or "")
    found: list[Class] = []
    if kernel is None or (model is not None and model.dtype != "bfloat16"):
        return found
    for (before, most), scheme in itertools.product(itertools.pairwise((0, *ROWS)), SCHEMES):
        for n, k, gated in shapes(model):
            if n % 16 or k % 16:
                continue
            rows = ends(before, most, n=n, k=k, scheme=scheme, gated=gated)
            spec = rows[0].spec
            if reasons(partial(dispatch.choose, spec, target, kernel)) or theirs_product(rows[0]) is None:
                continue
            configs = candidates(rows, target, MOST)
            of_shape = problem_of(spec, target.sm_count).of_rows(before + 1, most)
            contests = tuple(contest(row, target, device, configs) for row in rows)
            found.append(Class(TUNED_CONFIGS, of_shape, contests, launches(rows)))
    return found
