# SPDX-License-Identifier: Apache-2.0
"""Which rows and columns of which operators the comparison has."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..case import Case


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of an operator.

    Attributes:
        groups: of its rows.
        peers: the columns beside this package's, also where they are not among the default ones.
        compiled: the id of the row whose kernels' compile times are measured.
        shows: what the rows are.
    """

    operator: str
    groups: tuple[str, ...]
    peers: tuple[str, ...]
    compiled: str
    shows: str


OTHER_DSLS = ("Gluon", "Helion", "TileLang", "cuTile")
# The quickest first.
TABLES = (
    Table(
        operator="launch",
        groups=("tiny",),
        peers=("CuTe DSL", "Triton", "torch", "torch.compile", *OTHER_DSLS),
        compiled="tiny-add-40",
        shows="the cost of a launch",
    ),
    Table(
        operator="softmax",
        groups=("grid",),
        peers=("torch", "torch.compile", "Triton", "Liger", "FlashInfer", "quack", *OTHER_DSLS),
        compiled="grid-4096x8192",
        shows="28 shapes",
    ),
    Table(
        operator="norm",
        groups=("grid",),
        peers=("torch", "torch.compile", "Triton", "Liger", "FlashInfer", "quack", "vLLM", *OTHER_DSLS),
        compiled="grid-4096x8192",
        shows="RMSNorm, 28 shapes",
    ),
    Table(
        operator="linear",
        groups=("plain", "swiglu"),
        peers=("cuBLAS + silu_and_mul", "torch.compile", "Triton", "quack", *OTHER_DSLS),
        compiled="swiglu-8192x10880x4096",
        shows="8192 x 8192 over the depth, and layers with SwiGLU",
    ),
    Table(
        operator="prefill",
        groups=("lengths",),
        peers=(
            *("torch", "torch.compile", "Triton", "TRITON_ATTN", "FA2", "FA3", "FA4", "FLASHINFER", "cuDNN"),
            *OTHER_DSLS[1:],
        ),
        compiled="lengths-hd128-h16x16-8x2k",
        shows="causal attention over lengths",
    ),
)


# Not tables of rows: the compile times of the chosen tables' kernels, or of all tables'; and compiling before rows.
COMPILE = "compile"
AHEAD = "ahead"


@dataclass(frozen=True)
class Choice:
    """What to measure.

    Attributes:
        tables: whose kernels are compared.
        rows: whether their rows are measured.
        compile: whether their kernels' compile times are.
        seconds: operator, `COMPILE` or `AHEAD` -> its own time limit.
    """

    tables: tuple[Table, ...]
    rows: bool
    compile: bool
    seconds: Mapping[str, float] = field(default_factory=dict)


def chosen(names: Sequence[str]) -> Choice:
    """What names ask for: operators of tables and `COMPILE`, each NAME or NAME=SECONDS. Without names, everything.

    `AHEAD` chooses nothing: AHEAD=SECONDS limits what is compiled before rows are measured.

    Raises:
        ValueError: there is no such table, or its time limit is no number of seconds.
    """
    known = [table.operator for table in TABLES]
    parts = dict(one.partition("=")[::2] for one in names)
    if unknown := [name for name in parts if name not in (*known, COMPILE, AHEAD)]:
        raise ValueError(f"no table {', '.join(unknown)} of DSLs: choose from {', '.join([*known, COMPILE, AHEAD])}")
    limits = {one.partition("=")[0]: seconds_of(one) for one in names if "=" in one or one == AHEAD}
    parts.pop(AHEAD, None)
    asked = [name for name in parts if name != COMPILE]
    tables = tuple(table for table in TABLES if not asked or table.operator in asked)
    return Choice(tables, rows=bool(asked) or not parts, compile=COMPILE in parts or not parts, seconds=limits)


def seconds_of(part: str) -> float:
    """The time limit of NAME=SECONDS.

    Raises:
        ValueError: SECONDS is no number of at least 0.
    """
    name, _, text = part.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(f"{part}: a time limit is {name}=SECONDS with a number of at least 0")
    return value


def spread(cases: Sequence[Case[Any]]) -> list[Case[Any]]:
    """The cases in an order whose beginnings cover the whole range: first and last, then the middle of each gap.

    A run that is cut off has a coarse table, and not the first half of a fine one.
    """
    found = dict.fromkeys([0, len(cases) - 1]) if cases else {}
    while len(found) < len(cases):
        ends = sorted(found)
        found |= dict.fromkeys((low + high) // 2 for low, high in itertools.pairwise(ends))
    return [cases[index] for index in found]
