# SPDX-License-Identifier: Apache-2.0
"""Tiles of the CuTe DSL kernels of experts, and which of them serve how many tokens; needs no CuTe DSL."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.configs import arch_kernels, deepest
from dsl_backend.gemm.sizes import BLOCK_K, ceil_div
from dsl_backend.gemm.sm90.configs import GemmConfig
from dsl_backend.gemm.spec import Dtypes, GemmSpec
from dsl_backend.runtime.target import Target

# Architectures with these kernels.
KERNEL_ARCHS = ("sm90",)
# Pairs that a CTA sorts, unless there are more for each SM. Not measured.
SORTED_PAIRS = 4096
# Tiles to choose among, as many stages as fit; not measured. Those of 64 rows are for experts with few rows.
TILES = (
    GemmConfig(tile_m=128, box_n=128),
    *(GemmConfig(tile_m=64, box_n=box_n, pingpong=True) for box_n in (96, 64, 48, 32, 16)),
)
# Numbers of tokens that candidates are chosen for; what is best in between is best for one of these, or nearly.
PROBED_TOKENS = tuple(1 << i for i in range(18))
# Bytes that an SM loads in a ns at most, and what a tile takes beside its products, in ns. Not measured.
SM_RATE = 60.0
TILE_NS = 1000.0


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The kernels of a layer for some number of tokens.

    Attributes:
        first, second: tiles of the products, of equally many rows.
    """

    first: GemmConfig
    second: GemmConfig

    @property
    def tile_m(self) -> int:
        return self.first.tile_m

    def work_tiles(self, spec: ExpertsSpec, tokens: int) -> int:
        """Tiles of rows at most, whatever the routing is."""
        pairs = tokens * spec.topk
        return pairs // self.tile_m + min(spec.num_experts, pairs)

    def ctas(self, spec: ExpertsSpec, tokens: int, target: Target) -> tuple[int, int, int]:
        """CTAs of the routing, the first and the second product."""
        tiles, sms = self.work_tiles(spec, tokens), target.used_sms
        first, second = products(spec)
        return (
            min(ceil_div(tokens * spec.topk, SORTED_PAIRS), sms),
            min(tiles * ceil_div(first.n, self.first.columns(2)), sms),
            min(tiles * ceil_div(second.n, self.second.columns(1)), sms),
        )


@cache
def products(spec: ExpertsSpec) -> tuple[GemmSpec, GemmSpec]:
    """Both products as GEMMs; where there is a bias, or a scale, as with one."""
    dtypes, hidden, width = Dtypes.of(spec.dtype), spec.hidden_size, spec.intermediate_size
    first = GemmSpec(
        n=width, k=hidden, dtypes=dtypes, activation=spec.activation, interleaved=spec.interleaved, bias=True
    )
    return first, GemmSpec(n=hidden, k=width, dtypes=dtypes, bias=True)


def fitting(gemm: GemmSpec, target: Target) -> list[GemmConfig]:
    """Tiles that fit, each with as many stages as do."""
    found = (deepest(tiles, gemm, target.smem_bytes) for tiles in TILES)
    return [config for config in found if isinstance(config, GemmConfig)]


def estimated_ns(config: GemmConfig, gemm: GemmSpec, spec: ExpertsSpec, tokens: int, target: Target) -> float:
    """Of a product, tokens routed evenly: the CTA with the most tiles. From rates of dense GEMMs; not measured."""
    rates = arch_kernels(target).rates.of(target.chips[0])
    hit = spec.num_experts * (1 - (1 - min(spec.topk / spec.num_experts, 1)) ** tokens)
    rows = tokens * spec.topk / hit
    m_tiles = hit * ceil_div(int(rows + 0.999), config.tile_m)
    tiles = m_tiles * ceil_div(gemm.n, config.columns(gemm.parts))
    waves = ceil_div(int(tiles + 0.999), target.used_sms)
    active = min(tiles, target.used_sms)
    weights = config.weight_rows * BLOCK_K * gemm.dtypes.weight.itemsize
    x = min(rows, config.tile_m) * BLOCK_K * gemm.dtypes.x.itemsize
    flops = 2 * config.tile_m * config.weight_rows * BLOCK_K
    # Weights come from memory once for all tiles of rows of an expert.
    step = max(
        flops / rates.flops,
        (weights + x) / SM_RATE,
        (weights + x) * active / (rates.l2 * target.sm_count),
        weights * active * hit / m_tiles / (rates.memory * target.sm_count),
    )
    return waves * (ceil_div(gemm.k, BLOCK_K) * step + TILE_NS)


@cache
def pairs_of_tiles(spec: ExpertsSpec, target: Target) -> tuple[ExpertsConfig, ...]:
    """All that fit, of both products."""
    first, second = (fitting(gemm, target) for gemm in products(spec))
    return tuple(ExpertsConfig(first=a, second=b) for a in first for b in second if a.tile_m == b.tile_m)


def layer_ns(config: ExpertsConfig, spec: ExpertsSpec, tokens: int, target: Target) -> float:
    """Of both products."""
    tiles = zip((config.first, config.second), products(spec), strict=True)
    return sum(estimated_ns(one, gemm, spec, tokens, target) for one, gemm in tiles)


def best(configs: Iterable[ExpertsConfig], spec: ExpertsSpec, tokens: int, target: Target) -> ExpertsConfig:
    return min(configs, key=lambda config: layer_ns(config, spec, tokens, target))


@cache
def candidates(spec: ExpertsSpec, target: Target) -> tuple[ExpertsConfig, ...]:
    """The kernels of a layer for any number of tokens; what is compiled before serving. None where nothing fits."""
    found = pairs_of_tiles(spec, target)
    return tuple(dict.fromkeys(best(found, spec, tokens, target) for tokens in PROBED_TOKENS if found))


@cache
def choose(spec: ExpertsSpec, tokens: int, target: Target) -> ExpertsConfig:
    """The kernels for so many tokens, of the candidates; there are some."""
    return best(candidates(spec, target.sparing(0)), spec, tokens, target)
