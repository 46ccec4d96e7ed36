# SPDX-License-Identifier: Apache-2.0
"""A warp's matrices: ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA 9.2, 9.7.14.5.14 to 9.7.14.5.17)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import FULL, RANK_SHIFT, ROW_SINK, SHARED_BASE, Program
from emulator.errors import Unsupported
from emulator.machine.access import touch_shared
from emulator.machine.cluster import OFFSET
from emulator.machine.findings import Kind
from emulator.machine.fragments import (
    ROW_BYTES,
    Mma,
    Registers,
    load_matrix,
    move_matrix,
    row_bytes,
    row_lanes,
    store_matrix,
)
from emulator.machine.handlers.registry import executes
from emulator.machine.memory import MemoryFault
from emulator.machine.runner import Abort
from emulator.ptx.ir import Address, Instr, Operand, Reg, Sink, Vec

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

Rows = NDArray[np.int64]
FULL_WORD = 0xF


def whole_warp(runner: "Runner", instr: Instr) -> None:
    """Ends the launch unless all 32 lanes execute an instruction: what it does without some of them is undefined."""
    if runner.mask != FULL:
        message = f"{instr.op.name} is executed by lanes {runner.mask:#010x}: all 32 of a warp have to"
        runner.report(Kind.ALIGNED, message)
        raise Abort


def rows_of(program: Program, operand: Operand | None) -> Rows:
    """Rows of the register file that a vector of registers of 32 bits, or one of them, has."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    rows = []
    for item in items:
        if isinstance(item, Sink):
            rows.append(ROW_SINK)
        elif isinstance(item, Reg) and item.bits == 32:
            rows.append(program.row(item.name))
        else:
            raise Unsupported(f"{item} in a matrix of registers")
    return np.array(rows)


@dataclass(frozen=True, eq=False)
class Fragment:
    """What an instruction of the code takes and leaves.

    Attributes:
        sources: rows of the registers of each source.
        results: rows of the destination.
    """

    sources: tuple[Rows, ...]
    results: Rows


@lru_cache(maxsize=8192)
def fragment(program: Program, index: int) -> Fragment:
    """The registers of instruction `index`: those of its roles a, b and c, and of d."""
    instr = program.instrs[index]
    place = instr.op.form.place
    sources = [instr[role] for role in "abc" if role in place and not isinstance(instr[role], Address)]
    results = instr["d"] if "d" in place else None
    found = tuple(rows_of(program, one) for one in sources)
    return Fragment(found, np.array([], np.int64) if results is None else rows_of(program, results))


# Memory.


def own_offsets(runner: "Runner", instr: Instr, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets in the CTA's shared memory of rows whose addresses some lanes have.

    Raises:
        MemoryFault: a row is misaligned, not in shared memory, in another CTA's or out of bounds.
    """
    operand = instr["a"]
    assert isinstance(operand, Address)
    addresses = runner.warp.address(operand)[lanes]
    if instr.op["space"] is None:
        outside = addresses >> SHARED_BASE.bit_length() - 1 != 1
        if outside.any():
            lane = int(outside.argmax())
            raise MemoryFault(Kind.BOUNDS, f"generic address {int(addresses[lane]):#x} is not of shared memory", lane)
        addresses = addresses - SHARED_BASE
    foreign = addresses >> RANK_SHIFT != runner.cta.rank
    if foreign.any():
        lane = int(foreign.argmax())
        message = f"shared address {int(addresses[lane]):#x} is not of {runner.cta.name}, whose warp this is"
        raise MemoryFault(Kind.BOUNDS, message, lane)
    offsets = addresses & OFFSET
    runner.cta.shared.check(offsets, ROW_BYTES)
    return offsets


def touch_rows(runner: "Runner", offsets: NDArray[np.int64], used: int, *, write: bool) -> None:
    words = ((offsets >> 2)[:, None] + np.arange(used // 4)).ravel()
    touch_shared(runner, runner.cta, words, FULL_WORD, write=write)


@executes("ldmatrix")
def execute_load(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    offsets = own_offsets(runner, instr, row_lanes(instr.op))
    used = row_bytes(instr.op)
    touch_rows(runner, offsets, used, write=False)
    data = runner.cta.shared.bytes.load(offsets, 8, ROW_BYTES // 8).view(np.uint8)
    put(runner, fragment(runner.run.program, runner.index).results, load_matrix(instr.op, data))
    profile = runner.run.profile
    profile.count("ldmatrix bytes", offsets.size * used)
    profile.count("shared bytes loaded", offsets.size * used)


@executes("stmatrix")
def execute_store(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    offsets = own_offsets(runner, instr, row_lanes(instr.op))
    (source,) = fragment(runner.run.program, runner.index).sources
    data = store_matrix(instr.op, get(runner, source))
    touch_rows(runner, offsets, ROW_BYTES, write=True)
    runner.cta.shared.bytes.store(offsets, data.view(np.uint64))
    profile = runner.run.profile
    profile.count("stmatrix bytes", data.size)
    profile.count("shared bytes stored", data.size)
    runner.run.progress += 1


# Registers.


def get(runner: "Runner", rows: Rows) -> Registers:
    """[rows, 32]."""
    runner.warp.check_rows(rows, reads=True)
    return runner.warp.rows[rows]


def put(runner: "Runner", rows: Rows, values: NDArray[Any]) -> None:
    runner.warp.check_rows(rows, reads=False)
    runner.warp.rows[rows] = values
    runner.warp.init[rows] = FULL


@executes("movmatrix")
def execute_move(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    found = fragment(runner.run.program, runner.index)
    put(runner, found.results, move_matrix(get(runner, found.sources[0])))


@executes("mma")
def execute_mma(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    found = fragment(runner.run.program, runner.index)
    form = Mma.of(instr.op)
    if tuple(map(len, (*found.sources, found.results))) != form.registers:
        raise Unsupported(f"{instr.op.text} with other than {form.registers} registers for a, b, c and d")
    a, b, c = (get(runner, rows) for rows in found.sources)
    put(runner, found.results, form.multiply(a, b, c))
    runner.run.profile.count(f"mma.sync flops {form.a_type}", 2 * 16 * 8 * form.k)
