# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous operation takes with it when it is issued, and how it moves bytes when it is done."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import RANK_SHIFT
from emulator.machine.access import FULL_WORD, touch_global, touch_shared, words_of
from emulator.machine.barriers import BarrierMisuse, MBarrier
from emulator.machine.clocks import Vector
from emulator.machine.cluster import Cta
from emulator.machine.copies import CopyError
from emulator.machine.findings import Kind
from emulator.machine.handlers.barriers import locate
from emulator.machine.memory import MemoryFault
from emulator.machine.tasks import Task
from emulator.ptx.ir import Address, Imm, Operand

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

Data = NDArray[np.uint8]
Stamp = tuple[int, int]
Stretch = tuple[int, int]
CHUNK = 16
# Complex numbers are numpy's only elements of 16 bytes that move as they are.
MOVED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True)
class Issue:
    """An operation at the time of its issue.

    Attributes:
        index: of its instruction.
        order: what is ordered before its accesses.
        seen: what its warp knows.
        foreign: the same of other clusters.
        history: what came before it, whatever memory order says.
    """

    runner: "Runner"
    index: int
    order: Vector
    seen: Vector
    foreign: dict[int, Vector]
    history: Vector

    @classmethod
    def of(cls, runner: "Runner", *, generic: bool = False) -> "Issue":
        """Of the current instruction.

        Args:
            generic: it makes its accesses by the generic proxy, not by the async proxy.
        """
        knows = runner.clock.knows
        seen = knows.seen.copy()
        order = seen if generic else runner.clock.async_order()
        runner.clock.tick()
        return cls(runner, runner.index, order, seen, dict(knows.foreign), runner.clock.history.copy())

    def submit(self, what: str, do: Callable[[], None]) -> None:
        """Leave the rest to the schedule."""
        runner, run = self.runner, self.runner.run

        def work() -> None:
            runner.guarded(self.index, do)
            run.progress += 1

        line = run.program.instrs[self.index].line
        run.tasks.submit(Task(f"{what} of {runner.name} at PTX line {line}", work))

    # Accesses, when it is done.

    def from_global(self, addresses: NDArray[np.int64], unit: int, stamp: Stamp) -> Data:
        """[n, unit] bytes."""
        data = np.empty((addresses.size, unit), np.uint8)
        for region, places, offsets in self._global(addresses, unit, stamp, write=False, atomic=False):
            data[places] = gather(region.bytes.data, offsets, unit)
        return data

    def to_global(
        self, addresses: NDArray[np.int64], data: Data, stamp: Stamp, update: "Callable[[Data, Data], Data] | None"
    ) -> None:
        """Write [n, unit] bytes; what lies in no region beyond the end of one is left out.

        Args:
            update: what is written for (old bytes, new bytes), of a reduction.
        """
        unit, atomic = data.shape[1], update is not None
        try:
            parts = self._global(addresses, unit, stamp, write=True, atomic=atomic)
        except MemoryFault:
            # A chunk at the end of a tensor reaches behind it, into what no tensor has.
            if unit == 1 or atomic:
                raise
            regions = self.runner.run.memory.resolve(addresses, 1)
            ends = np.empty(addresses.size, np.int64)
            for region, places, _ in regions:
                ends[places] = region.base + region.size
            every = addresses[:, None] + np.arange(unit)
            kept = every < ends[:, None]
            self.to_global(every[kept], data[kept][:, None], stamp, update)
            return
        for region, places, offsets in parts:
            new = data[places]
            if update is not None:
                old = gather(region.bytes.data, offsets, unit)
                new = update(old.reshape(-1), np.ascontiguousarray(new).reshape(-1)).reshape(old.shape)
            scatter(region.bytes.data, offsets, new)

    def _global(
        self, addresses: NDArray[np.int64], unit: int, stamp: Stamp, *, write: bool, atomic: bool
    ) -> list[tuple[Any, NDArray[np.intp], NDArray[np.int64]]]:
        return touch_global(
            self.runner, addresses, unit, write=write, stamp=stamp, order=self.order, read_order=self.seen,
            foreign=self.foreign, atomic=atomic, index=self.index,
        )  # fmt: skip

    def from_shared(
        self, cta: Cta, unit: int, offsets: NDArray[np.int64], stamp: Stamp, dense: Stretch | None = None
    ) -> Data:
        """[n, unit] bytes; `dense` as of a transfer."""
        self._shared(cta, unit, offsets, stamp, dense, write=False)
        return gather(cta.shared.bytes.data, offsets, unit)

    def to_shared(
        self, cta: Cta, unit: int, offsets: NDArray[np.int64], data: Data, stamp: Stamp,
        dense: Stretch | None = None, update: "Callable[[Data, Data], Data] | None" = None,
    ) -> None:  # fmt: skip
        """Write [n, unit] bytes; `dense` as of a transfer, `update` as in to_global."""
        self._shared(cta, unit, offsets, stamp, dense, write=True, atomic=update is not None)
        memory = cta.shared.bytes.data
        if update is not None:
            old = gather(memory, offsets, unit)
            data = update(old.reshape(-1), np.ascontiguousarray(data).reshape(-1)).reshape(old.shape)
        scatter(memory, offsets, data)

    def _shared(
        self, cta: Cta, unit: int, offsets: NDArray[np.int64], stamp: Stamp, dense: Stretch | None, *, write: bool,
        atomic: bool = False,
    ) -> None:  # fmt: skip
        if not offsets.size:
            return
        words: Any
        if dense is None:
            cta.shared.check(offsets, unit)
            words, mask = words_of(offsets, unit)
        else:
            cta.shared.check(np.array([dense[0], dense[1] - CHUNK]), CHUNK)
            words, mask = slice(dense[0] >> 2, dense[1] >> 2), FULL_WORD
        touch_shared(
            self.runner, cta, words, mask, write=write, stamp=stamp, order=self.order,
            read_order=self.seen, atomic=atomic, index=self.index,
        )  # fmt: skip

    def gone(self, cta: Cta, *, warning: bool = False) -> bool:
        """Report whether a CTA has ended before the operation was done with its memory."""
        if not all(runner.done for runner in cta.runners):
            return False
        message = f"{cta.name} has ended, and its shared memory is still to be written"
        self.runner.report(Kind.UNFINISHED, message, index=self.index, warning=warning)
        return True


def gather(memory: Data, offsets: NDArray[np.int64], unit: int) -> Data:
    """[n, unit] bytes at offsets, multiples of the unit."""
    whole = memory[: memory.size // unit * unit].view(MOVED[unit])
    return whole[offsets // unit].view(np.uint8).reshape(-1, unit)


def scatter(memory: Data, offsets: NDArray[np.int64], data: Data) -> None:
    unit = data.shape[1]
    whole = memory[: memory.size // unit * unit].view(MOVED[unit])
    whole[offsets // unit] = np.ascontiguousarray(data).view(MOVED[unit])[:, 0]


def distinct(runner: "Runner", *operands: Operand, signals: bool = False) -> list[tuple[int, ...]]:
    """The operands of the executing lanes, one row for lanes that agree; registers of 32 bits and fewer are unsigned.

    A bulk or tensor copy takes its operands from uniform registers: a warp whose lanes agree makes one copy. Kernels in
    production rely on that for stores, where PTX has every lane make one.

    Args:
        signals: the bytes of each copy are counted on an mbarrier; several lanes are a warning.
    """
    lanes = runner.lanes
    first = int(lanes[0])
    if lanes.size == 1:
        return [tuple(int(column(runner, operand)[first]) for operand in operands)]
    table = np.stack([column(runner, operand)[lanes].astype(np.int64) for operand in operands], axis=1)
    runner.run.profile.count("copies issued by several lanes")
    if (table == table[0]).all():
        if signals:
            message = f"{lanes.size} lanes execute the same copy: it is made once, by PTX once a lane"
            runner.report(Kind.COPY, message, warning=True)
        return [tuple(table[0].tolist())]
    return list(dict.fromkeys(map(tuple, table.tolist())))


def column(runner: "Runner", operand: Operand) -> NDArray[Any]:
    """The 32 lanes of an operand, where an address points."""
    if isinstance(operand, Address):
        return runner.warp.address(operand)
    if isinstance(operand, Imm) or getattr(operand, "bits", 64) > 32:
        return runner.warp.u64(operand).view(np.int64)
    return runner.warp.u32(operand)


def signed(value: int) -> int:
    """A 32-bit pattern as a signed integer."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def shared_address(rank: int, offset: int) -> int:
    return rank << RANK_SHIFT | offset


def own(runner: "Runner", address: int) -> int:
    """The offset of an address that must be in the CTA's own shared memory."""
    cta, offset = locate(runner, address)
    if cta is not runner.cta:
        raise CopyError(f"shared address {address:#x} is in {cta.name}, and must be in the CTA's own memory")
    return offset


def barrier_of(cta: Cta, offset: int) -> MBarrier:
    """An mbarrier when asynchronous work signals it."""
    found = cta.mbarriers.get(offset)
    if found is None:
        raise BarrierMisuse(f"{cta.name} has no mbarrier at shared address {offset:#x} any more")
    return found
