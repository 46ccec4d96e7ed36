# SPDX-License-Identifier: Apache-2.0
"""A model of the kernels' time: the CTA with the most work at a GPU's rates, and what does not overlap with it."""

import math
from dataclasses import dataclass

from dsl_backend.gemm.sizes import BLOCK_BYTES, TAIL_ROWS, ceil_div
from dsl_backend.gemm.spec import GemmSpec
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles, block_k
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import Target


@dataclass(frozen=True)
class Rates:
    """A GPU's rates, for each of its SMs.

    Attributes:
        memory, l2: bytes in a nanosecond; what idle SMs do not use, the others get.
        flops: 16-bit operations in a nanosecond.
    """

    memory: float
    l2: float
    flops: float


@dataclass(frozen=True)
class ArchRates:
    """The rates of an architecture's GPUs, of which each says its bandwidth, its clock and its SMs.

    Attributes:
        memory: the share of the stated bandwidth.
        l2: bytes of an SM in a clock.
        flops: 16-bit operations of an SM in a clock; clocks are lower while they run.
    """

    memory: float
    l2: float
    flops: float

    def of(self, chip: Chip) -> Rates:
        """Of a GPU."""
        clocks = chip.clock_mhz / 1000
        return Rates(self.memory * chip.memory_gb_s / chip.sm_count, self.l2 * clocks, self.flops * clocks)


# Fitted to 2,658 timings on an H200, and kept near a fit to 5,700 of other H200s: gated layers of eight sizes, parts of
# a model's on 2 to 8 GPUs among them, with 8 to 512 rows here and 16 to 1024 there. Tiles near the best are predicted
# to 7 % (standard deviation), and what is picked takes 1.3 % longer on average than the best
# (docs/performance/linear.md). On an H200 these are 34.42, 104.4 and 5770 of `Rates`.
SM90_RATES = ArchRates(memory=0.9439, l2=52.73, flops=2914.0)
# From public figures of a B200 (8 TB/s and 2250 TFLOP/s on 148 SMs): nothing was timed there.
SM100_RATES = ArchRates(memory=1.0, l2=102.8, flops=7735.0)


@dataclass(frozen=True, kw_only=True)
class GemmCosts:
    """What a persistent GEMM reaches of a GPU's rates, and what does not follow from them.

    Attributes:
        power: how causes of a k tile's time add up; see `combined`.
        flops, l2: shares of these rates.
        outside: the share of their products' time that rows beyond the end of x take: zeros need less power.
        row_ns: what a k tile takes beyond its products for each row of wgmma's M.
        step_ns, cluster_step_ns: the least that a k tile takes, alone and in a cluster.
        copy_ns: of one of its TMA copies.
        stored_per_ns: elements that a CTA stores in a nanosecond.
        launch_ns: the rest of a launch.
        handed_ns: of a tile whose k is divided among CTAs, what they hand each other.
    """

    power: float
    flops: float = 1.0
    l2: float = 1.0
    outside: float = 1.0
    row_ns: float
    step_ns: float
    cluster_step_ns: float
    copy_ns: float
    stored_per_ns: float
    launch_ns: float
    handed_ns: float = 1500.0


@dataclass(frozen=True, kw_only=True)
class StreamKCosts:
    """The same of the GEMM for few rows.

    Attributes:
        power: how causes of a k tile's time add up: about the slowest one, and more where another is about as slow.
        flops: the share of the rate of products, which are small.
        x_faster: how much faster than weights x comes.
        partials_ns, awaited_ns: what 1024 bytes of partial sums take that a CTA stores, and those of another CTA that
            it waits for.
        launch_ns: the rest of a launch.
    """

    power: float
    flops: float
    x_faster: float
    partials_ns: float
    awaited_ns: float
    launch_ns: float


@dataclass(frozen=True, kw_only=True)
class SplitKCosts:
    """What differs from these with split-K.

    Attributes:
        power: how a k tile's bytes and products, and the least that it takes, add up.
        step_ns: the least that a k tile takes.
        latency_ns: what a k tile takes from its copy to its use, of which as many are on the way as there are stages
            but one.
        received_ns: what 1024 bytes of partial sums take through distributed shared memory.
        launch_ns: the rest of a launch.
    """

    power: float
    step_ns: float
    latency_ns: float
    received_ns: float
    launch_ns: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of all kernels; `benchmarks.linear.fit` fits them to timings.

    Attributes:
        gemm, swap_ab: the persistent GEMM, and with swapped operands.
        stream_k, split_k: the GEMM for few rows.
        row_of_64_ns, row_of_32_ns, row_of_16_ns: time of a k tile for each row of 128 bytes of x or weights that one SM
            loads, if the matrix's rows begin at multiples of 64, 32 or 16 bytes, but not of 128.
    """

    gemm: GemmCosts
    swap_ab: GemmCosts
    stream_k: StreamKCosts
    split_k: SplitKCosts
    row_of_64_ns: float
    row_of_32_ns: float
    row_of_16_ns: float


GEMM = GemmCosts(
    power=4.16,
    row_ns=0.3,
    step_ns=176.0,
    cluster_step_ns=181.0,
    copy_ns=38.4,
    stored_per_ns=10.73,
    launch_ns=2000.0,
)
# Fitted to 252 timings of 26 layers with 72 to 2000 rows on an H100: 5.3 % off; the rest of a launch, here and above,
# was set by hand after a fit to 362 later ones, so that 188 rows of 2x3584 keep their tile
# (docs/performance/linear.md).
_SWAP_AB = GemmCosts(
    power=3.425,
    flops=1.069,
    l2=0.909,
    outside=0.727,
    row_ns=0.074,
    step_ns=176.0,
    cluster_step_ns=200.0,
    copy_ns=45.4,
    stored_per_ns=5.225,
    launch_ns=800.0,
)
_STREAM_K = StreamKCosts(power=7.0, flops=0.862, x_faster=9.77, partials_ns=71.2, awaited_ns=22.8, launch_ns=1440.0)
# Fitted to 167 timings on an H100, of gated layers with 17 to 251 rows and products with 1 to 64: 8 % off.
_SPLIT_K = SplitKCosts(power=2.59, step_ns=20.0, latency_ns=1324.0, received_ns=39.2, launch_ns=1328.0)
# The last three are fitted to these: 70 rows of 2x2240 took 8.8 us with 1728 columns, 10.1 with 1760, 10.7 with 1744,
# and 12.0 to 13.9 with 1736.
COSTS = Costs(
    gemm=GEMM,
    swap_ab=_SWAP_AB,
    stream_k=_STREAM_K,
    split_k=_SPLIT_K,
    row_of_64_ns=0.77,
    row_of_32_ns=0.92,
    row_of_16_ns=1.27,
)
# The share of memory's rate that a persistent GEMM reaches; what a row of a TMA copy beyond the end of x takes.
GEMM_MEMORY, OUTSIDE_NS = 0.91, 2.5
# The part of the SMs that clusters of 4 or 8 fill for sure: GPCs differ in their SMs. On an H100 with 132, 28 clusters
# of 4 ran at once, and 32 did not: 4096 x 4096 took 16.9 us with 32 clusters of 4, and 12.9 with 32 of 2.
CLUSTERED = 0.875
# The SMs of most GPCs: 18 clusters of 6, of which two fit into each, took two turns.
GPC_SMS = 16


def max_ctas(config: GemmTiles | SmallMTiles, rows: int, target: Target) -> int:
    """CTAs that the target runs at once: whole clusters, or for few rows equally many for each row of tiles."""
    if isinstance(config, SmallMTiles) and config.stream_k:
        m_tiles = ceil_div(rows, config.tile_tokens)
        return target.used_sms // m_tiles * m_tiles or target.used_sms
    if isinstance(config, SmallMTiles) and config.num_splits > 2:
        filled = GPC_SMS // config.num_splits * config.num_splits / GPC_SMS
        return max(int(CLUSTERED * filled * target.used_sms) // config.num_splits, 1) * config.num_splits
    cluster = config.num_splits if isinstance(config, SmallMTiles) else config.cluster
    cluster *= 1 if isinstance(config, SmallMTiles) else config.k_parts
    return max(target.used_sms // cluster, 1) * cluster


def runs_at_once(config: GemmTiles | SmallMTiles, spec: GemmSpec, rows: int, target: Target) -> bool:
    """Whether a launch needs no more CTAs than the target runs at once: split-K has a cluster for each tile."""
    if not isinstance(config, SmallMTiles) or config.stream_k:
        return True
    return config.tiles(spec, rows) * config.num_splits <= max_ctas(config, rows, target)


def estimated_us(
    config: GemmTiles | SmallMTiles, spec: GemmSpec, rows: int, rates: Rates, target: Target, costs: Costs = COSTS
) -> float:
    """Microseconds of a launch; infinite where its clusters do not run at once."""
    if not runs_at_once(config, spec, rows, target):
        return math.inf
    ctas = max_ctas(config, rows, target)
    if isinstance(config, SmallMTiles) and not config.stream_k:
        return split_k_ns(config, spec, rows, rates, target.sm_count, costs) / 1000
    if isinstance(config, SmallMTiles):
        return small_m_ns(config, spec, rows, rates, ctas, costs) / 1000
    return gemm_ns(config, spec, rows, rates, target.sm_count, ctas, costs) / 1000


def combined(power: float, *causes_ns: float) -> float:
    """Time of concurrent causes: that of the slowest, or more if several are about as slow."""
    return float(sum(cause**power for cause in causes_ns) ** (1 / power))


def flops_of(rates: Rates, spec: GemmSpec) -> float:
    """Operations on x's elements: tensor cores do twice as many in 8 bits. No kernel in 8 bits was timed yet."""
    return rates.flops * 2 / spec.dtypes.x.itemsize


def copied_rows_ns(spec: GemmSpec, rows: float, tile_k: int, paired: bool, costs: Costs) -> float:
    """A lower bound of the time in which an SM loads `rows` rows of a k tile; `paired`: both SMs of a TPC load them.

    If a matrix's rows do not begin at multiples of 128 bytes, 128 bytes of a row lie in two lines of the L2 cache. If
    they do not begin at multiples of 32 bytes, they lie in five sectors instead of four.
    """
    pitch, bytes_of_row = spec.k * spec.dtypes.x.itemsize, tile_k * spec.dtypes.x.itemsize
    by_alignment = ((128, 0.0), (64, costs.row_of_64_ns), (32, costs.row_of_32_ns), (1, costs.row_of_16_ns))
    row_ns = next(ns for alignment, ns in by_alignment if pitch % alignment == 0)
    return rows * row_ns * bytes_of_row / BLOCK_BYTES * (2 if paired else 1)


def iteration_ns(config: SmallMTiles, spec: GemmSpec, rates: Rates, memory: float, paired: bool, costs: Costs) -> float:
    """Of a k tile of the GEMM for few rows; `memory`: bytes that a CTA reads in a nanosecond."""
    stream_k = costs.stream_k
    weight_bytes, x_bytes = spec.dtypes.weight.itemsize, spec.dtypes.x.itemsize
    bytes_read = (2 * config.box * weight_bytes + config.tile_tokens * x_bytes / stream_k.x_faster) * config.tile_k
    flops = 2 * 2 * config.box * config.tile_tokens * config.tile_k
    products_ns = flops / (stream_k.flops * flops_of(rates, spec))
    rows_ns = copied_rows_ns(spec, 2 * config.box + config.tile_tokens, config.tile_k, paired, costs)
    return combined(stream_k.power, bytes_read / memory, products_ns, rows_ns)


def split_k_ns(config: SmallMTiles, spec: GemmSpec, rows: int, rates: Rates, sms: int, costs: Costs = COSTS) -> float:
    """Of the GEMM for few rows with a cluster for each tile, all at once."""
    active = config.tiles(spec, rows) * config.num_splits
    iterations = ceil_div(ceil_div(spec.k, config.tile_k), config.num_splits)
    # What idle SMs do not read, the others do, until k tiles follow one another as fast as they can.
    streamed_ns = iteration_ns(config, spec, rates, rates.memory * sms / active, 2 * active > sms, costs)
    split_k = costs.split_k
    latency_ns = split_k.latency_ns / (config.stages - 1)
    products_ns = iterations * combined(split_k.power, streamed_ns, split_k.step_ns, latency_ns)
    return products_ns + split_k.launch_ns + split_k.received_ns * config.partials * 4 / 1024


def small_m_ns(config: SmallMTiles, spec: GemmSpec, rows: int, rates: Rates, ctas: int, costs: Costs = COSTS) -> float:
    """Of the GEMM for few rows with stream-K."""
    k_tiles = ceil_div(spec.k, config.tile_k)
    # k tiles of a CTA.
    iterations = ceil_div(config.tiles(spec, rows) * k_tiles, ctas)
    # A tile with more k tiles than a CTA has is summed up from several CTAs' partial sums, at the end.
    stream_k = costs.stream_k
    fixup_ns = stream_k.partials_ns + (stream_k.awaited_ns * k_tiles / iterations if k_tiles > iterations else 0)
    products_ns = iterations * iteration_ns(config, spec, rates, rates.memory, True, costs)
    return products_ns + stream_k.launch_ns + fixup_ns * config.partials * 4 / 1024


def tail_copies_ns(config: GemmTiles, rows: int, copy_ns: float) -> float:
    """Of the copies of a k tile of x's last tile, and of both boxes of weights."""
    if not config.tail_boxes:
        return 3 * copy_ns + -rows % config.tile_m * OUTSIDE_NS
    boxes = ceil_div(rows % config.tile_m, TAIL_ROWS)
    return copy_ns * (2 + (boxes if 0 < boxes * TAIL_ROWS < config.tile_m else 1))


def gemm_ns(
    config: GemmTiles, spec: GemmSpec, rows: int, rates: Rates, sms: int, ctas: int, all_costs: Costs = COSTS
) -> float:
    """Of the persistent GEMM."""
    costs = all_costs.swap_ab if config.swaps_operands else all_costs.gemm
    m_tiles = ceil_div(rows, config.tile_m * config.cluster)
    together, clusters = config.tiles_together(spec), ctas // (config.cluster * config.k_parts)
    tiles = m_tiles * ceil_div(spec.n, config.columns(spec.parts) * together)
    waves = ceil_div(tiles, clusters)
    tile_k = block_k(spec.dtypes)
    box_bytes = 2 * config.box_n * tile_k * spec.dtypes.weight.itemsize
    x_bytes = config.tile_m * tile_k * spec.dtypes.x.itemsize
    inside = rows / (m_tiles * config.tile_m * config.cluster)
    flops = 2 * config.tile_m * 2 * config.box_n * tile_k * (inside + (1 - inside) * costs.outside)
    copies_ns = tail_copies_ns(config, rows, costs.copy_ns)
    rows_copied = min(config.tile_m, rows) + 2 * config.box_n / config.cluster

    def step_ns(active: int) -> float:
        """Of a k tile while so many clusters run."""
        running = active * config.k_parts
        return combined(
            costs.power,
            flops / (costs.flops * flops_of(rates, spec)) + config.mma_rows * costs.row_ns,
            # A cluster reads its weights once.
            (x_bytes + box_bytes / config.cluster) * running * config.cluster / (costs.l2 * rates.l2 * sms),
            # Tiles of a column have the same weights.
            box_bytes * max(running / m_tiles, 1) / (GEMM_MEMORY * rates.memory * sms),
            costs.step_ns if config.cluster == 1 else costs.cluster_step_ns,
            copies_ns,
            copied_rows_ns(spec, rows_copied, tile_k, 2 * running * config.cluster > sms, all_costs),
        )

    last = tiles - (waves - 1) * clusters
    k_tiles = ceil_div(ceil_div(spec.k, tile_k), config.k_parts)
    products_ns = k_tiles * together * ((waves - 1) * step_ns(clusters) + step_ns(last))
    # All weights come from memory once.
    weights_ns = spec.weight_rows * spec.k * spec.dtypes.weight.itemsize / (GEMM_MEMORY * rates.memory * sms)
    epilogues = 1 if config.overlaps_epilogue else waves * together
    stored_ns = epilogues * config.tile_m * config.columns(spec.parts) / costs.stored_per_ns
    handed_ns = costs.handed_ns * waves if config.k_parts > 1 else 0
    return max(products_ns, weights_ns) + stored_ns + costs.launch_ns + handed_ns
