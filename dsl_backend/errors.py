# SPDX-License-Identifier: Apache-2.0
"""The exceptions that cross the package's public functions."""

from collections.abc import Mapping, Sequence


class Unsupported(ValueError):
    """No kernel serves a problem; carries every kernel's objections.

    Attributes:
        objections: kernel name -> the reasons why it does not serve the problem.
    """

    def __init__(self, what: str, objections: Mapping[str, Sequence[str]]) -> None:
        self.objections = {name: tuple(reasons) for name, reasons in objections.items()}
        lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in self.objections.items()]
        super().__init__("\n".join([f"no kernel for {what}", *lines]))


class InvalidInput(ValueError):
    """An argument does not fit its contract; the message names the value and what is accepted."""
