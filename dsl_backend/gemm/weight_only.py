# SPDX-License-Identifier: Apache-2.0
"""What a GEMM of 16-bit activations and weights of 4 or 8 bits computes, and what its kernel's code depends on."""

from dataclasses import dataclass

import torch

from dsl_backend import checks
from dsl_backend.checks import require
from dsl_backend.gemm.key import ConfigT, GemmKey
from dsl_backend.gemm.spec import MOST, Dtypes
from dsl_backend.quant.weight_only import DTYPES, MULTIPLE, WeightOnlyFormat

# Of the kernel for few rows' tile, which has registers for so many.
MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class WeightOnlyGemmSpec:
    """out [rows, n] = x [rows, k] @ weight [n, k]^T + bias.

    Attributes:
        dtype: of x, scales, bias and out.
        kind: of the weights.
    """

    n: int
    k: int
    dtype: torch.dtype
    kind: WeightOnlyFormat
    bias: bool = False

    def __post_init__(self) -> None:
        checks.flag("bias", self.bias)
        checks.dtype("dtype", self.dtype, DTYPES)
        checks.instance("kind", self.kind, WeightOnlyFormat)
        for name in ("n", "k"):
            size = getattr(self, name)
            checks.integer(name, size, MULTIPLE, MOST)
            require(size % MULTIPLE == 0, f"{name} is {size}: a multiple of {MULTIPLE} is needed")

    @property
    def dtypes(self) -> Dtypes:
        """Element types; packed weights are words of any of them."""
        return Dtypes.of(self.dtype)

    @property
    def weight_rows(self) -> int:
        return self.n

    @property
    def parts(self) -> int:
        """Rows of weights for a column of the output."""
        return 1

    @property
    def residual(self) -> bool:
        """Whether one is added: the epilogues have none."""
        return False

    def __str__(self) -> str:
        return f"product{' + bias' if self.bias else ''} of {self.k} to {self.n}, {self.kind}, {self.dtypes}"


@dataclass(frozen=True, kw_only=True)
class WeightOnlyKey(GemmKey[ConfigT]):
    """All that a kernel's code depends on."""

    kind: WeightOnlyFormat
