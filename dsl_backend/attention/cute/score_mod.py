# SPDX-License-Identifier: Apache-2.0
"""From q·k to the scores that the softmax weighs: scale, softcap, ALiBi; and sinks, which join its denominator.

Scores are kept in base 2, times log2(e), so that exp2 serves the softmax.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import kv_head_of
from dsl_backend.primitives.math import LOG2_E, exp2


@dataclass(frozen=True)
class ScoreModKey:
    """Which of them a layer has."""

    softcap: bool = False
    alibi: bool = False
    sinks: str | None = None  # their dtype
    signed: bool = False  # the scale is not positive: the largest score need not be the largest product


class ScoreModArgs(NamedTuple):
    """Their values: sinks [heads_q], slopes [heads_q] float32; of fp8 keys and values, the scales [heads_kv] float32.

    Where all heads have one scale, it is there once, with a stride of 0.
    """

    scale: cutlass.Float32
    softcap: cutlass.Float32
    sinks: cute.Tensor | None
    alibi_slopes: cute.Tensor | None
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None


def qk_scale_of(scoring: ScoreModArgs, head_kv=0):
    """What a product of a query and a stored key is multiplied by."""
    return scoring.scale if scoring.k_scale is None else scoring.scale * scoring.k_scale[head_kv]


def v_scale_of(key, scoring: ScoreModArgs, head_block):
    """What stored values of a unit's key head are multiplied by; None where they are real ones."""
    if scoring.v_scale is None:
        return None
    return scoring.v_scale[kv_head_of(key, head_block) if key.scaled_by_head else 0]


class SoftmaxScale:
    """`factor_of` times a constant: found once where all key heads have the same, else for every item."""

    def __init__(self, key, scoring: ScoreModArgs, constant: float):
        self.key, self.scoring, self.constant = key, scoring, constant
        self.held = cute.make_rmem_tensor(1, cutlass.Float32) if key.scaled_by_head else None
        self.shared = None if key.scaled_by_head else self.times(0)

    def times(self, head_kv):
        factor = qk_scale_of(self.scoring, head_kv)
        return factor if self.constant == 1.0 else factor * self.constant

    @cute.jit
    def start(self, head_block):
        """Before the scores of an item."""
        if cutlass.const_expr(self.key.scaled_by_head):
            self.held[0] = self.times(kv_head_of(self.key, head_block))

    @property
    def value(self):
        return self.shared if self.held is None else self.held[0]


class NoScoreMod:
    """score = scale q·k. The scale is left to the exponential's own multiplication."""

    modifies = False

    def __init__(self, key, scoring: ScoreModArgs):
        self.of_head = SoftmaxScale(key, scoring, LOG2_E)

    @property
    def factor(self):
        """What products are multiplied by to be base-2 scores."""
        return self.of_head.value


class ScoreMod:
    """score = softcap tanh(scale q·k / softcap) - slope |position - key|."""

    modifies = True

    def __init__(self, key, scoring: ScoreModArgs):
        self.key, self.scoring, self.of_head = key.scores, scoring, SoftmaxScale(key, scoring, 1.0)
        self.factor = cutlass.Float32(1.0)

    def score_mod(self, score, slope, distance):
        """The base-2 score; slope times log2(e), distance = position - key."""
        value = score * self.of_head.value
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


def score_mod_of(key, scoring: ScoreModArgs):
    """What a layer's scores are made by; key: a LayerKey."""
    modifies = key.scores.softcap or key.scores.alibi or key.scores.signed
    return ScoreMod(key, scoring) if modifies else NoScoreMod(key, scoring)
