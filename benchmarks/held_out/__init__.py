# SPDX-License-Identifier: Apache-2.0
"""Rows that nothing is tuned for: `dsl-backend bench --held-out`.

The group `lost` has the rows in which a peer was faster once; the group `random` is drawn from a seed. Another seed
gives a new list: rows of the default one were used to choose configurations, once they had been measured.
`compile_ahead` compiles the kernels of all rows and peers in parallel. `summary` prints what is slower than the best
peer first.
"""

from typing import Any

from ..case import Case, case_of
from . import lost_rows, random_rows

# Operator -> the peers that run by default. They are those that were the fastest in some row, and the MLA of FlashInfer
# and FA4 for other GPUs than SM90, which was not timed yet and costs a line there (2026-11-27). The others compile for
# minutes for each shape (torch.compile), or for seconds and were the fastest in no row (TRITON_ATTN, TRITON_MLA).
# FLASHINFER_MLA was not timed yet either. nvcc compiles it for minutes, and a campaign has 130 to 240 s for such rows:
# its step `held-out-flashinfer` names it.
PEERS = {
    "mla-decode": ("FLASH_ATTN_MLA", "FLASHMLA", "FlashInfer CuTe DSL", "trtllm-gen", "XQA", "FA4"),
    "prefill": ("FA3", "cuDNN"),
    "linear": ("cuBLAS + silu_and_mul", "quack"),
    "scaled-linear": ("vLLM CUTLASS", "DeepGEMM", "torch._scaled_mm"),
    "softmax": ("quack", "torch"),
    "sampling": ("FlashInfer", "vLLM"),
    "norm": ("quack", "vLLM", "FlashInfer"),
}


def cases(operator: str, page_size: int, seed: int = random_rows.SEED) -> list[Case[Any]]:
    """The rows of an operator, the lost ones first; none if it has none.

    Args:
        seed: of the random rows. With another one than the default, lost rows are left out.
    """
    lost = lost_rows.problems(operator, page_size) if seed == random_rows.SEED else ()
    return [
        *(case_of(name, problem, "lost") for name, problem in lost),
        *(case_of(name, problem, "random") for name, problem in random_rows.problems(operator, page_size, seed)),
    ]
