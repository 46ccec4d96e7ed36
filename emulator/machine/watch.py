# SPDX-License-Identifier: Apache-2.0
"""What is counted while an instruction executes, beside what it does: amounts that only its operands tell.

Whatever follows from the instruction alone, such as the multiplications of a wgmma, is counted afterwards, from how
often it ran (`emulator.profile.work`).

Sources: PTX ISA 9.2, 9.7.14.5.15 (ldmatrix), 9.7.16.4 (instruction descriptor), 9.7.16.10 (tcgen05.mma).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from emulator.core.program import LOCAL_BASE, RANK_SHIFT, SHARED_BASE, Program
from emulator.machine.banks import wavefronts
from emulator.machine.tcgen05 import BITS as FORMAT_BITS
from emulator.machine.tcgen05 import KINDS, InstructionDescriptor
from emulator.ptx.ir import BITS, Address, Imm, Instr, Vec

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

# Names of amounts in KernelProfile.amounts.
WAVEFRONTS, LEAST_WAVEFRONTS = "wavefronts", "wavefronts without conflicts"
WAITS, BLOCKED = "waits", "waits not ready at once"
FLOPS = "flops "  # and the rate that they are done at: f16, tf32, f8, f4, i8
MMA_SHARED_BYTES = "shared bytes read by MMAs"
COPIED_SHARED_BYTES = "shared bytes written by cp.async"

# Formats by the rate of the tensor cores.
RATE_OF_FORMAT = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "u8": "i8", "s8": "i8"} | dict.fromkeys(
    ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), "f8"
)
RATE_OF_KIND = {"f16": "f16", "tf32": "tf32", "f8f6f4": "f8", "i8": "i8"} | {
    "mxf8f6f4": "f8",
    "mxf4": "f4",
    "mxf4nvf4": "f4",
}
MATRIX_ROW = 16  # bytes that a lane of ldmatrix or stmatrix gives the address of

Watcher: TypeAlias = "Callable[[Runner, Instr], None]"


def watchers_of(program: Program) -> "list[Watcher | None]":
    """For each instruction what counts it, None for most."""
    return [_watcher(instr) for instr in program.instrs]


def _watcher(instr: Instr) -> "Watcher | None":
    op = instr.op
    if op.name in ("ld", "st"):
        space = (op["space"] or "").partition("::")[0]
        if space not in ("", "shared"):
            return None
        values = instr["d" if op.name == "ld" else "b"]
        count = len(values.items) if isinstance(values, Vec) else 1
        return partial(_access, size=BITS[op["type"] or ""] // 8 * count, generic=not space)
    if op.name in ("ldmatrix", "stmatrix"):
        return partial(_matrices, rows=8 * matrices_of(instr))
    if op.name == "tcgen05.mma":
        return _multiplication
    if op.form.id in ("cp.async", "cp.async#ignore"):
        return _copy
    return None


def matrices_of(instr: Instr) -> int:
    """How many matrices of 8 rows of 16 bytes an ldmatrix or stmatrix moves; one of m16n16 counts twice."""
    number = int((instr.op["num"] or "x1")[1:])
    return number * (2 if (instr.op["shape"] or "").startswith("m16") and instr.op.name == "ldmatrix" else 1)


def _access(runner: "Runner", instr: Instr, *, size: int, generic: bool) -> None:
    address = instr["a"]
    assert isinstance(address, Address)
    lanes = runner.lanes
    addresses = runner.warp.address(address)[lanes]
    if generic:
        shared = (addresses >= SHARED_BASE) & (addresses < LOCAL_BASE)
        addresses, lanes = addresses[shared] - SHARED_BASE, lanes[shared]
    _count(runner, addresses, lanes, size)


def _matrices(runner: "Runner", instr: Instr, *, rows: int) -> None:
    address = instr["a"]
    assert isinstance(address, Address)
    lanes = runner.lanes[:rows]
    _count(runner, runner.warp.address(address)[lanes], lanes, MATRIX_ROW)


def _count(runner: "Runner", addresses: "np.ndarray", lanes: "np.ndarray", size: int) -> None:
    own = addresses >> RANK_SHIFT == runner.cta.rank
    if not own.all():
        # Another CTA's banks are behind the network between SMs.
        addresses, lanes = addresses[own], lanes[own]
    found = wavefronts(addresses, size, lanes)
    profile, number, index = runner.run.profile, runner.number, runner.index
    profile.count_at(WAVEFRONTS, number, index, found.needed)
    profile.count_at(LEAST_WAVEFRONTS, number, index, found.least)


def _copy(runner: "Runner", instr: Instr) -> None:
    size = instr["size"]
    assert isinstance(size, Imm)
    runner.run.profile.count_at(COPIED_SHARED_BYTES, runner.number, runner.index, size.value * runner.count)


def _multiplication(runner: "Runner", instr: Instr) -> None:
    """Of both CTAs where two take part."""
    operand = instr["idesc"]
    assert operand is not None
    form = instr.op.form.id
    rate, flops, shared = _shape(
        (instr.op["kind"] or "").removeprefix("kind::"), runner.warp.uniform(operand) & 0xFFFFFFFF, form.endswith("ts")
    )
    profile, number, index = runner.run.profile, runner.number, runner.index
    profile.count_at(FLOPS + rate, number, index, flops)
    profile.count_at(MMA_SHARED_BYTES, number, index, shared)


@lru_cache(maxsize=1024)
def _shape(kind: str, bits: int, a_in_tensor_memory: bool) -> tuple[str, int, int]:
    """(rate, floating-point operations, bytes read from shared memory) of a tcgen05.mma."""
    found = InstructionDescriptor.of(kind, bits)
    container = KINDS[kind].container
    a, b = container or FORMAT_BITS[found.a], container or FORMAT_BITS[found.b]
    read = found.n * found.k * b + (0 if a_in_tensor_memory else found.m * found.k * a)
    return RATE_OF_KIND[kind], 2 * found.m * found.n * found.k, read // 8
