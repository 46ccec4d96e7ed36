# SPDX-License-Identifier: Apache-2.0
"""What a linear layer of quantised operands is, as far as kernels and dispatch specialise on it."""

from dataclasses import dataclass

from dsl_backend import checks
from dsl_backend.gemm.scaled import ScaledGemmSpec


@dataclass(frozen=True, kw_only=True)
class ScaledLinearSpec(ScaledGemmSpec):
    """A GEMM of quantised operands, and how its tensors lie in memory.

    Attributes:
        column_major: x's scales of groups; see `ScaledOperands`. The output's are column-major always.
        aligned: rows of matrices, columns of column-major scales, and tensors with more than one element begin at
            multiples of 16 bytes.
    """

    column_major: bool = False
    aligned: bool = True

    @property
    def copies_scales(self) -> bool:
        return self.column_major

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("column_major", "aligned"):
            checks.flag(name, getattr(self, name))
        checks.require(
            self.x.blocked or not self.column_major,
            f"column_major is about scales of groups: x is {self.x}",
        )
