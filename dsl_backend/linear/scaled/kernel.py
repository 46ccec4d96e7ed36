# SPDX-License-Identifier: Apache-2.0
"""What a plan and kernels of quantised operands agree on."""

from collections.abc import Callable

from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Writes operands.out, and a computed operands.out_scale; of as many rows as it was bound for.
Launch = Callable[[ScaledOperands], None]
# A kernel: bound once for a problem and its rows. Raises Unsupported where it needs to know the number on the host.
Bind = Callable[[ScaledLinearSpec, Rows, Target, Workspace], Launch]
