# SPDX-License-Identifier: Apache-2.0
"""The measured errors of kernels over e4m3 caches: the exact result and the cache are those of the model's inputs."""

import pytest
import torch

from benchmarks.attention.fp8_accuracy import INPUTS
from benchmarks.attention.fp8_errors import QUERIES, Stored, cell, ours


@pytest.mark.parametrize("name", ["random, 4k keys", "channels 30x, 4k keys"])
def test_the_reference_is_exact_but_for_its_output(name: str) -> None:
    given = Stored.of(INPUTS[name](torch.Generator().manual_seed(0), QUERIES), torch.device("cpu"))
    total, row = (float(part) for part in cell(ours("reference"), given).rstrip(")").split(" ("))
    assert 0.1 < total < 0.2
    assert total < row < 0.4


def test_why_a_kernel_has_no_error_is_said() -> None:
    given = Stored.of(INPUTS["random, 4k keys"](torch.Generator().manual_seed(0), QUERIES), torch.device("cpu"))
    assert cell(ours("cute-fp8"), given).startswith("Unsupported: ")
