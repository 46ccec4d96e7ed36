# SPDX-License-Identifier: Apache-2.0
"""Linear layers of 16-bit activations and weights of 4 or 8 bits, forward.

    kind = WeightOnlyFormat(bits=4, group=128)
    packed = pack(values, scale, None, kind)
    out = api.weight_only_linear(x, packed, n=n, kind=kind)

Products are exact but for their float32 sums, and the result is rounded once: no weight is rounded to 16 bits. NaN and
infinities of x propagate. A scale that is infinite makes NaN of weights of zero.
"""

import torch

from dsl_backend import checks
from dsl_backend.gemm.spec import MOST
from dsl_backend.linear.weight_only import eager, ops
from dsl_backend.linear.weight_only.eager import How
from dsl_backend.quant.weight_only import MULTIPLE, WeightOnlyFormat, pack

__all__ = ["WeightOnlyFormat", "pack", "weight_only_linear"]


def weight_only_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    n: int,
    kind: WeightOnlyFormat,
    kernel: str | None = None,
) -> torch.Tensor:
    """A layer: x @ weight^T + bias, [rows, n] in x's dtype.

    Args:
        x: [rows, k] in float16 or bfloat16, neighbouring columns side by side. Rows that do not begin at multiples of
            16 bytes are copied.
        packed: int32 `kind.packed_shape(n, k)`, made by `pack` with scales in x's dtype.
        bias: [n], in x's dtype.
        n: rows of the weight; a multiple of 8, as k is.
        kind: the weight's format.
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves.

    Raises:
        InvalidInput: an argument does not fit, or a tensor requires a gradient while gradients are on; the message
            names it.
        Unsupported: no kernel serves the problem on x's device.
    """
    checks.integer("n", n, MULTIPLE, MOST)
    checks.instance("kind", kind, WeightOnlyFormat)
    how = How(n, kind, kernel)
    if torch.compiler.is_compiling():
        return ops.call(x, packed, bias, how)
    return eager.linear(x, packed, bias, how)
