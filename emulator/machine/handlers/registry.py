# SPDX-License-Identifier: Apache-2.0
"""Which function executes which form of instruction."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulator.machine.runner import Handler

HANDLERS: "dict[str, Handler]" = {}


def executes(*forms: str) -> "Callable[[Handler], Handler]":
    """Registers a function for forms, by their names in the tables of forms."""

    def register(handler: "Handler") -> "Handler":
        for form in forms:
            if form in HANDLERS:
                raise ValueError(f"two handlers for {form}")
            HANDLERS[form] = handler
        return handler

    return register
