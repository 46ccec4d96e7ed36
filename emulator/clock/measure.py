# SPDX-License-Identifier: Apache-2.0
"""`python -m emulator.clock.measure`: the constants that micro-kernels can tell, timed on this machine's GPU.

It needs NVIDIA's driver (libcuda) and nothing else. What it prints goes into a file of `emulator/clock/chips/` by hand.
"""

import argparse
import ctypes
import sys
from typing import Any

from emulator.clock.chips import CHIPS
from emulator.clock.constants import ChipClock
from emulator.clock.micro import MICROS, STEPS, Micro
from emulator.errors import HostError

CALLS = 5  # of each kernel: the fastest counts
SHARED_BYTES, DATA_BYTES = 16384, 4096
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


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
        self._out, self._data = self._memory(16), self._memory(DATA_BYTES)

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
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        arch = f"sm_{self.capability[0]}{self.capability[1]}a"
        self._call("cuModuleLoadData", ctypes.byref(module), micro.text(steps, arch).encode())
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"micro")
        found = min(self._once(function, micro.threads) for _ in range(CALLS))
        self._call("cuModuleUnload", module)
        return found

    def _once(self, function: ctypes.c_void_p, threads: int) -> int:
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(self._out), ctypes.addressof(self._data))
        sides = (1, 1, 1, threads, 1, 1)
        self._call("cuLaunchKernel", function, *map(ctypes.c_uint, sides), SHARED_BYTES, None, arguments, None)
        self._call("cuCtxSynchronize")
        took = ctypes.c_uint64()
        self._call("cuMemcpyDtoH_v2", ctypes.byref(took), self._out, ctypes.c_size_t(8))
        return took.value


def step_cycles(gpu: Gpu, micro: Micro) -> float:
    """Cycles of a step."""
    return (gpu.cycles(micro, 2 * STEPS) - gpu.cycles(micro, STEPS)) / STEPS


def lines(gpu: Gpu, chip: ChipClock) -> list[str]:
    found = [f"{gpu.name}; the clock's constants: {chip.name}"]
    for micro in MICROS:
        measured = step_cycles(gpu, micro)
        found.append(
            f"{micro.name:14} {measured:8.1f} cycles, {micro.expected(chip):8.1f} by the clock: {micro.measures}"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.clock.measure", description=__doc__)
    parser.add_argument("--chip", choices=tuple(CHIPS), default="H200", help="to compare with (default: %(default)s)")
    asked = parser.parse_args()
    try:
        sys.stdout.write("\n".join(lines(Gpu(), CHIPS[asked.chip])) + "\n")
    except HostError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
