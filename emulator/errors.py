# SPDX-License-Identifier: Apache-2.0
"""What the emulator raises: one class per kind of trouble, all of them `EmulatorError`."""

from collections.abc import Sequence


class EmulatorError(Exception):
    """Anything that the emulator itself has to say."""


class Unsupported(EmulatorError):
    """Asked for something that the emulator does not do; the message names it."""


class HostError(EmulatorError):
    """The host side cannot continue: no compiler, a tensor that is not on the CPU, a function of another arch."""


class LaunchError(EmulatorError):
    """A launch that a device of this kind would refuse."""


class FindingsError(EmulatorError):
    """The checks found something, and nobody asked to keep the findings.

    Attributes:
        findings: what the machine reported, in its order.
    """

    def __init__(self, findings: Sequence[object]) -> None:
        shown = [f"{number}. {finding}" for number, finding in enumerate(findings, 1)]
        super().__init__("\n".join([f"{len(shown)} finding{'s' * (len(shown) != 1)}:", *shown]))
        self.findings = tuple(findings)
