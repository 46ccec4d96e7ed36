# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the float64 oracle: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from dsl_backend.runtime.target import triton_interpreted
from dsl_backend.testing import check
from dsl_backend.testing.cases import CASES, Case

MARKS = {"smoke": (), "full": (pytest.mark.full,), "gpu": (pytest.mark.gpu,)}

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=MARKS[case.tier]) for case in CASES])
def test_case(case: Case, device: torch.device) -> None:
    check.check_case(case, "triton", device)
