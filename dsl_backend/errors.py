# SPDX-License-Identifier: Apache-2.0
"""The exceptions that the package's public functions raise."""

from collections.abc import Mapping, Sequence


def by_reason(objections: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Maps each reason to the kernels that give it, so that a message has every reason once."""
    found: dict[str, list[str]] = {}
    for kernel, reasons in objections.items():
        for reason in reasons:
            kernels = found.setdefault(reason, [])
            if kernel not in kernels:
                kernels.append(kernel)
    return found


class Unsupported(ValueError):
    """No kernel serves a problem.

    Attributes:
        objections: maps each kernel, such as `dense-decode sm90`, to the reasons why it does not serve the problem.
    """

    def __init__(self, what: str, objections: Mapping[str, Sequence[str]]) -> None:
        self.objections = {name: tuple(reasons) for name, reasons in objections.items()}
        lines = [f"  {', '.join(kernels)}: {reason}" for reason, kernels in by_reason(self.objections).items()]
        super().__init__("\n".join([f"no kernel for {what}", *lines]))


class InvalidInput(ValueError):
    """An argument is not valid. The message names the argument, its value and what is accepted."""
