# SPDX-License-Identifier: Apache-2.0
"""The benchmark of launches: the same kernel, which has almost no work, in each DSL.

A row's time is that of consecutive launches in a CUDA graph; `launch_us` is what the host needs for one without it.
"""

from ..operator import RowsOperator
from . import problems, providers


def operators() -> dict[str, RowsOperator]:
    """One is added to a few numbers."""
    operator = RowsOperator(
        name="launch",
        unit="TB/s",
        cases=problems.cases,
        make=providers.ours,
        objections=providers.objections,
        build=problems.build,
        reference=problems.reference,
    )
    return {operator.name: operator}
