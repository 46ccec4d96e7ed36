# SPDX-License-Identifier: Apache-2.0
"""The tensors of one call, spelled once."""

from typing import NamedTuple

import torch


class ExpertsScales(NamedTuple):
    """Float32 scales of what is in 8 bits, contiguous; None of what is not.

    Attributes:
        w13, w2: [E, 2 I / 128, H / 128] and [E, H / 128, I / 128], rounded up, or [E, 2 I] and [E, H].
        x: [M, H / 128], rounded up, or [M].
    """

    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    x: torch.Tensor | None = None


class ExpertsOperands(NamedTuple):
    """What a launch takes; M tokens, k experts for each.

    Attributes:
        x: [M, H].
        w13: [E, 2 I, H], contiguous rows.
        w2: [E, H, I], contiguous rows.
        topk_weights: float32 [M, k]; None with RouterWeights.NONE.
        topk_ids: int32 or int64 [M, k]: the router's expert numbers. A number that is no expert's (-1 is padding) is
            skipped.
        w13_bias: [E, 2 I]. w2_bias: [E, H].
        expert_map: int32 [global experts], to this rank's experts; -1 is another rank's expert.
        out: [M, H].
        scales: of what is in 8 bits.
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
