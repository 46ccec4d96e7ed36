# SPDX-License-Identifier: Apache-2.0
"""What a linear layer is, as far as kernels and dispatch specialise on it."""

from dataclasses import dataclass

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short

DTYPES = (torch.float16, torch.bfloat16)
# Kernels count rows and columns in 32 bits, and go past the end by less than a tile.
MOST = 2**31 - 2**10


@dataclass(frozen=True, kw_only=True)
class Swiglu:
    """gate * sigmoid(alpha * gate) * (up + beta), of gate up to `limit` and up within `limit` of 0.

    Attributes:
        limit: None clamps nothing. NaN stays NaN.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            if value is not None or name != "limit":
                checks.number(f"Swiglu's {name}", value)


@dataclass(frozen=True, kw_only=True)
class Geglu:
    """gelu(gate) * up, with the error function or, with `tanh`, its usual approximation."""

    tanh: bool = False

    def __post_init__(self) -> None:
        checks.flag("Geglu's tanh", self.tanh)


Activation = Swiglu | Geglu
# gpt-oss' activation. Its checkpoints hold gate and up rows in turn: `interleaved`.
SWIGLU_OAI = Swiglu(alpha=1.702, beta=1.0, limit=7.0)


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """out [rows, n] = activation(x [rows, k] @ weight^T + bias) + residual, summed in float32 and rounded once.

    The weight is [n, k]; with an activation it is [2 n, k], and row i of its gate half and of its up half make column i
    of the output.

    Attributes:
        n, k: columns of the output and of x.
        dtype: of every tensor: float16 or bfloat16.
        activation: None is the plain product.
        interleaved: gate and up rows take turns, instead of all gate rows first.
        bias, residual: whether there are any.
        batch_invariant: a row's result is the same bits whatever rows are beside it.
        vector: neighbours that may be accessed at once: it divides k, n and all row strides, and all base addresses are
            aligned to it; 1, 2, 4 or 8.
    """

    n: int
    k: int
    dtype: torch.dtype
    activation: Activation | None = None
    interleaved: bool = False
    bias: bool = False
    residual: bool = False
    batch_invariant: bool = False
    vector: int = 8

    def __post_init__(self) -> None:
        checks.dtype("dtype", self.dtype, DTYPES)
        for name in ("interleaved", "bias", "residual", "batch_invariant"):
            checks.flag(name, getattr(self, name))
        require(1 <= self.k <= MOST, f"k {self.k} is not from 1 to {MOST}")
        require(
            self.n >= 1 and self.weight_rows <= MOST, f"{self.weight_rows} rows of weights are not from 1 to {MOST}"
        )
        require(self.vector in (1, 2, 4, 8), f"vector {self.vector} is not 1, 2, 4 or 8")
        require(
            self.n % self.vector == 0 and self.k % self.vector == 0,
            f"n {self.n} and k {self.k} are not multiples of the vector {self.vector}",
        )
        require(
            self.activation is not None or not self.interleaved,
            "interleaved is about gate and up rows: an activation is needed",
        )

    @property
    def parts(self) -> int:
        """Rows of weights for a column of the output: 2 with an activation."""
        return 1 if self.activation is None else 2

    @property
    def weight_rows(self) -> int:
        return self.n * self.parts

    def __str__(self) -> str:
        name = "product" if self.activation is None else str(self.activation)
        facts = (("bias", self.bias), ("residual", self.residual), ("batch invariance", self.batch_invariant))
        extras = [text for text, has in facts if has]
        return f"{' + '.join([name, *extras])} of {self.k} to {self.n} {short(self.dtype)}"
