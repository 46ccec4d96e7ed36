# SPDX-License-Identifier: Apache-2.0
"""What a machine is given: a launch, with all that the host code of a kernel decided."""

from dataclasses import dataclass, field
from typing import Protocol

from emulator.errors import Unsupported
from emulator.host import tensor_map
from emulator.host.tensor_map import TensorMap

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Region:
    """Global memory that a kernel may touch: the span of a tensor.

    Attributes:
        name: of the argument, or what the tensor was registered as.
        address: of the first byte; the memory is this process's own.
        dtype: name of the elements' type, as `float32` or `bfloat16`.
        owner: keeps the memory alive.
    """

    name: str
    address: int
    bytes: int
    dtype: str
    owner: object = field(default=None, repr=False, compare=False)

    @property
    def end(self) -> int:
        return self.address + self.bytes


@dataclass(frozen=True)
class Parameter:
    """The bytes of one `.param` of the entry, and its alignment in bytes."""

    name: str
    align: int
    data: bytes


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: name of the `.entry`.
        ptx: text of the module that it is in.
        arch: of the module, such as sm_90a.
        grid, block: blocks of the grid, threads of a block.
        cluster: blocks of a cluster; (1, 1, 1) where none was asked for.
        explicit_cluster: whether a cluster was asked for.
        shared_bytes: dynamic shared memory of a block.
        cooperative: all blocks are resident at once.
        programmatic: programmatic stream serialization: may begin before the launch in front of it ended.
        stream: handle of it; launches are synchronous and in order whatever it is.
        parameters: in the order of the entry.
        regions: global memory that was passed or registered, by address.
    """

    kernel: str
    ptx: str = field(repr=False)
    arch: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    explicit_cluster: bool = False
    shared_bytes: int = 0
    cooperative: bool = False
    programmatic: bool = False
    stream: int = 0
    parameters: tuple[Parameter, ...] = ()
    regions: tuple[Region, ...] = ()

    def tensor_map(self, index: int) -> TensorMap:
        """The tensor map that is parameter `index`."""
        return tensor_map.decode(self.parameters[index].data)

    @property
    def tensor_maps(self) -> dict[int, TensorMap]:
        """Every parameter that reads as a tensor map, by its index."""
        found = {}
        for index, parameter in enumerate(self.parameters):
            # The DSL gives it 64: what other things of 128 bytes are there is for the kernel to know.
            if len(parameter.data) == tensor_map.BYTES and parameter.align >= 64:
                try:
                    found[index] = tensor_map.decode(parameter.data)
                except Unsupported:
                    continue
        return found


class Machine(Protocol):
    """Runs launches. One that has `findings` or a `profile` shows them through the device.

    One that has `overlap(launches)` runs launches of which each may start while the one before it runs.
    """

    def launch(self, launch: Launch) -> None:
        """Run a kernel to its end; what it raises reaches whoever called the compiled function."""
