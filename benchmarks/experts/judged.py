# SPDX-License-Identifier: Apache-2.0
"""Routed experts for the judge: every routing, sizes that no tile divides."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsl_backend.experts import reference
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.testing.numerics import error_over_budget

from ..judge.registry import LAYERS, OneOutput, Trial
from . import problems
from .problems import Inputs, Layer, Problem


@dataclass(frozen=True)
class Details:
    """gap: elements between rows of x and of the output. has_nan: a token is NaN."""

    gap: int = 0
    has_nan: bool = False


class Experts(OneOutput):
    """Few and many tokens, evenly and all to the same experts. Sizes are multiples of 8, as in the benchmark's rows."""

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        def of(m: int, routing: str = "uniform", **more: Any) -> Problem:
            sizes: dict[str, Any] = {"hidden": 8 * draw.randint(5, 12), "width": 8 * draw.randint(5, 12)}
            experts, topk = draw.randint(4, 9), draw.randint(1, 3)
            return Problem(m=m, routing=routing, experts=experts, topk=topk, **sizes, **more)

        few, some, gap = draw.randint(2, 7), draw.randint(17, 50), 8 * draw.randint(1, 4)
        trials = [
            Trial(id="few", why="experts without a token", problem=of(few), details=Details()),
            Trial(id="some", why="ragged tiles of every expert, gaps", problem=of(some), details=Details(gap)),
            Trial(id="skewed", why="an expert has most tokens", problem=of(some, "zipf"), details=Details()),
            Trial(id="nan", why="a token is NaN, and no other", problem=of(few), details=Details(gap, True)),
        ]
        if not emulated:
            half = of(some, dtype=torch.float16)
            trials += [
                Trial(id="one-token", why="one token", problem=of(1), details=Details(gap)),
                Trial(id="same-experts", why="all tokens to the same", problem=of(some, "one"), details=Details(gap)),
                Trial(id="f16", why="float16", problem=half, details=Details()),
                Trial(id="many", why="several tiles", problem=of(draw.randint(500, 600)), details=Details()),
            ]
        return trials

    def build(self, trial: Trial, device: torch.device, seed: int) -> Inputs:
        details: Details = trial.details

        def spaced(layer: Layer) -> Layer:
            x, out = (with_gap(one, details.gap) for one in (layer.x, layer.out))
            if details.has_nan:
                x[0, 0] = torch.nan
            return replace(layer, x=x, out=out)

        made = problems.build(trial.problem, LAYERS, device, seed)
        return Inputs(tuple(spaced(layer) for layer in made.layers))

    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        return [layer.out for layer in inputs.layers]

    def nudge(self, inputs: Inputs, layer: int, draw: random.Random) -> None:
        row = inputs.layers[layer].x[-1]
        row[draw.randrange(len(row))] += 8

    def error(self, trial: Trial, inputs: Inputs, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        given, spec = inputs.layers[layer], trial.problem.spec
        operands = ExpertsOperands(**vars(given), w13_bias=None, w2_bias=None, expert_map=None)
        exact, naive = (reference.exact(spec, operands, dtype) for dtype in (torch.float64, out.dtype))
        return error_over_budget(out, exact, naive)

    def covers(self, problem: Any) -> bool:
        """Weights in 8 bits have scales, which docs/providers.md does not name."""
        return bool(problem.weight is None)

    def hidden(self, inputs: Any) -> Any:
        return inputs


def with_gap(rows: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows, with `gap` elements between them."""
    wide = torch.zeros(len(rows), rows.shape[1] + gap, dtype=rows.dtype, device=rows.device)
    view = wide[:, : rows.shape[1]]
    view.copy_(rows)
    return view


JUDGED = {"experts": Experts()}
