# SPDX-License-Identifier: Apache-2.0
"""What a layer gets in 8 or 4 bits from the one before it, and what makes a layer hand it on."""

from typing import NamedTuple

import torch
from torch import nn

from dsl_backend.gemm.activation import Activation
from dsl_backend.linear.scaled.eager import How
from dsl_backend.quant.format import ScaledFormat


class Handed(NamedTuple):
    """What a norm returns to a projection, or a linked one to its down projection: values [..., n] and their scales."""

    values: torch.Tensor
    scale: torch.Tensor


class Link(NamedTuple):
    """A gate and up projection's activation, and the layer that takes its quantised output; None is one in 16 bits."""

    activation: Activation
    interleaved: bool
    consumer: nn.Module | None


def how_of(link: Link | None, dtype: torch.dtype, kind: ScaledFormat, kernel: str | None) -> How:
    """All of a layer that is no tensor.

    Args:
        kind: the format of its input, and of that of the layer that takes its output: it has the same.
        kernel: the name of the kernel that is asked for; None is the best that serves.
    """
    if link is None:
        return How(dtype, kernel=kernel)
    to = None if link.consumer is None else kind
    return How(dtype, link.activation, link.interleaved, to, kernel=kernel)
