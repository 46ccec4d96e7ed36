# SPDX-License-Identifier: Apache-2.0
"""Softmax as operators that torch.compile sees as one node: `torch.ops.dsl_backend.softmax` and `.softmax_out`."""

import torch

from dsl_backend.runtime.op import register_op
from dsl_backend.softmax import api


def softmax(x: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None) -> torch.Tensor:
    return api.softmax(x, log=log, out_dtype=out_dtype, kernel=kernel)


def softmax_fake(x: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None) -> torch.Tensor:
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


def softmax_out(
    x: torch.Tensor, out: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> None:
    api.softmax(x, out, log=log, out_dtype=out_dtype, kernel=kernel)


def softmax_out_fake(
    x: torch.Tensor, out: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> None:
    api.check_out(x, out, out_dtype)


SOFTMAX = register_op("softmax", softmax, fake=softmax_fake)
SOFTMAX_OUT = register_op("softmax_out", softmax_out, fake=softmax_out_fake, mutates=("out",))
