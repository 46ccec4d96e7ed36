# SPDX-License-Identifier: Apache-2.0
"""What tests of attention share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled for the test, and nothing is left of them."""
    # Import CuTe DSL.
    from dsl_backend.attention.cute.host import function_of
    from dsl_backend.runtime.compile import forget

    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    forget()
    function_of.cache_clear()
    yield
    forget()
    function_of.cache_clear()
