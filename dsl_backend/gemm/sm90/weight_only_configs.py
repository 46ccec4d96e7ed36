# SPDX-License-Identifier: Apache-2.0
"""Tiles and stages of the SM90 kernel of weights of 4 or 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.sizes import ceil_div
from dsl_backend.gemm.sm90.configs import MMA_M, SmallMConfig
from dsl_backend.gemm.weight_only import MOST_ROWS, WeightOnlyGemmSpec
from dsl_backend.quant.weight_only import TILE_COLUMNS, WeightOnlyFormat
from dsl_backend.runtime.target import Target

MOST_STAGES, MOST_SPLITS = 24, 8
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

    def packed_stage_bytes(self, kind: WeightOnlyFormat) -> int:
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


def fitting(spec: WeightOnlyGemmSpec, smem_bytes: int) -> Iterator[WeightOnlyConfig]:
    """The configurations that fit a problem, each with as many stages as fit."""
    for tiles in TILES:
        found = deepest(tiles, spec, smem_bytes, MOST_STAGES)  # type: ignore[arg-type]
        if isinstance(found, WeightOnlyConfig):
            yield found


# CTAs for each SM between which two share it, with half of the stages each; of clusters of 8 more of them did.
SHARED_FROM, SHARED_TO, SHARED_TO_OF_8 = 1.05, 1.75, 1.95
# Rows of a wgmma up to which two CTAs have registers enough.
SHARED_TOKENS = 16
# CTAs for each SM from which a launch fills the GPU.
FILLED, NEARLY_ALL = 0.5, 0.9


def chosen(spec: WeightOnlyGemmSpec, rows: int, target: Target) -> WeightOnlyConfig:
    """The configuration for so many rows, by what was timed on an H200 (docs/performance.md).

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
        most = {config: SHARED_TO_OF_8 if config.num_splits == MOST_SPLITS else SHARED_TO for config in split}
        shared = [c for c in split if SHARED_FROM < load[c] < most[c] and (c.groups == 1 or few)]
        if shared:
            best = min(shared, key=lambda config: (config.groups, config.num_splits))
            return replace(best, stages=max(2, best.stages // 2))
    halves = [config for config in one if config.num_splits == 2 and load[config] > NEARLY_ALL]
    wide = [config for config in at_once if config.groups == 2 and config.num_splits == 4 and load[config] > FILLED]
    deep = [config for config in one if config.num_splits == MOST_SPLITS]
    return next(iter([*halves, *(wide if few and spec.kind.bits == 8 else []), *deep]), stream)
