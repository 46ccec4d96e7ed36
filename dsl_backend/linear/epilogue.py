# SPDX-License-Identifier: Apache-2.0
"""What becomes of sums before they are rounded: bias, gated activation, residual. On float32 registers, for any SM."""

import math
from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.linear.spec import Activation, Geglu
from dsl_backend.primitives.math import LOG2_E, exp2

TOGETHER = 4


def sigmoids(xs: Sequence) -> list:
    """1 / (1 + e^-x) of each, by approximate units (relative error 2^-21); 0 for -inf.

    Four share a reciprocal, of their denominators' product: the unit that makes it and the exponential is what an
    epilogue waits for, 16 values a cycle. Denominators are 1 + e^-|x|, at most 2: no product overflows, so that nothing
    is decided and no registers are held for another way.
    """
    found: list = []
    for first in range(0, len(xs), TOGETHER):
        some = xs[first : first + TOGETHER]
        powers = [exp2(cute.math.absf(x) * -LOG2_E) for x in some]
        # The smaller of NaN and 1 is 1: a NaN stays its own, as the power that it is multiplied with.
        sums = [cute.arch.fmin(power, 1.0) + 1.0 for power in powers]
        inverses = reciprocals(*sums) if len(sums) == TOGETHER else [cute.arch.rcp_approx(one) for one in sums]
        found += [numerator(x, power) * inverse for x, power, inverse in zip(some, powers, inverses, strict=True)]
    return found


@cute.jit
def numerator(x: cutlass.Float32, power: cutlass.Float32):
    """Of x's sigmoid over 1 + e^-|x|: e^-|x| below 0, and of NaN."""
    return cutlass.Float32(1.0) if x >= 0.0 else power


def reciprocals(a, b, c, d) -> list:
    """Of numbers from 1 to 2."""
    low, high = a * b, c * d
    shared = cute.arch.rcp_approx(low * high)
    of_low, of_high = shared * high, shared * low
    return [of_low * b, of_low * a, of_high * d, of_high * c]


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
