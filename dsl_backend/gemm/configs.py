# SPDX-License-Identifier: Apache-2.0
"""Which kernels an architecture has, and which one serves a problem: one table, asked by the target."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

from dsl_backend.gemm.cost import COSTS, SM90_RATES, SM100_RATES, ArchRates, Costs, estimated_us, runs_at_once
from dsl_backend.gemm.sm90 import configs as sm90
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import GemmSpec
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles
from dsl_backend.runtime.target import Target

Config = sm90.GemmConfig | sm90.SmallMConfig | sm90.SwapABConfig | sm100.GemmConfig | sm100.SmallMConfig


@dataclass(frozen=True)
class ArchKernels:
    """The GEMM kernels of an architecture.

    Attributes:
        package: has the modules `gemm`, with the class `Gemm`, and `small_m`, with `SmallMGemm`; SM90's has `swap_ab`,
            with `SwapABGemm`.
        small_m, gemms: configurations of either to choose among; stages are as many as fit.
        tried: more of them, for tuning.
        rates: of its GPUs, for the cost model.
        split_k: more for few rows, for products without an activation. gated_split_k: for those with one.
    """

    package: str
    small_m: tuple[Config, ...]
    gemms: tuple[Config, ...]
    tried: Callable[[], Iterator[Config]]
    rates: ArchRates
    split_k: tuple[Config, ...] = ()
    gated_split_k: tuple[Config, ...] = ()

    def kernel(self, config: Config) -> Any:
        """The class of a configuration's kernel. Imports CuTe DSL."""
        module, name = ("small_m", "SmallMGemm") if isinstance(config, SmallMTiles) else ("gemm", "Gemm")
        if isinstance(config, sm90.SwapABConfig):
            module, name = "swap_ab", "SwapABGemm"
        return getattr(import_module(f"{self.package}.{module}"), name)


# By `registry.Arch.kernel_arch`.
ARCH_KERNELS = {
    "sm90": ArchKernels(
        "dsl_backend.gemm.sm90",
        sm90.SMALL_M,
        (*sm90.GEMMS, *sm90.SWAP_AB),
        sm90.tried,
        SM90_RATES,
        split_k=sm90.SPLIT_K,
        gated_split_k=sm90.GATED_SPLIT_K,
    ),
    "sm100": ArchKernels(
        "dsl_backend.gemm.sm100",
        sm100.SMALL_M,
        sm100.GEMMS,
        sm100.tried,
        SM100_RATES,
        split_k=sm100.SPLIT_K,
        gated_split_k=sm100.GATED_SPLIT_K,
    ),
}
# Rows that the only kernel of a batch-invariant problem is chosen for.
INVARIANT_FOR = 1024
MOST_STAGES = 12
# Rows that candidates are chosen for; what is best in between is best for one of these, or nearly.
PROBED_ROWS = (*range(1, 65, 7), *range(64, 513, 16), *range(544, 1025, 32), *range(1536, 8193, 512))
# Rows of tiles that a tuned GEMM for few rows has at most.
MOST_M_TILES = 3


def arch_kernels(target: Target) -> ArchKernels:
    """The kernels of a target, which has some."""
    return target.by_kernel_arch(ARCH_KERNELS)


def deepest(tiles: Config, spec: GemmSpec, smem_bytes: int, most: int = MOST_STAGES) -> Config | None:
    """The configuration with as many stages as shared memory has room for; None where nothing makes it fit."""
    tried = (replace(tiles, stages=stages) for stages in range(most, 1, -1))
    return next((config for config in tried if not config.objections(spec, smem_bytes)), None)


def fitting(spec: GemmSpec, target: Target, *, gemms_alone: bool = False) -> list[Config]:
    """The target's configurations that fit a problem, each with as many stages as fit."""
    arch = arch_kernels(target)
    split_k = arch.split_k if spec.parts == 1 else arch.gated_split_k
    tiles = arch.gemms if gemms_alone else (*arch.small_m, *split_k, *arch.gemms)
    return [config for one in tiles if (config := deepest(one, spec, target.smem_bytes)) is not None]


@cache
def candidates(spec: GemmSpec, target: Target) -> tuple[Config, ...]:
    """All kernels that serve a problem for some number of rows; what is compiled before serving.

    Without a GPU these are the kernels of all usual parts of the architecture.

    Batch invariance leaves one: where stream-K splits a sum depends on the number of tiles.
    """
    found = fitting(spec, target, gemms_alone=spec.batch_invariant)
    probed = (INVARIANT_FOR,) if spec.batch_invariant else PROBED_ROWS
    # Split-K serves no problem for all rows: where SMs are spared its clusters may not run at once.
    always = [config for config in found if not isinstance(config, SmallMTiles) or config.stream_k]
    best = {
        min(group, key=lambda config: estimate_us(config, spec, rows, of_chip))
        for of_chip in (replace(target, chip=chip) for chip in target.chips)
        for rows in probed
        for group in (found, always)
        if group
    }
    return tuple(config for config in found if config in best)


def estimate_us(config: Config, spec: GemmSpec, rows: int, target: Target, costs: Costs = COSTS) -> float:
    """Microseconds of a launch, by the cost model."""
    return estimated_us(config, spec, rows, arch_kernels(target).rates.of(target.chips[0]), target, costs)


def choose(spec: GemmSpec, rows: int, target: Target) -> Config:
    """The kernel for so many rows: the candidate that the cost model finds fastest.

    Where SMs are spared, it is one of those for all of them: they have been compiled.
    """
    found = candidates(spec, target.sparing(0))
    return min(found, key=lambda config: estimate_us(config, spec, rows, target))


def variants(spec: GemmSpec, rows: int, target: Target) -> Iterator[Config]:
    """Configurations worth a measurement, with as many stages each as shared memory has room for, and with half."""
    arch = arch_kernels(target)
    fewest = min(tile.tile_tokens for tile in arch.small_m if isinstance(tile, SmallMTiles))
    seen = set()
    for tile in (*arch.small_m, *arch.split_k, *arch.gated_split_k, *arch.gemms, *arch.tried()):
        if not worth_trying(tile, rows, fewest) or not runs_at_once(tile, spec, rows, target):
            continue
        most = deepest(tile, spec, target.smem_bytes)
        for stages in () if most is None else (most.stages, max(2, most.stages // 2)):
            config = replace(tile, stages=stages)
            if config not in seen:
                seen.add(config)
                yield config


def worth_trying(tile: GemmTiles | SmallMTiles, rows: int, fewest: int) -> bool:
    """Whether a tile is neither much too small nor much too large for so many rows; `fewest`: of any tile's tokens."""
    if isinstance(tile, SmallMTiles):
        return rows <= MOST_M_TILES * tile.tile_tokens and tile.tile_tokens <= max(fewest, 4 * rows - 1)
    if isinstance(tile, sm90.SwapABConfig):
        return tile.fits(rows)
    return 2 * rows > tile.tile_m
