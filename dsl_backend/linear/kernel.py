# SPDX-License-Identifier: Apache-2.0
"""What a plan and its kernels agree on: a launch's operands, and the scratch that launches share."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target


class Operands(NamedTuple):
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

    Args:
        graphs: the scratch of launches that are captured, which grows with this one: what is zeroed while a graph is
            captured is zeroed when that graph is replayed, and not for the others.
    """

    def __init__(self, device: torch.device, graphs: "Workspace | None" = None) -> None:
        self.device, self.graphs = device, graphs
        self._buffers: list[torch.Tensor] = []
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._flags = torch.zeros(0, dtype=torch.int32, device=device)

    def partials(self, count: int) -> torch.Tensor:
        """[at least count] float32, contents undefined."""
        if self._partials.numel() < count:
            self._buffers.append(self._partials)
            self._partials = torch.empty(count, dtype=torch.float32, device=self.device)
            if self.graphs is not None:
                self.graphs.partials(count)
        return self._partials

    def flags(self, count: int) -> torch.Tensor:
        """[at least count] int32, all 0 when a launch begins and when it ends.

        Raises:
            InvalidInput: a graph is being captured, and there are not so many yet.
        """
        if self._flags.numel() < count:
            if capturing(self.device):
                raise InvalidInput("a layer is captured in a graph before its first run: run it once with as many rows")
            self._buffers.append(self._flags)
            self._flags = torch.zeros(count, dtype=torch.int32, device=self.device)
            if self.graphs is not None:
                self.graphs.flags(count)
        return self._flags


def capturing(device: torch.device) -> bool:
    """Whether launches on the device's current stream go into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Writes operands.out; as many rows as it was bound for.
Launch = Callable[[Operands], None]
# What a kernel is: bound once for a problem and a number of rows, at least one.
Bind = Callable[[LinearSpec, int, Target, Workspace], Launch]
