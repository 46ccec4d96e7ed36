# SPDX-License-Identifier: Apache-2.0
"""The tensors of one call, spelled once."""

from typing import NamedTuple

import torch


class ExpertsScales(NamedTuple):
    """Scales of what is in 8 or 4 bits, contiguous; None of what is not. Float32, except for MXFP8, MXFP4 and NVFP4.

    Attributes:
        w13, w2: [E, 2 I / 128, H / 128] and [E, H / 128, I / 128], rounded up, or [E, 2 I] and [E, H]. Of MXFP8, MXFP4
            and NVFP4 what `scales.mma_scales` makes of a checkpoint's.
        x: [M, H / 128], rounded up, or [M].
        w13_global, w2_global: float32 [E]; x_global, hidden_global: float32 [1]. NVFP4's scales of whole matrices: of
            experts' weights, of x and of the activation's result. A value is element * scale * scale of the matrix.
    """

    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    x: torch.Tensor | None = None
    w13_global: torch.Tensor | None = None
    w2_global: torch.Tensor | None = None
    x_global: torch.Tensor | None = None
    hidden_global: torch.Tensor | None = None


class ExpertsOperands(NamedTuple):
    """What a launch takes; M tokens, k experts for each.

    Attributes:
        x: [M, H].
        w13: [E, 2 I, H], contiguous rows; of 4 bits [E, 2 I, H / 2] bytes. MXFP4_TILED: see `quant.mxfp4_tiles`.
        w2: [E, H, I], contiguous rows; of 4 bits [E, H, I / 2] bytes. The same.
        topk_weights: float32 [M, k]; None with RouterWeights.NONE.
        topk_ids: int32 or int64 [M, k]: the router's expert numbers. A number that is no expert's (-1 is padding) is
            skipped.
        w13_bias: [E, 2 I]. w2_bias: [E, H].
        expert_map: int32 [global experts], to this rank's experts; -1 is another rank's expert.
        out: [M, H].
        scales: of what is in 8 or 4 bits.
        shared_w13: [2 S I, H], contiguous rows: of S shared experts all gate rows, then all up rows.
        shared_w2: [H, S I], contiguous rows.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_ids: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    expert_map: torch.Tensor | None
    out: torch.Tensor
    scales: ExpertsScales = ExpertsScales()
    shared_w13: torch.Tensor | None = None
    shared_w2: torch.Tensor | None = None
