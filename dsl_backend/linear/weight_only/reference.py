# SPDX-License-Identifier: Apache-2.0
"""Linear layers of packed weights in eager torch: the kernel of a CPU."""

from functools import partial

import torch
from torch.nn import functional

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear.weight_only.kernel import Launch
from dsl_backend.quant.weight_only import dequantized, unpack
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def bind(spec: WeightOnlyGemmSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The layer for any number of rows."""
    rows.on_host()
    return partial(linear, spec)


def linear(spec: WeightOnlyGemmSpec, operands: GemmOperands) -> None:
    """Writes operands.out, in float32 arithmetic."""
    x, bias = operands.x.float(), operands.bias
    weight = weight_of(operands.weight, spec, torch.float32)
    operands.out.copy_(functional.linear(x, weight, None if bias is None else bias.float()))


def weight_of(packed: torch.Tensor, spec: WeightOnlyGemmSpec, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The weights [n, k] in this arithmetic."""
    values, scale, *zero_points = unpack(packed, spec.dtype, spec.kind)
    # Unpacked scales are those of each tile of columns.
    kind = spec.kind.by_tile
    return dequantized(values, scale, zero_points[0] if zero_points else None, kind, dtype)[: spec.n, : spec.k]
