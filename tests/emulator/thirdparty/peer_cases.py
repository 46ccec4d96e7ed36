# SPDX-License-Identifier: Apache-2.0
"""What a case of others' kernels is, and the table of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peer_budgets import Expected

SM90, SM100 = "sm_90a", "sm_100a"
SCHEDULES = ("eager", "lazy", "random")


@dataclass(frozen=True)
class Problem:
    """One call and what it has to give.

    Attributes:
        call: launches the kernels and returns the outputs by name; each call computes them anew.
        expected: the outputs' yardsticks by name.
    """

    call: Callable[[], dict[str, torch.Tensor]]
    expected: dict[str, Expected]


Maker = Callable[[str], Problem]


@dataclass(frozen=True)
class Case:
    """A call of a third-party kernel.

    Attributes:
        make: builds the problem for an arch; runs on an emulated device of the arch, with the packages importable.
        archs: that it is for.
        quick: those of them that every change is checked with.
        known: by arch, kinds of findings that the kernel itself is the reason of; the case says why.
    """

    name: str
    make: Maker
    archs: Sequence[str]
    quick: Sequence[str] = ()
    known: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Table(dict[str, Case]):
    """Cases by name."""

    def case(
        self, *archs: str, quick: Sequence[str] = (), known: Mapping[str, Sequence[str]] | None = None
    ) -> Callable[[Maker], Maker]:
        """Decorator: the function is the case of its name, with - for _."""

        def add(make: Maker) -> Maker:
            name = make.__name__.replace("_", "-")
            assert name not in self, name
            self[name] = Case(name, make, archs or (SM90, SM100), quick, known or {})
            return make

        return add
