# SPDX-License-Identifier: Apache-2.0
"""Moves, packing, selection, comparison, permutation, addresses, parameters, special registers, local memory."""

import random
import struct

import numpy as np
import pytest
from lanes import FULL, get, program, put, reg, run, samples, signed, tuples, warp

from emulator.core import LOCAL_BASE, PARAM_BASE, SHARED_BASE, Kind
from emulator.errors import Unsupported
from emulator.ptx.ir import BITS

LANES = list(range(32))


def test_moves():
    a, b = samples(32), samples(64)[: len(samples(32))]
    inputs = {"%r2": a, "%rd2": b, "%rs2": [v & 0xFFFF for v in a], "%p2": [v & 1 for v in a], "%f2": a}
    body = "mov.b32 %r1, %r2; mov.u64 %rd1, %rd2; mov.b16 %rs1, %rs2; mov.pred %p1, %p2; mov.f32 %f1, %f2;"
    assert run(body, inputs, ["%r1", "%rd1", "%rs1", "%p1", "%f1"]) == list(inputs.values())
    constants = (
        "mov.b32 %r1, -2; mov.u64 %rd1, 0x123456789; mov.f32 %f1, 0f3F800000; mov.b16 %rs1, -1; mov.pred %p1, 1;"
    )
    found = run("add.s32 %r9, %r2, 0;" + constants, {"%r2": [1]}, ["%r1", "%rd1", "%f1", "%rs1", "%p1"])
    assert found == [[0xFFFFFFFE], [0x123456789], [0x3F800000], [0xFFFF], [1]]
    wide = [v << 64 | w for v, w in zip(samples(64), samples(64, seed=1), strict=True)]
    assert run("mov.b128 %rq1, %rq0;", {"%rq0": wide}, ["%rq1"]) == [wide]


PACKS = [
    (2, "b32", "%rs", "%r"),
    (2, "b64", "%r", "%rd"),
    (4, "b64", "%rs", "%rd"),
    (2, "b128", "%rd", "%rq"),
    (4, "b128", "%r", "%rq"),
]


@pytest.mark.parametrize(("count", "kind", "part", "whole"), PACKS)
def test_packing(count, kind, part, whole):
    bits = BITS[kind] // count
    columns = [samples(bits, 64, seed=k) for k in range(count)]
    names = [f"{part}{k + 1}" for k in range(count)]
    wanted = [sum(v << k * bits for k, v in enumerate(row)) for row in zip(*columns, strict=True)]
    inputs = dict(zip(names, columns, strict=True))
    assert run(f"mov.{kind} {whole}0, {{{', '.join(names)}}};", inputs, [f"{whole}0"]) == [wanted]
    assert run(f"mov.{kind} {{{', '.join(names)}}}, {whole}0;", {f"{whole}0": wanted}, names) == columns
    sinks = ["_"] * (count - 1)
    for place, parts in ((0, [names[0], *sinks]), (count - 1, [*sinks, names[0]])):
        found = run(f"mov.{kind} {{{', '.join(parts)}}}, {whole}0;", {f"{whole}0": wanted}, names[:1])
        assert found == columns[place : place + 1]


def test_packing_of_bytes_and_in_place():
    a = samples(16)
    low, high = run("mov.b16 {%rs2, %rs3}, %rs1;", {"%rs1": a}, ["%rs2", "%rs3"])
    assert (low, high) == ([v & 0xFF for v in a], [v >> 8 for v in a])
    assert run("mov.b16 %rs1, {%rs2, %rs3};", {"%rs2": low, "%rs3": high}, ["%rs1"]) == [a]
    x, y = samples(32), samples(32, seed=1)
    assert run("mov.b64 %rd1, {%r1, %r2}; mov.b64 {%r2, %r1}, %rd1;", {"%r1": x, "%r2": y}, ["%r1", "%r2"]) == [y, x]
    assert run("mov.v2.u32 {%r1, %r2}, {%r2, %r1};", {"%r1": x, "%r2": y}, ["%r1", "%r2"]) == [y, x]
    assert run("mov.b64 %rd1, {%r1, 7};", {"%r1": x}, ["%rd1"]) == [[v | 7 << 32 for v in x]]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "f32", "s64"])
def test_selection(kind):
    bits = BITS[kind]
    r = {16: "%rs", 32: "%r", 64: "%rd"}[bits]
    a, b = tuples(bits, bits)
    p = [v & 1 for v in a]
    inputs = {f"{r}2": a, f"{r}3": b, "%p1": p}
    chosen = [x if c else y for x, y, c in zip(a, b, p, strict=True)]
    assert run(f"selp.{kind} {r}1, {r}2, {r}3, %p1;", inputs, [f"{r}1"]) == [chosen]
    other = [y if c else x for x, y, c in zip(a, b, p, strict=True)]
    assert run(f"selp.{kind} {r}1, {r}2, {r}3, !%p1;", inputs, [f"{r}1"]) == [other]


def test_selection_by_sign():
    c = [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0x80000001, 0xFF800000, 0x7F800000]
    inputs = {"%r2": [1] * 8, "%r3": [2] * 8, "%r4": c, "%f1": c, "%rd2": [1] * 8, "%rd3": [2] * 8}
    assert run("slct.b32.s32 %r1, %r2, %r3, %r4;", inputs, ["%r1"]) == [[1, 1, 2, 2, 1, 2, 2, 1]]
    # -0 is not less than 0; NaN is neither; a negative subnormal counts unless it is flushed.
    assert run("slct.b32.f32 %r1, %r2, %r3, %f1;", inputs, ["%r1"]) == [[1, 1, 2, 1, 2, 2, 2, 1]]
    assert run("slct.ftz.u64.f32 %rd1, %rd2, %rd3, %f1;", inputs, ["%rd1"]) == [[1, 1, 2, 1, 2, 1, 2, 1]]


ORDERS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("cmp", [*ORDERS, *UNSIGNED_NAMES])
def test_integer_comparisons(cmp):
    for kind in ("u16", "u32", "u64", "s16", "s32", "s64", "b32"):
        if (cmp in UNSIGNED_NAMES and kind[0] != "u") or (kind[0] == "b" and cmp not in ("eq", "ne")):
            continue
        bits = BITS[kind]
        r = {16: "%rs", 32: "%r", 64: "%rd"}[bits]
        a, b = tuples(bits, bits)
        c = [v & 1 for v in b]
        order = ORDERS[UNSIGNED_NAMES.get(cmp, cmp)]
        of = (lambda v, n=bits: signed(v, n)) if kind[0] == "s" else (lambda v: v)
        holds = [int(order(of(x), of(y))) for x, y in zip(a, b, strict=True)]
        inputs = {f"{r}2": a, f"{r}3": b, "%p1": c}
        assert run(f"setp.{cmp}.{kind} %p2, {r}2, {r}3;", inputs, ["%p2"]) == [holds]
        for name, join in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y), ("xor", lambda x, y: x ^ y)):
            p, q = run(f"setp.{cmp}.{name}.{kind} %p2|%p3, {r}2, {r}3, %p1;", inputs, ["%p2", "%p3"])
            assert p == [join(h, k) for h, k in zip(holds, c, strict=True)]
            assert q == [join(1 - h, k) for h, k in zip(holds, c, strict=True)]
        (q,) = run(f"setp.{cmp}.and.{kind} _|%p3, {r}2, {r}3, !%p1;", inputs, ["%p3"])
        assert q == [(1 - h) & (1 - k) for h, k in zip(holds, c, strict=True)]
        body = f"set.{cmp}.u32.{kind} %r9, {r}2, {r}3; set.{cmp}.xor.f32.{kind} %f1, {r}2, {r}3, %p1;"
        ones, real = run(body, inputs, ["%r9", "%f1"])
        assert ones == [FULL * h for h in holds]
        assert real == [0x3F800000 * (h ^ k) for h, k in zip(holds, c, strict=True)]


def test_byte_permutation():
    a, b = 0x33221100, 0x77665544
    # A selector's fourth bit repeats the byte's sign (9.7.9.7).
    inputs = {"%r2": [0x00FF7F80], "%r3": [0x81], "%r4": [0xC89A]}
    assert run("prmt.b32 %r1, %r2, %r3, %r4;", inputs, ["%r1"]) == [[0xFFFF00FF]]
    tables = {
        "": [0x3210, 0x7654, 0x0123, 0x5555],
        "f4e": [0x3210, 0x4321, 0x5432, 0x6543],
        "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
        "rc8": [0x0000, 0x1111, 0x2222, 0x3333],
        "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
        "ecr": [0x0000, 0x1110, 0x2210, 0x3210],
        "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
    }
    for mode, table in tables.items():
        selectors = table if not mode else [0, 1, 2, 3]
        wanted = [sum(0x11 * (word >> 4 * k & 7) << 8 * k for k in range(4)) for word in table]
        inputs = {"%r2": [a] * 4, "%r3": [b] * 4, "%r4": selectors}
        found = run(f"prmt.b32{'.' + mode if mode else ''} %r1, %r2, %r3, %r4;", inputs, ["%r1"])
        assert found == [wanted], mode


def test_special_registers():
    specials = {("%tid", "x"): np.arange(32, dtype=np.uint32) + 64, ("%ctaid", "y"): 7, ("%gridid", None): 1 << 40}
    specials |= {("%is_explicit_cluster", None): 1}
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %laneid; mov.u64 %rd1, %gridid;
    mov.pred %p1, %is_explicit_cluster; mov.u32 %r4, %lanemask_lt; mov.u32 %r5, %lanemask_ge; mov.u32 %r6, %lanemask_le;
    mov.u32 %r7, %lanemask_eq; mov.u32 %r8, %lanemask_gt; add.s32 %r9, %r1, 0;"""
    w = warp(body, specials=specials)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [64 + lane for lane in LANES]
    assert get(w, "%r2") == [7] * 32
    assert get(w, "%r3") == LANES
    assert get(w, "%rd1") == [1 << 40] * 32
    assert get(w, "%p1") == [1] * 32
    assert get(w, "%r4") == [(1 << lane) - 1 for lane in LANES]
    assert get(w, "%r5") == [FULL & ~((1 << lane) - 1) for lane in LANES]
    assert get(w, "%r6") == [(2 << lane) - 1 for lane in LANES]
    assert get(w, "%r7") == [1 << lane for lane in LANES]
    assert get(w, "%r8") == [FULL & ~((2 << lane) - 1) for lane in LANES]
    with pytest.raises(Unsupported, match=r"special register %smid"):
        warp("mov.u32 %r1, %smid;")


def test_clocks_count_instructions():
    body = """mov.u32 %r1, %clock; mov.u64 %rd1, %clock64; mov.b32 %r2, 0; mov.u64 %rd2, %globaltimer;
    mov.u32 %r3, %clock_hi;"""
    w = warp(body)
    w.run(1)
    w.run()
    assert get(w, "%r1")[0] == 1
    assert get(w, "%rd1")[0] == 2
    assert get(w, "%rd2") == [4] * 32
    assert get(w, "%r3") == [0] * 32


PARAMS = ".param .u64 a, .param .align 8 .b8 b[16], .param .u16 c, .param .f32 d"


def test_parameters():
    blob = struct.pack("<QiI8sHxxf", 0x1122334455667788, -5, 7, b"abcdefgh", 0xFFFE, 1.5)
    body = """ld.param.u64 %rd1, [a]; ld.param.b32 %r1, [b]; ld.param.v2.b32 {%r2, %r3}, [b]; ld.param.u16 %rs1, [c];
    ld.param.s16 %r4, [c]; ld.param.f32 %f1, [d]; ld.param.b8 %rs2, [b+8]; mov.b64 %rd2, b; ld.param.b32 %r5, [%rd2+4];
    ld.param.s8 %rs3, [c]; ld.param.u32 %rd3, [b]; ld.param.s32 %rd4, [b];"""
    made = program(body, params=PARAMS)
    w = warp(made, parameters=blob)
    assert w.run().kind is Kind.DONE
    one = {name: get(w, name)[9] for name in made.registers}
    assert one["%rd1"] == 0x1122334455667788
    assert (one["%r1"], one["%r2"], one["%r3"], one["%r5"]) == (0xFFFFFFFB, 0xFFFFFFFB, 7, 7)
    assert (one["%rs1"], one["%r4"], one["%rs2"], one["%rs3"]) == (0xFFFE, 0xFFFFFFFE, ord("a"), 0xFFFE)
    assert one["%f1"] == 0x3FC00000
    assert (one["%rd3"], one["%rd4"]) == (0xFFFFFFFB, 0xFFFFFFFFFFFFFFFB)
    assert one["%rd2"] == PARAM_BASE + 8
    assert not w.faults()


def test_generic_addresses():
    before = ".shared .align 16 .b8 one[20];\n.extern .shared .align 128 .b8 many[];\n.visible .global .align 4 .b32 g;"
    body = """mov.b32 %r1, one; mov.b32 %r2, many; mov.b64 %rd1, many; cvta.shared.u64 %rd2, %rd1;
    cvta.to.shared.u64 %rd3, %rd2; mapa.shared::cluster.u32 %r3, %r2, 3; mapa.u64 %rd4, %rd2, 3;
    getctarank.shared::cluster.u32 %r4, %r3; getctarank.u64 %r5, %rd4; mov.b64 %rd5, g; cvta.global.u64 %rd6, %rd5;
    isspacep.shared %p1, %rd4; isspacep.shared::cluster %p2, %rd4; isspacep.shared::cta %p3, %rd2;
    isspacep.global %p4, %rd5; isspacep.global %p5, %rd2; and.b32 %r6, %r2, 0xFEFFFFFF; isspacep.local %p6, %rd2;
    mov.b32 %r7, many+8;"""
    made = program(body, before=before)
    assert made.shared == {"one": 0, "many": 128}
    assert made.shared_static == 128
    assert made.shared_layout(1000) == (made.shared, 1128)
    assert [v.name for v in made.globals] == ["g"]
    w = warp(made, window=1 << 24, addresses={"g": 0x7F0000001230})
    assert w.run().kind is Kind.DONE
    one = {name: get(w, name)[31] for name in made.registers}
    own = 1 << 24
    assert (one["%r1"], one["%r2"], one["%r7"]) == (own, own + 128, own + 136)
    assert (one["%rd2"], one["%rd3"]) == (SHARED_BASE + own + 128, own + 128)
    assert (one["%r3"], one["%rd4"]) == (3 << 24 | 128, SHARED_BASE + (3 << 24) + 128)
    assert (one["%r4"], one["%r5"]) == (3, 3)
    assert one["%rd6"] == 0x7F0000001230
    assert [one[f"%p{k}"] for k in range(1, 7)] == [0, 1, 1, 1, 0, 0]
    assert one["%r6"] == 128  # the leader of the pair
    with pytest.raises(Unsupported, match="the address of g"):
        warp(made)


def test_an_address_of_a_parameter_in_32_bits():
    """As Triton takes it of a tensor map: `mov.b32` cuts the address, and `cvta` makes it generic again."""
    body = """mov.b32 %r1, b; cvt.u64.u32 %rd1, %r1; cvta.param.u64 %rd2, %rd1;
    mov.b64 %rd3, b; cvta.param.u64 %rd4, %rd3;"""
    made = program(body, params=PARAMS)
    for base in (0x7F0012345640, 0x7FFFFFFFFFF8):
        w = warp(made, parameters=bytes(32), param_base=base)
        assert w.run().kind is Kind.DONE
        assert get(w, "%rd2") == get(w, "%rd4") == [base + 8] * 32


def test_local_memory():
    body = """.local .align 16 .b8 stack[64];
    mov.b64 %rd1, stack; cvta.local.u64 %rd2, %rd1; mov.u32 %r1, %laneid; mov.b32 %r2, 77;
    st.local.v2.b32 [stack+8], {%r1, %r2}; ld.local.b64 %rd3, [%rd1+8]; add.s64 %rd4, %rd2, 8; ld.b32 %r3, [%rd4+4];
    st.b16 [%rd2], 0xBEEF; ld.local.s16 %r4, [stack]; ld.local.v4.b32 {%r5, %r6, %r7, %r8}, [stack];
    cvta.to.local.u64 %rd5, %rd2;"""
    w = warp(body)
    assert w.run().kind is Kind.DONE
    assert get(w, "%rd3") == [lane | 77 << 32 for lane in LANES]
    assert get(w, "%r3") == [77] * 32
    assert get(w, "%r4") == [0xFFFFBEEF] * 32
    assert get(w, "%r7") == LANES
    assert get(w, "%rd2") == [LOCAL_BASE] * 32
    assert get(w, "%rd5") == [0] * 32
    assert w.local[5, 8:16].tolist() == [5, 0, 0, 0, 77, 0, 0, 0]
    assert not w.faults()


def test_local_memory_of_masked_lanes_stays():
    body = """.local .align 4 .b8 s[8]; mov.b32 %r1, 5; @%p1 st.local.b32 [s], %r1; mov.b32 %r2, 9;
    @%p1 ld.local.b32 %r2, [s];"""
    w = warp(body)
    put(w, "%p1", [lane & 1 for lane in LANES])
    w.run()
    assert get(w, "%r2") == [5 if lane & 1 else 9 for lane in LANES]
    assert w.local[::2].sum() == 0


def test_local_memory_out_of_bounds_or_misaligned_is_the_machines():
    for address, kind in (("s+12", Kind.DONE), ("s+2", Kind.TRAP), ("s+16", Kind.TRAP), ("s-4", Kind.TRAP)):
        w = warp(f".local .align 4 .b8 s[16]; mov.b32 %r1, 5; st.local.b32 [{address}], %r1;")
        assert w.run().kind is kind, address


def test_calls_pass_parameters_in_local_memory():
    before = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);"
    body = """{ .param .b64 p0; .param .b64 p1; .param .b32 q;
    mov.b64 %rd1, 5; st.param.b64 [p0], %rd1; st.param.b64 [p1], 6; call.uni (q), vprintf, (p0, p1);
    ld.param.b32 %r1, [q]; }"""
    made = program(body, before=before)
    w = warp(made)
    event = w.run()
    assert made.instrs[event.index].op.name == "call"
    names = {name.partition("$")[0]: at for name, at in made.locals.items()}
    assert w.local[3, names["p1"]] == 6
    w.local[:, names["q"]] = 42
    w.advance()
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [42] * 32


def test_b128_and_random_masks():
    """Lanes whose guard is false keep what they have, in registers of every width."""
    rng = random.Random(7)
    body = """@%p1 mov.b32 %r1, 1; @!%p1 mov.b64 %rd1, 2; @%p1 mov.b128 %rq1, {%rd2, %rd2};
    @%p1 setp.eq.b32 %p2, %r2, %r2;
    @%p1 add.f32 %f1, %f2, %f2; @!%p1 mov.b64 {%r3, %r4}, %rd2; @%p1 fma.rn.f32x2 %rd3, %rd2, %rd2, %rd2;"""
    made = program(body)
    for _ in range(8):
        mask = rng.getrandbits(32)
        w = warp(made)
        put(w, "%p1", [mask >> lane & 1 for lane in LANES])
        for name in made.registers - {"%p1"}:
            put(w, name, [3 if name != "%p2" else 0] * 32)
        w.run()
        for lane in LANES:
            yes = mask >> lane & 1
            one = {name: get(w, name)[lane] for name in ("%r1", "%rd1", "%rq1", "%p2", "%r3", "%r4", "%rd3")}
            assert one["%r1"] == (1 if yes else 3)
            assert one["%rd1"] == (3 if yes else 2)
            assert one["%rq1"] == (3 << 64 | 3 if yes else 3)
            assert one["%p2"] == yes
            assert (one["%r3"], one["%r4"]) == ((3, 3) if yes else (3, 0))
            assert one["%rd3"] == 3
        assert reg("%p1").type == "pred"
