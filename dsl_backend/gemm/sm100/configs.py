# SPDX-License-Identifier: Apache-2.0
"""Tiles and stages of the SM100 kernels."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dsl_backend.gemm.scaled import ScaledGemmSpec
from dsl_backend.gemm.sizes import BLOCK_BYTES, WARP, WARPGROUP, ceil_div
from dsl_backend.gemm.spec import GemmSpec
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles
from dsl_backend.quant.format import SWIZZLED_ROWS, TENSOR_SCALED

MMA_M = 128  # rows of a CTA in one tcgen05.mma
MMA_K = 16
TMEM_COLUMNS = 512
ACC_STAGES = 2  # accumulators in tensor memory: a tile's epilogue runs while the next tile's products do
# Warps behind the epilogue's warpgroups.
MMA_WARP, LOAD_WARP, SINGLE_WARPS = 0, 1, 2
MOST_COLUMNS = 32  # of each box in an epilogue thread's registers
MOST_TOKENS = 64  # of an epilogue thread, for two boxes
PROMOTED_ACC_STAGES = 4
MOST_PROMOTED_TOKENS = 32  # of an epilogue thread whose sums are in registers
PROMOTED_TOKENS = 16  # of each box, that an epilogue thread has in registers beside its sums
SCALE_BUFFERS = 2  # of an epilogue warp, for x's scales of a stage
FACTOR_ROWS = 32  # rows whose scale factors lie in a column of tensor memory
# setmaxnreg: where two warpgroups store, ptxas spilled 32 to 64 bytes of an equal share of 168.
EPILOGUE_REGISTERS, OTHER_REGISTERS = 216, 72


def allocated(columns: int) -> int:
    """Columns of tensor memory that an allocation takes: a power of two from 32."""
    return max(32, 1 << (columns - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class GemmConfig(GemmTiles):
    """The persistent GEMM: a load warp, an MMA warp and an epilogue warpgroup.

    Attributes:
        two_cta: two CTAs execute one tcgen05.mma (cta_group::2), each with half of the rows of x and a box of weights.
    """

    two_cta: bool = False

    @property
    def tile_m(self) -> int:
        return MMA_M

    @property
    def cluster(self) -> int:
        return 2 if self.two_cta else 1

    @property
    def overlaps_epilogue(self) -> bool:
        return True

    @property
    def weight_rows(self) -> int:
        return 2 * self.box_n // self.cluster

    def epilogue_n(self, parts: int, itemsize: int = 2) -> int:
        """Columns of the output that are stored at once: 128 bytes, or less where they do not divide a tile.

        Args:
            itemsize: bytes of an element; up to 2 make no difference.
        """
        return next(
            width for width in (64, 32, 16, 1) if self.columns(parts) % width == 0 and width * itemsize <= BLOCK_BYTES
        )

    def register_columns(self, parts: int) -> int:
        """Columns of each box in an epilogue thread's registers at a time."""
        return min(self.epilogue_n(parts), MOST_COLUMNS)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return WARPGROUP + SINGLE_WARPS * WARP

    @property
    def tmem_columns(self) -> int:
        return allocated(ACC_STAGES * 2 * self.box_n)

    def epilogue_elements(self, parts: int) -> int:
        """Two stages of each epilogue warp; an output in float32 has fewer columns in each."""
        return 2 * MMA_M * self.epilogue_n(parts)

    def smem_bytes(self, spec: GemmSpec) -> int:
        found = super().smem_bytes(spec)
        if isinstance(spec, ScaledGemmSpec) and spec.wide:
            size = spec.dtypes.out.itemsize
            found -= 2 * MMA_M * size * (self.epilogue_n(spec.parts) - self.epilogue_n(spec.parts, size))
        return found

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if not 16 <= self.box_n <= 128 or self.box_n % 16:
            reasons.append(f"box_n {self.box_n} is not a multiple of 16 from 16 to 128")
        elif isinstance(spec, ScaledGemmSpec) and spec.out is not None:
            columns, block = self.register_columns(spec.parts), spec.out.block_columns or 1
            if columns % block or self.epilogue_n(spec.parts) // spec.out.packed < 16:
                reasons.append(f"box_n {self.box_n}: {columns} columns at a time are no whole blocks of {spec.out}")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class BlockScaledConfig(GemmConfig):
    """The same for operands whose scale factors lie in tensor memory beside the accumulators.

    A box of weights has 128 rows, or 64 where both boxes are neighbours: 128 rows' scale factors lie together.
    """

    @property
    def weight_atoms(self) -> int:
        """128s of rows of weights of a tile, over all CTAs."""
        return 2 * self.box_n // SWIZZLED_ROWS

    @property
    def overlaps_accumulators(self) -> bool:
        """Whether two accumulators and the scale factors do not fit side by side."""
        return 4 * self.box_n + self.most_factor_columns > TMEM_COLUMNS

    @property
    def most_factor_columns(self) -> int:
        """Columns of scale factors of 128 bytes of k: of each row 16 of NVFP4, in 4 columns for each 128 rows and 4."""
        return 16 * (1 + self.weight_atoms)

    @property
    def acc_stride(self) -> int:
        """Columns from one accumulator to the next."""
        return (
            TMEM_COLUMNS - self.most_factor_columns - 2 * self.box_n if self.overlaps_accumulators else 2 * self.box_n
        )

    def factor_columns(self, scale_atoms: int) -> tuple[int, int]:
        """First columns of the factors of x and of the weights.

        Args:
            scale_atoms: see `primitives.narrow_mma.NarrowKind`.
        """
        first = self.acc_stride + 2 * self.box_n
        return first, first + 4 * scale_atoms

    @property
    def tmem_columns(self) -> int:
        return allocated(self.acc_stride + 2 * self.box_n + self.most_factor_columns)

    def factor_bytes(self, spec: ScaledGemmSpec) -> int:
        """Of a CTA's stage: 512 bytes for each 128 rows and 4 blocks of k."""
        assert spec.x.block_columns is not None
        blocks = BLOCK_BYTES * spec.x.packed // spec.x.block_columns
        return 128 * blocks * (1 + self.weight_atoms)

    def smem_bytes(self, spec: GemmSpec) -> int:
        assert isinstance(spec, ScaledGemmSpec)
        return super().smem_bytes(spec) + self.stages * self.factor_bytes(spec)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if self.box_n not in (64, 128) or (self.box_n == 64 and spec.parts == 2):
            reasons.append(f"box_n {self.box_n} is not 128, or 64 without an activation")
        if spec.parts == 2 and (spec.interleaved or spec.n % SWIZZLED_ROWS):
            reasons.append(f"gate and up rows alternate, or n {spec.n} is not a multiple of {SWIZZLED_ROWS}")
        if isinstance(spec, ScaledGemmSpec) and spec.wide:
            reasons.append("an output in float32: what is stored first does not free the columns that two tiles share")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class PromotedConfig(GemmConfig):
    """The same where an epilogue thread sums a row of the tile in registers, and each stage has an accumulator."""

    box_n: int = 64

    def register_columns(self, parts: int) -> int:
        # Beside 128 sums; with 32 columns ptxas spilled 16 bytes (no activation, bias).
        return min(self.epilogue_n(parts), 16)

    @property
    def acc_stages(self) -> int:
        """Accumulators in tensor memory: a power of two."""
        return TMEM_COLUMNS // allocated(2 * self.box_n)

    @property
    def tmem_columns(self) -> int:
        return TMEM_COLUMNS

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if self.box_n not in (16, 32, 64):
            reasons.append(
                f"box_n {self.box_n} is not 16, 32 or 64: a thread sums up to 128 columns, and 128 are a block"
            )
        if spec.parts == 2 and not spec.interleaved and spec.n % self.box_n:
            reasons.append(f"n {spec.n} is not a multiple of {self.box_n}: a box of up rows would have several scales")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class SmallMConfig(SmallMTiles):
    """The GEMM for few rows: the weights are tcgen05.mma's M.

    Attributes:
        tokens: rows of x of a tile; a multiple of 16 up to `most_tokens`, or of 32 up to twice as many with two
            epilogue warpgroups.
    """

    stages: int = 6

    @property
    def groups(self) -> int:
        """Epilogue warpgroups, each with its tokens."""
        return ceil_div(self.tokens, self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """Of an epilogue thread, for two boxes."""
        return MOST_TOKENS

    @property
    def trades_registers(self) -> bool:
        """Whether the epilogue needs more registers than an equal share, which setmaxnreg moves between warpgroups."""
        return self.groups > 1

    @property
    def threads(self) -> int:
        """Of a CTA: where registers are traded, the single warps are in a whole warpgroup."""
        return self.groups * WARPGROUP + (WARPGROUP if self.trades_registers else SINGLE_WARPS * WARP)

    @property
    def box(self) -> int:
        return MMA_M

    @property
    def tile_tokens(self) -> int:
        return self.tokens

    @property
    def accumulators(self) -> int:
        return 2 * self.tokens // self.groups

    @property
    def acc_stages(self) -> int:
        """Accumulators of both boxes in tensor memory."""
        return ACC_STAGES

    @property
    def tmem_columns(self) -> int:
        return allocated(self.acc_stages * 2 * self.tokens)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        most = self.most_tokens
        if not 16 <= self.tokens <= 2 * most or self.tokens % (16 * self.groups):
            reasons.append(f"{self.tokens} tokens are neither a multiple of 16 up to {most} nor of 32 up to {2 * most}")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class ScaledSmallMConfig(SmallMConfig):
    """The same of quantised operands. A stage has 128 bytes of k: `tile_k` counts bytes.

    Scale factors lie behind the accumulators in tensor memory: of a box of weights, then of x.
    """

    tile_k: int = BLOCK_BYTES

    @property
    def promotes(self) -> bool:
        """Whether products of each 128 columns are summed in registers."""
        return False

    def factor_bytes(self, spec: ScaledGemmSpec) -> int:
        """Of a stage: 512 bytes for each 128 rows and 4 blocks of k, of x and of both boxes."""
        if not spec.x.swizzled:
            return 0
        assert spec.x.block_columns is not None
        return 3 * SWIZZLED_ROWS * (BLOCK_BYTES * spec.x.packed // spec.x.block_columns)

    @property
    def factor_column(self) -> int:
        """The first column of scale factors."""
        return self.acc_stages * 2 * self.tokens

    def tmem_columns_of(self, factor_columns: int) -> int:
        return allocated(self.factor_column + factor_columns)

    def smem_bytes(self, spec: GemmSpec) -> int:
        assert isinstance(spec, ScaledGemmSpec)
        return super().smem_bytes(spec) + self.stages * self.factor_bytes(spec)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        assert isinstance(spec, ScaledGemmSpec)
        reasons = []
        if self.tile_k != BLOCK_BYTES:
            reasons.append(f"tile_k {self.tile_k} is not {BLOCK_BYTES} bytes")
        if spec.promoted != self.promotes:
            reasons.append(f"weights are {spec.weight}: a kernel of their own promotes products, and no others")
        if spec.out is not None and spec.out != TENSOR_SCALED:
            reasons.append(f"out is {spec.out}: a thread has one column of it")
        if spec.x.swizzled and (self.tokens % FACTOR_ROWS or self.tokens > MOST_TOKENS):
            reasons.append(f"{self.tokens} tokens are not a multiple of {FACTOR_ROWS} up to {MOST_TOKENS}")
        if spec.x.swizzled and spec.parts == 2 and (spec.interleaved or spec.n % SWIZZLED_ROWS):
            reasons.append(f"gate and up rows alternate, or n {spec.n} is not a multiple of {SWIZZLED_ROWS}")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class PromotedSmallMConfig(ScaledSmallMConfig):
    """The same where an epilogue thread sums a row of each box in registers, and each stage has an accumulator."""

    @property
    def promotes(self) -> bool:
        return True

    @property
    def most_tokens(self) -> int:
        # With 64, ptxas spilled up to 96 bytes of 255 registers (gated, e4m3), in two warpgroups 224.
        return MOST_PROMOTED_TOKENS

    @property
    def acc_stages(self) -> int:
        """4 absorb what the epilogue's time varies by; those of 64 tokens are all of tensor memory."""
        return PROMOTED_ACC_STAGES

    @property
    def warp_scales(self) -> int:
        """Scales of x that the lanes of a warp load for a stage: of its tokens, and beyond them to a whole warp."""
        return ceil_div(self.tokens // self.groups, WARP) * WARP

    def smem_bytes(self, spec: GemmSpec) -> int:
        warps = self.groups * WARPGROUP // WARP
        return super().smem_bytes(spec) + warps * SCALE_BUFFERS * self.warp_scales * 4


# Tiles, with as many stages as fit; 112 columns for the waves that 128 leave unfilled. Arithmetic, none of it timed.
SMALL_M = tuple(SmallMConfig(tokens=tokens) for tokens in (16, 32, 64, 128))
# For products without an activation, as the emulator's clock had them beside stream-K (docs/performance/linear.md). 8
# CTAs for up to 32 tokens are left out: they gain up to 10 % on 4 in some layers, and the cost model would take them
# where k is 14336, in place of stream-K, which is faster by the clock.
SPLIT_K = tuple(
    SmallMConfig(tokens=tokens, num_splits=num_splits)
    for tokens, splits in ((16, (2, 4)), (32, (2, 4)), (64, (2, 4, 8)))
    for num_splits in splits
)
# The same with an activation. 2 CTAs for up to 32 tokens are in no layer the fastest by the clock, and the cost model
# would take them for 7168 columns of 4096, 8 % behind stream-K.
GATED_SPLIT_K = tuple(one for one in SPLIT_K if one.num_splits > 2 or one.tokens > 32)
GEMMS = (
    GemmConfig(box_n=128, two_cta=True),
    GemmConfig(box_n=112, two_cta=True),
    GemmConfig(box_n=96, two_cta=True),
    GemmConfig(box_n=128),
    GemmConfig(box_n=96),
    GemmConfig(box_n=64),
)


def tried() -> Iterator[GemmConfig | SmallMConfig]:
    """Configurations worth a measurement besides SMALL_M and GEMMS."""
    for box_n, two_cta, band in itertools.product((64, 96, 112, 128), (False, True), (4, 8, 16)):
        yield GemmConfig(box_n=box_n, two_cta=two_cta, band=band)
    for tokens, tile_k in itertools.product((16, 32, 48, 64, 96, 128), (64, 128)):
        yield SmallMConfig(tokens=tokens, tile_k=tile_k)
    for tokens in (16, 32):
        yield SmallMConfig(tokens=tokens, num_splits=8)
