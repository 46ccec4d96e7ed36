# SPDX-License-Identifier: Apache-2.0
"""An emulated device: inside `with device(...)`, CuTe DSL compiles for it and launches into it."""

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import mod
from typing import Any

from emulator.errors import FindingsError, HostError, LaunchError, Unsupported
from emulator.host import dsl, versions
from emulator.host.chips import chip
from emulator.host.launch import Dim3, Launch, Machine, Parameter, Region
from emulator.host.runtime import (
    ATTRIBUTE_NAMES,
    CLUSTER,
    COOPERATIVE,
    PREFERRED_CLUSTER,
    PROGRAMMATIC,
    Request,
    runtime,
)
from emulator.host.tensors import DeviceView, require_cpu

SCHEDULES = ("eager", "lazy", "random", "late", "clock")
DEFAULT_SMS = 4
PORTABLE_CLUSTER = 8


class Device:
    """What launches go to. `device(...)` makes one.

    Attributes:
        arch: such as sm_100a.
        sms: SMs that host code sees; a few make persistent kernels loop over their tiles.
        schedule, seed: the order of asynchronous work.
        machine: runs the launches.
        line_info: PTX says which source lines it comes from.
        strict: a warning counts as an error.
        launches: how many there were.
    """

    def __init__(
        self,
        arch: str,
        sms: int,
        schedule: str,
        seed: int,
        machine: Machine,
        *,
        line_info: bool = True,
        strict: bool = False,
    ) -> None:
        self.arch, self.sms, self.schedule, self.seed = arch, sms, schedule, seed
        self.strict = strict
        self.machine = machine
        self.line_info = line_info
        self.launches = 0
        self._registered: list[Region] = []
        self._passed: list[Region] = []
        self._capturing = False
        self._waiting: list[Launch] = []

    @property
    def findings(self) -> Sequence[object]:
        """What the machine's checks found so far."""
        return tuple(getattr(self.machine, "findings", ()))

    @property
    def errors(self) -> Sequence[object]:
        """The findings that are no warnings; all of them on a strict device."""
        return tuple(one for one in self.findings if self.strict or not getattr(one, "warning", False))

    @property
    def profile(self) -> object:
        """The machine's counts; None where it keeps none."""
        return getattr(self.machine, "profile", None)

    def register(self, tensor: Any, name: str = "registered") -> None:
        """Let kernels touch the memory of a CPU tensor that no call passes: one behind a raw pointer."""
        require_cpu(tensor)
        self._registered.append(DeviceView(tensor).region(name))

    @contextmanager
    def passing(self, regions: Sequence[Region]) -> Iterator[None]:
        """The global memory that a call passes, while the call runs; its launches run when it ends."""
        outer, self._passed = self._passed, [*self._passed, *regions]
        try:
            with self.capture():
                yield
        finally:
            self._passed = outer

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Inside, launches are recorded as in a CUDA graph; they run, in their order, when the block is left.

        Without it, the launches of a call run when the call ends. Of launches that run together, one with programmatic
        stream serialization (`use_pdl`) overlaps with the one before it, and it is found if it does not wait for it.
        Until then tensors hold what they held before; what host code writes inside is there before the first launch.
        """
        if self._capturing:
            yield
            return
        self._capturing = True
        try:
            yield
            self._run_waiting()
        finally:
            self._capturing = False
            self._waiting.clear()

    def _run_waiting(self) -> None:
        """Run what was launched: each with programmatic stream serialization beside the launch before it."""
        while self._waiting:
            count = 1
            while count < len(self._waiting) and self._waiting[count].programmatic:
                count += 1
            together, self._waiting = self._waiting[:count], self._waiting[count:]
            overlap = getattr(self.machine, "overlap", None)
            if count > 1 and overlap is not None:
                overlap(together)
            else:
                for launch in together:
                    self.machine.launch(launch)

    def launch(self, request: Request) -> None:
        """Check a launch as a device's driver would, and leave it to `passing` or `capture` to run it."""
        module = request.kernel.module
        if module.arch != self.arch:
            raise HostError(f"{module.name} was compiled for {module.arch}, and this device is an {self.arch}")
        launch = Launch(
            kernel=request.kernel.name,
            ptx=module.ptx,
            arch=self.arch,
            grid=dim3(request.grid),
            block=dim3(request.block),
            cluster=self._cluster(request),
            explicit_cluster=CLUSTER in request.attributes,
            shared_bytes=request.shared_bytes,
            cooperative=bool(request.attributes.get(COOPERATIVE, (0,))[0]),
            programmatic=bool(request.attributes.get(PROGRAMMATIC, (0,))[0]),
            stream=request.stream,
            parameters=tuple(
                Parameter(part.name, part.align, data)
                for part, data in zip(module.entries[request.kernel.name], request.arguments, strict=True)
            ),
            regions=distinct([*self._passed, *self._registered]),
        )
        check(launch, request, self.sms)
        self.launches += 1
        self._waiting.append(launch)
        if not self._capturing:
            self._run_waiting()

    def _cluster(self, request: Request) -> Dim3:
        """The clusters of a launch.

        A GPU takes the preferred ones where there is room for them, and the others where there is not: a kernel has to
        be right with either. Here all of a launch's are alike. They are the preferred ones, where the SMs that the
        device shows suffice; on an eager device never, and on a random one in some of its launches.
        """
        asked = dim3(request.attributes.get(CLUSTER, (1, 1, 1)))
        if PREFERRED_CLUSTER not in request.attributes:
            return asked
        preferred = dim3(request.attributes[PREFERRED_CLUSTER])
        check_preferred(request.kernel.name, preferred, asked, dim3(request.grid))
        turned_down = self.schedule == "eager" or (self.schedule == "random" and (self.seed + self.launches) % 2 == 0)
        return asked if turned_down or size(preferred) > self.sms else preferred


def check_preferred(kernel: str, preferred: Dim3, cluster: Dim3, grid: Dim3) -> None:
    """Raises LaunchError where CUDA would refuse preferred clusters (cudaLaunchAttributePreferredClusterDimension)."""
    objections = (
        (not size(preferred) or over(preferred, grid), f"none of them fits the grid {grid}"),
        (bool(size(preferred)) and any(map(mod, grid, preferred)), f"they do not divide the grid {grid}"),
        (not size(cluster) or any(map(mod, preferred, cluster)), f"they are not made of clusters of {cluster}"),
        (preferred[2] != cluster[2], f"their depth is not that of clusters of {cluster}"),
    )
    if said := [words for holds, words in objections if holds]:
        raise LaunchError(f"{kernel}: preferred clusters of {preferred}: {'; '.join(said)}")


def dim3(values: Sequence[int]) -> Dim3:
    return (values[0], values[1], values[2])


def distinct(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Every region once, by address; the first name of it is kept."""
    found: dict[tuple[int, int], Region] = {}
    for region in regions:
        if region.bytes:
            found.setdefault((region.address, region.bytes), region)
    return tuple(sorted(found.values(), key=lambda region: (region.address, region.bytes)))


def check(launch: Launch, request: Request, sms: int) -> None:
    """Refuse what a device of this kind would refuse, with everything that is wrong."""
    limits = chip(launch.arch)
    for number in request.attributes.keys() - {COOPERATIVE, CLUSTER, PROGRAMMATIC, PREFERRED_CLUSTER, 0}:
        name = ATTRIBUTE_NAMES.get(number, "one that CUDA's headers did not name")
        raise Unsupported(f"{launch.kernel} is launched with attribute {number} ({name}), which is not emulated")
    blocks, threads, members = (size(sides) for sides in (launch.grid, launch.block, launch.cluster))
    static = request.kernel.module.static_shared_bytes
    most_shared = min(request.kernel.max_dynamic_shared, limits.shared_bytes - static)
    portable = limits.max_cluster if request.kernel.non_portable_cluster else PORTABLE_CLUSTER
    objections = (
        (not blocks, f"a grid of {launch.grid} blocks"),
        (not threads, f"a block of {launch.block} threads"),
        (over(launch.grid, limits.max_grid), f"grid {launch.grid}; at most {limits.max_grid}"),
        (
            over(launch.block, limits.max_block) or threads > limits.max_threads,
            f"block {launch.block}; at most {limits.max_threads} threads and {limits.max_block}",
        ),
        (not members or members > portable, f"cluster {launch.cluster}; at most {portable} blocks"),
        (
            bool(members) and any(side % part for side, part in zip(launch.grid, launch.cluster, strict=True)),
            f"grid {launch.grid} does not divide into clusters of {launch.cluster}",
        ),
        (
            launch.shared_bytes > most_shared,
            f"{launch.shared_bytes} bytes of dynamic shared memory; at most {most_shared} beside {static} static ones",
        ),
        (launch.cooperative and blocks > sms, f"a cooperative grid of {blocks} blocks on {sms} SMs"),
    )
    if said := [words for holds, words in objections if holds]:
        raise LaunchError(f"{launch.kernel}: {'; '.join(said)}")


def size(sides: Dim3) -> int:
    return sides[0] * sides[1] * sides[2]


def over(sides: Dim3, limits: Dim3) -> bool:
    return any(side > limit for side, limit in zip(sides, limits, strict=True))


def default_machine(arch: str, sms: int, schedule: str, seed: int) -> Machine:
    """The emulator's own machine."""
    if schedule == "clock":
        clock: Any = importlib.import_module("emulator.clock.machine").ClockMachine
        timed: Machine = clock(arch=arch, sms=sms)
        return timed
    # Late, because it brings in numpy and all that runs instructions.
    interpreter: Any = getattr(importlib.import_module("emulator.machine"), "Machine", None)
    if interpreter is None:
        raise Unsupported("this emulator has no machine of its own yet: pass machine=")
    made: Machine = interpreter(arch=arch, sms=sms, schedule=schedule, seed=seed)
    return made


@contextmanager
def device(
    arch: str,
    *,
    sms: int = DEFAULT_SMS,
    schedule: str = "lazy",
    seed: int = 0,
    keep_findings: bool = False,
    strict: bool = False,
    line_info: bool = True,
    machine: Machine | None = None,
) -> Iterator[Device]:
    """Inside, `cute.compile` compiles for `arch`, and compiled functions run on CPU tensors.

    Nothing of CuTe DSL or of the environment stays changed afterwards. Leaving raises `FindingsError` if the machine's
    checks found errors, unless the findings are to be kept.

    Args:
        sms: that host code sees.
        schedule: `eager`, `lazy` or `random`: when asynchronous work is done. `late`: as `eager`, and one warp of each
            CTA continues only when no other warp can. `clock`: as `eager`, of some clusters of each grid, and the
            machine's `times` say how long a chip takes for the whole.
        seed: of the random schedule; of `late`, the number of the warp that is held back.
        strict: what is only a warning, since kernels in production do it, counts as an error as well.
        line_info: have the PTX say which source lines it comes from, for findings to name them.
        machine: what runs the launches, in place of the emulator's own.
    """
    chip(arch)
    if sms < 1:
        raise HostError(f"a device has at least one SM, not {sms}")
    if schedule not in SCHEDULES:
        raise Unsupported(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    versions.check()
    library = runtime()
    if library.target is not None:
        raise HostError("an emulated device is active already; devices do not nest")
    release_memory()
    machine = machine or default_machine(arch, sms, schedule, seed)
    made = Device(arch, sms, schedule, seed, machine, line_info=line_info, strict=strict)
    library.target = made
    try:
        with dsl.targeting(made, library):
            yield made
    finally:
        library.target = None
    if made.errors and not keep_findings:
        raise FindingsError(made.errors)


def release_memory() -> None:
    """Give back to the system what launches before have freed: glibc keeps it, gigabytes after many of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def run(
    compiled: Any,
    *arguments: Any,
    arch: str,
    sms: int = DEFAULT_SMS,
    schedule: str = "lazy",
    seed: int = 0,
    keep_findings: bool = False,
    strict: bool = False,
    machine: Machine | None = None,
    **named: Any,
) -> Device:
    """Call a function once on a device of its own, and return the device.

    Args:
        compiled: what `cute.compile` made on a device of this arch, or a `cute.jit` function, compiled on this one.
        arguments, named: of the call; CPU tensors among them.
    """
    options = {"sms": sms, "schedule": schedule, "seed": seed, "keep_findings": keep_findings, "strict": strict}
    with device(arch, machine=machine, **options) as made:  # type: ignore[arg-type]
        compiled(*arguments, **named)
    return made
