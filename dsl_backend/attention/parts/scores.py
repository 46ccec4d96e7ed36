# SPDX-License-Identifier: Apache-2.0
"""From q·k to the scores that the softmax weighs: scale, softcap, ALiBi; and sinks, which join its denominator.

Scores are kept in base 2, times log2(e), so that exp2 serves the softmax.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.math import LOG2_E, exp2


@dataclass(frozen=True)
class ScoreKey:
    """Which of them a layer has."""

    softcap: bool = False
    alibi: bool = False
    sinks: str | None = None  # their dtype
    signed: bool = False  # the scale is not positive: the largest score need not be the largest product


class Scoring(NamedTuple):
    """Their values: sinks [heads_q], slopes [heads_q] float32; of fp8 keys and values, the scales [1] float32."""

    scale: cutlass.Float32
    softcap: cutlass.Float32
    sinks: cute.Tensor | None
    slopes: cute.Tensor | None
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None


def factor_of(scoring: Scoring):
    """What a product of a query and a stored key is multiplied by."""
    return scoring.scale if scoring.k_scale is None else scoring.scale * scoring.k_scale[0]


class PlainScores:
    """score = scale q·k. The scale is left to the exponential's own multiplication."""

    bends = False

    def __init__(self, scoring: Scoring):
        self.factor = factor_of(scoring) * LOG2_E


class BentScores:
    """score = softcap tanh(scale q·k / softcap) - slope |position - key|."""

    bends = True

    def __init__(self, key: ScoreKey, scoring: Scoring):
        self.key, self.scoring, self.scale = key, scoring, factor_of(scoring)
        self.factor = cutlass.Float32(1.0)

    def bend(self, score, slope, distance):
        """The base-2 score; slope times log2(e), distance = position - key."""
        value = score * self.scale
        if self.key.softcap:
            # c tanh(s / c) = c (1 - 2 / (e^(2s/c) + 1)); where that overflows it still gives c or -c.
            cap = self.scoring.softcap
            power = exp2(value * (2.0 * LOG2_E) * cute.arch.rcp_approx(cap))
            value = cap - 2.0 * cap * cute.arch.rcp_approx(power + 1.0)
        value *= LOG2_E
        if self.key.alibi:
            away = cutlass.Float32(distance)
            value -= slope * cute.arch.fmax(away, -away)
        return value


def scores_of(key: ScoreKey, scoring: Scoring):
    bends = key.softcap or key.alibi or key.signed
    return BentScores(key, scoring) if bends else PlainScores(scoring)
