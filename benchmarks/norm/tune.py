# SPDX-License-Identifier: Apache-2.0
"""The classes of RMSNorm that `dsl-backend tune` tunes: the widths of the benchmark's rows, or a model's hidden size.

Norms with 8-bit outputs are left out: how good these are is not compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from dsl_backend.norm import dispatch, launch, precompile
from dsl_backend.norm.candidates import named
from dsl_backend.norm.configs import NormConfig
from dsl_backend.norm.spec import Scaling
from dsl_backend.norm.tuned import TUNED_CONFIGS, ProblemShape, config_of, problem_of
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target

from .. import timing
from ..row_tune import rows_of
from ..sweep import Class, Contest, Ready, compiled_by
from .problems import EPS, Problem, build, reference
from .rows import cases


def contest(problem: Problem, target: Target, device: torch.device) -> Contest:
    """The default and its candidates."""
    spec = problem.spec()

    def prepare() -> Ready:
        from dsl_backend.norm.cute import host

        layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(problem, layers, device, 0)
        outputs = [layer.out for layer in inputs.layers]

        def runner(config: NormConfig) -> Callable[[int], torch.Tensor]:
            function = host.build(host.key_of(spec, config), target)
            given = [host.arguments_of(launch.prepared(layer)) for layer in inputs.layers]

            def run(index: int) -> torch.Tensor:
                function(*given[index], EPS)
                return outputs[index]

            return run

        return Ready(runner, outputs, reference(problem, inputs, layers - 1))

    return Contest(
        name=f"{problem.rows}x{problem.width}",
        parameters=problem.parameters,
        configs=tuple(named(spec, target.smem_bytes).values()),
        chosen=config_of(spec, target),
        precompile_spec=compiled_by("norm", spec, target),
        prepare=prepare,
        limits=problem.limits,
    )


def problems(model: ModelShape | None) -> Sequence[Problem]:
    """Norms of one row."""
    if model is None:
        return [case.problem for case in cases() if case.problem.scaling is Scaling.NONE]
    return [
        Problem(rows=1, width=spec.width, dtype=spec.dtype, residual=spec.residual)
        for spec in precompile.layer_specs(model)
    ]


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves. A class's rows are the numbers of rows of a width."""
    found: dict[ProblemShape, Class] = {}
    for problem in problems(model):
        shape = problem_of(problem.spec())
        if shape is None or shape in found or dispatch.cute(problem.spec(), target):
            continue
        contests = (contest(replace(problem, rows=rows), target, device) for rows in rows_of(problem.width))
        found[shape] = Class(TUNED_CONFIGS, shape, tuple(contests))
    return list(found.values())
