# SPDX-License-Identifier: Apache-2.0
"""Softmax as operators that torch.compile sees as one node: `torch.ops.dsl_backend.softmax` and `.softmax_out`."""

import torch

from dsl_backend.runtime.op import register_op
from dsl_backend.softmax import launch


def softmax(x: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None) -> torch.Tensor:
    return launch.run(x, None, log, out_dtype, kernel)


def softmax_fake(x: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None) -> torch.Tensor:
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


def softmax_out(
    x: torch.Tensor, out: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> None:
    launch.run(x, out, log, out_dtype, kernel)


def softmax_out_fake(
    x: torch.Tensor, out: torch.Tensor, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> None:
    launch.check_out(x, out, out_dtype)


SOFTMAX = register_op("softmax", softmax, fake=softmax_fake)
SOFTMAX_OUT = register_op("softmax_out", softmax_out, fake=softmax_out_fake, mutates=("out",))
