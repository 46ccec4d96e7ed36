# SPDX-License-Identifier: Apache-2.0
"""What a plan and its kernels agree on: how a kernel is bound and launched."""

from collections.abc import Callable

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Writes operands.out, for any number of tokens. It reads nothing of the routing on the host.
Launch = Callable[[ExpertsOperands], None]
# A kernel: bound once for a layer.
Bind = Callable[[ExpertsSpec, Target, Workspace], Launch]
