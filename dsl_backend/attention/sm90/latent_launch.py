# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to the SM90 kernel of absorbed MLA."""

from functools import cache

import torch
from cutlass import cute

from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.parts.launch import (
    check_alignment,
    facts_of,
    fake_args,
    fake_pages,
    fake_rows,
    shared_args,
    split_scratch,
)
from dsl_backend.attention.parts.sizes import packed_heads
from dsl_backend.attention.sm90.configs import ROWS
from dsl_backend.attention.sm90.latent import LatentForward, LatentKey
from dsl_backend.attention.sm90.latent_configs import LatentConfig, default_latent_config
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: LatentKey, target: Target) -> Function:
    rows = (
        fake_rows(key, key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(key, key.head_dim - key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(key, key.head_dim, key.heads_kv, *fake_pages(key)),
    )
    return compile_kernel(LatentForward(key), fake_args(key, *rows), key=key, target=target)


@cache
def function_of(key: LatentKey, target: Target, libraries: str) -> Function:
    """The function of a key, kept by what host code is linked with."""
    return build(key, target)


class Latent:
    """Absorbed MLA for one layer spec, row tile by row tile; see latent.py."""

    split = False

    def __init__(
        self, spec: AttentionSpec, target: Target, workspace: Workspace, config: LatentConfig | None = None
    ) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self.config = config or default_latent_config(spec)
        self.blocks = target.sm_count // self.config.cluster * self.config.cluster
        self.pack = packed_heads(spec.group)

    def longest_query(self) -> int | None:
        return None

    def scratch(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Partial results, and what the merge kernel must do with them."""
        return None, None

    def key(self, operands: Operands) -> LatentKey:
        return LatentKey(config=self.config, **facts_of(self.spec, operands, pack=self.pack, split=self.split))

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        latent, q, q_rope = self.spec.head_dim_v, operands.q, operands.q_rope
        if q_rope is None:
            q, q_rope = q[..., :latent], q[..., latent:]
        check_alignment(q=q, q_rope=q_rope, keys=operands.keys)
        function_of(self.key(operands), self.target, toolkit.libraries())(
            q,
            q_rope,
            operands.keys,
            *shared_args(self.spec, batch, operands, self.scratch(), shortest, longest),
            self.blocks,
            min(ROWS, min(longest, batch.max_query_len) * self.pack),
        )


class LatentSplitKV(Latent):
    """The same where key ranges are cut into equal shares."""

    split = True

    def scratch(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return split_scratch(self.workspace, self.blocks, ROWS, self.spec.head_dim_v)
