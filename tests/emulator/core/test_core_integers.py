# SPDX-License-Identifier: Apache-2.0
"""Integer instructions against Python's integers."""

import pytest
from lanes import check, run, samples, signed, tuples

from emulator.ptx.ir import BITS

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def clamp32(value: int) -> int:
    return clamp(value, -(1 << 31), (1 << 31) - 1)


def as_type(kind: str):
    """What the bits of a register mean."""
    bits = BITS[kind]
    return (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)


@pytest.mark.parametrize("kind", INTEGERS)
def test_sums_and_products(kind):
    bits, of = BITS[kind], as_type(kind)
    check(f"add.{kind}", kind, [kind] * 2, lambda a, b: a + b)
    check(f"sub.{kind}", kind, [kind] * 2, lambda a, b: a - b)
    check(f"mul.lo.{kind}", kind, [kind] * 2, lambda a, b: a * b)
    check(f"mul.hi.{kind}", kind, [kind] * 2, lambda a, b: of(a) * of(b) >> bits)
    check(f"mad.lo.{kind}", kind, [kind] * 3, lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind}", kind, [kind] * 3, lambda a, b, c: (of(a) * of(b) >> bits) + c)
    check(f"sad.{kind}", kind, [kind] * 3, lambda a, b, c: c + abs(of(a) - of(b)))
    check(f"min.{kind}", kind, [kind] * 2, lambda a, b: min(of(a), of(b)))
    check(f"max.{kind}", kind, [kind] * 2, lambda a, b: max(of(a), of(b)))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind):
    of, wide = as_type(kind), f"{kind[0]}{2 * BITS[kind]}"
    check(f"mul.wide.{kind}", wide, [kind] * 2, lambda a, b: of(a) * of(b))
    check(f"mad.wide.{kind}", wide, [kind, kind, wide], lambda a, b, c: of(a) * of(b) + c)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_signs(kind):
    of = as_type(kind)
    check(f"abs.{kind}", kind, [kind], lambda a: abs(of(a)))
    check(f"neg.{kind}", kind, [kind], lambda a: -a)


def test_saturation():
    s = as_type("s32")
    check("add.sat.s32", "s32", ["s32"] * 2, lambda a, b: clamp32(s(a) + s(b)))
    check("sub.sat.s32", "s32", ["s32"] * 2, lambda a, b: clamp32(s(a) - s(b)))
    check("mad.hi.sat.s32", "s32", ["s32"] * 3, lambda a, b, c: clamp32((s(a) * s(b) >> 32) + s(c)))
    check("min.relu.s32", "s32", ["s32"] * 2, lambda a, b: max(0, min(s(a), s(b))))
    check("max.relu.s32", "s32", ["s32"] * 2, lambda a, b: max(0, s(a), s(b)))


def pairwise(function):
    """Applied to both halves."""
    return lambda a, b: (function(a & 0xFFFF, b & 0xFFFF) & 0xFFFF) | (function(a >> 16, b >> 16) & 0xFFFF) << 16


def test_pairs_of_halves():
    s = as_type("s16")
    check("add.u16x2", "u32", ["u32"] * 2, pairwise(lambda a, b: a + b))
    check("add.s16x2", "u32", ["u32"] * 2, pairwise(lambda a, b: a + b))
    check("min.u16x2", "u32", ["u32"] * 2, pairwise(min))
    check("max.s16x2", "u32", ["u32"] * 2, pairwise(lambda a, b: max(s(a), s(b))))
    check("min.relu.s16x2", "u32", ["u32"] * 2, pairwise(lambda a, b: max(0, min(s(a), s(b)))))


def test_24_bit_products():
    def low(v):
        return v & 0xFFFFFF

    def low_signed(v):
        return signed(v, 24)

    for kind, of in (("u32", low), ("s32", low_signed)):
        check(f"mul24.lo.{kind}", kind, [kind] * 2, lambda a, b, of=of: of(a) * of(b))
        check(f"mul24.hi.{kind}", kind, [kind] * 2, lambda a, b, of=of: of(a) * of(b) >> 16)
        check(f"mad24.lo.{kind}", kind, [kind] * 3, lambda a, b, c, of=of: of(a) * of(b) + c)
        check(f"mad24.hi.{kind}", kind, [kind] * 3, lambda a, b, c, of=of: (of(a) * of(b) >> 16) + c)
    expected = lambda a, b, c: clamp32(signed(low_signed(a) * low_signed(b) >> 16, 32) + signed(c, 32))  # noqa: E731
    check("mad24.hi.sat.s32", "s32", ["s32"] * 3, expected)


@pytest.mark.parametrize("kind", INTEGERS)
def test_division_rounds_towards_zero(kind):
    bits, of = BITS[kind], as_type(kind)
    a, b = tuples(bits, bits)
    b = [v or 3 for v in b]
    regs = {
        16: ("%rs1", "%rs2", "%rs3", "%rs4"),
        32: ("%r1", "%r2", "%r3", "%r4"),
        64: ("%rd1", "%rd2", "%rd3", "%rd4"),
    }
    x, y, q, r = regs[bits]
    quotients, rests = run(f"div.{kind} {q}, {x}, {y}; rem.{kind} {r}, {x}, {y};", {x: a, y: b}, [q, r])
    for one, two, quotient, rest in zip(a, b, quotients, rests, strict=True):
        n, m = of(one), of(two)
        wanted = abs(n) // abs(m) * (1 if (n < 0) == (m < 0) else -1)
        assert quotient == wanted % (1 << bits)
        assert rest == (n - wanted * m) % (1 << bits)


@pytest.mark.parametrize("bits", [32, 64])
def test_bits(bits):
    b, u, s = f"b{bits}", f"u{bits}", f"s{bits}"
    ones = (1 << bits) - 1

    def highest(v, is_signed):
        v = ~v & ones if is_signed and v >> bits - 1 else v
        return v.bit_length() - 1

    def shift_amount(v, is_signed):
        found = highest(v, is_signed)
        return -1 if found < 0 else bits - 1 - found

    check(f"popc.{b}", "u32", [b], lambda a: a.bit_count())
    check(f"clz.{b}", "u32", [b], lambda a: bits - a.bit_length())
    check(f"brev.{b}", b, [b], lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    for kind, is_signed in ((u, False), (s, True)):
        check(f"bfind.{kind}", "u32", [kind], lambda a, g=is_signed: highest(a, g))
        check(f"bfind.shiftamt.{kind}", "u32", [kind], lambda a, g=is_signed: shift_amount(a, g))


def field(value: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    """Bit by bit, as the ISA writes it (9.7.1.20), but that nothing is cut off what concerns 64 bits."""
    start, length, last = (start & 0xFF, length & 0xFF, 31) if bits == 32 else (start, length, 63)
    sign = 0 if not is_signed or not length else value >> min(start + length - 1, last) & 1
    return sum((value >> start + i & 1 if i < length and start + i <= last else sign) << i for i in range(bits))


def inserted(value: int, into: int, start: int, length: int, bits: int) -> int:
    start, length = (start & 0xFF, length & 0xFF) if bits == 32 else (start, length)
    for i in range(min(length, bits)):
        if start + i < bits:
            into = into & ~(1 << start + i) | (value >> i & 1) << start + i
    return into


@pytest.mark.parametrize("bits", [32, 64])
def test_fields(bits):
    b = f"b{bits}"
    small = [*samples(5, 40), 0, 31, 32, 33, 63, 64, 65, 255, 256, 0x1FF, 0xFFFFFFFF]
    values, places, lengths = zip(
        *((v, p, n) for v, p, n in zip(samples(bits, 300) * 2, small * 20, reversed(small * 20), strict=False)),
        strict=True,
    )
    r = "%r" if bits == 32 else "%rd"
    for kind in ("u", "s"):
        body = f"bfe.{kind}{bits} {r}1, {r}2, %r3, %r4;"
        (found,) = run(body, {f"{r}2": values, "%r3": places, "%r4": lengths}, [f"{r}1"])
        assert found == [field(v, p, n, bits, kind == "s") for v, p, n in zip(values, places, lengths, strict=True)]
    into = values[::-1]
    body = f"bfi.{b} {r}1, {r}2, {r}5, %r3, %r4;"
    (found,) = run(body, {f"{r}2": values, f"{r}5": into, "%r3": places, "%r4": lengths}, [f"{r}1"])
    assert found == [inserted(*row, bits) for row in zip(values, into, places, lengths, strict=True)]


def test_masks_and_extension():
    def extended(a, n, is_signed, wraps):
        n = n & 31 if wraps else n
        if not n:
            return 0
        return signed(a, n) if is_signed and n < 32 else a & (1 << min(n, 32)) - 1

    def mask(a, b, wraps):
        a, b = (a & 31, b & 31) if wraps else (a, b)
        return 0 if a > 31 else (1 << min(b, 32)) - 1 << a

    for mode in ("clamp", "wrap"):
        wraps = mode == "wrap"
        check(f"szext.{mode}.u32", "u32", ["u32"] * 2, lambda a, n, w=wraps: extended(a, n, False, w))
        check(f"szext.{mode}.s32", "s32", ["s32", "u32"], lambda a, n, w=wraps: extended(a, n, True, w))
        check(f"bmsk.{mode}.b32", "b32", ["b32"] * 2, lambda a, b, w=wraps: mask(a, b, w))


def test_find_nth_set():
    """The examples of the ISA (9.7.1.17), and none to be found."""
    cases = [(0xAAAAAAAA, 3, 1, 3), (0xAAAAAAAA, 3, -1, 3), (0xAAAAAAAA, 2, 1, 3), (0xAAAAAAAA, 2, -1, 1)]
    cases += [
        (0xAAAAAAAA, 2, 0, -1),
        (0xAAAAAAAA, 3, 0, 3),
        (1, 1, 2, -1),
        (0x80000001, 0, 2, 31),
        (0x80000001, 31, -2, 0),
    ]
    mask, base, offset, wanted = zip(*cases, strict=True)
    inputs = {"%r2": mask, "%r3": base, "%r4": [v & 0xFFFFFFFF for v in offset]}
    assert run("fns.b32 %r1, %r2, %r3, %r4;", inputs, ["%r1"]) == [[v & 0xFFFFFFFF for v in wanted]]


def test_dot_products():
    def parts(v, bits, count, is_signed):
        raw = [v >> bits * k & (1 << bits) - 1 for k in range(count)]
        return [signed(one, bits) for one in raw] if is_signed else raw

    for a_type in ("u32", "s32"):
        for b_type in ("u32", "s32"):
            x, y = a_type == "s32", b_type == "s32"

            def dp4a(a, b, c, x=x, y=y):
                return c + sum(m * n for m, n in zip(parts(a, 8, 4, x), parts(b, 8, 4, y), strict=True))

            def dp2a(a, b, c, first, x=x, y=y):
                two = parts(b, 8, 4, y)[first : first + 2]
                return c + sum(m * n for m, n in zip(parts(a, 16, 2, x), two, strict=True))

            check(f"dp4a.{a_type}.{b_type}", "b32", ["b32"] * 3, dp4a)
            check(f"dp2a.lo.{a_type}.{b_type}", "b32", ["b32"] * 3, lambda a, b, c, f=dp2a: f(a, b, c, 0))
            check(f"dp2a.hi.{a_type}.{b_type}", "b32", ["b32"] * 3, lambda a, b, c, f=dp2a: f(a, b, c, 2))


@pytest.mark.parametrize("bits", [32, 64])
def test_carries(bits):
    """Numbers of twice the width, in two registers each."""
    r = "%r" if bits == 32 else "%rd"
    u = f"u{bits}"
    ones = (1 << bits) - 1
    a, b = tuples(bits, bits)
    c, d = b[::-1], a[::-1]
    inputs = {f"{r}1": a, f"{r}2": b, f"{r}3": c, f"{r}4": d}
    body = f"add.cc.{u} {r}5, {r}1, {r}3; addc.{u} {r}6, {r}2, {r}4;"
    low, high = run(body, inputs, [f"{r}5", f"{r}6"])
    rows = list(zip(a, b, c, d, strict=True))
    assert [x | y << bits for x, y in zip(low, high, strict=True)] == [
        ((x | y << bits) + (z | v << bits)) % (1 << 2 * bits) for x, y, z, v in rows
    ]
    body = f"sub.cc.{u} {r}5, {r}1, {r}3; subc.cc.{u} {r}6, {r}2, {r}4; subc.{u} {r}7, {r}1, {r}1;"
    low, high, borrow = run(body, inputs, [f"{r}5", f"{r}6", f"{r}7"])
    for (x, y, z, v), lo, hi, out in zip(rows, low, high, borrow, strict=True):
        wanted = (x | y << bits) - (z | v << bits)
        assert lo | hi << bits == wanted % (1 << 2 * bits)
        assert out == (ones if wanted < 0 else 0)
    # What a difference leaves for a sum is a carry, the opposite of the borrow.
    (found,) = run(f"sub.cc.{u} {r}5, {r}1, {r}3; addc.{u} {r}6, {r}2, {r}4;", inputs, [f"{r}6"])
    assert found == [(y + v + (x >= z)) & ones for x, y, z, v in rows]
    (found,) = run(f"add.cc.{u} {r}5, {r}1, {r}3; subc.{u} {r}6, {r}2, {r}4;", inputs, [f"{r}6"])
    assert found == [(y - v - (x + z <= ones)) & ones for x, y, z, v in rows]
    body = f"mad.lo.cc.{u} {r}5, {r}1, {r}3, {r}2; madc.hi.{u} {r}6, {r}1, {r}3, {r}4;"
    low, high = run(body, inputs, [f"{r}5", f"{r}6"])
    for (x, y, z, v), lo, hi in zip(rows, low, high, strict=True):
        assert lo | hi << bits == (x * z + (y | v << bits)) % (1 << 2 * bits)
    body = f"add.cc.{u} {r}5, {r}1, {r}3; madc.hi.s{bits} {r}6, {r}1, {r}3, {r}4;"
    (high,) = run(body, inputs, [f"{r}6"])
    for (x, _, z, v), hi in zip(rows, high, strict=True):
        assert hi == ((signed(x, bits) * signed(z, bits) >> bits) + v + (x + z >> bits)) & ones


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic(kind):
    check(f"and.{kind}", kind, [kind] * 2, lambda a, b: a & b)
    check(f"or.{kind}", kind, [kind] * 2, lambda a, b: a | b)
    check(f"xor.{kind}", kind, [kind] * 2, lambda a, b: a ^ b)
    check(f"not.{kind}", kind, [kind], lambda a: ~a)
    check(f"cnot.{kind}", kind, [kind], lambda a: int(a == 0))


def test_logic_of_predicates():
    a, b = [0, 0, 1, 1], [0, 1, 0, 1]
    body = "and.pred %p3, %p1, %p2; or.pred %p4, !%p1, %p2; xor.pred %p5, %p1, !%p2; not.pred %p6, %p1;"
    names = ["%p3", "%p4", "%p5", "%p6"]
    assert run(body, {"%p1": a, "%p2": b}, names) == [[0, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("table", [0, 0x80, 0x96, 0xE8, 0xCA, 0x3C, 0xFF])
def test_lop3(table):
    def combined(a, b, c):
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    a, b, c = tuples(32, 32, 32)
    q = [v & 1 for v in a]
    inputs = {"%r2": a, "%r3": b, "%r4": c, "%p2": q}
    (found,) = run(f"lop3.b32 %r1, %r2, %r3, %r4, {table};", inputs, ["%r1"])
    wanted = [combined(*row) for row in zip(a, b, c, strict=True)]
    assert found == wanted
    both, p = run(f"lop3.and.b32 %r1|%p1, %r2, %r3, %r4, {table}, %p2;", inputs, ["%r1", "%p1"])
    assert both == wanted
    assert p == [int(w != 0) & v for w, v in zip(wanted, q, strict=True)]
    (p,) = run(f"lop3.or.b32 %r1|%p1, %r2, %r3, %r4, {table}, !%p2;", inputs, ["%p1"])
    assert p == [int(w != 0) | 1 - v for w, v in zip(wanted, q, strict=True)]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits):
    b = f"b{bits}"
    check(f"shl.{b}", b, [b, "u32"], lambda a, n: a << min(n, 64))
    for kind in (f"u{bits}", b):
        check(f"shr.{kind}", kind, [kind, "u32"], lambda a, n: a >> min(n, 64))
    check(f"shr.s{bits}", b, [b, "u32"], lambda a, n: signed(a, bits) >> min(n, 64))


def test_funnel_shifts():
    def joined(a, b):
        return b << 32 | a

    check("shf.l.clamp.b32", "b32", ["b32", "b32", "u32"], lambda a, b, n: joined(a, b) << min(n, 32) >> 32)
    check("shf.l.wrap.b32", "b32", ["b32", "b32", "u32"], lambda a, b, n: joined(a, b) << (n & 31) >> 32)
    check("shf.r.clamp.b32", "b32", ["b32", "b32", "u32"], lambda a, b, n: joined(a, b) >> min(n, 32))
    check("shf.r.wrap.b32", "b32", ["b32", "b32", "u32"], lambda a, b, n: joined(a, b) >> (n & 31))
