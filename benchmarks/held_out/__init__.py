# SPDX-License-Identifier: Apache-2.0
"""Rows that nothing is tuned for: `dsl-backend bench --held-out`.

The group `lost` has the rows in which a peer was faster once; the group `random` was drawn from a seed. `compile_ahead`
compiles the kernels of all rows and peers in parallel. `summary` prints what is slower than the best peer first.
"""

from typing import Any

from ..case import Case, case_of
from . import lost_rows, random_rows

GROUPS = {"lost": lost_rows.problems, "random": random_rows.problems}
# Operator -> the peers that run by default. They are those that were the fastest in some row. The others compile for
# minutes for each shape (torch.compile), or for seconds and were the fastest in no row (TRITON_ATTN, TRITON_MLA).
PEERS = {
    "mla-decode": ("FLASH_ATTN_MLA", "FLASHMLA"),
    "prefill": ("FA3", "cuDNN"),
    "linear": ("cuBLAS + silu_and_mul", "quack"),
    "softmax": ("quack", "torch"),
    "sampling": ("FlashInfer", "vLLM"),
    "norm": ("quack", "vLLM", "FlashInfer"),
}


def cases(operator: str, page_size: int) -> list[Case[Any]]:
    """The rows of an operator, the lost ones first; none if it has none."""
    return [
        case_of(name, problem, group)
        for group, problems in GROUPS.items()
        for name, problem in problems(operator, page_size)
    ]
