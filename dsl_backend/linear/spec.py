# SPDX-License-Identifier: Apache-2.0
"""What a linear layer is, as far as kernels and dispatch specialise on it."""

from dataclasses import dataclass

from dsl_backend.checks import require
from dsl_backend.gemm.spec import GemmSpec


@dataclass(frozen=True, kw_only=True)
class LinearSpec(GemmSpec):
    """A GEMM, and how its tensors lie in memory.

    Attributes:
        vector: neighbours that may be accessed at once: it divides k, n and all row strides, and all base addresses are
            aligned to it; 1, 2, 4 or 8.
    """

    vector: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.vector in (1, 2, 4, 8), f"vector {self.vector} is not 1, 2, 4 or 8")
        require(
            self.n % self.vector == 0 and self.k % self.vector == 0,
            f"n {self.n} and k {self.k} are not multiples of the vector {self.vector}",
        )
