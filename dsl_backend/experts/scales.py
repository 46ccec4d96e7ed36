# SPDX-License-Identifier: Apache-2.0
"""Scale factors of experts' weights as SM100's matrix products take them.

A tile of the first product has 128 gate rows and the up rows of the same columns. So gate rows' factors come first and
up rows' follow, each padded to 128s of rows, however the rows of the weights lie.
"""

import torch

from dsl_backend.quant.reference import swizzled, unswizzled


def parts_of(rows: torch.Tensor, parts: int, interleaved: bool) -> tuple[torch.Tensor, ...]:
    """Gate rows and up rows of [2 n, ...]; with one part all rows."""
    if parts == 1:
        return (rows,)
    return (rows[::2], rows[1::2]) if interleaved else tuple(rows.chunk(2))


def mma_scales(scale: torch.Tensor, *, parts: int = 1, interleaved: bool = False) -> torch.Tensor:
    """Scales [E, rows, blocks] of weights in MXFP8, MXFP4 or NVFP4, as a checkpoint has them, for `ExpertsScales`.

    Args:
        parts: 2 of w13, whose gate and up rows are apart, or alternate with `interleaved`.
    """
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
