# SPDX-License-Identifier: Apache-2.0
"""Device arithmetic: exp2 and log, tree reductions, packed float32 pairs (SM100), fp8 conversions."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import math as math_dialect
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# Of one value, or of a vector of them.
Value = TypeVar("Value", cutlass.Float32, cute.TensorSSA)


def exp2(x: cutlass.Float32) -> cutlass.Float32:
    """ex2.approx (relative error 2^-22); exactly 1 for 0, 0 for -inf."""
    return cute.math.exp2(x, fastmath=True)


def log(x: cutlass.Float32) -> cutlass.Float32:
    """ln(x), by lg2.approx."""
    return cute.math.log2(x, fastmath=True) * LN_2


def exp_difference(value: Value, maximum: cutlass.Float32) -> Value:
    """exp(value - maximum), float32.

    The difference is taken before it is scaled: the largest float32 times log2(e) overflows.
    """
    return exp2((value - maximum) * LOG2_E)


@dsl_user_op
def fma(a: cutlass.Float32, b: cutlass.Float32, c: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Float32:
    """A * b + c of float32, always rounded once: the compiler may fuse `a * b + c`, or not."""
    operands = [cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return cutlass.Float32(math_dialect.fma(*operands, loc=loc, ip=ip))


def quotient(a: cutlass.Int32, b: cutlass.Int32) -> cutlass.Int32:
    """A // b of integers that are not negative. Signed division takes a remainder and two comparisons more."""
    return cutlass.Int32(cutlass.Uint32(a) // cutlass.Uint32(b))


@cute.jit
def finite_or_zero(maximum: cutlass.Float32) -> cutlass.Float32:
    """A maximum that can be subtracted from scores: 0 in place of -inf, since -inf - -inf is NaN."""
    return cutlass.Float32(0.0) if maximum == -cutlass.Float32.inf else maximum


def tree_reduce(values: Sequence, combine: Callable):
    """Combine values in pairs, then the results in pairs, and so on: the shortest chain, and the least rounding."""
    level = list(values)
    while len(level) > 1:
        paired = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def tree_max(values: Sequence) -> cutlass.Float32:
    """The maximum of float32 values, NaN ignored; -inf if all are NaN."""
    return cute.arch.fmax(tree_reduce(values, cute.arch.fmax), -cutlass.Float32.inf)


def tree_sum(values: Sequence):
    return tree_reduce(values, lambda a, b: a + b)


Pair = tuple[cutlass.Float32, cutlass.Float32]
Words = tuple[cutlass.Int32, cutlass.Int32]

# Minimax polynomial of degree 3 for 2^f, f in [-0.5, 0.5] (Lawson's iteration on 4001 Chebyshev points). Its relative
# error is 7.5e-5, a thirtieth of bfloat16's rounding.
EXP2_COEFFICIENTS = (0.999928073346333, 0.6932609856528302, 0.242611125437676, 0.05517166954141581)
# Added to a float32 of magnitude below 2^22, it leaves the nearest integer in the low bits.
ROUND_TO_INT = 1.5 * 2.0**23
MIN_EXPONENT = -126.0


def fma_pair(a: Pair, b: Pair, c: Pair) -> Pair:
    """(a0 b0 + c0, a1 b1 + c1), fma.rn.f32x2 (SM100)."""
    return cute.arch.fma_packed_f32x2(a, b, c)


def add_pair(a: Pair, b: Pair) -> Pair:
    return cute.arch.add_packed_f32x2(a, b)


def sub_pair(a: Pair, b: Pair) -> Pair:
    return cute.arch.sub_packed_f32x2(a, b)


def mul_pair(a: Pair, b: Pair) -> Pair:
    return cute.arch.mul_packed_f32x2(a, b)


def in_pairs(operation: Callable, *lists: Sequence) -> list:
    """Apply an operation on pairs to consecutive pairs of each list."""
    results: list = []
    for i in range(0, len(lists[0]), 2):
        results += operation(*((values[i], values[i + 1]) for values in lists))
    return results


@dsl_user_op
def fmin_nan(a: cutlass.Float32, b: cutlass.Float32 | float, *, loc=None, ip=None) -> cutlass.Float32:
    """min.NaN.f32: NaN if either is."""
    values = (cutlass.Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b))
    return cutlass.Float32(nvvm.fmin(*values, nan=True, loc=loc, ip=ip))


@dsl_user_op
def fmax_nan(a: cutlass.Float32, b: cutlass.Float32 | float, *, loc=None, ip=None) -> cutlass.Float32:
    """max.NaN.f32: NaN if either is."""
    values = (cutlass.Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b))
    return cutlass.Float32(nvvm.fmax(*values, nan=True, loc=loc, ip=ip))


@dsl_user_op
def fmax3(
    a: cutlass.Float32, b: cutlass.Float32, c: cutlass.Float32, nan: bool, *, loc=None, ip=None
) -> cutlass.Float32:
    """The maximum of three, in one instruction (SM100). NaN is ignored, or with `nan` propagated."""
    return cute.arch.inline_ptx(
        f"max{'.NaN' if nan else ''}.f32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};",
        write_only_types=[cutlass.Float32],
        read_only_args=[a, b, c],
        loc=loc,
        ip=ip,
    )


def fmax3_tree(values: Sequence, nan: bool) -> cutlass.Float32:
    """The maximum of an odd number of float32 values (SM100); nan as in `fmax3`."""
    level = list(values)
    while len(level) > 1:
        threes = [fmax3(*level[i : i + 3], nan) for i in range(0, len(level) - 2, 3)]
        level = threes + level[len(threes) * 3 :]
    return level[0]


@dsl_user_op
def max_f16x2(a: cutlass.Uint32, b: cutlass.Uint32, kind: str, *, loc=None, ip=None) -> cutlass.Uint32:
    """Element-wise maximum of two packed 16-bit pairs; NaN is ignored.

    Args:
        kind: bf16x2 or f16x2. With `xorsign.abs.` in front: of their magnitudes, with the product of their signs.
    """
    return cute.arch.inline_ptx(
        f"max.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[cutlass.Uint32],
        read_only_args=[a, b],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def add_exponent(value: cutlass.Float32, rounded: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Float32:
    """Value times 2^n, where n is in the low bits of `rounded`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n; shl.b32 n, {$r1}, 23; add.s32 {$w0}, {$r0}, n; }",
        write_only_types=[cutlass.Float32],
        read_only_args=[value, rounded],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def e4m3_to_f16(word: cutlass.Int32, numeric: type[cutlass.Numeric], *, loc=None, ip=None) -> Words:
    """Convert four packed e4m3 to two words of two float16 or bfloat16, in order. Exact; NaN stays NaN.

    No instruction converts to bfloat16: that goes through float16 and float32.
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
def e5m2_to_f16(word: cutlass.Int32, numeric: type[cutlass.Numeric], *, loc=None, ip=None) -> Words:
    """Convert four packed e5m2 to two words of two float16 or bfloat16, in order. Exact; NaN stays NaN.

    An e5m2 is the upper byte of a float16. bfloat16 goes through float16 and float32.
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
def e4m3_to_f16_twice(code: cutlass.Int32, *, loc=None, ip=None) -> cutlass.Int32:
    """An e4m3 as two equal float16 in a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 twice; .reg .b16 pair, other; prmt.b32 twice, {$r0}, 0, 0; mov.b32 {pair, other}, twice; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, pair; }",
        write_only_types=[cutlass.Int32],
        read_only_args=[code],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def scaled_e2m1_to_f16(
    word: cutlass.Int32, scale: cutlass.Int32, numeric: type[cutlass.Numeric], *, loc=None, ip=None
) -> tuple[cutlass.Int32, ...]:
    """Convert eight packed e2m1, times a scale, to four words of two float16 or bfloat16, in order (SM100).

    Exact if the scale is an e4m3, as two float16: a product has six bits, and lies between 2^-10 and 2688.
    """
    code = "{ .reg .b8 b0, b1, b2, b3; .reg .b32 pair; .reg .b16 first, second; .reg .f32 a, b; "
    code += "mov.b32 {b0, b1, b2, b3}, {$r0}; "
    for i in range(4):
        code += f"cvt.rn.f16x2.e2m1x2 pair, b{i}; "
        if numeric is cutlass.Float16:
            code += f"mul.f16x2 {{$w{i}}}, pair, {{$r1}}; "
        else:
            code += "mul.f16x2 pair, pair, {$r1}; mov.b32 {first, second}, pair; "
            code += f"cvt.f32.f16 a, first; cvt.f32.f16 b, second; cvt.rn.bf16x2.f32 {{$w{i}}}, b, a; "
    return cute.arch.inline_ptx(
        code + "}", write_only_types=[cutlass.Int32] * 4, read_only_args=[word, scale], loc=loc, ip=ip
    )


@cute.jit
def e8m0_to_f32(exponent: cutlass.Uint8) -> cutlass.Float32:
    """2^(exponent - 127); NaN for 255. 2^-127 is denormal."""
    bits = cutlass.max(cutlass.Int32(exponent) << 23, 1 << 22)
    if exponent == 255:
        bits = cutlass.Int32(0x7FC00000)
    return bits.bitcast(cutlass.Float32)


@cute.jit
def e8m0_of(scale: cutlass.Float32):
    """(the exponent of the next power of two plus 127, the inverse of that power) of a scale from 0 on.

    The exponent is from 1 to 253.
    """
    bits = cutlass.min(cutlass.max((scale.bitcast(cutlass.Int32) + 0x7FFFFF) >> 23, 1), 253)
    return bits, ((254 - bits) << 23).bitcast(cutlass.Float32)


@cute.jit
def e4m3_of(scale: cutlass.Float32, factor: cutlass.Float32):
    """(the nearest e4m3 of a scale from 0 on, the inverse of it times a factor, or 0 where it is 0)."""
    code, rounded = round_to_e4m3(scale)
    rounded = rounded * factor
    inverse = cutlass.Float32(0.0)
    if rounded != 0.0:
        inverse = 1.0 / rounded
    return code, inverse


@dsl_user_op
def round_to_e4m3(x: cutlass.Float32, *, loc=None, ip=None) -> tuple[cutlass.Int32, cutlass.Float32]:
    """(The code of the nearest e4m3, saturated at 448, its value)."""
    code = (
        "{ .reg .b16 pair, low, high; .reg .b32 halves; .reg .f32 zero; mov.f32 zero, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 pair, zero, {$r0}; cvt.u32.u16 {$w0}, pair; "
        "cvt.rn.f16x2.e4m3x2 halves, pair; mov.b32 {low, high}, halves; cvt.f32.f16 {$w1}, low; }"
    )
    return cute.arch.inline_ptx(
        code, write_only_types=[cutlass.Int32, cutlass.Float32], read_only_args=[x], loc=loc, ip=ip
    )


@dsl_user_op
def f32_to_e2m1(*values: cutlass.Float32, loc=None, ip=None) -> cutlass.Int32:
    """Convert eight float32 to packed e2m1, in order: round to nearest even, saturate at 6; NaN becomes 6 (SM100)."""
    pairs = (f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4))
    code = "{ .reg .b8 b0, b1, b2, b3; " + " ".join(pairs) + " mov.b32 {$w0}, {b0, b1, b2, b3}; }"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=list(values), loc=loc, ip=ip)


@dsl_user_op
def f32_to_e4m3(
    a: cutlass.Float32, b: cutlass.Float32, c: cutlass.Float32, d: cutlass.Float32, *, loc=None, ip=None
) -> cutlass.Int32:
    """Convert four float32 to packed e4m3, in order: round to nearest even, saturate at 448; NaN stays NaN."""
    return f32_to_fp8("e4m3x2", a, b, c, d, loc=loc, ip=ip)


@dsl_user_op
def f32_to_e5m2(
    a: cutlass.Float32, b: cutlass.Float32, c: cutlass.Float32, d: cutlass.Float32, *, loc=None, ip=None
) -> cutlass.Int32:
    """Convert four float32 to packed e5m2 likewise, saturated at 57344: infinities too."""
    return f32_to_fp8("e5m2x2", a, b, c, d, loc=loc, ip=ip)


def f32_to_fp8(
    pair: str, a: cutlass.Float32, b: cutlass.Float32, c: cutlass.Float32, d: cutlass.Float32, *, loc, ip
) -> cutlass.Int32:
    code = f"{{ .reg .b16 low, high; cvt.rn.satfinite.{pair}.f32 low, {{$r1}}, {{$r0}}; "
    code += f"cvt.rn.satfinite.{pair}.f32 high, {{$r3}}, {{$r2}}; mov.b32 {{$w0}}, {{low, high}}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[a, b, c, d], loc=loc, ip=ip)


@dsl_user_op
def permute_bytes(
    low: cutlass.Int32, high: cutlass.Int32, selector: cutlass.Int32, *, loc=None, ip=None
) -> cutlass.Int32:
    """prmt.b32: byte i of the result is byte (selector >> 4i) & 7 of the eight of `low` and `high`."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[cutlass.Int32],
        read_only_args=[low, high, selector],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def masked_bits(word: cutlass.Int32, mask: int, other: int, operation: str, *, loc=None, ip=None) -> cutlass.Int32:
    """`(word & mask) | other` or `(word & mask) ^ other`, in one instruction.

    ptxas makes two of the operators with two constants, of which an instruction holds one.

    Args:
        operation: or, xor.
    """
    table = {"or": 0xEA, "xor": 0x6A}[operation]
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 mask, other; mov.b32 mask, {mask:#x}; mov.b32 other, {other & 0xFFFFFFFF:#x}; "
        f"lop3.b32 {{$w0}}, {{$r0}}, mask, other, {table:#x}; }}",
        write_only_types=[cutlass.Int32],
        read_only_args=[word],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def add_f16x2(a: cutlass.Int32, b: cutlass.Int32, *, loc=None, ip=None) -> cutlass.Int32:
    """Add two pairs of float16."""
    return cute.arch.inline_ptx(
        "add.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[cutlass.Int32], read_only_args=[a, b], loc=loc, ip=ip
    )


def halves_op(name: str, operands: Sequence[cutlass.Int32 | int], loc, ip) -> cutlass.Int32:
    """An instruction of packed 16-bit pairs. Numbers are the bits of pairs that the instruction names."""
    code, given = "", []
    for i, one in enumerate(operands):
        if isinstance(one, int):
            code += f".reg .b32 constant{i}; mov.b32 constant{i}, {one & 0xFFFFFFFF:#x}; "
        else:
            given.append(one)
    places = iter(range(len(given)))
    named = [f"constant{i}" if isinstance(one, int) else f"{{$r{next(places)}}}" for i, one in enumerate(operands)]
    return cute.arch.inline_ptx(
        f"{{ {code}{name} {{$w0}}, {', '.join(named)}; }}",
        write_only_types=[cutlass.Int32],
        read_only_args=given,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def sub_f16x2(a: cutlass.Int32, b: cutlass.Int32 | int, kind: str, *, loc=None, ip=None) -> cutlass.Int32:
    """A - b of packed 16-bit pairs. `kind`: bf16x2 or f16x2. Numbers are the bits of pairs."""
    return halves_op(f"sub.rn.{kind}", (a, b), loc, ip)


@dsl_user_op
def fma_f16x2(
    a: cutlass.Int32, b: cutlass.Int32 | int, c: cutlass.Int32 | int, kind: str, *, loc=None, ip=None
) -> cutlass.Int32:
    """A * b + c of packed 16-bit pairs, rounded once. `kind`: bf16x2 or f16x2. Numbers are the bits of pairs."""
    return halves_op(f"fma.rn.{kind}", (a, b, c), loc, ip)


@dsl_user_op
def f16x2_to_f32(word: cutlass.Int32, *, loc=None, ip=None) -> Pair:
    """Two float16 as float32, the low one first. Exact."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[cutlass.Float32, cutlass.Float32],
        read_only_args=[word],
        loc=loc,
        ip=ip,
    )


def ex2_emulation_pair(x: Pair) -> Pair:
    """2^x of finite x up to 127 on the FMA units (Cody and Waite, 1980); x below -126 counts as -126."""
    x = tuple(cute.arch.fmax(value, MIN_EXPONENT) for value in x)
    rounded = add_pair(x, (ROUND_TO_INT, ROUND_TO_INT))
    integer = add_pair(rounded, (-ROUND_TO_INT, -ROUND_TO_INT))
    fraction = sub_pair(x, integer)
    power = (EXP2_COEFFICIENTS[3],) * 2
    for coefficient in EXP2_COEFFICIENTS[2::-1]:
        power = fma_pair(power, fraction, (coefficient, coefficient))
    return add_exponent(power[0], rounded[0]), add_exponent(power[1], rounded[1])
