# SPDX-License-Identifier: Apache-2.0
"""What a plan and kernels of packed weights agree on."""

from collections.abc import Callable

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Writes operands.out, of as many rows as it was bound for.
Launch = Callable[[GemmOperands], None]
# A kernel: bound once for a problem and its rows. Raises Unsupported where it needs to know the number on the host.
Bind = Callable[[WeightOnlyGemmSpec, Rows, Target, Workspace], Launch]
