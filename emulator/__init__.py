# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of CuTe DSL kernels on a CPU.

with emulator.device(arch="sm_100a", sms=4, schedule="lazy", seed=0) as device:
    compiled = cute.compile(kernel, from_dlpack(a), from_dlpack(b))
    compiled(from_dlpack(a), from_dlpack(b))
"""

from emulator.errors import EmulatorError, FindingsError, HostError, LaunchError, Unsupported
from emulator.host.device import Device, device, run
from emulator.host.launch import Launch, Machine, Parameter, Region
from emulator.host.tensor_map import TensorMap

__all__ = [
    "Device",
    "EmulatorError",
    "FindingsError",
    "HostError",
    "Launch",
    "LaunchError",
    "Machine",
    "Parameter",
    "Region",
    "TensorMap",
    "Unsupported",
    "device",
    "run",
]
