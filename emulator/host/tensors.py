# SPDX-License-Identifier: Apache-2.0
"""CPU tensors that say they are on the device.

What CuTe DSL compiles depends on where a tensor says it is: memory of a CPU is `generic` to it and a GPU's is global. A
`DeviceView` gives out the tensor's own memory through DLPack with the device changed, so that the code is the GPU's.

Source: dlpack.h of the DLPack project, versions 0.8 (`dltensor`) and 1.1 (`dltensor_versioned`).
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from emulator.errors import HostError
from emulator.host.launch import Region

CPU, CUDA, CUDA_HOST = 1, 2, 3
DEVICE_NAMES = {1: "cpu", 2: "cuda", 3: "pinned memory", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda"}
TYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
SMALL_TYPES = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# Where the tensor is in what a capsule of each name points to.
OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def described(capsule: object) -> DLTensor:
    """The tensor of a capsule, in place."""
    name = _name_of(capsule)
    if name not in OFFSETS:
        raise HostError(f"a tensor came in a capsule named {name!r}, which is not DLPack's")
    return DLTensor.from_address(_pointer_of(capsule, name) + OFFSETS[name])


def require_cpu(tensor: Any) -> None:
    """Refuse a tensor that is anywhere else."""
    try:
        kind = int(tensor.__dlpack_device__()[0])
    except (AttributeError, ValueError, BufferError, RuntimeError) as error:
        raise HostError(f"cannot tell where a {type(tensor).__name__} is: {error}") from None
    if kind not in (CPU, CUDA_HOST):
        where = DEVICE_NAMES.get(kind, f"device type {kind}")
        raise HostError(f"a tensor is on {where}; the emulator takes tensors of the CPU alone")


def export(tensor: Any) -> Any:
    """A capsule of a CPU tensor that claims the device: only this process's view of it changes, not the tensor."""
    require_cpu(tensor)
    capsule = tensor.__dlpack__()
    found = described(capsule)
    found.device_type, found.device_id = CUDA, 0
    return capsule


def dtype_name(tensor: DLTensor) -> str:
    if tensor.code in SMALL_TYPES:
        return SMALL_TYPES[tensor.code] + (f"x{tensor.lanes}" if tensor.lanes > 1 else "")
    name = TYPES.get(tensor.code, f"type{tensor.code}_")
    return name if name == "bool" else f"{name}{tensor.bits}" + (f"x{tensor.lanes}" if tensor.lanes > 1 else "")


def region(name: str, capsule: object, owner: object) -> Region:
    """The span that a tensor's elements lie in."""
    found = described(capsule)
    shape = [found.shape[axis] for axis in range(found.ndim)]
    element_bits = found.bits * found.lanes
    if 0 in shape:
        first, count = 0, 0
    else:
        strides = [found.strides[axis] for axis in range(found.ndim)] if found.strides else compact(shape)
        reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        first = sum(step for step in reach if step < 0)
        count = sum(step for step in reach if step > 0) - first + 1
    begin = (found.data or 0) + found.byte_offset + first * element_bits // 8
    return Region(name, begin, -(-count * element_bits // 8), dtype_name(found), owner)


def compact(shape: list[int]) -> list[int]:
    """Strides in elements of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


@dataclass(frozen=True)
class DeviceView:
    """A CPU tensor as the DSL is to see it."""

    tensor: Any

    def __dlpack__(self, **_: Any) -> Any:
        return export(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, 0)

    def region(self, name: str) -> Region:
        return region(name, self.tensor.__dlpack__(), self.tensor)
