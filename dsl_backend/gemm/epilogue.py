# SPDX-License-Identifier: Apache-2.0
"""Gated activations of accumulators, in float32 registers, for any SM."""

import math
from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.gemm.activation import Activation, Geglu
from dsl_backend.primitives.math import (
    LOG2_E,
    add_pair,
    exp2,
    fma_pair,
    fmax_nan,
    fmin_nan,
    in_pairs,
    mul_pair,
)

SHARED = 4  # values that share a reciprocal


class ScalarArithmetic:
    """One value for each instruction, for any SM.

    Args:
        apart: values share no reciprocals. Those of a thread belong to two rows or more, and sharing changes last bits.
    """

    def __init__(self, *, apart: bool) -> None:
        self.shared = 1 if apart else SHARED

    def products(self, *factors: Sequence) -> list:
        """Elementwise, from left to right."""
        return [math.prod(rest, start=first) for first, *rest in zip(*factors, strict=True)]

    def shifted(self, xs: Sequence, by: float) -> list:
        return [x + by for x in xs]

    def plus_cubes(self, xs: Sequence, factor: float) -> list:
        """X + factor x^3 of each."""
        return [x + factor * (x * x * x) for x in xs]

    def at_most(self, xs: Sequence, limit: float) -> list:
        """Minima with the limit; NaN stays NaN, which the instruction for a minimum would lose."""
        return [at_most(x, limit) for x in xs]

    def within(self, xs: Sequence, limit: float) -> list:
        """Clamped to [-limit, limit]; NaN stays NaN."""
        return [at_least(at_most(x, limit), -limit) for x in xs]

    def sigmoids(self, xs: Sequence, scale: float = 1.0) -> list:
        """1 / (1 + e^(-scale x)) of each, by approximate units (relative error 2^-21); 0 for -inf.

        Four values share one reciprocal, that of their denominators' product: the MUFU unit, which computes reciprocals
        and exponentials, limits the epilogue with 16 values a cycle. Denominators are 1 + e^-|x|, at most 2, so that no
        product overflows and no branch or fallback is needed. Values that are `apart` have a reciprocal each.
        """
        if scale != 1:
            xs = [x * scale for x in xs]
        found: list = []
        for first in range(0, len(xs), self.shared):
            some = xs[first : first + self.shared]
            powers = [exp2(cute.math.absf(x) * -LOG2_E) for x in some]
            # fmin(NaN, 1) is 1, which keeps a NaN away from the other three; its own power is NaN all the same.
            sums = [cute.arch.fmin(power, 1.0) + 1.0 for power in powers]
            inverses = reciprocals(*sums) if len(sums) == SHARED else [cute.arch.rcp_approx(one) for one in sums]
            found += [numerator(x, power) * inverse for x, power, inverse in zip(some, powers, inverses, strict=True)]
        return found


class PackedArithmetic:
    """Two values for each instruction (f32x2 of SM100); there is an even number of values."""

    def products(self, *factors: Sequence) -> list:
        found, *rest = factors
        for more in rest:
            found = in_pairs(mul_pair, found, more)
        return list(found)

    def shifted(self, xs: Sequence, by: float) -> list:
        return in_pairs(add_pair, xs, [by] * len(xs))

    def plus_cubes(self, xs: Sequence, factor: float) -> list:
        count = len(xs)
        return self.products(in_pairs(fma_pair, self.products(xs, xs), [factor] * count, [1.0] * count), xs)

    def at_most(self, xs: Sequence, limit: float) -> list:
        return [fmin_nan(x, limit) for x in xs]

    def within(self, xs: Sequence, limit: float) -> list:
        return [fmax_nan(x, -limit) for x in self.at_most(xs, limit)]

    def sigmoids(self, xs: Sequence, scale: float = 1.0) -> list:
        """The same, with one reciprocal for each value: sharing needs absolute values, minima and selections, for which
        there are no packed instructions. 0 also where e^(-scale x) overflows.
        """
        powers = [exp2(x) for x in self.products(xs, [-scale * LOG2_E] * len(xs))]
        return [cute.arch.rcp_approx(one) for one in self.shifted(powers, 1.0)]


Arithmetic = ScalarArithmetic | PackedArithmetic


@cute.jit
def numerator(x: cutlass.Float32, power: cutlass.Float32):
    """The numerator of sigmoid(x) over 1 + e^-|x|: 1, or e^-|x| where x is below 0 or NaN."""
    return cutlass.Float32(1.0) if x >= 0.0 else power


def reciprocals(a, b, c, d) -> list:
    """Reciprocals of four numbers from 1 to 2, by one division."""
    low, high = a * b, c * d
    shared = cute.arch.rcp_approx(low * high)
    of_low, of_high = shared * high, shared * low
    return [of_low * b, of_low * a, of_high * d, of_high * c]


@cute.jit
def at_most(x: cutlass.Float32, limit: cutlass.Constexpr[float]):
    return cutlass.Float32(limit) if x > limit else x


@cute.jit
def at_least(x: cutlass.Float32, limit: cutlass.Constexpr[float]):
    return cutlass.Float32(limit) if x < limit else x


class SwigluEpilogue:
    """`activation.Swiglu` of gates and ups."""

    def __init__(self, alpha: float, beta: float, limit: float | None, arithmetic: Arithmetic):
        self.alpha, self.beta, self.limit = alpha, beta, limit
        self.arithmetic = arithmetic

    def __call__(self, gates: Sequence, ups: Sequence) -> list:
        using = self.arithmetic
        if self.limit is not None:
            gates, ups = using.at_most(gates, self.limit), using.within(ups, self.limit)
        if self.beta:
            ups = using.shifted(ups, self.beta)
        return using.products(gates, using.sigmoids(gates, self.alpha), ups)


class GegluEpilogue:
    """`activation.Geglu` of gates and ups."""

    def __init__(self, tanh: bool, arithmetic: Arithmetic):
        self.tanh, self.arithmetic = tanh, arithmetic

    def __call__(self, gates: Sequence, ups: Sequence) -> list:
        using = self.arithmetic
        if self.tanh:
            # (1 + tanh(u)) / 2 is sigmoid(2 u).
            factors = using.sigmoids(using.plus_cubes(gates, 0.044715), 2 * math.sqrt(2 / math.pi))
        else:
            factors = [0.5 * (1.0 + cute.math.erf(gate * math.sqrt(0.5))) for gate in gates]
        return using.products(gates, factors, ups)


def epilogue_of(activation: Activation | None, arithmetic: Arithmetic):
    """The function (gates, ups) -> outputs of an activation; None where there is none."""
    if activation is None:
        return None
    if isinstance(activation, Geglu):
        return GegluEpilogue(activation.tanh, arithmetic)
    return SwigluEpilogue(activation.alpha, activation.beta, activation.limit, arithmetic)
