# SPDX-License-Identifier: Apache-2.0
"""A kernel's profile by role, class and unit, and a cycle model of it. The model is no measurement.

The model asks one question of each unit of an SM: how many cycles would it take, at its public rate (`Rates`), for the
work of one CTA, if it never waited? The longest of these bounds the kernel from below, whatever is overlapped; so does
it for each role alone. What the model leaves out: latencies and dependencies, register bank conflicts, replays, caches,
what the assembler fuses or adds, contention of CTAs on one SM, tensor memory's ports, the power limit. Units that come
in quarters (issue slots, ALU, FMA, MUFU, FP64) are taken by the part that has most to do: warp w runs on part w mod 4.
A global byte may come from the L2 cache, so global memory is told, and not among the units that bound.

Waits that were not ready at once depend on the emulator's schedule: they say where warps wait, not for how long.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from emulator.machine.profile import KernelProfile, Profile
from emulator.machine.watch import (
    BLOCKED,
    COPIED_SHARED_BYTES,
    FLOPS,
    LEAST_WAVEFRONTS,
    MMA_SHARED_BYTES,
    WAITS,
    WAVEFRONTS,
)
from emulator.profile import report, roles
from emulator.profile.classes import FREE, PER_PARTITION, Class, Unit, classify, cost
from emulator.profile.rates import PARTITIONS, Rates, rates
from emulator.profile.work import work_of
from emulator.ptx.printer import show_instr

UNITS = tuple(Unit)
# What copy engines read from and write to memories, by the machine's events; a multicast is read once.
_LOADS, _STORES = ("tensor load", "bulk load"), ("tensor store", "bulk store", "tensor reduction", "bulk reduction")
COPIES_SHARED = Counter(
    {f"{name} bytes": 1 for name in (*_LOADS, *_STORES)}
    | {f"{name} bytes multicast": 1 for name in _LOADS}
    | {"cluster copy bytes": 2, "cluster reduction bytes": 2}
)
COPIES_GLOBAL = frozenset(f"{name} bytes" for name in (*_LOADS, *_STORES))
GLOBAL = COPIES_GLOBAL | {"global bytes loaded", "global bytes stored"}


@dataclass(frozen=True)
class Role:
    """Warps that execute the same code.

    Attributes:
        warps: their numbers in the CTA.
        instructions: executed by all of them in all CTAs, by class.
        flops: of matrix multiplications that they issued, by rate.
        waits, blocked: how often they came to an instruction that may wait, and found it not ready.
        cycles: of one CTA's share, by unit.
    """

    name: str
    warps: tuple[int, ...]
    instructions: Mapping[str, int]
    flops: Mapping[str, int]
    waits: int
    blocked: int
    cycles: Mapping[str, float]

    @property
    def issued(self) -> int:
        """Warp instructions, without those that the assembler is taken to remove."""
        return charged(self.instructions)

    @property
    def longest(self) -> str:
        """The unit that bounds the role."""
        return max(self.cycles, key=lambda unit: self.cycles[unit])


@dataclass(frozen=True)
class Site:
    """An instruction that waited, or whose lanes wanted the same banks.

    Attributes:
        line: of the PTX.
        source: where the PTX says that it comes from.
        times: it was executed by a warp.
        amount: waits not ready at once; wavefronts beyond the least.
    """

    line: int
    source: str
    text: str
    times: int
    amount: int


@dataclass(frozen=True)
class KernelSummary:
    """A kernel over all of its launches.

    Attributes:
        tiles: that all CTAs made together, if the caller said so.
        executed: warp instructions by class; `issued` without the free ones.
        flops: of matrix multiplications by rate: f16, tf32, f8, f4, i8.
        shared_bytes, global_bytes: moved by warps, copies and multiplications.
        wavefronts, least_wavefronts: of warps' accesses to shared memory, and without bank conflicts.
        events: whatever the machine counted by name.
        cycles: of one CTA, by unit.
        global_cycles: of one CTA, if no byte came from a cache.
        conflicts, waits: where, most of them first.
    """

    name: str
    arch: str
    chip: str
    ctas: int
    tiles: int | None
    roles: tuple[Role, ...]
    executed: Mapping[str, int]
    flops: Mapping[str, int]
    shared_bytes: int
    global_bytes: int
    wavefronts: int
    least_wavefronts: int
    events: Mapping[str, int]
    cycles: Mapping[str, float]
    global_cycles: float
    conflicts: tuple[Site, ...]
    waits: tuple[Site, ...]

    @property
    def issued(self) -> int:
        """Warp instructions, without those that the assembler is taken to remove."""
        return charged(self.executed)

    @property
    def longest(self) -> str:
        """The unit that bounds the kernel."""
        return max(self.cycles, key=lambda unit: self.cycles[unit])

    @property
    def parts(self) -> int:
        """What amounts are divided by in tables: tiles, or CTAs."""
        return self.tiles or self.ctas or 1

    def per_part(self, cycles: float) -> float:
        """A CTA's cycles as those of a tile, if tiles are known."""
        return cycles * self.ctas / self.parts


@dataclass(frozen=True)
class Summary:
    """The kernels of a profile, in the order of their first launches."""

    kernels: tuple[KernelSummary, ...]

    def __getitem__(self, name: str) -> KernelSummary:
        """The kernel whose name contains this; KeyError unless it is exactly one."""
        found = [kernel for kernel in self.kernels if kernel.name == name] or [
            kernel for kernel in self.kernels if name in kernel.name
        ]
        if len(found) != 1:
            raise KeyError(f"{len(found)} kernels are named {name}: {', '.join(one.name for one in self.kernels)}")
        return found[0]

    def table(self, sites: int = 8) -> str:
        """Text for people; so many places of waits and conflicts are named."""
        return "\n\n".join(report.kernel_text(kernel, sites) for kernel in self.kernels) or "no kernel ran"

    def to_json(self) -> str:
        derived = ({"issued": one.issued, "longest": one.longest} | asdict(one) for one in self.kernels)
        return json.dumps({"model": "lower bounds from public rates; not a measurement", "kernels": list(derived)})


def charged(executed: Mapping[str, int]) -> int:
    free = {kind.value for kind in FREE}
    return sum(count for kind, count in executed.items() if kind not in free)


def summary(
    profile: "Profile | KernelProfile",
    *,
    tiles: "int | Mapping[str, int] | None" = None,
    chip: Rates | None = None,
) -> Summary:
    """Sum up what kernels did.

    Args:
        profile: `device.profile`.
        tiles: that all CTAs of all launches made; one number, or one by each kernel's name.
        chip: rates of the model; those of the kernels' architecture if not given.

    Raises:
        Unsupported: there are no rates for an architecture.
    """
    kernels: Iterable[KernelProfile] = profile.kernels.values() if isinstance(profile, Profile) else (profile,)
    return Summary(
        tuple(
            _kernel(one, tiles.get(one.kernel) if isinstance(tiles, Mapping) else tiles, chip)
            for one in kernels
            if one.ctas
        )
    )


def _kernel(profile: KernelProfile, tiles: int | None, chip: Rates | None) -> KernelSummary:
    arch = profile.program.arch
    chip = chip or rates(arch)
    warps = {number: _warp(profile, number, chip) for number in sorted(profile.executed)}
    found = tuple(_role(profile, role, warps) for role in roles.group(profile.executed))
    events = profile.events
    copied = sum(count * events[name] for name, count in COPIES_SHARED.items())
    whole = _together(warps.values())
    cycles = whole.cycles(profile.ctas)
    cycles[Unit.SHARED.value] += copied / chip.units[Unit.SHARED] / profile.ctas
    global_bytes = sum(events[name] for name in GLOBAL)
    return KernelSummary(
        name=profile.kernel,
        arch=arch,
        chip=chip.name,
        ctas=profile.ctas,
        tiles=tiles,
        roles=_numbered(found),
        executed=whole.named(),
        flops=dict(sorted(whole.flops.items())),
        shared_bytes=whole.shared_bytes + copied + events["shared bytes loaded"] + events["shared bytes stored"],
        global_bytes=global_bytes,
        wavefronts=whole.amounts[WAVEFRONTS],
        least_wavefronts=whole.amounts[LEAST_WAVEFRONTS],
        events=dict(sorted(events.items())),
        cycles=cycles,
        global_cycles=global_bytes / chip.global_bytes / profile.ctas,
        conflicts=_sites(profile, WAVEFRONTS, LEAST_WAVEFRONTS),
        waits=_sites(profile, BLOCKED),
    )


class _Load:
    """What warps ask of each unit, all CTAs together.

    Attributes:
        busy: cycles [units, parts of the SM]; units that serve all warps alike are in part 0.
        shared_bytes: beside those of warps' own loads and stores.
    """

    def __init__(self) -> None:
        self.executed: Counter[Class] = Counter()
        self.flops: Counter[str] = Counter()
        self.amounts: Counter[str] = Counter()
        self.busy = np.zeros((len(UNITS), PARTITIONS))
        self.shared_bytes = 0

    def cycles(self, ctas: int) -> dict[str, float]:
        """Of one CTA, by unit; of the part of the SM that has most to do."""
        return {unit.value: float(busy.max()) / ctas for unit, busy in zip(UNITS, self.busy, strict=True)}

    def add(self, unit: Unit, part: int, cycles: float) -> None:
        self.busy[UNITS.index(unit), part if unit in PER_PARTITION else 0] += cycles

    def named(self) -> dict[str, int]:
        return {kind.value: self.executed[kind] for kind in Class if self.executed[kind]}


def _together(loads: Iterable[_Load]) -> _Load:
    whole = _Load()
    for load in loads:
        whole.executed.update(load.executed)
        whole.flops.update(load.flops)
        whole.amounts.update(load.amounts)
        whole.busy += load.busy
        whole.shared_bytes += load.shared_bytes
    return whole


def _warp(profile: KernelProfile, number: int, chip: Rates) -> _Load:
    load, part = _Load(), number % PARTITIONS
    instrs, counts = profile.program.instrs, profile.executed[number]
    for index in np.flatnonzero(counts):
        instr, count = instrs[index], int(counts[index])
        kind, work = classify(instr.op), work_of(instr)
        load.executed[kind] += count
        load.shared_bytes += work.shared_bytes * count
        if work.flops:
            load.flops[work.rate] += work.flops * count
        if kind in FREE:
            continue
        load.add(Unit.ISSUE, part, count * PARTITIONS / chip.units[Unit.ISSUE])
        asked = cost(instr.op)
        if asked.unit is not None:
            rate = chip.exponential if instr.op.name == "ex2" else chip.units[asked.unit]
            load.add(
                asked.unit, part, count * asked.results * (PARTITIONS if asked.unit in PER_PARTITION else 1) / rate
            )
    for (what, warp, _), amount in profile.amounts.items():
        if warp != number:
            continue
        if what.startswith(FLOPS):
            load.flops[what.removeprefix(FLOPS)] += amount
        elif what in (MMA_SHARED_BYTES, COPIED_SHARED_BYTES):
            load.shared_bytes += amount
        else:
            load.amounts[what] += amount
    load.add(Unit.SHARED, part, load.amounts[WAVEFRONTS] + load.shared_bytes / chip.units[Unit.SHARED])
    for rate_name, flops in load.flops.items():
        load.add(Unit.MMA, part, flops / chip.flops[rate_name])
    return load


def _role(profile: KernelProfile, warps: tuple[int, ...], loads: Mapping[int, _Load]) -> Role:
    load = _together(loads[number] for number in warps)
    counts = sum(profile.executed[number] for number in warps)
    return Role(
        name=roles.name(profile.program.instrs, np.asarray(counts)),
        warps=warps,
        instructions=load.named(),
        flops=dict(sorted(load.flops.items())),
        waits=load.amounts[WAITS],
        blocked=load.amounts[BLOCKED],
        cycles=load.cycles(profile.ctas),
    )


def _numbered(found: tuple[Role, ...]) -> tuple[Role, ...]:
    """Roles of one name get numbers: softmax 1, softmax 2."""
    names = Counter(role.name for role in found)
    seen: Counter[str] = Counter()
    numbered = []
    for role in found:
        seen[role.name] += 1
        new = f"{role.name} {seen[role.name]}" if names[role.name] > 1 else role.name
        numbered.append(replace(role, name=new))
    return tuple(numbered)


def _sites(profile: KernelProfile, what: str, without: str = "") -> tuple[Site, ...]:
    found: Counter[int] = Counter()
    for (name, _, index), amount in profile.amounts.items():
        found[index] += amount if name == what else -amount if name == without else 0
    program = profile.program
    sites = []
    for index, amount in found.most_common():
        if amount > 0:
            instr = program.instrs[index]
            times = sum(int(counts[index]) for counts in profile.executed.values())
            sites.append(Site(instr.line, program.module.where(instr), show_instr(instr), times, amount))
    return tuple(sites)
