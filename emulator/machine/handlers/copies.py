# SPDX-License-Identifier: Apache-2.0
"""Bulk and tensor copies, reductions and prefetches, and the groups of those that leave shared memory.

Sources: PTX ISA 9.2, sections 9.7.9.25.2 (completion mechanisms), 9.7.9.25.4 (bulk copies), 9.7.9.27 (tensor copies).

A load is one task: it writes the shared memory of one CTA or of several and completes bytes on an mbarrier of each. A
store or reduction is two, since a wait for the reads of a group does not wait for its writes.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from emulator.errors import Unsupported
from emulator.machine import copies
from emulator.machine.barriers import BarrierMisuse
from emulator.machine.clocks import Source
from emulator.machine.cluster import Cta
from emulator.machine.copies import CopyError, Transfer
from emulator.machine.findings import Kind
from emulator.machine.handlers.barriers import locate, signalled
from emulator.machine.handlers.groups import Groups, groups_of
from emulator.machine.handlers.issue import Issue, barrier_of, distinct, own, shared_address, signed
from emulator.machine.handlers.registry import executes
from emulator.machine.handlers.tensor_maps import tensor_map
from emulator.machine.runner import Runner, Wait
from emulator.ptx.ir import Imm, Instr, Operand, TensorAddress

if TYPE_CHECKING:
    from emulator.host.tensor_map import Element, TensorMap

Update = Callable[[copies.Data, copies.Data], copies.Data]
# Where a load goes: the CTA, and the CTA and offset of the mbarrier that it signals.
Target = tuple[Cta, Cta, int]


def present(instr: Instr, *roles: str) -> list[Operand]:
    """Operands by role, those that are there."""
    place = instr.op.form.place
    found = (instr.args[place[role]] for role in roles if role in place)
    return [operand for operand in found if operand is not None]


def targets(runner: Runner, instr: Instr, to: int, at: int, mask: int | None) -> list[Target]:
    """The CTAs that a load writes, with their mbarriers, whose initialisation is checked.

    Args:
        to, at: shared addresses of the destination and of the mbarrier.
        mask: of a multicast, the ranks of the CTAs.
    """
    ctas = runner.cta.cluster.ctas
    barrier_cta, offset = locate(runner, at)
    if mask is None:
        written = [locate(runner, to)[0]]
    else:
        if not mask or mask >> len(ctas):
            raise CopyError(f"a multicast to the CTAs {mask:#x}: the cluster has {len(ctas)}")
        written = [cta for cta in ctas if mask >> cta.rank & 1]
    found = []
    for cta in written:
        pair = instr.op["group"] == "cta_group::2"
        home = ctas[cta.rank & ~1 | barrier_cta.rank & 1] if pair else cta
        if mask is None and home is not barrier_cta:
            raise BarrierMisuse(f"a copy to {cta.name} that completes on an mbarrier of {barrier_cta.name}")
        signalled(runner, shared_address(home.rank, offset))
        found.append((cta, home, offset))
    return found


def load(
    issue: Issue, transfer: Transfer, to: list[Target], read: "Callable[[tuple[int, int]], copies.Data]",
    update: Update | None = None,
) -> None:  # fmt: skip
    """Write a transfer's units to shared memory, and complete its bytes.

    Args:
        read: the units that are inside, by the stamp of the access.
    """
    data: copies.Data | None = None
    for cta, home, offset in to:
        if issue.gone(cta):
            continue
        barrier = barrier_of(home, offset)
        stamp = (barrier.component, barrier.phase)
        if data is None:
            data = read(stamp)
            if not transfer.inside.all():
                whole = np.zeros((transfer.inside.size, transfer.unit), np.uint8)
                whole[transfer.inside] = data
                data = whole
        issue.to_shared(cta, transfer.unit, transfer.shared, data, stamp, transfer.dense, update)
        barrier.complete_bytes(transfer.bytes, issue.history)


def store(issue: Issue, transfer: Transfer, name: str, lanes: int, update: Update | None = None) -> None:
    """Issue a store or a reduction into the warp's open group."""
    runner, cta = issue.runner, issue.runner.cta
    groups = bulk_groups(runner)
    group, number = groups.open, groups.now
    group.add(lanes, issue.index)
    inside = transfer.inside
    everything = inside.all()
    shared, source = (
        (transfer.shared, transfer.source) if everything else (transfer.shared[inside], transfer.source[inside])
    )

    def read() -> None:
        stamp = (runner.component(Source.BULK_READ), number)
        data = issue.from_shared(cta, transfer.unit, shared, stamp, transfer.dense if everything else None)
        group.reading -= 1
        issue.submit(f"writes of a {name}", partial(write, data))

    def write(data: copies.Data) -> None:
        issue.to_global(source, data, (runner.component(Source.BULK_GROUP), number), update)
        group.writing -= 1

    issue.submit(f"a {name}", read)


# Groups.


def bulk_groups(runner: Runner) -> Groups:
    groups = groups_of(runner, Source.BULK_GROUP)
    if not groups.watched:
        groups.watched = True
        runner.at_end.append(partial(check_end, runner, groups))
    return groups


def check_end(runner: Runner, groups: Groups) -> None:
    """A warp has ended: its shared memory may be gone before a copy has read it."""
    if groups.open.where >= 0:
        runner.report(Kind.UNFINISHED, "a bulk copy that was never committed", index=groups.open.where)
    for group in groups.committed:
        if group.where >= 0 and not group.read_awaited:
            message = "the warp ends, and nobody has waited until this copy's group has read shared memory"
            runner.report(Kind.UNFINISHED, message, index=group.where)


@executes("cp.async.bulk.commit_group")
def execute_commit(runner: Runner, instr: Instr) -> None:
    bulk_groups(runner).commit(runner.mask)


@executes("cp.async.bulk.wait_group")
def execute_wait(runner: Runner, instr: Instr) -> Wait:
    left = instr["n"]
    assert isinstance(left, Imm)
    groups, reads = bulk_groups(runner), instr.op["read"] is not None
    waited = groups.before(runner.mask, left.value)

    def ready() -> bool:
        return not any(group.reading if reads else group.writing for group in waited)

    def then() -> None:
        knows = runner.clock.knows
        last = groups.drop([] if reads else waited)
        if waited:
            knows.learn(runner.component(Source.BULK_READ), max(group.number for group in waited))
        for group in waited:
            group.read_awaited = True
        if not reads and last:
            knows.learn(runner.component(Source.BULK_GROUP), last)

    what = "the reads of bulk groups" if reads else "bulk groups"
    return Wait(f"waits for {what}, {left.value} of {len(groups.committed)} may be pending", ready, then)


# Tensor copies.

# The tensor map, the transfer by its address in shared memory, values of other operands.
Box: TypeAlias = "tuple[TensorMap, Callable[[int], Transfer], tuple[int, ...]]"


def box(runner: Runner, instr: Instr, *roles: str, store: bool) -> "list[Box]":
    """The boxes that a warp copies."""
    address = instr["map"]
    assert isinstance(address, TensorAddress)
    mode = instr.op["mode"] or "tile"
    make = copies.tile if mode == "tile" else copies.gather4
    others = present(instr, *roles)
    found: list[Box] = []
    for at, *values in distinct(runner, address.map, *others, *address.coordinates, signals=not store):
        tensor = tensor_map(runner, at)
        coordinates = [signed(value) for value in values[len(others) :]]
        found.append((tensor, partial(make, tensor, coordinates, store=store), tuple(values[: len(others)])))
    return found


@executes("cp.async.bulk.tensor#load")
def execute_tensor_load(runner: Runner, instr: Instr) -> None:
    multicast = instr.op["multicast"] is not None
    issue = Issue.of(runner)
    for tensor, make, values in box(runner, instr, "d", "mbar", *(["mask"] if multicast else []), store=False):
        to, at, *mask = values
        transfer = make(locate(runner, to)[1])
        written = targets(runner, instr, to, at, mask[0] & 0xFFFF if multicast else None)
        source = transfer.source if transfer.inside.all() else transfer.source[transfer.inside]
        read = partial(fetch, issue, tensor, source, transfer.unit)
        issue.submit("a tensor load", partial(load, issue, transfer, written, read))
        count(runner, "tensor load", transfer.bytes, len(written))


def fetch(
    issue: Issue, tensor: "TensorMap", source: copies.Addresses, unit: int, stamp: tuple[int, int]
) -> copies.Data:
    """[n, unit] bytes, converted as the tensor map says."""
    data = issue.from_global(source, unit, stamp)
    return copies.convert(tensor, data.reshape(-1)).reshape(data.shape) if tensor.tf32 else data


@executes("cp.async.bulk.tensor#store")
def execute_tensor_store(runner: Runner, instr: Instr) -> None:
    issue = Issue.of(runner)
    for _, make, (source,) in box(runner, instr, "a", store=True):
        transfer = make(own(runner, source))
        store(issue, transfer, "tensor store", runner.mask)
        count(runner, "tensor store", transfer.bytes)


@executes("cp.reduce.async.bulk.tensor")
def execute_tensor_reduce(runner: Runner, instr: Instr) -> None:
    issue = Issue.of(runner)
    for tensor, make, (source,) in box(runner, instr, "a", store=True):
        transfer = make(own(runner, source))
        if np.unique(transfer.source).size != transfer.source.size:
            raise Unsupported(f"{instr.op.text} to a tensor whose rows overlap, on line {instr.line}")
        store(issue, transfer, "tensor reduction", runner.mask, updating(instr, tensor.element))
        count(runner, "tensor reduction", transfer.bytes)


def updating(instr: Instr, element: "Element | str", *, cluster: bool = False) -> Update:
    op = instr.op["op"] or ""
    return lambda old, new: copies.reduce(op, element, old, new, cluster=cluster)


@executes("cp.async.bulk.prefetch.tensor", "cp.async.bulk.prefetch")
def execute_prefetch(runner: Runner, instr: Instr) -> None:
    """Changes nothing that a kernel can see."""
    runner.run.profile.count("prefetches")


# Bulk copies.


@executes("cp.async.bulk#load")
def execute_bulk_load(runner: Runner, instr: Instr) -> None:
    multicast, ignoring = instr.op["multicast"] is not None, instr.op["ignore_oob"] is not None
    issue = Issue.of(runner)
    roles = ["d", "a", "size", "mbar", *(["mask"] if multicast else []), *(["left", "right"] if ignoring else [])]
    for to, source, size, at, *rest in distinct(runner, *present(instr, *roles), signals=True):
        mask = rest.pop(0) & 0xFFFF if multicast else None
        transfer = copies.bulk(source, locate(runner, to)[1], size, ignored=(rest[0], rest[1]) if rest else (0, 0))
        written = targets(runner, instr, to, at, mask)
        read = partial(issue.from_global, transfer.source, transfer.unit)
        issue.submit("a bulk load", partial(load, issue, transfer, written, read))
        count(runner, "bulk load", transfer.bytes, len(written))


@executes("cp.async.bulk#store", "cp.reduce.async.bulk#store")
def execute_bulk_store(runner: Runner, instr: Instr) -> None:
    reduces = instr.op["op"] is not None
    issue = Issue.of(runner)
    for to, source, size, *mask in distinct(runner, *present(instr, "d", "a", "size", "bytes")):
        transfer = copies.bulk(to, own(runner, source), size, mask=mask[0] & 0xFFFF if mask else 0xFFFF)
        name = "bulk reduction" if reduces else "bulk store"
        update = updating(instr, instr.op["type"] or "") if reduces else None
        store(issue, transfer, name, runner.mask, update)
        count(runner, name, transfer.bytes)


@executes("cp.async.bulk#cluster", "cp.reduce.async.bulk#cluster")
def execute_bulk_cluster(runner: Runner, instr: Instr) -> None:
    """From the CTA's own shared memory to that of another one of the cluster."""
    reduces = instr.op["op"] is not None
    issue = Issue.of(runner)
    for to, source, size, at in distinct(runner, *present(instr, "d", "a", "size", "mbar"), signals=True):
        transfer = copies.bulk(own(runner, source), locate(runner, to)[1], size)
        written = targets(runner, instr, to, at, None)
        update = updating(instr, instr.op["type"] or "", cluster=True) if reduces else None
        read = partial(issue.from_shared, runner.cta, transfer.unit, transfer.source)
        issue.submit("a bulk copy in the cluster", partial(load, issue, transfer, written, read, update))
        count(runner, "cluster reduction" if reduces else "cluster copy", transfer.bytes)


def count(runner: Runner, name: str, size: int, ctas: int = 1) -> None:
    profile = runner.run.profile
    profile.count(f"{name}s")
    profile.count(f"{name} bytes", size)
    if ctas > 1:
        profile.count(f"{name} bytes multicast", size * (ctas - 1))
