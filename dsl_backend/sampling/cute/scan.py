# SPDX-License-Identifier: Apache-2.0
"""Sums and inclusive prefix sums over the threads of a CTA."""

import cutlass
from cutlass import cute

from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.scan import warp_inclusive_sum

WARP = 32


def add(a, b):
    return a + b


def load_smem_vector(sTensor: cute.Tensor, start, count: int) -> cute.Tensor:
    """Copy `count` adjacent elements of shared memory to registers, by accesses of up to 16 bytes.

    Args:
        start: a multiple of count.
    """
    element_bytes = sTensor.element_type.width // 8
    address = sTensor.iterator.toint() + start * element_bytes
    align = min(16, count * element_bytes)
    pointer = cute.make_ptr(sTensor.element_type, address, cute.AddressSpace.smem, assumed_align=align)
    rVector = cute.make_rmem_tensor(count, sTensor.element_type)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), rVector)
    return rVector


def warp_max(x):
    """The maximum of a float32, not NaN, of all lanes; by the integer maximum of warps. Zeros have a sign here."""
    bits = x.bitcast(cutlass.Int32)
    key = cutlass.Int32(cute.arch.warp_redux_sync(bits ^ ((bits >> 31) & 0x7FFFFFFF), "max"))
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).bitcast(cutlass.Float32)


def warp_sum(value, low_bits: int = 16):
    """The sum of the values of all lanes, uint64; by the integer sums of warps, which have 32 bits.

    Args:
        low_bits: up to 27, that are added apart; values are below 2**(27 + low_bits).
    """
    shift = cutlass.Uint64(low_bits)
    low = cute.arch.warp_redux_sync(cutlass.Uint32(value & cutlass.Uint64((1 << low_bits) - 1)), "add")
    high = cute.arch.warp_redux_sync(cutlass.Uint32(value >> shift), "add")
    return (cutlass.Uint64(cutlass.Uint32(high)) << shift) + cutlass.Uint64(cutlass.Uint32(low))


@cute.jit
def cta_inclusive_sum(value, sScratch: cute.Tensor, warps: cutlass.Constexpr[int]):
    """(sum of the values of thread 0 to this thread, sum of all) over a CTA. All threads take part.

    Args:
        sScratch: [warps] of the value's type. Its last readers have passed two barriers since.
    """
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    in_warp = warp_inclusive_sum(value)
    if lane == WARP - 1:
        sScratch[warp] = in_warp
    cta_barrier()
    zero = value.dtype(0)
    warp_sum = sScratch[lane] if lane < warps else zero
    before = warp_sum if lane < warp else zero
    return in_warp + cute.arch.warp_reduction(before, add), cute.arch.warp_reduction(warp_sum, add)


@cute.jit
def cta_sum(value, sScratch: cute.Tensor, warps: cutlass.Constexpr[int]):
    """The sum of the values of all threads of a CTA. All threads take part; sScratch as in `cta_inclusive_sum`."""
    in_warp = cute.arch.warp_reduction(value, add)
    if cute.arch.lane_idx() == 0:
        sScratch[cute.arch.warp_idx()] = in_warp
    cta_barrier()
    lane = cute.arch.lane_idx()
    warp_sum = sScratch[lane] if lane < warps else value.dtype(0)
    return cute.arch.warp_reduction(warp_sum, add)
