# SPDX-License-Identifier: Apache-2.0
"""What the code of a GEMM of quantised operands depends on."""

from dataclasses import dataclass

import torch

from dsl_backend.gemm.key import ConfigT, GemmKey
from dsl_backend.quant.format import ScaledFormat


@dataclass(frozen=True, kw_only=True)
class ScaledKey(GemmKey[ConfigT]):
    """All that a kernel's code depends on; see `scaled.ScaledGemmSpec`.

    Attributes:
        dtype: of the bias, and of an output that is not quantised.
        column_major: x's scales of groups; see `scaled.ScaledOperands`.
    """

    x: ScaledFormat
    weight: ScaledFormat
    out: ScaledFormat | None
    dtype: torch.dtype
    column_major: bool = False
