# SPDX-License-Identifier: Apache-2.0
"""Softmax for the judge."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from dsl_backend.softmax import reference
from dsl_backend.testing.numerics import error_over_budget
from dsl_backend.testing.softmax import BF16, F16, F32, SoftmaxCase, tensors

from ..judge.registry import LAYERS, OneOutput, Trial
from .problems import Inputs, Layer, Problem

# torch's own float32 is better than any GPU's: approximate exponentials and sums in one order cost a few ulps. Coarser
# dtypes and formats cost a thousand and more.
F32_ULPS = 16


def trial(case: SoftmaxCase) -> Trial:
    problem = Problem(rows=case.rows, width=case.width, dtype=case.dtype, out_dtype=case.to, log=case.log)
    return Trial(id=case.id, why=case.why, problem=problem, details=case)


class Softmax(OneOutput):
    """Rows with gaps between them, of all dtypes, widths and values."""

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        most = 300 if emulated else 3000
        even, odd = 8 * draw.randint(5, most // 8), 2 * draw.randint(20, most // 2) + 1
        gap: dict[str, Any] = {"pad": 8 * draw.randint(1, 4), "pad_out": 8 * draw.randint(1, 4)}
        ragged: dict[str, Any] = {
            "pad": draw.randint(1, 7),
            "pad_out": draw.randint(1, 7),
            "offset": draw.randint(1, 3),
        }
        few = draw.randint(3, 7)
        cases = [
            SoftmaxCase(id="whole", why="whole accesses, no gaps", rows=few, width=even),
            SoftmaxCase(id="gaps", why="gaps between rows", rows=few, width=even, **gap),
            SoftmaxCase(id="ragged", why="odd width and strides, start not aligned", rows=few, width=odd, **ragged),
            SoftmaxCase(id="log", why="logarithm", rows=few, width=odd, log=True),
            SoftmaxCase(id="special", why="NaN, infinities, largest magnitudes", rows=9, width=even, special=True),
            SoftmaxCase(
                id="special-f32",
                why="the same in float32, ragged",
                rows=9,
                width=odd,
                dtype=F32,
                special=True,
                **ragged,
            ),
            SoftmaxCase(id="widened", why="a wider output", rows=few, width=even, out_dtype=F32),
        ]
        if not emulated:
            cases += [
                SoftmaxCase(id="one", why="one column", rows=130, width=1),
                SoftmaxCase(id="f16", why="float16, gaps", rows=few, width=odd, dtype=F16, **gap),
                SoftmaxCase(id="narrowed", why="a narrower output", rows=few, width=even, dtype=F32, out_dtype=BF16),
                SoftmaxCase(
                    id="special-log", why="logarithms of infinities", rows=9, width=even, log=True, special=True
                ),
                SoftmaxCase(id="tall", why="many narrow rows", rows=draw.randint(900, 1100), width=draw.randint(9, 40)),
                SoftmaxCase(id="wide", why="a vocabulary", rows=2, width=draw.randint(30000, 40000), **gap),
                SoftmaxCase(id="f32", why="float32, which shows coarse arithmetic", rows=few, width=odd, dtype=F32),
            ]
        return [trial(case) for case in cases]

    def build(self, trial: Trial, device: torch.device, seed: int) -> Inputs:
        made = [tensors(replace(trial.details, seed=LAYERS * seed + layer), device) for layer in range(LAYERS)]
        return Inputs(tuple(Layer(x, out) for x, out in made))

    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        return [layer.out for layer in inputs.layers]

    def nudge(self, inputs: Inputs, layer: int, draw: random.Random) -> None:
        x = inputs.layers[layer].x
        # The last row whose result is no NaN.
        row = x[int((~reference.exact(x).isnan().any(-1)).nonzero()[-1])]
        # Above all others: more than half of the row's probability.
        row[draw.randrange(len(row))] = float(row.nan_to_num(0, 0, 0).float().max()) + 4

    def error(self, trial: Trial, inputs: Inputs, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        x, case = inputs.layers[layer].x, trial.details
        exact = reference.exact(x, log=case.log)
        # What float32 and the output's dtype cannot hold is an infinity there.
        rounded = exact.to(F32).to(case.to).double()
        exact = torch.where(rounded.isinf(), rounded, exact)
        naive = reference.exact(x.to(case.to), log=case.log, dtype=case.to)
        return error_over_budget(out, exact, naive, F32_ULPS if case.to == F32 else 2)

    def hidden(self, inputs: Any) -> Any:
        return inputs


JUDGED = {"softmax": Softmax()}
