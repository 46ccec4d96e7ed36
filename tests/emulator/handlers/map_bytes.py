# SPDX-License-Identifier: Apache-2.0
"""Tensor maps of numpy arrays."""

from typing import Any

from numpy.typing import NDArray

from emulator.host.tensor_map import Element, Promotion, TensorMap


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
