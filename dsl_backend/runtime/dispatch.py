# SPDX-License-Identifier: Apache-2.0
"""Tables of kernels, best first, each with its objections: what every operator family's dispatch is made of."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime.target import Target

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class Entry(Generic[Spec]):
    """A kernel that may serve an operation.

    Attributes:
        name: what a user calls it by; kernels of several SMs may share one.
        kernel: `module:name` of its class or function, imported when it is first chosen.
        objections: why it does not serve a problem on a target; empty where it does.
    """

    name: str
    kernel: str
    objections: Callable[[Spec, Target], list[str]]

    def load(self) -> Any:
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)


Judged = list[tuple[Entry[Spec], list[str]]]


def judge(table: Sequence[Entry[Spec]], spec: Spec, target: Target) -> Judged[Spec]:
    """Every entry with its objections, best entry first."""
    return [(entry, entry.objections(spec, target)) for entry in table]


def choose(
    operation: str, table: Sequence[Entry[Spec]], spec: Spec, target: Target, kernel: str | None = None
) -> Entry[Spec]:
    """The first entry that does not object.

    Args:
        operation: its name, for messages.
        kernel: a name from the table; that kernel or none.

    Raises:
        InvalidInput: the table has no kernel of that name.
        Unsupported: no kernel, or not the one that was asked for, serves the problem; with every objection.
    """
    names = list(dict.fromkeys(entry.name for entry in table))
    if kernel is not None and kernel not in names:
        raise InvalidInput(f"{operation} has no kernel {kernel!r}: choose one of {', '.join(names)}")
    objections: dict[str, list[str]] = {}
    for entry, reasons in judge([entry for entry in table if kernel in (None, entry.name)], spec, target):
        if not reasons:
            return entry
        known = objections.setdefault(entry.name, [])
        known += [reason for reason in reasons if reason not in known]
    raise Unsupported(f"{operation} ({spec}) on {target.arch}", objections)


def explained(judged: Judged[Spec], name: str) -> str:
    """A kernel's name, with what better ones object in parentheses."""
    better = []
    for entry, reasons in judged:
        if entry.name == name:
            break
        better.append(f"{entry.name}: {'; '.join(reasons) or 'not the one asked for'}")
    return name + (f" (not by {', nor '.join(better)})" if better else "")
