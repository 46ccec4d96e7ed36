# SPDX-License-Identifier: Apache-2.0
"""The benchmark of linear layers of 4- and 8-bit weights and 16-bit activations: this package, Marlin, Machete."""

from ..operator import RowsOperator
from . import problems, providers, rows


def operators() -> dict[str, RowsOperator]:
    """Products of bfloat16 rows and weights of 4 or 8 bits with a scale for each group of columns."""
    operator = RowsOperator(
        name="weight-only-linear",
        unit="TFLOP/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
        poison=problems.nothing_to_fill,
    )
    return {operator.name: operator}
