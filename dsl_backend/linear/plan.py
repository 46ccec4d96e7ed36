# SPDX-License-Identifier: Apache-2.0
"""What is decided once for a layer and kept: the kernel, and its scratch."""

from functools import cache

import torch

from dsl_backend.linear import dispatch
from dsl_backend.linear.kernel import Launch, Operands, Workspace, capturing
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target

# In the place of a stream: all graphs of a device, which are replayed in some order and never side by side. They may be
# captured on a stream that nothing else runs on, as by vLLM 0.26's second model runner.
GRAPHS = -1


class LinearPlan:
    """A layer's kernel. Plans that share a workspace must run on one stream.

    Args:
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        InvalidInput, Unsupported: as dispatch.choose.
    """

    # Numbers of rows to remember; prompts bring ever new ones.
    MOST = 1 << 16

    def __init__(self, spec: LinearSpec, target: Target, workspace: Workspace, kernel: str | None = None) -> None:
        entry = dispatch.choose(spec, target, kernel)
        self.spec, self.target, self.workspace = spec, target, workspace
        self.kernel_name = entry.name
        self._bind = entry.load()
        self._launches: dict[int, Launch] = {}

    def run(self, operands: Operands) -> None:
        """Writes operands.out; at least one row. The operands are as the spec says, which nobody checks here."""
        rows = operands.x.shape[0]
        launch = self._launches.get(rows)
        if launch is None:
            if len(self._launches) >= self.MOST:
                self._launches.clear()
            launch = self._launches[rows] = self._bind(self.spec, rows, self.target, self.workspace)
        launch(operands)


@cache
def workspace_of(device: torch.device, stream: int) -> Workspace:
    """The scratch of all calls on a stream."""
    return Workspace(device, None if stream == GRAPHS else workspace_of(device, GRAPHS))


@cache
def plan_of(spec: LinearSpec, target: Target, device: torch.device, stream: int, kernel: str | None) -> LinearPlan:
    """The plan of a problem, made once, since every call asks."""
    return LinearPlan(spec, target, workspace_of(device, stream), kernel)


def current_stream(device: torch.device) -> int:
    """The stream's handle; GRAPHS while it is captured, 0 on a CPU."""
    if capturing(device):
        return GRAPHS
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
