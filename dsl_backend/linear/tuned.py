# SPDX-License-Identifier: Apache-2.0
"""Which configuration the CuTe DSL kernel of a linear layer gets, and where an unfused product is faster."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import PositiveInt

from dsl_backend.checks import short
from dsl_backend.gemm.configs import Config, candidates, choose
from dsl_backend.gemm.cost import runs_at_once
from dsl_backend.gemm.sm90 import configs as sm90
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target


class ProblemShape(tuned.RowsProblemShape):
    """A layer's sizes, for a range of rows of x.

    Attributes:
        n, k: columns of the output and of x.
        gated: with an activation, whose weight is [2 n, k].
        sm_count: of the GPU; a partition of it has fewer.
    """

    n: PositiveInt
    k: PositiveInt
    gated: bool
    dtype: Literal["float16", "bfloat16"]
    sm_count: PositiveInt

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `linear-14336x4096-gated-bfloat16-m65-256`."""
        kind = "gated" if self.gated else "plain"
        return f"linear-{self.n}x{self.k}-{kind}-{self.dtype}-m{self.least_rows}-{self.most_rows}"


# Rows of a product without an activation that are worth a kernel of ours at most: those of a decode step.
MOST_ROWS = 64
# Of sizes without a record: of 30 products that were timed on an H100 with up to 16 rows each is 1.05 times as fast as
# cuBLAS, or faster.
UNRECORDED_ROWS = 16


@dataclass(frozen=True)
class Unfused:
    """No kernel of ours: the product by cuBLAS, then the activation, if there is one, by another kernel."""


TUNED_CONFIGS = tuned.TunedConfigs(
    "linear",
    Path(__file__).with_name("tuned.json"),
    ProblemShape,
    {
        "sm90.GemmConfig": sm90.GemmConfig,
        "sm90.SmallMConfig": sm90.SmallMConfig,
        "sm90.SwapABConfig": sm90.SwapABConfig,
        "sm100.GemmConfig": sm100.GemmConfig,
        "sm100.SmallMConfig": sm100.SmallMConfig,
        "unfused": Unfused,
    },
)


def problem_of(n: int, k: int, gated: bool, dtype: torch.dtype, sm_count: int) -> ProblemShape:
    """The problem of a layer, for one row."""
    return ProblemShape(
        least_rows=1,
        most_rows=1,
        n=n,
        k=k,
        gated=gated,
        dtype=short(dtype),  # type: ignore[arg-type]
        sm_count=sm_count,
    )


def measured(spec: LinearSpec, target: Target, *, any_gpu: bool = False) -> Iterator[tuple[ProblemShape, Config]]:
    """Tuning records that fit a layer, for any number of rows; a batch-invariant layer has one kernel, and no records.

    Args:
        any_gpu: as in `TunedConfigs.on`; then of any number of SMs too.
    """
    recorded = spec.dtypes.uniform and not spec.batch_invariant
    for record in TUNED_CONFIGS.on(target, any_gpu=any_gpu) if recorded else ():
        sm_count = target.sm_count if target.gpu is not None else record.problem.sm_count
        wanted = problem_of(spec.n, spec.k, spec.parts == 2, spec.dtypes.x, sm_count)
        if record.problem.of_rows(1, 1) != wanted or isinstance(record.config, Unfused):
            continue
        if not record.config.objections(spec, target.smem_bytes):
            yield record.problem, record.config


def config_of(spec: LinearSpec, rows: int, target: Target) -> Config:
    """The configuration for so many rows: of a tuning record that fits, or the heuristic's."""
    found = (config for problem, config in measured(spec, target) if problem.holds(rows))
    fitting = (config for config in found if runs_at_once(config, spec, rows, target))
    return next(fitting, None) or choose(spec, rows, target)


def configs_of(spec: LinearSpec, target: Target, most_rows: int | None = None) -> list[Config]:
    """All configurations that some number of rows may get, up to `most_rows`; these are compiled before serving."""
    if most_rows is not None:
        return list(dict.fromkeys(config_of(spec, rows, target) for rows in range(1, most_rows + 1)))
    found = (config for _, config in measured(spec, target, any_gpu=True))
    return list(dict.fromkeys((*candidates(spec, target), *found)))


def unfused(n: int, k: int, dtype: torch.dtype, target: Target) -> list[ProblemShape]:
    """Ranges of rows for which a gated layer is measured to be faster as a product and an activation after it."""
    found = tuned.ranges(TUNED_CONFIGS, target, partial(problem_of, n, k, True, dtype))
    return [problem for problem, config in found if isinstance(config, Unfused)]


def faster(n: int, k: int, dtype: torch.dtype, target: Target) -> list[ProblemShape]:
    """Ranges of rows for which a product without an activation is taken to be faster than cuBLAS.

    By the tuning records of the layer's sizes; without any, up to `UNRECORDED_ROWS` on an SM90.
    """
    problem = partial(problem_of, n, k, False, dtype)
    return tuned.faster(TUNED_CONFIGS, target, problem, [(1, UNRECORDED_ROWS)], Unfused)


@lru_cache(maxsize=1 << 16)
def replaces(rows: int, n: int, k: int, dtype: torch.dtype, target: Target) -> bool:
    """Whether a product without an activation is taken to be faster than cuBLAS."""
    return any(problem.holds(rows) for problem in faster(n, k, dtype, target))


@lru_cache(maxsize=1 << 16)
def fused_is_faster(rows: int, n: int, k: int, dtype: torch.dtype, target: Target) -> bool:
    """Whether the fused kernel of a gated layer is faster, by the tuning records; true where there are none."""
    return not any(problem.holds(rows) for problem in unfused(n, k, dtype, target))
