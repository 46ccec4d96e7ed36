# SPDX-License-Identifier: Apache-2.0
"""Kernels as PTX text, run on the machine with numpy arrays for global memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.host.launch import Launch, Parameter, Region
from emulator.machine import Machine
from emulator.machine.findings import Finding, Kind

SCHEDULES = ("eager", "lazy", "random")
REGISTERS = """
.reg .pred %p<16>;
.reg .b16 %rs<16>;
.reg .b32 %r<300>;
.reg .f32 %f<300>;
.reg .b64 %rd<64>;
.reg .b128 %rq<8>;
"""


def text(body: str, arguments: int = 0, arch: str = "sm_100a", before: str = "") -> str:
    """A module with the kernel `k` and so many 64-bit parameters p0, p1, ...; `shared` is 64 KiB of shared memory."""
    params = ", ".join(f".param .b64 p{index}" for index in range(arguments))
    shared = ".extern .shared .align 1024 .b8 shared[];"
    return (
        f".version 9.0\n.target {arch}\n.address_size 64\n{shared}\n{before}\n"
        f".visible .entry k({params})\n{{{REGISTERS}{body}\nret;\n}}\n"
    )


def run(
    body: str,
    *arrays: NDArray[Any] | bytes,
    grid: int = 1,
    block: int = 32,
    cluster: int = 1,
    arch: str = "sm_100a",
    schedule: str = "lazy",
    seed: int = 0,
    sms: int = 4,
    before: str = "",
    shared_bytes: int = 65536,
) -> Machine:
    """Run a kernel; parameter i is the address of array i, or 128 bytes such as a tensor map as they are."""
    arguments = [array for array in arrays if not isinstance(array, bytes)]
    regions = tuple(
        Region(f"array {index}", array.ctypes.data, array.nbytes, str(array.dtype), array)
        for index, array in enumerate(arguments)
    )
    parameters = tuple(
        Parameter(f"p{index}", 64, array)
        if isinstance(array, bytes)
        else Parameter(f"p{index}", 8, int(array.ctypes.data).to_bytes(8, "little"))
        for index, array in enumerate(arrays)
    )
    source = text(body, len(arrays), arch, before)
    for index, array in enumerate(arrays):
        if isinstance(array, bytes):
            source = source.replace(f".param .b64 p{index}", f".param .align 64 .b8 p{index}[{len(array)}]")
    machine = Machine(arch, sms, schedule, seed)
    machine.launch(
        Launch(
            kernel="k",
            ptx=source,
            arch=arch,
            grid=(grid, 1, 1),
            block=(block, 1, 1),
            cluster=(cluster, 1, 1),
            explicit_cluster=cluster > 1,
            shared_bytes=shared_bytes,
            parameters=parameters,
            regions=regions,
        )
    )
    return machine


def kinds(machine: Machine) -> list[Kind]:
    """Of the findings, each once."""
    return list(dict.fromkeys(finding.kind for finding in machine.findings))


def errors(machine: Machine) -> Sequence[Finding]:
    return machine.findings.errors


def zeros(count: int, dtype: Any = np.uint32) -> NDArray[Any]:
    """An array aligned as global memory is, to 256 bytes."""
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype)
