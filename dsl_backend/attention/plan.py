# SPDX-License-Identifier: Apache-2.0
"""What is decided once a step and shared by the layers: the kernels, the requests each serves, and their scratch.

Nothing here reads a device value, so that a plan made for an eager step and one captured in a CUDA graph are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dsl_backend.attention import dispatch, reference
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime.target import Target


@dataclass(frozen=True)
class Operands:
    """The tensors of one layer's attention; `api.run` has their shapes. Absorbed MLA may hold q in two parts."""

    q: torch.Tensor
    q_rope: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class Workspace:
    """Scratch that outlives steps: partial results of split key ranges, and what to merge of them.

    Buffers only ever grow, and a buffer that was outgrown stays allocated: a captured graph may point to it. Launches
    that share a workspace must be ordered on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[torch.Tensor] = []
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._integers = torch.empty(0, dtype=torch.int32, device=device)

    def partials(self, count: int) -> torch.Tensor:
        """[at least count] float32, contents undefined."""
        if self._partials.numel() < count:
            self._buffers.append(self._partials)
            self._partials = torch.empty(count, dtype=torch.float32, device=self.device)
        return self._partials

    def integers(self, count: int) -> torch.Tensor:
        """[at least count] int32, contents undefined."""
        if self._integers.numel() < count:
            self._buffers.append(self._integers)
            self._integers = torch.empty(count, dtype=torch.int32, device=self.device)
        return self._integers


class Kernel(Protocol):
    """A kernel bound to a layer's spec: it serves the requests whose query length lies in a range."""

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace) -> None: ...

    def longest_query(self) -> int | None:
        """The longest query that the kernel is meant for; None where it has no limit."""
        ...

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        """Attend for the requests of `shortest` to `longest` queries; leaves other requests' rows alone."""
        ...


class ReferenceKernel:
    """The eager reference behind the kernels' interface."""

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace) -> None:
        self.spec = spec

    def longest_query(self) -> int | None:
        return None

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        assert shortest <= 1, f"{shortest=}: the reference serves every request of a batch"
        assert longest >= batch.max_query_len, f"{longest=}: the reference serves every request of a batch"
        q = operands.q if operands.q_rope is None else torch.cat([operands.q, operands.q_rope], dim=-1)
        compute = torch.float64 if self.spec.dtype == torch.float64 else torch.float32
        out, lse = reference.attention(
            self.spec,
            batch,
            q,
            operands.keys,
            operands.values,
            sinks=operands.sinks,
            alibi_slopes=operands.alibi_slopes,
            k_scale=operands.k_scale,
            v_scale=operands.v_scale,
            compute_dtype=compute,
        )
        operands.out.copy_(out)
        if operands.lse is not None:
            operands.lse.copy_(lse)


@dataclass(frozen=True)
class Share:
    """The part of a batch that one kernel serves."""

    operation: Operation
    name: str
    kernel: Kernel
    shortest: int
    longest: int


class Planner:
    """Makes the plans of one layer spec; keeps its kernels and their scratch from step to step.

    Args:
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        Unsupported: no kernel serves the spec on the target.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target,
        workspace: Workspace,
        kernel: str | None = None,
    ) -> None:
        self.spec, self.target = spec, target

        def bind(operation: Operation) -> tuple[Operation, str, Kernel]:
            entry = dispatch.choose(operation, spec, target, kernel)
            build: Callable[..., Kernel] = entry.load()
            return operation, entry.name, build(spec, target, workspace)

        self.short = bind(Operation.MLA_DECODE if spec.latent else Operation.DECODE)
        self.long = self.short if self.short[2].longest_query() is None else bind(Operation.PREFILL)

    @property
    def kernel_names(self) -> dict[str, str]:
        """Operation -> name of the kernel that serves it."""
        return {operation.value: name for operation, name, _ in (self.long, self.short)}

    def plan(self, batch: Batch) -> "AttentionPlan":
        limit = self.short[2].longest_query()
        if limit is None or batch.max_query_len <= limit:
            return AttentionPlan(self.spec, batch, (Share(*self.short, 0, batch.max_query_len),))
        shares = (Share(*self.long, limit + 1, batch.max_query_len), Share(*self.short, 0, limit))
        return AttentionPlan(self.spec, batch, shares)


@dataclass(frozen=True)
class AttentionPlan:
    """A step's attention for the layers of one spec: which kernel serves which requests."""

    spec: AttentionSpec
    batch: Batch
    shares: tuple[Share, ...]

    def launch(self, operands: Operands) -> None:
        for share in self.shares:
            share.kernel.launch(self.batch, operands, share.shortest, share.longest)
