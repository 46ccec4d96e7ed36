# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to the SM100 kernels."""

from functools import cache

from cutlass import cute

from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.sm90.launch import check_alignment, facts_of, fake_args, fake_pages, fake_rows, shared_args
from dsl_backend.attention.sm100.configs import ForwardConfig, default_config
from dsl_backend.attention.sm100.forward import Forward, ForwardKey
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: ForwardKey, target: Target) -> Function:
    """The compiled function: (q, keys, values, *shared_args, blocks, rows)."""
    lead = fake_pages(key)
    rows = (
        fake_rows(key, key.head_dim, key.heads_q, cute.sym_int()),
        fake_rows(key, key.head_dim, key.heads_kv, *lead),
        fake_rows(key, key.head_dim_v, key.heads_kv, *lead),
    )
    return compile_kernel(Forward(key), fake_args(key, *rows), key=key, target=target)


@cache
def function_of(key: ForwardKey, target: Target, libraries: str) -> Function:
    """The function of a key, kept by what host code is linked with."""
    return build(key, target)


class Prefill:
    """Attention of long queries for one layer spec; see forward.py."""

    def __init__(
        self, spec: AttentionSpec, target: Target, workspace: Workspace, config: ForwardConfig | None = None
    ) -> None:
        self.spec, self.target = spec, target
        self.config = config or default_config(spec)

    def longest_query(self) -> int | None:
        return None

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        check_alignment(q=operands.q, keys=operands.keys, values=operands.values, out=operands.out)
        key = ForwardKey(config=self.config, **facts_of(self.spec, operands, pack=1, split=False))
        function_of(key, self.target, toolkit.libraries())(
            operands.q,
            operands.keys,
            operands.values,
            *shared_args(self.spec, batch, operands, (None, None), shortest, longest),
            self.target.sm_count,
            0,
        )
