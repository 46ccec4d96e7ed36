# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to the SM90 kernel of absorbed MLA."""

from dataclasses import fields
from functools import cache
from typing import Any

import torch

from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.sm90.configs import ROWS, packed_heads
from dsl_backend.attention.sm90.latent import LatentForward, LatentKey
from dsl_backend.attention.sm90.latent_configs import LatentConfig, default_latent_config
from dsl_backend.attention.sm90.launch import MERGE_FIELDS, check_alignment, fake_args, key_of, window
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dataclasses import replace


@cache
def function_of(key: LatentKey, fk, target: Target, libraries: str) -> Function:
    rope = replace(fk, head_dim=key.head_dim - key.head_dim_v, heads_kv=1)
    latent = replace(fk, head_dim=key.head_dim_v, heads_kv=1)
    args = fake_args(fk)
    return compile_kernel(
        LatentForward(key), (fake_args(latent)[0], fake_args(rope)[0], args[1], *args[3:]), key=key, target=target
    )


class Latent:
    split = False

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: LatentConfig | None = None):
        self.spec, self.target, self.workspace = spec, target, workspace
        self.config = config or default_latent_config(spec)
        self.blocks = target.sm_count

    def longest_query(self):
        return None

    def scratch(self):
        return None, None

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        spec = self.spec
        latent = spec.head_dim_v
        q, rope = operands.q, operands.q_rope
        if rope is None:
            q, rope = q[..., :latent], q[..., latent:]
        check_alignment(q=q, q_rope=rope, keys=operands.keys)
        sinks = None if operands.sinks is None else operands.sinks.dtype
        fk = key_of(spec, self.config, split=self.split, lse=operands.lse is not None, sinks=sinks)
        fk = replace(fk, pack=packed_heads(spec.heads_q))
        key = LatentKey(**{f.name: getattr(fk, f.name) for f in fields(fk) if f.name != "heads_kv"})
        causal = None if spec.causality is not Causality.PER_REQUEST else batch.causal
        function_of(key, fk, self.target, toolkit.libraries())(
            q, rope, operands.keys, operands.out, operands.lse,
            batch.query_start_loc, batch.seq_lens, batch.block_table, batch.kv_start_loc,
            None if causal is None else causal.view(torch.uint8),
            operands.sinks, operands.alibi_slopes,
            *self.scratch(),
            spec.scale, spec.softcap, window(spec.window_left), window(spec.window_right),
            max(1, shortest), longest, self.blocks,
            min(ROWS, min(longest, batch.max_query_len) * key.pack),
        )


class LatentSplitKV(Latent):
    split = True

    def scratch(self):
        partials = self.workspace.partials(2 * self.blocks * ROWS * (self.spec.head_dim_v + 2))
        merges = self.workspace.integers(self.blocks * MERGE_FIELDS)
        return partials, merges[: self.blocks * MERGE_FIELDS].view(self.blocks, MERGE_FIELDS)
