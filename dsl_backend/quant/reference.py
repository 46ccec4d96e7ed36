# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices in eager torch: to and from e4m3 with scales, in any arithmetic."""

from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.quant.format import (
    BLOCK_SCALED_E8M0,
    E2M1_MAX,
    GROUP_SCALED_E8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    SWIZZLED_ROWS,
    ScaledFormat,
)

# Largest magnitudes below these count as these, so that a row or a group of zeros has a scale: the bounds of vLLM's
# quantisation kernels.
LEAST_OF_ROW = 1.0 / 512.0
LEAST_OF_GROUP = 1e-10


class Quantized(NamedTuple):
    """A matrix [rows, columns] and its scales, whose shape is `kind.scale_shape(rows, columns)`."""

    values: torch.Tensor
    scale: torch.Tensor
    kind: ScaledFormat


def check_floats(x: torch.Tensor) -> None:
    """Raises InvalidInput unless x is a matrix of floats."""
    checks.tensor("x", x)
    if not x.is_floating_point() or x.dim() != 2:
        raise InvalidInput(f"x is {short(x.dtype)} {tuple(x.shape)}: floats [rows, columns] are needed")


def column_major(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised [rows, columns] whose columns lie side by side and begin at multiples of 16 bytes."""
    multiple = 16 // dtype.itemsize
    height = max(1, -(-rows // multiple)) * multiple
    return torch.empty(columns, height, dtype=dtype, device=device).t()[:rows]


def spread(scale: torch.Tensor, kind: ScaledFormat, rows: int, columns: int) -> torch.Tensor:
    """Scales for each element, or broadcast to them: [1, 1], [rows, 1] or [rows, columns]."""
    if not kind.blocked:
        wide = scale.view(-1, 1)
        return wide if kind.block_rows in (1, None) else wide.repeat_interleave(kind.block_rows, 0)[:rows]
    assert kind.block_columns is not None
    by_row = scale.repeat_interleave(kind.block_rows or max(1, rows), 0)[:rows]
    return by_row.repeat_interleave(kind.block_columns, 1)[:, :columns]


def dequantized(matrix: Quantized, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The matrix, in this arithmetic."""
    values, scale, kind = matrix
    return values.to(dtype) * spread(scale.to(dtype), kind, *values.shape)


def scales_of(x: torch.Tensor, kind: ScaledFormat) -> torch.Tensor:
    """The scales of a matrix in x's dtype, float32 or float64: the largest magnitude of a block / 448.

    NaN is left out; a block with an infinity has the scale infinity, and all its values become 0 or NaN. Powers of two
    are rounded up; they are at least 2^-127 and at most 2^127, and NaN for infinity. What has no element has the scale
    of zeros.
    """
    rows, columns = x.shape
    magnitudes = x.nan_to_num(0.0, torch.inf, -torch.inf).abs()
    shape = kind.scale_shape(rows, columns)
    if kind.blocked:
        height, width = kind.block_rows or max(1, rows), kind.block_columns or columns
        padded = magnitudes.new_zeros(shape[0] * height, shape[1] * width)
        padded[:rows, :columns] = magnitudes
        largest = padded.view(shape[0], height, shape[1], width).amax((1, 3))
        least = LEAST_OF_GROUP
    elif kind.block_rows is None:
        largest = magnitudes.amax().view(1) if magnitudes.numel() else magnitudes.new_zeros(1)
        least = LEAST_OF_ROW
    else:
        largest = magnitudes.amax(1) if columns else magnitudes.new_zeros(rows)
        least = LEAST_OF_ROW
    scale = largest.clamp(min=least) / kind.largest
    return scale if kind.scales == torch.float32 else torch.exp2(scale.log2().ceil().clamp(min=-127))


def stored(x: torch.Tensor, scale: torch.Tensor, kind: ScaledFormat) -> torch.Tensor:
    """Quotients with the scales in the format's elements: saturated, NaN stays NaN."""
    rows, columns = x.shape
    scaled = x / spread(scale.to(x.dtype), kind, rows, columns)
    # By way of float32, as torch itself rounds float64.
    return scaled.clamp(-kind.largest, kind.largest).float().to(kind.values)


def quantized(x: torch.Tensor, kind: ScaledFormat, scale: torch.Tensor | None = None) -> Quantized:
    """A matrix of floats, quantised in float32; by these scales, or by those of its largest magnitudes.

    Scales of groups of columns are column-major.

    Args:
        x: [rows, columns], of any dtype of floats.
        kind: a format of e4m3 whose scales lie in order; `mma_quantized` serves those of SM100's matrix products.
        scale: `kind.scale_shape(rows, columns)`, in the format's dtype of scales.

    Raises:
        InvalidInput: an argument does not fit; the message names it.
    """
    check_floats(x)
    checks.instance("kind", kind, ScaledFormat)
    if kind.swizzled or kind.packed > 1:
        other = "pack_experts" if kind.tiled else "mma_quantized"
        raise InvalidInput(f"kind is {kind}: e4m3 with scales in order is needed here, use {other} for {kind}")
    if scale is not None:
        check_scale("scale", scale, kind, x)
    wide = x.float()
    if scale is None:
        scale = scales_of(wide, kind)
        if kind.block_rows == 1 and kind.blocked:
            found = column_major(scale.shape[0], scale.shape[1], kind.scales, x.device)
            scale = found.copy_(scale)
        scale = scale.to(kind.scales)
    return Quantized(stored(wide, scale, kind), scale, kind)


def check_scale(name: str, scale: torch.Tensor, kind: ScaledFormat, matrix: torch.Tensor) -> None:
    """Raises InvalidInput unless these may be the scales of the matrix in this format."""
    checks.tensor(name, scale)
    wanted = kind.scale_shape(*matrix.shape)
    if scale.shape != wanted or scale.dtype != kind.scales:
        raise InvalidInput(
            f"{name} is {short(scale.dtype)} {tuple(scale.shape)}: {short(kind.scales)} {list(wanted)} is needed for "
            f"{kind} of {tuple(matrix.shape)}"
        )
    require(scale.device == matrix.device, f"{name} is on {scale.device}, the matrix on {matrix.device}")


# Swizzled scales, and elements of 4 bits

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] as SM100's matrix products take them: padded with zeros to [128s of rows, fours of blocks].

    Those of 128 rows and 4 blocks are 512 neighbouring bytes, in which row r and block b are 16 (r % 32) + 4 (r // 32)
    + b; the next 4 blocks follow, then the next 128 rows.
    """
    rows, blocks = scale.shape
    height, width = -(-rows // SWIZZLED_ROWS) * SWIZZLED_ROWS, -(-blocks // 4) * 4
    padded = torch.zeros(height, width, dtype=torch.uint8, device=scale.device)
    padded[:rows, :blocks] = scale.view(torch.uint8)
    atoms = padded.view(-1, 4, 32, width // 4, 4).permute(0, 3, 2, 1, 4)
    return atoms.reshape(height, width).view(scale.dtype)


def unswizzled(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The inverse of `swizzled`."""
    height, width = scale.shape
    atoms = scale.view(torch.uint8).view(-1, width // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return atoms.reshape(height, width)[:rows, :blocks].contiguous().view(scale.dtype)


def swizzled_places(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Where the scales of rows lie in the memory of `swizzled`: [rows, width] offsets.

    Args:
        rows: their indices. width: blocks of a row, padded to a multiple of 4.
    """
    blocks = torch.arange(width, device=rows.device)
    row = rows.long()[:, None]
    atom = row // SWIZZLED_ROWS * (width // 4) + blocks // 4
    return atom * 4 * SWIZZLED_ROWS + row % 32 * 16 + row % SWIZZLED_ROWS // 32 * 4 + blocks % 4


def packed_e2m1(x: torch.Tensor) -> torch.Tensor:
    """A matrix as the nearest e2m1, ties to even, saturated: [rows, columns / 2] bytes, the first in low bits."""
    known = torch.tensor(E2M1, dtype=x.dtype, device=x.device)
    magnitude = x.abs().clamp(max=E2M1_MAX)
    above = torch.searchsorted(known, magnitude).clamp(max=len(E2M1) - 1)
    below = (above - 1).clamp(min=0)
    distance = (magnitude - known[below]) - (known[above] - magnitude)
    nearest = torch.where((distance > 0) | ((distance == 0) & (above % 2 == 0)), above, below)
    codes = (nearest + 8 * torch.signbit(x)).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpacked_e2m1(values: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The inverse of `packed_e2m1`."""
    known = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=dtype, device=values.device)
    codes = torch.stack((values & 15, values >> 4), -1).flatten(1)
    return known[codes.long()]


def mma_quantized(x: torch.Tensor, kind: ScaledFormat, global_scale: float | torch.Tensor = 1.0) -> Quantized:
    """A matrix of floats in MXFP8, MXFP4 or NVFP4; values times block scales times the global scale are x.

    Arithmetic is that of kernels: a value is multiplied with the inverse of both scales, in float32.

    Args:
        x: [rows, columns], of any dtype of floats; in MXFP4 and NVFP4 an even number of columns.
        global_scale: a number, or a tensor of one.

    Raises:
        InvalidInput: an argument does not fit; the message names it.
    """
    check_floats(x)
    checks.instance("kind", kind, ScaledFormat)
    if not kind.swizzled:
        raise InvalidInput(f"kind is {kind}: one of {MXFP8}, {MXFP4}, {NVFP4} is needed, use quantized for others")
    if x.shape[1] % kind.packed:
        raise InvalidInput(f"x has {x.shape[1]} columns: a multiple of {kind.packed} is needed, {kind} packs them")
    if not isinstance(global_scale, torch.Tensor):
        checks.number("global_scale", global_scale)
    elif global_scale.numel() != 1:
        raise InvalidInput(f"global_scale has shape {tuple(global_scale.shape)}: one number is needed")
    scale = mma_scales_of(x, kind, global_scale)
    return Quantized(mma_stored(x, scale, kind, global_scale), swizzled(scale), kind)


def mma_scales_of(x: torch.Tensor, kind: ScaledFormat, global_scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """The scales [rows, blocks] of `mma_quantized`."""
    assert kind.block_columns is not None
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % kind.block_columns))
    # e2m1 has no NaN: the scale has it.
    magnitudes = padded.abs() if kind.packed > 1 else padded.nan_to_num(0.0, torch.inf, -torch.inf).abs()
    largest = magnitudes.view(rows, padded.shape[1] // kind.block_columns, kind.block_columns).amax(2)
    whole = torch.as_tensor(global_scale, dtype=torch.float32)
    if kind == NVFP4:
        return (largest / (E2M1_MAX * whole)).clamp(max=448.0).to(kind.scales)
    exponent = (largest.clamp(min=LEAST_OF_GROUP) / (kind.largest * whole)).log2().ceil().clamp(min=-127)
    return torch.exp2(exponent).to(kind.scales)


def mma_stored(
    x: torch.Tensor, scale: torch.Tensor, kind: ScaledFormat, global_scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """The elements of `mma_quantized` by these scales."""
    assert kind.block_columns is not None
    both = scale.float() * torch.as_tensor(global_scale, dtype=torch.float32)
    inverse = torch.where(both == 0, 0.0, 1.0 / both).repeat_interleave(kind.block_columns, 1)
    wide = x.float() * inverse[:, : x.shape[1]]
    if kind.packed > 1:
        return packed_e2m1(wide.nan_to_num())
    return wide.clamp(-kind.largest, kind.largest).to(kind.values)


def in_mxfp8(matrix: Quantized) -> Quantized:
    """The same matrix in MXFP8: e4m3 in blocks, 128 columns wide, whose scales are powers of two.

    Raises:
        InvalidInput: the matrix is in another format, or its values or scales are not of the format.
    """
    checks.instance("matrix", matrix, Quantized)
    values, scale, kind = matrix
    checks.instance("matrix.kind", kind, ScaledFormat)
    accepted = (GROUP_SCALED_E8M0, BLOCK_SCALED_E8M0)
    require(kind in accepted, f"matrix.kind is {kind}: one of {', '.join(map(str, accepted))} is needed")
    checks.tensor("matrix.values", values)
    checks.dtype("dtype of matrix.values", values.dtype, (kind.values,))
    require(values.dim() == 2, f"matrix.values has shape {tuple(values.shape)}: [rows, columns] is needed")
    check_scale("matrix.scale", scale, kind, values)
    rows, columns = values.shape
    assert kind.block_columns is not None
    assert MXFP8.block_columns is not None
    blocks = -(-columns // MXFP8.block_columns)
    by_row = scale.contiguous().view(torch.uint8).repeat_interleave(kind.block_rows or max(1, rows), 0)[:rows]
    by_block = by_row.repeat_interleave(kind.block_columns // MXFP8.block_columns, 1)[:, :blocks]
    return Quantized(values, swizzled(by_block.contiguous().view(MXFP8.scales)), MXFP8)


def mma_dequantized(matrix: Quantized, global_scale: float = 1.0) -> torch.Tensor:
    """The inverse, float64."""
    values, scale, kind = matrix
    assert kind.block_columns is not None
    wide = unpacked_e2m1(values) if kind.packed > 1 else values.double()
    rows, columns = wide.shape
    found = unswizzled(scale, rows, -(-columns // kind.block_columns))
    factors = found.to(torch.float32).double().repeat_interleave(kind.block_columns, 1)[:, :columns]
    return wide * factors * global_scale
