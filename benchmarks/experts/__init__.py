# SPDX-License-Identifier: Apache-2.0
"""The benchmark of routed experts: this package, vLLM's Triton kernels, and FlashInfer's CUTLASS kernels."""

from ..operator import RowsOperator
from . import problems, providers, rows


def operators() -> dict[str, RowsOperator]:
    """A layer of experts with SwiGLU, from routed tokens to their sums."""
    operator = RowsOperator(
        name="experts",
        unit="TFLOP/s",
        cases=rows.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
    )
    return {operator.name: operator}
