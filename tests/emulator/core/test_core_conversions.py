# SPDX-License-Identifier: Apache-2.0
"""cvt between integers, floats and narrow formats, against exact fractions and the machine's tables of formats."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from exact import F32, F64, FORMATS, codes
from lanes import run, samples, signed

from emulator.machine.formats import E2M1, E2M3, E3M2, E4M3, E5M2, UE8M0, Format, Rounding
from emulator.ptx.ir import BITS

INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
HOLDS = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
WIDTH = {"%rs": 16, "%r": 32, "%rd": 64}


def meaning(code: int, kind: str) -> int:
    bits = BITS[kind]
    return signed(code, bits) if kind[0] == "s" else code & (1 << bits) - 1


def bounds(kind: str) -> tuple[int, int]:
    bits = BITS[kind]
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamped(value: int, kind: str) -> int:
    low, high = bounds(kind)
    return max(low, min(high, value))


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("of", INTEGERS)
def test_integers_to_integers(to, of):
    """Extended to the register's width, not only the type's; into every register that holds the result."""
    values = samples(BITS[of], 80)
    for source in ("%rs", "%r", "%rd"):
        for result in ("%rs", "%r", "%rd"):
            if WIDTH[source] < BITS[of] or WIDTH[result] < BITS[to]:
                continue
            rng = random.Random(1)
            # Bits of the register above the type's are not the source's.
            inputs = [v | rng.getrandbits(64) << BITS[of] & (1 << WIDTH[source]) - 1 for v in values]
            body = f"cvt.{to}.{of} {result}1, {source}2; cvt.sat.{to}.{of} {result}3, {source}2;"
            plain, sat = run(body, {f"{source}2": inputs}, [f"{result}1", f"{result}3"])
            ones = (1 << WIDTH[result]) - 1
            assert plain == [meaning(meaning(v, of), to) & ones for v in values]
            assert sat == [clamped(meaning(v, of), to) & ones for v in values]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("of", INTEGERS)
@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
def test_integers_to_floats(to, of, mode):
    """Ties and what lies just beside them, where a second rounding would show."""
    bits, target = BITS[of], FORMATS[to]
    values = samples(bits, 60)
    for place in range(target.mantissa + 1, bits):
        values += [(1 << place) + (1 << place - target.mantissa - 1) + d for d in (-1, 0, 1)]
    values = [v & (1 << bits) - 1 for v in values]
    d, a = HOLDS[BITS[to]], HOLDS[bits]
    (found,) = run(f"cvt.{mode}.{to}.{of} {d}1, {a}2;", {f"{a}2": values}, [f"{d}1"])
    assert found == [target.rounded(Fraction(meaning(v, of)), mode) for v in values]


ROUND = {
    "rni": lambda x: round(x),
    "rzi": lambda x: math.trunc(x),
    "rmi": lambda x: math.floor(x),
    "rpi": lambda x: math.ceil(x),
}


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("of", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("to", INTEGERS)
def test_floats_to_integers(to, of, mode):
    source = FORMATS[of]
    values = codes(source, 160)
    for x in (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, *(s * 2.0**e for s in (1, -1) for e in (7, 8, 15, 16, 31, 32, 63, 64))):
        code = source.rounded(Fraction(x))
        values += [code - 1, code, code + 1]

    def wanted(code: int) -> int:
        if source.is_nan(code):
            return 1 << BITS[to] - 1 if of == "f64" or BITS[to] == 64 else 0
        if source.is_infinite(code):
            return bounds(to)[not code & source.sign]
        return clamped(ROUND[mode](source.value(code)), to)

    d, a = HOLDS[BITS[to]], HOLDS[source.bits]
    (found,) = run(f"cvt.{mode}.{to}.{of} {d}1, {a}2;", {f"{a}2": values}, [f"{d}1"])
    width = (1 << WIDTH[d]) - 1
    for code, value in zip(values, found, strict=True):
        expected = meaning(wanted(code), to) & width
        assert value == expected, f"{code:#x}: {value:#x}, not {expected:#x}"


FLOATS = ("f16", "bf16", "f32", "f64")


def converted(code: int, of: str, to: str, mode: str) -> int:
    source, target = FORMATS[of], FORMATS[to]
    if source.is_nan(code):
        if of != "f64":
            return target.nan
        # The sign and the upper bits of the payload are kept, and the NaN becomes quiet.
        payload = code >> source.mantissa - target.mantissa & (1 << target.mantissa) - 1
        return (code >> 63) * target.sign | target.infinity | 1 << target.mantissa - 1 | payload
    sign = target.sign if code & source.sign else 0
    return sign | target.infinity if source.is_infinite(code) else target.rounded(source.value(code), mode, bool(sign))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_floats_to_floats(to, of, mode):
    narrows = FORMATS[to].mantissa < FORMATS[of].mantissa or {to, of} == {"f16", "bf16"}
    values = codes(FORMATS[of], 200)
    if FORMATS[of].mantissa > FORMATS[to].mantissa:
        # Ties of the result's format, and their neighbours.
        shift = FORMATS[of].mantissa - FORMATS[to].mantissa
        for code in codes(FORMATS[to], 60):
            if not FORMATS[to].is_nan(code) and not FORMATS[to].is_infinite(code):
                exact = converted(code, to, of, "rn")
                values += [exact + (1 << shift - 1) + d for d in (-1, 0, 1)]
    rnd = f".{mode}" if narrows else ""
    d, a = HOLDS[BITS[to]], HOLDS[BITS[of]]
    (found,) = run(f"cvt{rnd}.{to}.{of} {d}1, {a}2;", {f"{a}2": values}, [f"{d}1"])
    for code, value in zip(values, found, strict=True):
        wanted = converted(code, of, to, mode)
        both_nan = FORMATS[to].is_nan(wanted) and FORMATS[to].is_nan(value) and to == "f64"
        assert value == wanted or both_nan, f"{code:#x}: {value:#x}, not {wanted:#x}"


def test_rounding_to_an_integer_that_stays_a_float():
    values = [F32.rounded(Fraction(x)) for x in (-2.5, -0.5, 0.25, 0.5, 1.5, 2.5, 1e9, -7.75)]
    body = "cvt.rni.f32.f32 %r1, %r9; cvt.rzi.f32.f32 %r2, %r9; cvt.rmi.f32.f32 %r3, %r9; cvt.rpi.f32.f32 %r4, %r9;"
    for found, mode in zip(run(body, {"%r9": values}, ["%r1", "%r2", "%r3", "%r4"]), ROUND, strict=True):
        wanted = [F32.rounded(Fraction(ROUND[mode](F32.value(v))), "rn", bool(v >> 31)) for v in values]
        assert found == wanted


def test_modifiers_of_float_conversions():
    nan, inf = 0x7FFFFFFF, 0x7F800000
    values = [1, 0x80000001, 0x3F000000, 0x40000000, 0xBF000000, nan, inf, inf | 1 << 31]
    body = """cvt.ftz.f32.f32 %r1, %r9; cvt.sat.f32.f32 %r2, %r9; cvt.rn.sat.f16.f32 %rs1, %r9;
    cvt.rp.ftz.f16.f32 %rs2, %r9;"""
    ftz, sat, half, up = run(body, {"%r9": values}, ["%r1", "%r2", "%rs1", "%rs2"])
    assert ftz[:2] == [0, 0x80000000]
    assert sat == [1, 0, 0x3F000000, 0x3F800000, 0, 0, 0x3F800000, 0]
    assert half == [0, 0, 0x3800, 0x3C00, 0, 0, 0x3C00, 0]
    assert up[:2] == [1, 0x8000]
    # From the smallest normal number less than half a unit down, half a unit, more, and a whole one.
    parts = (2.0**-30, 2.0**-25, 1.25 * 2.0**-25, 2.0**-24)
    below = [F64.rounded(sign * Fraction(2) ** -126 * (1 - Fraction(part))) for part in parts for sign in (1, -1)]
    found = run("cvt.rn.ftz.f32.f64 %r1, %rd1;", {"%rd1": below}, ["%r1"])
    assert found == [[0x800000, 0x80800000] * 2 + [0, 0x80000000] * 2]
    assert run("cvt.rn.f32.f64 %r1, %rd1;", {"%rd1": below}, ["%r1"]) == [[0x800000, 0x80800000] * 4]
    body = "cvt.rn.relu.f16.f32 %rs1, %r9; cvt.rn.satfinite.f16.f32 %rs2, %r9; cvt.rz.relu.bf16.f32 %rs3, %r9;"
    relu, finite, b = run(body, {"%r9": values}, ["%rs1", "%rs2", "%rs3"])
    assert relu == [0, 0, 0x3800, 0x4000, 0, 0x7FFF, 0x7C00, 0]
    assert finite == [0, 0x8000, 0x3800, 0x4000, 0xB800, 0x7FFF, 0x7BFF, 0xFBFF]
    assert b == [0, 0, 0x3F00, 0x4000, 0, 0x7FFF, 0x7F80, 0]


@pytest.mark.parametrize("to", ["f16", "bf16"])
@pytest.mark.parametrize("modifiers", ["rn", "rz", "rn.relu", "rn.satfinite"])
def test_pairs_of_halves(to, modifiers):
    """The first source becomes the upper half."""
    mode, _, more = modifiers.partition(".")
    target = FORMATS[to]

    def wanted(code: int) -> int:
        half = converted(code, "f32", to, mode)
        if more == "relu" and half & target.sign and not target.is_nan(half):
            return 0
        return half - 1 if more == "satfinite" and target.is_infinite(half) else half

    values = codes(F32, 200)
    values += [converted(c, to, "f32", "rn") + d for c in codes(target) for d in (-1, 0, 1) if not target.is_nan(c)]
    values += [v ^ 1 << 31 - FORMATS["f32"].exponent - target.mantissa - 1 for v in values]
    values = [v & 0xFFFFFFFF for v in values]
    other = values[5:] + values[:5]
    (found,) = run(f"cvt.{modifiers}.{to}x2.f32 %r1, %r2, %r3;", {"%r2": values, "%r3": other}, ["%r1"])
    assert found == [wanted(a) << 16 | wanted(b) for a, b in zip(values, other, strict=True)]


NARROW = {"e4m3": (E4M3, 8), "e5m2": (E5M2, 8), "e2m3": (E2M3, 8), "e3m2": (E3M2, 8), "e2m1": (E2M1, 4)}


def floats(values: list[int]) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.array(values, np.uint32).view(np.float32).astype(np.float64)


def around(of: Format) -> list[int]:
    """Every value of a format, the middles between them, and their neighbours, as float32."""
    finite = np.concatenate([of.finite, -of.finite])
    middles = (of.finite[1:] + of.finite[:-1]) / 2
    beyond = of.largest * np.array([1.03, 1.06, 1.07, 1.2, 2, 1e9])
    points = np.concatenate([finite, middles, -middles, beyond, -beyond]).astype(np.float32)
    found = points.view(np.uint32).astype(np.int64)
    return [int(v) & 0xFFFFFFFF for d in (-1, 0, 1) for v in found + d] + codes(F32, 40)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_narrow_formats(name, relu):
    of, bits = NARROW[name]
    values = around(of)
    other = values[3:] + values[:3]
    (found,) = run(f"cvt.rn.satfinite{relu}.{name}x2.f32 %rs1, %r2, %r3;", {"%r2": values, "%r3": other}, ["%rs1"])
    high, low = (of.encode(floats(v), saturate=True, relu=bool(relu)).astype(int) for v in (values, other))
    assert found == list(high << bits | low)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_narrow_formats_from_and_to_halves(name, half):
    of, bits = NARROW[name]
    target = FORMATS[half]
    rng = random.Random(2)
    values = [rng.choice(codes(target)) | rng.choice(codes(target)) << 16 for _ in range(200)]

    def real(code: int) -> float:
        if target.is_nan(code):
            return math.nan
        return math.copysign(math.inf, 1 - (code >> 14 & 2)) if target.is_infinite(code) else float(target.value(code))

    (found,) = run(f"cvt.rn.satfinite.{name}x2.{half}x2 %rs1, %r2;", {"%r2": values}, ["%rs1"])
    low, high = (
        of.encode(np.array([real(v >> at & 0xFFFF) for v in values]), saturate=True).astype(int) for at in (0, 16)
    )
    assert found == list(high << bits | low)

    every = list(range(1 << of.bits))
    packed = [code << bits | every[-1 - code] for code in every]
    (wide,) = run(f"cvt.rn.{half}x2.{name}x2 %r1, %rs2;", {"%rs2": packed}, ["%r1"])
    for value, code in zip(wide, every, strict=True):
        for part, source in ((value >> 16, code), (value & 0xFFFF, every[-1 - code])):
            x = float(of.decode(np.array([source]))[0])
            if math.isnan(x):
                wanted = target.nan
            elif math.isinf(x):
                wanted = target.infinity | (target.sign if x < 0 else 0)
            else:
                wanted = target.rounded(Fraction(x), "rn", math.copysign(1, x) < 0)
            assert part == wanted


def test_scales():
    values = [v & 0x7FFFFFFF for v in codes(F32, 200)] + [0x7F000000, 0x7F000001, 0x00400000, 0x00400001]
    other = values[::-1]
    for mode, rounding in (("rz", Rounding.ZERO), ("rp", Rounding.UP)):
        for sat in ("", ".satfinite"):
            body = f"cvt.{mode}{sat}.ue8m0x2.f32 %rs1, %r2, %r3;"
            (found,) = run(body, {"%r2": values, "%r3": other}, ["%rs1"])
            high, low = (UE8M0.encode(floats(v), rounding, saturate=bool(sat)).astype(int) for v in (values, other))
            assert found == list(high << 8 | low)
    every = list(range(256))
    (wide,) = run("cvt.rn.bf16x2.ue8m0x2 %r1, %rs2;", {"%rs2": [v << 8 | 255 - v for v in every]}, ["%r1"])

    def scale(code: int) -> int:
        return 0x7FFF if code == 255 else FORMATS["bf16"].rounded(Fraction(2) ** (code - 127))

    assert wide == [scale(v) << 16 | scale(255 - v) for v in every]


def test_tf32():
    values = [*codes(F32, 300), 0x3F801000, 0x3F803000, 0x3F800FFF, 0x7F7FFFFF]
    body = "cvt.rna.tf32.f32 %r1, %r9; cvt.rn.tf32.f32 %r2, %r9; cvt.rz.relu.tf32.f32 %r3, %r9;"
    away, nearest, zero = run(body, {"%r9": values}, ["%r1", "%r2", "%r3"])
    tf32 = type(F32)(8, 10)

    def wanted(code: int, mode: str) -> int:
        if F32.is_nan(code):
            # Cut off, even to infinity, or canonical.
            return code & 0xFFFFE000 if mode == "rna" else 0x7FFFE000
        if F32.is_infinite(code):
            return code
        return tf32.rounded(F32.value(code), mode, bool(code >> 31)) << 13

    assert away == [wanted(v, "rna") for v in values]
    assert nearest == [wanted(v, "rn") for v in values]
    assert zero == [0 if v >> 31 and not F32.is_nan(v) else wanted(v, "rz") for v in values]


def test_packing_of_integers():
    a, b = samples(32, 100), samples(32, 100, seed=3)
    c = samples(32, 100, seed=4)
    inputs = {"%r2": a, "%r3": b, "%r4": c}
    for kind in ("u2", "s2", "u4", "s4", "u8", "s8", "u16", "s16"):
        bits = int(kind[1:])
        ones = (1 << bits) - 1
        low, high = (-(1 << bits - 1), ones >> 1) if kind[0] == "s" else (0, ones)
        rest = ".b32" if bits < 16 else ""
        body = f"cvt.pack.sat.{kind}.s32{rest} %r1, %r2, %r3{', %r4' if rest else ''};"
        for x, y, z, found in zip(a, b, c, run(body, inputs, ["%r1"])[0], strict=True):
            x, y = (max(low, min(high, signed(v, 32))) & ones for v in (x, y))
            assert found == (x << bits | y | (z << 2 * bits if rest else 0)) & 0xFFFFFFFF
