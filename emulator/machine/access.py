# SPDX-License-Identifier: Apache-2.0
"""Accesses of a warp to shared and global memory: bounds, history, data.

Every function takes the lanes' addresses as int64 arrays, checks the accesses, records them for the race checks and
then moves bytes. An access that cannot be done raises MemoryFault.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import LOCAL_BASE, RANK_SHIFT, SHARED_BASE
from emulator.machine.clocks import Vector
from emulator.machine.cluster import OFFSET, Cta
from emulator.machine.findings import Kind
from emulator.machine.history import Access
from emulator.machine.loads import begin, overwrite
from emulator.machine.memory import UNSIGNED, MemoryFault
from emulator.machine.shadow import Clash

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

Addresses = NDArray[np.int64]
Values = NDArray[Any]
FULL_WORD = 0xF


def words_of(offsets: Addresses, size: int) -> tuple[Addresses, "int | NDArray[np.uint8]"]:
    """The 4-byte words that accesses of `size` bytes touch, and which bytes of each; no word twice if less than a word.

    Args:
        offsets: multiples of size.
    """
    if size == 4:
        return offsets >> 2, FULL_WORD
    if size > 4:
        return ((offsets >> 2)[:, None] + np.arange(size // 4)).ravel(), FULL_WORD
    words, place = np.unique(offsets >> 2, return_inverse=True)
    mask = np.zeros(words.size, np.uint8)
    np.bitwise_or.at(mask, place, (((1 << size) - 1) << (offsets & 3)).astype(np.uint8))
    return words, mask


def touch_shared(
    runner: "Runner",
    cta: Cta,
    words: "Addresses | slice",
    mask: "int | NDArray[np.uint8]",
    *,
    write: bool,
    stamp: tuple[int, int] | None = None,
    order: Vector | None = None,
    read_order: Vector | None = None,
    atomic: bool = False,
    index: int | None = None,
    uses: bool = True,
) -> None:
    """Record an access to shared memory, and report what it clashes with.

    Args:
        words: each once.
        uses: a read uses what it reads; else it may read what was never written.
        stamp, order, read_order, index: of asynchronous work; the warp's own now if not given.
        read_order: what the warp knew when it issued the work: no read by the generic proxy needs a fence.
    """
    shadow = cta.shared.shadow
    asynchronous = order is not None
    stamp = stamp or runner.clock.stamp
    where = runner.index if index is None else index
    order = runner.clock.knows.seen if order is None else order
    if write:
        clash = shadow.write(words, stamp, order, where, mask, read_order, atomic=atomic)
    else:
        missing = shadow.unwritten(words, mask) if uses else -1
        if missing >= 0:
            message = f"shared address {4 * missing:#x} of {cta.name} is read and was never written"
            runner.report(Kind.UNINITIALISED, message, index=where)
            shadow.written[words] |= mask
        clash = shadow.read(words, stamp, order, where, mask, atomic=atomic)
        if not asynchronous and where in runner.run.program.overtaken.uses:
            begin(runner, cta, words)
    if clash is not None:
        report_clash(runner, cta, clash, where, write=write, asynchronous=asynchronous, read_order=read_order)
    if write and cta.overtaken and cta.cluster.components.is_async[stamp[0]]:
        overwrite(runner, cta, words, mask, order if read_order is None else read_order, where)


def report_clash(
    runner: "Runner", cta: Cta, clash: Clash, where: int, *, write: bool, asynchronous: bool, read_order: Vector | None
) -> None:
    """Report two accesses to shared memory that nothing orders; arguments as of touch_shared."""
    doing = "written" if write else "read"
    message = (
        f"shared address {4 * clash.word:#x} of {cta.name} is {doing}, and nothing orders an earlier {clash.earlier}"
    )
    # Known to the warp, and yet not ordered for the engine: the fence between the two proxies is missing.
    seen = runner.clock.knows.seen if read_order is None else read_order
    known = seen[clash.component] >= clash.clock
    kind = Kind.PROXY if asynchronous and known else Kind.RACE
    other = runner.run.place_of(cta.cluster.number, clash.component, clash.where)
    runner.report(kind, message, other=other, index=where)


def touch_global(
    runner: "Runner",
    addresses: Addresses,
    size: int,
    *,
    write: bool,
    stamp: tuple[int, int] | None = None,
    order: Vector | None = None,
    read_order: Vector | None = None,
    foreign: dict[int, Vector] | None = None,
    atomic: bool = False,
    index: int | None = None,
) -> list[tuple[Any, NDArray[np.intp], Addresses]]:
    """Record accesses of `size` bytes to global memory; the parts by region, as of GlobalMemory.resolve.

    Args:
        stamp, order, read_order, foreign, index: as in touch_shared.
    """
    knows = runner.clock.knows
    component, clock = stamp or runner.clock.stamp
    access = Access(
        runner.cta.cluster.number,
        component,
        clock,
        runner.index if index is None else index,
        knows.seen if order is None else order,
        knows.foreign if foreign is None else foreign,
        atomic,
        read_order,
    )
    parts = runner.run.memory.resolve(addresses, size)
    for region, _, offsets in parts:
        words, mask = words_of(offsets, size)
        clash = (region.history.write if write else region.history.read)(words, access, mask)
        if clash is not None:
            doing = "written" if write else "read"
            byte = max(4 * clash.word - region.lead, 0)
            other = runner.run.place_of(clash.cluster, clash.component, clash.where)
            if not runner.run.owns(clash.cluster):
                message = (
                    f"byte {byte} of {region.name} is {doing}, and nothing orders another launch's {clash.earlier}"
                )
                runner.report(Kind.DEPENDENCY, message, other=other, index=access.where)
                continue
            message = f"byte {byte} of {region.name} is {doing}, and nothing orders an earlier {clash.earlier}"
            seen = knows.seen if read_order is None else read_order
            known = clash.cluster == access.cluster and seen[clash.component] >= clash.clock
            kind = Kind.PROXY if order is not None and known else Kind.RACE
            runner.report(kind, message, other=other, index=access.where)
    return parts


def shared_parts(runner: "Runner", addresses: Addresses) -> Iterator[tuple[Cta, NDArray[np.intp], Addresses]]:
    """Shared addresses by the CTA of the cluster that they lie in: (cta, lanes, offsets)."""
    ctas = runner.cta.cluster.ctas
    ranks = addresses >> RANK_SHIFT
    first = int(ranks[0])
    if (ranks == first).all():
        yield _member(ctas, first, addresses), np.arange(addresses.size), addresses & OFFSET
        return
    for rank in np.unique(ranks):
        lanes = np.flatnonzero(ranks == rank)
        yield _member(ctas, int(rank), addresses), lanes, addresses[lanes] & OFFSET


def _member(ctas: list[Cta], rank: int, addresses: Addresses) -> Cta:
    if not 0 <= rank < len(ctas):
        raise MemoryFault(Kind.BOUNDS, f"shared address {int(addresses[0]):#x}: the cluster has {len(ctas)} CTAs", 0)
    if any(runner.done for runner in ctas[rank].runners) and all(runner.done for runner in ctas[rank].runners):
        raise MemoryFault(Kind.BOUNDS, f"shared address {int(addresses[0]):#x}: {ctas[rank].name} has ended", 0)
    return ctas[rank]


def by_space(addresses: Addresses) -> Iterator[tuple[str, NDArray[np.intp], Addresses]]:
    """Generic addresses by the state space that they point to: (space, lanes, addresses in it)."""
    space = np.where(addresses >= LOCAL_BASE, 2, np.where(addresses >= SHARED_BASE, 1, 0))
    for number, name, base in ((0, "global", 0), (1, "shared", SHARED_BASE), (2, "local", LOCAL_BASE)):
        lanes = np.flatnonzero(space == number)
        if lanes.size:
            yield name, lanes, addresses[lanes] - base


def bytes_of(offsets: Addresses, element: int, count: int) -> Addresses:
    """[lanes, count, element] addresses of the bytes of elements that lie one after the other."""
    return offsets[:, None, None] + np.arange(element * count).reshape(count, element)


def unwritten_elements(cta: Cta, offsets: Addresses, element: int, count: int) -> "NDArray[np.bool_] | None":
    """[lanes, count]: elements with a byte that was never written; None if there is none."""
    written = cta.shared.shadow.written
    words, mask = words_of(offsets, element * count)
    if not ((written[words] & mask) != mask).any():
        return None
    at = bytes_of(offsets, element, count)
    return (written[at >> 2] >> (at & 3) & 1 == 0).any(axis=-1)


def forget_elements(cta: Cta, offsets: Addresses, element: int, undefined: "NDArray[np.bool_]") -> None:
    """What was stored there in the lanes and elements [lanes, count] of `undefined` holds nothing."""
    for at in bytes_of(offsets, element, undefined.shape[1])[undefined].ravel():
        cta.shared.shadow.written[at >> 2] &= ~(1 << (at & 3)) & FULL_WORD


def load(
    runner: "Runner", space: str, addresses: Addresses, element: int, count: int, *, strong: bool = False
) -> "tuple[Values, NDArray[np.bool_] | None]":
    """[lanes, count] integers of `element` bytes, and which of them were never written; None if all were.

    Kernels load rows of shared memory that nobody filled and drop them later: only a use of such a value is a finding.

    Args:
        strong: no order is needed with other strong accesses and atomics.
    """
    size = element * count
    values = np.empty((addresses.size, count), UNSIGNED[min(element, 8)])
    missing: NDArray[np.bool_] | None = None
    if space == "shared":
        for cta, lanes, offsets in shared_parts(runner, addresses):
            cta.shared.check(offsets, size)
            touch_shared(runner, cta, *words_of(offsets, size), write=False, atomic=strong, uses=False)
            values[lanes] = cta.shared.bytes.load(offsets, element, count)
            unwritten = unwritten_elements(cta, offsets, element, count)
            if unwritten is not None:
                missing = np.zeros(values.shape, np.bool_) if missing is None else missing
                missing[lanes] = unwritten
        runner.run.profile.count("shared bytes loaded", addresses.size * size)
    elif space == "global":
        for region, lanes, offsets in touch_global(runner, addresses, size, write=False, atomic=strong):
            values[lanes] = region.bytes.load(offsets, element, count)
        runner.run.profile.count("global bytes loaded", addresses.size * size)
    else:
        for lane, place, address in zip(range(addresses.size), runner.lanes, addresses, strict=True):
            values[lane] = _local(runner, int(place), int(address), size).view(UNSIGNED[element])
    return values, missing


def store(
    runner: "Runner",
    space: str,
    addresses: Addresses,
    values: Values,
    *,
    strong: bool = False,
    undefined: "NDArray[np.bool_] | None" = None,
) -> None:
    """Write values [lanes, count]; `strong` as for load.

    Args:
        undefined: [lanes, count], to shared memory: values that hold nothing, and what they are stored to neither.
    """
    element, count = values.dtype.itemsize, values.shape[1]
    size = element * count
    if space == "shared":
        for cta, lanes, offsets in shared_parts(runner, addresses):
            cta.shared.check(offsets, size)
            touch_shared(runner, cta, *words_of(offsets, size), write=True, atomic=strong)
            cta.shared.bytes.store(offsets, values[lanes])
            if undefined is not None:
                forget_elements(cta, offsets, element, undefined[lanes])
        runner.run.profile.count("shared bytes stored", addresses.size * size)
    elif space == "global":
        for region, lanes, offsets in touch_global(runner, addresses, size, write=True, atomic=strong):
            region.bytes.store(offsets, values[lanes])
        runner.run.profile.count("global bytes stored", addresses.size * size)
    else:
        for lane, place, address in zip(range(addresses.size), runner.lanes, addresses, strict=True):
            _local(runner, int(place), int(address), size).view(UNSIGNED[element])[:] = values[lane]
    runner.run.progress += 1


def _local(runner: "Runner", lane: int, address: int, size: int) -> NDArray[np.uint8]:
    memory = runner.warp.local[lane]
    if not 0 <= address <= memory.size - size:
        raise MemoryFault(Kind.BOUNDS, f"{size} bytes at local address {address:#x}: a thread has {memory.size}", lane)
    if address % size:
        raise MemoryFault(Kind.ALIGNMENT, f"local address {address:#x} is not aligned to {size} bytes", lane)
    return memory[address : address + size]
