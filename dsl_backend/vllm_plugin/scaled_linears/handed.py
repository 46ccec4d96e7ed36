# SPDX-License-Identifier: Apache-2.0
"""What a layer gets in 8 bits from the one before it."""

from typing import NamedTuple

import torch


class Handed(NamedTuple):
    """What a norm returns to a projection, or a linked one to its down projection: values [..., n] and their scales."""

    values: torch.Tensor
    scale: torch.Tensor
