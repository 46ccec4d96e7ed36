# SPDX-License-Identifier: Apache-2.0
"""Tiles, stages and clusters of the CuTe DSL kernels."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from dsl_backend.gemm.sizes import BLOCK_K, ELEMENT_BYTES, PIECE, WARPGROUP, ceil_div
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.small_m_tiles import StreamTiles
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target

GROUPS = 2  # consumer warp groups of the GEMM kernel
MMA_M = 64  # rows of wgmma
REGISTERS_PER_SM = 64 * 1024
# setmaxnreg: what consumers take, of which some are addresses and the epilogue's.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
# With less to spare, ptxas spilled 16 to 200 bytes where there is a bias or a residual.
SPARE_REGISTERS, EXTRAS_REGISTERS = 40, 24


@dataclass(frozen=True)
class Rates:
    """What `estimate_us` knows of a GPU, for each of its SMs.

    Attributes:
        memory, l2: bytes in a nanosecond; what some SMs leave, others have.
        flops: 16-bit operations in a nanosecond.
    """

    memory: float
    l2: float
    flops: float


# Fitted to 2,658 timings on an H200, and kept near a fit to 5,700 of other H200s: gated layers of eight sizes, parts of
# a model's on 2 to 8 GPUs among them, with 8 to 512 rows here and 16 to 1024 there. Tiles near the best are predicted
# to 7 % (standard deviation), and what is picked takes 1.3 % longer on average than the best (docs/performance.md).
SM90_RATES = Rates(memory=35.16, l2=104.4, flops=5770.0)
# By public figures of a B200 (8 TB/s and 2250 TFLOP/s on 148 SMs): nothing was timed there.
SM100_RATES = Rates(memory=54.0, l2=202.0, flops=15200.0)
# Many rows: memory's share of its rate; what a step of products takes beyond them for a row of its tile; the least that
# a step takes, alone and in a cluster; what one of its copies takes; elements that a block stores in a nanosecond; the
# rest of a launch.
GEMM_MEMORY, STEP_NS_PER_ROW, STORED_PER_NS, GEMM_NS = 0.91, 0.3, 10.73, 1409.0
STEP_NS, CLUSTER_STEP_NS, COPY_NS = 176.0, 181.0, 38.4
# Few rows: the rate of products, which are small; how much faster than weights x comes; what 1024 bytes of partial sums
# take that a block hands over, and those of another that it waits for; the rest.
STREAM_FLOPS, X_FASTER, PARTIALS_NS, AWAITED_NS, STREAM_NS = 0.862, 9.77, 71.2, 22.8, 1440.0
# How causes of a step add up: about the slowest one, and more where another is about as slow.
GEMM_POWER, STREAM_POWER = 4.16, 7.0


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """The kernel for many rows: persistent blocks with a producer and two consumer warp groups.

    Weights of a tile are two boxes of `box_n` rows: gate and up rows of the same columns, or neighbours.

    Attributes:
        tile_m: rows of x; 64 or a multiple.
        pingpong: consumers take turns at whole tiles, one's epilogue under the other's products; else they share tiles.
        cluster: blocks above each other that share the weights: 1 or 2, each of two loads a box for both.
        band: tiles of a band of the raster.
    """

    tile_m: int = 128
    box_n: int = 128
    stages: int = 4
    pingpong: bool = False
    cluster: int = 1
    band: int = 8

    @property
    def overlaps(self) -> bool:
        """Whether a tile is stored under the next one's products."""
        return self.pingpong

    @property
    def rows(self) -> int:
        """Of a consumer's accumulators."""
        return self.tile_m if self.pingpong else self.tile_m // GROUPS

    @property
    def repeats(self) -> int:
        """Blocks of wgmma's rows among them."""
        return self.rows // MMA_M

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread."""
        return self.rows * 2 * self.box_n // WARPGROUP

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + 2 * self.box_n) * BLOCK_K * ELEMENT_BYTES

    def columns(self, parts: int) -> int:
        """Of the output, in a tile."""
        return 2 * self.box_n // parts

    def smem_bytes(self, parts: int) -> int:
        """Stages, an output buffer of 64 rows for each consumer, barriers, alignment."""
        out = GROUPS * MMA_M * self.columns(parts) * ELEMENT_BYTES
        return self.stages * (self.stage_bytes + 16) + out + 1024

    def objections(self, spec: LinearSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot be run so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if self.tile_m < MMA_M or self.tile_m % MMA_M or self.rows % MMA_M:
            reasons.append(f"tile_m {self.tile_m}: each consumer needs a multiple of {MMA_M} rows")
        if not 16 <= self.box_n <= 128 or self.box_n % 8:
            reasons.append(f"box_n {self.box_n} is not a multiple of 8 from 16 to 128")
        if self.stages < 2:
            reasons.append(f"{self.stages} stages: 2 are the least")
        if self.cluster not in (1, 2):
            reasons.append(f"clusters of {self.cluster} blocks: 1 or 2 are possible")
        if self.band < 1:
            reasons.append(f"band {self.band} is not positive")
        most = CONSUMER_REGISTERS - SPARE_REGISTERS - (EXTRAS_REGISTERS if spec.bias or spec.residual else 0)
        if self.accumulators > most:
            reasons.append(f"{self.accumulators} accumulators a thread: {most} are the most")
        if self.smem_bytes(spec.parts) > smem_bytes:
            reasons.append(f"{self.smem_bytes(spec.parts)} bytes of shared memory: {smem_bytes} are the most")
        return reasons


@dataclass(frozen=True, kw_only=True)
class StreamConfig(StreamTiles):
    """The kernel for few rows: weights are wgmma's rows, and every block reads an equal share of all of them.

    A tile's weights are two boxes of rows: gate and up rows of the same columns, or neighbours.

    Attributes:
        tokens: rows of x that a consumer multiplies with; a multiple of 8 up to 128. A tile has 8 or a multiple of 16.
        groups: consumer warp groups, 1 or 2.
        split_tokens: two consumers have the same weights and tokens of their own, instead of the reverse.
    """

    groups: int = 1
    split_tokens: bool = False
    stages: int = 10

    @property
    def box(self) -> int:
        """Rows of weights of a box."""
        return MMA_M if self.split_tokens else MMA_M * self.groups

    @property
    def tile_tokens(self) -> int:
        """Rows of x of a block's tile."""
        return self.tokens * self.groups if self.split_tokens else self.tokens

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread; also float32 partial sums that it hands over."""
        return 2 * MMA_M * self.tokens // WARPGROUP

    @property
    def trades_registers(self) -> bool:
        """Whether consumers need more registers than an equal share, which setmaxnreg moves between warp groups."""
        return self.groups > 1 and self.accumulators > 96

    @property
    def threads(self) -> int:
        """Of a block: consumers, and a producer's warp, which is a whole group where registers are traded."""
        return self.groups * WARPGROUP + (WARPGROUP if self.trades_registers else 32)

    def objections(self, spec: LinearSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot be run so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if not 8 <= self.tokens <= 128 or self.tokens % 8:
            reasons.append(f"{self.tokens} tokens are not a multiple of 8 up to 128")
        # CuTe DSL 4.6.0 aborts the process while it compiles copies of 24 or 40 rows.
        if self.tile_tokens != 8 and self.tile_tokens % 16:
            reasons.append(f"{self.tile_tokens} rows of a tile are neither 8 nor a multiple of 16")
        if self.groups not in (1, 2):
            reasons.append(f"{self.groups} consumers: 1 or 2 are possible")
        if self.split_tokens and self.groups == 1:
            reasons.append("one consumer has no tokens to split")
        return reasons + self.stage_objections(smem_bytes)


Streams = StreamConfig | sm100.StreamConfig
Gemms = GemmConfig | sm100.GemmConfig
Config = Gemms | Streams
# Rows that the only kernel of a batch-invariant layer is chosen for.
INVARIANT_FOR = 1024
MOST_STAGES = 12
# Tiles, with as many stages as fit; where x is small, 256 bytes of weights at a time. The best of all that were timed
# on an H200 is 1 % faster on average than the best of these (docs/performance.md).
STREAMS = (
    *(StreamConfig(tokens=tokens, tile_k=128) for tokens in (8, 16, 32)),
    *(StreamConfig(tokens=tokens, groups=2, split_tokens=True) for tokens in range(32, 113, 8)),
)
GEMMS = (
    GemmConfig(tile_m=128, box_n=128, cluster=2),
    GemmConfig(tile_m=128, box_n=112, cluster=2),
    *(GemmConfig(tile_m=128, box_n=box_n, cluster=2, pingpong=True) for box_n in (96, 88, 80, 72, 56)),
    *(GemmConfig(tile_m=128, box_n=box_n, pingpong=True) for box_n in (88, 72, 64, 56, 48)),
    *(GemmConfig(tile_m=64, box_n=box_n, pingpong=True) for box_n in (112, 88, 64, 56, 48)),
    GemmConfig(tile_m=64, box_n=64, cluster=2, pingpong=True),
    GemmConfig(tile_m=192, box_n=56, pingpong=True),
    GemmConfig(tile_m=256, box_n=64, cluster=2),
)
# Rows that candidates are chosen for; what is best in between is best for one of these, or nearly.
PROBED_ROWS = (*range(1, 65, 7), *range(64, 1025, 32), *range(1536, 8193, 512))


def tiles_of(target: Target) -> tuple[tuple[Streams, ...], tuple[Gemms, ...]]:
    """The tiles of a target's kernels for few rows, and of those for many."""
    tiles: dict[str, tuple[tuple[Streams, ...], tuple[Gemms, ...]]] = {
        "sm90": (STREAMS, GEMMS),
        "sm100": (sm100.STREAMS, sm100.GEMMS),
    }
    return target.by_kernel_arch(tiles)


def deepest(tiles: Config, spec: LinearSpec, smem_bytes: int) -> Config | None:
    """The configuration with as many stages as shared memory has room for; None where nothing makes it fit."""
    tried = (replace(tiles, stages=stages) for stages in range(MOST_STAGES, 1, -1))
    return next((config for config in tried if not config.objections(spec, smem_bytes)), None)


def fitting(spec: LinearSpec, target: Target, *, gemms_alone: bool = False) -> list[Config]:
    """The target's tiles that fit a problem, as deep as they do."""
    streams, gemms = tiles_of(target)
    tiles = gemms if gemms_alone else (*streams, *gemms)
    return [config for one in tiles if (config := deepest(one, spec, target.smem_bytes)) is not None]


@cache
def candidates(spec: LinearSpec, target: Target) -> tuple[Config, ...]:
    """All kernels that serve a problem for some number of rows; what is compiled before serving.

    Batch invariance leaves one: shares of a list of work begin elsewhere where there is more of it.
    """
    found = fitting(spec, target, gemms_alone=spec.batch_invariant)
    probed = (INVARIANT_FOR,) if spec.batch_invariant else PROBED_ROWS
    best = {min(found, key=lambda config: estimate_us(config, spec, rows, target)) for rows in probed if found}
    return tuple(config for config in found if config in best)


def blocks_of(config: Config, rows: int, target: Target) -> int:
    """Thread blocks that the target runs at once: whole clusters, and of a stream as many for each row of tiles."""
    if isinstance(config, Streams):
        above = ceil_div(rows, config.tile_tokens)
        return target.used_sms // above * above or target.used_sms
    return max(target.used_sms // config.cluster, 1) * config.cluster


def estimate_us(config: Config, spec: LinearSpec, rows: int, target: Target) -> float:
    """Time by arithmetic: the longest share of work at a GPU's rates, and what does not overlap with it."""
    rates = target.by_kernel_arch({"sm90": SM90_RATES, "sm100": SM100_RATES})
    if isinstance(config, Streams):
        return stream_ns(config, spec, rows, rates, blocks_of(config, rows, target)) / 1000
    return gemm_ns(config, spec, rows, rates, target.sm_count, blocks_of(config, rows, target)) / 1000


def together(power: float, *causes_ns: float) -> float:
    """What causes take of which the slowest decides, or several that are about as slow."""
    return float(sum(cause**power for cause in causes_ns) ** (1 / power))


def stream_ns(config: Streams, spec: LinearSpec, rows: int, rates: Rates, blocks: int) -> float:
    """Of a kernel for few rows."""
    of_tile = ceil_div(spec.k, config.tile_k)
    items = ceil_div(config.tiles(spec, rows) * of_tile, blocks)
    bytes_read = (2 * config.box + config.tile_tokens / X_FASTER) * config.tile_k * ELEMENT_BYTES
    flops = 2 * 2 * config.box * config.tile_tokens * config.tile_k
    item_ns = together(STREAM_POWER, bytes_read / rates.memory, flops / (STREAM_FLOPS * rates.flops))
    # A tile that is longer than a share has its sums from several blocks, at the end.
    sums_ns = PARTIALS_NS + (AWAITED_NS * of_tile / items if of_tile > items else 0)
    return items * item_ns + STREAM_NS + sums_ns * config.partials * 4 / 1024


def gemm_ns(config: Gemms, spec: LinearSpec, rows: int, rates: Rates, sms: int, blocks: int) -> float:
    """Of a kernel for many rows."""
    height = ceil_div(rows, config.tile_m * config.cluster)
    tiles, clusters = height * ceil_div(spec.n, config.columns(spec.parts)), blocks // config.cluster
    waves = ceil_div(tiles, clusters)
    box_bytes = 2 * config.box_n * BLOCK_K * ELEMENT_BYTES
    x_bytes = config.tile_m * BLOCK_K * ELEMENT_BYTES
    flops = 2 * config.tile_m * 2 * config.box_n * BLOCK_K
    # Both boxes of weights, and x: its last tile comes in pieces.
    pieces = ceil_div(rows % config.tile_m, PIECE)
    copies = 2 + (pieces if 0 < pieces * PIECE < config.tile_m else 1)

    def step_ns(active: int) -> float:
        """Of a step of so many clusters."""
        return together(
            GEMM_POWER,
            flops / rates.flops + config.tile_m * STEP_NS_PER_ROW,
            # A cluster reads its weights once.
            (x_bytes + box_bytes / config.cluster) * active * config.cluster / (rates.l2 * sms),
            # Tiles above each other have the same weights.
            box_bytes * max(active / height, 1) / (GEMM_MEMORY * rates.memory * sms),
            STEP_NS if config.cluster == 1 else CLUSTER_STEP_NS,
            copies * COPY_NS,
        )

    last = tiles - (waves - 1) * clusters
    products_ns = ceil_div(spec.k, BLOCK_K) * ((waves - 1) * step_ns(clusters) + step_ns(last))
    # All weights come from memory once.
    weights_ns = spec.weight_rows * spec.k * ELEMENT_BYTES / (GEMM_MEMORY * rates.memory * sms)
    stores = 1 if config.overlaps else waves
    stored_ns = stores * config.tile_m * config.columns(spec.parts) / STORED_PER_NS
    return max(products_ns, weights_ns) + stored_ns + GEMM_NS


def choose(spec: LinearSpec, rows: int, target: Target) -> Config:
    """The kernel for so many rows: the candidate that arithmetic finds fastest.

    Where SMs are spared, it is one of those for all of them: they have been compiled.
    """
    found = candidates(spec, target.sparing(0))
    return min(found, key=lambda config: estimate_us(config, spec, rows, target))


# Beside STREAMS and GEMMS worth a try: (tile_m, box_n, pingpong), and a stream's tokens.
TRIED_GEMMS = (
    *((128, box_n, False) for box_n in (96, 112, 120, 128)),
    *((256, box_n, False) for box_n in (64, 96)),
    *((128, box_n, True) for box_n in (40, 48, 56, 64, 72, 80, 88, 96)),
    *((64, box_n, True) for box_n in (32, 48, 56, 64, 80, 88, 112)),
    *((192, box_n, True) for box_n in (48, 56, 64)),
)
# Of streams: tiles above each other.
MOST_ABOVE = 3
TRIED_TOKENS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 120, 128)


def variants(spec: LinearSpec, rows: int, target: Target) -> Iterator[Config]:
    """Configurations worth a try, with as many stages each as shared memory has room for, and with half of them."""
    streams, gemms = tiles_of(target)
    fewest = min(tile.tile_tokens for tile in streams)
    seen = set()
    for tile in (*streams, *gemms, *target.by_kernel_arch({"sm90": tried_sm90, "sm100": tried_sm100})()):
        # Rows of other sizes have no use for it.
        if isinstance(tile, Streams):
            if rows > MOST_ABOVE * tile.tile_tokens or tile.tile_tokens > max(fewest, 4 * rows - 1):
                continue
        elif 2 * rows <= tile.tile_m:
            continue
        most = deepest(tile, spec, target.smem_bytes)
        for stages in () if most is None else (most.stages, max(2, most.stages // 2)):
            config = replace(tile, stages=stages)
            if config not in seen:
                seen.add(config)
                yield config


def tried_sm90() -> Iterator[Config]:
    """Tiles beside STREAMS and GEMMS."""
    for (tile_m, box_n, pingpong), cluster, band in itertools.product(TRIED_GEMMS, (1, 2), (4, 8, 16)):
        yield GemmConfig(tile_m=tile_m, box_n=box_n, pingpong=pingpong, cluster=cluster, band=band)
    for tokens, groups, split, tile_k in itertools.product(TRIED_TOKENS, (1, 2), (False, True), (64, 128, 256)):
        yield StreamConfig(tokens=tokens, groups=groups, split_tokens=split, tile_k=tile_k)


def tried_sm100() -> Iterator[Config]:
    """The same for SM100."""
    for box_n, pair, band in itertools.product((64, 96, 112, 128), (False, True), (4, 8, 16)):
        yield sm100.GemmConfig(box_n=box_n, pair=pair, band=band)
    for tokens, tile_k in itertools.product((16, 32, 48, 64, 96, 128), (64, 128)):
        yield sm100.StreamConfig(tokens=tokens, tile_k=tile_k)
