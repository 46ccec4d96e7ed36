# SPDX-License-Identifier: Apache-2.0
"""The plan of a layer: its kernel and its workspace, chosen once and kept."""

import torch

from dsl_backend.experts import dispatch
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.kernel import Launch
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


class ExpertsPlan:
    """A layer's kernel. Plans that share a workspace must run on one stream.

    Attributes:
        title: of the kernel, as the dispatch table has it.
        alignment: bytes that rows of x and out start at multiples of; weight_alignment: those of weights.
        adds: grouped GEMMs add up a token's experts by atomic operations. What else serves the plan keeps their order:
            kernels for few tokens, which `cute` takes by itself, and all kernels where this is false.
        layouts: of operands that were checked.

    Args:
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        InvalidInput, Unsupported: as dispatch.choose.
    """

    def __init__(self, spec: ExpertsSpec, target: Target, workspace: Workspace, kernel: str | None = None) -> None:
        entry = dispatch.choose(spec, target, kernel)
        self.spec, self.target, self.workspace = spec, target, workspace
        self.title, self.alignment = entry.title, dispatch.ALIGNMENT.get(entry.name, 1)
        self.weight_alignment = dispatch.weight_alignment(entry.name, spec)
        self.adds = spec.may_add and entry.name in dispatch.ADDING
        self.layouts: set[object] = set()
        self._launch: Launch = entry.load()(spec, target, workspace)

    @property
    def device(self) -> torch.device:
        return self.workspace.device

    def run(self, operands: ExpertsOperands) -> None:
        """Writes operands.out; at least one token. The operands must be as the spec says: it is not checked here."""
        self._launch(operands)
