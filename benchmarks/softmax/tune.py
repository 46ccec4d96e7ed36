# SPDX-License-Identifier: Apache-2.0
"""The classes of softmax that `dsl-backend tune` tunes: the widths of the benchmark's rows, or a model's vocabulary."""

from collections.abc import Callable
from dataclasses import replace

import torch
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target
from dsl_backend.softmax import dispatch, precompile
from dsl_backend.softmax.candidates import named
from dsl_backend.softmax.configs import SoftmaxConfig
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import TUNED_CONFIGS, config_of, problem_of

from .. import timing
from ..row_tune import rows_of
from ..sweep import Class, Contest, Ready, compiled_by
from .problems import Problem, build, reference, spec_of
from .rows import cases


def contest(problem: Problem, target: Target, device: torch.device) -> Contest:
    """The default and its candidates."""
    spec = spec_of(problem)

    def prepare() -> Ready:
        from dsl_backend.softmax.cute import host

        layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(problem, layers, device, 0)
        outputs = [layer.out for layer in inputs.layers]

        def runner(config: SoftmaxConfig) -> Callable[[int], torch.Tensor]:
            function = host.build(host.key_of(spec, config), target)

            def run(index: int) -> torch.Tensor:
                function(inputs.layers[index].x, outputs[index])
                return outputs[index]

            return run

        return Ready(runner, outputs, reference(problem, inputs, layers - 1))

    return Contest(
        name=f"{problem.rows}x{problem.width}",
        parameters=problem.parameters,
        configs=tuple(named(spec, target).values()),
        chosen=config_of(spec, target),
        precompile_spec=compiled_by("softmax", spec, target),
        prepare=prepare,
        limits=problem.limits,
    )


def specs(model: ModelShape | None) -> list[SoftmaxSpec]:
    """Each kind of softmax once."""
    if model is not None:
        return list(dict.fromkeys(precompile.layer_specs(model)))
    return list(dict.fromkeys(spec_of(case.problem) for case in cases()))


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves. A class's rows are the numbers of rows of a width."""
    found = []
    for spec in specs(model):
        if dispatch.cute(spec, target):
            continue
        one = Problem(rows=1, width=spec.width, dtype=spec.dtype, out_dtype=spec.out_dtype, log=spec.log)
        contests = (contest(replace(one, rows=rows), target, device) for rows in rows_of(spec.width))
        found.append(Class(TUNED_CONFIGS, problem_of(spec), tuple(contests)))
    return found
