# SPDX-License-Identifier: Apache-2.0
"""Configurations of a kernel for one shape: does the clock choose the one that a chip found fastest?

Those of SM90's 8-bit GEMM, as `benchmarks.scaled_linear.sweep` timed them on an H200; others are in a module of their
own (softmax_configs.py).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sizes import ceil_div
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import ScaledFormat
from dsl_backend.quant.reference import column_major
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

from ..scaled_linear.problems import Problem
from .peers import Run

TIMED = Path(__file__).resolve().parents[2] / "docs/data/h200-scaled-configs.jsonl"
CPU = torch.device("cpu")
# Clusters that are simulated, so that one of those with most tiles is among them.
MOST_SAMPLES = 8


class Timed(Protocol):
    """A configuration that was timed for a shape.

    Attributes:
        row: the shape's name.
        microseconds: of all launches.
        spilled: bytes of a thread for which the assembler found no registers. The clock does not see them, so that it
            chooses no configuration that has any.
        in_a_row: so many times one behind the other; the mean of the second half counts.
        file: that keeps what its warps did.
    """

    @property
    def row(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def microseconds(self) -> float: ...
    @property
    def spilled(self) -> int: ...
    @property
    def in_a_row(self) -> int: ...
    @property
    def file(self) -> str: ...
    def samples(self, target: Target) -> int:
        """Clusters to simulate."""

    def prepared(self, target: Target) -> Run:
        """What launches it on the active emulated device."""


@dataclass(frozen=True)
class TimedConfig:
    """A configuration that was timed for a shape.

    Attributes:
        row: the shape's name in the sweep.
        name: the configuration in the sweep's words.
        wide: outputs in float32, which another launch quantises.
        microseconds: of all launches.
    """

    row: str
    name: str
    problem: Problem
    config: ScaledGemmConfig
    wide: bool
    microseconds: float

    # ptxas spills in none of these (tests/gemm/test_machine_code.py).
    spilled = 0
    in_a_row = 1

    @property
    def file(self) -> str:
        return f"scaled-{self.row}-{self.name.replace(' ', '-')}.pickle"

    @property
    def spec(self) -> ScaledLinearSpec:
        """Of the products."""
        return self.problem.spec.in_float32 if self.wide else self.problem.spec

    def samples(self, target: Target) -> int:
        """Clusters to simulate: one where all have as many tiles, else enough to meet those with one tile more."""
        spec, config = self.spec, self.config
        members = config.cluster * config.k_parts
        clusters = max_ctas(config, self.problem.m, target) // members
        together = config.tiles_together(spec)
        tiles = ceil_div(self.problem.m, config.tile_m * config.cluster)
        tiles *= ceil_div(spec.n, config.columns(spec.parts) * together)
        more = tiles % clusters
        if config.k_parts > 1 or tiles < clusters or not more:
            return 1
        # The first one that runs is in the middle of the first share.
        return min(MOST_SAMPLES, max(2, clusters // (2 * more) + 1))

    def prepared(self, target: Target) -> Run:
        """What launches its kernels on the active emulated device."""
        problem, spec = self.problem, self.problem.spec
        x, weight = matrix(problem.m, problem.k, spec.x), matrix(spec.weight_rows, problem.k, spec.weight)
        out, scale = torch.zeros(problem.m, problem.n, dtype=spec.dtype), None
        if spec.out is not None:
            out, scale = matrix(problem.m, problem.n, spec.out)
        operands = ScaledOperands(*x, *weight, None, out, scale)
        return partial(_launch, self, operands, target)


def timed(path: Path = TIMED) -> list[TimedConfig]:
    """All of the file, in its order."""
    found = []
    for line in path.read_text().splitlines():
        one: dict[str, Any] = json.loads(line)
        if "config" in one:
            problem = Problem(**{name: one[name] for name in ("m", "n", "k", "scheme", "gated")})
            config = ScaledGemmConfig(**one["config"])
            found.append(TimedConfig(one["row"], one["name"], problem, config, one["wide"], one["us"]))
    return found


def matrix(rows: int, columns: int, kind: ScaledFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros in a format, and their scales."""
    shape = kind.scale_shape(rows, columns)
    by_group = kind.blocked and kind.block_rows == 1
    scale = column_major(shape[0], shape[-1], kind.scales, CPU).zero_() if by_group else torch.zeros(shape)
    return torch.zeros(rows, columns, dtype=kind.values), scale


def _launch(one: TimedConfig, operands: ScaledOperands, target: Target) -> None:
    from dsl_backend.linear.scaled.cute import host

    choice = host.Choice(one.spec, one.config)
    host.launch_of(one.problem.spec, choice, one.problem.m, target, Workspace(CPU))(operands)


def ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order from 0; equal values share the middle of theirs."""
    return [(sum(other < one for other in values) + sum(other <= one for other in values) - 1) / 2 for one in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; 0 where one side has no order."""
    first, second = ranks(one), ranks(other)
    middle = (len(first) - 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    alone = math.prod(math.sqrt(sum((a - middle) ** 2 for a in side)) for side in (first, second))
    return both / alone if alone else 0.0


@dataclass(frozen=True)
class Ranking:
    """A shape's configurations by the chip and by the clock, in microseconds.

    Attributes:
        names, chip, clock, spilled: of one configuration after the other.
    """

    row: str
    names: Sequence[str]
    chip: Sequence[float]
    clock: Sequence[float]
    spilled: Sequence[int] = ()

    @property
    def best(self) -> int:
        return min(range(len(self.chip)), key=lambda index: self.chip[index])

    @property
    def chosen(self) -> int:
        """The clock's; of those that spill only where all do."""
        spilled = self.spilled or [0] * len(self.clock)
        return min(range(len(self.clock)), key=lambda index: (spilled[index] > 0, self.clock[index]))

    @property
    def cost(self) -> float:
        """What the clock's choice takes longer on the chip than the chip's best one, as a part of it."""
        return self.chip[self.chosen] / self.chip[self.best] - 1

    @property
    def error(self) -> float:
        """The clock's, on average of magnitudes."""
        return sum(abs(b / a - 1) for a, b in zip(self.chip, self.clock, strict=True)) / len(self.chip)

    def __str__(self) -> str:
        best, chosen = self.best, self.chosen
        return (
            f"| {self.row} | {len(self.chip)} | {self.names[best]} | {self.chip[best]:.1f} "
            f"| {self.names[chosen]} | {self.chip[chosen]:.1f} | {self.cost:.1%} "
            f"| {rank_correlation(self.chip, self.clock):.2f} | {self.error:.0%} |"
        )
