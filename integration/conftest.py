# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end checks."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from integration import models
from integration.models import Model
from integration.server import Server

Checkpoint = Callable[[str, Model], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A function that writes a model once in a session, under a name, and returns its folder."""
    folder = tmp_path_factory.mktemp("models")
    written: dict[str, Path] = {}

    def write(name: str, model: Model) -> Path:
        if name not in written:
            written[name] = models.write(model, folder / name)
        return written[name]

    return write


def parameters(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of the selected tests in the file of a fixture's user, so that it starts no engine for others."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params if hasattr(item, "callspec") else {} for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of the test's servers to a failure's report."""
    report = yield
    if report.failed:
        for fixture in getattr(item, "funcargs", {}).values():
            server = getattr(fixture, "server", fixture)
            if isinstance(server, Server):
                report.sections.append((f"server {server.url}", server.account))
    return report
