# SPDX-License-Identifier: Apache-2.0
"""Which of this folder's kernels serves a layer: one for all queries where it is batch-invariant, else two."""

from dsl_backend.attention.protocol import Kernel
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.attention.triton.batch_invariant import BatchInvariant
from dsl_backend.attention.triton.prefill import Prefill
from dsl_backend.attention.triton.split_kv import SplitKV
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def decode(spec: AttentionSpec, target: Target, workspace: Workspace) -> Kernel:
    """The kernel for short queries, and of absorbed MLA."""
    return (BatchInvariant if spec.batch_invariant else SplitKV)(spec, target, workspace)


def prefill(spec: AttentionSpec, target: Target, workspace: Workspace) -> Kernel:
    """The kernel for long queries."""
    return (BatchInvariant if spec.batch_invariant else Prefill)(spec, target, workspace)
