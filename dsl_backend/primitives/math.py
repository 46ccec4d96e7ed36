# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on the device: powers and logarithms of two, sums as trees, a softmax's running state; quotients."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import math as math_dialect
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

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


@dsl_user_op
def fused(a, b, c, *, loc=None, ip=None) -> cutlass.Float32:
    """A * b + c of float32, rounded once, whatever the compiler would make of a product and a sum."""
    operands = [cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return cutlass.Float32(math_dialect.fma(*operands, loc=loc, ip=ip))


def quotient(a: cutlass.Int32, b: cutlass.Int32) -> cutlass.Int32:
    """The integer a // b of numbers that are not negative: signed ones take a remainder and two comparisons besides."""
    return cutlass.Int32(cutlass.Uint32(a) // cutlass.Uint32(b))


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


Pair = tuple[cutlass.Float32, cutlass.Float32]

# 2^f for f in [-0.5, 0.5] by a polynomial of degree 3: minimax, of relative error 7.5e-5, a thirtieth of bfloat16's
# own. Lawson's iteration on 4001 Chebyshev points.
EXP2_COEFFICIENTS = (0.999928073346333, 0.6932609856528302, 0.242611125437676, 0.05517166954141581)
# Added to a float32 of magnitude below 2^22, leaves its nearest integer in the low bits.
ROUNDER = 1.5 * 2.0**23
LEAST_POWER = -126.0


def fma_pair(a: Pair, b: Pair, c: Pair) -> Pair:
    """(a0 b0 + c0, a1 b1 + c1) in one instruction (SM100)."""
    return cute.arch.fma_packed_f32x2(a, b, c)


def add_pair(a: Pair, b: Pair) -> Pair:
    return cute.arch.add_packed_f32x2(a, b)


def sub_pair(a: Pair, b: Pair) -> Pair:
    return cute.arch.sub_packed_f32x2(a, b)


def mul_pair(a: Pair, b: Pair) -> Pair:
    return cute.arch.mul_packed_f32x2(a, b)


def in_pairs(operation: Callable, *lists: Sequence) -> list:
    """An operation on pairs, of neighbours in each list."""
    found: list = []
    for i in range(0, len(lists[0]), 2):
        found += operation(*((values[i], values[i + 1]) for values in lists))
    return found


@dsl_user_op
def smaller_or_nan(a, b, *, loc=None, ip=None) -> cutlass.Float32:
    """The smaller of two in one instruction; NaN where one is."""
    values = (cutlass.Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b))
    return cutlass.Float32(nvvm.fmin(*values, nan=True, loc=loc, ip=ip))


@dsl_user_op
def larger_or_nan(a, b, *, loc=None, ip=None) -> cutlass.Float32:
    """The larger of two in one instruction; NaN where one is."""
    values = (cutlass.Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b))
    return cutlass.Float32(nvvm.fmax(*values, nan=True, loc=loc, ip=ip))


@dsl_user_op
def largest_of_three(a, b, c, nan: bool, *, loc=None, ip=None) -> cutlass.Float32:
    """The largest, in one instruction (SM100). A NaN among them is left out, or with `nan` the result."""
    return cute.arch.inline_ptx(
        f"max{'.NaN' if nan else ''}.f32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};",
        write_only_types=[cutlass.Float32],
        read_only_args=[a, b, c],
        loc=loc,
        ip=ip,
    )


def largest_by_threes(values: Sequence, nan: bool):
    """The largest of an odd number of float32 values (SM100); nan as in `largest_of_three`."""
    level = list(values)
    while len(level) > 1:
        threes = [largest_of_three(*level[i : i + 3], nan) for i in range(0, len(level) - 2, 3)]
        level = threes + level[len(threes) * 3 :]
    return level[0]


@dsl_user_op
def larger_pair(a, b, kind: str, *, loc=None, ip=None) -> cutlass.Uint32:
    """The larger ones of the two 16-bit numbers of a word each, in one instruction; a NaN beside a number is left out.

    Args:
        kind: bf16x2 or f16x2.
    """
    return cute.arch.inline_ptx(
        f"max.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[cutlass.Uint32],
        read_only_args=[a, b],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def shift_exponent(value, rounded, *, loc=None, ip=None) -> cutlass.Float32:
    """Value times 2^n, n in the low bits of `rounded`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n; shl.b32 n, {$r1}, 23; add.s32 {$w0}, {$r0}, n; }",
        write_only_types=[cutlass.Float32],
        read_only_args=[value, rounded],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def widen_e4m3(word, numeric: type[cutlass.Numeric], *, loc=None, ip=None) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Four e4m3 of a word as two words of two float16 or bfloat16, in order; exact, NaN stays NaN.

    There is no conversion to bfloat16: it goes by way of float16 and float32.
    """
    code = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
    if numeric is cutlass.Float16:
        code += "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }"
    else:
        code += ".reg .b32 pair; .reg .b16 first, second; .reg .f32 a, b; "
        for part, to in (("low", "{$w0}"), ("high", "{$w1}")):
            code += f"cvt.rn.f16x2.e4m3x2 pair, {part}; mov.b32 {{first, second}}, pair; "
            code += f"cvt.f32.f16 a, first; cvt.f32.f16 b, second; cvt.rn.bf16x2.f32 {to}, b, a; "
        code += "}"
    return cute.arch.inline_ptx(
        code, write_only_types=[cutlass.Int32, cutlass.Int32], read_only_args=[word], loc=loc, ip=ip
    )


@dsl_user_op
def widen_e5m2(word, numeric: type[cutlass.Numeric], *, loc=None, ip=None) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Four e5m2 of a word as two words of two float16 or bfloat16, in order; exact, NaN stays NaN.

    An e5m2 is the upper byte of a float16; that goes to bfloat16 by way of float32.
    """
    code = "{ .reg .b32 pair; .reg .b16 first, second; .reg .f32 a, b; "
    for selector, to in (("0x1404", "{$w0}"), ("0x3424", "{$w1}")):
        if numeric is cutlass.Float16:
            code += f"prmt.b32 {to}, {{$r0}}, 0, {selector}; "
        else:
            code += f"prmt.b32 pair, {{$r0}}, 0, {selector}; mov.b32 {{first, second}}, pair; "
            code += f"cvt.f32.f16 a, first; cvt.f32.f16 b, second; cvt.rn.bf16x2.f32 {to}, b, a; "
    return cute.arch.inline_ptx(
        code + "}", write_only_types=[cutlass.Int32, cutlass.Int32], read_only_args=[word], loc=loc, ip=ip
    )


@dsl_user_op
def narrow_e4m3(a, b, c, d, *, loc=None, ip=None) -> cutlass.Int32:
    """Four float32 as e4m3 in a word, in order: to nearest, ties to even, saturated at 448; NaN stays NaN."""
    return narrow_fp8("e4m3x2", a, b, c, d, loc=loc, ip=ip)


@dsl_user_op
def narrow_e5m2(a, b, c, d, *, loc=None, ip=None) -> cutlass.Int32:
    """The same as e5m2, saturated at 57344: infinities too."""
    return narrow_fp8("e5m2x2", a, b, c, d, loc=loc, ip=ip)


def narrow_fp8(pair: str, a, b, c, d, *, loc, ip) -> cutlass.Int32:
    code = f"{{ .reg .b16 low, high; cvt.rn.satfinite.{pair}.f32 low, {{$r1}}, {{$r0}}; "
    code += f"cvt.rn.satfinite.{pair}.f32 high, {{$r3}}, {{$r2}}; mov.b32 {{$w0}}, {{low, high}}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[a, b, c, d], loc=loc, ip=ip)


def exp2_by_polynomial(x: Pair) -> Pair:
    """2^x of finite numbers up to 127 on the FMA pipe (Cody and Waite, 1980); below -126 what it is there."""
    x = tuple(cute.arch.fmax(value, LEAST_POWER) for value in x)
    rounded = add_pair(x, (ROUNDER, ROUNDER))
    away = add_pair(rounded, (-ROUNDER, -ROUNDER))
    part = sub_pair(x, away)
    power = (EXP2_COEFFICIENTS[3],) * 2
    for coefficient in EXP2_COEFFICIENTS[2::-1]:
        power = fma_pair(power, part, (coefficient, coefficient))
    return shift_exponent(power[0], rounded[0]), shift_exponent(power[1], rounded[1])
