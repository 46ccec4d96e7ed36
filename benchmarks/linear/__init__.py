# SPDX-License-Identifier: Apache-2.0
"""The benchmark of linear layers: this package, cuBLAS with a separate activation kernel, torch.compile, and quack."""

from ..operator import RowsOperator

# The columns are in the order of these imports.
from . import problems, providers, rows, tile_kernels  # noqa: F401


def operators() -> dict[str, RowsOperator]:
    """Gate and up projections with SwiGLU, and plain products."""
    operator = RowsOperator(
        name="linear",
        unit="TFLOP/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
    )
    return {operator.name: operator}
