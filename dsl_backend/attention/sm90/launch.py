# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels of dense attention for one layer spec."""

from typing import Any

import torch

from dsl_backend.attention.kernel import Launch, Workspace
from dsl_backend.attention.parts.launch import DenseKernel, fake_args, rows_of
from dsl_backend.attention.sm90.configs import LONG_QUERY, default_config, default_split_config, long_query_config
from dsl_backend.attention.sm90.forward import Forward, ForwardKey
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: ForwardKey, target: Target) -> Function:
    """The compiled function: (q, keys, values, *what LayerKernel.bind adds)."""
    return compile_kernel(Forward(key), fake_args(key, *rows_of(key)), key=key, target=target)


class Dense(DenseKernel):
    """See forward.py."""

    build = staticmethod(build)
    key_type = ForwardKey


class Prefill(Dense):
    """Attention of long queries.

    Attributes:
        longer: serves batches with a query of LONG_QUERY tokens or more; None where this kernel does.
    """

    default = staticmethod(default_config)

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        super().__init__(spec, target, workspace, config)
        self.longer: Prefill | None = None
        # A configuration that was asked for, or measured to be the best, is for all.
        if config is None and self.config == default_config(spec):
            tiles = long_query_config(spec)
            self.longer = None if tiles is None else Prefill(spec, target, workspace, tiles)

    def keys(self, lse: bool, sinks: torch.dtype | None) -> list[Any]:
        return super().keys(lse, sinks) + ([] if self.longer is None else self.longer.keys(lse, sinks))

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        super().prepare(lse, sinks)
        if self.longer is not None:
            self.longer.prepare(lse, sinks)

    def bind(self, batch: Batch, shortest: int, longest: int) -> Launch:
        if self.longer is not None and min(longest, batch.max_query_len) >= LONG_QUERY:
            return self.longer.bind(batch, shortest, longest)
        return super().bind(batch, shortest, longest)


class SplitKV(Dense):
    """Attention of short queries, whose key ranges are cut into equal shares."""

    default = staticmethod(default_split_config)
    split = True
