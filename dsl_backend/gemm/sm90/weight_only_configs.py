# SPDX-License-Identifier: Apache-2.0
"""Tiles and stages of the SM90 kernel of weights of 4 or 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.cost import GEMM, max_ctas
from dsl_backend.gemm.sizes import BLOCK_K, TAIL_ROWS, WARPGROUP, ceil_div
from dsl_backend.gemm.sm90.configs import MMA_M, SmallMConfig, SwappedTiles
from dsl_backend.gemm.weight_only import MOST_ROWS, WeightOnlyGemmSpec
from dsl_backend.quant.mxfp4_tiles import Mxfp4Tiles
from dsl_backend.quant.weight_only import TILE_COLUMNS, WeightOnlyFormat
from dsl_backend.runtime.target import Target

MOST_STAGES, MOST_SPLITS = 24, 8
# Of the persistent GEMM: two sets of sums have registers.
MOST_TOKENS = 128
# A packed tile's products are in flight while the next one's weights are read; each has two stages.
LEAST_STAGES = 4
# With 64 tokens 64 bytes spill all the same, and 96 without more registers.
TOKENS_OF_EQUAL_SHARES = 32


@dataclass(frozen=True, kw_only=True)
class WeightOnlyConfig(SmallMConfig):
    """The GEMM of weights of 4 or 8 bits for few rows. A stage has the columns of one packed tile."""

    tile_k: int = TILE_COLUMNS

    @property
    def row_tiles(self) -> int:
        """Packed tiles of a stage."""
        return 2 * self.box // MMA_M

    @property
    def trades_registers(self) -> bool:
        """With two consumers a thread has 168 registers otherwise: two sets of accumulators of 48 tokens spill."""
        return self.groups > 1 and self.tokens > TOKENS_OF_EQUAL_SHARES

    def packed_stage_bytes(self, kind: WeightOnlyFormat | Mxfp4Tiles) -> int:
        """Bytes of a stage: packed tiles, and 16-bit x."""
        return self.row_tiles * kind.tile_words * 4 + self.tile_tokens * self.tile_k * 2

    def smem_bytes(self, spec: WeightOnlyGemmSpec) -> int:  # type: ignore[override]
        plain = super().smem_bytes(spec)  # type: ignore[arg-type]
        return plain + self.stages * (self.packed_stage_bytes(spec.kind) - self.stage_bytes(spec.dtypes))

    def objections(self, spec: WeightOnlyGemmSpec, smem_bytes: int) -> list[str]:  # type: ignore[override]
        reasons = []
        if self.tile_k != TILE_COLUMNS:
            reasons.append(f"tile_k {self.tile_k}: packed weights have {TILE_COLUMNS} columns in a tile")
        if self.split_tokens:
            reasons.append("split_tokens: two consumers would unpack the same weights")
        if self.tokens > MOST_ROWS:
            reasons.append(f"{self.tokens} tokens: {MOST_ROWS} are the most, for which there are registers")
        return reasons + super().objections(spec, smem_bytes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class WeightOnlyGemmConfig(SwappedTiles):
    """The persistent GEMM of weights of 4 or 8 bits: two consumers of 64 rows of weights each. A stage has 64 columns.

    Attributes:
        tokens: rows of x; a multiple of 16 up to 128.
    """

    tokens: int = 128
    box_n: int = MMA_M

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread: sums, those of a packed tile, and its unpacked weights."""
        return 2 * super().accumulators + MMA_M * TILE_COLUMNS // 2 // WARPGROUP

    def epilogue_elements(self, parts: int) -> int:
        """A buffer for each consumer."""
        return self.consumers * MMA_M * self.epi_tokens

    def half_words(self, kind: WeightOnlyFormat) -> int:
        """32-bit words of half a packed tile with its scales and zero points."""
        return kind.value_words // 2 + kind.tile_words - kind.value_words

    def packed_bytes(self, kind: WeightOnlyFormat) -> int:
        """Bytes of weights of a stage."""
        return self.consumers * self.half_words(kind) * 4

    def smem_bytes(self, spec: WeightOnlyGemmSpec) -> int:  # type: ignore[override]
        plain = super().smem_bytes(spec)  # type: ignore[arg-type]
        packed = self.packed_bytes(spec.kind) + self.tile_m * BLOCK_K * spec.dtype.itemsize
        return plain + self.stages * (packed - self.stage_bytes(spec.dtypes))

    def objections(self, spec: WeightOnlyGemmSpec, smem_bytes: int) -> list[str]:  # type: ignore[override]
        reasons = []
        if not TAIL_ROWS <= self.tokens <= MOST_TOKENS or self.tokens % TAIL_ROWS:
            reasons.append(f"{self.tokens} tokens are not a multiple of {TAIL_ROWS} from {TAIL_ROWS} to {MOST_TOKENS}")
        if self.stages < LEAST_STAGES:
            reasons.append(f"{self.stages} stages: {LEAST_STAGES} are the fewest, those of two packed tiles")
        if self.pingpong or self.cluster != 1 or self.box_n != MMA_M:
            reasons.append(
                f"box_n is {self.box_n}: consumers have {MMA_M} rows each of a tile that no other CTA shares"
            )
        return reasons + super().objections(spec, smem_bytes)  # type: ignore[arg-type]


Config = WeightOnlyConfig | WeightOnlyGemmConfig

# Two consumers unpack; one leaves the units idle while it waits.
TILES = (
    *(WeightOnlyConfig(tokens=tokens, groups=2) for tokens in (8, 16, 32, 48, 64)),
    *(
        WeightOnlyConfig(tokens=tokens, groups=groups, num_splits=num_splits)
        for tokens in (8, 16, 32, 48, 64)
        for groups in (2, 1)
        for num_splits in (2, 4, 8)
        # They spilled, and took up to 2.4 times as long as others.
        if groups == 1 or tokens <= TOKENS_OF_EQUAL_SHARES
    ),
)


GEMMS = tuple(WeightOnlyGemmConfig(tokens=tokens) for tokens in range(64, MOST_TOKENS + 1, TAIL_ROWS))


@cache
def fitting(spec: WeightOnlyGemmSpec, smem_bytes: int) -> tuple[WeightOnlyConfig, ...]:
    """The configurations for few rows that fit a problem, each with as many stages as fit."""
    deep = (deepest(tiles, spec, smem_bytes, MOST_STAGES) for tiles in TILES)  # type: ignore[arg-type]
    return tuple(found for found in deep if isinstance(found, WeightOnlyConfig))


@cache
def gemms(spec: WeightOnlyGemmSpec, smem_bytes: int) -> tuple[WeightOnlyGemmConfig, ...]:
    """The same of the persistent GEMM."""
    deep: Iterator[object] = (deepest(tiles, spec, smem_bytes) for tiles in GEMMS)  # type: ignore[arg-type]
    return tuple(found for found in deep if isinstance(found, WeightOnlyGemmConfig))


# CTAs for each SM between which two share it, with half of the stages each. Of clusters of 8 more of them do with few
# columns of k: with 4096 they took 0.86 to 0.92 of stream-K's time, with 14336 1.12 to 1.15.
SHARED_FROM, SHARED_TO, SHARED_TO_OF_8 = 1.05, 1.75, 1.95
COLUMNS_OF_8 = 7168
# Rows of a wgmma up to which two CTAs have registers enough.
SHARED_TOKENS = 16
# CTAs for each SM from which a launch fills the GPU.
FILLED, NEARLY_ALL = 0.5, 0.9


def few_rows(spec: WeightOnlyGemmSpec, rows: int, target: Target) -> WeightOnlyConfig:
    """The configuration for up to 64 rows, by what was timed on an H200 (docs/performance/scaled-linear.md).

    Two CTAs on each SM unpack fastest, where a number of splits makes as many; then clusters that fill the SMs once;
    then stream-K.
    """
    tokens = min(config.tokens for config in TILES if config.tokens >= rows)
    fit = [config for config in fitting(spec, target.smem_bytes) if config.tokens == tokens]
    stream = next(config for config in fit if config.stream_k)
    split = [config for config in fit if not config.stream_k]
    load = {config: ceil_div(spec.n, 2 * config.box) * config.num_splits / target.used_sms for config in fit}
    at_once = [config for config in split if load[config] * target.used_sms <= max_ctas(config, rows, target)]
    one = [config for config in at_once if config.groups == 1]
    if tokens > SHARED_TOKENS:
        filling = [config for config in one if load[config] > FILLED]
        deep = [config for config in one if config.num_splits == MOST_SPLITS]
        return max(filling or deep, key=lambda config: (load[config], -config.num_splits), default=stream)
    few = tokens == TILES[0].tokens
    if spec.kind.bits == 4 or not few:
        of_8 = SHARED_TO_OF_8 if spec.k <= COLUMNS_OF_8 else SHARED_TO
        most = {config: of_8 if config.num_splits == MOST_SPLITS else SHARED_TO for config in split}
        shared = [c for c in split if SHARED_FROM < load[c] < most[c] and (c.groups == 1 or few)]
        if shared:
            best = min(shared, key=lambda config: (config.groups, config.num_splits))
            return replace(best, stages=max(2, best.stages // 2))
    halves = [config for config in one if config.num_splits == 2 and load[config] > NEARLY_ALL]
    wide = [config for config in at_once if config.groups == 2 and config.num_splits == 4 and load[config] > FILLED]
    deep = [config for config in one if config.num_splits == MOST_SPLITS]
    return next(iter([*halves, *(wide if few and spec.kind.bits == 8 else []), *deep]), stream)


# More rows: fitted to 160 timings on an H200, 6 % off (h200-weight-only-configs.jsonl). A step is a packed tile of k.
# The GEMM for few rows takes 256 rows of weights by 64 tokens in one, by the bits of a weight; then its CTAs add up the
# parts of their tiles.
STREAMED_STEP_NS = {4: 1070.0, 8: 1340.0}
PART_NS = 1200.0
# It was timed for no more rows.
STREAMED_ROWS = 2048
# Of the persistent GEMM: of 128 rows of weights by the bits of a weight, and of each token.
GEMM_STEP_NS, TOKEN_NS = {4: 850.0, 8: 800.0}, 2.0
LAUNCH_NS = 2500.0
# Rows that a configuration is chosen for: a smaller number takes that of the next multiple, a larger one that of the
# last.
ROWS_STEP, LAST_ROWS = 16, 8192


def estimated_ns(config: Config, spec: WeightOnlyGemmSpec, rows: int, target: Target) -> float:
    """Of a launch for more than 64 rows."""
    steps = ceil_div(spec.k, TILE_COLUMNS)
    if isinstance(config, WeightOnlyConfig):
        tiles = config.tiles(spec, rows)  # type: ignore[arg-type]
        ctas = max_ctas(config, rows, target)
        return ceil_div(tiles * steps, ctas) * STREAMED_STEP_NS[spec.kind.bits] + PART_NS * ctas / tiles + LAUNCH_NS
    waves = ceil_div(ceil_div(spec.n, config.mma_rows) * ceil_div(rows, config.tokens), target.used_sms)
    step_ns = GEMM_STEP_NS[spec.kind.bits] + TOKEN_NS * config.tokens
    return waves * (steps * step_ns + config.mma_rows * config.tokens / GEMM.stored_per_ns) + LAUNCH_NS


@lru_cache(maxsize=1 << 16)
def chosen(spec: WeightOnlyGemmSpec, rows: int, target: Target) -> Config:
    """The configuration for so many rows: for few by what was timed, for more by `estimated_ns`.

    It is the one for all SMs where some are spared: it has been compiled.
    """
    target = target.sparing(0)
    if rows <= MOST_ROWS:
        return few_rows(spec, rows, target)
    rows = min(ceil_div(rows, ROWS_STEP) * ROWS_STEP, LAST_ROWS)
    tried: list[Config] = list(gemms(spec, target.smem_bytes))
    if rows <= STREAMED_ROWS:
        tried += [one for one in fitting(spec, target.smem_bytes) if one.stream_k and one.tokens == MOST_ROWS]
    return min(tried, key=lambda one: estimated_ns(one, spec, rows, target))


@cache
def candidates(spec: WeightOnlyGemmSpec, target: Target) -> tuple[Config, ...]:
    """All that are chosen for some number of rows, which are compiled before a layer is served.

    Without a GPU these are of all usual parts of the architecture.
    """
    rows = (*sorted({tiles.tokens for tiles in TILES}), *range(MOST_ROWS + ROWS_STEP, LAST_ROWS + 1, ROWS_STEP))
    parts = (replace(target, chip=chip) for chip in target.chips)
    return tuple(dict.fromkeys(chosen(spec, count, of_chip) for of_chip in parts for count in rows))


def objections(spec: WeightOnlyGemmSpec, smem_bytes: int) -> list[str]:
    """Why no kernel serves a problem; empty where they do."""
    return [] if fitting(spec, smem_bytes) else TILES[0].objections(spec, smem_bytes)
