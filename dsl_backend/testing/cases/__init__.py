# SPDX-License-Identifier: Apache-2.0
"""Attention cases with the reason for each. Lists, not products: each case tests something that no other case
does.

Tiers: `smoke` runs at every change, `full` adds cases that repeat a feature at other sizes, `gpu` has real sizes.
"""

from dsl_backend.testing.cases.absorbed_mla import LATENT
from dsl_backend.testing.cases.batches import LENGTHS, SURROUNDINGS
from dsl_backend.testing.cases.case import BF16, FP8, FP16, FULL, Case, mla
from dsl_backend.testing.cases.layers import DTYPES, HEAD_DIMS, HEADS, NVFP4_OUTPUTS, PACKED, PAGES
from dsl_backend.testing.cases.nvfp4 import NVFP4
from dsl_backend.testing.cases.real_sizes import GPU
from dsl_backend.testing.cases.scores import COMBINATIONS, MASKS, SCORES, WINDOWS
from dsl_backend.testing.cases.splits import SPLITS

__all__ = ["BF16", "CASES", "COMBINATIONS", "DTYPES", "FP8", "FP16", "FULL", "SCORES", "Case", "by_id", "mla"]

CASES: tuple[Case, ...] = (
    *(*HEADS, *DTYPES, *NVFP4_OUTPUTS, *HEAD_DIMS, *PAGES, *LENGTHS, *MASKS, *SCORES, *COMBINATIONS),
    *(*PACKED, *LATENT, *SURROUNDINGS, *WINDOWS, *SPLITS, *NVFP4, *GPU),
)


def by_id(name: str) -> Case:
    """The case of that id."""
    return next(case for case in CASES if case.id == name)
