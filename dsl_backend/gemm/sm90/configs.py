# SPDX-License-Identifier: Apache-2.0
"""Tiles and stages of the SM90 kernels."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.gemm.sizes import TAIL_ROWS, WARPGROUP, ceil_div
from dsl_backend.gemm.spec import GemmSpec
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles

CONSUMERS = 2  # consumer warpgroups of the GEMM kernel
MMA_M = 64  # rows of a wgmma
# setmaxnreg: what consumers take, of which some are addresses and the epilogue's.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
# The same with three consumers, of the 128 that each of 512 threads starts with.
CONSUMER_REGISTERS_OF_3, PRODUCER_REGISTERS_OF_3 = 152, 56
# With less to spare, ptxas spilled 16 to 200 bytes where there is a bias or a residual.
SPARE_REGISTERS, EXTRAS_REGISTERS = 40, 24
# With swapped operands 40 spilled 32 bytes; of three consumers' registers 48 did not compile.
SPARE_OF_SWAPPED, SPARE_OF_3 = 48, 56


@dataclass(frozen=True, kw_only=True)
class ConsumerTiles(GemmTiles):
    """Tiles of a persistent GEMM with a producer warp and some consumer warpgroups.

    Attributes:
        pingpong: consumers alternate between tiles, so that one's epilogue overlaps the other's products; else they
            split every tile (cooperative).
        cluster: 1 or 2 CTAs; of 2 each loads a box of weights for both by multicast.
    """

    pingpong: bool = False
    cluster: int = 1

    @property
    def overlaps_epilogue(self) -> bool:
        return self.pingpong

    @property
    def mma_columns(self) -> int:
        """Of a tile: wgmma's N."""
        raise NotImplementedError

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return CONSUMERS

    @property
    def consumer_registers(self) -> int:
        """Of a consumer's thread."""
        return CONSUMER_REGISTERS

    @property
    def producer_registers(self) -> int:
        """Of a thread of the producer's warpgroup."""
        return PRODUCER_REGISTERS

    @property
    def spare_registers(self) -> int:
        """Of these, what accumulators leave."""
        return SPARE_REGISTERS

    @property
    def consumer_m(self) -> int:
        """Rows of a consumer's accumulators."""
        return self.mma_rows if self.pingpong else self.mma_rows // self.consumers

    @property
    def mma_tiles_m(self) -> int:
        """Wgmma tiles among them."""
        return self.consumer_m // MMA_M

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread."""
        return self.consumer_m * self.mma_columns // WARPGROUP

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if self.cluster not in (1, 2):
            reasons.append(f"clusters of {self.cluster} CTAs: 1 or 2 are possible")
        extras = EXTRAS_REGISTERS if spec.bias or spec.residual else 0
        most = self.consumer_registers - self.spare_registers - extras
        if self.accumulators > most:
            reasons.append(f"{self.accumulators} accumulators a thread: {most} are the most")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class GemmConfig(ConsumerTiles):
    """The persistent GEMM: two consumers, rows of x are wgmma's M.

    Attributes:
        tile_m: rows of x; 64 or a multiple.
    """

    tile_m: int = 128

    @property
    def mma_columns(self) -> int:
        return 2 * self.box_n

    def epilogue_elements(self, parts: int) -> int:
        """A buffer of 64 rows for each consumer."""
        return CONSUMERS * MMA_M * self.columns(parts)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if self.tile_m < MMA_M or self.tile_m % MMA_M or self.consumer_m % MMA_M:
            reasons.append(f"tile_m {self.tile_m}: each consumer needs a multiple of {MMA_M} rows")
        if not 16 <= self.box_n <= 128 or self.box_n % 8:
            reasons.append(f"box_n {self.box_n} is not a multiple of 8 from 16 to 128")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class SwappedTiles(ConsumerTiles):
    """Tiles with swapped operands: weights are wgmma's M, rows of x (tokens) its N.

    Attributes:
        tokens: rows of x.
    """

    tokens: int

    @property
    def swaps_operands(self) -> bool:
        return True

    @property
    def tile_m(self) -> int:
        return self.tokens

    @property
    def mma_rows(self) -> int:
        return 2 * self.box_n

    @property
    def mma_columns(self) -> int:
        return self.tokens

    @property
    def epi_tokens(self) -> int:
        """Tokens that are stored at once: up to 64, and a part of the tile's without remainder."""
        return max(tokens for tokens in range(8, 65, 8) if self.tokens % tokens == 0)


@dataclass(frozen=True, kw_only=True)
class SwapABConfig(SwappedTiles):
    """The persistent GEMM with swapped operands.

    A tile may have any multiple of 16 tokens, so that it fits their number: 320 are two tiles of 160, where a sixth of
    three tiles of 128 rows is padding. In a box of weights, 8 gate rows and the up rows of the same columns alternate.

    Attributes:
        tokens: rows of x; a multiple of 16 up to 256.
        box_n: 32 (ping-pong alone), 64, 96 or 128. Cooperative consumers are three where it is 96, and else two.
        tail_boxes: see `GemmTiles.tail_boxes`. 300 rows are 140 in the second tile of 160, nine boxes.
    """

    tokens: int = 160
    tail_boxes: bool = True

    def fits(self, rows: int) -> bool:
        """Whether no smaller tile makes as few rows of tiles."""
        tiles = ceil_div(rows, self.tokens)
        return ceil_div(rows, self.tokens - TAIL_ROWS) > tiles if self.tokens > TAIL_ROWS else True

    @property
    def consumers(self) -> int:
        return 3 if not self.pingpong and self.mma_rows % (CONSUMERS * MMA_M) else CONSUMERS

    @property
    def consumer_registers(self) -> int:
        return CONSUMER_REGISTERS if self.consumers == CONSUMERS else CONSUMER_REGISTERS_OF_3

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS if self.consumers == CONSUMERS else PRODUCER_REGISTERS_OF_3

    @property
    def spare_registers(self) -> int:
        return SPARE_OF_SWAPPED if self.consumers == CONSUMERS else SPARE_OF_3

    def epilogue_elements(self, parts: int) -> int:
        """For each 64 rows of a consumer a buffer of their columns."""
        return self.consumers * self.mma_tiles_m * (MMA_M // 2) * self.epi_tokens

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if not TAIL_ROWS <= self.tokens <= 256 or self.tokens % TAIL_ROWS:
            reasons.append(f"{self.tokens} tokens are not a multiple of {TAIL_ROWS} from {TAIL_ROWS} to 256")
        if self.box_n not in ((32, 64, 96, 128) if self.pingpong else (64, 96, 128)):
            reasons.append(f"box_n {self.box_n} is not 64, 96 or 128, nor 32 with ping-pong")
        if spec.activation is None or spec.residual:
            reasons.append("gate and up rows alternate in a tile: an activation is needed, and no residual")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class SmallMConfig(SmallMTiles):
    """The GEMM for few rows: the weights are wgmma's M.

    Attributes:
        tokens: rows of x of a consumer's wgmma, its N; a multiple of 8 up to 128. A tile has 8 or a multiple of 16.
        groups: consumer warpgroups, 1 or 2.
        split_tokens: two consumers have the same weights and different tokens, instead of the reverse.
    """

    groups: int = 1
    split_tokens: bool = False
    stages: int = 10

    @property
    def box(self) -> int:
        return MMA_M if self.split_tokens else MMA_M * self.groups

    @property
    def tile_tokens(self) -> int:
        return self.tokens * self.groups if self.split_tokens else self.tokens

    @property
    def accumulators(self) -> int:
        return 2 * MMA_M * self.tokens // WARPGROUP

    @property
    def trades_registers(self) -> bool:
        """Whether consumers need more registers than an equal share, which setmaxnreg moves between warpgroups."""
        return self.groups > 1 and self.accumulators > 96

    @property
    def threads(self) -> int:
        """Of a CTA: consumers, and a producer warp, which is a whole warpgroup where registers are traded."""
        return self.groups * WARPGROUP + (WARPGROUP if self.trades_registers else 32)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
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
        return reasons + super().objections(spec, smem_bytes)


# Tiles, with as many stages as fit; where x is small, 256 bytes of weights at a time. The best of all that were timed
# on an H200 is 1 % faster on average than the best of these (docs/performance/linear.md).
SMALL_M = (
    *(SmallMConfig(tokens=tokens, tile_k=128) for tokens in (8, 16, 32)),
    *(SmallMConfig(tokens=tokens, groups=2, split_tokens=True) for tokens in range(32, 113, 8)),
)
# For products without an activation: on an H100 these were faster than stream-K in 29 of 32 that they serve, of 1 to 64
# rows of models' projections (docs/performance/linear.md).
SPLIT_K = (
    *(SmallMConfig(tokens=8, tile_k=128, num_splits=num_splits) for num_splits in (2, 4)),
    *(
        SmallMConfig(tokens=tokens, tile_k=128, num_splits=num_splits)
        for tokens in (16, 32)
        for num_splits in (2, 4, 8)
    ),
    *(SmallMConfig(tokens=64, num_splits=num_splits) for num_splits in (2, 4, 8)),
)
# For gated layers with fewer tiles than SMs. Partial sums take shared memory from stages: with many rows, wide k tiles
# are worse (docs/performance/linear.md).
GATED_SPLIT_K = (
    *(
        SmallMConfig(tokens=tokens, tile_k=tile_k, num_splits=num_splits)
        for tokens, tile_k in ((32, 128), (48, 128), (48, 64), (64, 64))
        for num_splits in (2, 3, 4)
    ),
    *(
        SmallMConfig(tokens=tokens, groups=2, split_tokens=True, num_splits=num_splits)
        for tokens in range(40, 81, 8)
        for num_splits in (2, 3, 4)
    ),
)
GEMMS = (
    # Bands of 4 rows of tiles: 2 to 5 % faster than of 8 in five of seven layers with 2048 to 16384 rows on an H200,
    # and within 1 % in the others (docs/performance/linear.md).
    GemmConfig(tile_m=128, box_n=128, cluster=2, band=4),
    GemmConfig(tile_m=128, box_n=112, cluster=2),
    *(GemmConfig(tile_m=128, box_n=box_n, cluster=2, pingpong=True) for box_n in (96, 88, 80, 72, 56)),
    *(GemmConfig(tile_m=128, box_n=box_n, pingpong=True) for box_n in (88, 72, 64, 56, 48)),
    *(GemmConfig(tile_m=64, box_n=box_n, pingpong=True) for box_n in (112, 88, 64, 56, 48)),
    *(GemmConfig(tile_m=64, box_n=box_n, cluster=2, pingpong=True) for box_n in (64, 88)),
    GemmConfig(tile_m=192, box_n=56, pingpong=True),
    GemmConfig(tile_m=256, box_n=64, cluster=2),
)
# Each width, with each order and cluster, is within 2 % of the fastest for one of 26 layers with 72 to 2000 rows on an
# H100 (docs/performance/linear.md).
SWAP_AB = (
    *(SwapABConfig(tokens=tokens, box_n=128, cluster=cluster) for tokens in range(80, 177, 16) for cluster in (1, 2)),
    *(SwapABConfig(tokens=tokens, box_n=96, cluster=cluster) for tokens in range(96, 193, 16) for cluster in (1, 2)),
    *(SwapABConfig(tokens=tokens, box_n=64, cluster=cluster) for tokens in range(192, 257, 16) for cluster in (1, 2)),
    *(
        SwapABConfig(tokens=tokens, box_n=64, cluster=cluster, pingpong=True)
        for tokens in range(80, 177, 16)
        for cluster in (1, 2)
    ),
)
# What `dsl-backend tune` tries besides: (tile_m, box_n, pingpong), and tokens.
TRIED_GEMMS = (
    *((128, box_n, False) for box_n in (96, 112, 120, 128)),
    *((256, box_n, False) for box_n in (64, 96)),
    *((128, box_n, True) for box_n in (40, 48, 56, 64, 72, 80, 88, 96)),
    *((64, box_n, True) for box_n in (32, 48, 56, 64, 80, 88, 112)),
    *((192, box_n, True) for box_n in (48, 56, 64)),
)
TRIED_TOKENS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 120, 128)


def tried() -> Iterator[GemmConfig | SmallMConfig | SwapABConfig]:
    """Configurations worth a measurement besides SMALL_M and GEMMS."""
    yield from (replace(config, tail_boxes=False) for config in SWAP_AB)
    for (tile_m, box_n, pingpong), cluster, band in itertools.product(TRIED_GEMMS, (1, 2), (4, 8, 16)):
        yield GemmConfig(tile_m=tile_m, box_n=box_n, pingpong=pingpong, cluster=cluster, band=band)
    for tokens, groups, split, tile_k in itertools.product(TRIED_TOKENS, (1, 2), (False, True), (64, 128, 256)):
        yield SmallMConfig(tokens=tokens, groups=groups, split_tokens=split, tile_k=tile_k)
    for tokens, num_splits, tile_k in itertools.product((8, 16, 32, 64), (2, 4, 8), (64, 128)):
        yield SmallMConfig(tokens=tokens, tile_k=tile_k, num_splits=num_splits)
    for tokens, num_splits in itertools.product((32, 40, 48, 56, 64, 72), (2, 3, 4)):
        yield SmallMConfig(tokens=tokens, groups=2, split_tokens=True, num_splits=num_splits)
