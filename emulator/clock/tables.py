# SPDX-License-Identifier: Apache-2.0
"""The instructions of a program as the replay sees them (replay.h): unit, cycles, latency, registers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.clock.constants import ChipClock
from emulator.clock.contract import contracted
from emulator.clock.notes import noter_of
from emulator.core.program import Program
from emulator.machine.wgmma import ROWS, Wgmma
from emulator.profile.classes import WARP, Class, Unit, classify, cost
from emulator.profile.rates import PARTITIONS, rates
from emulator.profile.work import work_of
from emulator.ptx.ir import Imm, Instr
from emulator.ptx.overtaken import registers

STATIC = np.dtype(
    [
        *((name, "u1") for name in ("kind", "unit", "reason", "sources", "results", "fences")),
        ("busy", "u2"), ("latency", "u2"), ("rows", "u4"), ("value", "i4"),
    ],
    align=True,
)  # fmt: skip
# In the order of replay.h.
PLAIN, FREE, BRANCH, EXIT, WGMMA, WGMMA_COMMIT, WGMMA_WAIT, BULK_COMMIT, BULK_WAIT, BULK_WAIT_READ = range(10)
CP_COMMIT, CP_WAIT, TENSOR_WAIT, LAUNCH_WAIT, LAUNCH_NEXT, BY_EVENT = range(10, 16)
NO_UNIT, ALU, FMA, XU, FP64, MMA, LSU = range(7)
ISSUED, ARITHMETIC, SPECIAL, SHARED_LOAD, GLOBAL_LOAD = range(5)
EVERYTHING = -1  # of a wait that leaves nothing pending, commits or not

UNITS = {Unit.ALU: ALU, Unit.FMA: FMA, Unit.XU: XU, Unit.FP64: FP64, Unit.SHUFFLE: LSU}
KINDS = {
    "wgmma.mma_async": WGMMA,
    "wgmma.commit_group": WGMMA_COMMIT,
    "wgmma.wait_group": WGMMA_WAIT,
    "cp.async.bulk.commit_group": BULK_COMMIT,
    "cp.async.commit_group": CP_COMMIT,
    "cp.async.wait_group": CP_WAIT,
    "cp.async.wait_all": CP_WAIT,
    "tcgen05.wait::ld": TENSOR_WAIT,
    "tcgen05.wait::st": TENSOR_WAIT,
    "griddepcontrol.wait": LAUNCH_WAIT,
    "griddepcontrol.launch_dependents": LAUNCH_NEXT,
    "bra": BRANCH,
    "brx.idx": BRANCH,
    "exit": EXIT,
    "ret": EXIT,
}
# What is done behind a thread's back, and told by an mbarrier: what it takes longer than an ordinary access.
COPIES = {
    "cp.async.bulk.tensor#load": "tma_latency",
    "cp.async.bulk#load": "bulk_latency",
    "cp.async.bulk#cluster": "bulk_latency",
    "cp.reduce.async.bulk#cluster": "bulk_latency",
    "clusterlaunchcontrol.try_cancel": "tma_latency",
    "st.async": "async_store",
    "red.async": "async_store",
}
ACCESSES = frozenset(
    (Class.SHARED, Class.MATRIX, Class.GLOBAL, Class.ATOMIC, Class.MBARRIER, Class.CP_ASYNC, Class.LOCAL)
)
# What the assembler makes nothing of, beside moves and loads of parameters.
NOTHING = frozenset({"createpolicy", "cvta", "wgmma.fence", "tcgen05.fence::before_thread_sync"})


@dataclass(frozen=True)
class Table:
    """Attributes:
    instrs: STATIC[instructions].
    rows: uint32: sources, then results, of one instruction after the other.
    row_count: registers of a warp.
    """

    instrs: NDArray[np.void]
    rows: NDArray[np.uint32]
    row_count: int


def table_of(program: Program, chip: ChipClock) -> Table:
    records = np.zeros(len(program.instrs), STATIC)
    rows: list[int] = []
    for index, instr in enumerate(program.instrs):
        record = records[index]
        sources, results = _registers(program, instr)
        record["rows"], record["sources"], record["results"] = len(rows), len(sources), len(results)
        rows += [*sources, *results]
        _describe(record, instr, chip)
    for index in contracted(program):
        records[index]["kind"], records[index]["unit"], records[index]["busy"] = FREE, NO_UNIT, 0
    return Table(records, np.array(rows or [0], np.uint32), program.rows)


def _describe(record: np.void, instr: Instr, chip: ChipClock) -> None:
    op, kind = instr.op, classify(instr.op)
    record["kind"] = _kind(instr, kind)
    record["latency"], record["reason"] = _latency(kind, instr, chip)
    record["fences"] = fences(instr)
    if record["kind"] == FREE:
        return
    record["unit"], record["busy"] = _unit(kind, instr, chip)
    if record["kind"] == WGMMA:
        record["value"], record["unit"] = wgmma_cycles(instr, chip), NO_UNIT
    elif record["kind"] in (WGMMA_WAIT, BULK_WAIT, BULK_WAIT_READ, CP_WAIT):
        pending = instr["n"] if "n" in op.form.place else None
        record["value"] = pending.value if isinstance(pending, Imm) else EVERYTHING
    elif instr.op.form.id in COPIES:
        record["value"] = int(chip[COPIES[instr.op.form.id]])


def fences(instr: Instr) -> bool:
    """Whether the assembler makes a fence of the GPU's scope (MEMBAR.ALL.GPU) of it, or puts one in front of it.

    It does for whatever releases to more than the CTA, but for an arrival at an mbarrier only where its scope is
    written. Initialised mbarriers need none.
    """
    op = instr.op
    name, scope = op.name, op["scope"]
    if name == "barrier.cluster.arrive":
        return op["sem"] != "relaxed"
    if name == "fence.proxy.async":
        return op["space"] != "shared::cta"
    if name == "membar":
        return op["level"] != "cta"
    if name == "fence":
        return op["sem"] != "acquire" and scope != "cta"
    releases = op["sem"] in ("release", "acq_rel") and not name.startswith("fence")
    return releases and scope in ("cluster", "gpu", "sys")


def _kind(instr: Instr, kind: Class) -> int:
    name = instr.op.name
    if name == "cp.async.bulk.wait_group":
        return BULK_WAIT_READ if instr.op["read"] else BULK_WAIT
    if name in KINDS:
        return KINDS[name]
    if kind in (Class.MOVE, Class.PARAMETER) or name.startswith(tuple(NOTHING)):
        return FREE
    return BY_EVENT if noter_of(instr) is not None else PLAIN


def _latency(kind: Class, instr: Instr, chip: ChipClock) -> tuple[int, int]:
    """(Cycles, what a warp waits for until then)."""
    if kind in (Class.FP32, Class.FP32X2, Class.HALF, Class.MULTIPLY):
        return int(chip["fma_latency"]), ARITHMETIC
    if kind in (Class.MUFU, Class.CONVERT):
        return int(chip["special_latency"]), SPECIAL
    if kind is Class.SHUFFLE:
        return int(chip["shuffle_latency"]), SHARED_LOAD
    if kind in (Class.SHARED, Class.MATRIX, Class.LOCAL):
        return int(chip["shared_latency"]), SHARED_LOAD
    if kind in (Class.GLOBAL, Class.ATOMIC):
        # The least: the replay knows when data come. The order of instructions needs it, which puts loads first.
        return int(chip["l2_latency"]), GLOBAL_LOAD
    if kind is Class.MMA_SYNC:
        return int(chip["mma_latency"]), ARITHMETIC
    return int(chip["alu_latency"]), ARITHMETIC


def _unit(kind: Class, instr: Instr, chip: ChipClock) -> tuple[int, int]:
    """(Unit, cycles that a warp's instruction keeps it busy)."""
    if kind is Class.MMA_SYNC:
        work = work_of(instr)
        rate = chip["matrix_flops"] / PARTITIONS * {"f16": 1, "tf32": 0.5, "f8": 2, "i8": 2, "f4": 4}[work.rate]
        return MMA, max(1, round(work.flops / rate))
    if kind is Class.PACK:
        # 64 lanes a cycle and SM, as an H200 has them for two float32 to e4m3, and for two e4m3 to float16 (2fefd0a4).
        return FMA, 2
    if kind in ACCESSES:
        return LSU, int(kind is Class.LOCAL)  # others have their wavefronts from an event
    found = cost(instr.op)
    if found.unit is None:
        return NO_UNIT, 0
    unit = UNITS[found.unit]
    if unit == LSU:
        return LSU, max(1, found.results // WARP)
    public = rates(f"{chip.arch}a").units[found.unit]
    rate = chip["special_rate"] if unit == XU and kind is Class.MUFU and instr.op.name == "ex2" else public
    return unit, max(1, round(found.results / (rate / PARTITIONS)))


def wgmma_cycles(instr: Instr, chip: ChipClock) -> int:
    """Of the SM's tensor cores, for a warpgroup: they multiply, or wait for operands from shared memory."""
    form, work = Wgmma.of(instr), work_of(instr)
    rate = chip["matrix_flops"] * {"f16": 1, "tf32": 0.5, "f8": 2, "i8": 2}[work.rate]
    a_bytes = 0 if form.a_in_registers else ROWS * form.k * form.a_bytes
    b_bytes = form.n * form.k * form.b_bytes
    return round(max(2 * ROWS * form.n * form.k / rate, (a_bytes + b_bytes) / chip["shared_bytes"]))


def _registers(program: Program, instr: Instr) -> tuple[list[int], list[int]]:
    """Rows that are waited for, and that are written. Accumulators of a wgmma are there after its wait."""
    read, written = names_of(instr)
    if instr.op.name == "wgmma.mma_async":
        read, written = [name for name in read if name not in set(written)], []
    rows = [[program.row(name) for name in names if name in program.registers] for names in (read, written)]
    return rows[0][:255], rows[1][:255]


def names_of(instr: Instr) -> tuple[list[str], list[str]]:
    """Registers that an instruction reads, its guard first, and that it writes."""
    read = [] if instr.guard is None else [instr.guard.reg.name]
    written: list[str] = []
    for role, operand in zip(instr.op.form.roles, instr.args, strict=True):
        found = list(registers(operand))
        if role.access != "w" or role.address:
            read += found
        if role.access != "r":
            written += found
    return read, written
