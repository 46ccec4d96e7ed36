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
from dsl_backend.runtime.workspace import Workspace, workspace_of


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
def plan_of(spec: LinearSpec, target: Target, device: torch.device, stream: int, kernel: str | None) -> LinearPlan:
    """The plan of a problem; cached, since every call asks for it."""
    return LinearPlan(spec, target, workspace_of(device, stream), kernel)
