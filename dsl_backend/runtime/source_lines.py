# SPDX-License-Identifier: Apache-2.0
"""Source lines of operations, looked up once.

CuTe DSL asks `inspect` for file, line and text of the caller of each operation that it builds, and gives them to MLIR
as the operation's location. `inspect` searches the whole file for each, which takes a quarter of a kernel's
compilation (MLA and experts for SM90: 8.1 s of CPU time, 6.0 s with this). An instruction of a Python function always
has the same line. To find the caller, CuTe DSL asks of each frame whether it is one of its own, by the names of its
module and file: a function's answer is always the same, too.
"""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

# Of the builder: whether a frame is one of CuTe DSL's own.
OWN = "_is_framework_stack_frame"
Lookup = dict[tuple[int, int], tuple[types.CodeType, inspect.Traceback]]


class Inspect(types.ModuleType):
    """`inspect`, whose `getframeinfo` remembers what it found; it holds the code, since an id may be given again."""

    def __init__(self) -> None:
        super().__init__(inspect.__name__)
        self.found: Lookup = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getframeinfo(self, frame: types.FrameType, context: int = 1) -> inspect.Traceback:
        key = (id(frame.f_code), frame.f_lasti)
        if context != 1:
            return inspect.getframeinfo(frame, context)
        if key not in self.found:
            self.found[key] = (frame.f_code, inspect.getframeinfo(frame))
        return self.found[key][1]


def remembered(is_own: Callable[[types.FrameType], bool]) -> Callable[[types.FrameType], bool]:
    """The same, asked once for each function. It holds the code, since an id may be given again."""
    known: dict[int, tuple[types.CodeType, bool]] = {}

    def ask(frame: types.FrameType) -> bool:
        code = frame.f_code
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = code, is_own(frame)
        return found[1]

    return ask


@contextlib.contextmanager
def looked_up_once(module: Any) -> Iterator[None]:
    """While it is entered, `module` remembers lines and frames; one without `inspect` stays as it is."""
    if getattr(module, "inspect", None) is not inspect:
        yield
        return
    is_own = getattr(module, OWN, None)
    remember(module, Inspect())
    try:
        yield
    finally:
        module.inspect = inspect
        if is_own is not None:
            setattr(module, OWN, is_own)


def remember(module: Any, lines: Inspect) -> None:
    """Have `module` remember lines and frames from here on."""
    module.inspect = lines
    if (is_own := getattr(module, OWN, None)) is not None:
        setattr(module, OWN, remembered(is_own))
