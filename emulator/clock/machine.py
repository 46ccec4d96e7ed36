# SPDX-License-Identifier: Apache-2.0
"""The machine of `schedule="clock"`: checks a launch as the others do, records it, and says how long it takes."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from emulator.clock import grid
from emulator.clock.chips import chip_of
from emulator.clock.constants import ChipClock
from emulator.clock.grid import Footprint, Layout, Span
from emulator.clock.order import order_of
from emulator.clock.places import Placed, Places
from emulator.clock.registers import registers_of
from emulator.clock.replay import ENGINES, Replayed, WarpData, reordered, replay
from emulator.clock.spins import last_turns, releases_of, spins_of
from emulator.clock.tables import Table, table_of
from emulator.clock.traces import Recorder
from emulator.core.program import Program
from emulator.host.launch import Launch, Region
from emulator.machine.launch import Run
from emulator.machine.machine import Machine
from emulator.machine.overlap import Overlap

SAMPLES = 3


Place = tuple[int, int]  # address and bytes of a region


def place_of(region: Region) -> Place:
    return region.address, region.bytes


@dataclass(frozen=True)
class Recorded:
    """A launch and what its warps did.

    Attributes:
        places: in the grid, of the clusters that ran.
        classes: traces: [cluster][CTA][warp].
        requested: bytes that the whole grid asks of each of the launch's regions.
        written: bytes of each region that it stores.
    """

    launch: Launch
    program: Program
    shared_bytes: int
    places: tuple[int, ...]
    classes: list[list[list[WarpData]]] = field(repr=False)
    requested: list[float]
    written: list[float]

    @property
    def touched(self) -> dict[Place, float]:
        """Bytes that the launch leaves in L2, by where their regions are."""
        each = zip(self.launch.regions, self.requested, self.written, strict=True)
        return {place_of(region): min(region.bytes, sum(some)) for region, *some in each if any(some)}

    def missing(self, resident: Collection[Place] = ()) -> tuple[float, ...]:
        """Of what the grid asks of each region the part that comes from HBM: every byte does once.

        Args:
            resident: regions that L2 has when the launch begins.
        """
        return tuple(
            min(1.0, region.bytes / asked) if asked and place_of(region) not in resident else 0.0
            for region, asked in zip(self.launch.regions, self.requested, strict=True)
        )

    @property
    def kept(self) -> tuple[float, ...]:
        """Of what the grid stores in each region the part that goes to HBM: L2 gathers parts of a sector, or repeats.

        A store counts as the sectors that it touches, and HBM gets every byte of the region once.
        """
        each = zip(self.launch.regions, self.written, strict=True)
        return tuple(min(1.0, region.bytes / written) if written else 1.0 for region, written in each)

    @property
    def instructions(self) -> list[int]:
        """Of each cluster."""
        return [sum(entries.size for cta in one for entries, _ in cta) for one in self.classes]


@dataclass(frozen=True)
class LaunchTime:
    """How long a launch takes on a chip.

    Attributes:
        cycles: from the first instruction to the end of the last cluster.
        begin: of the first instruction, in microseconds of the stream.
        released: when every CTA has let the next launch start, or has ended.
        end: of the last cluster.
        complete: when it and all before it have ended.
        replayed: of the clusters that were simulated.
        before: the launch before it in the stream.
        replays: of the stream.
        footprint: of a CTA.
        placed: where its first clusters went.
        places: what is on the SMs when they have.
        before_ends: the cycle in which it knows that the launch before has ended.
        missing: of what the grid asks of each region, the part that comes from HBM.
        turn: how often the stream has launched the same before.
    """

    recorded: Recorded
    chip: ChipClock
    layout: Layout
    cycles: float
    begin: float
    released: float
    end: float
    complete: float
    replayed: Replayed
    before: "LaunchTime | None" = field(repr=False)
    replays: "Replays" = field(repr=False)
    footprint: Footprint
    placed: Placed = field(repr=False)
    places: Places = field(repr=False)
    before_ends: int
    missing: tuple[float, ...]
    turn: int

    def left(self) -> Places:
        """What is on the SMs from the launch on, and when it leaves.

        The SMs with fewest and with most of its clusters are replayed; those between them are taken to end between.
        """
        layout, counts = self.layout, sorted(set(self.placed.counts.values()))
        ends = dict.fromkeys(counts, self.end)
        if layout.clusters == layout.first_turn and counts[0] < counts[-1]:
            fewest = replace(layout, crowd=counts[0], clusters=counts[0] * layout.groups)
            taken = self.replays.taken(self.recorded, fewest, self.before_ends, self.missing, active=layout.active)
            first = min(self.end, self.begin + self.chip.microseconds(taken.cycles, taken.matrix))
            each = (self.end - first) / (counts[-1] - counts[0])
            ends = {count: first + (count - counts[0]) * each for count in counts}
        places = self.places.copy()
        spread = self.chip.microseconds(self.chip["l2_halves"])
        places.leave(self.placed, self.footprint, layout.members, ends, spread)
        return places

    @property
    def microseconds(self) -> float:
        """What it adds to the stream: its time, with what it takes to start it, less what overlaps with others."""
        return self.complete - (0.0 if self.before is None else self.before.complete)


class ClockMachine(Machine):
    """A machine that keeps the time of each launch.

    Args:
        chip: that the times are of; the one that stands for the arch if not given.
        samples: clusters of a grid that run; the others are taken to do as the nearest of them. 0: all of them do.
        faulty: launches with findings are timed too.
        timed: whether launches are timed at once; else they are recorded alone, for `stream_of`.

    Attributes:
        recorded: the launches.
        times: of each launch.
    """

    def __init__(
        self,
        arch: str,
        sms: int,
        *,
        chip: str | None = None,
        samples: int = SAMPLES,
        faulty: bool = False,
        timed: bool = True,
    ) -> None:
        # Work is done at once, so that nobody waits: when it is done the replay finds out.
        super().__init__(arch, sms, "eager")
        self.chip = chip_of(arch, chip)
        self.samples, self.faulty, self.timed = samples, faulty, timed
        self.recorded: list[Recorded] = []
        self.times: list[LaunchTime] = []

    def launch(self, launch: Launch) -> None:
        self.overlap([launch])

    def overlap(self, launches: Sequence[Launch]) -> None:
        """Run launches one after the other, and time each of them behind those before it in the stream."""
        for launch in launches:
            run = self._run(launch)
            run.execute()
            if not self.faulty and any(not finding.warning for finding in self.findings):
                continue
            recorded = recorded_of(run)
            self.recorded.append(recorded)
            if self.timed:
                self.times.append(time_of(recorded, self.chip, before=self.times[-1] if self.times else None))

    def _run(self, launch: Launch, overlap: Overlap | None = None) -> Run:
        run = super()._run(launch, overlap)
        run.record(Recorder(run.program), grid.chosen(run.grid_clusters, self.samples or run.grid_clusters))
        return run


def recorded_of(run: Run) -> Recorded:
    recorder, launch = run.recorder, run.launch
    assert isinstance(recorder, Recorder)
    places = tuple(sorted(recorder.clusters))
    counts = grid.weights(run.grid_clusters, len(places))
    requested, written = recorder.traffic(zip(places, counts, strict=True), len(launch.regions))
    classes = [[[warp.whole() for warp in cta] for cta in recorder.clusters[place]] for place in places]
    return Recorded(launch, run.program, run.shared_bytes, places, classes, requested, written)


def stream_of(launches: Iterable[Recorded], chip: ChipClock) -> list[LaunchTime]:
    """Replay the launches of a stream."""
    times: list[LaunchTime] = []
    for recorded in launches:
        times.append(time_of(recorded, chip, before=times[-1] if times else None))
    return times


def time_of(
    recorded: Recorded, chip: ChipClock, *, shortest: int = 1 << 62, before: LaunchTime | None = None
) -> LaunchTime:
    """Replay a launch on a chip.

    Args:
        shortest: waits from so many cycles on are kept for a timeline.
        before: the launch before it in the stream.
    """
    launch = recorded.launch
    footprint = Footprint.of(launch, recorded.shared_bytes, registers_of(recorded.program))
    even = Layout.of(launch, chip.sms, max(1, footprint.fits()))
    eligible, places = start_of(launch, chip, before)
    placed = places.place(footprint, even.first_turn, even.members, eligible)
    layout = replace(even, crowd=placed.most)
    # All of its first clusters are taken to begin when the last of them has found room.
    begin = placed.last if before is not None and launch.programmatic else eligible
    known = 0.0 if before is None or not launch.programmatic else before.end + chip["dependent_us"]
    before_ends = max(0, round((known - begin) * chip.gigahertz * 1e3))
    replays = Replays(chip) if before is None or before.chip is not chip else before.replays
    turn = turn_of(recorded, before)
    missing = recorded.missing(resident(turn, chip, before))
    taken = replays.taken(recorded, layout, before_ends, missing, shortest)
    released, end = (begin + chip.microseconds(cycles, taken.matrix) for cycles in (taken.released, taken.cycles))
    complete = end if before is None else max(end, before.complete)
    return LaunchTime(
        recorded, chip, layout, taken.cycles, begin, released, end, complete, taken.replayed, before, replays,
        footprint, placed, places, before_ends, missing, turn,
    )  # fmt: skip


def turn_of(recorded: Recorded, before: LaunchTime | None) -> int:
    """How often the same was launched before."""
    while before is not None and before.recorded is not recorded:
        before = before.before
    return 0 if before is None else before.turn + 1


def resident(turn: int, chip: ChipClock, before: LaunchTime | None) -> set[Place]:
    """Regions that L2 has when a launch begins: those that the last launches in front of it touched, while they fit.

    Of a launch that touched more than fits nothing is left, and nothing of those before it. A stream that launches the
    same again is taken to have other tensors in each of its turns, as benchmarks have it.
    """
    found: set[Place] = set()
    room = chip["l2_mebibytes"] * 2**20
    while before is not None and before.turn == turn:
        more = {place: size for place, size in before.recorded.touched.items() if place not in found}
        room -= sum(more.values())
        if room < 0:
            break
        found |= more.keys()
        before = before.before
    return found


def start_of(launch: Launch, chip: ChipClock, before: LaunchTime | None) -> tuple[float, Places]:
    """When a launch may begin, and what is on the SMs: a programmatic one begins when the one before it lets it."""
    start = max(0.0, chip["launch_us"] - chip["overlapped_us"] * launch.programmatic)
    if before is None or not launch.programmatic:
        return start + (0.0 if before is None else before.complete), Places(chip.sms, chip.microseconds(1))
    return before.released + start, before.left()


def in_order(recorded: Recorded, chip: ChipClock) -> Recorded:
    """The same with instructions in an assembler's order, and one turn of each loop that waits for a flag."""
    order, spins = order_of(recorded.program, chip), spins_of(recorded.program)

    def warp(entries: NDArray[np.uint32], events: NDArray[np.void]) -> WarpData:
        entries, events = last_turns(entries, events, spins)
        return reordered(entries, order), events

    classes = [[[warp(*data) for data in cta] for cta in one] for one in recorded.classes]
    return replace(recorded, classes=classes)


@dataclass(frozen=True)
class Taken:
    """Cycles of a grid, from its first instruction on.

    Attributes:
        released: when every CTA has let the next launch start, or has ended.
        replayed: the simulated clusters, of which those that take longest.
    """

    cycles: float
    released: float
    replayed: Replayed

    @property
    def matrix(self) -> float:
        """Part of the time in which the tensor cores are busy."""
        return float(self.replayed.engines[ENGINES.index("tensor cores")]) / self.replayed.cycles

    def later(self, wait: int, cycles: int) -> "Taken":
        """The same where the launch before ends so many cycles behind cycle `wait`, in which all warps wait for it."""
        released = self.released + cycles * (self.released >= wait)
        return Taken(self.cycles + cycles, released, self.replayed)


class Replays:
    """Of a stream's launches on a chip. Launches of one record that find the same are replayed once."""

    def __init__(self, chip: ChipClock) -> None:
        self.chip = chip
        self._ordered: dict[int, tuple[Recorded, Recorded, Table]] = {}
        self._kept: dict[tuple[int, Layout, float, int, tuple[float, ...]], Taken] = {}

    def taken(
        self,
        recorded: Recorded,
        layout: Layout,
        before_ends: int,
        missing: tuple[float, ...],
        shortest: int = 1 << 62,
        *,
        active: float | None = None,
    ) -> Taken:
        """What a launch takes.

        Args:
            before_ends: the cycle from which on a wait for the launch before returns.
            missing: of what the grid asks of each region, the part that comes from HBM.
            shortest: waits from so many cycles on are kept for a timeline.
            active: SMs at work; the layout's if not given.
        """
        if not before_ends or shortest < 1 << 62:
            return self._replayed(recorded, layout, before_ends, missing, shortest, active)
        # Once all warps wait, it does not matter for how long.
        long = math.ceil(self._replayed(recorded, layout, 0, missing, shortest, active).cycles)
        if before_ends <= long:
            return self._replayed(recorded, layout, before_ends, missing, shortest, active)
        taken = self._replayed(recorded, layout, long, missing, shortest, active)
        return taken.later(long, before_ends - long) if taken.cycles > long else taken

    def _replayed(
        self,
        recorded: Recorded,
        layout: Layout,
        before_ends: int,
        missing: tuple[float, ...],
        shortest: int,
        active: float | None,
    ) -> Taken:
        work = layout.active if active is None else active
        key = (id(recorded), layout, work, before_ends, missing)
        if shortest == 1 << 62 and key in self._kept:
            return self._kept[key]
        if id(recorded) not in self._ordered:
            ordered, table = in_order(recorded, self.chip), table_of(recorded.program, self.chip)
            # The record itself is kept, so that no other one gets its id.
            self._ordered[id(recorded)] = recorded, ordered, table
        _, ordered, table = self._ordered[id(recorded)]
        counts = recorded.instructions
        alike = max(counts) - min(counts) <= grid.ALIKE * max(counts)
        # CTAs that wait for others are timed one by one.
        timed = _alike if alike and not spins_of(recorded.program) else _different
        taken = timed(ordered, table, self.chip, layout, work, missing, shortest, before_ends)
        if shortest == 1 << 62:
            self._kept[key] = taken
        return taken


def _alike(
    recorded: Recorded,
    table: Table,
    chip: ChipClock,
    layout: Layout,
    active: float,
    missing: tuple[float, ...],
    shortest: int,
    before_ends: int,
) -> Taken:
    """The SMs that have most clusters; where these are many, the last ones are taken to go on as those before."""
    slots = min(layout.slots, layout.per_group)
    turns = min(layout.per_group, grid.SETTLED * slots)
    launches = [number % len(recorded.classes) for number in range(turns)]
    constants = chip.of_replay(active)
    replayed = replay(
        table, recorded.classes, launches, constants, missing, recorded.kept, slots=slots, shortest=shortest,
        before_ends=before_ends,
    )  # fmt: skip
    released = int(replayed.releases.max())
    left = layout.per_group - turns
    if not left:
        return Taken(replayed.cycles, released, replayed)
    half = turns // 2
    ends = sorted(replayed.ends.tolist())
    # Stores run ahead of HBM: for long it is the busiest engine that counts.
    each = max((ends[-1] - ends[half - 1]) / (turns - half), float(replayed.engines.max()) / turns)
    return Taken(replayed.cycles + left * each, released + left * each, replayed)


def _different(
    recorded: Recorded,
    table: Table,
    chip: ChipClock,
    layout: Layout,
    active: float,
    missing: tuple[float, ...],
    shortest: int,
    before_ends: int,
) -> Taken:
    """Each kind of cluster by itself, as many of it as run at the same time; then the grid.

    Clusters that wait for flags are replayed twice: a flag is set when the last cluster releases one that did not have
    to wait itself.
    """
    constants = chip.of_replay(grid.at_work(layout, recorded.instructions, active))
    slots = min(layout.slots, layout.per_group)
    flags = [spin.load for spin in spins_of(recorded.program)]
    numbers = range(len(recorded.classes))

    def replayed(number: int, flags_from: int, known_from: int) -> Replayed:
        return replay(
            table, recorded.classes, [number] * slots, constants, missing, recorded.kept, slots=slots,
            shortest=shortest, flags=flags, flags_from=flags_from, before_ends=known_from,
        )  # fmt: skip

    def replays(known_from: int) -> list[Replayed]:
        every = [replayed(number, 0, known_from) for number in numbers]
        released = releases_of(recorded.program)
        if flags and released:
            set_at = max(int(one.stamps[released].max()) for one in every) + int(chip["gpu_fence"])
            every = [
                replayed(number, set_at, known_from) if one.stamps[flags].any() else one
                for number, one in enumerate(every)
            ]
        return every

    dispatch = chip["dispatch"]
    every = replays(0)
    late = replays(before_ends) if before_ends else every
    spans = [
        Span(*(time + dispatch for one in pair for time in (one.cycles, int(one.releases.max()))))
        for pair in zip(every, late, strict=True)
    ]
    end, released = grid.laid_out(layout, spans, before_ends)
    longest = max(numbers, key=lambda index: spans[index].late_end)
    return Taken(end - dispatch, released - dispatch, late[longest])
