# SPDX-License-Identifier: Apache-2.0
"""What a GEMM computes, as far as kernels, configurations and the cost model depend on it."""

from dataclasses import dataclass

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import Unsupported
from dsl_backend.gemm.activation import Activation
from dsl_backend.quant.format import E4M3

DTYPES = (torch.float16, torch.bfloat16)
# Of operands that have scales; see `gemm.scaled`.
SCALED_DTYPES = (E4M3.dtype, torch.uint8)
# Kernels count rows and columns in 32 bits, and index past the end of a matrix by less than a tile.
MOST = 2**31 - 2**10


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Element types of a GEMM's operands. Bias and residual have the output's.

    Attributes:
        x, weight: of the inputs.
        out: of the output.
    """

    x: torch.dtype
    weight: torch.dtype
    out: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Dtypes":
        """One type for all operands."""
        return cls(x=dtype, weight=dtype, out=dtype)

    def __post_init__(self) -> None:
        for name in ("x", "weight", "out"):
            # Those that need a scale, and float32, are for `gemm.scaled`, and `GemmSpec.check_dtypes` refuses them.
            dtype = getattr(self, name)
            if not (dtype in SCALED_DTYPES or (name == "out" and dtype == torch.float32)):
                checks.dtype(f"dtype of {name}", dtype, DTYPES)

    @property
    def uniform(self) -> bool:
        """Whether all operands have one type."""
        return self.x == self.weight == self.out

    def objections(self) -> list[str]:
        """Why kernels that take one type for all operands cannot serve; empty where they can."""
        return [] if self.uniform else [f"x, weight and out need one dtype, these are {self}"]

    def __str__(self) -> str:
        if self.uniform:
            return short(self.x)
        return f"{short(self.x)} x {short(self.weight)} -> {short(self.out)}"


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """out [rows, n] = activation(x [rows, k] @ weight^T + bias) + residual, summed in float32 and rounded once.

    The weight is [n, k]. With an activation it is [2 n, k]: row i of the gate half and row i of the up half make column
    i of the output.

    Attributes:
        n, k: columns of the output and of x.
        dtypes: of the operands.
        activation: None is the plain product.
        interleaved: gate and up rows alternate, instead of all gate rows first.
        bias, residual: whether there are any.
        batch_invariant: a row's result has the same bits whatever the other rows are.
    """

    n: int
    k: int
    dtypes: Dtypes
    activation: Activation | None = None
    interleaved: bool = False
    bias: bool = False
    residual: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("interleaved", "bias", "residual", "batch_invariant"):
            checks.flag(name, getattr(self, name))
        self.check_dtypes()
        require(1 <= self.k <= MOST, f"k {self.k} is not from 1 to {MOST}")
        require(
            self.n >= 1 and self.weight_rows <= MOST, f"{self.weight_rows} rows of weights are not from 1 to {MOST}"
        )
        require(
            self.activation is not None or not self.interleaved,
            "interleaved is about gate and up rows: an activation is needed",
        )

    def check_dtypes(self) -> None:
        """Raises InvalidInput: an operand has elements that need a scale, and has none here."""
        for name in ("x", "weight", "out"):
            dtype = getattr(self.dtypes, name)
            require(
                dtype not in SCALED_DTYPES,
                f"dtype of {name} is {short(dtype)}, which needs a scale: one of {', '.join(map(short, DTYPES))} is "
                "needed",
            )
        if self.dtypes.out == torch.float32:
            checks.dtype("dtype of out", self.dtypes.out, DTYPES)

    @property
    def parts(self) -> int:
        """Rows of weights for a column of the output: 2 with an activation."""
        return 1 if self.activation is None else 2

    @property
    def weight_rows(self) -> int:
        return self.n * self.parts

    @property
    def apart(self) -> bool:
        """Whether values of the activation share no arithmetic; see `key.GemmKey`."""
        return self.batch_invariant and self.activation is not None

    def __str__(self) -> str:
        name = "product" if self.activation is None else str(self.activation)
        facts = (("bias", self.bias), ("residual", self.residual), ("batch invariance", self.batch_invariant))
        extras = [text for text, has in facts if has]
        return f"{' + '.join([name, *extras])} of {self.k} to {self.n} {self.dtypes}"


@dataclass(frozen=True)
class Rows:
    """How many rows of x a launch has.

    Kernels, grid and scratch are chosen for `most` rows on the host. With `on_device` the launch reads the number from
    a tensor on the device, as grouped GEMMs of experts need it: routing decides it, and the host never waits for it.

    Attributes:
        most: the number of rows, or where only the device knows it the largest number possible; at least 1.
        on_device: whether a launch's operands bring the number as `GemmOperands.row_counts`.
    """

    most: int
    on_device: bool = False

    def on_host(self) -> int:
        """The number of rows.

        Raises:
            Unsupported: only the device knows it.
        """
        if self.on_device:
            raise Unsupported("a number of rows that only the device knows", {"gemm": ["the host must know it"]})
        return self.most
