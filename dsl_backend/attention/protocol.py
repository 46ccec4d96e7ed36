# SPDX-License-Identifier: Apache-2.0
"""The interface between plans and kernels: the operands of a launch, and the methods of a kernel."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# int32 counters by which the CTAs of a launch divide work; zero between launches.
COUNTERS = 2


class Misaligned(InvalidInput):
    """This kernel cannot take a tensor's alignment or strides; another one may. Nothing was launched."""


class Operands(NamedTuple):
    """The tensors of one layer's attention; `api.run` has their shapes. q_rope: absorbed MLA with q in two parts."""

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
    q_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    out_block_scale: torch.Tensor | None = None


Launch = Callable[[Operands], None]


class Writes:
    """A kernel that stores keys and values in the pages of layers of one spec. `api.write_kv` has the arguments."""

    def __init__(self, spec: AttentionSpec, target: Target) -> None:
        self.spec, self.target = spec, target

    def prepare(self) -> None:
        """Compile what calls need; called before the first of them.

        A kernel that compiles at its first call does nothing here.
        """

    def objections(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> list[str]:
        """Why it does not take these tensors, judged by strides and by the lowest bits of addresses."""
        return []

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        """Store rows at their slots; there is at least one slot. Only fp8 caches use the scales."""
        raise NotImplementedError


class Kernel(Protocol):
    """A kernel bound to a layer's spec. It serves the requests whose query lengths lie in a range."""

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace) -> None: ...

    def max_query_len_served(self) -> int | None:
        """The longest query that the kernel is meant for; None: no limit."""
        ...

    def split_of(self, batch: Batch, min_seqlen_q: int) -> "tuple[Kernel, int] | None":
        """The kernel that serves a batch's long queries, where that is not this one or where it serves short ones too.

        Args:
            min_seqlen_q: fewest queries of a request that the kernel for long queries serves.

        Returns:
            (kernel, fewest queries of a request that it is to serve); None where this kernel serves the long ones.
        """
        return None

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        """Compile what launches with or without LSE need, and with sinks of that dtype or without sinks.

        A kernel that compiles at its first launch does nothing here.
        """
        ...

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> "Launch":
        """The launch that serves requests of min_seqlen_q to max_seqlen_q queries and writes no other request's rows.

        All that the layers of a step have in common is computed here: a step without a CUDA graph pays the host time
        of a launch for every layer. Steps whose tensors are in the same memory share a launch, whatever their longest
        context is: `batch.max_seq_len` must not be read.
        """
        ...
