# SPDX-License-Identifier: Apache-2.0
"""Linear layers of packed weights as an operator, one node for torch.compile: `dsl_backend::weight_only_linear`.

The format travels as its bits, its group (0 for a scale of each row) and whether there are zero points.
"""

import torch

from dsl_backend.linear.weight_only import eager
from dsl_backend.linear.weight_only.eager import How
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.op import register_op


def weight_only_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    bits: int,
    group: int,
    zero_points: bool,
    kernel: str | None,
) -> torch.Tensor:
    kind = WeightOnlyFormat(bits=bits, group=group or None, zero_points=zero_points)
    return eager.linear(x, packed, bias, How(n, kind, kernel))


def weight_only_linear_fake(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, n: int, *options: object
) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))


WEIGHT_ONLY_LINEAR = register_op("weight_only_linear", weight_only_linear, fake=weight_only_linear_fake)


def call(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
    """As `eager.linear`, one node of the graph."""
    kind = how.kind
    return WEIGHT_ONLY_LINEAR(x, packed, bias, how.n, kind.bits, kind.group or 0, kind.zero_points, how.kernel)
