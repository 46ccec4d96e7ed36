# SPDX-License-Identifier: Apache-2.0
"""Source lines that are looked up once are those that `inspect` finds each time."""

import inspect
import sys
import types

import pytest

from dsl_backend.runtime.source_lines import OWN, looked_up_once


def asks(module: types.ModuleType, times: int) -> list[tuple[inspect.Traceback, inspect.Traceback]]:
    """What `module` finds at two places of this function, and what `inspect` does."""
    found = []
    for _ in range(times):
        found.append((module.inspect.getframeinfo(sys._getframe()), inspect.getframeinfo(sys._getframe())))
        found.append((module.inspect.getframeinfo(sys._getframe()), inspect.getframeinfo(sys._getframe())))
    return found


@pytest.fixture
def module() -> types.ModuleType:
    made = types.ModuleType("builder")
    made.inspect = inspect
    return made


def test_each_place_has_its_own_line(module: types.ModuleType) -> None:
    with looked_up_once(module):
        found = asks(module, 3)
    assert len({info.lineno for info, _ in found}) == 2
    for info, right in found:
        assert info[:5] == right[:5]
        assert info.positions.lineno == right.positions.lineno


def test_a_place_is_looked_up_once(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = inspect.getframeinfo
    monkeypatch.setattr(inspect, "getframeinfo", lambda *given: calls.append(given) or real(*given))
    with looked_up_once(module):
        for _ in range(4):
            module.inspect.getframeinfo(sys._getframe())
        assert module.inspect.currentframe is inspect.currentframe
    assert len(calls) == 1


def test_it_ends_with_the_block(module: types.ModuleType) -> None:
    with looked_up_once(module):
        assert module.inspect is not inspect
    assert module.inspect is inspect
    with pytest.raises(KeyError), looked_up_once(module):
        raise KeyError
    assert module.inspect is inspect
    with looked_up_once(types.ModuleType("without")):
        pass


def test_a_function_is_asked_once_whether_it_is_the_compilers(module: types.ModuleType) -> None:
    asked = []

    def is_own(frame: types.FrameType) -> bool:
        asked.append(frame.f_code)
        return frame.f_code.co_name == "own"

    def own() -> types.FrameType:
        return sys._getframe()

    def other() -> types.FrameType:
        return sys._getframe()

    setattr(module, OWN, is_own)
    with looked_up_once(module):
        found = [getattr(module, OWN)(function()) for _ in range(3) for function in (own, other)]
    assert found == [True, False] * 3
    assert asked == [own.__code__, other.__code__]
    assert getattr(module, OWN) is is_own


def test_the_compiler_has_what_is_asked_once() -> None:
    """Under the same name in the version that is installed: otherwise nothing is remembered, and nobody sees it."""
    builder = pytest.importorskip("cutlass._mlir_helpers.op")
    assert hasattr(builder, "inspect")
    assert callable(getattr(builder, OWN))
