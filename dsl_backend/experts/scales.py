# SPDX-License-Identifier: Apache-2.0
"""Scale factors of experts' weights as SM100's matrix products take them.

A tile of the first product has 128 gate rows and the up rows of the same columns. So gate rows' factors come first and
up rows' follow, each padded to 128s of rows, however the rows of the weights lie.
"""

import torch

from dsl_backend import checks
from dsl_backend.checks import require
from dsl_backend.quant.format import MXFP4, NVFP4
from dsl_backend.quant.reference import swizzled, unswizzled


def parts_of(rows: torch.Tensor, parts: int, interleaved: bool) -> tuple[torch.Tensor, ...]:
    """Gate rows and up rows of [2 n, ...]; with one part all rows."""
    if parts == 1:
        return (rows,)
    return (rows[::2], rows[1::2]) if interleaved else tuple(rows.chunk(2))


def mma_scales(scale: torch.Tensor, *, parts: int = 1, interleaved: bool = False) -> torch.Tensor:
    """Scales [E, rows, blocks] of weights in MXFP8, MXFP4 or NVFP4, as a checkpoint has them, for `ExpertsScales`.

    Args:
        scale: in the format's dtype of scales, or their bytes.
        parts: 2 of w13, whose gate and up rows are apart, or alternate with `interleaved`.

    Raises:
        InvalidInput: an argument does not fit; the message names it.
    """
    checks.tensor("scale", scale)
    checks.integer("parts", parts, 1, 2)
    checks.flag("interleaved", interleaved)
    checks.dtype("dtype of scale", scale.dtype, (torch.uint8, MXFP4.scales, NVFP4.scales))
    require(
        scale.dim() == 3 and scale.numel() > 0,
        f"scale has shape {tuple(scale.shape)}: [experts, rows, blocks] is needed, and no size may be 0",
    )
    require(scale.shape[1] % parts == 0, f"scale has {scale.shape[1]} rows: gate and up rows are equally many")
    return torch.stack([torch.cat([swizzled(part) for part in parts_of(one, parts, interleaved)]) for one in scale])


def row_scales(
    scale: torch.Tensor, rows: int, blocks: int, *, parts: int = 1, interleaved: bool = False
) -> torch.Tensor:
    """The inverse for one expert: [rows, blocks] of `mma_scales(...)[expert]`."""
    found = [unswizzled(part, rows // parts, blocks) for part in scale.chunk(parts)]
    if parts == 1:
        return found[0]
    codes = [one.view(torch.uint8) for one in found]
    joined = torch.stack(codes, 1).flatten(0, 1) if interleaved else torch.cat(codes)
    return joined.view(scale.dtype)
