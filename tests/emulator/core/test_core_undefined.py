# SPDX-License-Identifier: Apache-2.0
"""What is computed from registers that were never written: how far it is undefined, and what is a use of it."""

import numpy as np
import pytest
from lanes import FULL, get, program, put, reg, warp

from emulator.core import Fault, FaultKind, Kind
from emulator.ptx.ir import BITS, Imm, Sink

LANES = list(range(32))
ODD, EVEN = 0xAAAAAAAA, 0x55555555
# Registers that hold something: one as wide as an operand may be, and amounts that shift by whole bytes.
GIVEN = {"%r1": 0x00FF0F00, "%r2": 16, "%r3": 8, "%rd1": 0x1234567800FF0000, "%rs1": 0x7F01, "%p1": 1, "%p2": 0,
         "%f1": 0x3F800000, "%rq1": 5}  # fmt: skip


def after(body: str, stops: bool = False):
    """The warp behind some lines; registers of number 0 and others that are not given were never written."""
    w = warp(body)
    for name, value in GIVEN.items():
        if name in w.program.registers:
            put(w, name, [value] * 32)
    assert w.run().kind is (Kind.TRAP if stops else Kind.DONE)
    return w


def defined(w, name: str) -> int:
    """Lanes in which a register is defined."""
    return int(w.init[w.program.row(name)])


# All of the result is undefined: in every lane, and in those alone in which a source is.
WHOLE = [
    "add.s32 %r5, %r0, %r1;",
    "add.s32 %r5, %r1, %r0;",
    "mad.lo.s32 %r5, %r1, %r1, %r0;",
    "mul.wide.u32 %rd5, %r0, %r1;",
    "min.s32 %r5, %r0, %r1;",
    "add.f32 %f5, %f0, %f1;",
    "fma.rn.f32 %f5, %f1, %f1, %f0;",
    "ex2.approx.f32 %f5, %f0;",
    "cvt.rn.f32.s32 %f5, %r0;",
    "cvt.rzi.s32.f32 %r5, %f0;",
    "cvt.sat.u8.s32 %rs5, %r0;",
    "setp.lt.s32 %p5, %r0, %r1;",
    "setp.lt.s32 %p5|%p6, %r0, %r1;",
    "setp.lt.f32 %p5, %f0, %f1;",
    "setp.lt.and.s32 %p5, %r0, %r1, %p1;",
    "setp.lt.or.s32 %p5, %r0, %r1, %p2;",
    "setp.lt.xor.s32 %p5, %r0, %r1, %p1;",
    "setp.lt.and.s32 %p5, %r1, %r1, %p0;",
    "set.lt.u32.s32 %r5, %r0, %r1;",
    "selp.b32 %r5, %r1, %r2, %p0;",
    "selp.b32 %r5, %r0, %r1, %p1;",
    "selp.b32 %r5, %r1, %r0, %p2;",
    "selp.b32 %r5, %r0, %r1, !%p2;",
    "slct.b32.s32 %r5, %r0, %r1, %r2;",
    "slct.b32.s32 %r5, %r1, %r1, %r0;",
    "mov.b32 %r5, %r0;",
    "mov.b64 %rd5, %rd0;",
    "mov.pred %p5, %p0;",
    "mov.pred %p5, !%p0;",
    "and.b32 %r5, %r0, %r1;",
    "or.b32 %r5, %r1, %r0;",
    "xor.b32 %r5, %r0, %r0;",
    "not.b32 %r5, %r0;",
    "not.pred %p5, %p0;",
    "and.pred %p5, %p0, %p1;",
    "or.pred %p5, %p0, %p2;",
    "lop3.b32 %r5, %r1, %r2, %r0, 0x96;",
    "shl.b32 %r5, %r0, 3;",
    "shl.b32 %r5, %r1, %r0;",
    "shr.s32 %r5, %r1, %r0;",
    "shf.l.wrap.b32 %r5, %r1, %r2, %r0;",
    "szext.clamp.u32 %r5, %r1, %r0;",
    "bfe.u32 %r5, %r1, %r0, 3;",
    "bfe.u32 %r5, %r1, 3, %r0;",
    "bfi.b32 %r5, %r1, %r2, %r0, 3;",
    "bfi.b32 %r5, %r1, %r2, 3, %r0;",
    "prmt.b32 %r5, %r1, %r2, %r0;",
    "div.s32 %r5, %r0, %r2;",
    "shfl.sync.bfly.b32 %r5|%p5, %r1, %r0, 31, -1;",
    "shfl.sync.bfly.b32 %r5|%p5, %r1, 1, %r0, -1;",
    "cvta.to.shared.u64 %rd5, %rd0;",
    "add.cc.u32 %r5, %r0, %r1; addc.u32 %r6, %r1, %r1;",
]


@pytest.mark.parametrize("line", WHOLE)
def test_an_undefined_source_makes_the_result_undefined(line):
    w = after(line)
    assert not w.faults()
    results = {name for name in w.program.registers if name[-1] in "56"}
    assert results
    assert {name: defined(w, name) for name in results} == dict.fromkeys(results, 0)


@pytest.mark.parametrize("line", WHOLE)
def test_only_in_its_lanes_and_until_it_is_written(line):
    w = warp(line)
    for name in w.program.registers - {"%r5", "%rd5", "%f5", "%p5", "%p6", "%rs5", "%r6"}:
        put(w, name, [GIVEN.get(name, 3)] * 32, ODD if name[-1] == "0" else FULL)
    w.run()
    results = {name for name in w.program.registers if name[-1] in "56"}
    assert {defined(w, name) for name in results} == {ODD}
    for name in results:
        put(w, name, [1] * 32)
    assert {defined(w, name) for name in results} == {FULL}


# The result does not depend on what is undefined.
UNAFFECTED = [
    ("selp.b32 %r5, %r1, %r0, %p1;", "%r5"),
    ("selp.b64 %rd5, %rd0, %rd1, %p2;", "%rd5"),
    ("selp.b32 %r5, %r1, %r0, !%p2;", "%r5"),
    ("slct.b32.s32 %r5, %r1, %r0, %r2;", "%r5"),
    ("setp.lt.and.s32 %p5, %r0, %r1, %p2;", "%p5"),
    ("setp.lt.and.s32 %p5, %r0, %r1, !%p1;", "%p5"),
    ("setp.lt.or.s32 %p5, %r0, %r1, %p1;", "%p5"),
    ("and.pred %p5, %p0, %p2;", "%p5"),
    ("and.pred %p5, !%p1, %p0;", "%p5"),
    ("or.pred %p5, %p1, %p0;", "%p5"),
    ("or.pred %p5, %p0, !%p2;", "%p5"),
    ("and.b32 %r5, %r0, 0;", "%r5"),
    ("or.b32 %r5, -1, %r0;", "%r5"),
    ("and.b64 %rd5, %rd0, 0;", "%rd5"),
    ("mov.b64 %rd5, {%r1, %r0}; mov.b64 {%r6, _}, %rd5;", "%r6"),
    ("mov.b64 %rd5, {%r0, %r1}; mov.b64 {_, %r6}, %rd5;", "%r6"),
    ("mov.b32 %r5, {%rs1, %rs0}; mov.b32 {%rs6, _}, %r5;", "%rs6"),
    ("mov.b128 %rq1, {%rd1, %rd0}; mov.b128 {%rd6, _}, %rq1;", "%rd6"),
    ("mov.b64 %rd5, {%r1, %r0}; mov.b64 %rd6, %rd5; mov.b64 {%r6, _}, %rd6;", "%r6"),
    ("mov.b64 %rd5, {%r1, %r0}; selp.b64 %rd6, %rd5, %rd0, %p1; mov.b64 {%r6, _}, %rd6;", "%r6"),
    ("mov.b64 %rd5, {%r1, %r0}; cvt.u32.u64 %r6, %rd5;", "%r6"),
    ("mov.b64 %rd5, {%r0, %r1}; shr.u64 %rd6, %rd5, 32;", "%rd6"),
    ("mov.b64 %rd5, {%r1, %r0}; shl.b64 %rd6, %rd5, 32;", "%rd6"),
    ("mov.b64 %rd5, {%r1, %r0}; add.rn.f32x2 %rd6, %rd5, %rd1; mov.b64 {%r6, _}, %rd6;", "%r6"),
    ("mov.b64 %rd5, {%r0, %r1}; fma.rn.f32x2 %rd6, %rd1, %rd1, %rd5; mov.b64 {_, %r6}, %rd6;", "%r6"),
    ("mov.b32 %r5, {%rs1, %rs0}; add.rn.bf16x2 %r6, %r5, %r1; mov.b32 {%rs6, _}, %r6;", "%rs6"),
    ("mov.b32 %r5, {%rs0, %rs1}; min.u16x2 %r6, %r5, %r1; mov.b32 {_, %rs6}, %r6;", "%rs6"),
    ("cvt.rn.bf16x2.f32 %r5, %f0, %f1; mov.b32 {%rs6, _}, %r5;", "%rs6"),
    ("cvt.rn.f16x2.f32 %r5, %f1, %f0; mov.b32 {_, %rs6}, %r5;", "%rs6"),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs5, %f0, %f1; cvt.u32.u16 %r5, %rs5; and.b32 %r6, %r5, 0xff;", "%r6"),
    ("mov.b32 %r5, {%rs0, %rs1}; cvt.rn.satfinite.e4m3x2.f16x2 %rs5, %r5; shr.u16 %rs6, %rs5, 8;", "%rs6"),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs5, %f1, %f0; cvt.rn.f16x2.e4m3x2 %r5, %rs5; mov.b32 {_, %rs6}, %r5;", "%rs6"),
    ("prmt.b32 %r5, %r1, %r0, 0x3210;", "%r5"),
    ("prmt.b32 %r5, %r1, %r0, 0xba98;", "%r5"),
    ("mov.b32 %r5, {%rs1, %rs0}; prmt.b32 %r6, %r5, %r1, 0x7610;", "%r6"),
    ("shl.b32 %r5, %r0, 32;", "%r5"),
    ("shr.u16 %rs5, %rs0, 8; shr.u16 %rs6, %rs5, 8;", "%rs6"),
    ("mov.b32 %r5, {%rs1, %rs0}; bfe.u32 %r6, %r5, 3, 12;", "%r6"),
    ("bfi.b32 %r5, %r0, %r1, 4, 0;", "%r5"),
    ("mov.b32 %r5, {%rs1, %rs0}; bfi.b32 %r6, %r1, %r5, 16, 16;", "%r6"),
    ("shf.l.clamp.b32 %r5, %r0, %r1, 0;", "%r5"),
    ("mov.b32 %r5, {%rs0, %rs1}; brev.b32 %r6, %r5; and.b32 %r7, %r6, 0xffff;", "%r7"),
    ("mov.b32 %r5, {%rs1, %rs0}; szext.clamp.s32 %r6, %r5, 16;", "%r6"),
    ("mov.b32 %r5, {%rs1, %rs0}; not.b32 %r6, %r5; mov.b32 {%rs6, _}, %r6;", "%rs6"),
    ("mov.b32 %r5, {%rs1, %rs0}; xor.b32 %r6, %r5, %r1; mov.b32 {%rs6, _}, %r6;", "%rs6"),
    ("mov.b32 %r5, {%rs1, %rs0}; lop3.b32 %r6, %r5, %r1, %r2, 0x96; mov.b32 {%rs6, _}, %r6;", "%rs6"),
]


@pytest.mark.parametrize(("lines", "result"), UNAFFECTED)
def test_what_does_not_depend_on_it_is_defined(lines, result):
    w = after(lines)
    assert not w.faults()
    assert defined(w, result) == FULL


# The other half, byte or bit.
PASSED_ON = [
    ("mov.b128 %rq1, %rq0;", "%rq1"),
    ("mov.b64 %rd5, {%r1, %r0}; mov.b64 {_, %r6}, %rd5;", "%r6"),
    ("mov.b64 %rd5, {%r1, %r0}; mov.b64 %rd6, %rd5;", "%rd6"),
    ("mov.b64 %rd5, {%r0, %r1}; cvt.u32.u64 %r6, %rd5;", "%r6"),
    ("mov.b32 %r5, {%rs1, %rs0}; add.rn.bf16x2 %r6, %r5, %r1; mov.b32 {_, %rs6}, %r6;", "%rs6"),
    ("mov.b64 %rd5, {%r0, %r1}; add.rn.f32x2 %rd6, %rd5, %rd1; mov.b64 {%r6, _}, %rd6;", "%r6"),
    (
        "mov.b32 %r5, {%rs0, %rs1}; mov.b64 %rd5, {%r5, %r1}; add.rn.f32x2 %rd6, %rd5, %rd1; mov.b64 {%r6, _}, %rd6;"
        "mov.b32 {_, %rs6}, %r6;",
        "%rs6",
    ),
    ("cvt.rn.bf16x2.f32 %r5, %f0, %f1; mov.b32 {_, %rs6}, %r5;", "%rs6"),
    ("cvt.rn.bf16x2.f32 %r5, %f1, %f0; mov.b32 {%rs6, _}, %r5;", "%rs6"),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs5, %f0, %f1; shr.u16 %rs6, %rs5, 8;", "%rs6"),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs5, %f0, %f1; cvt.rn.f16x2.e4m3x2 %r5, %rs5; mov.b32 {_, %rs6}, %r5;", "%rs6"),
    ("mov.b32 %r5, {%rs1, %rs0}; cvt.rn.satfinite.e4m3x2.f16x2 %rs5, %r5; shr.u16 %rs6, %rs5, 8;", "%rs6"),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs5, %f1, %f0; cvt.rn.f16x2.e4m3x2 %r5, %rs5; mov.b32 {%rs6, _}, %r5;", "%rs6"),
    ("prmt.b32 %r5, %r1, %r0, 0x3214;", "%r5"),
    ("prmt.b32 %r5, %r1, %r0, 0x321c;", "%r5"),
    ("cvt.s32.s16 %r5, %rs0; and.b32 %r6, %r5, 0x80000000;", "%r6"),
    ("mov.b32 %r5, {%rs1, %rs0}; shr.s32 %r6, %r5, 16;", "%r6"),
    ("and.b32 %r5, %r0, 1;", "%r5"),
    ("or.b32 %r5, %r0, 0xfffffffe;", "%r5"),
    ("mov.b128 %rq1, {%rd1, %rd0}; mov.b128 {_, %rd6}, %rq1;", "%rd6"),
    ("mov.v2.u32 {%r5, %r6}, {%r1, %r0};", "%r6"),
    ("mov.v2.u32 {%r6, %r5}, {%r0, %r1};", "%r6"),
]


@pytest.mark.parametrize(("lines", "result"), PASSED_ON)
def test_what_depends_on_it_is_undefined(lines, result):
    w = after(lines)
    assert not w.faults()
    assert defined(w, result) == 0


def test_vectors_of_which_one_part_is_undefined_keep_the_other():
    w = after("mov.v2.u32 {%r5, %r6}, {%r1, %r0};")
    assert (defined(w, "%r5"), defined(w, "%r6")) == (FULL, 0)


def test_a_vector_put_together_in_place():
    body = """mov.b64 {_, %r5}, %rd5; mov.b64 %rd5, {%r1, %r5}; mov.b64 {%r6, _}, %rd5; mov.b64 %rd5, {%r6, %r2};
    @%p1 st.local.b64 [s], %rd5;"""
    w = after(".local .align 8 .b8 s[8]; " + body)
    assert not w.faults()
    assert get(w, "%rd5") == [GIVEN["%r1"] | GIVEN["%r2"] << 32] * 32


def test_a_destination_that_is_a_source():
    w = after("add.s32 %r0, %r0, 1; mov.b32 %r5, %r0; mov.b32 %r0, 1; add.s32 %r0, %r0, 1; prmt.b32 %r8, %r1, %r1, %r8;"
              "mov.b64 {%r6, %r7}, %rd0; mov.b64 %rd1, {%r6, %r1};")  # fmt: skip
    assert not w.faults()
    assert (defined(w, "%r5"), defined(w, "%r0"), defined(w, "%r8")) == (0, FULL, 0)
    assert defined(w, "%rd1") == 0


def test_lanes_whose_guard_is_false_keep_what_they_had():
    w = warp("@%p1 mov.b32 %r5, %r0; @!%p1 mov.b32 %r6, %r0; @%p1 mov.b64 %rd5, %rd0;")
    put(w, "%p1", [lane & 1 for lane in LANES])
    for name in ("%r5", "%rd5"):
        put(w, name, [1] * 32)
    w.run()
    assert (defined(w, "%r5"), defined(w, "%r6"), defined(w, "%rd5")) == (EVEN, 0, EVEN)
    assert get(w, "%r5")[::2] == [1] * 16
    w = warp("mov.b64 %rd5, {%r1, %r0}; @%p1 mov.b64 %rd5, %rd0; mov.b64 {%r5, %r6}, %rd5;")
    put(w, "%p1", [lane & 1 for lane in LANES])
    put(w, "%r1", LANES)
    w.run()
    assert (defined(w, "%r5"), defined(w, "%r6")) == (EVEN, 0)


def test_what_was_defined_becomes_undefined_and_defined_again():
    """Bits that were known are not remembered for the next value."""
    w = after("mov.b64 %rd5, {%r1, %r0}; mov.b64 %rd5, %rd0; mov.b64 {%r5, _}, %rd5; mov.b64 %rd5, 1; "
              "mov.b64 {%r6, %r7}, %rd5; add.s64 %rd5, %rd5, %rd0; mov.b64 {%r8, _}, %rd5;")  # fmt: skip
    assert [defined(w, name) for name in ("%r5", "%r6", "%r7", "%r8")] == [0, FULL, FULL, 0]


def test_a_shuffle_takes_the_bits_of_the_source_lane():
    w = warp("shfl.sync.bfly.b32 %r5|%p5, %r0, 1, 31, -1; shfl.sync.idx.b32 %r6, %r0, 1, 31, -1;")
    put(w, "%r0", LANES, EVEN)
    w.run()
    assert not w.faults()
    assert (defined(w, "%r5"), defined(w, "%p5"), defined(w, "%r6")) == (ODD, FULL, 0)
    w = warp("mov.b32 %r5, {%rs1, %rs0}; shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1; mov.b32 {%rs5, %rs6}, %r6;")
    put(w, "%rs1", [1] * 32)
    w.run()
    assert (defined(w, "%rs5"), defined(w, "%rs6")) == (FULL, 0)


def test_a_shuffle_from_a_lane_that_takes_no_part_is_undefined():
    w = warp("@%p1 shfl.sync.idx.b32 %r5, %r1, %r2, 31, 0xffff;")
    put(w, "%p1", [int(lane < 16) for lane in LANES])
    put(w, "%r1", LANES)
    put(w, "%r2", [lane + (lane % 2) * 16 for lane in LANES])
    w.run()
    assert not w.faults()
    assert defined(w, "%r5") == EVEN & 0xFFFF


def test_a_reduction_of_lanes_is_undefined_in_all_that_take_part():
    w = warp("@%p1 redux.sync.add.s32 %r5, %r1, 0xffff; redux.sync.max.s32 %r6, %r2, -1;")
    put(w, "%p1", [int(lane < 16) for lane in LANES])
    put(w, "%r5", LANES)
    put(w, "%r1", LANES, FULL & ~(1 << 3))
    put(w, "%r2", LANES)
    w.run()
    assert not w.faults()
    assert (defined(w, "%r5"), defined(w, "%r6")) == (0xFFFF0000, FULL)


def test_a_reduction_is_defined_where_only_others_are_not():
    w = warp("@%p1 redux.sync.add.s32 %r5, %r1, 0xffff;")
    put(w, "%p1", [int(lane < 16) for lane in LANES])
    put(w, "%r1", LANES, 0xFFFF)
    w.run()
    assert defined(w, "%r5") == 0xFFFF
    assert set(get(w, "%r5")[:16]) == {120}


USES = [
    ("@%p0 mov.b32 %r5, 1;", "%p0"),
    ("@!%p0 bra L; mov.b32 %r5, 1; L:", "%p0"),
    ("setp.eq.s32 %p5, %r0, 1; @%p5 exit;", "%p5"),
    ("TABLE: .branchtargets A, B; brx.idx %r0, TABLE; A: B: mov.b32 %r5, 1;", "%r0"),
    ("vote.sync.ballot.b32 %r5, %p0, -1;", "%p0"),
    ("vote.sync.any.pred %p5, %p0, -1;", "%p0"),
    ("match.any.sync.b32 %r5, %r0, -1;", "%r0"),
    ("div.s32 %r5, %r1, %r0;", "%r0"),
    ("div.u32 %r5, %r1, %r0;", "%r0"),
    ("rem.u64 %rd5, %rd1, %rd0;", "%rd0"),
    (".local .b32 s; st.local.b32 [s], %r0;", "%r0"),
    (".local .align 8 .b8 s[8]; st.local.v2.b32 [s], {%r1, %r0};", "%r0"),
    (".local .b32 s; ld.local.b32 %r5, [%rd0];", "%rd0"),
    (".local .b32 s; st.local.b32 [%rd0], %r1;", "%rd0"),
    (".local .align 8 .b8 s[8]; mov.b64 %rd5, {%r1, %r0}; st.local.b64 [s], %rd5;", "%rd5"),
]


@pytest.mark.parametrize(("lines", "register"), USES)
def test_uses(lines, register):
    w = after(lines)
    index = max(k for k, instr in enumerate(w.program.instrs) if register in str(instr))
    assert w.faults() == [Fault(index, FaultKind.UNWRITTEN, register, FULL)]


def test_what_a_use_gives_is_not_reported_again():
    w = after("vote.sync.ballot.b32 %r5, %p0, -1; div.s32 %r6, %r1, %r0; setp.eq.s32 %p5, %r5, %r6; @%p5 exit;")
    assert [fault.index for fault in w.faults()] == [0, 1]


def test_member_masks_are_used():
    for line in (
        "bar.warp.sync %r0;",
        "redux.sync.add.s32 %r5, %r1, %r0;",
        "shfl.sync.bfly.b32 %r5, %r1, 1, 31, %r0;",
        "elect.sync _|%p5, %r0;",
    ):
        w = warp(line)
        put(w, "%r0", [FULL] * 32, ODD)
        w.rows[w.program.row("%r0")] = FULL
        if "%r1" in w.program.registers:
            put(w, "%r1", [0] * 32)
        w.run()
        assert w.faults() == [Fault(0, FaultKind.UNWRITTEN, "%r0", EVEN)], line


def test_operands_of_traps_are_used():
    w = after("mov.b64 %rd5, {%r1, %r0}; add.s32 %r5, %r0, 1; mov.b32 %r6, 1;")
    w.u32(reg("%r6"))
    w.u32(reg("%r5"))
    w.u64(reg("%rd5"))
    assert not w.faults()  # no lane executes any more
    w = warp("mov.b64 %rd5, {%r1, %r0}; add.s32 %r5, %r0, 1; mov.b32 %r6, 1; st.shared.b64 [%r6], %rd5;")
    put(w, "%r1", [1] * 32)
    put(w, "%r0", [1] * 32, ODD)
    store = w.program.instrs[w.run().index]
    w.address(store["a"])
    assert not w.faults()
    w.u64(store["b"])
    w.u32(reg("%r5"))
    wanted = [Fault(3, FaultKind.UNWRITTEN, name, EVEN) for name in ("%rd5", "%r5")]
    assert w.faults() == wanted


NARROW = {
    "b8": ("mov.b32 %r5, {%rs1, %rs0};", "%r5"),
    "b16": ("mov.b32 %r5, {%rs1, %rs0};", "%r5"),
    "b32": ("mov.b64 %rd5, {%r1, %r0};", "%rd5"),
}


@pytest.mark.parametrize(
    ("space", "kind"), [("local", "b8"), ("local", "b16"), ("shared", "b8"), ("shared", "b16"), ("shared", "b32")]
)
def test_a_store_uses_as_much_as_it_stores(kind, space):
    """Conversions to 8 bits leave the rest of a register open, and are stored by the byte."""
    make, name = NARROW[kind]
    for high, faults in ((False, []), (True, [(FaultKind.UNWRITTEN, name, FULL)])):
        swapped = make.replace("s1, %rs0", "s0, %rs1").replace("{%r1, %r0}", "{%r0, %r1}") if high else make
        w = after(f".{space} .align 8 .b8 s[8]; {swapped} st.{space}.{kind} [s], {name};", stops=space == "shared")
        if space == "shared":
            store = w.program.instrs[w.event.index]["b"]
            assert w.defined(store, BITS[kind]) == (0 if high else FULL)
            w.u32(store, BITS[kind])
        assert [(one.kind, one.register, one.lanes) for one in w.faults()] == faults


def test_a_store_of_the_whole_uses_the_whole():
    w = after("mov.b32 %r5, {%rs1, %rs0}; st.shared.b32 [%r1], %r5;", stops=True)
    w.u32(w.program.instrs[w.event.index]["b"], 32)
    assert [one.register for one in w.faults()] == ["%r5"]


def test_one_value_of_some_lanes_uses_those_lanes():
    w = warp("st.shared.b64 [%r1], %rd1;")
    put(w, "%r1", LANES, ODD)
    put(w, "%rd1", [7] * 32, 0xF0)
    w.run()
    assert (w.uniform(reg("%r1"), ODD & 0xF0), w.uniform(reg("%rd1"), 0xF0)) == (5, 7)
    assert not w.faults()
    w.uniform(reg("%r1"), 0xF0)
    assert w.faults() == [Fault(0, FaultKind.UNWRITTEN, "%r1", 0x50)]


def test_the_machine_takes_away_what_a_register_holds():
    w = warp("ld.shared.b64 %rd1, [%r1]; mov.b64 {%r5, %r6}, %rd1; st.shared.b32 [%r1], %r5;")
    put(w, "%r1", [0] * 32)
    load = w.program.instrs[w.run().index]
    w.put64(load["d"], 7)
    w.undefine(load["d"], ODD)
    w.undefine(Sink(), ODD)
    w.advance()
    store = w.program.instrs[w.run().index]
    assert (w.defined(store["b"]), w.defined(Imm(1)), defined(w, "%r6")) == (EVEN, FULL, EVEN)
    assert get(w, "%rd1") == [7] * 32
    assert [fault.register for fault in w.faults()] == ["%rd1"]
    w.undefine(reg("%r5"), FULL)
    assert w.defined(reg("%r5")) == 0
    assert not w.faults()
    # Bits that were known before are not any more.
    w = after("mov.b64 %rd5, {%r1, %r0}; st.shared.b32 [%r1], 1;", stops=True)
    w.undefine(reg("%rd5"), FULL)
    w.advance()
    assert not w._known[w.program.row("%rd5") : w.program.row("%rd5") + 2].any()


def test_widths_of_registers():
    made = program("mov.b64 %rd1, 5; mov.b16 %rs1, 3; mov.pred %p1, 1; mov.b128 %rq1, %rq0; mov.b32 %r1, 7;")
    found = {name: int(made.widths[made.row(name)]) for name in made.registers}
    assert found == {"%rd1": 64, "%rs1": 16, "%p1": 1, "%rq1": 128, "%rq0": 128, "%r1": 32}
    assert made.widths.dtype == np.uint8
