# SPDX-License-Identifier: Apache-2.0
"""Between registers and the dtypes that caches, activations and weights are stored in."""

import triton
import triton.language as tl


@triton.jit
def quantize(x, dtype: tl.constexpr, E5M2: tl.constexpr):
    """A float32 in the stored dtype; fp8 saturates, NaN stays NaN; uint8 receives e5m2 or e4m3 bits."""
    if dtype == tl.uint8 and E5M2:
        # As for e4m3 below, with 2^-112 and 2 bits.
        bits = (tl.clamp(x, -57344.0, 57344.0) * 1.925929944387236e-34).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21
        return tl.where(x != x, 0x7F, rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    elif dtype == tl.uint8:
        # Times 2^-120, e4m3's range, subnormals included, has float32's exponents; then round to 3 bits, ties to even.
        bits = (tl.clamp(x, -448.0, 448.0) * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        return tl.where(x != x, 0x7F, rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    elif dtype == tl.float8e4nv:
        return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def dequantize(x, dtype: tl.constexpr, E5M2: tl.constexpr):
    """Stored values in another dtype; uint8 holds e5m2 bits, or e4m3's where the target has no conversion."""
    if x.dtype == tl.uint8 and E5M2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif x.dtype == tl.uint8:
        # e4m3's exponent and mantissa, moved under float32's, make the value times 2^-120; the product is exact.
        bits = x.to(tl.uint32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
        return tl.where((bits & 0x80) != 0, -magnitude, magnitude).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def e2m1_pair_to_f32(packed):
    """The two e2m1 of each uint8, as float32: that of its low four bits, and that of its high ones.

    e2m1's exponent and mantissa, moved under float32's, make the value times 2^-126, subnormals included.
    """
    bits = packed.to(tl.int32)
    low = ((bits << 28) >> 6) & -0x7E400000
    high = ((bits << 24) >> 6) & -0x7E400000
    low = low.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return low, high.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def nvfp4_scale(largest, nan):
    """(the e4m3 code of the scale of NVFP4 blocks, the scale as float32), of their largest magnitudes.

    Divisions are rounded as IEEE 754 says, for the reference's bits. nan: int32, not 0 where a block has a NaN.
    """
    scale = tl.where(nan != 0, float("nan"), tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)))
    code = quantize(scale, tl.uint8, False)
    return code, dequantize(code, tl.float32, False)


@triton.jit
def f32_to_e2m1(x):
    """The nearest e2m1 of a float32, ties to even, saturated at 6, as an int32 of four bits; NaN becomes 0."""
    magnitude = tl.abs(x)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32) & 8
    return tl.where(x != x, 0, code | sign)
