# SPDX-License-Identifier: Apache-2.0
"""The plan of a layer: its kernel and its workspace, chosen once and kept."""

from functools import cache

import torch

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear import dispatch
from dsl_backend.linear.kernel import Launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import CapturedFlags, CapturedWorkspace, Workspace, capturing


class LinearPlan:
    """A layer's kernel. Plans that share a workspace must run on one stream.

    Args:
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        InvalidInput, Unsupported: as dispatch.choose.
    """

    # Numbers of rows whose launches are kept; prompts bring ever new ones.
    MOST = 1 << 16

    def __init__(self, spec: LinearSpec, target: Target, workspace: Workspace, kernel: str | None = None) -> None:
        entry = dispatch.choose(spec, target, kernel)
        self.spec, self.target, self.workspace = spec, target, workspace
        self._bind = entry.load()
        self._launches: dict[int, Launch] = {}

    def run(self, operands: GemmOperands) -> None:
        """Writes operands.out; at least one row. The operands must be as the spec says: it is not checked here."""
        rows = operands.x.shape[0]
        launch = self._launches.get(rows)
        if launch is None:
            if len(self._launches) >= self.MOST:
                self._launches.clear()
            launch = self._launches[rows] = self._bind(self.spec, Rows(rows), self.target, self.workspace)
        launch(operands)


@cache
def captured_flags(device: torch.device) -> CapturedFlags:
    """The flags of all captured launches on a device."""
    return CapturedFlags(device)


@cache
def workspace_of(device: torch.device, stream: int) -> Workspace:
    """The workspace of all calls on a stream, as `current_stream` names it.

    Graphs that were captured on one stream share it: they must not be replayed at the same time.
    """
    flags = captured_flags(device)
    return Workspace(device, flags) if stream >= 0 else CapturedWorkspace(device, flags, -1 - stream)


@cache
def plan_of(spec: LinearSpec, target: Target, device: torch.device, stream: int, kernel: str | None) -> LinearPlan:
    """The plan of a problem; cached, since every call asks for it."""
    return LinearPlan(spec, target, workspace_of(device, stream), kernel)


# A negative number for each captured stream, by device and handle.
_captured: dict[tuple[torch.device, int], int] = {}


def current_stream(device: torch.device) -> int:
    """The stream's handle; a negative number of its own while it is captured; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return _captured.setdefault((device, handle), -1 - len(_captured)) if capturing(device) else handle
