# SPDX-License-Identifier: Apache-2.0
"""The exceptions that cross the package's public functions."""

from collections.abc import Mapping, Sequence


def by_reason(objections: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Reason -> the kernels that give it, so that it is said once."""
    found: dict[str, list[str]] = {}
    for kernel, reasons in objections.items():
        for reason in reasons:
            said_by = found.setdefault(reason, [])
            if kernel not in said_by:
                said_by.append(kernel)
    return found


class Unsupported(ValueError):
    """No kernel serves a problem; carries every kernel's objections.

    Attributes:
        objections: the kernel, such as `dense-decode sm90` -> the reasons why it does not serve the problem.
    """

    def __init__(self, what: str, objections: Mapping[str, Sequence[str]]) -> None:
        self.objections = {name: tuple(reasons) for name, reasons in objections.items()}
        lines = [f"  {', '.join(kernels)}: {reason}" for reason, kernels in by_reason(self.objections).items()]
        super().__init__("\n".join([f"no kernel for {what}", *lines]))


class InvalidInput(ValueError):
    """An argument does not fit its contract; the message names the value and what is accepted."""
