# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end checks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from integration import models
from integration.models import Model

Checkpoint = Callable[[str, Model], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Writes a model once a session, under a name, and returns its folder."""
    folder = tmp_path_factory.mktemp("models")
    written: dict[str, Path] = {}

    def write(name: str, model: Model) -> Path:
        if name not in written:
            written[name] = models.write(model, folder / name)
        return written[name]

    return write
