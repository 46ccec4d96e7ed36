# SPDX-License-Identifier: Apache-2.0
"""What the judge asks of an operator, and the operators that it has."""

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Operator -> the module, relative to the benchmarks' package, whose JUDGED is a `Judged`.
OPERATORS = {
    "softmax": ".softmax.judged",
    "norm": ".norm.judged",
    "linear": ".linear.judged",
    "experts": ".experts.judged",
    "prefill": ".attention.judged",
    "decode": ".attention.judged",
    "mla-decode": ".attention.judged",
    "sampling": ".sampling.judged",
}
# Of a trial's inputs: one call is for one layer, and the next may be for another.
LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A small problem with a difficulty.

    Attributes:
        why: what this trial alone would find.
        problem: as the benchmark's rows have it; all that a candidate is told.
        details: what else `build` needs.
    """

    id: str
    why: str
    problem: Any
    details: Any = None


class Judged(Protocol):
    """An operator's trials. Inputs have LAYERS layers."""

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        """Trials with sizes from the generator, so that nobody knows them before.

        Args:
            emulated: of a few thousand elements, for the emulator.
        """
        ...

    def build(self, trial: Trial, device: torch.device, seed: int) -> Any: ...

    def outputs(self, inputs: Any) -> Sequence[torch.Tensor]:
        """The output that a launch on each layer writes."""
        ...

    def further(self, inputs: Any, layer: int) -> Sequence[torch.Tensor]:
        """What else a launch on a layer must write, in the order that `error` takes it."""
        ...

    def nudge(self, inputs: Any, layer: int, draw: random.Random) -> None:
        """Changes a few elements of a layer's inputs so that the result of one row changes."""
        ...

    def error(self, trial: Trial, inputs: Any, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        """The error of a layer's output as a share of its budget; at most 1 is right.

        Args:
            further: the layer's further outputs.

        Raises:
            AssertionError: it is wrong in a way that has no size.
        """
        ...

    def hidden(self, inputs: Any) -> Any:
        """Inputs of the benchmark without what would tell a candidate which rows are compared."""
        ...

    def covers(self, problem: Any) -> bool:
        """Whether a problem of the benchmark's is one of the operator that candidates are told of."""
        ...


class EveryProblem:
    """Of an operator whose rows are all of what candidates are told of."""

    def covers(self, problem: Any) -> bool:
        return True


class OneOutput(EveryProblem):
    """Of an operator without further outputs."""

    def further(self, inputs: Any, layer: int) -> Sequence[torch.Tensor]:
        return ()


def judged(operator: str) -> Judged:
    """Raises ValueError: the judge does not have the operator."""
    if operator not in OPERATORS:
        raise ValueError(f"no operator {operator!r} is judged: choose from {', '.join(OPERATORS)}")
    found: Judged = importlib.import_module(OPERATORS[operator], __package__.rpartition(".")[0]).JUDGED[operator]
    return found
