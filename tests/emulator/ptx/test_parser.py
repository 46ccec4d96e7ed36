# SPDX-License-Identifier: Apache-2.0
"""Every construct of PTX that kernels have, on a few lines each."""

import math

import pytest
from snippets import HEADER, code, kernel, module, one

from emulator.ptx import PtxError, Refused, parse
from emulator.ptx.ir import (
    Address,
    Imm,
    Label,
    Loc,
    Names,
    Not,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vec,
)


def b32(name: str) -> Reg:
    return Reg(name, "b32")


def test_header():
    found = parse('.version 9.3\n.target sm_90a, debug\n.address_size 64\n.file 1 "a.py"\n')
    assert (found.version, found.target, found.files) == ((9, 3), ("sm_90a", "debug"), {1: "a.py"})


def test_params_are_laid_out():
    params = ".param .b8 a, .param .align 64 .b8 map[128], .param .u64 .ptr .global .align 16 p, .param .f32 f"
    found = kernel("ret;", params)
    assert [(p.name, p.offset, p.size, p.align) for p in found.params] == [
        ("a", 0, 1, 1),
        ("map", 64, 128, 64),
        ("p", 192, 8, 8),
        ("f", 200, 4, 4),
    ]
    assert found.param_bytes == 204


def test_launch_directives():
    found = kernel("ret;", directives=".reqntid 384, 1, 1 .minnctapersm 1 .explicitcluster .reqnctapercluster 2, 1, 1")
    assert found.directives == {
        "reqntid": (384, 1, 1),
        "minnctapersm": (1,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
    }


def test_global_variables():
    before = """
    .extern .shared .align 1024 .b8 dynamic[];
    .global .align 1 .b8 text[4] = {72, 105, 10};
    .const .align 8 .b64 table[2] = {generic(text)+0, text+4};
    .global .align 4 .f32 half = 0f3F000000;
    .global .s16 signed[2] = {-2};
    .shared .align 8 .b64 barriers[2], more;
    """.replace("generic(text)+0", "generic(text)")
    found = module("ret;", before=before).symbols
    assert (found["dynamic"].size, found["dynamic"].linkage, found["dynamic"].space) == (0, "extern", "shared")
    assert (found["text"].size, found["text"].initial) == (4, b"Hi\n")
    assert found["table"].relocations == ((0, Symbol("text"), True), (8, Symbol("text", 4), False))
    assert found["half"].initial == bytes.fromhex("0000003f")
    assert (found["signed"].initial, found["signed"].size) == (b"\xfe\xff", 4)
    assert (found["barriers"].size, found["more"].size) == (16, 8)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("12", Imm(12)),
        ("-1", Imm(-1)),
        ("0x1F", Imm(31)),
        ("0xFFFFFFFFU", Imm(0xFFFFFFFF)),
        ("017", Imm(15)),
        ("0b101", Imm(5)),
        ("WARP_SZ", Imm(32)),
        ("0f3F800000", Imm(0x3F800000, "f32")),
        ("-0f3F800000", Imm(0xBF800000, "f32")),
        ("0f7FC00001", Imm(0x7FC00001, "f32")),
    ],
)
def test_constants_keep_their_bits(written: str, expected: Imm):
    assert one(f"mov.b32 %r1, {written};")["a"] == expected


def test_float_constants_of_the_other_size():
    assert one("mov.f32 %f1, 0d3FF0000000000000;")["a"] == Imm(0x3FF0000000000000, "f64")
    wide = one("mov.f32 %f1, 1.5;")["a"]
    assert isinstance(wide, Imm)
    assert (wide.kind, wide.float(), wide.bits(32), wide.bits(64)) == ("f64", 1.5, 0x3FC00000, 0x3FF8000000000000)
    assert Imm(0x3FC00000, "f32").bits(64) == 0x3FF8000000000000
    assert math.isnan(Imm(0x7FC00001, "f32").float())
    assert Imm(-1).bits(16) == 0xFFFF


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[%rd1]", Address(Reg("%rd1", "b64"))),
        ("[%rd1+16]", Address(Reg("%rd1", "b64"), 16)),
        ("[%rd1+-16]", Address(Reg("%rd1", "b64"), -16)),
        ("[%rd1-16]", Address(Reg("%rd1", "b64"), -16)),
        ("[dynamic]", Address(Symbol("dynamic"))),
        ("[dynamic+8]", Address(Symbol("dynamic"), 8)),
        ("[64]", Address(None, 64)),
    ],
)
def test_addresses(written: str, expected: Address):
    before = ".extern .shared .b8 dynamic[];"
    assert one(f"ld.shared.b32 %r1, {written};", before=before)["a"] == expected


def test_symbols_and_special_registers():
    found = code(
        "mov.b64 %rd1, p+4; mov.u32 %r1, %tid.x; mov.u32 %r1, %laneid; mov.u64 %rd1, %globaltimer;", ".param .u64 p"
    )
    assert [instr["a"] for instr in found] == [
        Symbol("p", 4),
        Special("%tid", "x"),
        Special("%laneid"),
        Special("%globaltimer"),
    ]


def test_vectors_and_sinks():
    loaded = one("ld.global.v4.b32 {%r1, %r2, _, %r4}, [%rd1];")
    assert loaded["d"] == Vec((b32("%r1"), b32("%r2"), Sink(), b32("%r4")))
    packed, unpacked = code("mov.b64 %rd1, {%r1, 0}; mov.b64 {%r1, _}, %rd1;")
    assert (packed.op.form.id, packed["a"]) == ("mov#pack", Vec((b32("%r1"), Imm(0))))
    assert (unpacked.op.form.id, unpacked["d"]) == ("mov#unpack", Vec((b32("%r1"), Sink())))
    quad = one("mov.b128 {%rd1, %rd2}, %rq1;")
    assert quad["a"] == Reg("%rq1", "b128")


def test_a_vector_of_one_may_stand_without_braces():
    bare, braced = code(
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [%r2]; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];"
    )
    assert bare["d"] == braced["d"] == Vec((b32("%r1"),))


def test_vector_registers_have_components():
    found = kernel("{ .reg .v4 .s32 quad; mov.s32 quad.x, 1; mov.s32 quad.a, 2; st.v4.s32 [%rd1], quad; }").code
    assert found is not None
    whole = found[2]["b"]
    assert isinstance(whole, Vec)
    assert (found[0]["d"], found[1]["d"]) == (whole.items[0], whole.items[3])


def test_predicates():
    guarded, pair, negated, elected = code(
        """
        @!%p1 add.s32 %r1, %r2, 1;
        setp.lt.s32 %p1|%p2, %r1, 0;
        selp.b32 %r1, 1, 0, %p3; and.pred %p1, %p2, %p3;
        """.replace("and.pred %p1, %p2, %p3;", "elect.sync _|%p4, -1;")
    )
    assert guarded.guard is not None
    assert (guarded.guard.reg.name, guarded.guard.negated) == ("%p1", True)
    assert pair["p"] == Pair(Reg("%p1", "pred"), Reg("%p2", "pred"))
    assert negated["c"] == Reg("%p3", "pred")
    assert elected["d"] == Pair(Sink(), Reg("%p4", "pred"))
    assert one("bar.red.and.pred %p1, 0, !%p2;")["a"] == Not(Reg("%p2", "pred"))
    voted = one("vote.sync.ballot.b32 %r1, !%p2, -1;")
    assert voted["a"] == Not(Reg("%p2", "pred"))


def test_tensor_addresses():
    instr = one(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%r1], [%rd1, {%r2, 0, %r3}], [%r4], %rd2;"
    )
    assert instr["map"] == TensorAddress(Address(Reg("%rd1", "b64")), (b32("%r2"), Imm(0), b32("%r3")))
    assert instr["mask"] is None
    assert instr["policy"] == Reg("%rd2", "b64")
    assert instr.op.form.id == "cp.async.bulk.tensor#load"
    assert instr.op.mods == {
        "dim": "3d",
        "dst": "shared::cta",
        "src": "global",
        "mode": "tile",
        "mbarrier::complete_tx::bytes": "mbarrier::complete_tx::bytes",
        "hint": "L2::cache_hint",
    }


WAIT = """
{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
"""


def test_scopes_have_registers_and_labels_of_their_own():
    found = kernel(WAIT + WAIT + "{ .reg .pred P1; { .reg .b32 P1; mov.b32 P1, 1; } @P1 ret; }")
    assert found.code is not None
    waits = [instr["p"] for instr in found.code if instr.op.name == "mbarrier.try_wait.parity"]
    assert waits == [Reg("P1$1", "pred"), Reg("P1$2", "pred")]
    assert found.labels == {"LAB_WAIT$1": 0, "DONE$1": 3, "LAB_WAIT$2": 3, "DONE$2": 6}
    assert [instr["target"] for instr in found.code if instr.op.name == "bra"] == [
        Label("DONE$1"),
        Label("LAB_WAIT$1"),
        Label("DONE$2"),
        Label("LAB_WAIT$2"),
    ]
    inner, last = found.code[-2:]
    assert (inner["d"], last.guard.reg) == (Reg("P1$4", "b32"), Reg("P1$3", "pred"))


def test_a_scope_ends_where_its_brace_does():
    with pytest.raises(PtxError, match="unknown name 'inner'"):
        kernel("{ .reg .b32 inner; } mov.b32 %r1, inner;")


def test_lines_of_the_source():
    found = module(
        """
        .loc 1 10 5
        mov.b32 %r1, 1;
        .loc 2 20 7, function_name $L__info_string0, inlined_at 1 10 5
        mov.b32 %r1, 2;
        { .loc 1 11 0
        mov.b32 %r1, 3; }
        """,
        before='.file 1 "kernel.py"\n.file 2 "helper.py"\n.section .debug_str {\n$L__info_string0:\n.b8 104, 105, 0\n}',
    )
    code = found.entries["k"].code
    assert code is not None
    outer = Loc(1, 10, 5)
    assert [instr.loc for instr in code] == [outer, Loc(2, 20, 7, "hi", outer), Loc(1, 11, 0)]
    assert found.where(code[1]) == "helper.py:20, inlined at kernel.py:10"


def test_inline_assembly_has_the_line_of_its_call():
    """LLVM counts on within the text, and leaves out the place of what follows if that is the call's."""
    found = module(
        """
        .loc 1 10 5
        // begin inline asm
        {
        .loc 1 12 5
        mov.b32 %r1, 1;
        .loc 1 13 5
        }
        // end inline asm
        mov.b32 %r1, 2;
        .loc 1 11 5
        mov.b32 %r1, 3;
        """,
    )
    code = found.entries["k"].code
    assert code is not None
    assert [instr.loc for instr in code] == [Loc(1, 10, 5), Loc(1, 10, 5), Loc(1, 11, 5)]


def test_lines_of_the_ptx_survive_comments():
    text = HEADER + "// one\n/* two\nthree */ .visible .entry k()\n{\n // five \n ret; }\n"
    (instr,) = parse(text).entries["k"].code or ()
    assert text.splitlines()[instr.line - 1].strip() == "ret; }"


def test_calls():
    found = module(
        """
        { // callseq 0, 0
        .param .b64 param0;
        .param .b32 retval0;
        st.param.b64 [param0], %rd1;
        call.uni (retval0), vprintf, (param0, param0);
        ld.param.b32 %r1, [retval0];
        }
        call helper;
        """,
        before="""
        .extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
        .func helper() { ret; }
        """,
    )
    code = found.entries["k"].code or ()
    call = code[1]
    assert call["results"] == Names((Symbol("retval0$1"),))
    assert call["callee"] == Symbol("vprintf")
    assert call["args"] == Names((Symbol("param0$1"), Symbol("param0$1")))
    assert (code[3]["results"], code[3]["callee"], code[3]["args"]) == (None, Symbol("helper"), None)
    assert found.callees["vprintf"].code is None
    assert found.callees["helper"].code is not None


def test_indirect_branches():
    found = kernel("brx.idx %r1, T; A: ret; B: ret; T: .branchtargets A, B;")
    assert found.code is not None
    assert found.tables == {"T": ("A", "B")}
    assert found.code[0]["targets"] == Label("T")


def test_operands_decide_between_forms_of_one_opcode():
    zeros = "{%r1, %r2, %r3, %r4}"
    forms = code(
        f"""
        tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;
        tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %rd2, %r3, %p1;
        tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, {zeros}, %p1;
        tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, {zeros}, %p1, 3;
        tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1, 3;
        """
    )
    assert [instr.op.form.id for instr in forms] == [f"tcgen05.mma#{form}" for form in ("ss", "ts", "ss", "ss", "ss")]
    assert [instr["lanes"] is not None for instr in forms] == [False, False, True, True, False]
    assert [instr["scale_d"] for instr in forms] == [None, None, None, Imm(3), Imm(3)]
    sizes = code("cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.ca.shared.global [%r1], [%rd1], 4, %r2;")
    assert [instr["src"] for instr in sizes] == [None, b32("%r2")]
    arrives = code("mbarrier.arrive.shared.b64 %rd1, [%r1]; mbarrier.arrive.shared.b64 _, [%r1], 2;")
    assert [(instr["state"], instr["count"]) for instr in arrives] == [(Reg("%rd1", "b64"), None), (Sink(), Imm(2))]
    remote = one("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];")
    assert remote.op["space"] == "shared::cluster"


def test_modifiers_may_stand_apart():
    together, apart = code("ld.global.L1::no_allocate.b32 %r1, [%rd1]; ld.global .L1::no_allocate .b32 %r1, [%rd1];")
    assert together == apart


def test_instructions_are_equal_whatever_their_line():
    first, second = code("add.s32 %r1, %r2, 1;\n\nadd.s32 %r1, %r2, 1;")
    assert first == second
    assert first.line != second.line


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, nothing;", "unknown name 'nothing'"),
        ("mov.b32 %r1, %r999;", "unknown name '%r999'"),
        ("@%r1 ret;", "'%r1' is not a predicate"),
        ("A: A: ret;", "label A stands twice"),
        ("mov.b32 %r1, 1", "expected ';'"),
        (".reg .f128 x;", "registers of type .f128"),
        ("mov.b32 %r1, 0fZZ;", "unknown name|not a number|expected"),
    ],
)
def test_what_is_not_ptx(body: str, message: str):
    with pytest.raises(PtxError, match=message):
        kernel(body)


def test_the_text_may_not_end_in_a_body():
    with pytest.raises(PtxError, match="ends within a body"):
        parse(HEADER + ".entry k() { ret;")


def test_refusals_come_all_at_once():
    with pytest.raises(Refused) as caught:
        kernel(
            """
            frobnicate.b32 %r1, %r2;
            add.saturated.s32 %r1, %r2, %r3;
            frobnicate.b32 %r1, %r2;
            add.s32 %r1, %r2;
            .weird 1;
            mov.b32 %r1, %r2;
            """,
            directives=".turbo 3",
        )
    refusals = caught.value.refusals
    assert [refusal.text for refusal in refusals] == [
        ".turbo",
        "frobnicate.b32",
        "add.saturated.s32",
        "frobnicate.b32",
        "add.s32",
        ".weird",
    ]
    message = str(caught.value)
    assert "5 unknown forms" in message
    first, second = refusals[1].line, refusals[3].line
    assert second == first + 2
    assert f"frobnicate.b32: no such opcode in the emulator's tables (line {first}, {second})" in message
    assert "add has no modifier .saturated" in message
    assert "lacks operand b" in message
