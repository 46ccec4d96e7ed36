# SPDX-License-Identifier: Apache-2.0
"""Tiles of SM100's kernels of experts in MXFP4 under 16-bit activations; needs no CuTe DSL. Nothing of it was timed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from dsl_backend.experts.configs import Config, DecodeConfig, ExpertsConfig, products, table_bytes
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.sizes import BLOCK_BYTES, BLOCK_K, WARPGROUP
from dsl_backend.gemm.sm100.configs import MOST_COLUMNS, MOST_TOKENS, GemmConfig, SmallMConfig, allocated
from dsl_backend.gemm.spec import Dtypes, GemmSpec
from dsl_backend.gemm.tiles import BARRIER_BYTES
from dsl_backend.quant.mxfp4_tiles import TILES
from dsl_backend.quant.weight_only import TILE_COLUMNS, TILE_ROWS
from dsl_backend.runtime.target import Target

# Rows of weights of a box, most first: packed tiles of one part each.
BOXES = (128, 64)
# Of unpacked weights: one is multiplied, the others are written by the warps that unpack.
UNPACKED_STAGES = 3
# Of a product for few tokens, in tensor memory: two boxes of 128 lanes and columns, two elements in each word. More of
# them would leave no room for the accumulators of 64 tokens.
UNPACKED_TMEM_STAGES, UNPACKED_COLUMNS = 2, 2 * TILE_COLUMNS // 2
# Tokens of a tile of the kernels for few, fewest first.
TOKENS = (16, 32, 64)
# Unpacking 256 rows of 128 columns is 3050 instructions of warps, for which the integer units of an SM need 1150 cycles
# (by the emulator's clock). Each of its four schedulers has two of these warps.
UNPACKING_WARPGROUPS = 2
# Of an epilogue's thread and of others, which unpack: no more than what an equal share is in all, 96 of five warpgroups
# and 128 of four. With 72 of others ptxas spilled 8 bytes (few tokens, gpt-oss's layer).
GROUPED_REGISTERS, DECODE_REGISTERS = (160, 80), (216, 96)


@dataclass(frozen=True, kw_only=True)
class UnpackedTiles(GemmConfig):
    """Tiles of a grouped GEMM. A stage has 64 columns: x, and half of each packed tile with its scales."""

    @property
    def row_tiles(self) -> int:
        """Packed tiles of a CTA's tile."""
        return 2 * self.box_n // TILE_ROWS

    @property
    def half_words(self) -> int:
        """32-bit words of half a packed tile with its scales."""
        return TILES.value_words // 2 + TILES.tile_words - TILES.value_words

    def register_columns(self, parts: int) -> int:
        # With 32 ptxas spilled 8 bytes (gpt-oss's layer).
        return min(self.epilogue_n(parts), MOST_COLUMNS // 2)

    def unpacking_threads(self, gathers: bool) -> int:
        """Of a CTA: the epilogue's warpgroup; products and loads, for which gathering takes a second one; unpacking."""
        return (1 + (2 if gathers else 1) + UNPACKING_WARPGROUPS) * WARPGROUP

    def stage_bytes(self, dtypes: Dtypes) -> int:
        return self.row_tiles * self.half_words * 4 + self.tile_m * BLOCK_K * dtypes.x.itemsize

    def epilogue_elements(self, parts: int) -> int:
        """Threads store their rows from registers."""
        return 0

    def smem_bytes(self, spec: GemmSpec) -> int:
        return super().smem_bytes(spec) + UNPACKED_STAGES * (self.weight_rows * BLOCK_BYTES + BARRIER_BYTES)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if self.box_n not in BOXES:
            reasons.append(f"box_n is {self.box_n}: {' or '.join(map(str, BOXES))} is needed, of whole packed tiles")
        if self.two_cta:
            reasons.append("two CTAs share no products")
        return reasons + super().objections(spec, smem_bytes)


@dataclass(frozen=True, kw_only=True)
class UnpackedSmallMConfig(SmallMConfig):
    """Tiles of the kernels for few tokens. A stage has x and four packed tiles; weights are unpacked to tensor memory.

    Attributes:
        tokens: a multiple of 16 up to 64: accumulators share tensor memory with unpacked weights.
    """

    tile_k: int = TILE_COLUMNS

    @property
    def row_tiles(self) -> int:
        """Packed tiles of a CTA's tile."""
        return 2 * self.box // TILE_ROWS

    @property
    def trades_registers(self) -> bool:
        return True

    @property
    def threads(self) -> int:
        """Of a CTA: the epilogue's warpgroup, one of products and loads, and those that unpack."""
        return (2 + UNPACKING_WARPGROUPS) * WARPGROUP

    @property
    def unpacked_column(self) -> int:
        """The first column of unpacked weights in tensor memory."""
        return self.acc_stages * 2 * self.tokens

    @property
    def tmem_columns(self) -> int:
        return allocated(self.unpacked_column + UNPACKED_TMEM_STAGES * UNPACKED_COLUMNS)

    def stage_bytes(self, dtypes: Dtypes) -> int:
        return self.row_tiles * TILES.tile_words * 4 + self.tokens * dtypes.x.itemsize * self.tile_k

    def smem_bytes(self, spec: GemmSpec) -> int:
        return super().smem_bytes(spec) + UNPACKED_TMEM_STAGES * BARRIER_BYTES

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if self.tile_k != TILE_COLUMNS:
            reasons.append(f"tile_k {self.tile_k} is not {TILE_COLUMNS}, the columns of packed tiles")
        if self.tokens > MOST_TOKENS:
            reasons.append(f"{self.tokens} tokens: tensor memory has room for {MOST_TOKENS} beside unpacked weights")
        if self.num_splits > 1:
            reasons.append("CTAs hand partial sums to each other through memory alone")
        return reasons + super().objections(spec, smem_bytes)


def few(spec: ExpertsSpec, target: Target) -> Iterator[DecodeConfig]:
    """The kernels for few tokens, fewest first, each with as many stages as fit."""
    first, _ = products(spec)
    for tokens in TOKENS:
        tiles = UnpackedSmallMConfig(tokens=tokens)
        fit: object = deepest(tiles, first, target.smem_bytes - table_bytes(spec, tiles))
        if isinstance(fit, UnpackedSmallMConfig):
            yield DecodeConfig(first=fit, second=fit)


@cache
def candidates(spec: ExpertsSpec, target: Target) -> tuple[Config, ...]:
    """The kernels of a layer for any number of tokens: for few, then the widest first. None where not all fit."""
    found: list[Config] = [*few(spec, target)]
    for box_n in BOXES:
        tiles = UnpackedTiles(box_n=box_n)
        first, second = (deepest(tiles, gemm, target.smem_bytes) for gemm in products(spec))
        if not isinstance(first, UnpackedTiles) or not isinstance(second, UnpackedTiles):
            return ()
        found.append(ExpertsConfig(first=first, second=second, prefetches=True))
    return tuple(found) if len(found) == len(TOKENS) + len(BOXES) else ()


def choose(spec: ExpertsSpec, tokens: int, target: Target) -> Config:
    """The kernels for so many tokens: those for few, or the widest whose first product has a tile for most SMs."""
    found = candidates(spec, target.sparing(0))
    if tokens <= TOKENS[-1]:
        return next(config for config in found if config.serves(tokens))
    grouped = [one for one in found if isinstance(one, ExpertsConfig)]
    filling = (one for one in grouped if 4 * one.ctas(spec, tokens, target)[1] >= 3 * target.used_sms)
    return next(filling, grouped[-1])
