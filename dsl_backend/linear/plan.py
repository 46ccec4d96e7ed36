# SPDX-License-Identifier: Apache-2.0
"""The plan of a layer: its kernel and its workspace, chosen once and kept."""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch

from dsl_backend.gemm.spec import GemmSpec, Rows
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear import dispatch
from dsl_backend.linear.scaled import dispatch as scaled_dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.weight_only import dispatch as weight_only_dispatch
from dsl_backend.runtime.dispatch import Entry
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace, workspace_of


class HasRows(Protocol):
    """Operands of a layer: a tuple with x [rows, k]."""

    @property
    def x(self) -> torch.Tensor: ...


Operands = TypeVar("Operands", bound=HasRows, contravariant=True)


class LinearPlan(Generic[Operands]):
    """A layer's kernel. Plans that share a workspace must run on one stream.

    Args:
        entry: of the dispatch table, without objections to the spec.
    """

    # Numbers of rows whose launches are kept; prompts bring ever new ones.
    MOST = 1 << 16

    def __init__(
        self, entry: Entry[Any], spec: GemmSpec | WeightOnlyGemmSpec, target: Target, workspace: Workspace
    ) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self._bind = entry.load()
        self._launches: dict[int, Callable[[Operands], None]] = {}

    def run(self, operands: Operands) -> None:
        """Writes operands.out; at least one row. The operands must be as the spec says: it is not checked here."""
        rows = operands.x.shape[0]
        launch = self._launches.get(rows)
        if launch is None:
            if len(self._launches) >= self.MOST:
                self._launches.clear()
            launch = self._launches[rows] = self._bind(self.spec, Rows(rows), self.target, self.workspace)
        launch(operands)


@cache
def plan_of(
    spec: LinearSpec | ScaledLinearSpec | WeightOnlyGemmSpec,
    target: Target,
    device: torch.device,
    stream: int,
    kernel: str | None,
) -> LinearPlan[Any]:
    """The plan of a problem; cached, since every call asks for it.

    Args:
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        InvalidInput, Unsupported: as dispatch.choose.
    """
    entry: Entry[Any]
    if isinstance(spec, ScaledLinearSpec):
        entry = scaled_dispatch.choose(spec, target, kernel)
    elif isinstance(spec, WeightOnlyGemmSpec):
        entry = weight_only_dispatch.choose(spec, target, kernel)
    else:
        entry = dispatch.choose(spec, target, kernel)
    return LinearPlan(entry, spec, target, workspace_of(device, stream))
