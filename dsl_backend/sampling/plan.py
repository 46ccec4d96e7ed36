# SPDX-License-Identifier: Apache-2.0
"""A plan holds what steps share: the kernel, its workspace, and the buffers of the results."""

from functools import cache
from typing import Protocol

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec, buffers


class Kernel(Protocol):
    """A sampler of up to max_rows rows. It owns its workspace.

    Attributes:
        returns_kept: whether it writes `Sampled.kept`.
    """

    returns_kept: bool

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None: ...

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        """Sample at least one row. logits: [rows, vocab] at any row stride."""
        ...


class SamplingPlan:
    """A sampler on a device. Steps that use the same plan must be ordered on one stream.

    Args:
        kernel: a name from the dispatch table; no other kernel is used. By default the best that serves the spec.

    Raises:
        InvalidInput, Unsupported: as `dispatch.choose`.
    """

    def __init__(
        self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device, kernel: str | None = None
    ) -> None:
        entry = dispatch.choose(spec, target, kernel)
        self.spec, self.max_rows, self.device = spec, max_rows, device
        self.kernel_title = entry.title
        self.kernel: Kernel = entry.load()(spec, target, max_rows, device)
        self.results = buffers(spec, max_rows, device)
        if not self.kernel.returns_kept:
            self.results = self.results._replace(kept=None)
        # A view takes the host as long as several functions, and all of them are of the same buffers.
        self.outputs = cache(self._outputs)

    def _outputs(self, rows: int, num_logprobs: int, kept: bool) -> Sampled:
        """Views of the first rows' results, with so many of the likeliest tokens; made once for each step's kind."""
        out = self.results.rows(rows).likeliest(num_logprobs)
        return out if kept else out._replace(kept=None)
