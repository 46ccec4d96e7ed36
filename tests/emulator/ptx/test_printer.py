# SPDX-License-Identifier: Apache-2.0
"""Nothing is lost between text and module: what is printed is read as the same module."""

import pytest
from snippets import kernel, module, text

from emulator.ptx import parse, show, show_instr
from emulator.ptx.printer import without_instr

BODIES = {
    "scopes": "{ .reg .pred P; .reg .b32 t<3>; A: setp.eq.s32 P, t0, t2; @P bra A;"
    " { .reg .pred P; @!P bra A; } } A: ret;",
    "variables": ".local .align 16 .b8 depot[64];"
    " { .param .b32 p; st.param.b32 [p], 1; } st.local.b32 [depot+-4], %r1;",
    "operands": "mov.b64 %rd1, {%r1, 0}; elect.sync _|%p1, -1;"
    " ld.global.v2.f32 {%f1, _}, [%rd1+8]; bar.red.or.pred %p1, 0, !%p2;",
    "constants": "mov.f32 %f1, 0f7FC00001; mov.f32 %f1, -1.5; mov.b32 %r1, -0x80; mov.b64 %rd1, 0xFFFFFFFFFFFFFFFF;",
    "special": "mov.u32 %r1, %tid.y; mov.u32 %r1, %cluster_ctarank; mov.pred %p1, %is_explicit_cluster;",
    "tensors": "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1+64, {%r1, -4}], [%r2];",
    "tables": "brx.idx %r1, T; T: .branchtargets A, B; A: ret; B: END: ",
    "vectors": "{ .reg .v2 .f32 pair; mov.f32 pair.y, 0f00000000; st.shared.v2.f32 [%r1], pair; }",
    "places": ".loc 1 2 3\n mov.b32 %r1, 1; .loc 1 9 9, function_name $str, inlined_at 1 2 3\n mov.b32 %r1, 2;"
    " .loc 1 10 9, function_name $str, inlined_at 1 9 9\n mov.b32 %r1, 2;",
    "calls": "{ .param .b32 r; call.uni (r), f, (r); } call g;",
}
BEFORE = """
.file 1 "a b.py"
.section .debug_str {
$str: .b8 104, 105, 0
}
.extern .shared .align 128 .b8 dynamic[];
.global .align 8 .b64 table[3] = {1, generic(dynamic), dynamic+8};
.const .f32 pi = 0f40490FDB;
.visible .global .v4 .b32 quad[2];
.extern .func (.param .b32 r) f(.param .b32 a);
.func g() { ret; }
"""


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_is_printed_is_read_as_the_same(body: str):
    first = module(body, ".param .align 8 .b8 p[24], .param .u16 q", ".maxntid 128 .explicitcluster", BEFORE)
    printed = show(first)
    assert parse(printed) == first
    assert show(parse(printed)) == printed


def test_another_program_is_another_module():
    assert module("mov.b32 %r1, 1;") != module("mov.b32 %r1, 2;")
    assert module("A: mov.b32 %r1, 1; ret;") != module("mov.b32 %r1, 1; A: ret;")


def test_instructions_are_printed_as_they_were_written():
    line = "@!%p1 fma.rn.ftz.f32 %f1, %f2, 0f3F800000, %f3;"
    assert show_instr((kernel(line).code or ())[0]) == line


def test_an_instruction_can_be_left_out():
    whole = kernel("mov.b32 %r1, 1; A: mov.b32 %r1, 2; bra A; B: ret;")
    assert without_instr(whole, 1) == parse(text("mov.b32 %r1, 1; A: bra A; B: ret;")).entries["k"]
    assert without_instr(whole, 0).labels == {"A": 0, "B": 2}
