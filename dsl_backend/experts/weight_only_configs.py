# SPDX-License-Identifier: Apache-2.0
"""Tiles of the kernels of experts in MXFP4 under 16-bit activations: SM90's, and whose they are on a target.

Needs no CuTe DSL.
"""

from dataclasses import dataclass, replace
from functools import cache

from dsl_backend.experts import weight_only_sm100_configs as sm100
from dsl_backend.experts.configs import (
    PROBED_TOKENS,
    Config,
    DecodeConfig,
    ExpertsConfig,
    products,
    table_bytes,
    tiles_of_experts,
)
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.sizes import BLOCK_K, TAIL_ROWS, WARPGROUP, ceil_div
from dsl_backend.gemm.sm90.configs import MMA_M, SwappedTiles
from dsl_backend.gemm.sm90.weight_only_configs import LEAST_STAGES, MOST_STAGES, WeightOnlyConfig
from dsl_backend.gemm.spec import Dtypes, GemmSpec
from dsl_backend.gemm.tiles import ALIGNMENT_BYTES, BARRIER_BYTES
from dsl_backend.quant.mxfp4_tiles import TILES
from dsl_backend.quant.weight_only import TILE_COLUMNS
from dsl_backend.runtime.target import Target

# Shared memory of an SM that each CTA takes beside its own.
RESERVED_BYTES = 1024
# Tokens of a tile of the kernels for few, fewest first. With more of them the grouped GEMMs serve: with 64 the kernels
# for few took 1.42 times as long as with 32 on an H200, and vLLM's 1.04 times (docs/performance/experts.md).
TOKENS = (8, 16, 32)
MOST_TOKENS = TOKENS[-1]
# CTAs that share an SM, of one consumer each: of five combinations the fastest or within 0.3 % of it with 1 to 64
# tokens, on an H200 (docs/performance/experts.md). Unpacking needs many warps.
CTAS_PER_SM = 3
# Rows of a grouped GEMM's tile: for the sums of more of them there are no registers.
# Products of tiles of 96 rows ptxas runs one at a time.
ROWS = (16, 32, 48, 64, 128)
MOST_ROWS = ROWS[-1]
# Of a step, a packed tile's columns of all rows of weights of a CTA: to unpack them, by the emulator's clock with tiles
# of 16 rows, and for each row of x, as W4A16's persistent GEMM has it on an H200 with half of the rows of weights.
# Nothing of these kernels was timed on a GPU.
STEP_NS, ROW_NS = 880.0, 4.0
# Unpacked weights need no registers in the epilogue, which needs those that others spare for it.
SPARE_OF_UNPACKED = 16


@dataclass(frozen=True, kw_only=True)
class WeightOnlyDecodeConfig(DecodeConfig):
    """The kernels of a layer for few tokens.

    Attributes:
        per_sm: CTAs that share an SM.
    """

    per_sm: int = 1

    def ctas(self, spec: ExpertsSpec, tokens: int, target: Target) -> tuple[int]:
        """CTAs of each product."""
        return (target.used_sms * self.per_sm,)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyGroupedTiles(SwappedTiles):
    """Tiles of a grouped GEMM: consumers have two packed tiles each. A stage has 64 columns, half of a packed tile.

    Attributes:
        tokens: rows of x; a multiple of 16 up to 128.
        box_n: 64 or 128 rows of weights, for one consumer or two.
    """

    tokens: int = 128

    @property
    def consumers(self) -> int:
        return self.box_n // MMA_M

    @property
    def row_tiles(self) -> int:
        """Packed tiles of a CTA's tile."""
        return 2 * self.consumers

    @property
    def half_words(self) -> int:
        """32-bit words of half a packed tile with its scales."""
        return TILES.value_words // 2 + TILES.tile_words - TILES.value_words

    @property
    def spare_registers(self) -> int:
        return SPARE_OF_UNPACKED

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread: sums, and the unpacked weights of both packed tiles."""
        return super().accumulators + 2 * MMA_M * TILE_COLUMNS // 2 // WARPGROUP

    def stage_bytes(self, dtypes: Dtypes) -> int:
        return self.row_tiles * self.half_words * 4 + self.tile_m * BLOCK_K * dtypes.x.itemsize

    def epilogue_elements(self, parts: int) -> int:
        """A buffer for each consumer."""
        return self.consumers * MMA_M * self.epi_tokens

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        reasons = []
        if not TAIL_ROWS <= self.tokens <= MOST_ROWS or self.tokens % TAIL_ROWS:
            reasons.append(f"{self.tokens} tokens are not a multiple of {TAIL_ROWS} from {TAIL_ROWS} to {MOST_ROWS}")
        if self.box_n not in (MMA_M, 2 * MMA_M):
            reasons.append(f"box_n is {self.box_n}: {MMA_M} or {2 * MMA_M} is needed, for one consumer or two")
        if self.stages < LEAST_STAGES:
            reasons.append(f"{self.stages} stages: {LEAST_STAGES} are the fewest, those of two packed tiles")
        if self.pingpong or self.cluster != 1:
            reasons.append("consumers share a tile that no other CTA shares")
        return reasons + super().objections(spec, smem_bytes)


def fitted(
    spec: ExpertsSpec, target: Target, tokens: int, groups: int = 1, per_sm: int = CTAS_PER_SM
) -> WeightOnlyDecodeConfig | None:
    """Tiles for so many tokens, with as many stages as fit; None where two do not."""
    tiles = WeightOnlyConfig(tokens=tokens, groups=groups)
    room = (target.smem_bytes + RESERVED_BYTES) // per_sm - RESERVED_BYTES - ALIGNMENT_BYTES - table_bytes(spec, tiles)
    stages = min(MOST_STAGES, room // (tiles.packed_stage_bytes(TILES) + BARRIER_BYTES))
    if stages < 2:
        return None
    tiles = replace(tiles, stages=stages)
    return WeightOnlyDecodeConfig(first=tiles, second=tiles, per_sm=per_sm)


@cache
def few(spec: ExpertsSpec, target: Target) -> tuple[WeightOnlyDecodeConfig, ...]:
    """The kernels for few tokens. None where not all fit."""
    found = [fitted(spec, target, tokens) for tokens in TOKENS]
    return tuple(one for one in found if one is not None) if all(found) else ()


@cache
def grouped(spec: ExpertsSpec, target: Target) -> tuple[ExpertsConfig, ...]:
    """The grouped GEMMs, each with as many stages as fit."""
    found = []
    for tokens in ROWS:
        tiles = WeightOnlyGroupedTiles(tokens=tokens)
        deep: list[object] = [deepest(tiles, gemm, target.smem_bytes) for gemm in products(spec)]  # type: ignore[arg-type]
        first, second = deep
        if isinstance(first, WeightOnlyGroupedTiles) and isinstance(second, WeightOnlyGroupedTiles):
            found.append(ExpertsConfig(first=first, second=second))
    return tuple(found)


def grouped_ns(config: ExpertsConfig, spec: ExpertsSpec, tokens: int, target: Target) -> float:
    """Of both grouped GEMMs, tokens routed evenly."""
    m_tiles = tiles_of_experts(spec, tokens, config.tile_m)
    total = 0.0
    for tiles, gemm in zip((config.first, config.second), products(spec), strict=True):
        waves = max(m_tiles * ceil_div(gemm.n, tiles.columns(gemm.parts)) / target.used_sms, 1)
        total += waves * ceil_div(gemm.k, TILE_COLUMNS) * (STEP_NS + ROW_NS * config.tile_m)
    return total


@cache
def candidates(spec: ExpertsSpec, target: Target) -> tuple[Config, ...]:
    """The kernels of a layer for any number of tokens. None where not all fit."""
    if target.kernel_arch == "sm100":
        return sm100.candidates(spec, target)
    if not few(spec, target) or not grouped(spec, target):
        return ()
    many = dict.fromkeys(fastest(spec, tokens, target) for tokens in PROBED_TOKENS if tokens > MOST_TOKENS)
    return (*few(spec, target), *many)


def fastest(spec: ExpertsSpec, tokens: int, target: Target) -> ExpertsConfig:
    """The grouped GEMMs for so many tokens, by `grouped_ns`."""
    return min(grouped(spec, target), key=lambda config: grouped_ns(config, spec, tokens, target))


def objections(spec: ExpertsSpec, target: Target) -> list[str]:
    """Why no configuration serves a layer."""
    if not spec.weight_only:
        return [f"weights in {spec.weight or '16 bits'}: this one's are in mxfp4-tiled"]
    if not candidates(spec, target):
        return [f"{target.smem_bytes} bytes of shared memory are too few for every tile"]
    return []


@cache
def choose(spec: ExpertsSpec, tokens: int, target: Target) -> Config:
    """The kernels for so many tokens, of the candidates: on SM90 those for few, or the fastest grouped GEMMs."""
    if target.kernel_arch == "sm100":
        return sm100.choose(spec, tokens, target)
    target = target.sparing(0)
    found = candidates(spec, target)
    if tokens <= MOST_TOKENS:
        return next(config for config in found if config.serves(tokens))
    many = [config for config in found if isinstance(config, ExpertsConfig)]
    return min(many, key=lambda config: grouped_ns(config, spec, tokens, target))
