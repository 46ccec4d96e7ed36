# SPDX-License-Identifier: Apache-2.0
"""Which tests `make test` leaves to `make test-rest`.

`make test` is for whoever changes something and waits for it: it touches every operator, both SMs on the emulator and a
real server. What it leaves is marked `rest` here, by file and by name, and counted at the end of a run.
"""

import fnmatch
from collections.abc import Generator, Sequence
from typing import Any

import pytest

# Patterns of node ids. A test that matches one of `REST` and none of `KEPT` is left to `make test-rest`.
REST: tuple[str, ...] = ()
KEPT: tuple[str, ...] = ()
LEFT = pytest.StashKey[int]()


def is_rest(nodeid: str) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(nodeid, pattern) for pattern in patterns)

    return matches(REST) and not matches(KEPT)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT] = 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest itself selects by markers."""
    for item in items:
        if is_rest(item.nodeid):
            item.add_marker(pytest.mark.rest)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("rest") and not item.get_closest_marker("full"):
            item.config.stash[LEFT] += 1


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """A worker tells the process that started it; all workers collect the same tests."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left"] = session.config.stash[LEFT]
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash[LEFT]
    if count:
        terminalreporter.write_line(f"{count} {'test was' if count == 1 else 'tests were'} left to `make test-rest`")
