# SPDX-License-Identifier: Apache-2.0
"""One launch: its clusters, the turns that warps and asynchronous work take, and the checks at the end."""

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import RANK_SHIFT, Program
from emulator.core.warp import Warp
from emulator.errors import LaunchError, Unsupported
from emulator.host.launch import Dim3, Launch
from emulator.machine.cluster import Cluster, Cta
from emulator.machine.findings import Finding, Findings, Kind, Place
from emulator.machine.handlers import handler_of
from emulator.machine.history import LAUNCH_SHIFT
from emulator.machine.memory import GlobalMemory, Region
from emulator.machine.overlap import Overlap
from emulator.machine.profile import Profile
from emulator.machine.recording import Recorder
from emulator.machine.runner import PATIENCE, Abort, Handler, Runner
from emulator.machine.tasks import Tasks
from emulator.ptx import parse
from emulator.ptx.ir import Module
from emulator.ptx.printer import show_instr

if TYPE_CHECKING:
    from emulator.machine.clocks import Knowledge

MOST_INSTRUCTIONS = 1 << 34  # hours
MOST_SHARED = 1 << 33  # bytes of the emulator's memory for what runs at once
KEPT = 16  # parsed kernels in memory, of some ten MB each


def aligned(block: bytes) -> NDArray[np.uint8]:
    """A parameter block where it may contain tensor maps, at a multiple of 128 bytes."""
    data = np.zeros(len(block) + 128, np.uint8)
    start = -data.ctypes.data % 128
    data[start : start + len(block)] = np.frombuffer(block, np.uint8)
    return data[start : start + len(block)]


@lru_cache(maxsize=KEPT)
def load(ptx: str, kernel: str) -> tuple[Module, Program]:
    """The program of a kernel.

    Raises:
        Refused, Unsupported: something in it is not emulated.
    """
    module = parse(ptx)
    program = Program(module, module.entries[kernel])
    return module, program


class Run:
    """A launch while it runs.

    Attributes:
        handlers: of each instruction that the interpreter hands over, by its index.
        left: warp instructions before the launch counts as endless.
        progress: grows whenever something changed that another warp can see.
        idle: turns since it last grew.
        order: the launch's place among those that overlap.
        votes: of barrier.red: each warp's predicates and lanes, by barrier and round.
        flags: what was released to words of memory, by their address: (cluster's rank or -1, address).
        recorder: keeps what the warps do; None if it is not needed.
        stand_for: clusters of the grid that each one which runs stands for: who claims the next tile by a counter in
            global memory finds that the others have claimed theirs.
    """

    def __init__(
        self,
        launch: Launch,
        sms: int,
        schedule: str,
        seed: int,
        findings: Findings,
        profile: Profile,
        limit: int = MOST_INSTRUCTIONS,
        overlap: Overlap | None = None,
    ) -> None:
        self.launch = launch
        self.left = limit
        self.module, self.program = load(launch.ptx, launch.kernel)
        self.handlers: list[Handler] = handlers_of(self.program)
        self.tasks = Tasks(schedule, seed)
        self.findings = findings
        self.profile = profile.of(launch.kernel, self.program)
        self.progress = self.idle = 0
        allocates = any(instr.op.name == "tcgen05.alloc" for instr in self.program.instrs)
        self.order = None if overlap is None else overlap.join(launch, allocates, self.place_of)
        self.flags: dict[tuple[int, int], Knowledge] = {}
        self.votes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.symbols, regions = self._globals()
        # Kernel parameters are memory as well: tensor maps are read there, by their address.
        self.parameters = aligned(self._parameter_block())
        regions.append(Region.at(self.parameters.ctypes.data, self.parameters.size, "the kernel's parameters"))
        histories = [overlap.histories.of(one) if overlap is not None else None for one in launch.regions]
        regions += [
            Region.at(one.address, one.bytes, one.name, history)
            for one, history in zip(launch.regions, histories, strict=True)
        ]
        self.memory = GlobalMemory(regions)
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.warps = -(-self.threads // 32)
        self.shared_bytes = self.program.shared_static + launch.shared_bytes
        self.members = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        self.resident = max(1, sms // self.members)
        if self.resident * self.members * self.shared_bytes * 20 > MOST_SHARED:
            raise LaunchError(f"{launch.kernel}: {sms} SMs with {self.shared_bytes} bytes of shared memory each")
        self.clusters: dict[int, Cluster] = {}
        self.names: dict[int, list[str]] = {}
        self._indices = self._cluster_indices()
        self.recorder: Recorder | None = None
        self.places: tuple[int, ...] = ()
        self.stand_for = 1
        self.cancelled = 0  # clusters that cluster launch control took from the grid

    def _parameter_block(self) -> bytes:
        block = bytearray(max(self.program.function.param_bytes, 1))
        for variable, parameter in zip(self.program.function.params, self.launch.parameters, strict=True):
            block[variable.offset : variable.offset + len(parameter.data)] = parameter.data
        return bytes(block)

    def _globals(self) -> tuple[dict[str, int], list[Region]]:
        """Memory for the module's own variables."""
        symbols, regions = {}, []
        self._kept = []
        for variable in self.program.globals:
            data = np.zeros(max(variable.size, 16) + 256, np.uint8)
            base = -(-data.ctypes.data // 256) * 256
            start = base - data.ctypes.data
            data[start : start + len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            if variable.relocations:
                raise Unsupported(f"addresses in the initial value of {variable.name}")
            self._kept.append(data)
            symbols[variable.name] = base
            regions.append(Region.at(base, max(variable.size, 16), variable.name))
        return symbols, regions

    def _cluster_indices(self) -> Iterator[Dim3]:
        """The first CTA of each cluster, x fastest."""
        sides = [range(0, grid, part) for grid, part in zip(self.launch.grid, self.launch.cluster, strict=True)]
        return ((x, y, z) for z, y, x in product(*reversed(sides)))

    @property
    def grid_clusters(self) -> int:
        """Clusters of the grid, whether they run or not."""
        grid = self.launch.grid
        return grid[0] * grid[1] * grid[2] // self.members

    def record(self, recorder: Recorder, places: tuple[int, ...]) -> None:
        """Run only the clusters at some places of the grid, ascending, and keep what their warps do."""
        self.recorder, self.places = recorder, places
        self.stand_for = max(1, round(self.grid_clusters / len(places)))
        wanted = set(places)
        every = enumerate(self._cluster_indices())
        self._indices = (first for place, first in every if place in wanted)

    # Starting.

    def start(self) -> bool:
        """Start the next cluster; False if there is none left."""
        first = next(self._indices, None)
        if first is None:
            return False
        number = (self.number << LAUNCH_SHIFT) + len(self.names)
        cluster = Cluster(number, self.members, self.warps, has_tensor_memory=self.launch.arch.startswith("sm_10"))
        self.names[number] = cluster.components.names
        cluster.slot = min(set(range(self.resident)) - {other.slot for other in self.clusters.values()})
        self.clusters[number] = cluster
        parts = self.launch.cluster
        for rank, (z, y, x) in enumerate(product(*(range(part) for part in reversed(parts)))):
            index = (first[0] + x, first[1] + y, first[2] + z)
            cta = Cta(cluster, index, rank, self.shared_bytes, self.threads)
            cluster.ctas.append(cta)
            for number_in_cta in range(self.warps):
                cta.runners.append(self._runner(cta, number_in_cta, (x, y, z), cluster.slot * self.members + rank))
        return True

    def next_cancelled(self) -> Dim3 | None:
        """Take the next cluster off the grid, for cluster launch control: its first CTA, None if there is none left.

        Clusters that are recorded are each for themselves, and find none.
        """
        if self.recorder is not None:
            return None
        first = next(self._indices, None)
        if first is not None:
            self.cancelled += 1
            if self.order is not None:
                self.order.holding -= self.members
        return first

    def _runner(self, cta: Cta, number: int, place: Dim3, sm: int) -> Runner:
        launch = self.launch
        grid, block, cluster = launch.grid, launch.block, launch.cluster
        threads = np.arange(number * 32, number * 32 + 32, dtype=np.uint32)
        live = (1 << min(32, self.threads - number * 32)) - 1
        specials: dict[tuple[str, str | None], object] = {
            ("%laneid", None): np.arange(32, dtype=np.uint32),
            ("%warpid", None): number,
            ("%nwarpid", None): self.warps,
            ("%smid", None): sm,
            ("%nsmid", None): self.resident * self.members,
            ("%gridid", None): 1,
            ("%cluster_ctarank", None): cta.rank,
            ("%cluster_nctarank", None): self.members,
            ("%is_explicit_cluster", None): int(launch.explicit_cluster),
            ("%dynamic_smem_size", None): launch.shared_bytes,
            ("%total_smem_size", None): self.shared_bytes,
            ("%aggr_smem_size", None): self.shared_bytes,
            ("%reserved_smem_offset_begin", None): 0,
            ("%reserved_smem_offset_end", None): 0,
            ("%reserved_smem_offset_cap", None): 0,
            ("%tid", "x"): threads % block[0],
            ("%tid", "y"): threads // block[0] % block[1],
            ("%tid", "z"): threads // (block[0] * block[1]),
        }
        for axis, name in enumerate("xyz"):
            specials |= {
                ("%ntid", name): block[axis],
                ("%ctaid", name): cta.index[axis],
                ("%nctaid", name): grid[axis],
                ("%clusterid", name): cta.index[axis] // cluster[axis],
                ("%nclusterid", name): grid[axis] // cluster[axis],
                ("%cluster_ctaid", name): place[axis],
                ("%cluster_nctaid", name): cluster[axis],
            }
        warp = Warp(
            self.program,
            specials=specials,  # type: ignore[arg-type]
            parameters=self.parameters.tobytes(),
            param_base=self.parameters.ctypes.data,
            window=cta.rank << RANK_SHIFT,
            addresses=self.symbols,
            live=live,
        )
        runner = Runner(self, cta, number, warp)
        if self.recorder is not None:
            in_grid = self.places[cta.cluster.number - (self.number << LAUNCH_SHIFT)]
            runner.trace = self.recorder.begin(runner, in_grid)
        if self.order is not None:
            runner.clock.knows.join_foreign(self.order.over_at_start)
        return runner

    # Running.

    def execute(self) -> None:
        """Run the launch to its end, or to what makes it impossible; findings say what."""
        try:
            self.begin()
            while self.clusters:
                if not self.turn():
                    self._deadlock("every warp waits")
                if self.idle > PATIENCE:
                    self._deadlock("nothing changes any more")
        except Abort:
            self.collect_rest()

    def begin(self) -> None:
        """Start as many clusters as run at the same time."""
        while len(self.clusters) < self.resident and self.start():
            pass

    def collect_rest(self) -> None:
        """The counts of clusters that did not come to their ends."""
        for cluster in list(self.clusters.values()):
            with suppress(Abort):
                self._collect(cluster)

    def turn(self) -> bool:
        """A turn of every warp, and of asynchronous work; False if nobody can continue.

        Raises:
            Abort: a finding makes going on impossible.
        """
        before = self.progress
        moved = self._turn()
        self.idle = 0 if self.progress != before else self.idle + 1
        if self.left < 0:
            self._deadlock("the kernel does not come to an end")
        return moved

    def _turn(self) -> bool:
        runners = [runner for cluster in self.clusters.values() for runner in cluster.runners if not runner.done]
        moved, before = False, self.progress
        late = []
        for position in self.tasks.shuffled(len(runners)):
            runner = runners[position]
            if self.tasks.holds_back(runner.number, len(runner.cta.runners)):
                late.append(runner)
                continue
            moved |= runner.step()
            self.tasks.turn()
        if self.progress == before:
            # The others may run in a loop until they see something.
            for runner in late:
                moved |= runner.step()
        if not moved and self.progress == before:
            # Nobody can continue by itself: the time for what was issued, then for waits with a limit.
            moved = self.tasks.run_one()
            if moved:
                self.progress += 1
            else:
                expired = [runner.expire() for runner in runners if not runner.done]
                moved = any(expired)
        for number, cluster in list(self.clusters.items()):
            if cluster.done:
                self._collect(cluster)
                del self.clusters[number]
                self.progress += 1
                moved = True
                self.start()
        return moved or self.progress != before

    def ended(self, runner: Runner) -> None:
        """A warp has ended: barriers for all warps may be complete without it, and launches may start."""
        if self.order is not None:
            self.order.warp_ended(runner.clock.knows.foreign)
            if all(other.done for other in runner.cta.runners):
                self.order.release(runner.cta, {key for one in runner.cta.runners for key in one.clock.knows.foreign})
        for barrier in (runner.cta.named.get(0), runner.cta.cluster.barrier):
            if barrier is not None:
                barrier.leave()

    def _collect(self, cluster: Cluster) -> None:
        """The checks at the end of a cluster, and its counts."""
        while len(self.tasks) and cluster.done and not any(not other.done for other in self.clusters.values()):
            self.tasks.run_one()
        for cta in cluster:
            for runner in cta.runners:
                runner.drain_faults()
                self.profile.add(runner)
            if cluster.done:
                self._check_exit(cta)

    def _check_exit(self, cta: Cta) -> None:
        place = Place(cta.name)
        if cta.tensor is not None and (leaks := cta.tensor.leaks()):
            self.findings.add(Finding(Kind.TENSOR_MEMORY, f"never given back: {leaks}", place))
        # FlashAttention-4 leaves phases half done, and announces bytes that never come: it does no harm at the end.
        half_done = [str(barrier) for barrier in cta.mbarriers.values() if not barrier.is_idle]
        half_done += [str(barrier) for barrier in cta.named.values() if barrier.arrived]
        for barrier in half_done:
            self.findings.add(Finding(Kind.UNFINISHED, barrier, place, warning=True))

    def _deadlock(self, why: str) -> None:
        self.report_deadlock(why)
        raise Abort

    def report_deadlock(self, why: str) -> None:
        """Report every warp and barrier."""
        waiting = [
            (runner, f"    {runner.place()}: {runner.wait.what if runner.wait else 'runs in a loop'}")
            for cluster in self.clusters.values()
            for runner in cluster.runners
            if not runner.done
        ]
        barriers = [
            f"    {barrier}"
            for cluster in self.clusters.values()
            for cta in cluster
            for barrier in (*cta.mbarriers.values(), *cta.named.values())
        ]
        pending = [f"    pending: {what}" for what in self.tasks.describe()]
        message = "\n".join([why, *(line for _, line in waiting), *barriers, *pending])
        place = waiting[0][0].place() if waiting else Place("nobody")
        self.findings.add(Finding(Kind.DEADLOCK, message, place))

    # Names.

    @property
    def number(self) -> int:
        """Among the launches that overlap, from 0."""
        return 0 if self.order is None else self.order.number

    def owns(self, cluster: int) -> bool:
        """Whether a cluster is this launch's, and not another one's that overlaps with it."""
        return cluster in self.names

    def place(self, who: str, index: int) -> Place:
        if self.order is not None:
            who = f"launch {self.number}, {who}"
        if not 0 <= index < len(self.program.instrs):
            return Place(who)
        instr = self.program.instrs[index]
        return Place(who, instr.line, self.module.where(instr), show_instr(instr))

    def place_of(self, cluster: int, component: int, index: int) -> Place:
        """The place of an earlier access, by its stamp."""
        if self.order is not None and not self.owns(cluster):
            return self.order.overlap.orders[cluster >> LAUNCH_SHIFT].place_of(cluster, component, index)
        return self.place(self.names[cluster][component], index)


@lru_cache(maxsize=KEPT)
def handlers_of(program: Program) -> list[Handler]:
    """The handler of each instruction.

    Raises:
        Unsupported: one that the interpreter hands over has none; all of them are named.
    """
    found: list[Handler] = []
    missing: dict[str, int] = {}
    for index, instr in enumerate(program.instrs):
        handler = handler_of(instr)
        if handler is None and program.is_trap(index):
            missing.setdefault(instr.op.text, instr.line)
        found.append(handler)  # type: ignore[arg-type]
    if missing:
        listed = ", ".join(f"{text} (line {line})" for text, line in missing.items())
        raise Unsupported(f"{program.function.name} has instructions that the emulator does not execute: {listed}")
    return found
