# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, without work that it repeats in each call of a function by a kernel.

At each such call it replaces the functions of `triton.language` again, and looks through all members of these modules
for that. They are replaced already while a kernel runs. A kernel with many small functions takes a third of the time.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The names of Triton's own modules that the function's module has."""
    values = [value for value in vars(inspect.getmodule(fn) or tl).values() if inspect.ismodule(value)]
    return frozenset(value.__name__ for value in values if value in (tl, tl.core))


def replace_once() -> None:
    """Lets a call within a kernel replace only what the kernel's start has not."""
    original: Callable[..., Any] = interpreter._patch_lang
    active: list[frozenset[str]] = []

    def patch(fn: Callable[..., Any]) -> Any:
        found = languages(fn)
        if active:
            return None if found <= active[-1] else original(fn)
        scope = original(fn)
        restore = scope.restore
        active.append(found)

        def ended() -> None:
            active.pop()
            restore()

        scope.restore = ended
        return scope

    interpreter._patch_lang = patch
