# SPDX-License-Identifier: Apache-2.0
"""Scales of quantised matrices, in float32 registers; powers of two are bytes in memory."""

import triton
import triton.language as tl


@triton.jit
def scale_of(stored):
    """A stored scale as float32. Bytes are exponents plus 127; 255 is NaN."""
    if stored.dtype == tl.uint8:
        byte = stored.to(tl.uint32)
        # 2^-127 is subnormal.
        value = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.uint32).to(tl.float32, bitcast=True)
        return tl.where(byte == 255, float("nan"), value)
    else:
        return stored.to(tl.float32)


@triton.jit
def exponent_of(scale):
    """The byte of the least power of two that is not below a positive normal float32; 255 for infinity."""
    return ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23).to(tl.uint8)


@triton.jit
def magnitude(x, mask):
    """|x| where the mask is set, 0 elsewhere and for NaN."""
    return tl.where(mask & (x == x), tl.abs(x), 0.0)
