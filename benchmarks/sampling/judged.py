# SPDX-License-Identifier: Apache-2.0
"""Sampling for the judge: tokens that the filters keep, as often as their probabilities say."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from dsl_backend.sampling import reference

from ..judge.registry import LAYERS, OneOutput, Trial
from .problems import FILTERS, Inputs, Problem, build, verdict

# Standard deviations of a chi-square statistic above its mean: a right sampler has one in 10^8 trials.
DEVIATIONS = 7.0
# Expected draws of a token from which on it counts by itself.
OFTEN = 20


class Sampling(OneOutput):
    """Rows with logits of their own, and rows with the same ones, which show the distribution."""

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        rows = 300 if emulated else 4000
        trials = []
        for filters in FILTERS:
            # More than the filter's top-k keeps.
            vocab = draw.randint(60, 90)
            problem = Problem(rows=rows, vocab=vocab, filters=filters)
            trials.append(Trial(id=f"often-{filters}", why="as often as probable", problem=problem, details="same"))
        wide = 300 if emulated else 3000
        for filters in FILTERS:
            problem = Problem(rows=draw.randint(3, 20), vocab=draw.randint(wide // 2, wide), filters=filters)
            trials.append(Trial(id=f"kept-{filters}", why="only what the filters keep", problem=problem))
        return trials[::2] if emulated else trials

    def build(self, trial: Trial, device: torch.device, seed: int) -> Inputs:
        made = build(trial.problem, LAYERS, device, seed)
        if trial.details == "same":
            for layer in made.layers:
                # Flatter than a model's logits: many tokens are seen often.
                layer.logits.copy_((layer.logits[:1] / 3).expand_as(layer.logits))
        return self.hidden(made)

    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        return [layer.tokens for layer in inputs.layers]

    def nudge(self, inputs: Inputs, layer: int, draw: random.Random) -> None:
        """The last row: one token is certain."""
        row = inputs.layers[layer].logits[-1]
        row.fill_(-torch.inf)[draw.randrange(len(row))] = 0

    def error(self, trial: Trial, inputs: Inputs, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        kept = verdict(inputs, layer, out)
        wrong = int((kept == 0).sum())
        assert not wrong, f"{wrong} of {len(out)} tokens are none that the filters keep"
        return self.excess(inputs, layer, out) if trial.details == "same" else 0.0

    def excess(self, inputs: Inputs, layer: int, tokens: torch.Tensor) -> float:
        """The chi-square statistic of the rows with equal logits, as a share of what is accepted."""
        given = inputs.layers[layer]
        equal = (given.logits == given.logits[0]).all(-1)
        first = replace(given.parameters, **{n: v[:1] for n, v in vars(given.parameters).items() if v is not None})
        chance = reference.probabilities(given.logits[:1], first)[0]
        counts = torch.bincount(tokens[equal], minlength=len(chance)).double()
        expected = chance * counts.sum()
        often = expected >= OFTEN
        seen = torch.cat([counts[often], counts[~often].sum().reshape(1)])
        wanted = torch.cat([expected[often], expected[~often].sum().reshape(1)])
        some = wanted > 0
        freedom = int(some.sum()) - 1
        if freedom < 1:
            return 0.0
        statistic = float(((seen - wanted)[some] ** 2 / wanted[some]).sum())
        return statistic / (freedom + DEVIATIONS * (2 * freedom) ** 0.5)

    def hidden(self, inputs: Any) -> Any:
        """Every row is compared."""
        return replace(inputs, compared=torch.arange(len(inputs.layers[0].tokens), device=inputs.compared.device))


JUDGED = {"sampling": Sampling()}
