# SPDX-License-Identifier: Apache-2.0
"""What a launch and its kernels agree on: how a kernel is bound and launched."""

from collections.abc import Callable

from dsl_backend.norm.spec import NormSpec, NormTensors
from dsl_backend.runtime.target import Target

# Writes out, residual_out and scale_out with an eps; at least one row.
Launch = Callable[[NormTensors, float], None]
# A kernel: bound once for a problem.
Bind = Callable[[NormSpec, Target], Launch]
