# SPDX-License-Identifier: Apache-2.0
"""ldmatrix, stmatrix, movmatrix, mma.sync and wgmma (PTX ISA 9.2, 9.7.14.5, 9.7.15).

Where elements lie is asked with small whole numbers, which every order and width of accumulation leaves exact: bits are
equal or an element lay elsewhere. How products are summed is asked with numbers of many magnitudes, within `Sum`.

Shared memory of a wgmma is filled with elements without regard to where a matrix lies in it: both sides read it through
the descriptor. Bits behind the first one that a sum keeps: 23 of f16, bf16 and tf32 (Fasi, Higham, Mikaitis and
Pranesh, 2021, found that tensor cores cut, not round, what they align). wgmma of fp8 keeps 13, and so does the
emulator, with every bit the same (`emulator/machine/narrow_sums.py`).
"""

import numpy as np
from micro_case import Array, Bits, Case, Result, Sum, bits, pick, seed_of

WIDTH = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
SIGN = {
    "f16": 0x80008000,
    "bf16": 0x80008000,
    "tf32": 0x80000000,
    "f32": 0x80000000,
    "e4m3": 0x80808080,
    "e5m2": 0x80808080,
}
# Codes of the numbers 0, 1, 2, 3, 4 and their opposites.
SMALL = {
    "f16": [0, 0x3C00, 0x4000, 0x4200, 0x4400],
    "bf16": [0, 0x3F80, 0x4000, 0x4040, 0x4080],
    "tf32": [0, 0x3F800000, 0x40000000, 0x40400000, 0x40800000],
    "e4m3": [0, 0x38, 0x40, 0x44, 0x48],
    "e5m2": [0, 0x3C, 0x40, 0x42, 0x44],
    "f32": [0, 0x3F800000, 0x40000000, 0x40400000, 0x40800000],
}
# Infinities and NaNs; e4m3 has no infinity.
SPECIAL = {
    "f16": [0x7C00, 0xFC00, 0x7E00],
    "bf16": [0x7F80, 0xFF80, 0x7FC0],
    "e4m3": [0x7F, 0xFF],
    "tf32": [0x7F800000, 0xFF800000, 0x7FC00000],
    "e5m2": [0x7C, 0xFC, 0x7E],
}
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "tf32": (8, 23), "f32": (8, 23), "e4m3": (4, 3), "e5m2": (5, 2)}


def elements(kind: str, count: int, seed: int, fill: str) -> Array:
    """Codes of random elements: "small" whole numbers, "wide" ones of many magnitudes, or a few "special" ones."""
    size = 4 if kind in ("f32", "s32") else WIDTH[kind]
    if kind in ("s8", "u8"):
        if fill == "small":
            return pick([0, 1, 2, 3, 4, *((0xFF, 0xFE, 0xFD) if kind == "s8" else (5, 6))], count, seed, "u1")
        return bits(count, seed).astype("u1")
    if kind == "s32":
        extreme = [0, 1, 0x7FFFFFFF, 0x80000000, 0x7FFFFF00, 0xFFFFFFFF]
        return pick(extreme, count, seed, "u4") if fill == "wide" else pick([0, 1, 5, 0xFFFFFFF0], count, seed, "u4")
    if fill == "wide":
        exponent, mantissa = FORMATS[kind]
        bias = (1 << exponent - 1) - 1
        # Sums of 32 products of 8-bit numbers stay within f16.
        span = 3 if size == 1 else 6
        raw = bits(count, seed)
        power = np.uint64(bias - span) + (raw >> np.uint64(33)) % np.uint64(2 * span - 1)
        found = power << np.uint64(mantissa) | raw & np.uint64((1 << mantissa) - 1)
        found |= (raw >> np.uint64(63)) << np.uint64(exponent + mantissa)
        return found.astype(f"u{size}")
    sign = 1 << 8 * size - 1
    found = pick([*SMALL[kind], *(code | sign for code in SMALL[kind])], count, seed, f"u{size}")
    if fill == "special" and kind in SPECIAL:
        where = bits(count, seed + 9) % np.uint64(97) == 0
        found = np.where(where, pick(SPECIAL[kind], count, seed + 5, f"u{size}"), found)
    return found


def words(array: Array) -> Array:
    return np.frombuffer(array.tobytes(), np.uint32)


def rule_of(d_type: str, a_type: str, k: int, fill: str, warpgroup: bool) -> "Bits | Sum":
    if fill == "small" or d_type == "s32":
        return Bits()
    if warpgroup and a_type in ("e4m3", "e5m2"):
        return Bits(d_type)
    return Sum(d_type, k + 1, 23)


THREAD = "mov.u32 %r200, %tid.x;\nmul.wide.u32 %rd20, %r200, 4;\n"


def load_words(parameter: str, first: int, count: int, threads: int) -> str:
    """Word i of a thread lies at i * threads + thread."""
    lines = [f"ld.param.b64 %rd21, [{parameter}];", "add.s64 %rd21, %rd21, %rd20;"]
    lines += [f"ld.global.b32 %r{first + index}, [%rd21+{4 * threads * index}];" for index in range(count)]
    return "\n".join(lines) + "\n"


def store_words(first: int, count: int, threads: int, start: int = 0) -> str:
    lines = ["ld.param.b64 %rd21, [out];", "add.s64 %rd21, %rd21, %rd20;"]
    lines += [f"st.global.b32 [%rd21+{start + 4 * threads * index}], %r{first + index};" for index in range(count)]
    return "\n".join(lines) + "\n"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + index}" for index in range(count)) + "}"


# mma.sync

MMA = [
    *((f"m16n8k{k}", d, "f16", "f16", d) for k in (8, 16) for d in ("f16", "f32")),
    *((f"m16n8k{k}", "f32", "bf16", "bf16", "f32") for k in (8, 16)),
    *((f"m16n8k{k}", "f32", "tf32", "tf32", "f32") for k in (4, 8)),
    *(("m16n8k32", "f32", a, b, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((f"m16n8k{k}", "s32", a, b, "s32") for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")),
]


def mma_case(shape: str, d: str, a: str, b: str, c: str, fill: str, satfinite: bool = False) -> Case:
    k = int(shape.rpartition("k")[2])
    a_words, b_words = 16 * k * WIDTH[a] // 128, 8 * k * WIDTH[b] // 128
    c_words = 2 if c == "f16" else 4
    text = f"mma.sync.aligned.{shape}.row.col{'.satfinite' if satfinite else ''}.{d}.{a}.{b}.{c}"
    seed = seed_of(text + fill)
    inputs = tuple(
        words(elements(kind, 128 * count // (4 if kind == "s32" else size), seed + 100 * place, fill))
        for place, (kind, count, size) in enumerate(
            ((a, a_words, WIDTH[a]), (b, b_words, WIDTH[b]), (c, c_words, 2 if c == "f16" else 4))
        )
    )
    body = THREAD + load_words("p0", 100, a_words, 32) + load_words("p1", 120, b_words, 32)
    body += load_words("p2", 140, c_words, 32)
    body += (
        f"{text} {registers(0, c_words)}, {registers(100, a_words)}, {registers(120, b_words)}, "
        f"{registers(140, c_words)};\n"
    )
    body += store_words(0, c_words, 32)
    result = Result(text, np.zeros(32 * c_words, np.uint32), rule_of(d, a, k, fill, warpgroup=False))
    signs = tuple((place, SIGN[kind]) for place, kind in enumerate((a, b, c)) if kind in SIGN)
    return Case(
        f"mma/{text[17:].replace('.', '_')}/{fill}",
        body,
        inputs,
        (result,),
        block=32,
        signs=signs if isinstance(result.rule, Sum) else (),
    )


def mma_cases() -> list[Case]:
    found = []
    for shape, d, a, b, c in MMA:
        found += [mma_case(shape, d, a, b, c, fill) for fill in ("small", "wide")]
        found += [mma_case(shape, d, a, b, c, "special")] if a in SPECIAL else []
        found += [mma_case(shape, d, a, b, c, "wide", satfinite=True)] if d == "s32" else []
    return found


# ldmatrix, stmatrix and movmatrix

FILL_SHARED = """
mov.b32 %r201, shared;
ld.param.b64 %rd22, [p0];
mov.b32 %r202, %r200;
FILL:
shl.b32 %r203, %r202, 4;
cvt.u64.u32 %rd23, %r203;
add.s64 %rd23, %rd22, %rd23;
add.s32 %r204, %r201, %r203;
ld.global.v4.b32 {{%r205, %r206, %r207, %r208}}, [%rd23];
st.shared.v4.b32 [%r204], {{%r205, %r206, %r207, %r208}};
add.s32 %r202, %r202, {threads};
setp.lt.u32 %p10, %r202, {chunks};
@%p10 bra FILL;
"""


def moves() -> list[Case]:
    """Of a warp; the rows' addresses are a permutation of the 32 rows of 16 bytes."""
    found = []
    content = words(bits(64, 5).view(np.uint8))
    order = (
        "mul.lo.s32 %r209, %r200, 13;\nadd.s32 %r209, %r209, 7;\nand.b32 %r209, %r209, 31;\nshl.b32 %r209, %r209, 4;\n"
    )
    start = THREAD + FILL_SHARED.format(threads=32, chunks=32) + "bar.warp.sync -1;\n" + order
    start += "add.s32 %r209, %r201, %r209;\n"
    for number in (1, 2, 4):
        for trans in ("", ".trans"):
            text = f"ldmatrix.sync.aligned.m8n8.x{number}{trans}.shared.b16"
            body = start + f"{text} {registers(0, number)}, [%r209];\n" + store_words(0, number, 32)
            result = Result(text, np.zeros(32 * number, np.uint32))
            found.append(Case(f"matrix/{text}", body, (content,), (result,), block=32, shared=1024))
            text = f"stmatrix.sync.aligned.m8n8.x{number}{trans}.shared.b16"
            body = start + load_words("p1", 0, number, 32) + f"{text} [%r209], {registers(0, number)};\n"
            body += "bar.warp.sync -1;\nshl.b32 %r209, %r200, 2;\nadd.s32 %r209, %r201, %r209;\n"
            body += "".join(f"ld.shared.b32 %r{index}, [%r209+{128 * index}];\n" for index in range(4))
            values = words(bits(16 * number, 6 + number).view(np.uint8))
            result = Result(text, np.zeros(128, np.uint32))
            body += store_words(0, 4, 32)
            found.append(Case(f"matrix/{text}", body, (content, values), (result,), block=32, shared=1024))
    text = "movmatrix.sync.aligned.m8n8.trans.b16"
    body = THREAD + load_words("p0", 0, 1, 32) + f"{text} %r1, %r0;\n" + store_words(1, 1, 32)
    found.append(Case(f"matrix/{text}", body, (content[:32],), (Result(text, np.zeros(32, np.uint32)),), block=32))
    return found


# wgmma

A_AT, B_AT, SHARED = 0, 16384, 57344
SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor(swizzle: int, leading: int, stride: int) -> int:
    """All of a descriptor but the start address."""
    return leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLE[swizzle] << 62


def steps(swizzle: int, mn_major: bool, pad: int = 0) -> tuple[int, int]:
    """Leading and stride offsets that keep patterns whole: each pattern is 8 rows of the swizzle's span."""
    if swizzle == 0:
        return 640 + pad, 1152 + pad
    pattern = 8 * swizzle
    return (3 * pattern, pattern) if mn_major else (16, pattern * (1 + (pad > 0)))


def wgmma_case(
    types: tuple[str, str, str],
    n: int,
    *,
    source: str = "ss",
    swizzle: int = 128,
    b_swizzle: int | None = None,
    trans: tuple[int, int] = (0, 0),
    negative: tuple[int, int] = (1, 1),
    scale_d: bool = True,
    fill: str = "small",
    satfinite: bool = False,
    k_start: int = 0,
    chain: int = 1,
) -> Case:
    """D [64, n] = A times B (+ D).

    Args:
        types: of A, B and D.
        k_start: bytes that are added to the start addresses, as kernels do for later steps of K in a pattern.
        chain: MMAs one behind the other into the same D.
    """
    a, b, d = types
    k = 32 // WIDTH[a]
    d_words = n // (4 if d == "f16" else 2)
    shape = f"m64n{n}k{k}"
    text = f"wgmma.mma_async.sync.aligned.{shape}{'.satfinite' if satfinite else ''}.{d}.{a}.{b}"
    b_swizzle = swizzle if b_swizzle is None else b_swizzle
    name = f"wgmma/{shape}_{d}_{a}_{b}_{source}_sw{swizzle}_{b_swizzle}_t{trans[0]}{trans[1]}"
    name += f"_{'n' if negative[0] < 0 else 'p'}{'n' if negative[1] < 0 else 'p'}{'' if scale_d else '_over'}"
    name += f"{'_sat' if satfinite else ''}{f'_at{k_start}' if k_start else ''}"
    name += f"{f'_x{chain}' if chain > 1 else ''}_{fill}"
    seed = seed_of(name)
    memory = np.concatenate(
        [
            words(elements(a, B_AT // WIDTH[a], seed, fill)),
            words(elements(b, (SHARED - B_AT) // WIDTH[b], seed + 1, fill)),
        ]
    )
    c = words(elements(d, 128 * d_words * (2 if d == "f16" else 1), seed + 2, fill))
    inputs = [memory, c]
    body = (
        THREAD + FILL_SHARED.format(threads=128, chunks=SHARED // 16) + "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    )
    body += f"shr.u32 %r203, %r201, 4;\nand.b32 %r203, %r203, 0x3fff;\nadd.s32 %r204, %r203, {(A_AT + k_start) >> 4};\n"
    body += f"cvt.u64.u32 %rd1, %r204;\nadd.s32 %r204, %r203, {(B_AT + k_start) >> 4};\ncvt.u64.u32 %rd2, %r204;\n"
    body += f"or.b64 %rd1, %rd1, {descriptor(swizzle, *steps(swizzle, bool(trans[0]))):#x};\n"
    body += (
        f"or.b64 %rd2, %rd2, {descriptor(b_swizzle, *steps(b_swizzle, bool(trans[1]), 128 if n <= 128 else 0)):#x};\n"
    )
    body += load_words("p1", 0, d_words, 128)
    left = "%rd1"
    if source == "rs":
        inputs.append(words(elements(a, 512 * 4 // WIDTH[a], seed + 3, fill)))
        body += load_words("p2", 150, 4, 128)
        left = registers(150, 4)
    operands = [registers(0, d_words), left, "%rd2", "%p11"]
    if d != "s32":
        operands += [str(negative[0]), str(negative[1])]
    if WIDTH[a] == 2:
        operands += [str(trans[0])] if source == "ss" else []
        operands += [str(trans[1])]
    body += f"mov.pred %p11, {-1 if scale_d else 0};\nwgmma.fence.sync.aligned;\n"
    body += f"{text} {', '.join(operands)};\n" * chain
    body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" + store_words(0, d_words, 128)
    rule = rule_of(d, a, k * chain, fill, warpgroup=True)
    signs = ()
    if isinstance(rule, Sum):
        signs = ((0, SIGN[a]), (1, SIGN[d]), *(((2, SIGN[a]),) if source == "rs" else ()))
    return Case(
        name, body, tuple(inputs), (Result(text, np.zeros(128 * d_words, np.uint32), rule),), shared=SHARED, signs=signs
    )


def wgmma_cases() -> list[Case]:
    found = []
    halves, eights = ("f16", "bf16"), [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    integers = [(a, b) for a in ("s8", "u8") for b in ("s8", "u8")]
    spans = (0, 32, 64, 128)
    # Layouts: each swizzle with each major of both operands.
    for swizzle in spans:
        found += [
            wgmma_case(("f16", "f16", "f32"), 48, swizzle=swizzle, trans=(ta, tb)) for ta in (0, 1) for tb in (0, 1)
        ]
        found += [wgmma_case(("bf16", "bf16", "f32"), 96, swizzle=swizzle, trans=trans) for trans in ((0, 0), (1, 1))]
        found += [wgmma_case(("f16", "f16", "f16"), 16, swizzle=swizzle, source="rs", trans=(0, tb)) for tb in (0, 1)]
        found += [wgmma_case(("bf16", "bf16", "f32"), 72, swizzle=swizzle, source="rs", trans=(0, 1))]
        for source in ("ss", "rs"):
            found += [
                wgmma_case(("tf32", "tf32", "f32"), 24, swizzle=swizzle, source=source),
                wgmma_case(("e4m3", "e5m2", "f32"), 40, swizzle=swizzle, source=source),
                wgmma_case(("s8", "u8", "s32"), 32, swizzle=swizzle, source=source),
            ]
        found += [
            wgmma_case(
                ("f16", "f16", "f32"),
                24,
                swizzle=swizzle,
                b_swizzle={0: 128, 32: 64, 64: 32, 128: 0}[swizzle],
                trans=(1, 0),
            )
        ]
    # Later steps of K begin inside a pattern.
    for k_start in (32, 64, 96):
        found += [
            wgmma_case(("f16", "f16", "f32"), 16, k_start=k_start),
            wgmma_case(("tf32", "tf32", "f32"), 16, k_start=k_start),
            wgmma_case(("e4m3", "e4m3", "f16"), 16, k_start=k_start),
        ]
    found += [wgmma_case(("bf16", "bf16", "f32"), 16, swizzle=64, k_start=32)]
    # Sizes.
    found += [wgmma_case(("f16", "f16", "f32"), n) for n in (8, 16, 64, 104, 192, 256)]
    found += [
        wgmma_case(("bf16", "bf16", "f32"), 128, trans=(0, 1)),
        wgmma_case(("f16", "f16", "f16"), 136),
        wgmma_case(("e5m2", "e4m3", "f16"), 176),
        wgmma_case(("tf32", "tf32", "f32"), 152),
        wgmma_case(("u8", "s8", "s32"), 112),
        wgmma_case(("s8", "s8", "s32"), 8),
    ]
    # Signs and overwriting.
    for negative in ((-1, 1), (1, -1), (-1, -1)):
        found += [
            wgmma_case(("f16", "f16", "f32"), 8, negative=negative),
            wgmma_case(("bf16", "bf16", "f32"), 8, source="rs", negative=negative),
            wgmma_case(("tf32", "tf32", "f32"), 8, negative=negative),
            wgmma_case(("e5m2", "e5m2", "f32"), 8, negative=negative),
        ]
    found += [
        wgmma_case((a, b, d), 8, scale_d=False)
        for a, b, d in (
            ("f16", "f16", "f32"),
            ("f16", "f16", "f16"),
            ("tf32", "tf32", "f32"),
            ("e4m3", "e4m3", "f32"),
            ("u8", "u8", "s32"),
        )
    ]
    # Sums.
    for fill in ("wide", "special"):
        for kind in halves:
            found += [
                wgmma_case((kind, kind, "f32"), 16, fill=fill),
                wgmma_case((kind, kind, "f32"), 16, fill=fill, chain=4),
            ]
        found += [
            wgmma_case(("f16", "f16", "f16"), 16, fill=fill),
            wgmma_case(("tf32", "tf32", "f32"), 16, fill=fill),
            wgmma_case(("tf32", "tf32", "f32"), 16, fill=fill, source="rs"),
        ]
        found += [wgmma_case((a, b, d), 16, fill=fill) for a, b in eights for d in ("f32", "f16")]
    found += [
        wgmma_case(("e4m3", "e4m3", "f32"), 16, fill="wide", chain=8),
        wgmma_case(("e4m3", "e4m3", "f32"), 16, fill="wide", scale_d=False),
    ]
    found += [wgmma_case((a, b, "s32"), 16, fill="wide", satfinite=sat) for a, b in integers for sat in (False, True)]
    return found


def cases() -> list[Case]:
    return [*moves(), *mma_cases(), *wgmma_cases()]
