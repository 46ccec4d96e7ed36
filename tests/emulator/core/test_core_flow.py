# SPDX-License-Identifier: Apache-2.0
"""Branches, lanes that part and meet, exchange within a warp, traps, faults and counts."""

import random

import numpy as np
import pytest
from lanes import FULL, get, program, put, reg, run, warp

from emulator.core import Event, Fault, FaultKind, Kind
from emulator.core.library import MAX_FAULTS
from emulator.core.warp import BUSY_COPY, BUSY_LOAD, BUSY_READ
from emulator.errors import Unsupported
from emulator.ptx.ir import Address, Imm, Not, Sink, Symbol

LANES = list(range(32))
EVEN = 0x55555555


def at(w, name: str) -> int:
    """Index of the first instruction with that opcode."""
    return next(k for k, instr in enumerate(w.program.instrs) if instr.op.name == name)


def test_guards_and_negation():
    body = "mov.b32 %r1, 0; @%p1 add.s32 %r1, %r1, 1; @!%p1 add.s32 %r1, %r1, 2; @%p2 add.s32 %r1, %r1, 100;"
    w = warp(body)
    put(w, "%p1", [lane & 1 for lane in LANES])
    put(w, "%p2", [0] * 32)
    assert w.run() == Event(Kind.DONE, 5, 0)
    assert get(w, "%r1") == [1 if lane & 1 else 2 for lane in LANES]
    assert w.counts.tolist() == [1, 1, 1, 0, 1]
    assert w.live == 0


def test_an_if_and_an_else_meet_again():
    body = """setp.lt.u32 %p1, %r9, 10; @%p1 bra THEN; mov.b32 %r1, 2; bra.uni END;
    THEN: mov.b32 %r1, 1; END: add.s32 %r1, %r1, 10; vote.sync.ballot.b32 %r2, %p1, 0xffffffff;"""
    w = warp(body)
    put(w, "%r9", LANES)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [11 if lane < 10 else 12 for lane in LANES]
    assert get(w, "%r2") == [0x3FF] * 32
    assert w.counts[at(w, "add")] == 1
    assert not w.faults()


def test_a_loop_with_other_trip_counts_in_every_lane():
    body = """mov.b32 %r1, 0; mov.b32 %r2, 0;
    AGAIN: add.s32 %r1, %r1, 1; add.s32 %r2, %r2, %r1; setp.lt.s32 %p1, %r1, %r9; @%p1 bra AGAIN;
    mul.lo.s32 %r3, %r2, 2;"""
    w = warp(body)
    rng = random.Random(3)
    trips = [rng.randint(1, 40) for _ in LANES]
    put(w, "%r9", trips)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r3") == [n * (n + 1) for n in trips]
    assert w.counts[2] == max(trips)
    assert w.counts[at(w, "mul")] == 1


def test_nested_loops_with_early_exits():
    body = """mov.b32 %r1, 0; mov.b32 %r3, 0;
    OUTER: mov.b32 %r2, 0;
    INNER: add.s32 %r2, %r2, 1; add.s32 %r3, %r3, 1; setp.eq.s32 %p2, %r3, %r8; @%p2 exit;
    setp.lt.s32 %p1, %r2, %r9; @%p1 bra INNER;
    add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 5; @%p1 bra OUTER;
    mov.b32 %r4, 1;"""
    w = warp(body)
    inner = [1 + lane % 7 for lane in LANES]
    stops = [3 * lane for lane in LANES]
    put(w, "%r9", inner)
    put(w, "%r8", stops)
    put(w, "%r4", [0] * 32)
    assert w.run().kind is Kind.DONE
    whole = [5 * n for n in inner]
    ended = [0 < stop <= total for stop, total in zip(stops, whole, strict=True)]
    assert get(w, "%r3") == [s if e else t for s, t, e in zip(stops, whole, ended, strict=True)]
    assert get(w, "%r4") == [int(not e) for e in ended]


def test_branch_tables():
    body = """mov.b32 %r1, 0; TABLE: .branchtargets A, B, C; brx.idx %r9, TABLE;
    A: add.s32 %r1, %r1, 1; B: add.s32 %r1, %r1, 10; C: add.s32 %r1, %r1, 100;"""
    w = warp(body)
    put(w, "%r9", [lane % 3 for lane in LANES])
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [(111, 110, 100)[lane % 3] for lane in LANES]
    w = warp(body)
    put(w, "%r9", [3] * 32)
    assert w.run() == Event(Kind.TRAP, 1, FULL)


def test_lanes_that_do_not_exist():
    w = warp("mov.b32 %r1, 7; vote.sync.ballot.b32 %r2, %p1, 0x0000ffff;", live=0xFFFF)
    put(w, "%r1", [0] * 32)
    put(w, "%p1", [1] * 32)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [7] * 16 + [0] * 16
    assert get(w, "%r2")[:16] == [0xFFFF] * 16
    assert not w.faults()


# Traps.


def test_a_trap_comes_again_until_it_is_served():
    body = "mov.b32 %r1, 1; @%p1 bar.sync 0; mov.b32 %r2, 2; st.shared.b32 [%r1], %r2;"
    w = warp(body)
    put(w, "%p1", [lane & 1 for lane in LANES])
    first = w.run()
    assert first == Event(Kind.TRAP, 1, FULL ^ EVEN)
    assert w.run() == first
    assert w.counts.tolist() == [1, 0, 0, 0, 0]
    w.advance()
    assert w.counts[1] == 1
    assert w.run() == Event(Kind.TRAP, 3, FULL)
    w.advance()
    assert w.run().kind is Kind.DONE
    assert w.counts.tolist() == [1, 1, 1, 1, 1]
    assert w.program.traps == {"bar.sync", "st"}


def test_a_trap_of_one_side_of_a_branch():
    body = "@%p1 bra L; mov.b32 %r1, 1; bra.uni E; L: ld.shared.b32 %r1, [%r2]; E: add.s32 %r3, %r1, 1;"
    w = warp(body)
    put(w, "%p1", [int(lane < 4) for lane in LANES])
    put(w, "%r2", [4 * lane for lane in LANES])
    event = w.run()
    assert event == Event(Kind.TRAP, 3, 0xF)
    load = w.program.instrs[event.index]
    assert w.address(load["a"])[:4].tolist() == [0, 4, 8, 12]
    w.put32(load["d"], np.arange(32, dtype=np.uint32) * 10)
    w.advance()
    assert w.run().kind is Kind.DONE
    assert get(w, "%r3") == [10 * lane + 1 if lane < 4 else 2 for lane in LANES]
    assert w.counts[at(w, "add")] == 1
    assert not w.faults()


def test_a_limit():
    w = warp("mov.b32 %r1, 0; L: add.s32 %r1, %r1, 1; bra.uni L;")
    assert w.run(7) == Event(Kind.LIMIT, 1, FULL)
    assert get(w, "%r1") == [3] * 32
    assert w.executed == 7
    assert w.run(2).kind is Kind.LIMIT
    assert get(w, "%r1") == [4] * 32
    w.end(FULL)
    assert w.run().kind is Kind.DONE


# Exchange within a warp.

SHFL = {
    "up": lambda lane, b, low, top: lane - b if lane - b >= low else None,
    "down": lambda lane, b, low, top: lane + b if lane + b <= top else None,
    "bfly": lambda lane, b, low, top: lane ^ b if lane ^ b <= top else None,
    "idx": lambda lane, b, low, top: low | b if low | b <= top else None,
}


@pytest.mark.parametrize("mode", SHFL)
@pytest.mark.parametrize("width", [32, 16, 8, 4, 1])
def test_shuffles(mode, width):
    """With c as CUDA's __shfl functions build it, segments of a power of two."""
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    values = [lane * 1000 + 1 for lane in LANES]
    for shift in range(width):
        body = f"shfl.sync.{mode}.b32 %r1|%p1, %r2, {shift}, {c}, -1;"
        found, inside = run(body, {"%r2": values}, ["%r1", "%p1"])
        for lane in LANES:
            low = lane // width * width
            source = SHFL[mode](lane, shift, low, low + width - 1)
            assert inside[lane] == int(source is not None)
            assert found[lane] == values[lane if source is None else source]


def test_shuffles_of_a_part_of_the_warp():
    body = """setp.lt.u32 %p1, %r2, 16; @%p1 shfl.sync.idx.b32 %r1, %r2, 3, 31, 0xffff;
    @!%p1 shfl.sync.down.b32 %r1, %r2, %r3, 31, %r4;"""
    inputs = {"%r2": LANES, "%r3": [1] * 32, "%r4": [0xFFFF0000] * 32}
    (found,) = run(body, inputs, ["%r1"])
    assert found == [3] * 16 + [min(lane + 1, 31) for lane in range(16, 32)]


def test_votes():
    values = [int(lane in (3, 8)) for lane in LANES]
    body = """vote.sync.ballot.b32 %r1, %p1, -1; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, %p1, -1; vote.sync.ballot.b32 %r2, !%p1, -1; vote.sync.all.pred %p5, 1, -1;"""
    names = ["%r1", "%p2", "%p3", "%p4", "%r2", "%p5"]
    found = [column[0] for column in run(body, {"%p1": values}, names)]
    assert found == [0x108, 1, 0, 0, FULL ^ 0x108, 1]
    for same in (0, 1):
        found = [column[5] for column in run(body, {"%p1": [same] * 32}, names)]
        assert found == [FULL * same, same, same, 1, FULL * (1 - same), 1]


def test_matches():
    values = [lane % 5 for lane in LANES]
    wide = [v << 40 for v in values]
    body = """match.any.sync.b32 %r1, %r2, -1; match.any.sync.b64 %r3, %rd1, -1; match.all.sync.b32 %r4|%p1, %r2, -1;
    mov.b32 %r6, 9; match.all.sync.b32 %r5|%p2, %r6, -1; match.all.sync.b64 %r7, %rd1, -1;"""
    any32, any64, no, all_same, p, q, wide_all = run(
        body, {"%r2": values, "%rd1": wide}, ["%r1", "%r3", "%r4", "%r5", "%p1", "%p2", "%r7"]
    )
    wanted = [sum(1 << k for k in LANES if values[k] == v) for v in values]
    assert any32 == any64 == wanted
    assert (no, all_same, p, q, wide_all) == ([0] * 32, [FULL] * 32, [0] * 32, [1] * 32, [0] * 32)


def test_matches_of_a_part_of_the_warp():
    body = "@%p1 match.any.sync.b32 %r1, %r2, 0xffff; @%p1 match.all.sync.b32 %r3, %r2, 0xffff;"
    inputs = {"%p1": [int(lane < 16) for lane in LANES], "%r2": [7] * 32}
    same, everyone = run(body, inputs, ["%r1", "%r3"])
    assert same[:16] == everyone[:16] == [0xFFFF] * 16


def test_reductions():
    rng = random.Random(1)
    values = [rng.getrandbits(32) for _ in LANES]
    signed = [v - (v >> 31 << 32) for v in values]
    total = {"and": FULL, "or": 0, "xor": 0}
    for v in values:
        total = {"and": total["and"] & v, "or": total["or"] | v, "xor": total["xor"] ^ v}
    cases = {
        "add.u32": sum(values) & FULL,
        "add.s32": sum(values) & FULL,
        "min.u32": min(values),
        "max.u32": max(values),
        "min.s32": min(signed) & FULL,
        "max.s32": max(signed) & FULL,
        **{f"{name}.b32": v for name, v in total.items()},
    }
    for name, wanted in cases.items():
        assert run(f"redux.sync.{name} %r1, %r2, -1;", {"%r2": values}, ["%r1"]) == [[wanted] * 32], name


def test_float_reductions():
    one, minus_two, nan = 0x3F800000, 0xC0000000, 0x7FC00000
    values = [one] * 30 + [minus_two, nan]
    cases = {"max": one, "min": minus_two, "max.abs": 0x40000000, "max.NaN": 0x7FFFFFFF, "min.abs.NaN": 0x7FFFFFFF}
    for name, wanted in cases.items():
        assert run(f"redux.sync.{name}.f32 %r1, %r2, -1;", {"%r2": values}, ["%r1"]) == [[wanted] * 32], name


def test_elections_and_active_lanes():
    body = "elect.sync %r1|%p1, -1; activemask.b32 %r2; @%p2 elect.sync _|%p3, 0xf0; @%p2 activemask.b32 %r3;"
    w = warp(body)
    put(w, "%p2", [int(4 <= lane < 8) for lane in LANES])
    put(w, "%p3", [0] * 32)
    put(w, "%r3", [0] * 32)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [0] * 32
    assert get(w, "%p1") == [1] + [0] * 31
    assert get(w, "%r2") == [FULL] * 32
    assert get(w, "%p3") == [int(lane == 4) for lane in LANES]
    assert get(w, "%r3") == [0xF0 if 4 <= lane < 8 else 0 for lane in LANES]
    assert not w.faults()


def test_lanes_that_are_early_wait_for_those_that_the_mask_names():
    """The shuffle lies before the code that the other lanes run first."""
    body = """@%p1 bra FAR; SHARED: shfl.sync.idx.b32 %r1, %r2, 0, 31, -1; bra.uni END;
    FAR: add.s32 %r2, %r2, 500; bra.uni SHARED; END: add.s32 %r1, %r1, 1;"""
    w = warp(body)
    put(w, "%p1", [int(lane < 8) for lane in LANES])
    put(w, "%r2", LANES)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [501] * 32
    assert not w.faults()
    assert w.counts[at(w, "shfl.sync")] == 1
    assert w.counts[5] == 1


def test_two_halves_gather_apart_at_one_instruction():
    body = """@%p1 bra FAR; NEAR: bar.warp.sync %r1; redux.sync.add.s32 %r3, %r2, %r1; bra.uni END;
    FAR: add.s32 %r2, %r2, 1; bra.uni NEAR; END:"""
    w = warp(body)
    put(w, "%p1", [int(lane < 16) for lane in LANES])
    put(w, "%r1", [0xFFFF] * 16 + [0xFFFF0000] * 16)
    put(w, "%r2", [0] * 32)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r3") == [16] * 16 + [0] * 16
    assert not w.faults()


def test_a_warp_whose_lanes_wait_for_each_other_is_stuck():
    body = "@%p1 bra L; bar.warp.sync -1; exit; L: mov.b32 %r1, 1; shfl.sync.idx.b32 %r1, %r1, 0, 31, -1;"
    w = warp(body)
    put(w, "%p1", [int(lane < 8) for lane in LANES])
    assert w.run() == Event(Kind.STUCK, 1, FULL)
    assert w.pcs.tolist() == [4] * 8 + [1] * 24
    assert w.run().kind is Kind.STUCK


def test_lanes_that_wait_for_one_that_ends_go_on_with_a_fault():
    body = "@%p1 bra L; bar.warp.sync -1; mov.b32 %r1, 1; exit; L: exit;"
    w = warp(body)
    put(w, "%p1", [int(lane < 8) for lane in LANES])
    put(w, "%r1", [0] * 32)
    assert w.run().kind is Kind.DONE
    assert get(w, "%r1") == [0] * 8 + [1] * 24
    (fault,) = w.faults()
    assert (fault.index, fault.kind, fault.lanes) == (1, FaultKind.MEMBERS, 0xFF)


# Faults.


def test_a_mask_without_the_lane_itself():
    w = warp("@%p1 bar.warp.sync %r1; mov.b32 %r2, 1;")
    put(w, "%p1", [int(lane < 2) for lane in LANES])
    put(w, "%r1", [1] * 32)
    assert w.run().kind is Kind.DONE
    assert w.faults() == [Fault(0, FaultKind.MEMBERS, "%r1", 2)]


def test_a_mask_with_lanes_that_a_block_never_had():
    """A block of one thread, and one of 20, with the mask of a whole warp."""
    for live in (1, 0xFFFFF):
        w = warp("shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; vote.sync.any.pred %p1, %p2, -1; bar.warp.sync -1;", live=live)
        put(w, "%r1", [7] * 32)
        put(w, "%p2", [1] * 32)
        assert w.run().kind is Kind.DONE
        assert get(w, "%r2")[:1] == [7]
        assert not w.faults()


def test_what_a_shuffle_takes_from_a_lane_that_a_block_never_had_is_undefined():
    w = warp("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; st.shared.b32 [%r1], %r2;", live=1)
    put(w, "%r1", [0] * 32)
    w.run()
    assert w.defined(reg("%r2")) == 0


def test_a_mask_with_a_lane_that_has_ended():
    w = warp("@%p1 exit; shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;", live=0xFFFF)
    put(w, "%p1", [int(lane == 3) for lane in LANES])
    put(w, "%r1", [7] * 32)
    assert w.run().kind is Kind.DONE
    (fault,) = w.faults()
    assert (fault.kind, fault.lanes) == (FaultKind.MEMBERS, 1 << 3)


def test_lanes_that_name_each_other_in_different_masks():
    w = warp("bar.warp.sync %r1;")
    put(w, "%r1", [3, 7, 4, *[FULL ^ 7] * 29])
    assert w.run().kind is Kind.DONE
    (fault,) = w.faults()
    assert fault.kind is FaultKind.MEMBERS


def test_a_guard_that_is_false_needs_no_operands():
    w = warp("@%p1 add.s32 %r1, %r2, %r3;")
    put(w, "%p1", [0] * 32)
    w.run()
    assert not w.faults()
    assert w.init[w.program.row("%r1")] == 0


@pytest.mark.parametrize(
    "line", ["mov.b64 {%r1, %r2}, %rd1;", "mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd1;", "setp.eq.b64 %p1|%p2, %rd1, %rd1;",
             "shfl.sync.up.b32 %r1|%p1, %r9, 1, 0, -1;", "mov.b128 {%rd2, %rd3}, %rq1;", "add.f32x2 %rd2, %rd1, %rd1;",
             "mov.b128 %rq0, {%rd1, %rd1};", "match.all.sync.b64 %r1|%p1, %rd1, -1;",
             "mov.v2.u32 {%r1, %r2}, {%r9, %r9};"]
)  # fmt: skip
def test_every_destination_counts_as_written(line):
    w = warp(line)
    written = w.program.registers - {"%rd1", "%r9", "%rq1"}
    for name in w.program.registers - written:
        put(w, name, [0] * 32)
    w.run()
    assert not w.faults()
    assert {name for name in written if w.init[w.program.row(name)] == FULL} == written


def test_registers_that_asynchronous_work_owns():
    w = warp(
        "add.s32 %r1, %r2, 1; mov.b32 %r3, 1; @%p1 mov.b32 %r4, %r3; add.s32 %r5, %r5, 1; st.shared.b32 [%r1], %r2;"
    )
    for name in ("%r2", "%r5"):
        put(w, name, [0] * 32)
    put(w, "%p1", [lane & 1 for lane in LANES])
    for name in ("%r2", "%r4", "%r5"):
        w.busy[w.program.row(name)] = 1
    event = w.run()
    found = w.faults()
    assert [(f.index, f.register, f.lanes) for f in found] == [
        (0, "%r2", FULL), (2, "%r4", FULL ^ EVEN), (3, "%r5", FULL), (3, "%r5", FULL)
    ]  # fmt: skip
    assert {f.kind for f in found} == {FaultKind.BUSY}
    store = w.program.instrs[event.index]
    w.u32(store["b"])
    w.u32(store["b"])
    assert w.faults() == [Fault(4, FaultKind.BUSY, "%r2", FULL)]


def test_copies_of_registers_that_asynchronous_work_loads():
    w = warp(
        "mov.b64 %rd1, {%r1, %r2}; mov.b64 {%r3, %r4}, %rd1; add.s32 %r5, %r4, 1;"
        "mov.b32 %r3, %r5; add.s32 %r3, %r3, 1;"
        "add.s32 %r4, %r4, 1; add.s32 %r4, %r4, 1; st.shared.b32 [%r5], %rd1;"
    )
    for name in ("%r1", "%r2"):
        put(w, name, [0] * 32)
    w.busy[w.program.row("%r2")] = BUSY_LOAD
    w.run()
    # Low and high half are one register between; what was written anew is nobody's.
    assert [(f.index, f.register) for f in w.faults()] == [(0, "%r2"), (1, "%rd1"), (2, "%r4"), (5, "%r4")]
    pair = w.program.row("%rd1")
    assert w.busy[pair] == BUSY_COPY
    w.check_rows(np.array([pair]), reads=False)
    assert w.busy[pair] == 0
    assert not w.faults()


def test_registers_that_asynchronous_work_reads():
    w = warp("add.s32 %r1, %r2, 1; @%p1 mov.b32 %r3, %r2; st.local.b32 [%rd1], %r2; mov.b32 %r2, %r1; bar.sync %r2;")
    put(w, "%r2", [0] * 32)
    put(w, "%p1", [1] * 32)
    put(w, "%rd1", [0] * 32)
    for name in ("%r2", "%p1", "%rd1"):
        w.busy[w.program.row(name)] = BUSY_READ
    event = w.run()
    assert w.faults() == [Fault(3, FaultKind.BUSY, "%r2", FULL)]
    rows = np.array([w.program.row("%r2"), w.program.row("%r3")])
    w.u32(w.program.instrs[event.index]["id"])
    w.check_rows(rows, reads=True)
    assert not w.faults()
    w.check_rows(rows, reads=False)
    assert w.faults() == [Fault(4, FaultKind.BUSY, "%r2", FULL)]


def test_division_by_zero():
    w = warp("div.s32 %r1, %r2, %r3; rem.u64 %rd1, %rd2, %rd3; @%p1 div.u32 %r4, %r2, %r3;")
    put(w, "%r2", [7] * 32)
    put(w, "%r3", [0, 1] * 16)
    put(w, "%rd2", [7] * 32)
    put(w, "%rd3", [2] * 31 + [0])
    put(w, "%p1", [0, 1] * 16)
    w.run()
    assert w.faults() == [
        Fault(0, FaultKind.DIVISION, "%r3", EVEN),
        Fault(1, FaultKind.DIVISION, "%rd3", 1 << 31),
    ]
    assert get(w, "%r1") == [FULL, 7] * 16


def test_more_faults_than_are_kept():
    w = warp("@%p1 add.s32 %r1, %r1, 1;" * (MAX_FAULTS + 36))
    w.run()
    assert len(w.faults()) == MAX_FAULTS
    assert w.dropped == 36


# Operands of traps.


def test_operands_as_the_machine_sees_them():
    body = """st.global.b32 [%rd1+16], %r1; st.global.b64 [g+8], %rd1; st.shared.b16 [%r2+4], %rs1;
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %rq1; st.global.f32 [%rd1], %f1;
    st.global.b32 [%rd1], -1;"""
    w = warp(program(body, before=".visible .global .align 8 .b8 g[32];"), addresses={"g": 4096})
    put(w, "%rd1", [1 << 60 | lane for lane in LANES])
    put(w, "%r1", LANES)
    put(w, "%r2", [FULL] * 32)
    put(w, "%rq1", [lane | 9 << 64 for lane in LANES])
    put(w, "%f1", [0x3F800000] * 32)
    code = w.program.instrs
    w.run()
    assert w.address(code[0]["a"]).tolist() == [(1 << 60) + 16 + lane for lane in LANES]
    assert w.address(code[1]["a"]).tolist() == [4104] * 32
    assert w.address(code[2]["a"]).tolist() == [3] * 32
    assert w.address(Address(None, 12)).tolist() == [12] * 32
    assert w.u32(code[5]["b"]).tolist() == [FULL] * 32
    assert w.u64(Imm(-1)).tolist() == [(1 << 64) - 1] * 32
    assert w.u64(Symbol("g", 2)).tolist() == [4098] * 32
    assert w.b128(code[3]["handle"]).tolist() == [[lane, 9] for lane in LANES]
    assert w.f32(code[4]["b"]).tolist() == [1.0] * 32
    assert w.uniform(reg("%r1"), 0xF0) == 4
    assert w.uniform(reg("%rd1")) == 1 << 60
    assert w.u64(reg("%r1")).tolist() == LANES
    assert not w.faults()
    w.u32(reg("%rs1"))
    assert w.faults() == [Fault(0, FaultKind.UNWRITTEN, "%rs1", FULL)]


def test_results_of_the_machine():
    w = warp(
        "ld.global.b32 %r1, [%rd1]; mov.b16 %rs1, %rs2; mov.b64 %rd2, %rd3; mov.b128 %rq1, %rq0; @%p1 mov.b32 %r1, 1;"
    )
    for name in ("%r1", "%rd2", "%rs1", "%rq1", "%p1"):
        put(w, name, [0] * 32)
    w.run()
    w.put32(reg("%r1"), np.arange(32, dtype=np.uint32), 0xF)
    w.put32(reg("%rs1"), np.full(32, 0x12345, np.uint32))
    w.put64(reg("%rd2"), 1 << 50, EVEN)
    w.put_pred(reg("%p1"), 0x6, 0xE)
    w.put_b128(reg("%rq1"), np.array([[1, 2]] * 32, np.uint64), 1)
    w.put32(Sink(), 5)
    assert get(w, "%r1") == [0, 1, 2, 3, *[0] * 28]
    assert get(w, "%rs1") == [0x2345] * 32
    assert get(w, "%rd2") == [0 if lane & 1 else 1 << 50 for lane in LANES]
    assert get(w, "%rq1") == [1 | 2 << 64, *[0] * 31]
    assert w.pred(reg("%p1")) == 6
    assert w.pred(Not(reg("%p1"))) == FULL ^ 6
    assert (w.pred(Imm(1)), w.pred(Imm(0))) == (FULL, 0)
    with pytest.raises(Unsupported, match="as a destination"):
        w.put32(Imm(1), 5)


def test_a_narrow_register_where_a_wide_one_belongs_is_refused():
    with pytest.raises(Unsupported, match=r"add\.s32 with %rd1, a \.b64 register"):
        program("add.s32 %rd1, %r2, 1;")


def test_a_lane_that_is_elected_twice_is_elected_alone():
    w = warp(
        "elect.sync _|%p1, -1; @!%p1 bra L; mov.b32 %r1, 1; elect.sync %r5|%p2, -1; @%p2 mov.b32 %r2, 1;"
        "L: elect.sync _|%p3, -1; mov.b32 %r3, 1;"
    )
    for name in ("%r1", "%r2", "%r3"):
        put(w, name, [0] * 32)
    assert w.run().kind is Kind.DONE
    assert w.faults() == [Fault(3, FaultKind.MEMBERS, "", FULL & ~1)]
    assert (get(w, "%r1"), get(w, "%r2"), get(w, "%r3")) == ([1, *[0] * 31], [1, *[0] * 31], [1] * 32)


def test_lanes_that_wait_for_a_shuffle_are_stuck():
    w = warp("elect.sync _|%p1, -1; @!%p1 bra L; shfl.sync.idx.b32 %r1, %r2, 0, 31, -1; L: bar.warp.sync -1;")
    put(w, "%r2", [0] * 32)
    assert w.run().kind is Kind.STUCK
