# SPDX-License-Identifier: Apache-2.0
"""Problems for SM90's kernels of experts in e4m3 for few tokens, with tiles small enough for the emulator."""

import random
from dataclasses import dataclass, replace

import torch
from experts_cases import SMS, TARGETS

import emulator
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.cute import scaled_host as host
from dsl_backend.experts.scaled_configs import ScaledDecodeConfig
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.sm90.scaled_configs import ScaledSmallMConfig
from dsl_backend.quant.format import ROW_SCALED
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import BLOCKS, SCALED_CASES, ExpertsCase, judge, random_scaled_case, tensors

ARCH = "sm_90a"


def tiles(first: ScaledSmallMConfig, second: ScaledSmallMConfig | None = None) -> ScaledDecodeConfig:
    return ScaledDecodeConfig(first=first, second=second or first)


FEW = ScaledSmallMConfig(tokens=8, stages=2)
ROWS = ScaledSmallMConfig(tokens=32, stages=2)
# Two stages, so that the pipeline comes round within a tile.
CONFIGS = {
    "few": tiles(FEW, replace(FEW, stages=3)),
    "rows": tiles(ROWS),
    "boxes": tiles(replace(ROWS, groups=2)),
    "halves": tiles(replace(ROWS, groups=2, split_tokens=True)),
    # Of channels alone: two blocks of k in a stage.
    "deep": tiles(replace(FEW, tokens=16, tile_k=256), replace(ROWS, stages=3)),
    "deep second": tiles(ROWS, replace(FEW, tokens=32, tile_k=256)),
}


@dataclass(frozen=True, kw_only=True)
class ScaledDecoded:
    """A case and the kernels that it runs with.

    Attributes:
        why: what this case alone would find.
        config: of CONFIGS.
    """

    id: str
    why: str
    case: ExpertsCase
    config: str

    @property
    def tiles(self) -> ScaledDecodeConfig:
        return CONFIGS[self.config]


def emulate(
    one: ScaledDecoded, schedule: str, seed: int = 1, given: ExpertsOperands | None = None, runs: int = 2
) -> torch.Tensor:
    """Compile, run on the emulator, judge; any finding or warning raises. Returns the output.

    A second run finds what the first one leaves in the workspace.
    """
    given, spec = tensors(one.case, "cpu") if given is None else given, one.case.spec
    target, workspace = TARGETS[ARCH], Workspace(torch.device("cpu"))
    with emulator.device(arch=ARCH, sms=SMS, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, one.tiles), target)
        for _ in range(runs):
            host.run(function, spec, one.tiles, given, one.tiles.ctas(spec, one.case.tokens, target), workspace)
    judge(one.case, given)
    assert not workspace.flags(0).any()
    return given.out


def at_most(case: ExpertsCase, tokens: int) -> ExpertsCase:
    return replace(case, tokens=min(case.tokens, tokens))


# Cases of one kernel have the same of what it is compiled for: compiling takes longer than most of them.
NINE = replace(BLOCKS, num_experts=9)
CHANNELS = replace(NINE, weight=ROW_SCALED)
LONG = replace(NINE, tokens=7, hidden=784, width=256)
CASES = [
    ScaledDecoded(
        id="blocks", why="all edges of tokens and columns ragged", case=replace(NINE, hidden=208), config="rows"
    ),
    ScaledDecoded(
        id="blocks-long", why="tiles of several CTAs, several times round the stages", case=LONG, config="rows"
    ),
    ScaledDecoded(
        id="blocks-half",
        why="experts without a token; several tiles of an expert's columns",
        case=replace(NINE, tokens=9, hidden=400, width=384, routing="half"),
        config="rows",
    ),
    ScaledDecoded(id="blocks-few", why="one token", case=replace(NINE, tokens=1, hidden=272), config="rows"),
    ScaledDecoded(
        id="blocks-none", why="ids of -1: no expert is chosen", case=replace(NINE, padding=1.0), config="rows"
    ),
    ScaledDecoded(
        id="blocks-special",
        why="NaN and infinities stay in their rows; tokens without an expert; rows apart",
        case=replace(NINE, special=True, padding=0.3, pad_x=16, pad_out=24),
        config="rows",
    ),
    ScaledDecoded(
        id="blocks-skewed",
        why="as many tokens as the tile has, all to the same experts",
        case=replace(NINE, tokens=32, routing="one"),
        config="rows",
    ),
    ScaledDecoded(id="blocks-one", why="one token, float16", case=SCALED_CASES["blocks-one"], config="few"),
    ScaledDecoded(
        id="blocks-padding", why="ids of -1, an expert map", case=SCALED_CASES["blocks-padding"], config="halves"
    ),
    ScaledDecoded(
        id="blocks-halves",
        why="as many tokens as two consumers have",
        case=replace(SCALED_CASES["blocks-padding"], tokens=64, hidden=80),
        config="halves",
    ),
    ScaledDecoded(
        id="blocks-x",
        why="x is given, router's weights are not; two boxes of 128 rows",
        case=replace(SCALED_CASES["blocks-no-weights"], x_given=True, width=384),
        config="boxes",
    ),
    ScaledDecoded(
        id="channels",
        why="a k tile that ends within a stage; columns end within a box",
        case=replace(CHANNELS, width=80, padding=0.2),
        config="deep second",
    ),
    ScaledDecoded(
        id="channels-long",
        why="sums of several CTAs, before they are scaled and behind",
        case=replace(CHANNELS, tokens=13, hidden=784, width=272),
        config="deep second",
    ),
    ScaledDecoded(
        id="channels-special",
        why="NaN and infinities stay in their rows",
        case=replace(CHANNELS, special=True, padding=0.3, width=96),
        config="deep second",
    ),
    ScaledDecoded(id="channels-few", why="one token", case=replace(CHANNELS, tokens=1, width=48), config="deep second"),
    ScaledDecoded(
        id="channels-many",
        why="more experts than a warp has lanes; x is given",
        case=replace(CHANNELS, tokens=30, num_experts=70, hidden=80, width=48, topk=3, x_given=True),
        config="halves",
    ),
    ScaledDecoded(
        id="channels-interleaved",
        why="gate and up rows alternate; float16; two blocks of k in a stage",
        case=at_most(SCALED_CASES["channels-interleaved"], 16),
        config="deep",
    ),
]
BY_ID = {one.id: one for one in CASES}


def with_an_expert_twice(case: ExpertsCase) -> ExpertsOperands:
    """Operands in which every other token has its first expert in all slots, with different weights."""
    given = tensors(case, "cpu")
    ids = given.topk_ids.clone()
    ids[::2] = ids[::2, :1]
    return given._replace(topk_ids=ids)


def random_decoded(seed: int) -> ScaledDecoded:
    draw = random.Random(seed)
    case = random_scaled_case(draw, 150)
    if case.router_weights is RouterWeights.INPUT:
        case = replace(case, router_weights=RouterWeights.OUTPUT)
    assert case.weight is not None
    found = [name for name in CONFIGS if not (case.weight.blocked and name.startswith("deep"))]
    name = draw.choice(found)
    most = min(one.tile_tokens for one in (CONFIGS[name].first, CONFIGS[name].second))
    return ScaledDecoded(id=f"fuzz-{seed}", why="any", case=at_most(case, most), config=name)
