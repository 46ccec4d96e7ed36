# SPDX-License-Identifier: Apache-2.0
"""Tiles of the kernels of experts whose weights are in 8 bits; needs no CuTe DSL."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from dsl_backend.experts.configs import DecodeConfig, ExpertsConfig, table_bytes
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.configs import deepest
from dsl_backend.gemm.scaled import MULTIPLE, ScaledGemmSpec
from dsl_backend.gemm.sizes import ceil_div
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M
from dsl_backend.gemm.sm90.scaled_configs import BLOCK_K, MOST_PROMOTION, ScaledGemmConfig, ScaledSmallMConfig
from dsl_backend.gemm.sm100.configs import GemmConfig, PromotedConfig
from dsl_backend.quant.format import GROUP, GROUP_SCALED, ScaledFormat
from dsl_backend.runtime.target import Target

# Rows of weights of a box, best first. On an H200, layers of Qwen3-30B-A3B and of an eighth of DeepSeek-V3 took 1.15 to
# 1.3 times as long with 32 as with 64, with 1 to 2048 tokens and a launch of its own that quantises.
BOXES = (64, 32)
# The most rows of an expert, on average, for which consumers work side by side, by whether scales are of blocks. On an
# H200 Qwen3-30B-A3B's layer took 0.92 to 0.97 of the time of tiles of 128 rows with 0.5 to 32 rows, and with 128 rows
# 0.95 (blocks) and 1.03 (channels); an eighth of DeepSeek-V3's 0.97 to 1.00 with up to 16, and with 128 0.88 and 1.08.
SIDE_BY_SIDE_ROWS = {True: 128, False: 32}
# By whether scales are of blocks: wider tiles than BOXES make, for experts with many rows. A tile of 128 x 128 reads 32
# KB into shared memory for 2 Mi multiplications of e4m3; for as many, one of 128 x 256 reads 24 KB and one of 128 x 192
# reads 27. Where boxes take turns, they share one set of wgmma's accumulators. A tile of two boxes of 128 has a whole
# group of the activation's result, so that its epilogue quantises it.
WIDE_TILES = {
    True: ScaledGemmConfig(box_n=128, turns=2),
    False: ScaledGemmConfig(box_n=96, promotion=MOST_PROMOTION),
}
# The fewest rows of an expert, on average, for them: with 128 rows of Qwen3-30B-A3B's layer they take 0.90 (blocks) and
# 0.98 (channels) of the time of others, with 32 rows 1.01 and 1.06.
WIDE_ROWS = 128
# Tokens of a consumer of the kernels for few, fewest first, and consumers. Two with 32 tokens each are faster than one
# with 64 in layers that are no experts (docs/performance/scaled-linear.md).
FEW_TOKENS = ((8, 1), (16, 1), (32, 1), (24, 2), (32, 2))
MOST_FEW = max(tokens * groups for tokens, groups in FEW_TOKENS)
# Up to so many tokens a stage of them has two blocks of k, where scales allow it.
DEEP_TOKENS = 32
# Of SM100, by whether scales are of blocks, widest first. Arithmetic, none of it timed.
SM100_TILES: dict[bool, tuple[GemmConfig, ...]] = {
    True: tuple(PromotedConfig(box_n=box_n) for box_n in (64, 32)),
    False: tuple(GemmConfig(box_n=box_n) for box_n in (128, 64, 32)),
}


@dataclass(frozen=True, kw_only=True)
class SideBySideConfig(ScaledGemmConfig):
    """Both consumers have all 64 rows of a tile, and half of its columns each: for experts with few rows.

    Attributes:
        box_n: rows of weights of each of the four boxes of a stage.
    """

    tile_m: int = 64

    @property
    def consumer_m(self) -> int:
        return self.tile_m

    @property
    def weight_rows(self) -> int:
        return CONSUMERS * 2 * self.box_n

    def columns(self, parts: int) -> int:
        return self.weight_rows // parts

    def epilogue_elements(self, parts: int) -> int:
        return MMA_M * self.columns(parts)

    def smem_bytes(self, spec: ScaledGemmSpec) -> int:  # type: ignore[override]
        # Largest magnitudes of both consumers' rows, of two tiles.
        told = 0 if spec.out is None else 2 * CONSUMERS * self.tile_m * 4
        return super().smem_bytes(spec) + told

    def out_objections(self, spec: ScaledGemmSpec, out: ScaledFormat) -> list[str]:
        columns = self.columns(spec.parts)
        if not out.blocked or columns != GROUP:
            return [f"out {out}: both consumers' {columns} columns are no group of {GROUP} of the output"]
        return []


@dataclass(frozen=True, kw_only=True)
class ScaledExpertsConfig(ExpertsConfig):
    """The grouped GEMMs of a layer whose weights are in 8 bits.

    Attributes:
        beside: a launch of its own quantises the activation's result, which the first product writes in 16 bits. Else
            the first product's epilogue does, and a CTA finishes whole groups of 128 columns. Where two tiles make a
            group, a layer took 1.04 to 1.45 times as long with 1 to 2048 tokens; consumers side by side have one in
            their tile, and take 0.97 to 1.00 (H200).
    """

    beside: bool = False

    @property
    def group_tiles(self) -> int:
        """Tiles of the first product that a CTA finishes together."""
        if self.beside:
            return 1
        assert isinstance(self.first, ScaledGemmConfig)
        return self.first.tiles_of_group(GROUP_SCALED, 2)

    def ctas(self, spec: ExpertsSpec, tokens: int, target: Target) -> tuple[int, int, int]:
        """CTAs of the routing, the first and the second product."""
        routing, _, second = super().ctas(spec, tokens, target)
        units = ceil_div(spec.intermediate_size, self.first.columns(2) * self.group_tiles)
        return routing, min(self.work_tiles(spec, tokens) * units, target.used_sms), second


@dataclass(frozen=True, kw_only=True)
class ScaledDecodeConfig(DecodeConfig):
    """The kernels for few tokens of a layer whose weights are in 8 bits."""

    @property
    def beside(self) -> bool:
        """As `ScaledExpertsConfig.beside`."""
        return True


Config = ScaledExpertsConfig | ScaledDecodeConfig


@cache
def products(spec: ExpertsSpec, beside: bool) -> tuple[ScaledGemmSpec, ScaledGemmSpec]:
    """Both products as GEMMs."""
    assert spec.weight is not None
    assert spec.activations is not None
    hidden, width = spec.hidden_size, spec.intermediate_size
    first = ScaledGemmSpec(
        n=width,
        k=hidden,
        x=spec.activations,
        weight=spec.weight,
        dtype=spec.dtype,
        out=None if beside else spec.activations,
        activation=spec.activation,
        interleaved=spec.interleaved,
    )
    second = ScaledGemmSpec(n=hidden, k=width, x=spec.activations, weight=spec.weight, dtype=spec.dtype)
    return first, second


def fitting(
    kind: type[ScaledGemmConfig], gemm: ScaledGemmSpec, spec: ExpertsSpec, target: Target
) -> list[ScaledGemmConfig]:
    """Tiles that fit, each with as many stages as do; sums are promoted as seldom as scales and precision allow."""
    assert spec.weight is not None
    promotion = 1 if spec.weight.blocked else MOST_PROMOTION
    found = (deepest(kind(box_n=box, promotion=promotion), gemm, target.smem_bytes) for box in BOXES)
    return [config for config in found if isinstance(config, ScaledGemmConfig)]


def objections(spec: ExpertsSpec, target: Target) -> list[str]:
    """Why no configuration serves a layer."""
    if spec.weight is None:
        return ["weights in 16 bits: this one's are in 8 bits"]
    if spec.mma_scaled or spec.weight_only:
        return [f"weights in {spec.weight}: this one's scales are those of e4m3 blocks or channels"]
    reasons = []
    if spec.router_weights is RouterWeights.INPUT:
        reasons.append("router weights on the input")
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(spec, name)
        if size % MULTIPLE:
            reasons.append(f"{name} {size} is not a multiple of {MULTIPLE}")
    if not reasons and not candidates(spec, target):
        reasons.append(f"{target.smem_bytes} bytes of shared memory are too few for every tile")
    return reasons


def sm100_candidates(spec: ExpertsSpec, target: Target) -> tuple[ScaledExpertsConfig, ...]:
    """SM100's, widest first."""
    assert spec.weight is not None
    found = []
    for tiles in SM100_TILES[spec.weight.blocked]:
        first, second = (deepest(tiles, gemm, target.smem_bytes) for gemm in products(spec, True))
        if isinstance(first, GemmConfig) and isinstance(second, GemmConfig):
            found.append(ScaledExpertsConfig(first=first, second=second, beside=True, prefetches=True))
    return tuple(found)


@cache
def by_height(spec: ExpertsSpec, target: Target) -> tuple[ScaledExpertsConfig, ...]:
    """SM90's kernels whose tiles have BOXES: those of 128 rows, then those of 64. None where nothing fits."""
    assert spec.weight is not None
    found = []
    for kind in (ScaledGemmConfig, SideBySideConfig):
        beside = kind is ScaledGemmConfig or not spec.weight.blocked
        first, second = (fitting(kind, gemm, spec, target) for gemm in products(spec, beside))
        if first and second:
            config = ScaledExpertsConfig(first=first[0], second=second[0], beside=beside, prefetches=True, trims=True)
            found.append(config)
    return tuple(found)


@cache
def wide(spec: ExpertsSpec, target: Target) -> ScaledExpertsConfig | None:
    """SM90's kernels of wide tiles, with as many stages as fit; None where not both do."""
    assert spec.weight is not None
    tiles, beside = WIDE_TILES[spec.weight.blocked], not spec.weight.blocked
    first, second = (deepest(tiles, gemm, target.smem_bytes) for gemm in products(spec, beside))
    if not isinstance(first, ScaledGemmConfig) or not isinstance(second, ScaledGemmConfig):
        return None
    return ScaledExpertsConfig(first=first, second=second, beside=beside, prefetches=True, trims=True)


def candidates(spec: ExpertsSpec, target: Target) -> tuple[ScaledExpertsConfig, ...]:
    """The kernels of a layer for any number of tokens; what is compiled before serving. None where nothing fits."""
    if target.kernel_arch == "sm100":
        return sm100_candidates(spec, target)
    found, widest = by_height(spec, target), wide(spec, target)
    return found if not found or widest is None else (*found, widest)


def choose(spec: ExpertsSpec, tokens: int, target: Target) -> ScaledExpertsConfig:
    """The kernels for so many tokens, of the candidates.

    Of wide tiles from WIDE_ROWS rows of an expert on, on average. Side by side where experts have few rows, unless the
    tiles of 128 rows are too few for the SMs: one token of Qwen3-30B-A3B has 48 and took 1.1 times as long with them on
    an H200, one of an eighth of DeepSeek-V3 has 128 and took 0.98.
    """
    assert spec.weight is not None
    whole, rows = target.sparing(0), tokens * spec.topk
    if target.kernel_arch == "sm100":
        return choose_sm100(spec, tokens, target)
    widest = wide(spec, whole)
    if widest is not None and rows >= WIDE_ROWS * spec.num_experts:
        return widest
    tall, *others = by_height(spec, whole)
    few = rows <= SIDE_BY_SIDE_ROWS[spec.weight.blocked] * spec.num_experts
    for side in others:
        if few and 4 * side.ctas(spec, tokens, target)[1] >= 3 * target.used_sms:
            return side
    return tall


def choose_sm100(spec: ExpertsSpec, tokens: int, target: Target) -> ScaledExpertsConfig:
    """The widest tiles of SM100 that give most SMs one."""
    found = sm100_candidates(spec, target.sparing(0))
    filling = (one for one in found if 4 * one.ctas(spec, tokens, target)[1] >= 3 * target.used_sms)
    return next(filling, found[-1])


def few_tiles(spec: ExpertsSpec) -> Iterator[ScaledSmallMConfig]:
    """Tiles of the kernels for few tokens, fewest first."""
    assert spec.weight is not None
    for tokens, groups in FEW_TOKENS:
        deep = not spec.weight.blocked and tokens * groups <= DEEP_TOKENS
        tile_k = 2 * BLOCK_K if deep else BLOCK_K
        yield ScaledSmallMConfig(tokens=tokens, groups=groups, split_tokens=groups > 1, tile_k=tile_k)


@cache
def few(spec: ExpertsSpec, target: Target) -> tuple[ScaledDecodeConfig, ...]:
    """SM90's kernels for few tokens, each with as many stages as fit; none where not all do."""
    found = []
    for tiles in few_tiles(spec):
        room = target.smem_bytes - table_bytes(spec, tiles)
        first, second = (deepest(tiles, gemm, room) for gemm in products(spec, True))
        if not isinstance(first, ScaledSmallMConfig) or not isinstance(second, ScaledSmallMConfig):
            return ()
        found.append(ScaledDecodeConfig(first=first, second=second))
    return tuple(found)


def decode_candidates(spec: ExpertsSpec, target: Target) -> tuple[Config, ...]:
    """The kernels for few tokens, and those for more."""
    return (*few(spec, target), *candidates(spec, target))


def decode_objections(spec: ExpertsSpec, target: Target) -> list[str]:
    """Why the kernels for few tokens, and those for more, do not serve a layer."""
    reasons = objections(spec, target)
    if not reasons and not few(spec, target):
        reasons.append(f"{target.smem_bytes} bytes of shared memory are too few for the tiles of few tokens")
    return reasons


def choose_decode(spec: ExpertsSpec, tokens: int, target: Target) -> Config:
    """The kernels for so many tokens: those for few up to MOST_FEW."""
    if tokens <= MOST_FEW:
        return next(config for config in few(spec, target.sparing(0)) if config.serves(tokens))
    return choose(spec, tokens, target)
