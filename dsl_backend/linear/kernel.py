# SPDX-License-Identifier: Apache-2.0
"""What a plan and its kernels agree on: a launch's operands, and the scratch that launches share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target


@dataclass(frozen=True)
class Operands:
    """The tensors of one call; `api.linear` has their shapes. There is at least one row."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor


class Workspace:
    """Scratch of kernels that share a tile between blocks: partial sums, and flags that say whose are there.

    Kernels leave every flag at 0. Buffers only ever grow, and one that was outgrown stays allocated: a captured graph
    may point to it. Launches that share a workspace must be ordered on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[torch.Tensor] = []
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._flags = torch.zeros(0, dtype=torch.int32, device=device)

    def partials(self, count: int) -> torch.Tensor:
        """[at least count] float32, contents undefined."""
        if self._partials.numel() < count:
            self._buffers.append(self._partials)
            self._partials = torch.empty(count, dtype=torch.float32, device=self.device)
        return self._partials

    def flags(self, count: int) -> torch.Tensor:
        """[at least count] int32, all 0 when a launch begins and when it ends."""
        if self._flags.numel() < count:
            self._buffers.append(self._flags)
            self._flags = torch.zeros(count, dtype=torch.int32, device=self.device)
        return self._flags


Run = Callable[[Operands, LinearSpec, Target, Workspace], None]
