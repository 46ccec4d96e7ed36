# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm benchmark: this package and its Triton kernel, quack, vLLM, FlashInfer, torch, torch.compile."""

import torch

from ..operator import RowsOperator

# The columns are in the order of these imports.
from . import problems, providers, row_kernels, rows  # noqa: F401


def as_float32(inputs: problems.Inputs, layer: int, result: torch.Tensor) -> torch.Tensor:
    return result.float()


def operators() -> dict[str, RowsOperator]:
    """The RMSNorm of a matrix's rows."""
    operator = RowsOperator(
        name="norm",
        unit="TB/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
        poison=problems.poison,
        compared=as_float32,
    )
    return {operator.name: operator}
