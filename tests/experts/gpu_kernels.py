# SPDX-License-Identifier: Apache-2.0
"""Parameters of the tests that run the same problems on a CPU and on a GPU."""

from typing import Any

import pytest
import torch

from dsl_backend.runtime import target as targets

REFERENCE = pytest.param(
    "reference", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the reference is for CPUs")
)


def on_gpu(*kernels: str) -> list[Any]:
    """Kernels, by their names in the dispatch table, for tests that need a GPU."""
    return [pytest.param(name, marks=pytest.mark.gpu) for name in kernels]


def skip_unless(kernel_arch: str, device: torch.device) -> None:
    """Skip the test where the GPU is not one that kernels of an architecture, such as sm90, serve."""
    target = targets.detect(device)
    if target.kernel_arch != kernel_arch:
        pytest.skip(f"the kernel is for {kernel_arch}, this is {target.arch}")
