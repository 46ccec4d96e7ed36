# SPDX-License-Identifier: Apache-2.0
"""Layers of experts in MXFP4 under bfloat16 for the CuTe DSL kernels, with tiles small enough for the emulator."""

import random
from dataclasses import dataclass, replace

import torch
from experts_cases import SMS, TARGETS

import emulator
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.configs import Config, DecodeConfig, ExpertsConfig
from dsl_backend.experts.cute import weight_only_host as host
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.experts.weight_only_configs import WeightOnlyDecodeConfig, WeightOnlyGroupedTiles
from dsl_backend.experts.weight_only_sm100_configs import UnpackedSmallMConfig, UnpackedTiles
from dsl_backend.gemm.sm90.weight_only_configs import WeightOnlyConfig
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import (
    WEIGHT_ONLY,
    WEIGHT_ONLY_CASES,
    ExpertsCase,
    judge,
    random_weight_only_case,
    tensors,
)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyEmulated:
    """A case and the tiles that it runs with.

    Attributes:
        why: what this case alone would find.
        first, second: tiles of the kernels for few tokens, or of the grouped GEMMs.
        per_sm: CTAs that share an SM, of the former.
        routing_ctas: CTAs that sort the pairs, of the latter.
    """

    id: str
    why: str
    case: ExpertsCase
    first: WeightOnlyConfig | WeightOnlyGroupedTiles | UnpackedTiles | UnpackedSmallMConfig
    second: WeightOnlyConfig | WeightOnlyGroupedTiles | UnpackedTiles | UnpackedSmallMConfig | None = None
    per_sm: int = 1
    routing_ctas: int = 1

    @property
    def arch(self) -> str:
        return "sm_100a" if isinstance(self.first, (UnpackedTiles, UnpackedSmallMConfig)) else "sm_90a"

    @property
    def config(self) -> Config:
        first, second = self.first, self.second or self.first
        if isinstance(first, UnpackedTiles):
            assert isinstance(second, UnpackedTiles)
            return ExpertsConfig(first=first, second=second, prefetches=True)
        if isinstance(first, UnpackedSmallMConfig):
            assert isinstance(second, UnpackedSmallMConfig)
            return DecodeConfig(first=first, second=second)
        if isinstance(first, WeightOnlyGroupedTiles):
            assert isinstance(second, WeightOnlyGroupedTiles)
            return ExpertsConfig(first=first, second=second)
        assert isinstance(second, WeightOnlyConfig)
        return WeightOnlyDecodeConfig(first=first, second=second, per_sm=self.per_sm)

    @property
    def ctas(self) -> tuple[int, ...]:
        ctas = self.config.ctas(self.case.spec, self.case.tokens, TARGETS[self.arch])
        return (self.routing_ctas, *ctas[1:]) if isinstance(self.config, ExpertsConfig) else ctas


def emulate(
    one: WeightOnlyEmulated,
    schedule: str,
    seed: int = 0,
    given: ExpertsOperands | None = None,
) -> torch.Tensor:
    """Compile, run twice on the emulator, judge; any finding or warning raises. Returns the output.

    The second run finds what the first one leaves in the workspace.
    """
    spec, config, target = one.case.spec, one.config, TARGETS[one.arch]
    if given is None:
        given = tensors(one.case, "cpu")
    workspace = Workspace(torch.device("cpu"))
    with emulator.device(arch=one.arch, sms=SMS, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, config), target)
        for _ in range(2):
            host.run(function, spec, config, given, one.ctas, workspace)
    judge(one.case, given)
    assert not workspace.flags(0).any(), "a flag was left set"
    return given.out


SMALL = WeightOnlyConfig(tokens=8, stages=2)
TWO = WeightOnlyConfig(tokens=16, groups=2, stages=3)

# One consumer and two; as few stages as there may be, and an odd number of them.
LOW = WeightOnlyGroupedTiles(tokens=16, box_n=64, stages=4)
WIDE = WeightOnlyGroupedTiles(tokens=32, box_n=128, stages=5)

CASES = [
    WeightOnlyEmulated(id="plain", why="all edges ragged; CTAs share tiles", case=WEIGHT_ONLY, first=SMALL),
    WeightOnlyEmulated(
        id="gpt-oss",
        why="alternating gate and up rows; biases; a limit; two consumers, of which the last has no rows",
        case=WEIGHT_ONLY_CASES["mxfp4-tiled-gpt-oss"],
        first=TWO,
    ),
    WeightOnlyEmulated(
        id="long",
        why="several tiles a CTA, several times round the stages; partial sums of several CTAs",
        case=replace(WEIGHT_ONLY, tokens=7, num_experts=4, hidden=736, width=288, pad_x=8, pad_out=16),
        first=SMALL,
        second=replace(SMALL, stages=3),
    ),
    WeightOnlyEmulated(
        id="many",
        why="as many tokens as a tile has; registers from the producer",
        case=replace(WEIGHT_ONLY, tokens=64, hidden=288, width=160, router_weights=RouterWeights.NONE),
        first=WeightOnlyConfig(tokens=64, groups=2, stages=2),
    ),
    WeightOnlyEmulated(
        id="shared-sms",
        why="two CTAs on an SM",
        case=replace(WEIGHT_ONLY, hidden=416, width=288),
        first=SMALL,
        per_sm=2,
    ),
    WeightOnlyEmulated(
        id="mapped",
        why="other ranks' experts, -1, int64",
        case=replace(WEIGHT_ONLY, tokens=20, mapped=True, padding=0.3, ids_dtype=torch.int64, routing="zipf"),
        first=WeightOnlyConfig(tokens=32, stages=2),
    ),
    WeightOnlyEmulated(
        id="all-padding", why="no expert is chosen", case=WEIGHT_ONLY_CASES["mxfp4-tiled-all-padding"], first=SMALL
    ),
    WeightOnlyEmulated(
        id="input-weights",
        why="weights on sums, before the bias",
        case=WEIGHT_ONLY_CASES["mxfp4-tiled-input"],
        first=TWO,
    ),
    WeightOnlyEmulated(
        id="special",
        why="NaN and infinities stay in their rows",
        case=WEIGHT_ONLY_CASES["mxfp4-tiled-special"],
        first=SMALL,
    ),
    WeightOnlyEmulated(
        id="one",
        why="fewer iterations than CTAs",
        case=replace(WEIGHT_ONLY, tokens=1, num_experts=1, topk=1, hidden=32, width=32),
        first=SMALL,
    ),
]
GROUPED = [
    WeightOnlyEmulated(id="ragged", why="all edges ragged", case=WEIGHT_ONLY, first=LOW),
    WeightOnlyEmulated(
        id="gpt-oss",
        why="alternating gate and up rows; biases; a limit; a consumer past the last row",
        case=WEIGHT_ONLY_CASES["mxfp4-tiled-gpt-oss"],
        first=WIDE,
    ),
    WeightOnlyEmulated(
        id="rows",
        why="experts of several tiles, of one, of none; other ranks'; several CTAs sort; parts of a tile's rows",
        case=replace(WEIGHT_ONLY_CASES["mxfp4-tiled-many"], num_experts=8, topk=3, ids_dtype=torch.int64),
        first=replace(LOW, tokens=48, band=2),
        routing_ctas=3,
    ),
    WeightOnlyEmulated(
        id="tall",
        why="rows that are stored in two parts, or the second part has none; an expert without rows",
        case=replace(WEIGHT_ONLY, tokens=170, topk=1, routing="one", hidden=192, width=160, biases=True),
        first=replace(WIDE, tokens=128, stages=4),
    ),
    WeightOnlyEmulated(
        id="parts",
        why="pieces of a tile's rows, of which experts have all, some and none",
        case=replace(WEIGHT_ONLY, tokens=110, topk=1, routing="zipf", num_experts=4, interleaved=True),
        first=replace(LOW, tokens=96),
    ),
    WeightOnlyEmulated(
        id="deep",
        why="several tiles a CTA, several times round the stages; half of the last packed tile is beyond the columns",
        case=replace(WEIGHT_ONLY, tokens=20, hidden=416, width=160, pad_x=8, pad_out=16),
        first=LOW,
        second=replace(LOW, box_n=128, stages=7),
    ),
    WeightOnlyEmulated(
        id="input",
        why="weights on sums, before the bias",
        case=replace(WEIGHT_ONLY_CASES["mxfp4-tiled-input"], tokens=40),
        first=WIDE,
    ),
    WeightOnlyEmulated(
        id="special",
        why="NaN and infinities stay in their rows",
        case=replace(WEIGHT_ONLY_CASES["mxfp4-tiled-special"], tokens=24),
        first=LOW,
    ),
    WeightOnlyEmulated(
        id="padding", why="no expert has a row", case=WEIGHT_ONLY_CASES["mxfp4-tiled-all-padding"], first=LOW
    ),
    WeightOnlyEmulated(
        id="single",
        why="fewer tiles than CTAs; results are not weighted",
        case=replace(
            WEIGHT_ONLY, tokens=1, num_experts=1, topk=1, hidden=32, width=32, router_weights=RouterWeights.NONE
        ),
        first=LOW,
    ),
]
# Packed tiles of one warpgroup's and of two; as few stages as there may be.
NARROW = UnpackedTiles(box_n=64, stages=2)
BROAD = UnpackedTiles(box_n=128, stages=3)
SM100 = [
    WeightOnlyEmulated(id="sm100-ragged", why="all edges ragged", case=WEIGHT_ONLY, first=NARROW),
    WeightOnlyEmulated(
        id="sm100-gpt-oss",
        why="alternating gate and up rows; biases; a limit; packed tiles past the last row",
        case=WEIGHT_ONLY_CASES["mxfp4-tiled-gpt-oss"],
        first=BROAD,
        second=NARROW,
    ),
    WeightOnlyEmulated(
        id="sm100-rows",
        why="experts of several tiles, of one, of none; other ranks'; several CTAs sort",
        case=replace(WEIGHT_ONLY_CASES["mxfp4-tiled-many"], num_experts=8, topk=3, ids_dtype=torch.int64),
        first=replace(NARROW, band=2),
        routing_ctas=3,
    ),
    WeightOnlyEmulated(
        id="sm100-tall",
        why="several tiles of an expert; an expert without rows",
        case=replace(WEIGHT_ONLY, tokens=170, topk=1, routing="one", hidden=192, width=160, biases=True),
        first=BROAD,
    ),
    WeightOnlyEmulated(
        id="sm100-deep",
        why="several tiles a CTA, several times round the stages; half of the last packed tile is beyond the columns",
        case=replace(WEIGHT_ONLY, tokens=20, hidden=416, width=160, pad_x=8, pad_out=16),
        first=replace(NARROW, stages=4),
        second=replace(BROAD, stages=5),
    ),
    WeightOnlyEmulated(
        id="sm100-input",
        why="weights on sums, before the bias",
        case=replace(WEIGHT_ONLY_CASES["mxfp4-tiled-input"], tokens=40, biases=True),
        first=NARROW,
    ),
    WeightOnlyEmulated(
        id="sm100-special",
        why="NaN and infinities stay in their rows",
        case=replace(WEIGHT_ONLY_CASES["mxfp4-tiled-special"], tokens=24),
        first=NARROW,
    ),
    WeightOnlyEmulated(
        id="sm100-padding",
        why="no expert has a row",
        case=WEIGHT_ONLY_CASES["mxfp4-tiled-all-padding"],
        first=NARROW,
    ),
    WeightOnlyEmulated(
        id="sm100-single",
        why="fewer tiles than CTAs; results are not weighted",
        case=replace(
            WEIGHT_ONLY, tokens=1, num_experts=1, topk=1, hidden=32, width=32, router_weights=RouterWeights.NONE
        ),
        first=NARROW,
    ),
]
# Of the cases for few tokens with tiles of SM100's.
FEW = UnpackedSmallMConfig(tokens=16, stages=2)
FEW_SM100 = [
    replace(
        one,
        id=f"sm100-few-{one.id}",
        first=replace(FEW, tokens=next(tokens for tokens in (16, 32, 64) if tokens >= one.case.tokens)),
        second=replace(FEW, tokens=64, stages=3) if one.id in ("gpt-oss", "long") else None,
    )
    for one in CASES
    if one.id != "shared-sms"
]
FEW_SM100.append(
    WeightOnlyEmulated(
        id="sm100-few-deep",
        why="several times round the stages of packed and of unpacked weights",
        case=replace(WEIGHT_ONLY, hidden=544),
        first=replace(FEW, stages=4),
    )
)
BY_ID = {one.id: one for one in (*CASES, *FEW_SM100)}
GROUPED_BY_ID = {one.id: one for one in (*GROUPED, *SM100)}


def random_emulated(seed: int) -> WeightOnlyEmulated:
    """Any layer with tiles that take it."""
    draw = random.Random(seed)
    tokens = draw.choice((1, 3, 8, 15, 33, 48, 64))
    case = replace(random_weight_only_case(draw, 320), tokens=tokens)
    tiles = WeightOnlyConfig(
        tokens=next(one for one in (8, 16, 32, 48, 64) if one >= tokens),
        groups=draw.choice((1, 2)),
        stages=draw.randint(2, 4),
    )
    return WeightOnlyEmulated(id=f"fuzz-{seed}", why="any", case=case, first=tiles, per_sm=draw.choice((1, 2)))


def random_grouped(seed: int) -> WeightOnlyEmulated:
    """Any layer with tiles of the grouped GEMMs."""
    draw = random.Random(seed)
    tokens = draw.choice((16, 32, 48, 64, 96, 128))
    first, second = (
        WeightOnlyGroupedTiles(
            tokens=tokens, box_n=draw.choice((64, 128)), stages=draw.randint(4, 6), band=draw.choice((1, 2, 8))
        )
        for _ in range(2)
    )
    case = random_weight_only_case(draw, 320)
    return WeightOnlyEmulated(
        id=f"grouped-{seed}",
        why="any",
        case=replace(case, tokens=min(case.tokens, 200)),
        first=first,
        second=second,
        routing_ctas=draw.choice((1, 1, 2, 5)),
    )


def random_sm100(seed: int) -> WeightOnlyEmulated:
    """Any layer with tiles of SM100's grouped GEMMs."""
    draw = random.Random(seed)
    first, second = (
        UnpackedTiles(box_n=draw.choice((64, 128)), stages=draw.randint(2, 4), band=draw.choice((1, 2, 8)))
        for _ in range(2)
    )
    case = random_weight_only_case(draw, 320)
    return WeightOnlyEmulated(
        id=f"sm100-{seed}",
        why="any",
        case=replace(case, tokens=min(case.tokens, 200)),
        first=first,
        second=second,
        routing_ctas=draw.choice((1, 1, 2, 5)),
    )


def random_few_sm100(seed: int) -> WeightOnlyEmulated:
    """Any layer with tiles of SM100's kernels for few tokens."""
    draw = random.Random(seed)
    tokens = draw.choice((1, 3, 8, 15, 33, 48, 64))
    case = replace(random_weight_only_case(draw, 320), tokens=tokens)
    first, second = (
        UnpackedSmallMConfig(
            tokens=draw.choice([one for one in (16, 32, 48, 64) if one >= tokens]), stages=draw.randint(2, 5)
        )
        for _ in range(2)
    )
    return WeightOnlyEmulated(id=f"sm100-few-{seed}", why="any", case=case, first=first, second=second)
