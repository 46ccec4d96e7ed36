# SPDX-License-Identifier: Apache-2.0
"""What becomes of sums before they are rounded: bias, gated activation, residual. On float32 registers, for any SM."""

import math
from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.linear.spec import Activation, Geglu
from dsl_backend.primitives.math import LOG2_E, exp2

# A reciprocal of more than this is no normal number.
MOST_PRODUCT = 2.0**125
TOGETHER = 4


def sigmoids(xs: Sequence) -> list:
    """1 / (1 + e^-x) of each, by approximate units (relative error 2^-21); 0 for -inf.

    Four share a reciprocal, of their denominators' product: the unit that makes it and the exponential is what an
    epilogue waits for, 16 values a cycle.
    """
    found: list = []
    for first in range(0, len(xs), TOGETHER):
        sums = [1.0 + exp2(x * -LOG2_E) for x in xs[first : first + TOGETHER]]
        found += reciprocals(*sums) if len(sums) == TOGETHER else [cute.arch.rcp_approx(one) for one in sums]
    return found


@cute.jit
def reciprocals(a, b, c, d):
    """Of numbers that are 1 at least."""
    low, high = a * b, c * d
    product = low * high
    shared = cute.arch.rcp_approx(product)
    of_low, of_high = shared * high, shared * low
    found = [of_low * b, of_low * a, of_high * d, of_high * c]
    # Or no number.
    if not product < MOST_PRODUCT:
        found = [cute.arch.rcp_approx(one) for one in (a, b, c, d)]
    return found


@cute.jit
def at_most(x: cutlass.Float32, limit: cutlass.Constexpr[float]):
    """The minimum; NaN stays NaN, which the instruction does not keep."""
    return cutlass.Float32(limit) if x > limit else x


@cute.jit
def at_least(x: cutlass.Float32, limit: cutlass.Constexpr[float]):
    return cutlass.Float32(limit) if x < limit else x


class SwigluEpilogue:
    """`spec.Swiglu` of gates and ups."""

    def __init__(self, alpha: float, beta: float, limit: float | None):
        self.alpha, self.beta, self.limit = alpha, beta, limit

    def __call__(self, gates: Sequence, ups: Sequence) -> list:
        if self.limit is not None:
            gates = [at_most(gate, self.limit) for gate in gates]
            ups = [at_least(at_most(up, self.limit), -self.limit) for up in ups]
        if self.beta:
            ups = [up + self.beta for up in ups]
        factors = sigmoids([gate if self.alpha == 1 else gate * self.alpha for gate in gates])
        return [gate * factor * up for gate, factor, up in zip(gates, factors, ups, strict=True)]


class GegluEpilogue:
    """`spec.Geglu` of gates and ups."""

    def __init__(self, tanh: bool):
        self.tanh = tanh

    def __call__(self, gates: Sequence, ups: Sequence) -> list:
        if self.tanh:
            # (1 + tanh(u)) / 2 is sigmoid(2 u).
            inner = [gate + 0.044715 * (gate * gate * gate) for gate in gates]
            factors = sigmoids([one * (2 * math.sqrt(2 / math.pi)) for one in inner])
        else:
            factors = [0.5 * (1.0 + cute.math.erf(gate * math.sqrt(0.5))) for gate in gates]
        return [gate * factor * up for gate, factor, up in zip(gates, factors, ups, strict=True)]


def epilogue_of(activation: Activation | None):
    """The function (gates, ups) -> outputs of an activation; None where there is none."""
    if activation is None:
        return None
    if isinstance(activation, Geglu):
        return GegluEpilogue(activation.tanh)
    return SwigluEpilogue(activation.alpha, activation.beta, activation.limit)
