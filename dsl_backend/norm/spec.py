# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm problem: what dispatch and the kernels specialize on."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.quant.format import GROUP
from dsl_backend.rows import DTYPES, check_shape

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# A row's scale is at least this, so that a row of zeros has one: the bound of vLLM's kernels.
MIN_SCALE = 1.0 / (FP8_MAX * 512.0)


class Scaling(enum.Enum):
    """Scales of a quantized output."""

    NONE = "none"
    TENSOR = "tensor"  # given, one for all rows
    TOKEN = "token"  # computed, one for each row
    GROUP = "group"  # computed, one for each 128 columns of a row


class NormTensors(NamedTuple):
    """What a launch takes. Matrices are [rows, width] with contiguous columns; a part that the problem has not is None.

    Attributes:
        x: the input.
        residual: added to x.
        weight: [width].
        scale: float32, one element.
        out: the output.
        residual_out: receives x + residual; may be residual or x.
        scale_out: float32 [rows], or [rows, groups of 128 columns] with any strides.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    scale: torch.Tensor | None
    out: torch.Tensor
    residual_out: torch.Tensor | None
    scale_out: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """RMSNorm of rows [rows, width].

    Attributes:
        width: elements of a row.
        dtype: of x and the residual: float32, float16 or bfloat16.
        out_dtype: one of these, or float8_e4m3fn.
        weight_dtype: one of the first three; None where there is no weight.
        residual: x + residual is normalised, and stored.
        weight_offset: added to the weight; Gemma has 1.
        scaling: of an output in float8_e4m3fn.
        vector: adjacent elements that one access may take: it divides the width and all row strides, and all base
            addresses are aligned to it; 1, 2, 4 or 8.
    """

    width: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    weight_dtype: torch.dtype | None = None
    residual: bool = False
    weight_offset: float = 0.0
    scaling: Scaling = Scaling.NONE
    vector: int = 1

    def __post_init__(self) -> None:
        checks.dtype("dtype", self.dtype, DTYPES)
        checks.dtype("out_dtype", self.out_dtype, (*DTYPES, FP8))
        if self.weight_dtype is not None:
            checks.dtype("weight_dtype", self.weight_dtype, DTYPES)
        checks.flag("residual", self.residual)
        checks.number("weight_offset", self.weight_offset)
        checks.member("scaling", self.scaling, Scaling)
        require(
            self.weight_dtype is not None or self.weight_offset == 0,
            f"weight_offset is {self.weight_offset:g} and there is no weight: 0 is needed",
        )
        require(
            (self.out_dtype == FP8) == (self.scaling is not Scaling.NONE),
            f"out_dtype is {short(self.out_dtype)} with scaling {self.scaling.value}: outputs in float8_e4m3fn have a "
            "scale, others have none",
        )
        require(
            self.scaling is not Scaling.GROUP or self.width % GROUP == 0,
            f"width is {self.width} with scales of {GROUP} columns: a multiple of {GROUP} is needed",
        )
        check_shape(self.width, self.vector)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of all tensors whose elements are those of a row."""
        return tuple(one for one in (self.dtype, self.out_dtype, self.weight_dtype) if one is not None)

    def __str__(self) -> str:
        parts = [" to ".join(dict.fromkeys((short(self.dtype), short(self.out_dtype))))]
        parts += ["with residual"] if self.residual else []
        parts += [f"scale by {self.scaling.value}"] if self.scaling is not Scaling.NONE else []
        parts += ["no weight"] if self.weight_dtype is None else []
        parts += [f"weight + {self.weight_offset:g}"] if self.weight_offset else []
        return f"RMSNorm of {self.width} {', '.join(parts)}"
