# SPDX-License-Identifier: Apache-2.0
"""What a launch takes, spelled once: torch's tensors on the host, CuTe's in a kernel, under the same names.

Compiled functions take `GemmArgs` whole. A tuple costs the host 0.1 us more than as many positional arguments.
"""

from typing import Any, NamedTuple

import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.scaled import ScaledOperands


class GemmOperands(NamedTuple):
    """The tensors of one call. Neighbouring columns lie side by side, rows at any stride.

    Attributes:
        x: [rows, k], at least one row.
        weight: [n, k], or [2 n, k] with an activation.
        bias: [n] or [2 n].
        residual: [rows, n]; may be the output.
        out: [rows, n].
        row_counts: int32 [1], the number of rows of x and out that count; see `spec.Rows`. No kernel takes it yet.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor
    row_counts: torch.Tensor | None = None


class StreamKScratch(NamedTuple):
    """What CTAs of a stream-K GEMM hand each other.

    Attributes:
        partials: float32, `SmallMTiles.partials` for each CTA; contents undefined.
        flags: int32, one for each warpgroup with accumulators; 0 before and after a launch.
    """

    partials: torch.Tensor
    flags: torch.Tensor


class GemmArgs(NamedTuple):
    """All arguments of a launch except the stream.

    Attributes:
        scratch: of the stream-K GEMM; None for all others.
        max_ctas: CTAs at most; a multiple of the cluster's.
    """

    operands: GemmOperands
    scratch: StreamKScratch | None
    max_ctas: int


class ScaledArgs(NamedTuple):
    """The same of a GEMM of quantised operands."""

    operands: ScaledOperands
    scratch: StreamKScratch | None
    max_ctas: int


def launch_args(args: GemmArgs) -> tuple[torch.Tensor, GemmArgs]:
    """The positional arguments of a compiled function.

    x stands beside the tuple that contains it: TVM-FFI finds the device and its current stream by a tensor that is an
    argument itself, and does not look for one in tuples (CuTe DSL 4.6.0).
    """
    return args.operands.x, args


def scaled_launch_args(args: ScaledArgs) -> tuple[torch.Tensor, ScaledArgs]:
    """The same of a GEMM of quantised operands."""
    return args.operands.x, args


def require_dynamic(value: Any, name: str = "args") -> None:
    """Refuse Python numbers in the arguments of a compilation: they would be constants of the compiled code.

    Raises:
        InvalidInput: there is one; the message names it.
    """
    if isinstance(value, (bool, int, float)):
        raise InvalidInput(f"{name} is the Python number {value!r}, which would be compiled in: use Int32 or Float32")
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        for part, of_part in zip(value, names, strict=True):
            require_dynamic(part, f"{name}.{of_part}")
