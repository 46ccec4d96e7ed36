# SPDX-License-Identifier: Apache-2.0
"""The sampling benchmark: this package, FlashInfer, vLLM without FlashInfer, and this package's Triton kernel."""

from ..operator import RowsOperator
from . import problems, providers, rows


def operators() -> dict[str, RowsOperator]:
    """Samples one token from each row of logits."""
    operator = RowsOperator(
        name="sampling",
        unit="TB/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
        poison=problems.poison,
        compared=problems.verdict,
    )
    return {operator.name: operator}
