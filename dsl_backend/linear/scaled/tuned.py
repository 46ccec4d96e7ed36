# SPDX-License-Identifier: Apache-2.0
"""For which numbers of rows this package's kernels of a layer in e4m3 were measured to be faster than vLLM's own.

A record names the configuration that was timed, or `dsl`: the one that the cost model chooses. Where there is none,
nothing is known, and vLLM's own kernel runs.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from dsl_backend.checks import short
from dsl_backend.gemm.configs import Config
from dsl_backend.gemm.cost import runs_at_once
from dsl_backend.gemm.sm90 import scaled_configs as sm90
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target

# The kernels that records are of, by architecture.
KERNELS = {"sm90": "cute-sm90"}


class ProblemShape(tuned.RowsProblemShape):
    """A layer's sizes and formats, for a range of rows of x.

    Attributes:
        n, k: columns of the output and of x.
        gated: with an activation, whose weight is [2 n, k].
        x, weight: names of their formats.
        out: the name of the output's format; None is `dtype`.
        dtype: of the bias, and of an output that is not quantised.
        sm_count: of the GPU; a partition of it has fewer.
    """

    n: PositiveInt
    k: PositiveInt
    gated: bool
    x: tuned.FormatName
    weight: tuned.FormatName
    out: tuned.FormatName | None
    dtype: Literal["float16", "bfloat16"]
    sm_count: PositiveInt

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `scaled-linear-6144x4096-plain-e4m3-row-bfloat16-m1-16`."""
        kind = "gated" if self.gated else "plain"
        return (
            f"scaled-linear-{self.n}x{self.k}-{kind}-{self.weight}-{self.out or self.dtype}"
            f"-m{self.least_rows}-{self.most_rows}"
        )


@dataclass(frozen=True)
class Ours:
    """This package's kernel with the configuration that the cost model chooses."""


@dataclass(frozen=True)
class Theirs:
    """The product that vLLM chooses, and what follows it: what others are compared with, and no record."""


@dataclass(frozen=True, kw_only=True)
class Tiles(sm90.ScaledGemmConfig):
    """Of the persistent GEMM.

    Attributes:
        wide: the output is written in float32, and a launch of its own quantises it.
    """

    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class FewRows(sm90.ScaledSmallMConfig):
    """Of the GEMM for few rows; `wide` as in `Tiles`."""

    wide: bool = False


TUNED_CONFIGS = tuned.TunedConfigs(
    "scaled-linear",
    Path(__file__).with_name("tuned.json"),
    ProblemShape,
    {"dsl": Ours, "sm90.ScaledGemmConfig": Tiles, "sm90.ScaledSmallMConfig": FewRows},
)


def recorded(config: Config, *, wide: bool) -> Tiles | FewRows:
    """A configuration as records have it."""
    kind: Any = FewRows if isinstance(config, SmallMTiles) else Tiles
    made: Tiles | FewRows = kind(**asdict(config), wide=wide)
    return made


def plain(config: Tiles | FewRows) -> Config:
    """A record's configuration as kernels have it."""
    kind: Any = sm90.ScaledSmallMConfig if isinstance(config, FewRows) else sm90.ScaledGemmConfig
    made: Config = kind(**{name: value for name, value in asdict(config).items() if name != "wide"})
    return made


def problem_of(spec: ScaledLinearSpec, sm_count: int) -> ProblemShape:
    """The problem of a layer, for one row."""
    return ProblemShape(
        least_rows=1,
        most_rows=1,
        n=spec.n,
        k=spec.k,
        gated=spec.parts == 2,
        x=spec.x.name,
        weight=spec.weight.name,
        out=None if spec.out is None else spec.out.name,
        dtype=short(spec.dtype),  # type: ignore[arg-type]
        sm_count=sm_count,
    )


def ranges(spec: ScaledLinearSpec, target: Target) -> list[tuple[ProblemShape, Any]]:
    """Ranges of rows for which a layer was measured to be faster than vLLM's, with the records' configurations."""
    if spec.batch_invariant:
        return []
    return tuned.ranges(TUNED_CONFIGS, target, lambda sm_count: problem_of(spec, sm_count))


def faster(spec: ScaledLinearSpec, target: Target) -> list[ProblemShape]:
    """Ranges of rows for which a layer was measured to be faster than vLLM's."""
    return [problem for problem, _ in ranges(spec, target)]


def config_of(spec: ScaledLinearSpec, rows: int, target: Target) -> tuple[ScaledLinearSpec, Config] | None:
    """The products and their configuration that a record has for so many rows; None where none fits."""
    for problem, config in ranges(spec, target):
        if not problem.holds(rows) or isinstance(config, Ours):
            continue
        products = spec.in_float32 if config.wide else spec
        found = plain(config)
        fits = not found.objections(products, target.smem_bytes) and runs_at_once(found, products, rows, target)
        if fits and (spec.may_be_quantised_beside or not config.wide):
            return products, found
    return None
