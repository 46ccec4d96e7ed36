# SPDX-License-Identifier: Apache-2.0
"""`python -m emulator.clock.measure`: the constants that micro-kernels can tell, timed on this machine's GPU.

It needs NVIDIA's driver (libcuda) and nothing else. What it prints goes into a file of `emulator/clock/chips/` by hand.
"""

import argparse
import ctypes
import multiprocessing
import re
import struct
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from emulator.clock.chips import CHIPS
from emulator.clock.constants import ChipClock
from emulator.clock.micro import (
    CHAIN_BYTES,
    LAUNCH_MICROS,
    MICROS,
    SHARED_BYTES,
    LaunchMicro,
    Micro,
    chain,
)
from emulator.errors import HostError

CALLS = 5  # of each kernel: the fastest counts
DATA_BYTES = CHAIN_BYTES
MORE_THAN_L2 = 512 << 20  # bytes: written, they leave nothing else there
LAUNCHES, LAUNCHED = 500, (128, 128)  # in a graph; their CTAs and threads
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
CLUSTER, PROGRAMMATIC = 4, 6  # CUlaunchAttributeID
MOST_SHARED_BYTES = 8  # CUfunction_attribute
THREAD_LOCAL = 1  # CUstreamCaptureMode
START_S = 60.0  # for a process to find the GPU
context = multiprocessing.get_context("fork")


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes that begins with what is set here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


class Gpu:
    """A context of the driver, and PTX run in it.

    Raises:
        HostError: there is no driver or no GPU, or it refuses something.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise HostError(f"there is no driver here: {error}") from None
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.capability = tuple(self._attribute(which, device) for which in (CAPABILITY_MAJOR, CAPABILITY_MINOR))
        self.arch = f"sm_{self.capability[0]}{self.capability[1]}a"
        self._out, self._data, self._flushed = (self._memory(size) for size in (16, DATA_BYTES, MORE_THAN_L2))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._cuda, function)(*arguments)
        if status:
            raise HostError(f"{function} returns {status} (CUresult)")

    def _attribute(self, which: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    def _memory(self, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        return address

    def cycles(self, micro: Micro, steps: int) -> int:
        """Cycles that the steps took by the SM's own clock, the fastest of some calls."""
        module, function = self._function(micro.text(steps, self.arch))
        found = min(self._once(function, micro) for _ in range(CALLS))
        self._call("cuModuleUnload", module)
        return found

    def _function(self, text: str) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), text.encode())
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"micro")
        self._call("cuFuncSetAttribute", function, MOST_SHARED_BYTES, SHARED_BYTES)
        return module, function

    def _once(self, function: ctypes.c_void_p, micro: Micro) -> int:
        if micro.cold:
            assert self._data.value is not None
            words = struct.pack(f"<{CHAIN_BYTES // 8}Q", *chain(self._data.value))
            self._call("cuMemcpyHtoD_v2", self._data, words, ctypes.c_size_t(len(words)))
            self._call("cuMemsetD8_v2", self._flushed, ctypes.c_ubyte(0), ctypes.c_size_t(MORE_THAN_L2))
        self._launch(function, (micro.ctas, micro.threads), SHARED_BYTES, None, {CLUSTER: (micro.ctas, 1, 1)})
        self._call("cuCtxSynchronize")
        took = ctypes.c_uint64()
        self._call("cuMemcpyDtoH_v2", ctypes.byref(took), self._out, ctypes.c_size_t(8))
        return took.value

    def _launch(
        self,
        function: ctypes.c_void_p,
        sides: tuple[int, int],
        shared_bytes: int,
        stream: ctypes.c_void_p | None,
        given: dict[int, tuple[int, ...]],
    ) -> None:
        """So many CTAs of so many threads, with attributes by their numbers."""
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(self._out), ctypes.addressof(self._data))
        attributes = (LaunchAttribute * len(given))(
            *(LaunchAttribute(name, 0, (ctypes.c_uint * 16)(*values)) for name, values in given.items())
        )
        (ctas, threads), three = sides, ctypes.c_uint * 3
        config = LaunchConfig(three(ctas, 1, 1), three(threads, 1, 1), shared_bytes, stream, attributes, len(given))
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)

    def launch_us(self, micro: LaunchMicro) -> float:
        """Microseconds that the micro-kernel measures, of each launch of a graph."""
        return micro.of(lambda text: self._launch_us(micro, text), self.arch)

    def _launch_us(self, micro: LaunchMicro, text: str) -> float:
        """Microseconds of a launch in a graph of many: of twice as many less those of once as many."""
        module, function = self._function(text)
        found = [self._graph_us(function, micro, count) for count in (LAUNCHES, 2 * LAUNCHES)]
        self._call("cuModuleUnload", module)
        return (found[1] - found[0]) / LAUNCHES

    def _graph_us(self, function: ctypes.c_void_p, micro: LaunchMicro, count: int) -> float:
        stream, graph, runnable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        given: dict[int, tuple[int, ...]] = {PROGRAMMATIC: (1,)} if micro.programmatic else {}
        self._call("cuStreamCreate", ctypes.byref(stream), 0)
        self._call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
        for _ in range(count):
            self._launch(function, LAUNCHED, 0, stream, given)
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(runnable), graph, ctypes.c_ulonglong(0))
        found = min(self._timed_us(stream, runnable) for _ in range(CALLS))
        self._call("cuGraphExecDestroy", runnable)
        self._call("cuGraphDestroy", graph)
        self._call("cuStreamDestroy_v2", stream)
        return found

    def _timed_us(self, stream: ctypes.c_void_p, runnable: ctypes.c_void_p) -> float:
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in events:
            self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuEventRecord", events[0], stream)
        self._call("cuGraphLaunch", runnable, stream)
        self._call("cuEventRecord", events[1], stream)
        self._call("cuStreamSynchronize", stream)
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
        for event in events:
            self._call("cuEventDestroy_v2", event)
        return 1e3 * milliseconds.value


def step_cycles(gpu: Gpu, micro: Micro) -> float:
    """Cycles of a step."""
    return (gpu.cycles(micro, 2 * micro.steps) - gpu.cycles(micro, micro.steps)) / micro.steps


def told(name: str, value: float, expected: float, unit: str, measures: str) -> str:
    return f"{name:14} {value:8.2f} {unit}, {expected:8.2f} by the clock: {measures}"


def line(gpu: Gpu, one: Micro | LaunchMicro, chip: ChipClock) -> str:
    """What a micro-kernel took."""
    if isinstance(one, Micro):
        return told(one.name, step_cycles(gpu, one), one.expected(chip), "cycles", one.measures)
    return told(one.name, gpu.launch_us(one), one.expected(chip), "us", one.measures)


def micros(arch: str, pattern: str = "") -> list[Micro | LaunchMicro]:
    """Those that an architecture has and whose names match."""
    every: tuple[Micro | LaunchMicro, ...] = (*MICROS, *LAUNCH_MICROS)
    having = [one for one in every if isinstance(one, LaunchMicro) or one.arch in ("", arch)]
    return [one for one in having if re.search(pattern, one.name)]


def serve(answers: Connection, pattern: str, done: int, chip: ChipClock) -> None:
    """A process's work: tell the GPU, then a line for each micro-kernel behind the first `done` ones."""
    try:
        gpu = Gpu()
        wanted = micros(gpu.arch, pattern)
        answers.send((gpu.name, [one.name for one in wanted]))
        for one in wanted[done:]:
            answers.send(line(gpu, one, chip))
    except HostError as error:
        answers.send(error)


def answered(answers: Connection, limit_s: float) -> Any:
    """What a process sends next, or a HostError where nothing comes."""
    if not answers.poll(limit_s):
        return HostError(f"no answer within {limit_s:g} s")
    try:
        return answers.recv()
    except EOFError:
        return HostError("the process ended")


def lines(pattern: str, chip: ChipClock, limit_s: float) -> Iterator[str]:
    """One for each micro-kernel. They run in another process, and in a new one behind one that fails or hangs.

    Raises:
        HostError: there is no GPU.
    """
    done, names = 0, [""]
    while done < len(names):
        answers, there = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(there, pattern, done, chip), daemon=True)
        process.start()
        there.close()
        try:
            first = answered(answers, START_S)
            if isinstance(first, HostError):
                raise first
            name, names = first
            if not done:
                yield f"{name}; the clock's constants: {chip.name}"
            while done < len(names):
                found = answered(answers, limit_s)
                done += 1
                if isinstance(found, HostError):
                    yield f"{names[done - 1]:14} {found}"
                    break
                yield found
        finally:
            process.kill()
            process.join(START_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.clock.measure", description=__doc__)
    parser.add_argument("--chip", choices=tuple(CHIPS), default="H200", help="to compare with (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="which micro-kernels, by name (default: all)")
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="for each (default: %(default)s)")
    asked = parser.parse_args()
    try:
        for one in lines(asked.only, CHIPS[asked.chip], asked.limit):
            sys.stdout.write(f"{one}\n")
            sys.stdout.flush()
    except HostError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
