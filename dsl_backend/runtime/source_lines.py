# SPDX-License-Identifier: Apache-2.0
"""Source lines of operations, looked up once.

CuTe DSL asks `inspect` for file, line and text of the caller of each operation that it builds, and gives them to MLIR
as the operation's location. `inspect` searches the whole file for each, which takes a quarter of a kernel's
compilation (MLA and experts for SM90: 8.1 s of CPU time, 6.0 s with this). An instruction of a Python function always
has the same line.
"""

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def looked_up_once(module: Any) -> Iterator[None]:
    """While it is entered, `module.inspect` remembers; a module without `inspect` stays as it is."""
    if getattr(module, "inspect", None) is not inspect:
        yield
        return
    module.inspect = Inspect()
    try:
        yield
    finally:
        module.inspect = inspect
