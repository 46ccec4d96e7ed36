# SPDX-License-Identifier: Apache-2.0
"""What a case of others' kernels is, and the table of them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peer_budgets import Expected

SM90, SM100 = "sm_90a", "sm_100a"
SCHEDULES = ("eager", "lazy", "random")


@dataclass(frozen=True)
class Problem:
    """One call and what it has to give.

    Attributes:
        call: launches the kernels on the inputs and returns the outputs by name; each call computes them anew.
        inputs: its arguments; tensors are of the CPU, and the same on every machine.
        expected: the outputs' yardsticks by name.
    """

    call: Callable[..., dict[str, torch.Tensor]]
    inputs: dict[str, Any]
    expected: dict[str, Expected]

    def run(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The outputs of a call on the device, there."""
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in self.inputs.items()}
        return self.call(**moved)

    def digest(self) -> str:
        """Of all tensors of the inputs."""
        every = hashlib.sha256()
        for name, x in sorted(self.inputs.items()):
            if isinstance(x, torch.Tensor):
                every.update(f"{name} {x.dtype} {tuple(x.shape)} {tuple(x.stride())}".encode() + octets(x))
        return every.hexdigest()


def octets(x: torch.Tensor) -> bytes:
    """The elements of a tensor of any dtype, row by row."""
    return x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def normal(*shape: int) -> torch.Tensor:
    """Near enough to a normal distribution, in float32, and the same on every machine.

    torch.randn has other last bits with other vector instructions; sums of integers are exact.
    """
    return torch.randint(-(1 << 15), 1 << 15, (12, *shape)).sum(0).float() / (1 << 16)


Maker = Callable[[str], Problem]


@dataclass(frozen=True)
class Case:
    """A call of a third-party kernel.

    Attributes:
        make: builds the problem for an arch; runs on an emulated device of the arch, with the packages importable.
        archs: that it is for.
        quick: those of them that every change is checked with.
        known: by arch, kinds of findings that the kernel itself is the reason of; the case says why.
        raced: outputs that a race of the kernel's own makes wrong in some schedule, and in some not.
    """

    name: str
    make: Maker
    archs: Sequence[str]
    quick: Sequence[str] = ()
    known: Mapping[str, Sequence[str]] = field(default_factory=dict)
    raced: Sequence[str] = ()


class Table(dict[str, Case]):
    """Cases by name."""

    def case(
        self,
        *archs: str,
        quick: Sequence[str] = (),
        known: Mapping[str, Sequence[str]] | None = None,
        raced: Sequence[str] = (),
    ) -> Callable[[Maker], Maker]:
        """Decorator: the function is the case of its name, with - for _."""

        def add(make: Maker) -> Maker:
            name = make.__name__.replace("_", "-")
            assert name not in self, name
            self[name] = Case(name, make, archs or (SM90, SM100), quick, known or {}, raced)
            return make

        return add
