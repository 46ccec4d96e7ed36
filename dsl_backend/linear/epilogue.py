# SPDX-License-Identifier: Apache-2.0
"""What becomes of sums before they are rounded: bias, gated activation, residual. On float32 registers, for any SM."""

import math

import cutlass
from cutlass import cute

from dsl_backend.linear.spec import Activation, Geglu
from dsl_backend.primitives.math import LOG2_E, exp2


def sigmoid(x):
    """1 / (1 + e^-x) by two approximate units (relative error 2^-21); 0 for -inf."""
    return cute.arch.rcp_approx(1.0 + exp2(x * -LOG2_E))


@cute.jit
def at_most(x: cutlass.Float32, limit: cutlass.Constexpr[float]):
    """The minimum; NaN stays NaN, which the instruction does not keep."""
    return cutlass.Float32(limit) if x > limit else x


@cute.jit
def at_least(x: cutlass.Float32, limit: cutlass.Constexpr[float]):
    return cutlass.Float32(limit) if x < limit else x


class SwigluEpilogue:
    """`spec.Swiglu` of one gate and one up."""

    def __init__(self, alpha: float, beta: float, limit: float | None):
        self.alpha, self.beta, self.limit = alpha, beta, limit

    def __call__(self, gate, up):
        if self.limit is not None:
            gate = at_most(gate, self.limit)
            up = at_least(at_most(up, self.limit), -self.limit)
        return gate * sigmoid(gate if self.alpha == 1 else gate * self.alpha) * (up + self.beta if self.beta else up)


class GegluEpilogue:
    """`spec.Geglu` of one gate and one up."""

    def __init__(self, tanh: bool):
        self.tanh = tanh

    def __call__(self, gate, up):
        if self.tanh:
            # (1 + tanh(u)) / 2 is sigmoid(2 u).
            inner = gate + 0.044715 * (gate * gate * gate)
            return gate * sigmoid(inner * (2 * math.sqrt(2 / math.pi))) * up
        return 0.5 * gate * (1.0 + cute.math.erf(gate * math.sqrt(0.5))) * up


def epilogue_of(activation: Activation | None):
    """The function (gate, up) -> output of an activation; None where there is none."""
    if activation is None:
        return None
    if isinstance(activation, Geglu):
        return GegluEpilogue(activation.tanh)
    return SwigluEpilogue(activation.alpha, activation.beta, activation.limit)
