# SPDX-License-Identifier: Apache-2.0
"""The softmax problem: what dispatch and the kernels specialize on."""

from dataclasses import dataclass

import torch

from dsl_backend import checks
from dsl_backend.checks import short
from dsl_backend.rows import DTYPES, check_shape


@dataclass(frozen=True, kw_only=True)
class SoftmaxSpec:
    """Softmax of rows [rows, width] along the width.

    Attributes:
        width: elements of a row.
        dtype, out_dtype: of input and output, each float32, float16 or bfloat16; arithmetic is float32.
        log: the natural logarithm of the softmax instead.
        vector: adjacent elements that one access may take: it divides the width and both row strides, and both base
            addresses are aligned to it; 1, 2, 4 or 8.
    """

    width: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    log: bool = False
    vector: int = 1

    def __post_init__(self) -> None:
        checks.dtype("dtype", self.dtype, DTYPES)
        checks.dtype("out_dtype", self.out_dtype, DTYPES)
        checks.flag("log", self.log)
        check_shape(self.width, self.vector)

    def __str__(self) -> str:
        types = short(self.dtype) if self.dtype == self.out_dtype else f"{short(self.dtype)} to {short(self.out_dtype)}"
        return f"{'log-softmax' if self.log else 'softmax'} of {self.width} {types}"
