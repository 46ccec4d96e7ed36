# SPDX-License-Identifier: Apache-2.0
"""Register tensors of 16-bit, 8-bit and float32 values: conversions and views."""

import cutlass
from cutlass import cute

from dsl_backend.primitives.math import f32_to_e4m3


def to_float32(rX: cute.Tensor) -> cute.TensorSSA:
    """Convert registers of the input's type to float32.

    libNVVM does not compile bfloat16 vectors of an odd length for sm_100a (CuTe DSL 4.6.0): these are converted one by
    one. For an even length it makes three instructions for each pair; a shift and a mask are two.
    """
    rWide = cute.make_rmem_tensor(rX.shape, cutlass.Float32)
    if cute.size(rX) % 2:
        for i in range(cute.size(rX)):
            rWide[i] = rX[i].to(cutlass.Float32)
    elif rX.element_type is cutlass.BFloat16:
        pairs, halves = words(rX), words(rWide)
        for i in range(cute.size(pairs)):
            halves[2 * i] = pairs[i] << cutlass.Uint32(16)
            halves[2 * i + 1] = pairs[i] & cutlass.Uint32(0xFFFF0000)
    else:
        rWide.store(rX.load().to(cutlass.Float32))
    return rWide.load()


def words(rX: cute.Tensor) -> cute.Tensor:
    """The same registers as 32-bit words; the number of 16-bit values is even."""
    flat = cute.make_tensor(rX.iterator, cute.make_layout(cute.size(rX)))
    return cute.recast_tensor(flat, cutlass.Uint32)


def from_float32(values: cute.TensorSSA, rX: cute.Tensor):
    """Convert float32 to registers of the output's type; see `to_float32`."""
    if cute.size(rX) % 2 == 0:
        rX.store(values.to(rX.element_type))
    else:
        for i, value in enumerate(elements(values)):
            rX[i] = value.to(rX.element_type)


def elements(values: cute.TensorSSA) -> list:
    """A register tensor's elements, one by one."""
    rX = cute.make_rmem_tensor(values.shape, cutlass.Float32)
    rX.store(values)
    return [rX[i] for i in range(cute.size(rX))]


def to_e4m3(values: cute.TensorSSA) -> cute.Tensor:
    """Float32 values as e4m3 in registers of Uint8: rounded to nearest even, saturated at 448; NaN stays NaN."""
    given = elements(values)
    count = len(given)
    # The last one again, not 0: libNVVM does not compile the conversion of a constant (CuTe DSL 4.6.0).
    given += given[-1:] * (-count % 4)
    packed = cute.make_rmem_tensor(len(given) // 4, cutlass.Int32)
    for i in range(cute.size(packed)):
        packed[i] = f32_to_e4m3(*given[4 * i : 4 * i + 4])
    return cute.make_tensor(cute.recast_tensor(packed, cutlass.Uint8).iterator, cute.make_layout(count))
