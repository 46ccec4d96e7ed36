# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices in eager torch: to and from e4m3 with scales, in any arithmetic."""

from typing import NamedTuple

import torch

from dsl_backend.quant.format import ScaledFormat

# Largest magnitudes below these count as these, so that a row or a group of zeros has a scale: the bounds of vLLM's
# quantisation kernels.
LEAST_OF_ROW = 1.0 / 512.0
LEAST_OF_GROUP = 1e-10


class Quantized(NamedTuple):
    """A matrix [rows, columns] and its scales, whose shape is `kind.scale_shape(rows, columns)`."""

    values: torch.Tensor
    scale: torch.Tensor
    kind: ScaledFormat


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
    are rounded up; they are at least 2^-127 and at most 2^127, and NaN for infinity.
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
    else:
        largest = magnitudes.amax().view(1) if kind.block_rows is None else magnitudes.amax(1)
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
    """A matrix of any dtype, quantised in float32; by these scales, or by those of its largest magnitudes.

    Scales of groups of columns are column-major.
    """
    wide = x.float()
    if scale is None:
        scale = scales_of(wide, kind)
        if kind.block_rows == 1 and kind.blocked:
            found = column_major(scale.shape[0], scale.shape[1], kind.scales, x.device)
            scale = found.copy_(scale)
        scale = scale.to(kind.scales)
    return Quantized(stored(wide, scale, kind), scale, kind)
