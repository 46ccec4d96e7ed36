# SPDX-License-Identifier: Apache-2.0
"""GEMMs of quantised operands: what they compute, and the tensors of a call.

out [rows, n] = quantised(activation(x [rows, k] @ weight^T + bias)): x and the weight are e4m3 with scales, the sum is
float32. Scales that all columns of a row share are multiplied into the sum, the weight's first. Scales of 128 columns
are multiplied into the sum over these columns, their product first, and the scaled sums are added in float32.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch

from dsl_backend import checks
from dsl_backend.checks import require
from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.spec import DTYPES, Dtypes, GemmSpec
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    BLOCK_SCALED_E8M0,
    GROUP_SCALED,
    GROUP_SCALED_E8M0,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    TENSOR_SCALED,
    ScaledFormat,
)

# n and k are multiples of it: 16 bytes of 8-bit elements.
MULTIPLE = 16
# Formats of x and the weight that kernels multiply.
PAIRS = (
    (TENSOR_SCALED, TENSOR_SCALED),
    (TENSOR_SCALED, ROW_SCALED),
    (ROW_SCALED, TENSOR_SCALED),
    (ROW_SCALED, ROW_SCALED),
    (GROUP_SCALED, BLOCK_SCALED),
    (GROUP_SCALED_E8M0, BLOCK_SCALED_E8M0),
)
# Formats whose scales are SM100's matrix products' own.
MMA_PAIRS = ((MXFP8, MXFP8), (NVFP4, NVFP4))
# Of an output that is quantised: by a scale that the consumer has, or with computed scales.
MMA_OUTPUTS = (MXFP8, NVFP4)
OUTPUTS = (TENSOR_SCALED, ROW_SCALED, GROUP_SCALED, GROUP_SCALED_E8M0)
# Of these, what another launch can make of an output in float32.
QUANTISED_BESIDE = (ROW_SCALED, GROUP_SCALED)


@dataclass(frozen=True, kw_only=True)
class ScaledGemmSpec(GemmSpec):
    """A GEMM of quantised operands; see the module.

    Attributes:
        x, weight: formats of the operands.
        dtype: of the bias, and of an output that is not quantised: float16 or bfloat16.
        out: format of a quantised output; None is one in `dtype`. With TENSOR_SCALED the scale is given, with the
            others it is computed: largest magnitude / 448, see `quant.reference.scales_of`.
        wide: the output is float32, which another launch quantises; `out` is None.
        dtypes: follow from these.
    """

    x: ScaledFormat
    weight: ScaledFormat
    dtype: torch.dtype = torch.bfloat16
    out: ScaledFormat | None = None
    wide: bool = False
    dtypes: Dtypes = field(init=False)

    def __post_init__(self) -> None:
        checks.dtype("dtype", self.dtype, DTYPES)
        pairs = (*PAIRS, *MMA_PAIRS)
        if (self.x, self.weight) not in pairs:
            wanted = "; ".join(f"{x} with {weight}" for x, weight in pairs)
            raise InvalidInput(f"x is {self.x} and the weight {self.weight}: {wanted} are possible")
        outputs = (*OUTPUTS, *MMA_OUTPUTS)
        if self.out is not None and self.out not in outputs:
            raise InvalidInput(f"out is {self.out}: {'; '.join(map(str, outputs))} or None is needed")
        require(not (self.wide and self.out), f"wide: an output in float32 is not {self.out}")
        unquantised = torch.float32 if self.wide else self.dtype
        found = Dtypes(
            x=self.x.values, weight=self.weight.values, out=unquantised if self.out is None else self.out.values
        )
        object.__setattr__(self, "dtypes", found)
        super().__post_init__()
        require(not self.residual, "residual: layers of quantised operands add none")
        for name in ("n", "k"):
            require(
                getattr(self, name) % MULTIPLE == 0, f"{name} {getattr(self, name)} is not a multiple of {MULTIPLE}"
            )

    def check_dtypes(self) -> None:
        """The formats were checked."""

    @property
    def copies_scales(self) -> bool:
        """Whether x's scales of neighbouring rows lie side by side, as TMA copies them."""
        return False

    @property
    def promoted(self) -> bool:
        """Whether sums over each 128 columns are scaled and added in float32 behind the matrix products."""
        return self.x.blocked and not self.x.swizzled

    @property
    def out_scale_given(self) -> bool:
        """Whether the output's scale is an input."""
        return self.out is not None and self.out.one_scale

    @property
    def may_be_quantised_beside(self) -> bool:
        """Whether a launch behind the products, `quant.cute.kernel`, can quantise the output."""
        return self.out in QUANTISED_BESIDE and not self.x.swizzled

    @property
    def in_float32(self) -> Self:
        """The same with an output in float32."""
        return replace(self, out=None, wide=True)

    def __str__(self) -> str:
        formats = f", x {self.x}, weight {self.weight}" + ("" if self.out is None else f", out {self.out}")
        return super().__str__() + formats


class ScaledOperands(NamedTuple):
    """The tensors of one call. Neighbouring columns of matrices lie side by side, rows at any stride.

    Scales have the shape of `ScaledFormat.scale_shape`. Those of one dimension are contiguous. Those of x's and the
    output's groups, [rows, groups], are column-major where the spec says so: neighbouring rows lie side by side, and
    columns at a multiple of 16 bytes; else row-major. Those of a weight's blocks are contiguous.

    Attributes:
        x: [rows, k] e4m3, at least one row.
        x_scale: of x.
        weight: [n, k] e4m3, or [2 n, k] with an activation.
        weight_scale: of the weight: the block of row r is r // 128, with an activation too.
        bias: [n] or [2 n], in the spec's dtype.
        out: [rows, n].
        alpha: float32 [1], multiplied into all sums before the bias: the product of the scales of whole matrices of
            NVFP4. None with other formats.
        out_global_scale: float32 [1], the scale of the whole matrix of an output in NVFP4. None with other formats.
        out_scale: of a quantised output; float32 [1] that is read, or written with the output. None without.
            Of swizzled scales the padding of rows is written too. That of columns is not, and must be 0, because the
            next GEMM multiplies by it.
    """

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    out_scale: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    out_global_scale: torch.Tensor | None = None
