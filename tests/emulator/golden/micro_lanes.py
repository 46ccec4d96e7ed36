# SPDX-License-Identifier: Apache-2.0
"""Instructions that a thread, or a warp's lanes together, execute on registers (PTX ISA 9.2, 9.7.1 to 9.7.9, 9.7.13).

A kernel loads a row of inputs for each thread, executes up to CHUNK instructions on them and stores what each leaves.
Bounds on approximate units are those of the ISA's sections on each instruction, as in APPROXIMATE.
"""

import itertools
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from micro_case import Array, Bits, Case, Close, Result, Rule, bits, seed_of

CHUNK = 48
LANES = {1: 256, 2: 384, 3: 512}
BLOCK = 128

# Floating-point formats: bits of the exponent and of the mantissa.
LAYOUT = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "e4m3": (4, 3), "e5m2": (5, 2)}
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
# Floats with a bound: the largest finite one among the edges, and powers of two that random ones stay below. Sine and
# cosine have bounds up to 2 pi and up to 100 pi.
BOUNDED = {"turn": (0x40C90FDA, 2), "angle": (0x43800000, 8)}
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


def size_of(kind: str) -> int:
    """Bytes of a value of a type, as it is loaded or stored."""
    if kind in PACKED:
        return 2 * size_of(PACKED[kind])
    if kind in LAYOUT:
        return (1 + sum(LAYOUT[kind])) // 8
    if kind in ("pred", "shift", "lane", "offset", "nibbles", *BOUNDED):
        return 1 if kind == "pred" else 4
    return SIZES[re.sub(r"\D", "", kind)]


def float_edges(kind: str) -> list[int]:
    """Zeros, subnormals, ones and neighbours, integers, ties, the largest numbers, infinities and NaNs; both signs."""
    exponent, mantissa = LAYOUT[kind]
    bias, sign = (1 << exponent - 1) - 1, 1 << exponent + mantissa
    one, top = bias << mantissa, (1 << exponent) - 1 << mantissa
    half = 1 << mantissa - 1
    found = [
        0,
        1,
        (1 << mantissa) - 1,
        1 << mantissa,
        one - 1,
        one,
        one + 1,
        one | half,
        one + (1 << mantissa) | half,
        one + (2 << mantissa) + (1 << max(mantissa - 3, 0)),
        one - (1 << mantissa),
        top - 1,
        top,
        top | half,
        top | 1,
        top | (1 << mantissa) - 1,
    ]
    return list(dict.fromkeys(found)) + [code | sign for code in dict.fromkeys(found)]


def edges_of(kind: str) -> list[int]:
    if kind in LAYOUT:
        return float_edges(kind)
    if kind in PACKED:
        one = float_edges(PACKED[kind])
        width = 8 * size_of(PACKED[kind])
        return [low | high << width for low, high in zip(one, one[7:] + one[:7], strict=True)]
    if kind == "pred":
        return [0, 1]
    if kind == "shift":
        return [0, 1, 7, 8, 15, 16, 31, 32, 33, 63, 64, 70, 255, 256, 259, 0x80000000, 0xFFFFFFFF]
    if kind == "lane":
        return list(range(32))
    if kind == "offset":
        return [value & 0xFFFFFFFF for value in (0, 1, 2, 5, 16, 31, 32, -1, -2, -5, -16, -32)]
    if kind in BOUNDED:
        return [code for code in float_edges("f32") if not BOUNDED[kind][0] < code & 0x7FFFFFFF < 0x7F800000]
    width = 8 * size_of(kind)
    top = 1 << width - 1
    values = (0, 1, 2, 3, 7, 8, 31, 32, -1, -2, -8, top, top - 1, top + 1, top >> 1, 0x5555555555555555)
    found = [value % (1 << width) for value in values]
    # A divisor: by zero, and the smallest number by -1, the ISA defines nothing.
    return [value for value in found if value not in (0, (1 << width) - 1)] if kind.startswith("nz") else found


def random_of(kind: str, count: int, seed: int) -> Array:
    """Random bits, for floats half of them near one; numbers of few bits, for integers."""
    raw, extra = bits(count, seed), bits(count, seed + 1)
    size = size_of(kind)
    if kind in PACKED:
        width = 8 * size_of(PACKED[kind])
        low, high = (random_of(PACKED[kind], count, seed + step).astype(np.uint64) for step in (2, 5))
        return (low | high << np.uint64(width)).astype(f"u{size}")
    if kind in LAYOUT or kind in BOUNDED:
        exponent, mantissa = LAYOUT["f32" if kind in BOUNDED else kind]
        bias, span = (1 << exponent - 1) - 1, 8 if exponent > 4 else 3
        first, last = (bias - 12, bias + BOUNDED[kind][1]) if kind in BOUNDED else (bias - span, bias + span)
        near = np.uint64(first) + extra % np.uint64(last - first)
        moderate = near << np.uint64(mantissa) | raw & np.uint64((1 << mantissa) - 1)
        moderate |= (raw >> np.uint64(60) & np.uint64(1)) << np.uint64(exponent + mantissa)
        wild = (extra >> np.uint64(40)) % np.uint64(2) == 1
        return np.where(wild & (kind not in BOUNDED), raw, moderate).astype(f"u{size}")
    if kind in ("pred", "lane"):
        return (raw >> np.uint64(20)).astype(np.uint64) % np.uint64(2 if kind == "pred" else 32)
    if kind == "shift":
        return raw % np.uint64(40)
    if kind == "offset":
        return (raw % np.uint64(67) - np.uint64(33)) & np.uint64(0xFFFFFFFF)
    found = (raw >> (extra % np.uint64(8 * size))).astype(f"u{size}")
    if kind.startswith("nz"):
        found = np.where((found == 0) | (found == np.iinfo(found.dtype).max), found.dtype.type(3), found)
    return found


@lru_cache(maxsize=256)
def table(kind: str, slot: int, arity: int, count: int) -> Array:
    """Values of source `slot` of `arity`, one a thread: pairs of edges first, then random ones."""
    edges = np.array(edges_of(kind), np.uint64)
    size = size_of(kind)
    found = random_of(kind, count, seed_of(f"{kind} {slot}")).astype(np.uint64)
    lane = np.arange(count, dtype=np.uint64)
    some = np.uint64(len(edges))
    if arity == 1:
        found[: len(edges)] = edges[:count]
    else:
        order = (lane, lane // some + lane * np.uint64(slot), bits(count, slot + 77))[min(slot, 2)]
        paired = min(len(edges) ** 2, 3 * count // 4)
        found[:paired] = edges[order % some][:paired]
    return found.astype(f"u{size}")


@dataclass(frozen=True)
class Op:
    """Instructions on a thread's registers.

    Attributes:
        text: an opcode, or lines with {d} for the result, {a}, {b}, ... for the sources and {d}|{q} for two predicates.
        result: type of what is stored.
        sources: types of what is loaded.
    """

    text: str
    result: str
    sources: tuple[str, ...]
    rule: Rule = field(default_factory=Bits)


def expand(pattern: str) -> list[str]:
    """`add{.rn,.rz}.f32` -> add.rn.f32, add.rz.f32; an empty alternative is nothing."""
    parts = re.split(r"\[([^\]]*)\]", pattern)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(one) for one in itertools.product(*choices)]


def ops(pattern: str, result: str, *sources: str, rule: Rule | None = None) -> list[Op]:
    """An operation for each expansion of a pattern; T in the types stands for the opcode's last modifier."""
    found = []
    for text in expand(pattern):
        last = text.split()[0].split(".")[-1].rstrip(";")
        types = [last if kind == "T" else kind for kind in (result, *sources)]
        found.append(Op(text, types[0], tuple(types[1:]), rule or Bits()))
    return found


ANY_NAN = {kind: Bits(nan=kind) for kind in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")}
INTS = "u16|u32|u64|s16|s32|s64"
ROUND = ".rn|.rz|.rm|.rp"


def integers() -> list[Op]:
    """9.7.1, 9.7.2."""
    found = ops(f"[add|sub|mul.lo|mul.hi|min|max].[{INTS}]", "T", "T", "T")
    found += ops("add.[u16x2|s16x2]", "b32", "b32", "b32") + ops("[add|sub].sat.s32", "T", "T", "T")
    found += ops("[min|max].[u16x2|s16x2]", "b32", "b32", "b32") + ops("[min|max].relu.s32", "T", "T", "T")
    found += ops("[min|max].relu.s16x2", "b32", "b32", "b32")
    found += [
        op
        for bit, wide in (("16", "32"), ("32", "64"))
        for sign in "us"
        for op in ops(f"mul.wide.{sign}{bit}", f"{sign}{wide}", "T", "T")
        + ops(f"mad.wide.{sign}{bit}", f"{sign}{wide}", "T", "T", f"{sign}{wide}")
    ]
    found += ops(f"mad.[lo|hi].[{INTS}]", "T", "T", "T", "T") + ops("mad.hi.sat.s32", "T", "T", "T", "T")
    found += ops("mul24.[lo|hi].[u32|s32]", "T", "T", "T") + ops("mad24.[lo|hi].[u32|s32]", "T", "T", "T", "T")
    found += ops("mad24.hi.sat.s32", "T", "T", "T", "T") + ops(f"sad.[{INTS}]", "T", "T", "T", "T")
    for kind in INTS.split("|"):
        found += ops(f"[div|rem].{kind}", kind, kind, f"nz{kind[1:]}")
    found += ops("[abs|neg].[s16|s32|s64]", "T", "T")
    found += ops("[popc|clz].[b32|b64]", "b32", "T") + ops("brev.[b32|b64]", "T", "T")
    found += ops("bfind[|.shiftamt].[u32|u64|s32|s64]", "b32", "T") + ops("fns.b32", "b32", "b32", "lane", "offset")
    found += ops("bfe.[u32|u64|s32|s64]", "T", "T", "shift", "shift")
    found += ops("bfi.[b32|b64]", "T", "T", "T", "shift", "shift")
    found += ops("szext.[clamp|wrap].[u32|s32]", "T", "T", "shift") + ops(
        "bmsk.[clamp|wrap].b32", "T", "shift", "shift"
    )
    found += ops("[dp4a|dp2a.lo|dp2a.hi].[u32|s32].[u32|s32]", "b32", "b32", "b32", "b32")
    for kind in ("u32", "s32", "u64", "s64"):
        found += ops(f"add.cc.{kind} {{d}}, {{a}}, {{b}}; addc.{kind} {{d}}, {{a}}, {{c}};", kind, kind, kind, kind)
        found += ops(
            f"sub.cc.{kind} {{d}}, {{a}}, {{b}}; subc.cc.{kind} {{d}}, {{a}}, {{c}}; addc.{kind} {{d}}, {{d}}, {{b}};",
            kind,
            kind,
            kind,
            kind,
        )
        found += ops(
            f"mad.lo.cc.{kind} {{d}}, {{a}}, {{b}}, {{c}}; madc.hi.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
            kind,
            kind,
            kind,
            kind,
        )
        found += ops(
            f"mad.hi.cc.{kind} {{d}}, {{a}}, {{b}}, {{c}}; madc.lo.{kind} {{d}}, {{a}}, {{b}}, {{d}};",
            kind,
            kind,
            kind,
            kind,
        )
    return found


def logic() -> list[Op]:
    """9.7.8, prmt (9.7.9.7) and mov's packing."""
    found = ops("[and|or|xor].[b16|b32|b64]", "T", "T", "T") + ops("[not|cnot].[b16|b32|b64]", "T", "T")
    found += [
        Op(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {lut:#x};", "b32", ("b32",) * 3)
        for lut in (0x00, 0x1B, 0x3C, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF)
    ]
    found += [
        Op(f"lop3.{way}.b32 {{e}}|{{d}}, {{a}}, {{b}}, {{c}}, {lut:#x}, {{f}};", "pred", ("b32",) * 3 + ("pred",))
        for way in ("or", "and")
        for lut in (0x80, 0x96)
    ]
    found += ops("shf.[l|r].[clamp|wrap].b32", "b32", "b32", "b32", "shift")
    found += ops("shl.[b16|b32|b64]", "T", "T", "shift") + ops(f"shr.[b16|b32|b64|{INTS}]", "T", "T", "shift")
    found += ops("prmt.b32[|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16]", "b32", "b32", "b32", "b32")
    found += [
        Op("mov.b32 {d}, {{{a}, {b}}};", "b32", ("b16", "b16")),
        Op("mov.b64 {d}, {{{a}, {b}}};", "b64", ("b32", "b32")),
        Op("{{ .reg .b16 x, y; mov.b32 {{x, y}}, {a}; mov.b32 {d}, {{y, x}}; }}", "b32", ("b32",)),
        Op(
            "{{ .reg .b128 q; .reg .b64 x, y; mov.b128 q, {{{a}, {b}}}; mov.b128 {{x, y}}, q; sub.s64 {d}, x, y; }}",
            "b64",
            ("b64", "b64"),
        ),
    ]
    return found


def floats() -> list[Op]:
    """9.7.3 except for the approximate units."""
    found = ops(f"[add|sub|mul][|{ROUND}][|.ftz][|.sat].f32", "T", "T", "T")
    found += ops(f"[add|sub|mul][|{ROUND}].f64", "T", "T", "T", rule=ANY_NAN["f64"])
    found += ops(f"fma[{ROUND}][|.ftz][|.sat].f32", "T", "T", "T", "T")
    found += ops(f"fma[{ROUND}].f64", "T", "T", "T", "T", rule=ANY_NAN["f64"])
    found += ops("mad[.rn|.rz][|.ftz].f32", "T", "T", "T", "T")
    found += ops(f"div[{ROUND}][|.ftz].f32", "T", "T", "T")
    found += ops(f"div[{ROUND}].f64", "T", "T", "T", rule=ANY_NAN["f64"])
    found += ops(f"[rcp|sqrt][{ROUND}][|.ftz].f32", "T", "T")
    found += ops(f"[rcp|sqrt][{ROUND}].f64", "T", "T", rule=ANY_NAN["f64"])
    # The ISA: a NaN comes as some NaN.
    found += ops("[abs|neg][|.ftz].f32", "T", "T", rule=ANY_NAN["f32"])
    found += ops("[abs|neg].f64", "T", "T", rule=ANY_NAN["f64"])
    found += ops("[min|max][|.ftz][|.NaN][|.xorsign.abs].f32", "T", "T", "T")
    found += ops("[min|max].f64", "T", "T", "T", rule=ANY_NAN["f64"])
    found += ops("copysign.[f32|f64]", "T", "T", "T")
    for kind in ("f32", "f64"):
        found += ops(f"testp.[finite|infinite|number|notanumber|normal|subnormal].{kind}", "pred", kind)
    return found


# The ISA's bounds, by instruction and section, read in its version 9.1; relative and absolute. The forms with
# .ftz have the same ones. An ulp of f32 is at most 2^-23 of the value.
APPROXIMATE = {
    "div.approx f32": (2**-22, 0.0, "9.7.3.8: 2 ulp for |b| in [2^-126, 2^126]"),
    "div.full f32": (2**-22, 0.0, "9.7.3.8: 2 ulp over the full range"),
    "rcp f32": (2**-23, 0.0, "9.7.3.13: 1 ulp"),
    "sqrt f32": (2**-23, 0.0, "9.7.3.15: relative error 2^-23"),
    "rsqrt f32": (2**-22.9, 0.0, "9.7.3.16: relative error 2^-22.9"),
    "sin f32": (0.0, 2**-14.7, "9.7.3.18: absolute error 2^-14.7 in [-100 pi, 100 pi]"),
    "sin f32 turn": (0.0, 2**-20.5, "9.7.3.18: absolute error 2^-20.5 in [-2 pi, 2 pi]"),
    "cos f32": (0.0, 2**-14.7, "9.7.3.19: absolute error 2^-14.7 in [-100 pi, 100 pi]"),
    "cos f32 turn": (0.0, 2**-20.5, "9.7.3.19: absolute error 2^-20.5 in [-2 pi, 2 pi]"),
    "lg2 f32": (2**-22, 2**-22, "9.7.3.20: absolute error 2^-22 in (0.5, 2), relative error 2^-22 elsewhere"),
    "ex2 f32": (2**-22, 0.0, "9.7.3.21: 2 ulp"),
    "tanh f32": (2**-11, 0.0, "9.7.3.22: relative error 2^-11"),
    "tanh f16": (0.0, 2**-10.987, "9.7.4.9: absolute error 2^-10.987"),
    "tanh bf16": (0.0, 2**-8, "9.7.4.9: absolute error 2^-8"),
    "ex2 f16": (2**-9.9, 0.0, "9.7.4.10: relative error 2^-9.9"),
    "ex2 bf16": (2**-7, 0.0, "9.7.4.10: relative error 2^-7"),
}


def bound(unit: str) -> Close:
    relative, absolute, source = APPROXIMATE[unit]
    return Close(unit.split()[1], relative, source, absolute)


def approximate() -> list[Op]:
    """9.7.3 and 9.7.4: units with a bound on their error."""
    found = ops("div.full[|.ftz].f32", "T", "T", "T", rule=bound("div.full f32"))
    found += ops("div.approx[|.ftz].f32", "T", "angle", "angle", rule=bound("div.approx f32"))
    for kind in ("f32", "angle"):
        for unit in ("rcp", "sqrt", "rsqrt", "lg2", "ex2"):
            found += ops(f"{unit}.approx[|.ftz].f32", "T", kind, rule=bound(f"{unit} f32"))
    for unit in ("sin", "cos"):
        found += ops(f"{unit}.approx[|.ftz].f32", "T", "angle", rule=bound(f"{unit} f32"))
        found += ops(f"{unit}.approx[|.ftz].f32", "T", "turn", rule=bound(f"{unit} f32 turn"))
    found += ops("tanh.approx.f32", "T", "f32", rule=bound("tanh f32"))
    found += ops("tanh.approx.f32", "T", "angle", rule=bound("tanh f32"))
    for kind in ("f16", "bf16"):
        ftz = ".ftz" if kind == "bf16" else ""
        found += ops(f"tanh.approx.[{kind}|{kind}x2]", "T", "T", rule=bound(f"tanh {kind}"))
        found += ops(f"ex2.approx{ftz}.[{kind}|{kind}x2]", "T", "T", rule=bound(f"ex2 {kind}"))
    return found


def halves() -> list[Op]:
    """9.7.4; 9.7.5 is sm_100's."""
    found = ops("[add|sub|mul][|.rn][|.ftz][|.sat].[f16|f16x2]", "T", "T", "T")
    found += ops("[add|sub|mul][|.rn].[bf16|bf16x2]", "T", "T", "T")
    found += ops("fma.rn[|.ftz][|.sat].[f16|f16x2]", "T", "T", "T", "T")
    found += ops("fma.rn[|.ftz].relu.[f16|f16x2]", "T", "T", "T", "T")
    found += ops("fma.rn[|.relu].[bf16|bf16x2]", "T", "T", "T", "T")
    for kind in ("f16", "bf16"):
        ftz = "[|.ftz]" if kind == "f16" else ""
        found += ops(f"[abs|neg]{ftz}.[{kind}|{kind}x2]", "T", "T", rule=ANY_NAN[kind])
        found += ops(f"[min|max]{ftz}[|.NaN][|.xorsign.abs].[{kind}|{kind}x2]", "T", "T", "T")
    return found


ORDERED = "eq|ne|lt|le|gt|ge"
FLOAT_ONLY = "equ|neu|ltu|leu|gtu|geu|num|nan"


def comparisons() -> list[Op]:
    """9.7.6, 9.7.7: results of setp are two bits, p and q."""
    found = []
    for kind in ("b16", "b32", "b64", *INTS.split("|"), "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        compare = "eq|ne" if kind[0] == "b" and kind[1] != "f" else ORDERED
        compare += "|lo|ls|hi|hs" if kind[0] == "u" else ""
        is_float = "f" in kind
        compare += f"|{FLOAT_ONLY}" if is_float else ""
        # Of two halves there are two results; of one, and of two numbers, the second is the first's opposite.
        pair = "{d}" if kind in ("f16", "bf16") else "{d}|{q}"
        ftz = "[|.ftz]" if kind in ("f32", "f16", "f16x2") else ""
        found += [
            Op(f"{text} {pair}, {{a}}, {{b}};", "pred", (kind, kind))
            for text in expand(f"setp.[{compare}]{ftz}.{kind}")
        ]
        some = "lt.and|ge.or|ne.xor" if kind[0] != "b" or is_float else "eq.and|ne.or|ne.xor"
        found += [
            Op(f"{text} {pair}, {{a}}, {{b}}, {{c}};", "pred", (kind, kind, "pred"))
            for text in expand(f"setp.[{some}]{ftz}.{kind}")
        ]
    for kind in ("b32", "u16", "u32", "s32", "s64", "f32", "f64"):
        compare = "eq|ne" if kind == "b32" else "lt|ge|ne" + ("|nan|ltu" if kind[0] == "f" else "")
        for result in ("u32", "f32"):
            found += ops(f"set.[{compare}].{result}.{kind}", result, kind, kind)
            found += [
                Op(
                    f"set.{compare.split('|')[0]}.xor.{result}.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
                    result,
                    (kind, kind, "pred"),
                )
            ]
    found += ops("set.[lt|gtu].ftz.[u32|f32].f32", "b32", "f32", "f32")
    for kind in ("f16", "bf16"):
        found += ops(f"set.[lt|geu|nan].[{kind}|u16|u32].{kind}", "T", kind, kind)
        found += ops(f"set.[lt|geu|nan].[{kind}x2|u32].{kind}x2", "b32", f"{kind}x2", f"{kind}x2")
    found = [Op(op.text, set_result(op), op.sources, op.rule) if op.text.startswith("set.") else op for op in found]
    found += ops(f"selp.[b16|b32|b64|{INTS}|f32|f64]", "T", "T", "T", "pred")
    found += ops("slct.[b16|u32|s64|f32|f64].s32", "b16", "b16", "b16", "s32")
    found += ops("slct[|.ftz].[b32|u64|f32].f32", "b32", "b32", "b32", "f32")
    return [typed_slct(op) if op.text.startswith("slct") else op for op in found]


def set_result(op: Op) -> str:
    words = op.text.split()[0].split(".")
    return words[-2]


def typed_slct(op: Op) -> Op:
    kind = op.text.split(".")[-2]
    return Op(op.text, kind, (kind, kind, op.sources[2]), op.rule)


WIDE = {"u8": 8, "u16": 16, "u32": 32, "u64": 64, "s8": 8, "s16": 16, "s32": 32, "s64": 64}


def conversions() -> list[Op]:
    """Conversions, cvt (9.7.9.21), between all types that sm_90a has, and cvt.pack (9.7.9.22)."""
    found: list[Op] = []
    floating = ("f16", "bf16", "f32", "f64")
    for to, of in itertools.product(WIDE, WIDE):
        wider = WIDE[to] > WIDE[of] or to == of
        fits = to == of or (wider and (of[0] == "u" or to[0] == "s"))
        found += ops(f"cvt{'' if fits else '[|.sat]'}.{to}.{of}", to, of)
    for to, of in itertools.product(floating, WIDE):
        if to == "bf16" and WIDE[of] == 8:
            continue
        sat = "[|.sat]" if to != "bf16" else ""
        found += ops(f"cvt[{ROUND}]{sat}.{to}.{of}", to, of)
    for to, of in itertools.product(WIDE, floating):
        if of == "bf16" and WIDE[to] == 8:
            continue
        ftz = "[|.ftz]" if of == "f32" else ""
        found += ops(f"cvt[.rni|.rzi|.rmi|.rpi]{ftz}.{to}.{of}", to, of)
        found += ops(f"cvt.rzi{ftz}.sat.{to}.{of}", to, of) if of != "bf16" else []
    for kind in ("f16", "f32", "f64"):
        ftz = "[|.ftz]" if kind == "f32" else ""
        found += ops(f"cvt[.rni|.rzi|.rmi|.rpi]{ftz}[|.sat].{kind}.{kind}", kind, kind, rule=ANY_NAN[kind])
    found += ops("cvt[.rni|.rzi|.rmi|.rpi].bf16.bf16", "bf16", "bf16", rule=ANY_NAN["bf16"])
    for to, of in (("f32", "f16"), ("f64", "f16"), ("f64", "f32")):
        found += ops(f"cvt[|.sat].{to}.{of}", to, of, rule=ANY_NAN[to])
    found += ops("cvt.ftz[|.sat].f32.f16", "f32", "f16", rule=ANY_NAN["f32"])
    found += ops("cvt.ftz.f64.f32", "f64", "f32", rule=ANY_NAN["f64"])
    for kind in ("f32", "f64"):
        found += ops(f"cvt.{kind}.bf16", kind, "bf16", rule=ANY_NAN[kind])
    found += ops(f"cvt[{ROUND}][|.sat].f16.f64", "f16", "f64") + ops(
        f"cvt[{ROUND}][|.ftz][|.sat].f32.f64", "f32", "f64"
    )
    found += ops(f"cvt[{ROUND}][|.ftz][|.sat].f16.f32", "f16", "f32") + ops(f"cvt[{ROUND}].bf16.f64", "bf16", "f64")
    found += ops("cvt[.rm|.rp].bf16.f32", "bf16", "f32")
    found += ops(f"cvt[{ROUND}].bf16.f16", "bf16", "f16") + ops(f"cvt[{ROUND}].f16.bf16", "f16", "bf16")
    found += ops("cvt[.rn|.rz][|.relu].[f16|bf16].f32", "b16", "f32") + ops("cvt.rna.tf32.f32", "b32", "f32")
    found += ops("cvt[.rn|.rz][|.relu].tf32.f32", "b32", "f32")
    found += ops("cvt[.rn|.rz][|.relu].[f16x2|bf16x2].f32", "b32", "f32", "f32")
    found += ops("cvt.rn.satfinite[|.relu].[e4m3x2|e5m2x2].f32", "b16", "f32", "f32")
    found += ops("cvt.rn.satfinite[|.relu].[e4m3x2|e5m2x2].f16x2", "b16", "f16x2")
    for kind in ("e4m3x2", "e5m2x2"):
        found += ops(f"cvt.rn[|.relu].f16x2.{kind}", "b32", kind)
    found += ops("cvt.pack.sat.[u16|s16].s32", "b32", "s32", "s32")
    found += ops("cvt.pack.sat.[u2|s2|u4|s4|u8|s8].s32.b32", "b32", "s32", "s32", "b32")
    return found


def exchanges() -> list[Op]:
    """Across a warp's lanes (9.7.9.6, 9.7.13.9 to 9.7.13.11, 9.7.13.17)."""
    full = "0xffffffff"
    found = [
        Op(f"shfl.sync.{mode}.b32 {{d}}, {{a}}, {{b}}, {clamp}, {full};", "b32", ("b32", "lane"))
        for mode in ("up", "down", "bfly", "idx")
        for clamp in (0x1F, 0x00, 0x0F, 0x181F, 0x1C07)
    ]
    found += [
        Op(f"shfl.sync.{mode}.b32 {{e}}|{{d}}, {{a}}, {{b}}, {clamp}, {full};", "pred", ("b32", "lane"))
        for mode in ("up", "down", "bfly", "idx")
        for clamp in (0x1F, 0x00, 0x181F)
    ]
    found += [Op(f"vote.sync.{mode}.pred {{d}}, {{a}}, {full};", "pred", ("pred",)) for mode in ("all", "any", "uni")]
    found += [Op(f"vote.sync.ballot.b32 {{d}}, {{a}}, {full};", "b32", ("pred",))]
    # Few values, so that some lanes agree; a whole warp agrees on the number of its warp.
    found += [
        Op(
            f"and.b{size} {{d}}, {{a}}, 3; match.any.sync.b{size} {{e}}, {{d}}, {full}; "
            + ("mov.b32 {d}, {e};" if size == 32 else "cvt.u64.u32 {d}, {e};"),
            f"b{size}",
            (f"b{size}",),
        )
        for size in (32, 64)
    ]
    found += [
        Op(
            f"shr.u32 {{d}}, {{a}}, 5; match.all.sync.b32 {{e}}|{{f}}, {{d}}, {full}; mov.b32 {{d}}, {{e}};",
            "b32",
            ("b32",),
        ),
        Op(
            f"mov.u32 {{e}}, %tid.x; shr.u32 {{e}}, {{e}}, 6; match.all.sync.b32 {{d}}|{{f}}, {{e}}, {full};",
            "b32",
            ("b32",),
        ),
    ]
    found += [
        Op(f"redux.sync.{op} {{d}}, {{a}}, {full};", "b32", ("b32",))
        for op in expand("[add.u32|add.s32|min.u32|min.s32|max.u32|max.s32|and.b32|or.b32|xor.b32]")
    ]
    found += [
        Op(f"elect.sync {{e}}|{{d}}, {full};", "pred", ("b32",)),
        Op(f"elect.sync {{d}}|{{f}}, {full};", "b32", ("b32",)),
        Op("activemask.b32 {d};", "b32", ("b32",)),
    ]
    # Half of a warp, and lanes 1, 5, 9, ...: what the other lanes hold is not stored.
    for mask, chosen in (("0x0000ffff", "{e}, 16"), ("0x22222222", None)):
        guard = (
            f"mov.u32 {{e}}, %laneid; setp.lt.u32 {{f}}, {chosen};"
            if chosen
            else ("mov.u32 {e}, %laneid; and.b32 {e}, {e}, 3; setp.eq.u32 {f}, {e}, 1;")
        )
        for op in ("redux.sync.add.u32", "redux.sync.min.s32", "match.any.sync.b32"):
            found.append(Op(f"{guard} mov.b32 {{d}}, 0; @{{f}} {op} {{d}}, {{a}}, {mask};", "b32", ("b32",)))
        found.append(
            Op(f"{guard} mov.b32 {{d}}, 0; @{{f}} shfl.sync.bfly.b32 {{d}}, {{a}}, 4, 0x1f, {mask};", "b32", ("b32",))
        )
        found.append(Op(f"{guard} mov.b32 {{d}}, 0; @{{f}} elect.sync {{d}}|{{f}}, {mask};", "b32", ("b32",)))
    return found


FAMILIES = {
    "integer": integers,
    "logic": logic,
    "float": floats,
    "approximate": approximate,
    "half": halves,
    "compare": comparisons,
    "convert": conversions,
    "exchange": exchanges,
}

# Registers that hold a source or the result, by its size in bytes; of sources each has another number.
PREFIX = {2: "%rs", 4: "%r", 8: "%rd"}


def register(kind: str, number: int) -> str:
    return f"%p{number}" if kind == "pred" else f"{PREFIX[max(size_of(kind), 2)]}{number}"


def statement(op: Op) -> str:
    """The lines of an operation; registers 20 and up are the result and scratch."""
    names = {
        letter: register(kind, 10 + slot) for slot, (letter, kind) in enumerate(zip("abcf", op.sources, strict=False))
    }
    names["d"] = register(op.result, 20)
    names.setdefault("e", "%r21")
    names.setdefault("f", "%p22")
    names["q"] = "%p21"
    if "{d}" in op.text:
        lines = op.text.format(**names)
    else:
        letters = ["d", *list("abcf")[: len(op.sources)]]
        lines = f"{op.text} {', '.join(names[letter] for letter in letters)};"
    if op.result == "pred":
        second = "{q}" in op.text
        return f"{lines}\nselp.b32 %r20, 1, 0, %p20;\n" + (
            "selp.b32 %r21, 2, 0, %p21;\nor.b32 %r20, %r20, %r21;\n" if second else ""
        )
    return lines + "\n"


def kernel(name: str, chunk: list[Op], count: int) -> Case:
    """All operations of a chunk take the same sources."""
    sources = chunk[0].sources
    inputs = tuple(table(kind, slot, len(sources), count) for slot, kind in enumerate(sources))
    results = tuple(Result(op.text, np.zeros(count, f"u{size_of(op.result)}"), op.rule) for op in chunk)
    lines = [
        "mov.u32 %r1, %tid.x;",
        "mov.u32 %r2, %ctaid.x;",
        f"mad.lo.s32 %r1, %r2, {BLOCK}, %r1;",
        "ld.param.b64 %rd1, [out];",
    ]
    for size in (1, 2, 4, 8):
        lines += [f"mul.wide.u32 %rd{30 + size}, %r1, {size};", f"add.s64 %rd{40 + size}, %rd1, %rd{30 + size};"]
    for slot, kind in enumerate(sources):
        size = size_of(kind)
        lines += [f"ld.param.b64 %rd2, [p{slot}];", f"add.s64 %rd2, %rd2, %rd{30 + size};"]
        target = "%rs30" if kind == "pred" else register(kind, 10 + slot)
        lines += [f"ld.global.{'u' if size == 1 else 'b'}{8 * size} {target}, [%rd2];"]
        lines += [f"setp.ne.b16 %p{10 + slot}, %rs30, 0;"] if kind == "pred" else []
    case = Case(f"{name}", "", inputs, results, grid=count // BLOCK, block=BLOCK)
    for op, start in zip(chunk, case.offsets, strict=False):
        size = size_of(op.result)
        lines.append(statement(op).rstrip())
        value = "%r20" if op.result == "pred" else register(op.result, 20)
        lines.append(f"st.global.{'u' if size == 1 else 'b'}{8 * size} [%rd{40 + size}+{start}], {value};")
    return Case(case.name, "\n".join(lines), inputs, results, grid=count // BLOCK, block=BLOCK)


def cases() -> list[Case]:
    """Kernels of all families: operations with the same sources share some."""
    found = []
    for family, make in FAMILIES.items():
        groups: dict[tuple[str, ...], list[Op]] = {}
        for op in make():
            groups.setdefault(op.sources, []).append(op)
        for sources, group in groups.items():
            count = 2048 if family == "approximate" else 128 if family == "exchange" else LANES[min(len(sources), 3)]
            if family in ("compare", "convert"):
                count = 256
            for place in range(0, len(group), CHUNK):
                name = f"{family}/{'_'.join(sources)}/{place // CHUNK}"
                found.append(kernel(name, group[place : place + CHUNK], count))
    return found + around_the_smallest()


def around_the_smallest() -> list[Case]:
    """Exact results closer to the smallest normal number than numbers below it are to each other: are they flushed?"""
    count = 128
    found = []
    for kind, part, power in (("f32", np.float32, -126), ("f16", np.float16, -14)):
        mantissa = LAYOUT[kind][1]
        one = (1 + (bits(count, power) % np.uint64(1 << mantissa)).astype(np.float64) / 2**mantissa).astype(part)
        # Half are products next to it, half of the sums are the number itself and a product that is next to nothing.
        factors = np.ldexp(one, power // 2), np.ldexp((part(1) / one).astype(part), power - power // 2)
        added = np.where(np.arange(count) < count // 2, 0, 2.0**power).astype(part)
        factors[0][count // 2 :] = np.ldexp(one[count // 2 :], power)
        factors[1][count // 2 :] = np.ldexp(part(-1), 1 - mantissa - np.arange(count // 2) % 6)
        codes = tuple(one.view(f"u{one.itemsize}") for one in (*factors, added))
        rounding = ROUND if kind == "f32" else ".rn"
        for name, ops_ in (
            ("mul", ops(f"mul[{rounding}].ftz.{kind}", kind, kind, kind)),
            ("fma", ops(f"fma[{rounding}].ftz.{kind}", kind, kind, kind, kind)),
        ):
            found.append(replace(kernel(f"smallest/{name}_{kind}", ops_, count), inputs=codes[: 2 + (name == "fma")]))
    below = np.ldexp(1 - 2.0 ** -(20 + np.arange(count) % 12), -126) * np.where(np.arange(count) % 24 < 12, 1, -1)
    wide = kernel("smallest/cvt", ops(f"cvt[{ROUND}].ftz.f32.f64", "f32", "f64"), count)
    return [*found, replace(wide, inputs=(below.view(np.uint64),))]
