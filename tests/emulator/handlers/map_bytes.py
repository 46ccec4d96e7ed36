# SPDX-License-Identifier: Apache-2.0
"""Tensor maps of numpy arrays, as the 128 bytes that a kernel is given."""

import struct
from typing import Any

from numpy.typing import NDArray

from emulator.host.tensor_map import Element, Promotion, TensorMap

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def map_of(
    array: NDArray[Any], box: tuple[int, ...], element: Element, swizzle: int = 0, tf32: bool = False
) -> TensorMap:
    """The map of a contiguous array; the box has the contiguous dimension first."""
    return TensorMap(
        array.ctypes.data,
        tuple(reversed(array.shape)),
        tuple(reversed(array.strides[:-1])),
        box,
        (1,) * array.ndim,
        element,
        tf32,
        swizzle,
        Promotion.NONE,
    )


def encode(tensor: TensorMap) -> bytes:
    """What `emulator.host.tensor_map.decode` reads."""

    def five(values: tuple[int, ...]) -> list[int]:
        return [value - 1 for value in values] + [0] * (5 - len(values))

    flags = 2 | tensor.rank - 1 << 4 | tensor.element.value[0] << 7 | SWIZZLES[tensor.swizzle] << 13
    flags |= tensor.tf32 << 16 | tensor.promotion << 17
    strides = [step >> 4 for step in tensor.strides] + [0] * (4 - len(tensor.strides))
    high = sum((step >> 32) << 4 * place for place, step in enumerate(strides))
    every = sum((step - 1) << 3 * place for place, step in enumerate(tensor.element_strides))
    low = [step & 0xFFFFFFFF for step in strides]
    head = struct.pack("<QI4II5I", tensor.address, flags, *low, high, *five(tensor.dims))
    written = head + every.to_bytes(3, "little") + bytes(five(tensor.box))
    return written.ljust(64, b"\0").ljust(128, b"\xee")
