# SPDX-License-Identifier: Apache-2.0
"""What a plan and its kernels agree on: a launch's operands, the kernel's two calls."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Flags by which blocks of a launch share work out.
COUNTERS = 2


class Misaligned(InvalidInput):
    """A tensor lies in memory as this kernel cannot take it, and another one may. Nothing was launched."""


class Operands(NamedTuple):
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


Launch = Callable[[Operands], None]


class Writes:
    """A kernel that stores keys and values in the pages of layers of one spec; `api.write_kv` has the arguments."""

    def __init__(self, spec: AttentionSpec, target: Target) -> None:
        self.spec, self.target = spec, target

    def prepare(self) -> None:
        """Compile now what calls need; it is asked for before the first one.

        What compiles at its first call alone has nothing to do here.
        """

    def objections(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> list[str]:
        """Why it does not take tensors that lie so in memory: by their strides and the lowest bits of addresses."""
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
        """Store rows at their slots, of which there is one at least. Scales mean something for fp8 alone."""
        raise NotImplementedError


class Kernel(Protocol):
    """A kernel bound to a layer's spec: it serves the requests whose query length lies in a range."""

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace) -> None: ...

    def max_query_len_served(self) -> int | None:
        """The longest query that the kernel is meant for; None where it has no limit."""
        ...

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        """Compile now what launches need that ask for lse or not, and have sinks of a dtype or none.

        What compiles at its first launch alone has nothing to do here.
        """
        ...

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> "Launch":
        """What attends for the requests of `shortest` to `longest` queries and leaves other requests' rows alone.

        All that a step's layers share is worked out here: in steps without a graph, what a launch costs on the host
        is paid for every layer.
        """
        ...
