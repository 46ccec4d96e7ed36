# SPDX-License-Identifier: Apache-2.0
"""What the GEMMs of quantised operands for few rows share: scales of rows, of tensors, and outputs in e4m3."""

from dataclasses import dataclass, fields

import cutlass
from cutlass import cute

from dsl_backend.gemm.args import GemmOperands, StreamKScratch
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.small_m import SmallMGemmBase, SmallMParams
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives.math import f32_to_e4m3


@dataclass(frozen=True)
class ScaledSmallMParams(SmallMParams):
    """With scales as in `scaled.ScaledOperands`."""

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor
    mOutScale: cute.Tensor


class ScaledSmallMBase(SmallMGemmBase):
    """The part of a kernel that `gemm/small_m.py` does not have; another base makes the products."""

    def scaled_by(self, key: ScaledKey[SmallMTiles]) -> None:
        """What the methods of this class need."""
        self.blocked, self.quantised = key.weight.blocked, key.out is not None
        self.x_rows, self.weight_rows_scaled = key.x.block_rows == 1, key.weight.block_rows == 1
        # Whether k tiles of a sum have different scales.
        self.scaled_by_tile = self.blocked

    def params(  # type: ignore[override]
        self, operands: ScaledOperands, scratch: StreamKScratch | None
    ) -> ScaledSmallMParams:
        """The kernel's, with TMA descriptors."""
        plain = GemmOperands(operands.x, operands.weight, operands.bias, None, operands.out)
        base = super().params(plain, scratch)
        scales = {
            "mXScale": operands.x_scale,
            "mWeightScale": operands.weight_scale,
            "mOutScale": operands.out_scale,
        }
        return ScaledSmallMParams(**{field.name: getattr(base, field.name) for field in fields(base)}, **scales)

    def biases(self, params, column: cutlass.Int32):
        """The base's, then the scales of both boxes' columns where weights have some of rows or one."""
        found = super().biases(params, column)
        if self.blocked:
            return found
        if not self.weight_rows_scaled:
            return [*found, params.mWeightScale[0], params.mWeightScale[0]]
        n = params.mOut.shape[1]
        for box in range(2):
            part, place = (box, column) if self.gated else (0, column + box * self.box)
            found.append(bias_of(params.mWeightScale, place, part, n, self.interleaved))
        return found

    def sums(self, params, of_column: list, sum_0, sum_1, token):
        """Both boxes' sums of a token with their scales and biases."""
        return self.scaled_sums(params, of_column, sum_0, sum_1, self.x_scale(params, token))

    def x_scale(self, params, token):
        """The scale of a token, any past the last; None where sums have theirs."""
        if self.blocked:
            return None
        return params.mXScale[cutlass.min(token, params.mOut.shape[0] - 1) if self.x_rows else 0]

    def scaled_sums(self, params, of_column: list, sum_0, sum_1, x_scale):
        """The same with the token's scale."""
        if x_scale is not None:
            sum_0, sum_1 = sum_0 * of_column[2] * x_scale, sum_1 * of_column[3] * x_scale
        if params.mBias is None:
            return sum_0, sum_1
        return sum_0 + of_column[0], sum_1 + of_column[1]

    def rounded(self, params: ScaledSmallMParams, value: cutlass.Float32):  # type: ignore[override]
        """The base's, or e4m3 by the scale that is given."""
        if not self.quantised:
            return super().rounded(params, value)
        scaled = value * (cutlass.Float32(1.0) / params.mOutScale[0])
        return cutlass.Uint8(f32_to_e4m3(scaled, scaled, scaled, scaled) & 0xFF)
