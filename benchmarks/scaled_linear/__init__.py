# SPDX-License-Identifier: Apache-2.0
"""The benchmark of e4m3 linear layers: this package, torch._scaled_mm, and vLLM's CUTLASS, DeepGEMM and FlashInfer."""

import torch

from ..operator import RowsOperator
from . import problems, providers, rows


def nothing_to_fill(inputs: problems.Inputs) -> None:
    """Every launch makes its own output."""


def as_float32(inputs: problems.Inputs, layer: int, result: torch.Tensor) -> torch.Tensor:
    return result.float()


def operators() -> dict[str, RowsOperator]:
    """Products of quantised operands, and gate and up projections that quantise for the down projection."""
    operator = RowsOperator(
        name="scaled-linear",
        unit="TFLOP/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
        poison=nothing_to_fill,
        compared=as_float32,
    )
    return {operator.name: operator}
