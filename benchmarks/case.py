# SPDX-License-Identifier: Apache-2.0
"""The parts of an operator's benchmark: cases, the providers that run them, and the operator itself.

This module is the same for all operators. Each operator has its own type of problems (`ProblemT`) and of tensors
(`InputsT`); the harness only passes them from one of the operator's methods to the next.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from dsl_backend.providers import Launch, Limits

ProblemT = TypeVar("ProblemT")
InputsT = TypeVar("InputsT")
ProblemIn = TypeVar("ProblemIn", contravariant=True)
InputsIn = TypeVar("InputsIn", contravariant=True)

TABLE = "table"  # the default group of rows
SMALLEST = "tiny"  # the group of rows that show the cost of a launch


@dataclass(frozen=True, kw_only=True)
class Case(Generic[ProblemT]):
    """One row of a benchmark.

    Attributes:
        id: unique within the operator; a regular expression selects rows by it.
        group: the name of the rows that belong together; the group `table` runs by default.
        problem: the operator's own description of the problem.
        parameters: name -> value, for the report.
        traffic_bytes: bytes that one launch must move through device memory, reads and writes.
        flops: floating-point operations that one launch must do.
        eight_bit: the operations are products of 8-bit elements.
        axis: the parameter that varies within the group if the group is a sweep, else None.
    """

    id: str
    group: str
    problem: ProblemT
    parameters: Mapping[str, object]
    traffic_bytes: int
    flops: int
    eight_bit: bool = False
    axis: str | None = None


class Described(Protocol):
    """What a row says of its problem."""

    @property
    def parameters(self) -> Mapping[str, object]: ...

    @property
    def traffic_bytes(self) -> int: ...


DescribedT = TypeVar("DescribedT", bound=Described)


def case_of(name: str, problem: DescribedT, group: str = TABLE, axis: str | None = None) -> Case[DescribedT]:
    """The row of a problem; `flops` is 0 where the problem has none."""
    return Case(
        id=name if group == TABLE else f"{group}-{name}",
        group=group,
        problem=problem,
        parameters=problem.parameters,
        traffic_bytes=problem.traffic_bytes,
        flops=getattr(problem, "flops", 0),
        eight_bit=getattr(problem, "eight_bit", False),
        axis=axis,
    )


def compared_rows(rows: int, most: int, seed: int, device: torch.device) -> torch.Tensor:
    """The first of some rows, the last one, and up to `most` random ones; int64, ascending."""
    inner = random.Random(seed).sample(range(rows), min(most, rows))
    return torch.tensor(sorted({0, rows - 1, *inner}), device=device)


def select(cases: Sequence[Case], pattern: str | None, with_sweeps: bool = False) -> list[Case]:
    """The rows of the default group, or the rows of any group whose id matches the regular expression.

    Args:
        with_sweeps: add the sweeps and the smallest rows to the default group; a page has charts of them.
    """
    if pattern is not None:
        return [case for case in cases if re.search(pattern, case.id)]
    return [case for case in cases if case.group == TABLE or (with_sweeps and (case.axis or case.group == SMALLEST))]


class Provider(Protocol[ProblemIn, InputsIn]):
    """What the harness asks of `dsl_backend.providers.Provider`."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str | None:
        """The distribution that it runs."""
        ...

    @property
    def source(self) -> str:
        """What it is, with its version."""
        ...

    @property
    def default(self) -> bool:
        """Whether it runs if the user names no providers."""
        ...

    def objections(self, problem: ProblemIn) -> Sequence[str]:
        """Why it cannot run a problem on this machine; empty if it can."""
        ...

    def limits(self, problem: ProblemIn) -> Limits:
        """The largest errors that are accepted from its arithmetic."""
        ...

    def prepare(self, problem: ProblemIn, inputs: InputsIn) -> Launch:
        """Plans, allocates and compiles: the work that serving does once and not in each layer."""
        ...


@dataclass(frozen=True)
class Reference:
    """The exact results of some rows of one layer's output.

    Attributes:
        rows: [n] int64, indices into the first dimension of the output.
        values: [n, ...] float64.
    """

    rows: torch.Tensor
    values: torch.Tensor


class Operator(Protocol[ProblemT, InputsT]):
    """An operator's benchmark. As in a model, the layers of its inputs have equal shapes and different data."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """The unit of the rate in the report: `TB/s` or `TFLOP/s`."""
        ...

    def cases(self) -> Sequence[Case[ProblemT]]: ...

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider[ProblemT, InputsT]]:
        """Every provider. This package's are first, one for each name in `kernels`, or the default one."""
        ...

    def build(self, problem: ProblemT, layers: int, device: torch.device, seed: int) -> InputsT:
        """Random inputs of the given number of layers."""
        ...

    def poison(self, inputs: InputsT) -> None:
        """Fills every output with NaN, so that elements that a kernel does not write are detected."""
        ...

    def reference(self, problem: ProblemT, inputs: InputsT, layer: int, seed: int = 0) -> Reference:
        """The exact results of rows of a layer that the seed chooses; the first and the last one are among them."""
        ...

    def compared(self, inputs: InputsT, layer: int, result: torch.Tensor) -> torch.Tensor:
        """What of a layer's result is compared with the reference: usually the result itself."""
        ...
