# SPDX-License-Identifier: Apache-2.0
"""Clusters and CTAs: what their warps share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from emulator.core.program import RANK_SHIFT
from emulator.host.launch import Dim3
from emulator.machine.barriers import MBarrier, NamedBarrier
from emulator.machine.clocks import Components, Source
from emulator.machine.memory import SharedMemory
from emulator.machine.shadow import Shadow
from emulator.machine.tensor_memory import COLUMNS, LANES, TensorMemory

if TYPE_CHECKING:
    from emulator.machine.loads import Overtaken
    from emulator.machine.runner import Runner

OFFSET = (1 << RANK_SHIFT) - 1
# mbarriers of a CTA: each has a component for as long as its cluster runs.
MOST_MBARRIERS = 128
REGISTERS = 64 * 1024  # of an SM
TENSOR_BLOCK = 16  # lanes of tensor memory that every access touches together, a few copies excepted


class Cta:
    """One CTA.

    Attributes:
        index: of the CTA in the grid.
        rank: in its cluster.
        mbarriers: by their address.
        named: barriers by their number.
        registers: a thread's, by warp; asked: whether the warp has set them.
        pool: registers that no warp holds.
        overtaken: reads of shared memory that arrivals overtook, by the component of their warp.
        has_released: it has executed launch_dependents, and launches overlap.
        refused: stamp of the response that no cluster is left to cancel.
        tensor_shadow: who touched which of tensor memory last; a word for TENSOR_BLOCK lanes of a column.
        state: whatever a family of instructions keeps for this CTA.
    """

    def __init__(self, cluster: "Cluster", index: Dim3, rank: int, shared_bytes: int, threads: int) -> None:
        self.cluster = cluster
        self.index = index
        self.rank = rank
        self.shared = SharedMemory(shared_bytes)
        self.tensor = TensorMemory() if cluster.has_tensor_memory else None
        self.tensor_shadow = Shadow(4 * LANES // TENSOR_BLOCK * COLUMNS) if cluster.has_tensor_memory else None
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.runners: list[Runner] = []
        self.overtaken: dict[int, Overtaken] = {}
        self.has_released = False
        self.refused: tuple[int, int] | None = None
        self.state: dict[str, object] = {}
        warps = -(-threads // 32)
        # What the compiler gives a thread is not in the PTX: as many as fit, as with a CTA on an SM of its own, until
        # the warp asks for a number.
        self.registers = [min(255, REGISTERS // (warps * 32)) // 8 * 8] * warps
        self.asked = [False] * warps

    @property
    def name(self) -> str:
        return f"cta {self.index}"

    @property
    def pool(self) -> int:
        return REGISTERS - 32 * sum(self.registers)

    def barrier(self, number: int) -> NamedBarrier:
        """A named barrier; it is there when it is first used."""
        found = self.named.get(number)
        if found is None:
            found = self.named[number] = NamedBarrier(f"{self.name} barrier {number}", self.cluster.components)
        return found

    @property
    def threads(self) -> int:
        """That have not ended, whole warps."""
        return 32 * sum(not runner.done for runner in self.runners)


class Cluster:
    """CTAs that run together.

    Attributes:
        number: in the order in which clusters are started; names it in the global memory's history.
        components: of vector clocks, shared by its CTAs.
        slot: which of the places for clusters it has: its SMs.
        issued: of tcgen05 work, by component and number, the stamp of the warp that issued it.
    """

    def __init__(self, number: int, ctas: int, warps: int, *, has_tensor_memory: bool) -> None:
        self.number = number
        self.has_tensor_memory = has_tensor_memory
        self.components = Components(ctas * (warps * (len(Source) - 1) + MOST_MBARRIERS))
        self.ctas: list[Cta] = []
        self.slot = -1
        self.issued: dict[int, list[tuple[int, int]]] = {}
        self.barrier = NamedBarrier("cluster barrier", self.components)

    def __iter__(self) -> Iterator[Cta]:
        return iter(self.ctas)

    @property
    def runners(self) -> "list[Runner]":
        return [runner for cta in self.ctas for runner in cta.runners]

    @property
    def done(self) -> bool:
        return all(runner.done for cta in self.ctas for runner in cta.runners)

    @property
    def threads(self) -> int:
        return sum(cta.threads for cta in self.ctas)
