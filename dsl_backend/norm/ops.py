# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as an operator that torch.compile sees as one node: `torch.ops.dsl_backend.rms_norm`."""

import torch

from dsl_backend.norm import launch
from dsl_backend.runtime.op import register_op


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    scale: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    kernel: str | None,
) -> None:
    launch.run(x, weight, out, residual, residual_out, eps, weight_offset, scale, scale_out, kernel)


def rms_norm_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    scale: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    kernel: str | None,
) -> None:
    launch.check(x, weight, out, residual, residual_out, scale, scale_out)


RMS_NORM = register_op("rms_norm", rms_norm, fake=rms_norm_fake, mutates=("out", "residual_out", "scale_out"))
