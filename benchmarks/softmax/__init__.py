# SPDX-License-Identifier: Apache-2.0
"""The softmax benchmark: this package and its Triton kernel, quack, Liger, FlashInfer, torch, torch.compile."""

from ..operator import RowsOperator

# The columns are in the order of these imports.
from . import problems, providers, row_kernels, rows  # noqa: F401


def operators() -> dict[str, RowsOperator]:
    """The softmax of a matrix's rows."""
    operator = RowsOperator(
        name="softmax",
        unit="TB/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
    )
    return {operator.name: operator}
