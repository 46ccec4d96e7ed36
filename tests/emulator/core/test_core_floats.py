# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic against exact fractions rounded once; approximate units against Python's functions."""

import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import exact
import pytest
from exact import BF16, F16, F32, F64, FORMATS, Format, codes
from lanes import run

MODES = ("rn", "rz", "rm", "rp")
ONE = 0x3F800000
NAN = 0x7FFFFFFF
REGISTER = {"f16": "%rs", "bf16": "%rs", "f32": "%r", "f64": "%rd", "f16x2": "%r", "bf16x2": "%r", "f32x2": "%rd"}


def f32(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def number(code: int) -> float:
    return struct.unpack("<f", struct.pack("<I", code))[0]


def operands(of: Format, arity: int, count: int = 400) -> list[list[int]]:
    rng = random.Random(arity)
    columns = [codes(of, seed=place) for place in range(arity)]
    if arity == 1:
        return columns
    rows = [[rng.choice(column) for column in columns] for _ in range(count)]
    if arity == 2:
        edge = columns[0][:32]
        rows += [[a, b] for a in edge for b in edge]
    return [list(column) for column in zip(*rows, strict=True)]


def results(opcode: str, kind: str, columns: list[list[int]], result: str | None = None) -> list[int]:
    r, d = REGISTER[kind], REGISTER[result or kind] + "1"
    names = [f"{r}{place + 2}" for place in range(len(columns))]
    return run(f"{opcode} {', '.join([d, *names])};", dict(zip(names, columns, strict=True)), [d])[0]


def check(opcode: str, kind: str, arity: int, expected: Callable[..., int]) -> None:
    of = FORMATS[kind]
    columns = operands(of, arity)
    for row, found in zip(zip(*columns, strict=True), results(opcode, kind, columns), strict=True):
        wanted = expected(*row)
        same = found == wanted or (of is F64 and of.is_nan(found) and of.is_nan(wanted))
        assert same, f"{opcode} {[hex(v) for v in row]}: {found:#x}, not {wanted:#x}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_arithmetic_is_rounded_once(kind, mode):
    of = FORMATS[kind]
    check(f"add.{mode}.{kind}", kind, 2, lambda a, b: exact.sum_of(of, mode, a, b))
    check(f"sub.{mode}.{kind}", kind, 2, lambda a, b: exact.sum_of(of, mode, a, b if of.is_nan(b) else b ^ of.sign))
    check(f"mul.{mode}.{kind}", kind, 2, lambda a, b: exact.product_of(of, mode, a, b))
    check(f"fma.{mode}.{kind}", kind, 3, lambda a, b, c: exact.fma_of(of, mode, a, b, c))
    check(f"mad.{mode}.{kind}", kind, 3, lambda a, b, c: exact.fma_of(of, mode, a, b, c))
    check(f"div.{mode}.{kind}", kind, 2, lambda a, b: exact.quotient_of(of, mode, a, b))
    one = of.bias << of.mantissa
    check(f"rcp.{mode}.{kind}", kind, 1, lambda a: exact.quotient_of(of, mode, one, a))
    check(f"sqrt.{mode}.{kind}", kind, 1, lambda a: exact.root_of(of, mode, a))


def test_without_a_rounding_it_is_to_nearest():
    check("add.f32", "f32", 2, lambda a, b: exact.sum_of(F32, "rn", a, b))
    check("mul.f64", "f64", 2, lambda a, b: exact.product_of(F64, "rn", a, b))


@pytest.mark.parametrize("mode", MODES)
def test_subnormals_are_flushed(mode):
    z, ftz = F32.flushed, replace(F32, flushes=True)
    check(f"add.{mode}.ftz.f32", "f32", 2, lambda a, b: exact.sum_of(ftz, mode, z(a), z(b)))
    check(f"mul.{mode}.ftz.f32", "f32", 2, lambda a, b: exact.product_of(ftz, mode, z(a), z(b)))
    check(f"fma.{mode}.ftz.f32", "f32", 3, lambda a, b, c: exact.fma_of(ftz, mode, z(a), z(b), z(c)))
    check(f"div.{mode}.ftz.f32", "f32", 2, lambda a, b: exact.quotient_of(ftz, mode, z(a), z(b)))
    check("abs.ftz.f32", "f32", 1, lambda a: z(a) & 0x7FFFFFFF)
    check("neg.ftz.f32", "f32", 1, lambda a: z(a) ^ 0x80000000)


def saturated(code: int) -> int:
    return 0 if F32.is_nan(code) or code >> 31 else min(code, ONE)


def test_saturation():
    ftz = replace(F32, flushes=True)
    check("add.sat.f32", "f32", 2, lambda a, b: saturated(exact.sum_of(F32, "rn", a, b)))
    check("mul.rz.sat.f32", "f32", 2, lambda a, b: saturated(exact.product_of(F32, "rz", a, b)))
    check("fma.rn.ftz.sat.f32", "f32", 3, lambda *v: saturated(exact.fma_of(ftz, "rn", *map(F32.flushed, v))))


@pytest.mark.parametrize("mode", MODES)
def test_pairs_of_floats(mode):
    columns = [operands(F32, 3), operands(F32, 3)[::-1]]
    both = [[low | high << 32 for low, high in zip(a, b, strict=True)] for a, b in zip(*columns, strict=True)]
    z, flushing = F32.flushed, replace(F32, flushes=True)
    for name, arity, of in (("add", 2, exact.sum_of), ("mul", 2, exact.product_of), ("fma", 3, exact.fma_of)):
        for ftz in ("", ".ftz"):
            found = results(f"{name}.{mode}{ftz}.f32x2", "f32x2", both[:arity])
            for place, side in ((0, columns[0]), (32, columns[1])):
                rows = zip(*side[:arity], strict=True)
                wanted = [of(flushing, mode, *map(z, row)) if ftz else of(F32, mode, *row) for row in rows]
                assert [value >> place & 0xFFFFFFFF for value in found] == wanted
    low, high = operands(F32, 2), operands(F32, 2)[::-1]
    packed = [[a | b << 32 for a, b in zip(*pair, strict=True)] for pair in zip(low, high, strict=True)]
    for value, *row in zip(results(f"sub.{mode}.f32x2", "f32x2", packed), *low, *high, strict=True):
        for part, (a, b) in ((value & 0xFFFFFFFF, row[:2]), (value >> 32, row[2:])):
            assert part == exact.sum_of(F32, mode, a, b if F32.is_nan(b) else b ^ F32.sign)


def chosen(of: Format, greater: bool, nan_wins: bool) -> Callable[[int, int], int]:
    """Min or max by the numbers' order, -0 below +0."""

    def order(code: int) -> tuple:
        if of.is_infinite(code):
            return (math.inf if not code & of.sign else -math.inf, 0)
        return (of.value(code), -1 if code & of.sign else 0)

    def pick(a: int, b: int) -> int:
        if of.is_nan(a) or of.is_nan(b):
            if nan_wins or (of.is_nan(a) and of.is_nan(b)):
                return of.nan
            return b if of.is_nan(a) else a
        return (max if greater else min)(a, b, key=order)

    return pick


def xorsign(of: Format, pick: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def apply(a: int, b: int) -> int:
        size = pick(a & ~of.sign, b & ~of.sign)
        return size if of.is_nan(size) else size | ((a ^ b) & of.sign)

    return apply


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name):
    for kind in ("f32", "f64"):
        check(f"{name}.{kind}", kind, 2, chosen(FORMATS[kind], name == "max", False))
    z = F32.flushed
    pick, with_nan = (chosen(F32, name == "max", nan) for nan in (False, True))
    check(f"{name}.ftz.f32", "f32", 2, lambda a, b: pick(z(a), z(b)))
    check(f"{name}.NaN.f32", "f32", 2, with_nan)
    check(f"{name}.f32", "f32", 3, lambda a, b, c: pick(pick(a, b), c))
    check(f"{name}.ftz.NaN.f32", "f32", 3, lambda a, b, c: with_nan(with_nan(z(a), z(b)), z(c)))
    check(f"{name}.xorsign.abs.f32", "f32", 2, xorsign(F32, pick))
    check(f"{name}.NaN.xorsign.abs.f32", "f32", 2, xorsign(F32, with_nan))
    for kind in ("f16", "bf16"):
        of = FORMATS[kind]
        check(f"{name}.{kind}", kind, 2, chosen(of, name == "max", False))
        check(f"{name}.NaN.{kind}", kind, 2, chosen(of, name == "max", True))
        check(f"{name}.xorsign.abs.{kind}", kind, 2, xorsign(of, chosen(of, name == "max", False)))
        halves(f"{name}.{kind}x2", kind, 2, chosen(of, name == "max", False))


def test_signs():
    for kind in ("f32", "f64"):
        of = FORMATS[kind]
        check(f"abs.{kind}", kind, 1, lambda a, of=of: a & ~of.sign)
        check(f"neg.{kind}", kind, 1, lambda a, of=of: a ^ of.sign)
        check(f"copysign.{kind}", kind, 2, lambda a, b, of=of: (a & of.sign) | (b & ~of.sign))
    for kind in ("f16", "bf16"):
        of = FORMATS[kind]
        check(f"abs.{kind}", kind, 1, lambda a, of=of: of.nan if of.is_nan(a) else a & ~of.sign)
        check(f"neg.{kind}", kind, 1, lambda a, of=of: of.nan if of.is_nan(a) else a ^ of.sign)


# Halves.


def halves(opcode: str, kind: str, arity: int, expected: Callable[..., int]) -> None:
    """A packed operation: the upper halves are the lower ones in another order."""
    low = operands(FORMATS[kind], arity)
    high = [column[7:] + column[:7] for column in low]
    packed = [[a | b << 16 for a, b in zip(*pair, strict=True)] for pair in zip(low, high, strict=True)]
    found = results(opcode, kind + "x2", packed)
    assert [value & 0xFFFF for value in found] == [expected(*row) for row in zip(*low, strict=True)]
    assert [value >> 16 for value in found] == [expected(*row) for row in zip(*high, strict=True)]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_are_rounded_once(kind):
    of = FORMATS[kind]

    def minus(a: int, b: int) -> int:
        return exact.sum_of(of, "rn", a, b if of.is_nan(b) else b ^ of.sign)

    for name, arity, function in (
        ("add.rn", 2, lambda *v: exact.sum_of(of, "rn", *v)),
        ("sub", 2, minus),
        ("mul.rn", 2, lambda *v: exact.product_of(of, "rn", *v)),
        ("fma.rn", 3, lambda *v: exact.fma_of(of, "rn", *v)),
    ):
        check(f"{name}.{kind}", kind, arity, function)
        halves(f"{name}.{kind}x2", kind, arity, function)

    def relu(code: int) -> int:
        return code if of.is_nan(code) or not code & of.sign else 0

    check(f"fma.rn.relu.{kind}", kind, 3, lambda *v: relu(exact.fma_of(of, "rn", *v)))


def test_fma_of_halves_where_a_double_loses_the_tie():
    """1 + 2^-8 lies between two bf16; the addend's bits, far below, decide."""
    a, b = 0x3F81, 0x3F80  # 1 + 2^-7 times 1, halved below
    half_ulp = [(0x3B80, 0x3F80), (0x3B80, 0x3F80)]
    tiny = [0x0001, 0x8001]
    found = results("fma.rn.bf16", "bf16", [[half_ulp[0][0]] * 2, [half_ulp[0][1]] * 2, [0x3F80, 0x3F80]])
    assert found == [exact.fma_of(BF16, "rn", 0x3B80, 0x3F80, 0x3F80)] * 2
    # (1 + 2^-7)(1 + 2^-7) = 1 + 2^-6 + 2^-14, and 2^-4 * (2^-4 + 2^-11) ties with 1; a subnormal on either side.
    for x, y in ((a, a), (0x3D80, 0x3D81), (0x3F01, 0x3F01), (b, 0x3F81)):
        for c in tiny:
            assert results("fma.rn.bf16", "bf16", [[x], [y], [c]]) == [exact.fma_of(BF16, "rn", x, y, c)]
    x, y = 0x3F88, 0x3F88  # 1.0625 squared: 1.12890625 = 289/256, a tie of bf16
    wanted = [exact.fma_of(BF16, "rn", x, y, c) for c in tiny]
    assert len(set(wanted)) == 2
    assert results("fma.rn.bf16", "bf16", [[x] * 2, [y] * 2, tiny]) == wanted


def test_half_modifiers():
    z, ftz = F16.flushed, replace(F16, flushes=True)

    def sat(code: int) -> int:
        return 0 if F16.is_nan(code) or code >> 15 else min(code, 0x3C00)

    check("add.ftz.f16", "f16", 2, lambda a, b: exact.sum_of(ftz, "rn", z(a), z(b)))
    check("mul.ftz.f16", "f16", 2, lambda a, b: exact.product_of(ftz, "rn", z(a), z(b)))
    check("mul.sat.f16", "f16", 2, lambda a, b: sat(exact.product_of(F16, "rn", a, b)))
    check("fma.rn.ftz.sat.f16", "f16", 3, lambda *v: sat(exact.fma_of(ftz, "rn", *map(z, v))))


def test_mixed_precision():
    rng = random.Random(5)
    for kind in ("f16", "bf16"):
        of = FORMATS[kind]
        a = [rng.choice(codes(of)) for _ in range(320)]
        b = [rng.choice(codes(of, seed=1)) for _ in range(320)]
        c = [rng.choice(codes(F32)) for _ in range(320)]

        def wide(code: int, of: Format = of) -> int:
            if of.is_nan(code):
                return NAN
            return (
                F32.rounded(of.value(code), "rn", bool(code & of.sign))
                if not of.is_infinite(code)
                else (F32.infinity | (code & of.sign) << 16)
            )

        for mode in MODES:
            inputs = {"%rs1": a, "%rs2": b, "%r2": c}
            body = f"""add.{mode}.f32.{kind} %r3, %rs1, %r2; sub.{mode}.f32.{kind} %r4, %rs1, %r2;
            fma.{mode}.f32.{kind} %r5, %rs1, %rs2, %r2;"""
            total, rest, fused = run(body, inputs, ["%r3", "%r4", "%r5"])
            for x, y, v, *found in zip(a, b, c, total, rest, fused, strict=True):
                minus = v if F32.is_nan(v) else v ^ F32.sign
                assert found == [
                    exact.sum_of(F32, mode, wide(x), v),
                    exact.sum_of(F32, mode, wide(x), minus),
                    exact.fma_of(F32, mode, wide(x), wide(y), v),
                ]


# Approximate units: the nearest float to the exact value, or its neighbour.

INF = math.inf


def near(opcode: str, function: Callable[[float], float], inputs: list[float], ulps: int = 1) -> None:
    found = results(opcode, "f32", [[f32(x) for x in inputs]])
    for x, code in zip(inputs, found, strict=True):
        wanted = function(number(f32(x)))
        if wanted != wanted or math.isinf(wanted) or wanted == 0:
            expected = NAN if wanted != wanted else f32(wanted)
            assert code == expected, f"{opcode} {x}: {code:#x}, not {expected:#x}"
            continue
        assert abs(code - f32(wanted)) < ulps + 1, f"{opcode} {x}: {number(code)}, not {wanted}"


SPREAD = [s * m * 2.0**e for e in range(-126, 127, 9) for m in (1.0, 1.37, 1.999) for s in (1, -1)]


def or_nan(function: Callable[[float], float], low: float = -INF) -> Callable[[float], float]:
    return lambda x: math.nan if x != x or x < low or math.isinf(x) else function(x)


def test_approximate_units():
    special = [0.0, -0.0, INF, -INF, math.nan]

    def ex2(x: float) -> float:
        if x != x:
            return x
        return INF if x >= 128 else 0.0 if x < -150 else 2.0**x

    def lg2(x: float) -> float:
        return -INF if x == 0 else INF if x == INF else or_nan(math.log2, 0)(x)

    def rcp(x: float) -> float:
        return math.copysign(INF, x) if x == 0 else 1 / x

    def rsqrt(x: float) -> float:
        return math.copysign(INF, x) if x == 0 else 0.0 if x == INF else or_nan(lambda y: 1 / math.sqrt(y), 0)(x)

    def sqrt(x: float) -> float:
        return x if x in (0, INF) else or_nan(math.sqrt, 0)(x)

    near("ex2.approx.f32", ex2, [*special, *[x / 7 for x in range(-1060, 1000, 5)]])
    near("lg2.approx.f32", lg2, special + SPREAD + [1.0, 2.0, 0.5, 1.0000001])
    near("rcp.approx.f32", rcp, special + SPREAD)
    near("rsqrt.approx.f32", rsqrt, special + SPREAD)
    near("sqrt.approx.f32", sqrt, special + SPREAD)
    near("sin.approx.f32", or_nan(math.sin), special + [x / 9 for x in range(-200, 200)])
    near("cos.approx.f32", or_nan(math.cos), special + [x / 9 for x in range(-200, 200)])
    near("tanh.approx.f32", math.tanh, special + [x / 9 for x in range(-90, 90)])
    near("rcp.approx.ftz.f32", lambda x: math.copysign(INF, x), [1e-40, -1e-40])
    near("lg2.approx.ftz.f32", lambda _: -INF, [1e-40, 0.0])
    assert results("ex2.approx.f32", "f32", [[f32(float(n)) for n in range(-149, 128)]]) == [
        f32(2.0**n) for n in range(-149, 128)
    ]
    assert results("ex2.approx.ftz.f32", "f32", [[f32(-130.0), f32(-126.0), f32(1e-40)]]) == [0, f32(2.0**-126), ONE]
    assert set(results("rsqrt.approx.f64", "f64", [[0x4010000000000000]])) == {0x3FE0000000000000}


def test_approximate_division():
    a = [f32(x) for x in (1.0, -3.0, INF, 1.0, 6.0)]
    b = [f32(x) for x in (2.0**127, 2.0**127, -(2.0**127), INF, 4.0)]
    assert results("div.approx.f32", "f32", [a, b]) == [0, F32.sign, NAN, 0, f32(1.5)]
    check("div.full.f32", "f32", 2, lambda x, y: exact.quotient_of(F32, "rn", x, y))


def test_approximate_halves():
    for kind in ("f16", "bf16"):
        of = FORMATS[kind]
        values = [code for code in codes(of) if not of.is_nan(code) and not of.is_infinite(code)]
        ftz = ".ftz" if kind == "bf16" else ""

        def ex2(code: int, of: Format = of) -> int:
            x = float(of.value(code))
            return of.infinity if x > 200 else 0 if x < -200 else of.rounded(type(of.value(code))(2.0**x))

        def tanh(code: int, of: Format = of) -> int:
            return of.rounded(type(of.value(0))(math.tanh(float(of.value(code)))), "rn", bool(code & of.sign))

        z = of.flushed if ftz else (lambda code: code)
        found = results(f"ex2.approx{ftz}.{kind}", kind, [values])
        assert found == [z(ex2(z(code))) for code in values]
        assert results(f"tanh.approx.{kind}", kind, [values]) == [tanh(code) for code in values]


# Comparison.

ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def holds(cmp: str, a: float, b: float) -> bool:
    unordered = a != a or b != b
    if cmp in ("num", "nan"):
        return unordered == (cmp == "nan")
    plain = cmp[:2]
    if unordered:
        return cmp.endswith("u") and len(cmp) == 3
    return bool(eval(f"a {ORDERED[plain]} b"))


COMPARISONS = [*ORDERED, *(name + "u" for name in ORDERED), "num", "nan"]


@pytest.mark.parametrize("cmp", COMPARISONS)
def test_float_comparisons(cmp):
    for kind in ("f32", "f64", "f16", "bf16"):
        of = FORMATS[kind]

        def real(code: int, of: Format = of) -> float:
            if of.is_nan(code):
                return math.nan
            return math.copysign(INF, -1 if code & of.sign else 1) if of.is_infinite(code) else of.value(code)

        a, b = operands(of, 2)
        r = REGISTER[kind]
        p, q = run(f"setp.{cmp}.{kind} %p1|%p2, {r}2, {r}3;", {f"{r}2": a, f"{r}3": b}, ["%p1", "%p2"])
        wanted = [int(holds(cmp, real(x), real(y))) for x, y in zip(a, b, strict=True)]
        assert p == wanted
        assert q == [1 - w for w in wanted]
        if kind in ("f16", "bf16"):
            packed = [[x | y << 16 for x, y in zip(v, v[1:] + v[:1], strict=True)] for v in (a, b)]
            body = f"setp.{cmp}.{kind}x2 %p1|%p2, %r2, %r3; set.{cmp}.u32.{kind}x2 %r4, %r2, %r3;"
            p, q, s = run(body, {"%r2": packed[0], "%r3": packed[1]}, ["%p1", "%p2", "%r4"])
            second = wanted[1:] + wanted[:1]
            assert (p, q) == (wanted, second)
            assert s == [0xFFFF * x | 0xFFFF0000 * y for x, y in zip(wanted, second, strict=True)]


def test_comparison_flushes():
    a, b = [1, 0x80000001, 0], [0, 0, 0x80000000]
    assert run("setp.eq.ftz.f32 %p1, %r1, %r2;", {"%r1": a, "%r2": b}, ["%p1"]) == [[1, 1, 1]]
    assert run("setp.eq.f32 %p1, %r1, %r2;", {"%r1": a, "%r2": b}, ["%p1"]) == [[0, 0, 1]]
    inputs = {"%rs1": [1, 0x8001], "%rs2": [0, 0]}
    assert run("setp.eq.ftz.f16 %p1, %rs1, %rs2;", inputs, ["%p1"]) == [[1, 1]]


@pytest.mark.parametrize("test", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_classes(test, kind):
    of = FORMATS[kind]

    def belongs(code: int) -> bool:
        size = code & ~of.sign
        return {
            "finite": size < of.infinity,
            "infinite": size == of.infinity,
            "number": size <= of.infinity,
            "notanumber": size > of.infinity,
            "normal": not size or of.smallest_normal <= size < of.infinity,
            "subnormal": 0 < size < of.smallest_normal,
        }[test]

    r = REGISTER[kind]
    (found,) = run(f"testp.{test}.{kind} %p1, {r}1;", {f"{r}1": codes(of)}, ["%p1"])
    assert found == [int(belongs(code)) for code in codes(of)]


def test_a_rounding_is_the_instructions_alone():
    a, b = codes(F32, 64), codes(F32, 64, seed=1)
    body = "add.rm.f32 %r1, %r8, %r9; add.f32 %r2, %r8, %r9; add.rp.f32 %r3, %r8, %r9; mul.rn.f32 %r4, %r8, %r9;"
    found = run(body, {"%r8": a, "%r9": b}, ["%r1", "%r2", "%r3", "%r4"])
    rows = list(zip(a, b, strict=True))
    for column, mode in zip(found[:3], ("rm", "rn", "rp"), strict=True):
        assert column == [exact.sum_of(F32, mode, x, y) for x, y in rows]
    assert found[3] == [exact.product_of(F32, "rn", x, y) for x, y in rows]


def test_what_the_process_does_with_subnormals_does_not_matter():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        (found,) = run("add.f32 %r1, %r2, %r3;", {"%r2": [1, 0x00400000], "%r3": [1, 0x00400000]}, ["%r1"])
        still = float(torch.tensor(1e-38) * 0.01)
    finally:
        torch.set_flush_denormal(False)
    assert found == [2, 0x00800000]
    assert still == 0
