# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that prints failures as they happen: a step that is stopped says what failed so far."""

import os

import pytest

# Characters of a failure, from its end.
MOST = 3000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that collects results, not in pytest-xdist's workers."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-MOST:]}", flush=True)
