# SPDX-License-Identifier: Apache-2.0
"""What an operator's benchmark is made of: cases, providers that run them, and the operator that joins the two.

Nothing here knows an operator. An operator describes its problems with a type of its own (`ProblemT`) and its tensors
with another (`InputsT`); the harness only hands them from one of its methods to the next.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

ProblemT = TypeVar("ProblemT")
InputsT = TypeVar("InputsT")
ProblemIn = TypeVar("ProblemIn", contravariant=True)
InputsIn = TypeVar("InputsIn", contravariant=True)

TABLE = "table"  # the group of rows that runs when nobody names one
SMALLEST = "tiny"  # the group of rows that show what a launch costs


@dataclass(frozen=True, kw_only=True)
class Case(Generic[ProblemT]):
    """One row of a benchmark.

    Attributes:
        id: unique within the operator; a regular expression selects rows by it.
        group: rows that belong together; `table` is the default selection.
        problem: the operator's description of it.
        parameters: what the report says about it.
        traffic_bytes: bytes that one launch must move through device memory, reads and writes.
        flops: floating-point operations that one launch must do.
        axis: the parameter that the rows of its group go over, where they are a sweep.
    """

    id: str
    group: str
    problem: ProblemT
    parameters: Mapping[str, object]
    traffic_bytes: int
    flops: int
    axis: str | None = None


def select(cases: Sequence[Case], pattern: str | None, pictured: bool = False) -> list[Case]:
    """The table, or every row of any group whose id the regular expression finds.

    Args:
        pictured: with the table, the sweeps and the smallest rows: what a report has pictures of.
    """
    if pattern is not None:
        return [case for case in cases if re.search(pattern, case.id)]
    return [case for case in cases if case.group == TABLE or (pictured and (case.axis or case.group == SMALLEST))]


@dataclass(frozen=True)
class Launch:
    """A prepared provider.

    Attributes:
        run: launches on layer i of the inputs, without a copy between host and device, and returns what holds the
            result.
        view: turns what `run` returned into the operator's output shape; used by the check, never timed.
    """

    run: Callable[[int], torch.Tensor]
    view: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda result: result)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest errors that pass, relative to the norm of the exact result.

    Attributes:
        total: over all rows that are compared.
        row: over the worst of them, so that one wrong row among thousands is seen.
    """

    total: float
    row: float


class Provider(Protocol[ProblemIn, InputsIn]):
    """An implementation of an operator: one column of the report."""

    @property
    def name(self) -> str: ...

    @property
    def default(self) -> bool:
        """Whether it runs when nobody names providers."""
        ...

    def objections(self, problem: ProblemIn) -> list[str]:
        """Why it does not run a problem here; empty where it does."""
        ...

    def limits(self, problem: ProblemIn) -> Limits:
        """The errors that its arithmetic may make."""
        ...

    def prepare(self, problem: ProblemIn, inputs: InputsIn) -> Launch:
        """Plan, allocate and compile: all that serving does once and not for each layer."""
        ...


@dataclass(frozen=True)
class Reference:
    """Exact results for some rows of one layer's output.

    Attributes:
        rows: [n] int64, indices into the first dimension of the output.
        values: [n, ...] float64.
    """

    rows: torch.Tensor
    values: torch.Tensor


class Operator(Protocol[ProblemT, InputsT]):
    """An operator's benchmark. Layers of its inputs are alike but for their data, as layers of a model are."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What the report derives from the time: `TB/s` or `TFLOP/s`."""
        ...

    def cases(self) -> Sequence[Case[ProblemT]]: ...

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider[ProblemT, InputsT]]:
        """Every provider, ours first; `kernels` names kernels of ours, each a provider of its own."""
        ...

    def build(self, problem: ProblemT, layers: int, device: torch.device, seed: int) -> InputsT:
        """Random inputs of that many layers."""
        ...

    def poison(self, inputs: InputsT) -> None:
        """Fill every output with NaN, so that an element nobody writes is seen."""
        ...

    def reference(self, problem: ProblemT, inputs: InputsT, layer: int) -> Reference: ...
