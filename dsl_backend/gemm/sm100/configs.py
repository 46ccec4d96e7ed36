# SPDX-License-Identifier: Apache-2.0
"""Tiles and stages of the SM100 kernels: frozen, and able to say why they do not fit."""

from dataclasses import dataclass

from dsl_backend.gemm.sizes import BLOCK_K, ELEMENT_BYTES, WARP, WARPGROUP, ceil_div
from dsl_backend.gemm.small_m_tiles import StreamTiles
from dsl_backend.linear.spec import LinearSpec

ROWS = 128  # of a block in one product
MMA_K = 16
TENSOR_COLUMNS = 512
BUFFERS = 2  # of sums in tensor memory: a tile's are stored while the next one's are made
# Warps behind the warpgroups that store.
MULTIPLY, LOAD, SINGLE_WARPS = 0, 1, 2
MOST_HELD = 64  # tokens of a thread that stores, for two boxes
# setmaxnreg: where two warpgroups store, ptxas spilled 32 to 64 bytes of an equal share of 168.
STORE_REGISTERS, OTHER_REGISTERS = 216, 72


def allocated(columns: int) -> int:
    """Columns of tensor memory that can be had: a power of two from 32."""
    return max(32, 1 << (columns - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """The kernel for many rows: persistent blocks with a warp that loads, one that multiplies, and four that store.

    Weights of a tile are two boxes of `box_n` rows: gate and up rows of the same columns, or neighbours.

    Attributes:
        pair: two blocks above each other multiply as one (cta_group::2), each with a box of the weights.
        band: tiles of a band of the raster.
    """

    box_n: int = 128
    stages: int = 4
    pair: bool = False
    band: int = 8

    @property
    def tile_m(self) -> int:
        """Rows of x, of a block."""
        return ROWS

    @property
    def cluster(self) -> int:
        return 2 if self.pair else 1

    @property
    def overlaps(self) -> bool:
        """Whether a tile is stored under the next one's products."""
        return True

    @property
    def weight_rows(self) -> int:
        """In a block's shared memory."""
        return 2 * self.box_n // self.cluster

    @property
    def stage_bytes(self) -> int:
        """Of a block."""
        return (ROWS + self.weight_rows) * BLOCK_K * ELEMENT_BYTES

    def columns(self, parts: int) -> int:
        """Of the output, in a tile."""
        return 2 * self.box_n // parts

    def piece(self, parts: int) -> int:
        """Columns of the output that leave at once: 128 bytes, or less where they do not divide a tile."""
        return next(width for width in (64, 32, 16, 1) if self.columns(parts) % width == 0)

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARPGROUP + SINGLE_WARPS * WARP

    @property
    def tensor_columns(self) -> int:
        return allocated(BUFFERS * 2 * self.box_n)

    def smem_bytes(self, parts: int) -> int:
        """Stages, two pieces of the output for each warp that stores, barriers, alignment."""
        out = 2 * ROWS * self.piece(parts) * ELEMENT_BYTES
        return self.stages * (self.stage_bytes + 16) + out + 1024

    def objections(self, spec: LinearSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot be run so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if not 16 <= self.box_n <= 128 or self.box_n % 16:
            reasons.append(f"box_n {self.box_n} is not a multiple of 16 from 16 to 128")
        if self.stages < 2:
            reasons.append(f"{self.stages} stages: 2 are the least")
        if self.band < 1:
            reasons.append(f"band {self.band} is not positive")
        if self.smem_bytes(spec.parts) > smem_bytes:
            reasons.append(f"{self.smem_bytes(spec.parts)} bytes of shared memory: {smem_bytes} are the most")
        return reasons


@dataclass(frozen=True, kw_only=True)
class StreamConfig(StreamTiles):
    """The kernel for few rows: weights are the products' rows, and every block reads an equal share of all of them.

    A tile's weights are two boxes of 128 rows: gate and up rows of the same columns, or neighbours.

    Attributes:
        tokens: rows of x of a tile; a multiple of 16 up to 64, or of 32 up to 128, which two warpgroups store.
    """

    stages: int = 6

    @property
    def groups(self) -> int:
        """Warpgroups that store, each its tokens."""
        return ceil_div(self.tokens, MOST_HELD)

    @property
    def trades_registers(self) -> bool:
        """Whether who stores needs more registers than an equal share, which setmaxnreg moves between warpgroups."""
        return self.groups > 1

    @property
    def threads(self) -> int:
        """Of a block: where registers are traded, single warps are in a whole warpgroup."""
        return self.groups * WARPGROUP + (WARPGROUP if self.trades_registers else SINGLE_WARPS * WARP)

    @property
    def box(self) -> int:
        """Rows of weights of a box."""
        return ROWS

    @property
    def tile_tokens(self) -> int:
        return self.tokens

    @property
    def accumulators(self) -> int:
        """Sums of a thread that stores, who has a row of each box; also float32 partial sums that it hands over."""
        return 2 * self.tokens // self.groups

    @property
    def tensor_columns(self) -> int:
        return allocated(BUFFERS * 2 * self.tokens)

    def objections(self, spec: LinearSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot be run so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if not 16 <= self.tokens <= 2 * MOST_HELD or self.tokens % (16 * self.groups):
            reasons.append(f"{self.tokens} tokens are neither a multiple of 16 up to 64 nor of 32 up to 128")
        return reasons + self.stage_objections(smem_bytes)


# Tiles, with as many stages as fit; 112 columns for the waves that 128 leave unfilled. Arithmetic, none of it timed.
STREAMS = tuple(StreamConfig(tokens=tokens) for tokens in (16, 32, 64, 128))
GEMMS = (
    GemmConfig(box_n=128, pair=True),
    GemmConfig(box_n=112, pair=True),
    GemmConfig(box_n=96, pair=True),
    GemmConfig(box_n=128),
    GemmConfig(box_n=96),
    GemmConfig(box_n=64),
)
