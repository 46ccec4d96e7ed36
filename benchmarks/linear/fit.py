# SPDX-License-Identifier: Apache-2.0
"""Fits the cost model of the GEMMs to timings: `python -m benchmarks.linear.fit FILE... --of gemm,split_k`.

Files are what `python -m benchmarks.linear.sweep --json` writes, of one GPU, or `benchmarks.linear.clocked` by the
emulator's clock. Before and after the fit it prints how much longer the estimate's choice takes than the fastest tile
of a row, and for each kind of kernel how far estimates are off; then the constants as `dsl_backend/gemm/cost.py` has
them. Tiles much slower than the fastest count less: what matters is the choice.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.configs import Config, arch_kernels
from dsl_backend.gemm.cost import COSTS, Costs, estimated_us
from dsl_backend.gemm.sm90 import configs as sm90
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import Dtypes, GemmSpec
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.runtime.target import Target, from_arch

# By `registry.Arch.kernel_arch`.
CONFIGS = {
    "sm90": (sm90.GemmConfig, sm90.SwapABConfig, sm90.SmallMConfig),
    "sm100": (sm100.GemmConfig, sm100.SmallMConfig),
}
# Constants of all kernels, by the name that they are chosen with.
SHARED = "rows"
SHARED_NAMES = ("row_of_64_ns", "row_of_32_ns", "row_of_16_ns")
KINDS = ("gemm", "swap_ab", "stream_k", "split_k", SHARED)
# Factors that a constant is tried with, until none is better.
STEPS = (1.3, 1.1, 1.03, 1.01)
# A tile that takes twice as long as the fastest counts for 2^-WEIGHT_POWER.
WEIGHT_POWER = 4


@dataclasses.dataclass(frozen=True)
class Timing:
    """A tile's time.

    Attributes:
        row: names the problem.
        us: microseconds. fastest_us: of the row's fastest tile.
    """

    row: str
    spec: GemmSpec
    rows: int
    config: Config
    us: float
    fastest_us: float = math.nan

    @property
    def kind(self) -> str:
        """The kernel: a field of `cost.Costs`."""
        if isinstance(self.config, SmallMTiles):
            return "stream_k" if self.config.stream_k else "split_k"
        return "swap_ab" if isinstance(self.config, sm90.SwapABConfig) else "gemm"

    @property
    def weight(self) -> float:
        return float((self.fastest_us / self.us) ** WEIGHT_POWER)

    def estimate_us(self, target: Target, costs: Costs) -> float:
        rates = arch_kernels(target).rates.of(target.chips[0])
        return estimated_us(self.config, self.spec, self.rows, rates, target, costs)


def timing_of(line: dict[str, Any], arch: str) -> Timing | None:
    """Of a sweep's line; None for kernels that are not ours.

    Args:
        arch: a key of CONFIGS.
    """
    kind = next((one for one in CONFIGS[arch] if one.__name__ == line["name"]), None)
    if kind is None:
        return None
    fields = {field.name: line[field.name] for field in dataclasses.fields(kind) if field.name in line}
    activation = Swiglu() if line["gated"] else None
    dtypes = Dtypes.of(getattr(torch, line["dtype"]))
    spec = GemmSpec(n=line["n"], k=line["k"], dtypes=dtypes, activation=activation)
    return Timing(line["row"], spec, line["m"], kind(**fields), line["us"])


def timings_of(lines: Iterable[str], arch: str = "sm90") -> list[Timing]:
    """Of the lines of a sweep, each with its row's fastest."""
    found = [one for line in lines if (one := timing_of(json.loads(line), arch)) is not None]
    fastest: dict[str, float] = {}
    for one in found:
        fastest[one.row] = min(one.us, fastest.get(one.row, math.inf))
    return [dataclasses.replace(one, fastest_us=fastest[one.row]) for one in found]


def error(timings: Sequence[Timing], target: Target, costs: Costs) -> float:
    """The weighted root mean square of estimates' relative errors; of those that are not infinite."""
    total = weights = 0.0
    for one in timings:
        estimate = one.estimate_us(target, costs)
        if math.isfinite(estimate):
            total += one.weight * math.log(estimate / one.us) ** 2
            weights += one.weight
    return math.sqrt(total / weights) if weights else 0.0


def regrets(timings: Sequence[Timing], target: Target, costs: Costs) -> dict[str, float]:
    """By row, how many times as long as the fastest the tile takes whose estimate is the least."""
    chosen: dict[str, tuple[float, float]] = {}
    for one in timings:
        found = (one.estimate_us(target, costs), one.us / one.fastest_us)
        chosen[one.row] = min(found, chosen.get(one.row, (math.inf, math.nan)))
    return {row: regret for row, (_, regret) in chosen.items()}


def scaled(costs: Costs, kind: str, name: str, factor: float) -> Costs:
    """With one constant multiplied."""
    if kind == SHARED:
        return dataclasses.replace(costs, **{name: getattr(costs, name) * factor})
    group = getattr(costs, kind)
    return dataclasses.replace(costs, **{kind: dataclasses.replace(group, **{name: getattr(group, name) * factor})})


def names_of(costs: Costs, kinds: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(kind, name) of all constants of some kinds."""
    for kind in kinds:
        names = SHARED_NAMES if kind == SHARED else [field.name for field in dataclasses.fields(getattr(costs, kind))]
        yield from ((kind, name) for name in names)


def fitted(timings: Sequence[Timing], target: Target, costs: Costs, kinds: Iterable[str]) -> Costs:
    """Costs with the least error, from constants that are changed one after another."""
    tried, best = list(names_of(costs, kinds)), error(timings, target, costs)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for (kind, name), factor in itertools.product(tried, (step, 1 / step)):
                candidate = scaled(costs, kind, name, factor)
                found = error(timings, target, candidate)
                if found < best - 1e-6:
                    costs, best, improved = candidate, found, True
    return costs


def describe(title: str, timings: Sequence[Timing], target: Target, costs: Costs) -> None:
    """Prints errors by kind, and what the choice costs."""
    found = sorted(regrets(timings, target, costs).items(), key=lambda item: -item[1])
    mean = sum(regret for _, regret in found) / len(found)
    print(f"{title}: the choice takes {100 * (mean - 1):.1f} % longer than the fastest, of {len(found)} rows")
    print("  most:", ", ".join(f"{row} {regret:.2f}x" for row, regret in found[:6]))
    for kind in sorted({one.kind for one in timings}):
        of_kind = [one for one in timings if one.kind == kind]
        print(f"  {kind}: {len(of_kind)} timings, {100 * error(of_kind, target, costs):.1f} % off")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear.fit", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--arch", default="sm_90a", help="the GPUs' (default: sm_90a)")
    parser.add_argument("--memory-gb-s", type=int, default=3352, help="of the chip that was timed (default: an H100's)")
    parser.add_argument("--of", default=",".join(KINDS), help=f"constants to fit, of {', '.join(KINDS)}; empty: none")
    given = parser.parse_args()
    kinds = [kind for kind in given.of.split(",") if kind]
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"--of has {kind}: {', '.join(KINDS)} are possible")
    parts = from_arch(given.arch)
    chip = min(parts.chips, key=lambda one: abs(one.memory_gb_s - given.memory_gb_s))
    target = dataclasses.replace(parts, chip=chip, gpu="timed")
    lines = (line for file in given.files for line in file.read_text().splitlines())
    timings = timings_of(lines, str(target.kernel_arch))
    describe("before", timings, target, COSTS)
    costs = fitted(timings, target, COSTS, kinds)
    describe("after", timings, target, costs)
    print(costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
