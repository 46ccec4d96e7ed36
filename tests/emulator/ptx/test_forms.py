# SPDX-License-Identifier: Apache-2.0
"""The tables of forms: what they take, what they refuse, and that they say one thing at a time."""

import re
from pathlib import Path

import pytest
from snippets import code, one

from emulator.ptx import Refused
from emulator.ptx.flow import BLOCKING, GATHERING
from emulator.ptx.forms import FORMS, REFUSED, candidates
from emulator.ptx.grammar import SETS, parse_table
from emulator.ptx.ir import (
    BITS,
    Address,
    Imm,
    Label,
    Names,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vec,
)
from emulator.ptx.operands import bind

KNOWN_TYPES = {*BITS, "imm", "tensor", "label", "function", "names", "parts", "narrow", "tmem", "shared", "global", ""}


REG, PRED = Reg("%r1", "b32"), Reg("%p1", "pred")
ADDRESS = Address(REG)
OPERANDS: dict[str, Operand] = {
    "r": REG,
    "p": PRED,
    "i": Imm(0),
    "f": Imm(0, "f32"),
    "a": ADDRESS,
    "s": Special("%tid", "x"),
    "y": Symbol("variable"),
    "_": Sink(),
    "!": Not(PRED),
    "l": Label("L"),
    "()": Names(()),
}


def operand(kind: str) -> Operand:
    """An operand of the kind that corpus.py writes down."""
    if "|" in kind:
        first, second = (operand(side) for side in kind.split("|"))
        assert isinstance(first, Reg | Sink)
        assert isinstance(second, Reg | Sink)
        return Pair(first, second)
    if kind[1:].isdigit():
        items = (REG,) * int(kind[1:])
        return Vec(items) if kind[0] == "v" else TensorAddress(ADDRESS, items)
    return OPERANDS[kind]


def test_forms_of_a_corpus_are_known():
    """forms.txt lists opcodes with modifiers and operands that real kernels hold; corpus.py makes it."""
    lines = (Path(__file__).parent / "forms.txt").read_text().splitlines()
    listed = [line.split()[:2] for line in lines if line[0] != "#"]
    assert len(listed) > 300
    refused = {}
    for text, shape in listed:
        operands = [] if shape == "-" else [operand(kind) for kind in shape.split(",")]
        found = bind(candidates(text), operands)
        if isinstance(found, str) or not candidates(text):
            refused[text, shape] = found
    assert not refused


def test_roles_name_types_or_modifiers_of_their_row():
    for form in FORMS:
        groups = {group.name for group in form.groups}
        for role in form.roles:
            assert role.type in KNOWN_TYPES | groups, form.row
            assert role.when in {"", "?"} | groups, form.row
            assert role.vector in {None, ""} | groups, form.row
        assert len(form.place) == len(form.roles), form.row


def test_blocking_opcodes_are_opcodes():
    opcodes = {form.opcode for form in FORMS}
    assert {*BLOCKING, *GATHERING} <= opcodes


def test_a_row_can_only_be_read_one_way():
    """Two rows that take the same words have to differ in their operands."""
    for form in FORMS:
        text = ".".join((form.opcode, *(group.values[0] for group in form.groups if not group.optional)))
        same = [op.form for op in candidates(text)]
        assert form in same or any(other.roles == form.roles for other in same), form.row
        shapes = [tuple((role.name, role.address, role.vector, role.type, role.when) for role in f.roles) for f in same]
        assert len({tuple(s) for s in shapes}) > 1 or len(same) == 1 or len({f.id for f in same}) == 1, text


@pytest.mark.parametrize(
    "line",
    [
        "fma.rn.ftz.sat.f32 %f1, %f2, %f3, 0f00000000;",
        "add.rn.ftz.f32x2 %rd1, %rd2, %rd3;",
        "max.NaN.f32 %f1, %f2, %f3;",
        "max.f32 %f1, %f2, %f3, %f4;",
        "max.xorsign.abs.f32 %f1, %f2, %f3;",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
        "cvt.rn.satfinite.relu.e5m2x2.f16x2 %rs1, %r1;",
        "cvt.rn.f16x2.e4m3x2 %r1, %rs1;",
        "cvt.rn.relu.satfinite.bf16x2.f32 %r1, %f1, %f2;",
        "cvt.rna.tf32.f32 %r1, %f1;",
        "cvt.rz.satfinite.ue8m0x2.f32 %rs1, %f1, %f2;",
        "cvt.rs.satfinite.e2m1x4.f32 %rs1, {%f1, %f2, %f3, %f4}, %r1;",
        "cvt.sat.u8.s32 %r1, %r2;",
        "lop3.b32 %r1, %r2, %r3, %r4, 0xCA;",
        "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 0xCA, %p2;",
        "prmt.b32 %r1, %r2, %r3, 0x5410;",
        "dp4a.s32.u32 %r1, %r2, %r3, %r4;",
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];",
        "ld.global.L1::evict_last.L2::cache_hint.v8.f32 {%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7}, [%rd1], %rd2;",
        "ld.acquire.gpu.global.u32 %r1, [%rd1];",
        "st.shared::cluster.b32 [%r1], %r2;",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3];",
        "atom.acq_rel.gpu.global.cas.b32 %r1, [%rd1], %r2, %r3;",
        "red.relaxed.gpu.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};",
        "red.global.add.noftz.bf16x2 [%rd1], %r1;",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1], [%rd1], 128, [%r2], %rs1;",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%rd1], [%r1], %r2;",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r2, %r3, %r4, %r5, %r6}], [%r7];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2"
        " [%r1], [%rd1, {%r2, %r3}], [%r7], %rs1;",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1, %r2}], [%r3];",
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r1, %r2}];",
        "prefetch.tensormap [%rd1];",
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 0, %r2;",
        "tensormap.replace.tile.swizzle_mode.global.b1024.b32 [%rd1], 3;",
        "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, %rd2, 1, 1, 1;",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.pack::16b.b32 {%r1}, [%r2], 2;",
        "tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r2], 2, {%r1};",
        "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r1], %rd1;",
        "tcgen05.cp.cta_group::2.32x128b.warpx4.b8x16.b4x16_p64 [%r1], %rd1;",
        "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.scale_vec::4X [%r1], %rd1, %rd2, %r3, [%r4], [%r5], %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%r1], [%r2], %rd2, %r3, [%r4], [%r5], %p1;",
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %rs1;",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %rq1;",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, _}, %rq1;",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %rq1;",
        "redux.sync.min.abs.NaN.f32 %f1, %f2, -1;",
        "match.all.sync.b32 %r1|%p1, %r2, -1;",
        "mapa.shared::cluster.u32 %r1, %r2, 1;",
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %rd1, 0f3F800000;",
        "applypriority.global.L2::evict_normal [%rd1], 128;",
        "setmaxnreg.inc.sync.aligned.u32 240;",
        "multimem_is_not_here: exit;",
    ],
)
def test_forms_that_kernels_may_hold(line: str):
    assert len(code(line)) == 1


TYPES = [
    "b16",
    "u16",
    "s16",
    "f16",
    "bf16",
    "b32",
    "u32",
    "s32",
    "f16x2",
    "bf16x2",
    "f32",
    "b64",
    "u64",
    "s64",
    "f64",
    "b128",
]
LOGIC = dict.fromkeys(("and", "or", "xor"), "b32 b64")
COUNTING = dict.fromkeys(("inc", "dec"), "u32")
ORDER = dict.fromkeys(("min", "max"), "u32 s32 u64 s64")
ADDED = "u32 s32 u64 f32 f64"
VECTOR = {"add.v2": "f32", "add.v4": "f32"}
VECTOR |= {f"{op}.noftz.v{count}": "f16 bf16 f16x2 bf16x2" for op in ("add", "min", "max") for count in (2, 4)}
VECTOR |= {f"{op}.noftz.v8": "f16 bf16" for op in ("add", "min", "max")}
HALVES = {"add.noftz": "f16 bf16 f16x2 bf16x2"}
# As ptxas of CUDA 13.4 takes them; red.async's .s64 is in no table of the ISA.
REDUCTIONS = {
    "atom.relaxed.gpu.global.{}": LOGIC
    | COUNTING
    | ORDER
    | VECTOR
    | HALVES
    | {"add": ADDED, "exch": "b32 b64 b128", "cas": "b16 b32 b64 b128"},
    "atom.shared.{}": LOGIC
    | COUNTING
    | ORDER
    | HALVES
    | {"add": ADDED, "exch": "b32 b64 b128", "cas": "b16 b32 b64 b128"},
    "red.relaxed.gpu.global.{}": LOGIC | COUNTING | ORDER | VECTOR | HALVES | {"add": ADDED},
    "red.shared.{}": LOGIC | COUNTING | ORDER | HALVES | {"add": ADDED},
    "red.shared.cta.{}": LOGIC | COUNTING | ORDER | HALVES | {"add": ADDED},
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{}": dict.fromkeys(LOGIC, "b32")
    | COUNTING
    | dict.fromkeys(ORDER, "u32 s32")
    | {"add": "u32 s32 u64"},
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{}": dict.fromkeys(LOGIC, "b32")
    | COUNTING
    | dict.fromkeys(ORDER, "u32 s32")
    | {"add": "u32 s32 u64"},
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.{}": LOGIC
    | COUNTING
    | dict.fromkeys(ORDER, "u32 s32 u64 s64 f16 bf16")
    | {"add": ADDED, "add.noftz": "f16 bf16"},
}


@pytest.mark.parametrize("opcode", REDUCTIONS)
def test_types_of_reductions(opcode: str):
    """Every operation with every type: taken where the table has it, and nowhere else."""
    plain = {*LOGIC, *COUNTING, *ORDER, "add", "exch", "cas"}
    operations = plain | {f"{op}.noftz" for op in plain} | {f"{op}.{vec}" for op in plain for vec in ("v2", "v4", "v8")}
    operations |= {f"{op}.noftz.{vec}" for op in plain for vec in ("v2", "v4", "v8")}
    wanted = {(op, kind) for op, kinds in REDUCTIONS[opcode].items() for kind in kinds.split()}
    assert {op for op, _ in wanted} <= operations
    taken = {(op, kind) for op in operations for kind in TYPES if candidates(f"{opcode.format(op)}.{kind}")}
    assert taken == wanted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes"
            " [%r1], [%rd1, {%r2}], [%r3];",
            "im2col",
        ),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "sparse"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;", "weight-stationary"),
        ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 %r1, %r2, %r3, %r4;", "sparse"),
        ("multimem.red.relaxed.sys.global.add.u32 [%rd1], %r1;", "several GPUs"),
        ("wmma.load.a.sync.aligned.m16n16k16.row.f16 {%r1}, [%rd1];", "mma.sync is"),
        ("add.rn.s32 %r1, %r2, %r3;", "not together"),
        ("fence.proxy.everything;", "no modifier .proxy, .everything"),
        ("mbarrier.poke.b64 [%r1];", "known: mbarrier.arrive"),
        ("ld.global.v4.b32 {%r1, %r2}, [%rd1];", "has 2 elements, not 4"),
        ("ld.global.b32 %r1, %rd1;", "a is not an address"),
        ("add.s32 %r1, %p1, 1;", "a is not a value"),
        ("add.s32 %p1, %r1, 1;", "d is not a destination"),
        ("selp.b32 %r1, 1, 2, %r3;", "c is not a predicate"),
        ("add.s32 %r1, %r2, %r3, %r4;", "4 operands, 1 too many"),
        ("wgmma.wait_group.sync.aligned %r1;", "n is not a constant"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1], [%r1];", r"\[map, \{coordinates\}\]"),
        ("tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r1, %r2, %r3}, [%r4];", "no modifier .x3"),
        ("ld.global.L2::cache_hint.b32 %r1, [%rd1];", "lacks operand policy"),
    ],
)
def test_refusals_say_why(line: str, reason: str):
    with pytest.raises(Refused, match=reason) as caught:
        one(line)
    assert len(caught.value.refusals) == 1
    assert caught.value.refusals[0].text == line.split()[0].rstrip(";")


def test_rows_of_one_form_differ_in_their_modifiers():
    """Semantics see the form and its modifiers: nothing that was written may be missing there."""
    plain, saturated = one("add.s32 %r1, %r2, 1;").op, one("add.sat.s32 %r1, %r2, 1;").op
    assert plain.form.id == saturated.form.id == "add#int"
    assert (plain["sat"], saturated["sat"]) == (None, "sat")
    assert one("cvt.rna.tf32.f32 %r1, %f1;").op["rnd"] == "rna"
    lines = (Path(__file__).parent / "forms.txt").read_text().splitlines()
    for text in {line.split()[0] for line in lines if line[0] != "#"}:
        for op in candidates(text):
            assert ".".join((op.name, *op.mods.values())) == text


def test_reasons_are_of_forms_that_are_refused():
    """A reason may not outlive its refusal."""
    for key in REFUSED:
        assert not candidates(key.replace(" +", "."))


def test_rows_are_read_as_the_grammar_says():
    (form,) = parse_table("op#v .sync .flag? .type=<bits>|x .vec=v2|v4? : >d|p:type*vec, [a:space], b:imm?, c:b64?flag")
    assert (form.id, form.opcode) == ("op#v", "op")
    assert form.match(("op", "sync", "b32")) == {"sync": "sync", "type": "b32"}
    assert form.match(("op", "sync", "flag", "x", "v4")) == {"sync": "sync", "flag": "flag", "type": "x", "vec": "v4"}
    assert form.match(("op", "flag", "b32")) is None
    assert form.match(("op", "sync", "b32", "flag")) is None
    first, second, third, last = form.roles
    assert (first.access, first.pair, first.vector, first.type) == ("w", "p", "vec", "type")
    assert (second.address, second.type) == (True, "space")
    assert (third.when, last.when) == ("?", "flag")
    assert set(SETS["bits"].split("|")) <= set(form.groups[2].values)


@pytest.mark.parametrize("row", ["op sync : d", "op .a : >>d", "op .type=<nothing> : d"])
def test_a_wrong_row_is_an_error(row: str):
    with pytest.raises((ValueError, KeyError)):
        parse_table(row)


def test_rows_state_their_section():
    """Each table begins with the ISA's section, so that a reader can check it."""
    folder = Path(__file__).parents[3] / "emulator" / "ptx" / "forms"
    for file in folder.glob("[a-z]*.py"):
        assert re.search(r"ISA \d+\.\d+", file.read_text()), file
