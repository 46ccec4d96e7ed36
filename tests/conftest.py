# SPDX-License-Identifier: Apache-2.0
"""Which device the tests run on: a GPU where there is one, or else Triton's interpreter on the CPU."""

import inspect
import os
import sys

import pytest
import torch

from dsl_backend.runtime.source_lines import Inspect, remember

# Triton reads this when a kernel is defined: it must be set before anything imports triton, in xdist's workers too,
# where this file is imported first as it is here.
INTERPRET = "TRITON_INTERPRET"
OUTER_ENVIRONMENT = dict(os.environ)
if not torch.cuda.is_available():
    os.environ.setdefault(INTERPRET, "1")
    from tests.triton_interpreter import replace_once

    replace_once()


# CuTe DSL's builder of operations, and the source lines that it has asked for in this process.
BUILDER = "cutlass._mlir_helpers.op"
SOURCE_LINES = Inspect()


def pytest_runtest_setup() -> None:
    """Kernels of all tests look a source line up once: many compile the same code with other constants."""
    builder = sys.modules.get(BUILDER)
    if getattr(builder, "inspect", None) is inspect:
        remember(builder, SOURCE_LINES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that kernels are tested on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def server_environment() -> dict[str, str]:
    """The environment for a subprocess such as a server: as outside of the tests, kernels not interpreted."""
    environment = dict(OUTER_ENVIRONMENT)
    environment.pop(INTERPRET, None)
    return environment
