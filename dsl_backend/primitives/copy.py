# SPDX-License-Identifier: Apache-2.0
"""Vectors of neighbouring elements between global memory and registers."""

import cutlass
from cutlass import cute


def vector_at(base: cute.Pointer, offset: cutlass.Int64, elements: int) -> cute.Tensor:
    """`elements` neighbours in global memory, as one access.

    Args:
        base: the tensor's first element, aligned to a vector.
        offset: in elements, a multiple of `elements`; 64 bits, since tensors of 2^31 elements are common.
    """
    size = elements * base.dtype.width // 8
    address = base.toint() + cutlass.Int64(offset) * (base.dtype.width // 8)
    pointer = cute.make_ptr(base.dtype, address, cute.AddressSpace.gmem, assumed_align=size)
    return cute.make_tensor(pointer, cute.make_layout(elements))


@cute.jit
def load_vector(base: cute.Pointer, offset: cutlass.Int64, fragment: cute.Tensor):
    """Global memory to registers; fragment [elements]."""
    cute.autovec_copy(vector_at(base, offset, cute.size(fragment)), fragment)


@cute.jit
def store_vector(fragment: cute.Tensor, base: cute.Pointer, offset: cutlass.Int64):
    """Registers to global memory; fragment [elements]."""
    cute.autovec_copy(fragment, vector_at(base, offset, cute.size(fragment)))
