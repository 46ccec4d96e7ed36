# SPDX-License-Identifier: Apache-2.0
"""One warp: its registers, its lanes, and the interpreter that runs it from trap to trap."""

import ctypes
import enum
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emulator.core.library import LANES, MAX_FAULTS, State, library
from emulator.core.program import FULL, LOCAL_BASE, PARAM_BASE, SHARED_BASE, Program, fill
from emulator.errors import Unsupported
from emulator.ptx import special
from emulator.ptx.ir import BITS, Address, Imm, Not, Operand, Reg, Sink, Special, Symbol

BUSY_READ, BUSY_LOAD, BUSY_COPY = 2, 3, 4  # rows.h has the same
NOT_TAKEN = 0x80000000  # rows.h has the same
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]


class Kind(enum.Enum):
    """Why a warp stopped."""

    TRAP = 0  # before an instruction that the machine executes
    DONE = 1  # all lanes have ended
    LIMIT = 2  # as many instructions as allowed were run
    STUCK = 3  # every live lane waits for others of its warp


KINDS = tuple(Kind)


class Event(NamedTuple):
    """Where a warp stopped.

    Attributes:
        index: of the instruction.
        mask: lanes that it executes for; those that wait, if the warp is stuck.
    """

    kind: Kind
    index: int  # type: ignore[assignment]
    mask: int


class FaultKind(enum.Enum):
    UNWRITTEN = "use of a value that was never written"
    BUSY = "use of a register that an asynchronous wgmma has"
    MEMBERS = "bad member mask"
    DIVISION = "division by zero"


FAULT_KINDS = tuple(FaultKind)


@dataclass(frozen=True)
class Fault:
    """Something that a kernel may not do with its registers; execution went on.

    Attributes:
        index: of the instruction.
        register: name; empty where the operand is none.
        lanes: that it concerns.
    """

    index: int
    kind: FaultKind
    register: str
    lanes: int


class Warp:
    """One warp of 32 lanes.

    Args:
        specials: value of each special register, by name (`%tid`) and component; one for each lane or for all. Clocks
            and lane masks need none.
        parameters: the kernel's parameter block.
        window: bits that every shared address of the CTA carries: its rank in the cluster << 24.
        addresses: of the variables in global and constant memory.
        live: lanes that exist.
        local_bytes: of local memory of a lane, if more than the program's variables need.
        param_base: address of the parameter block.

    Attributes:
        rows: uint32[rows, 32], the register file.
        init: uint32[rows], at a register's first row the lanes in which all its bits are defined. A register is not
            until it is written, nor what is computed from undefined bits: undefined.h says how far they spread. That
            is no fault; their use is: in a guard or a branch, as an address, a member mask or a divisor, in a vote or
            a match of lanes, and in whatever the machine takes, such as values to be stored.
        busy: uint8[rows], rows that asynchronous work has: BUSY_READ if it only reads them, so that others may as well;
            BUSY_LOAD if it loads into them, and BUSY_COPY what a move took from there, until it is written anew.
        counts: uint32[instructions], how often each was executed.
        local: uint8[32, bytes], local memory.
    """

    def __init__(
        self,
        program: Program,
        *,
        specials: Mapping[tuple[str, str | None], "int | U32"],
        parameters: bytes = b"",
        window: int = 0,
        addresses: Mapping[str, int] | None = None,
        live: int = FULL,
        local_bytes: int = 0,
        param_base: int = PARAM_BASE,
    ) -> None:
        self.program = program
        self.window = window
        self.param_base = param_base
        self._addresses = addresses or {}
        self._specials = specials
        self._library = library()
        rows, init = program.constant_rows
        self.rows = _aligned(rows.shape)
        self.rows[:] = rows
        self.init = init.copy()
        self.busy = np.zeros(program.rows, np.uint8)
        self.counts = np.zeros(len(program.code), np.uint32)
        self.local = np.zeros((LANES, max(local_bytes, program.local_bytes, 16)), np.uint8)
        self._parameters = np.frombuffer(parameters or b"\0", np.uint8).copy()
        # Zeros take no memory until something undefined is put there.
        self._known = np.zeros((program.rows, LANES), np.uint32)
        self._faulted = np.zeros(len(program.code), np.uint16)
        self._drained: set[tuple[int, int, FaultKind]] = set()
        self._found: list[Fault] = []
        self._flat64 = self.rows.reshape(-1).view(np.uint64)
        self._fill()
        self._state = self._make_state(len(parameters), live)
        self._pointer = ctypes.addressof(self._state)
        self.event = Event(Kind.LIMIT, 0, 0)
        self._passing = False

    def _make_state(self, parameter_bytes: int, live: int) -> State:
        state = State()
        program = self.program
        for name, array in (
            ("rows", self.rows),
            ("init", self.init),
            ("busy", self.busy),
            ("counts", self.counts),
            ("code", program.code),
            ("tables", program.tables),
            ("parameters", self._parameters),
            ("local", self.local),
            ("faulted", self._faulted),
            ("known", self._known),
            ("widths", program.widths),
        ):
            setattr(state, name, array.ctypes.data)
        state.parameter_base, state.shared_base, state.local_base = self.param_base, SHARED_BASE, LOCAL_BASE
        state.row_count, state.code_count = program.rows, len(program.code)
        state.parameter_bytes, state.local_bytes = parameter_bytes, self.local.shape[1]
        state.window, state.born, state.live = self.window, live, live
        return state

    def _fill(self) -> None:
        for of, row in self.program.specials.items():
            kind = special.SCALAR.get(of.name) or special.VECTOR[of.name]
            value = self._special(of)
            fill(self.rows, row, value, BITS[kind])
            self.init[row] = FULL
        for (name, offset, width), row in self.program.symbols.items():
            fill(self.rows, row, (self.symbol(name) + offset) & ((1 << width) - 1), width)
            self.init[row] = FULL

    def _special(self, of: Special) -> "int | U32":
        lanes = np.arange(LANES, dtype=np.uint64)
        one = np.uint64(1)
        known = {
            "%laneid": lanes,
            "%lanemask_eq": one << lanes,
            "%lanemask_lt": (one << lanes) - one,
            "%lanemask_le": (one << (lanes + one)) - one,
            "%lanemask_gt": FULL - ((one << (lanes + one)) - one),
            "%lanemask_ge": FULL - ((one << lanes) - one),
        }
        if (of.name, of.component) in self._specials:
            return self._specials[of.name, of.component]
        if of.name in known:
            return known[of.name].astype(np.uint32)
        raise Unsupported(f"special register {of.name}{'.' + of.component if of.component else ''}")

    def symbol(self, name: str) -> int:
        """Address of a variable in its state space; a parameter's is generic.

        Raises:
            Unsupported: nobody gave it one.
        """
        program = self.program
        if name in program.shared:
            return self.window + program.shared[name]
        if name in program.locals:
            return program.locals[name]
        if name in program.parameters:
            return self.param_base + program.parameters[name].offset
        if name in self._addresses:
            return self._addresses[name]
        raise Unsupported(f"the address of {name}")

    def trace(self, capacity: int) -> None:
        """From now on keep the index of every instruction that is issued, for `traced`.

        Args:
            capacity: instructions that are kept until the next call of `traced`; whoever runs the warp sees to it.
        """
        self._trace = np.zeros(capacity, np.uint32)
        self._state.trace = self._trace.ctypes.data

    def traced(self) -> U32:
        """Instructions issued since the last call: indices, with NOT_TAKEN where the guard held for no lane."""
        found = self._trace[: self._state.traced].copy()
        self._state.traced = 0
        return found

    # Running.

    def run(self, limit: int = 1 << 62) -> Event:
        """Run until a trap, the end, a standstill, or `limit` instructions; a trap that was not served comes again."""
        kind = self._library.core_run(self._pointer, limit)
        state = self._state
        self.event = Event(KINDS[kind], state.at, state.mask)
        return self.event

    def advance(self) -> None:
        """The instruction of the last trap is done for the event's lanes; those whose guard is false go on as well."""
        self._library.core_advance(self._pointer)

    def end(self, mask: int) -> None:
        """Lanes end where they are, as by `exit`."""
        self._state.live &= ~mask & FULL

    @property
    def live(self) -> int:
        """Lanes that have not ended."""
        return self._state.live

    @property
    def executed(self) -> int:
        """Instructions so far, those with a false guard too."""
        return self._state.executed

    @property
    def pcs(self) -> U32:
        """Index of each lane's next instruction, uint32[32]."""
        return np.array(self._state.pc, np.uint32)

    def faults(self) -> list[Fault]:
        """What was found since the last call; of more than MAX_FAULTS the rest is dropped, but counted."""
        state, names = self._state, self.program.names
        kept = state.faults[: min(state.fault_count, MAX_FAULTS)]
        found = [Fault(f.index, FAULT_KINDS[f.kind], names.get(f.row, ""), f.lanes) for f in kept]
        self.dropped = max(0, state.fault_count - MAX_FAULTS)
        state.fault_count = 0
        found += self._found
        self._found = []
        return found

    def report_again(self, indices: Iterable[int]) -> None:
        """Faults of these instructions were found before, and are worth finding once more."""
        for index in indices:
            self._faulted[index] = 0
            self._drained = {one for one in self._drained if one[0] != index}

    # Operands of a trapped instruction.

    def _check(self, row: int, mask: int, reads: bool, bits: int = 128) -> None:
        busy = self.busy[row]
        if busy == BUSY_COPY and not reads:
            self.busy[row] = 0
        elif busy and not (busy == BUSY_READ and reads):
            self._report(row, mask, FaultKind.BUSY)
        if reads and not self._passing:
            missing = self._undefined(row, mask, bits)
            if missing:
                self._report(row, missing, FaultKind.UNWRITTEN)

    def _undefined(self, row: int, mask: int, bits: int) -> int:
        """The lanes, of a mask, in which a register's low bits are not all defined."""
        missing = mask & ~int(self.init[row])
        width = int(self.program.widths[row])
        if not missing or bits >= width or bits > 32:
            return missing
        span = max(1, width // 32)
        lacking = ~self._known.reshape(-1)[row * LANES : (row + span) * LANES : span] & np.uint32((1 << bits) - 1)
        return missing & int(np.bitwise_or.reduce((lacking != 0) << np.arange(LANES, dtype=np.int64)))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, values are read to be passed on and not used: what was never written is no fault; see `defined`."""
        self._passing = True
        try:
            yield
        finally:
            self._passing = False

    def check_rows(self, rows: NDArray[np.int64], *, reads: bool) -> None:
        """Faults of many registers of up to 32 bits that the current instruction reads, or writes."""
        mask = self.event.mask
        if self.busy[rows].any() or (reads and (~self.init[rows] & np.uint32(mask)).any()):
            for row in rows:
                self._check(int(row), mask, reads)

    def _report(self, row: int, lanes: int, kind: FaultKind) -> None:
        index = self.event.index
        if (index, row, kind) not in self._drained:
            self._drained.add((index, row, kind))
            self._found.append(Fault(index, kind, self.program.names.get(row, ""), lanes))

    def u32(self, operand: Operand, bits: int = 32) -> U32:
        """The 32 lanes of an operand of up to 32 bits: a view of a register, not to be written into.

        Args:
            bits: that are used; those of a wider register that lie above may be undefined.
        """
        if isinstance(operand, Reg):
            row = self.program.row(operand.name)
            self._check(row, self.event.mask, True, bits)
            return self.rows[row] if operand.bits <= 32 else self._wide(row).astype(np.uint32)
        return self._constant(operand, 32).astype(np.uint32)

    def u64(self, operand: Operand) -> U64:
        """The 32 lanes of an operand of 64 bits; a narrower register is zero-extended."""
        if isinstance(operand, Reg):
            row = self.program.row(operand.name)
            self._check(row, self.event.mask, True)
            return self._wide(row) if operand.bits == 64 else self.rows[row].astype(np.uint64)
        return self._constant(operand, 64)

    def _wide(self, row: int) -> U64:
        """The 32 lanes of a register of 64 bits, by its row."""
        return self._flat64[row * 16 : row * 16 + LANES]

    def b128(self, operand: Operand) -> U64:
        """The 32 lanes of an operand of 128 bits, uint64[32, 2], the low half first."""
        if not isinstance(operand, Reg):
            raise Unsupported(f"{operand} as an operand of 128 bits")
        row = self.program.row(operand.name)
        self._check(row, self.event.mask, True)
        return self._flat64[row * 16 : row * 16 + 2 * LANES].reshape(LANES, 2)

    def f32(self, operand: Operand) -> NDArray[np.float32]:
        return self.u32(operand).view(np.float32)

    def pred(self, operand: Operand) -> int:
        """The lanes for which a predicate holds, among those of the event."""
        mask = self.event.mask
        if isinstance(operand, Imm):
            return mask if operand.value else 0
        negated = isinstance(operand, Not)
        values = self.u32(operand.reg if isinstance(operand, Not) else operand) & 1
        holds = int(np.bitwise_or.reduce(values << np.arange(LANES, dtype=np.uint32)))
        return (~holds if negated else holds) & mask

    def _constant(self, operand: Operand, width: int) -> U64:
        if isinstance(operand, Imm):
            return np.full(LANES, operand.bits(width), np.uint64)
        if isinstance(operand, Special):
            return np.broadcast_to(np.asarray(self._special(operand), np.uint64), (LANES,))
        if isinstance(operand, Symbol):
            return np.full(LANES, self.symbol(operand.name) + operand.offset & ((1 << width) - 1), np.uint64)
        raise Unsupported(f"{operand} as an operand")

    def address(self, operand: Address) -> NDArray[np.int64]:
        """Where each lane's address points, int64[32]."""
        base, offset = operand.base, operand.offset
        if isinstance(base, Reg):
            if base.bits == 64:
                return self.u64(base).view(np.int64) + offset
            return (self.u32(base).astype(np.int64) + offset) & FULL
        return np.full(LANES, (0 if base is None else self.symbol(base.name)) + offset, np.int64)

    def uniform(self, operand: Operand, mask: int | None = None) -> int:
        """An operand's value in the lowest lane of a mask, the event's by default, as an unsigned integer.

        A constant has the bits of 64; of a narrower one the caller keeps what it wants.
        """
        mask = self.event.mask if mask is None else mask
        lane = (mask & -mask).bit_length() - 1
        if not isinstance(operand, Reg):
            return int(self._constant(operand, 64)[lane])
        row = self.program.row(operand.name)
        self._check(row, mask, True)
        return int(self._flat64[row * 16 + lane] if operand.bits == 64 else self.rows[row, lane])

    # Results. Lanes outside the mask keep what they have.

    def put32(self, operand: Operand, values: "U32 | int", mask: int | None = None) -> None:
        """Write a register of up to 32 bits; bits beyond a narrower one are dropped."""
        found = self._target(operand, mask)
        if found is None:
            return
        reg, row, mask = found
        if reg.bits < 32:
            values = np.asarray(values).astype(np.uint32) & np.uint32((1 << reg.bits) - 1)
        self._write(self.rows[row], values, mask)

    def put64(self, operand: Operand, values: "U64 | int", mask: int | None = None) -> None:
        found = self._target(operand, mask)
        if found is not None:
            _, row, mask = found
            self._write(self._wide(row), values, mask)

    def put_b128(self, operand: Operand, values: U64, mask: int | None = None) -> None:
        """Write uint64[32, 2]."""
        found = self._target(operand, mask)
        if found is not None:
            _, row, mask = found
            lanes = lanes_of(mask)
            self._flat64[row * 16 : row * 16 + 2 * LANES].reshape(LANES, 2)[lanes] = values[lanes]

    def put_pred(self, operand: Operand, holds: int, mask: int | None = None) -> None:
        """Write a predicate: true in the lanes of `holds`."""
        self.put32(operand, lanes_of(holds & FULL).astype(np.uint32), mask)

    def undefine(self, operand: Operand, mask: int) -> None:
        """The register holds nothing in some lanes: what was read to it was never written."""
        found = self._target(operand, mask)
        if found is not None:
            reg, row, _ = found
            self.init[row] &= np.uint32(~mask & FULL)
            words = max(1, reg.bits // 32)
            self._known[row : row + words].reshape(LANES, words)[lanes_of(mask)] = 0

    def defined(self, operand: Operand, bits: int = 128) -> int:
        """The event's lanes in which an operand's low bits are defined: for what passes values on, and uses none.

        A use takes `u32`, `u64`, ... instead, which report it.
        """
        if isinstance(operand, Reg):
            mask = self.event.mask
            return mask & ~self._undefined(self.program.row(operand.name), mask, bits)
        return self.event.mask

    def _target(self, operand: Operand, mask: int | None) -> tuple[Reg, int, int] | None:
        if isinstance(operand, Sink):
            return None
        if not isinstance(operand, Reg):
            raise Unsupported(f"{operand} as a destination")
        mask = self.event.mask if mask is None else mask
        row = self.program.row(operand.name)
        self._check(row, mask, False)
        self.init[row] |= mask
        return operand, row, mask

    @staticmethod
    def _write(lanes: NDArray, values: "NDArray | int", mask: int) -> None:
        if mask == FULL:
            lanes[:] = values
        else:
            np.copyto(lanes, values, where=lanes_of(mask), casting="unsafe")


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> NDArray[np.bool_]:
    """bool[32] of a mask; not to be written into."""
    return np.array([mask >> lane & 1 for lane in range(LANES)], np.bool_)


def _aligned(shape: tuple[int, ...]) -> U32:
    """A register file that begins at a multiple of 64 bytes: a row is then two lines of the cache, not three."""
    count = int(np.prod(shape))
    whole = np.zeros(count + 16, np.uint32)
    start = -(whole.ctypes.data // 4) % 16
    return whole[start : start + count].reshape(shape)
