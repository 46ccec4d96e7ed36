# SPDX-License-Identifier: Apache-2.0
"""Float32 arithmetic on the device: powers and logarithms of two, sums as trees, a softmax's running state."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cutlass
from cutlass import cute

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class MaxSum(NamedTuple):
    """A softmax's state over some values, both float32.

    Attributes:
        maximum: of the values; -inf where there are none, or none but -inf and NaN.
        total: the sum of exp(value - maximum); 0 where the maximum is -inf and no value is NaN. NaN where a value is
            NaN or +inf, which no merge takes back.
    """

    maximum: cutlass.Float32
    total: cutlass.Float32


def exp2(x):
    """2^x by the approximate unit (relative error 2^-22); exactly 1 for 0, 0 for -inf."""
    return cute.math.exp2(x, fastmath=True)


def natural_log(x):
    """ln(x) by the approximate unit."""
    return cute.math.log2(x, fastmath=True) * LN_2


def weight(value, maximum):
    """exp(value - maximum), float32.

    The difference is taken before it is scaled: the product of the largest float32 and log2(e) is no float32.
    """
    return exp2((value - maximum) * LOG2_E)


@cute.jit
def finite_or_zero(maximum: cutlass.Float32):
    """A maximum that can be subtracted from -inf: 0 in place of -inf."""
    return cutlass.Float32(0.0) if maximum == -cutlass.Float32.inf else maximum


def tree(values: Sequence, combine: Callable):
    """All values combined in pairs, then the pairs, and so on: the shortest chain, and the smallest rounding."""
    level = list(values)
    while len(level) > 1:
        paired = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def largest(values: Sequence):
    """The maximum of float32 values, NaN left out; -inf where all are NaN."""
    return cute.arch.fmax(tree(values, cute.arch.fmax), -cutlass.Float32.inf)


def total(values: Sequence):
    return tree(values, lambda a, b: a + b)
