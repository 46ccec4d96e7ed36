# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL softmax for one shape, as `dsl_backend/softmax/candidates.py` names them, that an H200
timed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.configs import SoftmaxConfig

from ..softmax.problems import Problem, spec_of
from .peers import Run

TIMED = Path(__file__).resolve().parents[2] / "docs/data/h200-softmax-configs.jsonl"
# Each launch was timed behind others of its kind, which let it start early. So many show where their CTAs go.
IN_A_ROW = 100


@dataclass(frozen=True)
class TimedSoftmax:
    """A configuration that was timed for a shape.

    Attributes:
        row: the shape's name.
        spilled: bytes of a thread for which the assembler found no registers.
    """

    row: str
    name: str
    problem: Problem
    config: SoftmaxConfig
    microseconds: float
    spilled: int

    in_a_row = IN_A_ROW

    @property
    def file(self) -> str:
        return f"{self.row}-{self.name.replace('*', '-')}.pickle"

    def samples(self, target: Target) -> int:
        """Clusters to simulate: all do the same."""
        return 1

    def prepared(self, target: Target) -> Run:
        """What launches it on the active emulated device."""
        from dsl_backend.softmax.cute import host

        problem, spec = self.problem, spec_of(self.problem)
        x = torch.zeros(problem.rows, problem.width, dtype=problem.dtype)
        out = torch.zeros(problem.rows, problem.width, dtype=problem.out_dtype)
        return lambda: host.build(host.key_of(spec, self.config), target)(x, out)


def timed(path: Path = TIMED) -> list[TimedSoftmax]:
    """All of the file, in its order."""
    found = []
    for line in path.read_text().splitlines():
        one: dict[str, Any] = json.loads(line)
        if "config" in one:
            dtype = getattr(torch, one["dtype"])
            problem = Problem(rows=one["rows"], width=one["width"], dtype=dtype, out_dtype=dtype)
            config = SoftmaxConfig(**one["config"])
            found.append(TimedSoftmax(f"softmax-{one['row']}", one["name"], problem, config, one["us"], one["spilled"]))
    return found
