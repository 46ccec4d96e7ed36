# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to the SM90 kernel of absorbed MLA."""

import torch
from cutlass import cute

from dsl_backend.attention.kernel import Operands
from dsl_backend.attention.parts.launch import (
    LayerKernel,
    check_alignment,
    fake_args,
    fake_pages,
    fake_rows,
)
from dsl_backend.attention.parts.sizes import packed_heads
from dsl_backend.attention.parts.tiles import NUMERIC
from dsl_backend.attention.sm90.configs import ROWS
from dsl_backend.attention.sm90.latent import LatentForward, LatentKey
from dsl_backend.attention.sm90.latent_configs import default_latent_config
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: LatentKey, target: Target) -> Function:
    numeric = NUMERIC[key.dtype]
    rows = (
        fake_rows(numeric, key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(numeric, key.head_dim - key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(numeric, key.head_dim, key.heads_kv, *fake_pages(key)),
    )
    return compile_kernel(LatentForward(key), fake_args(key, *rows), key=key, target=target)


class Latent(LayerKernel):
    """Absorbed MLA, row tile by row tile; see latent.py."""

    build = staticmethod(build)
    key_type = LatentKey
    default = staticmethod(default_latent_config)

    def sizes(self) -> tuple[int, int, int]:
        blocks = self.target.sm_count // self.config.cluster * self.config.cluster
        return blocks, packed_heads(self.spec.group), ROWS

    def longest_query(self) -> int | None:
        return None

    def tensors(self, operands: Operands) -> tuple[torch.Tensor, ...]:
        latent, q, q_rope = self.spec.head_dim_v, operands.q, operands.q_rope
        if q_rope is None:
            q, q_rope = q[..., :latent], q[..., latent:]
        check_alignment(q=q, q_rope=q_rope, keys=operands.keys)
        return q, q_rope, operands.keys


class LatentSplitKV(Latent):
    """The same where key ranges are cut into equal shares."""

    split = True
