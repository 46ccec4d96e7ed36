# SPDX-License-Identifier: Apache-2.0
"""Linear layers and plain products for the judge."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsl_backend.linear import reference
from dsl_backend.testing.numerics import error_over_budget

from ..judge.registry import LAYERS, OneOutput, Trial
from .problems import Inputs, Layer, Problem


@dataclass(frozen=True)
class Details:
    """gap: elements between rows of every tensor. has_nan: an element of x in the first row is NaN."""

    gap: int = 0
    has_nan: bool = False


class Linear(OneOutput):
    """Gated and plain, sizes that no tile divides. k and n are multiples of 8, as in the benchmark's rows."""

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        def sizes(m: int, **more: Any) -> Problem:
            return Problem(m=m, n=8 * draw.randint(5, 20), k=8 * draw.randint(9, 24), **more)

        few, some, gap = draw.randint(2, 9), draw.randint(17, 70), 8 * draw.randint(1, 4)
        trials = [
            Trial(id="gated-few", why="few rows", problem=sizes(few), details=Details()),
            Trial(id="gated-some", why="a ragged tile of rows, gaps", problem=sizes(some), details=Details(gap)),
            Trial(id="plain-few", why="few rows", problem=sizes(few, gated=False), details=Details(gap)),
            Trial(id="plain-some", why="a ragged tile of rows", problem=sizes(some, gated=False), details=Details()),
            Trial(id="gated-nan", why="NaN in one row", problem=sizes(few), details=Details(0, True)),
        ]
        if not emulated:
            half = {"dtype": torch.float16}
            wide = Problem(m=draw.randint(129, 200), n=8 * draw.randint(40, 60), k=8 * draw.randint(100, 140))
            trials += [
                Trial(id="gated-one", why="one row", problem=sizes(1), details=Details(gap)),
                Trial(id="gated-f16", why="float16", problem=sizes(some, **half), details=Details()),
                Trial(id="gated-wide", why="several tiles", problem=wide, details=Details(gap)),
                Trial(
                    id="plain-nan", why="NaN in one row", problem=sizes(few, gated=False), details=Details(gap, True)
                ),
            ]
        return trials

    def build(self, trial: Trial, device: torch.device, seed: int) -> Inputs:
        problem: Problem = trial.problem
        details: Details = trial.details
        generator = torch.Generator(device).manual_seed(seed)

        def rows(count: int, width: int, deviation: float) -> torch.Tensor:
            made = torch.empty(count, width + details.gap, dtype=problem.dtype, device=device)
            return made.normal_(0, deviation, generator=generator)[:, :width]

        layers = []
        for _ in range(LAYERS):
            x = rows(problem.m, problem.k, 1)
            weight = rows(problem.spec.weight_rows, problem.k, problem.k**-0.5)
            if details.has_nan:
                x[0, seed % problem.k] = torch.nan
            layers.append(Layer(x, weight, rows(problem.m, problem.n, 1)))
        return Inputs(tuple(layers))

    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        return [layer.out for layer in inputs.layers]

    def nudge(self, inputs: Inputs, layer: int, draw: random.Random) -> None:
        row = inputs.layers[layer].x[-1]
        row[draw.randrange(len(row))] += 8

    def error(self, trial: Trial, inputs: Inputs, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        given, how = inputs.layers[layer], {"activation": trial.problem.spec.activation}
        exact = reference.exact(given.x, given.weight, **how)
        return error_over_budget(out, exact, reference.exact(given.x, given.weight, **how, dtype=out.dtype))

    def hidden(self, inputs: Any) -> Any:
        return inputs


JUDGED = {"linear": Linear()}
