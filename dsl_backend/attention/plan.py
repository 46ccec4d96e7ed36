# SPDX-License-Identifier: Apache-2.0
"""What is decided once a step and shared by its layers: the kernels, which requests each of them serves, and scratch.

Nothing here reads a device value: a plan of an eager step and one captured in a CUDA graph are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsl_backend import checks
from dsl_backend.attention import dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.protocol import Kernel, Launch, Misaligned, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.log import warning_once
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# The kernels that take tensors at any address and stride; the kernels that serve all query lengths.
ANY_ALIGNMENT = ANY_LENGTH = "triton"


@dataclass(frozen=True)
class Part:
    """The part of a batch that one kernel serves: requests of min_seqlen_q to max_seqlen_q queries."""

    operation: Operation
    name: str
    kernel: Kernel
    min_seqlen_q: int
    max_seqlen_q: int
    launch: Launch


class Planner:
    """Makes the plans of one layer spec; keeps its kernels and their scratch from step to step.

    Args:
        kernel: a name from the dispatch table: only that kernel is considered. By default the best one for the spec.

    Raises:
        InvalidInput: an argument is of another type, or the dispatch table has no kernel of that name.
        Unsupported: no kernel serves the spec on the target.
    """

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, kernel: str | None = None) -> None:
        checks.instance("spec", spec, AttentionSpec)
        checks.instance("target", target, Target)
        checks.instance("workspace", workspace, Workspace)
        checks.kernel(kernel)
        self.spec, self.target, self.workspace, self.kernel = spec, target, workspace, kernel
        self._unaligned: Planner | None = None
        # Layouts of operands that `api.run` has checked against the spec.
        self.layouts: set[object] = set()

        # As the dispatch table titles them, such as `dense-decode sm90`.
        self.kernel_titles: dict[Operation, str] = {}

        def bind(operation: Operation, name: str | None = kernel) -> tuple[Operation, str, Kernel]:
            entry = dispatch.choose(operation, spec, target, name)
            build: Callable[..., Kernel] = entry.load()
            self.kernel_titles[operation] = entry.title
            return operation, entry.name, build(spec, target, workspace)

        self.short = bind(Operation.MLA_DECODE if spec.mla else Operation.DECODE)
        self.long = self.short if self.short[2].max_query_len_served() is None else bind(Operation.PREFILL)
        if spec.batch_invariant and self.long[1] != self.short[1]:
            # Two kinds of kernels add in different orders, and the length of a chunk would choose between them.
            self.short = self.long = bind(Operation.PREFILL, ANY_LENGTH)

    @property
    def short_limit(self) -> int | None:
        """The longest query of batches that one kernel serves; None: of all batches.

        Plans of such batches depend on the memory of the batch's tensors, `num_tokens` and `max_query_len` alone.
        """
        return self.short[2].max_query_len_served()

    @property
    def kernels(self) -> list[tuple[Operation, str, Kernel]]:
        """(operation, name, kernel) for short queries and for long ones; one entry where one kernel serves both."""
        return list(
            {id(kernel): (operation, name, kernel) for operation, name, kernel in (self.short, self.long)}.values()
        )

    def prepare(self, lse: bool = False, sinks: torch.dtype | None = None) -> None:
        """Compile what launches with or without LSE need, and with sinks of that dtype or without sinks."""
        for _, _, kernel in self.kernels:
            kernel.prepare(lse, sinks)

    def plan(self, batch: Batch) -> "AttentionPlan":
        limit = self.short_limit
        if limit is None or batch.max_query_len <= limit:
            return AttentionPlan(self.spec, batch, (self.part(self.short, batch, 0, batch.max_query_len),), self)
        long, first = self.long, limit + 1
        split = long[2].split_of(batch, first)
        if split is not None:
            long, first = (*long[:2], split[0]), split[1]
        elif batch.host_lengths is not None and not batch.host_lengths.has_queries_up_to(limit):
            first = 0
        parts = [self.part(long, batch, first, batch.max_query_len)]
        if first > 0:
            parts.append(self.part(self.short, batch, 0, first - 1))
        return AttentionPlan(self.spec, batch, tuple(parts), self)

    def for_unaligned(self, error: Misaligned) -> "Planner":
        """A planner of kernels that take any alignment, for tensors that the best kernel refused.

        Args:
            error: which tensor was refused, and why.

        Raises:
            Misaligned: the caller named the kernel, or it is the one that takes any alignment.
            Unsupported: the kernel that takes any alignment does not serve the spec.
        """
        if self.kernel is not None:
            raise error
        if self._unaligned is None:
            warning_once(f"{ANY_ALIGNMENT} serves attention of {self.spec} where tensors are not aligned: {error}")
            self._unaligned = Planner(self.spec, self.target, self.workspace, ANY_ALIGNMENT)
        return self._unaligned

    def part(self, by: tuple[Operation, str, Kernel], batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Part:
        return Part(*by, min_seqlen_q, max_seqlen_q, by[2].bind(batch, min_seqlen_q, max_seqlen_q))


@dataclass(frozen=True)
class AttentionPlan:
    """A step's attention for the layers of one spec: which kernel serves which requests."""

    spec: AttentionSpec
    batch: Batch
    parts: tuple[Part, ...]
    planner: Planner

    def launch(self, operands: Operands) -> None:
        try:
            for part in self.parts:
                part.launch(operands)
        except Misaligned as error:
            self.planner.for_unaligned(error).plan(self.batch).launch(operands)
