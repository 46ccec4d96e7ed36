# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as an operator that torch.compile sees as one node: `torch.ops.dsl_backend.rms_norm`."""

from typing import Any

import torch

from dsl_backend.norm import launch
from dsl_backend.norm.spec import NormTensors
from dsl_backend.runtime.op import register_op


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    kernel: str | None,
) -> None:
    """The fields of `NormTensors`, which a schema of torch's cannot name, then the arguments of `launch.run`."""
    launch.run(NormTensors(x, residual, weight, scale, out, residual_out, scale_out), eps, weight_offset, kernel)


def rms_norm_fake(*arguments: Any) -> None:
    launch.check(NormTensors(*arguments[: len(NormTensors._fields)]))


RMS_NORM = register_op("rms_norm", rms_norm, fake=rms_norm_fake, mutates=("out", "residual_out", "scale_out"))
