# SPDX-License-Identifier: Apache-2.0
"""RMSNorm for the judge: with a residual and without, and with 8-bit outputs."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from dsl_backend.norm import reference
from dsl_backend.norm.spec import FP8, NormTensors, Scaling
from dsl_backend.testing.norm import F16, F32, NormCase, tensors
from dsl_backend.testing.numerics import assert_rounded_once, error_over_budget

from ..judge.registry import LAYERS, EveryProblem, Trial
from .problems import EPS, Inputs, Problem

# Sums in another order than torch's cost a few.
F32_ULPS = 16


def trial(case: NormCase) -> Trial:
    problem = Problem(rows=case.rows, width=case.width, dtype=case.dtype, residual=case.residual, scaling=case.scaling)
    return Trial(id=case.id, why=case.why, problem=problem, details=case)


class Norm(EveryProblem):
    """Rows with gaps between them, of all dtypes and values; the sum with a residual is an output too."""

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        most = 300 if emulated else 3000
        few, even, odd = draw.randint(3, 7), 8 * draw.randint(5, most // 8), 2 * draw.randint(20, most // 2) + 1
        gap: dict[str, Any] = {"pad": 8 * draw.randint(1, 4), "pad_out": 8 * draw.randint(1, 4)}
        ragged: dict[str, Any] = {
            "pad": draw.randint(1, 7),
            "pad_out": draw.randint(1, 7),
            "offset": draw.randint(1, 3),
        }
        cases = [
            NormCase(id="whole", why="whole accesses, no gaps", rows=few, width=even),
            NormCase(id="residual", why="a residual and its sum, gaps", rows=few, width=even, residual=True, **gap),
            NormCase(
                id="ragged", why="odd width and strides, a residual", rows=few, width=odd, residual=True, **ragged
            ),
            NormCase(id="special", why="NaN, infinities, zeros, tiny numbers", rows=9, width=even, special=True),
            NormCase(id="token", why="a scale for each row", rows=few, width=even, scaling=Scaling.TOKEN, **gap),
            NormCase(
                id="token-residual", why="a scale and a sum", rows=few, width=odd, scaling=Scaling.TOKEN, residual=True
            ),
        ]
        if not emulated:
            cases += [
                NormCase(id="one", why="one column", rows=130, width=1),
                NormCase(id="f16", why="float16, gaps", rows=few, width=odd, dtype=F16, **gap),
                NormCase(id="f32", why="float32, which shows coarse arithmetic", rows=few, width=odd, dtype=F32),
                NormCase(id="tensor", why="a given scale, saturation", rows=few, width=even, scaling=Scaling.TENSOR),
                NormCase(id="tall", why="many narrow rows", rows=draw.randint(900, 1100), width=draw.randint(9, 40)),
                NormCase(id="wide", why="a wide row", rows=2, width=draw.randint(9000, 12000), residual=True, **gap),
            ]
        return [trial(case) for case in cases]

    def build(self, trial: Trial, device: torch.device, seed: int) -> Inputs:
        def layer(index: int) -> NormTensors:
            made = tensors(replace(trial.details, seed=LAYERS * seed + index, special=False), device)
            if trial.details.special:
                plant(made.x)
            column = None if made.scale_out is None else made.scale_out[:, None]
            return made._replace(scale_out=column)

        return Inputs(tuple(layer(index) for index in range(LAYERS)))

    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        return [layer.out for layer in inputs.layers]

    def further(self, inputs: Inputs, layer: int) -> list[torch.Tensor]:
        given = inputs.layers[layer]
        return [one for one in (given.residual_out, given.scale_out) if one is not None]

    def nudge(self, inputs: Inputs, layer: int, draw: random.Random) -> None:
        """One element of the last row that is finite and not huge outweighs all others."""
        given = inputs.layers[layer]
        finite = given.x.float().isfinite().all(-1) & (given.x.float().abs().amax(-1) < 1e4)
        row = given.x[int(finite.nonzero()[-1])]
        row[draw.randrange(len(row))] += 64

    def error(self, trial: Trial, inputs: Inputs, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        given, spec = inputs.layers[layer], trial.problem.spec()
        exact, single, naive = (
            reference.exact(given, spec, EPS, dtype) for dtype in (torch.float64, F32, trial.problem.dtype)
        )
        values, rest = exact.values, list(further)
        if given.residual is not None:
            check_sum(rest.pop(0), exact.residual_out)
        if exact.scale_out is not None and single.scale_out is not None:
            scale, right = rest.pop(0), exact.scale_out[:, None]
            assert_rounded_once(scale, right, single.scale_out[:, None], what="scale_out")
            # The output fits the scale that was written.
            values = values * right / scale.double()
        if out.dtype == FP8:
            assert_rounded_once(out, values, single.values, what="out")
            return 0.0
        return error_over_budget(out, values, naive.values, F32_ULPS if out.dtype == F32 else 2)

    def hidden(self, inputs: Any) -> Any:
        return inputs


def plant(x: torch.Tensor) -> None:
    """One kind of trouble in each of the first rows.

    None has squares that overflow in float32: what becomes of those depends on the order of the factors.
    """
    last = x.shape[1] - 1
    x[0, last], x[1, 0], x[2, last // 2 :] = torch.nan, torch.inf, -torch.inf
    x[3], x[4], x[5] = 0, 1e-6, torch.nan


def check_sum(found: torch.Tensor, right: torch.Tensor) -> None:
    """Raises AssertionError: residual_out is not the sum, rounded once."""
    wrong = (found != right) & ~(found.isnan() & right.isnan())
    assert not wrong.any(), f"residual_out differs first at {wrong.nonzero()[0].tolist()}"


JUDGED = {"norm": Norm()}
