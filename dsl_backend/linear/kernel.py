# SPDX-License-Identifier: Apache-2.0
"""What a plan and its kernels agree on: a launch's operands, and how a kernel is bound."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


class Operands(NamedTuple):
    """The tensors of one call; `api.linear` has their shapes. There is at least one row."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor


# Writes operands.out; as many rows as it was bound for.
Launch = Callable[[Operands], None]
# What a kernel is: bound once for a problem and a number of rows, at least one.
Bind = Callable[[LinearSpec, int, Target, Workspace], Launch]
