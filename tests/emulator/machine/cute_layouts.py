# SPDX-License-Identifier: Apache-2.0
"""Layouts in CuTe's notation, (shape):(stride), evaluated: the second source of every layout in these tests."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Nested: TypeAlias = "int | tuple[Nested, ...]"


def size(shape: Nested) -> int:
    return shape if isinstance(shape, int) else int(np.prod([size(one) for one in shape], dtype=np.int64))


def layout(shape: Nested, stride: Nested) -> NDArray[np.int64]:
    """The layout's value at each coordinate 0, 1, ...; the first mode counts fastest."""
    if isinstance(shape, int):
        assert isinstance(stride, int)
        return np.arange(shape, dtype=np.int64) * stride
    assert isinstance(stride, tuple)
    assert len(shape) == len(stride)
    total = np.zeros(1, dtype=np.int64)
    for one, step in zip(shape, stride, strict=True):
        total = (total[None, :] + layout(one, step)[:, None]).reshape(-1)
    return total


def matrix(shape: tuple[Nested, Nested], stride: tuple[Nested, Nested]) -> NDArray[np.int64]:
    """[size of the first mode, size of the second]."""
    return layout(shape[0], stride[0])[:, None] + layout(shape[1], stride[1])[None, :]


def swizzle(bits: int, base: int, shift: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Swizzle<bits, base, shift>."""
    moved = offsets.copy()
    for bit in range(bits):
        moved ^= (offsets >> (base + shift + bit) & 1) << (base + bit)
    return moved
