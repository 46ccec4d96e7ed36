# SPDX-License-Identifier: Apache-2.0
"""What is decided once for a sampler and kept from step to step: the kernel, its scratch, and room for the results."""

from typing import Protocol

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec, buffers


class Kernel(Protocol):
    """A sampler for up to max_rows rows; owns the scratch that it needs for them."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None: ...

    def launch(self, logits: torch.Tensor, rows: Parameters, out: Sampled) -> None:
        """Sample at least one row; logits [rows, vocab] with rows of any stride."""
        ...


class SamplingPlan:
    """A sampler bound to a device. Steps that share it must be ordered on one stream.

    Args:
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        InvalidInput, Unsupported: as dispatch.choose.
    """

    def __init__(
        self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device, kernel: str | None = None
    ) -> None:
        entry = dispatch.choose(dispatch.Operation.SAMPLE, spec, target, kernel)
        self.spec, self.max_rows, self.device = spec, max_rows, device
        self.kernel_title = entry.title
        self.kernel: Kernel = entry.load()(spec, target, max_rows, device)
        self.results = buffers(spec, max_rows, device)
