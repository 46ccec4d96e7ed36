# SPDX-License-Identifier: Apache-2.0
"""Runs micro-kernels on the emulator."""

import struct
from collections.abc import Sequence

import numpy as np
from micro_case import ALIGN, HEADER, Array, Case, Map
from numpy.typing import NDArray

from emulator.host.launch import Launch, Parameter, Region
from emulator.host.tensor_map import Element, Promotion, TensorMap
from emulator.machine import Machine

ELEMENTS = {
    "u8": Element.U8,
    "u16": Element.U16,
    "u32": Element.U32,
    "u64": Element.U64,
    "f16": Element.F16,
    "f32": Element.F32,
    "f64": Element.F64,
    "bf16": Element.BF16,
    "tf32": Element.F32,
}


def placed(array: Array) -> NDArray[np.uint8]:
    """A copy, aligned as global memory is."""
    raw = np.zeros(array.nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    found = raw[start : start + array.nbytes]
    found[:] = np.frombuffer(array.tobytes(), np.uint8)
    return found


def tensor_map(one: Map, address: int) -> TensorMap:
    """What a driver's 128 bytes for a map must read as."""
    steps = one.element_strides or (1,) * len(one.dims)
    return TensorMap(
        address,
        one.dims,
        one.strides,
        one.box,
        steps,
        ELEMENTS[one.type],
        one.type == "tf32",
        one.swizzle,
        Promotion.NONE,
    )


def encode(tensor: TensorMap) -> bytes:
    """The 128 bytes that the emulator reads as a map."""
    pad = 5 - tensor.rank
    flags = 2 | tensor.rank - 1 << 4 | tensor.element.value[0] << 7 | tensor.tf32 << 16
    flags |= (0, 32, 64, 128).index(tensor.swizzle) << 13
    strides = [step >> 4 for step in tensor.strides] + [0] * (4 - len(tensor.strides))
    high = sum((step >> 32) << 4 * place for place, step in enumerate(strides))
    head = struct.pack(
        "<QI4II5I",
        tensor.address,
        flags,
        *(step & 0xFFFFFFFF for step in strides),
        high,
        *(size - 1 for size in tensor.dims),
        *[0] * pad,
    )
    every = sum((step - 1) << 3 * place for place, step in enumerate(tensor.element_strides))
    box = bytes(size - 1 for size in tensor.box)
    return (head + every.to_bytes(3, "little") + box).ljust(128, b"\0")


def emulate(
    case: Case, inputs: Sequence[Array] | None = None, schedule: str = "lazy"
) -> tuple[NDArray[np.uint8], Machine]:
    """The output's bytes after a launch, and the machine with its findings.

    Args:
        inputs: in place of the case's own.
    """
    arrays = [placed(one) for one in (case.inputs if inputs is None else inputs)]
    out = placed(case.output())
    named = [*((f"p{index}", one) for index, one in enumerate(arrays)), ("out", out)]
    regions = tuple(Region(name, one.ctypes.data, one.nbytes, "uint8", one) for name, one in named)
    parameters = [Parameter(name, 8, int(one.ctypes.data).to_bytes(8, "little")) for name, one in named]
    for index, one in enumerate(case.maps):
        of = out if one.input is None else arrays[one.input]
        parameters.append(Parameter(f"m{index}", 64, encode(tensor_map(one, of.ctypes.data))))
    machine = Machine("sm_90a", 4, schedule)
    machine.launch(
        Launch(
            kernel=case.entry,
            ptx=HEADER + case.text(),
            arch="sm_90a",
            grid=(case.grid, 1, 1),
            block=(case.block, 1, 1),
            cluster=(case.cluster, 1, 1),
            explicit_cluster=case.cluster > 1,
            shared_bytes=case.shared,
            parameters=tuple(parameters),
            regions=regions,
        )
    )
    return out, machine
