# SPDX-License-Identifier: Apache-2.0
"""Problems for the CuTe DSL kernels of experts, with tiles small enough for the emulator."""

import random
from dataclasses import dataclass, replace

import torch

import emulator
from dsl_backend.experts.configs import ExpertsConfig
from dsl_backend.experts.cute import host
from dsl_backend.gemm.sm90.configs import GemmConfig
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import ACTIVATIONS, CASES, PLAIN, ExpertsCase, judge, random_case, tensors

SMS = 4
TARGET: Target = replace(from_arch("sm_90a"), sm_count=SMS)
# Two stages, so that the pipeline comes round within a tile.
SPLIT = GemmConfig(tile_m=128, box_n=16, stages=2)
PINGPONG = GemmConfig(tile_m=64, box_n=32, stages=2, pingpong=True)
NARROW = GemmConfig(tile_m=64, box_n=24, stages=3, pingpong=True)
CONFIGS = {
    "split": ExpertsConfig(first=SPLIT, second=SPLIT),
    "pingpong": ExpertsConfig(first=PINGPONG, second=NARROW),
    "narrow": ExpertsConfig(first=NARROW, second=replace(PINGPONG, band=2)),
    "tall": ExpertsConfig(first=replace(SPLIT, tile_m=256, box_n=24), second=replace(SPLIT, tile_m=256, stages=3)),
}


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A case and the kernels that it runs with.

    Attributes:
        why: what this case alone would find.
        config: one of CONFIGS, or another.
        routing_ctas: CTAs that sort the pairs.
    """

    id: str
    why: str
    case: ExpertsCase
    config: str | ExpertsConfig
    routing_ctas: int = 1

    @property
    def tiles(self) -> ExpertsConfig:
        return CONFIGS[self.config] if isinstance(self.config, str) else self.config


def emulate(one: Emulated, schedule: str, seed: int = 0) -> torch.Tensor:
    """Compile, run on the emulator, judge; any finding or warning raises. Returns the output."""
    given, spec, config = tensors(one.case, "cpu"), one.case.spec, one.tiles
    workspace = Workspace(torch.device("cpu"))
    with emulator.device(arch="sm_90a", sms=SMS, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, config), TARGET)
        ctas = (one.routing_ctas, *config.ctas(spec, one.case.tokens, TARGET)[1:])
        host.run(function, spec, config, given, ctas, workspace)
    judge(one.case, given)
    return given.out


MANY = replace(PLAIN, tokens=150, num_experts=3, hidden=136, width=72, topk=2)
# Other kernels, or other values, than those of the cases below.
OTHERS = ("one", "many-tokens", "many-experts", "all-padding", "no-weights")

EMULATED = [
    Emulated(id="split", why="consumers share a tile; all edges ragged", case=PLAIN, config="split"),
    Emulated(id="pingpong", why="consumers take turns; output without a swizzle", case=MANY, config="pingpong"),
    Emulated(
        id="rows",
        why="experts of several tiles, of one, of none; a band ends in the middle; several CTAs sort",
        case=replace(MANY, tokens=260, num_experts=8, topk=1, routing="half", ids_dtype=torch.int64),
        config="narrow",
        routing_ctas=3,
    ),
    Emulated(
        id="blocks-of-rows",
        why="two blocks of rows a consumer, of which the last one has none",
        case=replace(MANY, tokens=190, routing="one", num_experts=2, topk=1),
        config="tall",
    ),
    Emulated(
        id="deep",
        why="the pipeline comes round several times a tile",
        case=replace(PLAIN, tokens=30, hidden=520, width=264),
        config="split",
    ),
    Emulated(
        id="all-to-one", why="all other experts have no row", case=replace(CASES["all-to-one"]), config="pingpong"
    ),
    Emulated(id="without-tokens", why="half of the experts", case=CASES["without-tokens"], config="split"),
    Emulated(id="padding", why="ids of -1", case=CASES["padding"], config="pingpong"),
    Emulated(id="mapped", why="other ranks' experts, and ids of -1", case=CASES["mapped"], config="narrow"),
    Emulated(id="gpt-oss", why="interleaved, biases, limits", case=CASES["gpt-oss"], config="split"),
    Emulated(
        id="input-weights",
        why="weights on accumulators, before the bias",
        case=replace(CASES["input-weights"], biases=True),
        config="pingpong",
    ),
    Emulated(id="special", why="NaN and infinities stay in their rows", case=CASES["special"], config="split"),
    Emulated(id="strides", why="rows apart", case=CASES["strides"], config="pingpong"),
    *(Emulated(id=name, why="any case", case=CASES[name], config="narrow") for name in OTHERS),
    *(
        Emulated(id=f"activation-{i}", why=str(one), case=CASES[f"activation-{i}"], config="split")
        for i, one in enumerate(ACTIVATIONS)
    ),
]


def random_emulated(seed: int) -> Emulated:
    draw = random.Random(seed)
    config = draw.choice(list(CONFIGS))
    return Emulated(
        id=f"fuzz-{seed}", why="any", case=random_case(draw, 150), config=config, routing_ctas=draw.choice((1, 1, 2, 5))
    )
