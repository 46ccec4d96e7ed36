# SPDX-License-Identifier: Apache-2.0
"""Tiles of the CuTe DSL kernels of experts, and which of them serve how many tokens; needs no CuTe DSL."""

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.configs import arch_kernels, deepest
from dsl_backend.gemm.cost import GEMM, combined, small_m_ns
from dsl_backend.gemm.sizes import BLOCK_K, ceil_div
from dsl_backend.gemm.sm90 import configs as sm90
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import MOST, Dtypes, GemmSpec
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles
from dsl_backend.runtime.target import Target


class Kind(enum.Enum):
    """Kernels of a layer."""

    GROUPED = "grouped"  # routing, grouped GEMMs, and the sum over a token's experts
    DECODE = "decode"  # for few tokens: each chosen expert with all of them
    # As GROUPED, of more tiles: the second product's weights are requested early, and on SM90 products without rows are
    # left out. Taken by name alone: 1 to 3 % faster in two rows (H200), not timed in others.
    OVERLAPPED = "overlapped"


# What dispatch chooses among: timed at all sizes.
TIMED = (Kind.GROUPED, Kind.DECODE)


# Architectures with these kernels.
KERNEL_ARCHS = ("sm90", "sm100")
# Pairs that a CTA sorts, unless there are more for each SM. Not measured.
SORTED_PAIRS = 4096
# Tiles to choose among, as many stages as fit. Those of 64 rows are for experts with few rows.
TILES: dict[str, tuple[sm90.GemmConfig | sm100.GemmConfig, ...]] = {
    "sm90": (
        sm90.GemmConfig(tile_m=128, box_n=128),
        *(sm90.GemmConfig(tile_m=64, box_n=box_n, pingpong=True) for box_n in (96, 64, 48, 32, 16)),
    ),
    "sm100": tuple(sm100.GemmConfig(box_n=box_n) for box_n in (128, 96, 64, 32)),
}
# More of them, for OVERLAPPED; which of them is fastest has not been timed.
MORE_TILES: dict[str, tuple[sm90.GemmConfig | sm100.GemmConfig, ...]] = {
    "sm90": (
        *(sm90.GemmConfig(tile_m=128, box_n=box_n) for box_n in (120, 96)),
        *(sm90.GemmConfig(tile_m=tile_m, box_n=64, pingpong=True) for tile_m in (128, 192)),
        sm90.GemmConfig(tile_m=256, box_n=64),
    ),
    "sm100": (),
}
# One of them, of both products, is chosen among GROUPED's too: on an H200 a layer of Qwen3-30B-A3B with 2048 tokens
# took 462 us with it, and 543 with tiles of 64 rows. By this factor estimates of OVERLAPPED's products are too low
# beside GROUPED's; of 25 rows that were timed it is chosen in that one alone (docs/performance/experts.md).
TRIMMED = sm90.GemmConfig(tile_m=128, box_n=64, pingpong=True)
OVERLAPPED_COST = 1.11
# Rows of a block that is multiplied as a whole, or left out.
BLOCK = 64
# Numbers of tokens that candidates are chosen for; what is best in between is best for one of these, or nearly.
PROBED_TOKENS = tuple(1 << i for i in range(18))
# Fitted to 24 timings of grouped GEMMs and 15 of the kernels for few on an H100, of the benchmark's layers with 1 to
# 8192 tokens (docs/performance/experts.md); they are 5.2 % and 2.6 % off (root mean square).
# What a layer takes beside its products, in ns.
GROUPED_NS, DECODE_NS = 9500.0, 3500.0
# Of grouped GEMMs: the share of memory's rate; of an expert's n tiles of rows, n ** (1 - REUSED) read its weights from
# memory, as it were, and the others find them in the L2 cache.
GROUPED_MEMORY, REUSED = 0.94, 0.7
# So many tokens double the time of the kernels for few.
SLOWED_TOKENS = 1300
# Tokens that the kernels for few are for at most: with more of them products take longer than the weights.
DECODE_TOKENS = 128
# Bytes that a table in shared memory is aligned to.
TABLE_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The grouped GEMMs of a layer for some number of tokens.

    Attributes:
        first, second: tiles of the products, of equally many rows.
        prefetches: the second product requests the weights of its first stages before the first one has ended.
        trims: on SM90, blocks of a tile's rows that have no rows are not multiplied.
    """

    first: GemmTiles
    second: GemmTiles
    prefetches: bool = False
    trims: bool = False

    @property
    def tile_m(self) -> int:
        return self.first.tile_m

    def work_tiles(self, spec: ExpertsSpec, tokens: int) -> int:
        """Tiles of rows at most, whatever the routing is."""
        pairs = tokens * spec.slots
        return pairs // self.tile_m + min(spec.all_experts, pairs)

    def ctas(self, spec: ExpertsSpec, tokens: int, target: Target) -> tuple[int, int, int]:
        """CTAs of the routing, the first and the second product."""
        tiles, sms = self.work_tiles(spec, tokens), target.used_sms
        first, second = products(spec)
        return (
            min(ceil_div(tokens * spec.slots, SORTED_PAIRS), sms),
            min(tiles * ceil_div(first.n, self.first.columns(2)), sms),
            min(tiles * ceil_div(second.n, self.second.columns(1)), sms),
        )

    def serves(self, tokens: int) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The kernels of a layer for few tokens.

    Attributes:
        first, second: tiles of the products.
        prefetches: the second product requests weights before the first one has ended. It saved 3.1 to 3.5 us of a
            layer on an H100.
    """

    first: SmallMTiles
    second: SmallMTiles
    prefetches: bool = True

    @property
    def partials(self) -> int:
        """Float32 partial sums of a CTA."""
        return max(self.first.partials, self.second.partials)

    def ctas(self, spec: ExpertsSpec, tokens: int, target: Target) -> tuple[int]:
        """CTAs of each product."""
        return (target.used_sms,)

    def serves(self, tokens: int) -> bool:
        return tokens <= min(self.first.tile_tokens, self.second.tile_tokens)


Config = ExpertsConfig | DecodeConfig


def table_bytes(spec: ExpertsSpec, tiles: SmallMTiles) -> int:
    """Shared memory of the list of experts, of the pairs' experts and of the tokens' weights."""
    tokens = tiles.tile_tokens
    listed = min(spec.num_experts, tokens * spec.topk) + spec.shared_experts
    words = (spec.all_experts, listed, 1, tokens * spec.slots, *[tiles.groups * tokens] * 2)
    return sum(4 * count + TABLE_ALIGNMENT for count in words)


@cache
def products(spec: ExpertsSpec) -> tuple[GemmSpec, GemmSpec]:
    """Both products as GEMMs; the router's weight, where it is multiplied into the input, is like a bias."""
    dtypes, hidden, width = Dtypes.of(spec.dtype), spec.hidden_size, spec.intermediate_size
    bias = spec.w13_bias or spec.router_weights is RouterWeights.INPUT
    first = GemmSpec(
        n=width, k=hidden, dtypes=dtypes, activation=spec.activation, interleaved=spec.interleaved, bias=bias
    )
    return first, GemmSpec(n=hidden, k=width, dtypes=dtypes, bias=spec.w2_bias)


def fitting(gemm: GemmSpec, target: Target, more: bool = False) -> list[GemmTiles]:
    """Tiles that fit, each with as many stages as do; with `more` those that were not timed too."""
    tried = target.by_kernel_arch(TILES) + (target.by_kernel_arch(MORE_TILES) if more else ())
    found = (deepest(tiles, gemm, target.smem_bytes) for tiles in tried)
    return [config for config in found if isinstance(config, GemmTiles)]


def chosen_experts(spec: ExpertsSpec, tokens: int) -> float:
    """Experts with a token, on average, tokens routed evenly."""
    return spec.num_experts * (1 - (1 - min(spec.topk / spec.num_experts, 1)) ** tokens) + spec.shared_experts


@cache
def tiles_of_experts(spec: ExpertsSpec, tokens: int, tile_m: int) -> float:
    """Tiles of so many rows on average, tokens routed evenly: rows of an expert are binomial, here normal.

    Where they are a tile on average, half of the experts have a second tile. Shared experts have all tokens.
    """
    share = min(spec.topk / spec.num_experts, 1)
    rows = NormalDist(tokens * share, math.sqrt(max(tokens * share * (1 - share), 1e-9)))
    # More than j tiles' rows; the first one is what chosen experts have.
    more = (1 - rows.cdf(j * tile_m + 0.5) for j in range(1, ceil_div(tokens, tile_m) + 1))
    routed = chosen_experts(spec, tokens) - spec.shared_experts + spec.num_experts * sum(more)
    return routed + spec.shared_experts * ceil_div(tokens, tile_m)


def estimated_ns(
    config: GemmTiles, gemm: GemmSpec, spec: ExpertsSpec, tokens: int, target: Target, trims: bool = False
) -> float:
    """Of a product, tokens routed evenly, by the costs of dense GEMMs (`gemm.cost`)."""
    rates = arch_kernels(target).rates.of(target.chips[0])
    hit = chosen_experts(spec, tokens)
    m_tiles = tiles_of_experts(spec, tokens, config.tile_m)
    tiles = m_tiles * ceil_div(gemm.n, config.columns(gemm.parts))
    waves = max(tiles / target.used_sms, 1)
    active = min(tiles, target.used_sms)
    weights = config.weight_rows * BLOCK_K * gemm.dtypes.weight.itemsize
    x = tokens * spec.slots / m_tiles * BLOCK_K * gemm.dtypes.x.itemsize
    multiplied: float = config.tile_m
    if trims:
        multiplied = min(multiplied, BLOCK * tiles_of_experts(spec, tokens, BLOCK) / m_tiles)
    flops = 2 * multiplied * config.weight_rows * BLOCK_K
    step = combined(
        GEMM.power,
        flops / rates.flops + multiplied * GEMM.row_ns,
        (weights + x) * active / (rates.l2 * target.sm_count),
        weights * active * (hit / m_tiles) ** REUSED / (GROUPED_MEMORY * rates.memory * target.sm_count),
        GEMM.step_ns,
    )
    stored = config.tile_m * config.columns(gemm.parts) / GEMM.stored_per_ns
    return waves * ceil_div(gemm.k, BLOCK_K) * step + (1 if config.overlaps_epilogue else waves) * stored


@cache
def pairs_of_tiles(spec: ExpertsSpec, target: Target, overlapped: bool) -> tuple[ExpertsConfig, ...]:
    """All that fit, of both products."""
    first, second = (fitting(gemm, target, overlapped) for gemm in products(spec))
    return tuple(
        ExpertsConfig(first=a, second=b, prefetches=overlapped, trims=overlapped)
        for a in first
        for b in second
        if a.tile_m == b.tile_m
    )


def decode_ns(config: DecodeConfig, spec: ExpertsSpec, tokens: int, target: Target) -> float:
    """Of both products for few tokens, tokens routed evenly: as dense products with the weights of chosen experts.

    Dense ones were fitted to timings (`gemm.cost`).
    """
    rates = arch_kernels(target).rates.of(target.chips[0])
    hit = chosen_experts(spec, tokens)
    columns, tile_k = config.first.box, config.second.tile_k
    of_first = hit * ceil_div(spec.intermediate_size, columns) * columns
    of_second = hit * ceil_div(spec.intermediate_size, tile_k) * tile_k
    dtypes, hidden = Dtypes.of(spec.dtype), spec.hidden_size
    first = GemmSpec(n=min(int(of_first + 0.999), MOST // 2), k=hidden, dtypes=dtypes, activation=spec.activation)
    second = GemmSpec(n=hidden, k=min(int(of_second + 0.999), MOST), dtypes=dtypes)
    both = ((config.first, first), (config.second, second))
    return sum(small_m_ns(tiles, gemm, tokens, rates, target.used_sms) for tiles, gemm in both)


def layer_ns(config: Config, spec: ExpertsSpec, tokens: int, target: Target) -> float:
    """Of a layer's launches."""
    if isinstance(config, DecodeConfig):
        return decode_ns(config, spec, tokens, target) * (1 + tokens / SLOWED_TOKENS) + DECODE_NS
    tiles = zip((config.first, config.second), products(spec), strict=True)
    rates = arch_kernels(target).rates.of(target.chips[0])
    # Each expert's result is written, and read to be added up.
    summed = 2 * tokens * spec.slots * spec.hidden_size * spec.dtype.itemsize / (rates.memory * target.sm_count)
    both = sum(estimated_ns(one, gemm, spec, tokens, target, config.trims) for one, gemm in tiles)
    return both * (OVERLAPPED_COST if config.trims else 1.0) + summed + GROUPED_NS


@cache
def all_fitting(spec: ExpertsSpec, target: Target, kind: Kind) -> tuple[Config, ...]:
    """Configurations of a kind that fit; none where the target has no such kernels."""
    if target.kernel_arch not in KERNEL_ARCHS:
        return ()
    if kind in (Kind.GROUPED, Kind.OVERLAPPED):
        return pairs_of_tiles(spec, target, kind is Kind.OVERLAPPED)
    first, _ = products(spec)
    fit = (
        deepest(tiles, first, target.smem_bytes - table_bytes(spec, tiles))
        for tiles in arch_kernels(target).small_m
        if isinstance(tiles, SmallMTiles) and tiles.stream_k and tiles.tile_tokens <= DECODE_TOKENS
    )
    return tuple(DecodeConfig(first=one, second=one) for one in fit if isinstance(one, SmallMTiles))


def trimmed(spec: ExpertsSpec, target: Target) -> Iterator[Config]:
    """OVERLAPPED's that dispatch chooses among; none on SM100."""
    for config in all_fitting(spec, target, Kind.OVERLAPPED):
        assert isinstance(config, ExpertsConfig)
        tiles = {replace(one, stages=TRIMMED.stages) for one in (config.first, config.second)}
        if tiles == {TRIMMED}:
            yield config


def serving(spec: ExpertsSpec, tokens: int, target: Target, kind: Kind | None) -> Iterator[Config]:
    """Configurations of a kind, or of those that dispatch chooses among, that serve so many tokens."""
    for one in TIMED if kind is None else (kind,):
        yield from (config for config in all_fitting(spec, target, one) if config.serves(tokens))
    if kind is None:
        yield from trimmed(spec, target)


@cache
def candidates(spec: ExpertsSpec, target: Target, kind: Kind | None = None) -> tuple[Config, ...]:
    """The kernels of a layer for any number of tokens; what is compiled before serving. None where nothing fits."""
    found: dict[Config, None] = {}
    for tokens in PROBED_TOKENS:
        fitting_it = list(serving(spec, tokens, target, kind))
        if fitting_it:
            found[min(fitting_it, key=lambda config: layer_ns(config, spec, tokens, target))] = None
    return tuple(found)


@cache
def choose(spec: ExpertsSpec, tokens: int, target: Target, kind: Kind | None = None) -> Config:
    """The kernels for so many tokens, of the candidates; those for few tokens alone take up to DECODE_TOKENS."""
    found = [config for config in candidates(spec, target.sparing(0), kind) if config.serves(tokens)]
    return min(found, key=lambda config: layer_ns(config, spec, tokens, target))
