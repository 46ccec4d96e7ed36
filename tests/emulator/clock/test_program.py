# SPDX-License-Identifier: Apache-2.0
"""What the clock reads off a program: registers that are alive, and an assembler's order."""

import numpy as np
import pytest
from ptx_kernels import text

from emulator.clock.chips import CHIPS
from emulator.clock.grid import RESERVED, Footprint
from emulator.clock.order import order_of
from emulator.clock.registers import GRANULE, registers_of
from emulator.clock.tables import FREE, PLAIN, fences, table_of
from emulator.machine.launch import load

CHIP = CHIPS["H200"]


def program(body, directives=""):
    source = text(body, 1, "sm_90a").replace("\n{", f"\n{directives}\n{{", 1)
    return load(source, "k")[1]


def alive(count):
    """So many values that are loaded before the first of them is used."""
    loads = [f"ld.shared.f32 %f{n}, [%r0+{4 * n}];" for n in range(count)]
    sums = [f"add.f32 %f0, %f0, %f{n};" for n in range(1, count)]
    return "\n".join(["mov.u32 %r0, shared;", *loads, *sums, "st.shared.f32 [%r0], %f0;"])


@pytest.mark.parametrize("count", [10, 100])
def test_registers_are_those_that_are_alive_at_once(count):
    # The address is needed to the end.
    assert registers_of(program(alive(count))) == -(-(count + 1) // GRANULE) * GRANULE


def test_a_kernel_that_asks_for_two_ctas_gets_registers_for_two():
    assert registers_of(program(alive(200), ".reqntid 256, 1, 1\n.minnctapersm 2")) == 128
    assert registers_of(program(alive(200), ".maxnreg 64")) == 64


@pytest.mark.parametrize(
    ("warps", "ctas", "registers"),
    # As ptxas 13.0 has them. Of 42 warps one of four partitions has 11, of 50 warps 13.
    [(7, 6, 40), (2, 21, 40), (2, 25, 32), (9, 2, 96), (14, 3, 40), (15, 2, 64), (5, 5, 72), (8, 8, 32)],
)
def test_registers_are_those_of_the_partition_with_most_warps(warps, ctas, registers):
    asked = f".reqntid {32 * warps}, 1, 1\n.minnctapersm {ctas}"
    assert registers_of(program(alive(200), asked)) == registers
    cta = Footprint(warps, RESERVED, 32 * registers)
    assert cta.fits() >= ctas
    # With a unit more there is no room for all.
    assert cta._replace(registers=32 * (registers + GRANULE)).fits() < ctas


def test_ctas_find_room_in_partitions_beside_others():
    cta = Footprint(7, RESERVED, 32 * 48)
    # 16 Ki registers of a partition are 10 warps of 48: 40 warps, which are 5 CTAs. Threads would allow 9.
    assert cta.fits() == 5
    other = Footprint(5, RESERVED, 32 * 40)
    # Of 10 warps of others a partition has 3 at most: 12544 registers are left, 8 warps of 48.
    assert cta.fits({other: 2}) == 4
    assert cta.fits({other: 13}) == 0
    # Of all kinds together.
    assert cta.fits({other: 2, cta: 3}) == 1


LOOP = """
mov.u32 %r0, shared;
mov.f32 %f0, 0f3F800000;
mov.f32 %f9, 0f3F800000;
mov.u32 %r1, 0;
AGAIN:
ld.shared.f32 %f1, [%r0];
ex2.approx.ftz.f32 %f2, %f1;
add.f32 %f0, %f0, %f2;
ld.shared.f32 %f3, [%r0+4];
fma.rn.f32 %f9, %f9, %f9, %f9;
ex2.approx.ftz.f32 %f4, %f3;
add.f32 %f0, %f0, %f4;
st.shared.f32 [%r0+8], %f0;
add.u32 %r1, %r1, 1;
setp.lt.u32 %p0, %r1, 4;
@%p0 bra AGAIN;
"""


def test_an_assemblers_order_keeps_what_depends_on_each_other():
    found = program(LOOP)
    order, stops = order_of(found, CHIP)
    assert sorted(order.tolist()) == list(range(len(found.instrs)))
    place = np.argsort(order)
    texts = [instr.op.name for instr in found.instrs]
    table = table_of(found, CHIP)
    assert table.instrs["kind"][texts.index("mov")] == FREE
    machine = [index for index in range(len(texts)) if table.instrs["kind"][index] not in (PLAIN, FREE)]
    assert (np.diff(place[machine]) > 0).all(), "loads, stores and branches keep their order"
    exponentials = [index for index, name in enumerate(texts) if name == "ex2"]
    sums = [index for index, name in enumerate(texts) if name == "add" and found.instrs[index].op["type"] == "f32"]
    assert all(place[first] < place[second] for first, second in zip(exponentials, sums, strict=True))
    assert place[exponentials[1]] < place[sums[0]], "the second one does not wait for the first one's sum"
    last = texts.index("bra")
    assert place[last] == last
    assert max(stops) == len(texts)


def test_an_assembler_fills_the_cycles_of_a_busy_unit():
    """Two exponentials are 8 cycles apart in what ptxas makes of a softmax: as long as the unit is busy."""
    exponentials = [f"ex2.approx.ftz.f32 %f{n + 1}, %f0;" for n in range(4)]
    others = [f"fma.rn.f32 %f{n + 10}, %f0, %f0, %f0;" for n in range(32)]
    found = program("\n".join(["mov.f32 %f0, 0f3F800000;", *exponentials, *others]))
    order, _ = order_of(found, CHIP)
    names = [found.instrs[index].op.name for index in order]
    places = [place for place, name in enumerate(names) if name == "ex2"]
    assert np.diff(places).tolist() == [8, 8, 8]


def test_an_assembler_puts_loads_in_front_of_what_needs_them():
    """Also where an address has to be computed between two loads: ptxas adds it within the load."""
    loads = [f"add.u64 %rd1, %rd1, 512;\nld.global.f32 %f{n}, [%rd1];" for n in range(1, 9)]
    uses = [f"max.f32 %f{n + 10}, %f{n}, %f{n};" for n in range(1, 9)]
    found = program("\n".join(["ld.param.u64 %rd1, [p0];", *loads, *uses]))
    names = [found.instrs[index].op.name for index in order_of(found, CHIP).order]
    last_load = max(place for place, name in enumerate(names) if name == "ld" and place > 1)
    assert names.index("max") > last_load


def test_moves_that_an_assembler_makes_none_of_hide_no_load():
    """CuTe DSL moves each word that inline PTX loads. More than one instruction may pass stand in front of a load."""
    loads = []
    for n in range(12):
        loads.append(f"ld.global.v4.f32 {{%f{4 * n}, %f{4 * n + 1}, %f{4 * n + 2}, %f{4 * n + 3}}}, [%rd1+{512 * n}];")
        loads += [f"mov.b32 %r{4 * n + word}, %f{4 * n + word};" for word in range(4)]
    uses = [f"max.s32 %r{n}, %r{n}, %r{n};" for n in range(48)]
    found = program("\n".join(["ld.param.u64 %rd1, [p0];", *loads, *uses]))
    names = [found.instrs[index].op.name for index in order_of(found, CHIP).order]
    assert max(place for place, name in enumerate(names) if name == "ld") < min(names.index("mov"), names.index("max"))


@pytest.mark.parametrize(
    ("instruction", "fenced"),
    [
        ("barrier.cluster.arrive.aligned", True),
        ("barrier.cluster.arrive.release.aligned", True),
        ("barrier.cluster.arrive.relaxed.aligned", False),
        ("barrier.cluster.wait.acquire.aligned", False),
        ("fence.acq_rel.gpu", True),
        ("fence.acq_rel.cluster", True),
        ("fence.sc.gpu", True),
        ("fence.acq_rel.cta", False),
        ("fence.mbarrier_init.release.cluster", False),
        ("fence.proxy.async", True),
        ("fence.proxy.async.shared::cta", False),
        ("membar.gl", True),
        ("membar.cta", False),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r0]", False),
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r0]", True),
        ("mbarrier.arrive.release.cta.shared::cta.b64 _, [%r0]", False),
        ("mbarrier.arrive.expect_tx.release.cluster.shared::cta.b64 _, [%r0], 16", True),
        ("red.release.gpu.global.add.u32 [%rd0], 1", True),
        ("red.relaxed.gpu.global.add.u32 [%rd0], 1", False),
        ("ld.acquire.gpu.global.u32 %r1, [%rd0]", False),
    ],
)
def test_fences_are_where_ptxas_puts_them(instruction, fenced):
    """MEMBAR.ALL.GPU in what ptxas 12.9 makes of it for sm_90a and sm_100a."""
    assert fences(program(f"{instruction};").instrs[0]) is fenced


@pytest.mark.parametrize(
    ("body", "gone"),
    [
        ("mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;", [0]),
        ("mul.f32 %f1, %f2, %f3; sub.f32 %f4, %f5, %f1;", [0]),
        ("mul.ftz.f32 %f1, %f2, %f3; sub.ftz.f32 %f4, %f1, %f5;", [0]),
        ("mul.f32x2 %rd1, %rd2, %rd3; add.f32x2 %rd4, %rd1, %rd5;", [0]),
        # One product of two that are added; the one that fewer additions read.
        ("mul.f32 %f1, %f2, %f3; mul.f32 %f4, %f5, %f3; sub.f32 %f6, %f4, %f1; sub.f32 %f7, %f3, %f1;", [1]),
        ("mul.f32 %f1, %f2, %f3; sub.f32 %f6, %f4, %f1; sub.f32 %f7, %f3, %f1;", [0]),
        ("mul.rn.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;", []),
        ("mul.f32 %f1, %f2, %f3; add.rn.f32 %f4, %f1, %f5;", []),
        ("mul.sat.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;", []),
        ("mul.ftz.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;", []),
        ("mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f1;", []),
        ("mul.f32 %f1, %f2, %f3; @%p0 add.f32 %f4, %f1, %f5;", []),
        ("mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5; st.shared.f32 [%r0], %f1;", []),
        ("mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5; mov.f32 %f1, %f2;", []),
        ("mul.f32 %f1, %f2, %f3; bra BEHIND; BEHIND: add.f32 %f4, %f1, %f5;", []),
        ("mul.f32 %f1, %f2, %f3;", []),
    ],
)
def test_a_product_and_a_sum_without_roundings_are_one_instruction(body, gone):
    """FFMA in place of FMUL and FADD, FFMA2 in place of FMUL2 and FADD2, in what ptxas 13.0 makes of it."""
    found = program(body)
    free = [index for index, kind in enumerate(table_of(found, CHIP).instrs["kind"]) if kind == FREE]
    assert [index for index in free if found.instrs[index].op.name == "mul"] == gone
