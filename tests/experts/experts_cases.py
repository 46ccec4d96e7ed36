# SPDX-License-Identifier: Apache-2.0
"""Problems for the CuTe DSL kernels of experts, with tiles small enough for the emulator."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from router import Router

import emulator
from dsl_backend.experts.configs import Config, DecodeConfig, ExpertsConfig
from dsl_backend.experts.cute import host
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.sm90.configs import GemmConfig, SmallMConfig
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import (
    ACTIVATIONS,
    CASES,
    F16,
    PLAIN,
    SHARED,
    SHARED_CASES,
    ExpertsCase,
    judge,
    random_case,
    tensors,
)

SCHEDULES = ("eager", "lazy", "random")
SMS = 4
TARGET: Target = replace(from_arch("sm_90a"), sm_count=SMS)
# Two stages, so that the pipeline comes round within a tile.
SPLIT = GemmConfig(tile_m=128, box_n=16, stages=2)
PINGPONG = GemmConfig(tile_m=64, box_n=32, stages=2, pingpong=True)
NARROW = GemmConfig(tile_m=64, box_n=24, stages=3, pingpong=True)
CONFIGS: dict[str, Config] = {
    "split": ExpertsConfig(first=SPLIT, second=SPLIT),
    "pingpong": ExpertsConfig(first=PINGPONG, second=NARROW),
    "narrow": ExpertsConfig(first=NARROW, second=replace(PINGPONG, band=2)),
    "tall": ExpertsConfig(first=replace(SPLIT, tile_m=256, box_n=24), second=replace(SPLIT, tile_m=256, stages=3)),
    "overlap": ExpertsConfig(first=SPLIT, second=replace(SPLIT, stages=3), prefetches=True, trims=True),
    "blocks": ExpertsConfig(
        first=replace(SPLIT, tile_m=256),
        second=replace(SPLIT, tile_m=256, box_n=24, stages=3),
        prefetches=True,
        trims=True,
    ),
    "blocks in turn": ExpertsConfig(
        first=replace(PINGPONG, tile_m=192, box_n=16), second=replace(NARROW, tile_m=192), prefetches=True, trims=True
    ),
}

# Of the same names.
CONFIGS_SM100: dict[str, Config] = {
    "split": ExpertsConfig(first=sm100.GemmConfig(box_n=16, stages=2), second=sm100.GemmConfig(box_n=16, stages=2)),
    "pingpong": ExpertsConfig(first=sm100.GemmConfig(box_n=32, stages=2), second=sm100.GemmConfig(box_n=16, stages=3)),
    "narrow": ExpertsConfig(
        first=sm100.GemmConfig(box_n=48, stages=3), second=sm100.GemmConfig(box_n=32, stages=2, band=2)
    ),
    "tall": ExpertsConfig(first=sm100.GemmConfig(box_n=64, stages=2), second=sm100.GemmConfig(box_n=96, stages=2)),
    "overlap": ExpertsConfig(
        first=sm100.GemmConfig(box_n=32, stages=2), second=sm100.GemmConfig(box_n=16, stages=3), prefetches=True
    ),
}
CONFIGS_SM100 |= dict.fromkeys(("blocks", "blocks in turn"), CONFIGS_SM100["overlap"])


def decode(first: SmallMTiles, second: SmallMTiles | None = None) -> DecodeConfig:
    return DecodeConfig(first=first, second=second or first)


# Of both architectures: few tokens; two epilogues with the same tokens, or with halves of them; a deep stage.
DECODE_CONFIGS: dict[str, dict[str, DecodeConfig]] = {
    "sm_90a": {
        "few": decode(SmallMConfig(tokens=8, stages=2)),
        "deep": decode(SmallMConfig(tokens=16, tile_k=128, stages=3), SmallMConfig(tokens=32, stages=2)),
        "rows": decode(SmallMConfig(tokens=32, groups=2, stages=2)),
        "halves": decode(SmallMConfig(tokens=32, groups=2, split_tokens=True, stages=2)),
    },
    "sm_100a": {
        "few": decode(sm100.SmallMConfig(tokens=16, stages=2)),
        "deep": decode(sm100.SmallMConfig(tokens=16, tile_k=128, stages=3), sm100.SmallMConfig(tokens=32, stages=2)),
        "rows": decode(sm100.SmallMConfig(tokens=64, stages=2)),
        "halves": decode(sm100.SmallMConfig(tokens=128, stages=2)),
    },
}
TARGETS: dict[str, Target] = {arch: replace(from_arch(arch), sm_count=SMS) for arch in DECODE_CONFIGS}


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A case and the kernels that it runs with.

    Attributes:
        why: what this case alone would find.
        config: one of CONFIGS, or of DECODE_CONFIGS, or another.
        routing_ctas: CTAs that sort the pairs.
        decodes: the kernels for few tokens.
    """

    id: str
    why: str
    case: ExpertsCase
    config: str | Config
    routing_ctas: int = 1
    decodes: bool = False

    def tiles(self, arch: str = "sm_90a") -> Config:
        if not isinstance(self.config, str):
            return self.config
        if self.decodes:
            return DECODE_CONFIGS[arch][self.config]
        return (CONFIGS if arch == "sm_90a" else CONFIGS_SM100)[self.config]

    def ctas(self, arch: str = "sm_90a") -> tuple[int, ...]:
        config, spec, target = self.tiles(arch), self.case.spec, TARGETS[arch]
        if isinstance(config, DecodeConfig):
            return config.ctas(spec, self.case.tokens, target)
        return self.routing_ctas, *config.ctas(spec, self.case.tokens, target)[1:]


def emulate(one: Emulated, schedule: str, seed: int = 0, arch: str = "sm_90a") -> torch.Tensor:
    """Compile, run twice on the emulator, judge; any finding or warning raises. Returns the output.

    The second run finds what the first one leaves in the workspace.
    """
    given, spec, config = tensors(one.case, "cpu"), one.case.spec, one.tiles(arch)
    workspace = Workspace(torch.device("cpu"))
    with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, config), TARGETS[arch])
        for _ in range(2 if one.decodes else 1):
            host.run(function, spec, config, given, one.ctas(arch), workspace)
    judge(one.case, given)
    assert not workspace.flags(0).any()
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
        id="overlap",
        why="weights before rows, of more k tiles than stages; a consumer without rows between tiles where it has some",
        case=replace(MANY, tokens=260, num_experts=4, topk=1, routing="zipf", width=264),
        config="overlap",
    ),
    Emulated(
        id="overlap-short",
        why="fewer k tiles than stages",
        case=replace(MANY, tokens=70, num_experts=2, topk=1, routing="one"),
        config="overlap",
    ),
    *(
        Emulated(
            id=name,
            why="all, some and none of a consumer's blocks of rows are multiplied",
            case=replace(MANY, tokens=420, num_experts=4, topk=1, routing="zipf", width=136),
            config=name,
        )
        for name in ("blocks", "blocks in turn")
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
    Emulated(
        id="shared",
        why="weights of two descriptors; several tiles of each shared expert; columns of a slice end within a box",
        case=replace(SHARED, tokens=150, num_experts=3, hidden=136, width=72, topk=2),
        config="split",
    ),
    Emulated(
        id="shared-rows",
        why="several CTAs sort; a token's slots are those of a shared expert and of another rank's",
        case=replace(SHARED_CASES["shared-mapped"], tokens=130, shared=3),
        config="narrow",
        routing_ctas=3,
    ),
    Emulated(
        id="shared-overlap",
        why="shared experts' weights before rows",
        case=replace(SHARED, tokens=70, num_experts=2, topk=1, hidden=136, width=264),
        config="overlap",
    ),
    *(
        Emulated(id=name, why="any case", case=case, config="pingpong")
        for name, case in SHARED_CASES.items()
        if name != "shared"
    ),
    *(
        Emulated(id=f"activation-{i}", why=str(one), case=CASES[f"activation-{i}"], config="split")
        for i, one in enumerate(ACTIVATIONS)
    ),
]


# Whose second product adds to the output.
ADDED = replace(MANY, padding=0.2, biases=True, pad_out=24, deterministic=False)
ADDING = [
    Emulated(
        id="added", why="weights behind the bias; tokens without an expert; rows apart", case=ADDED, config="split"
    ),
    Emulated(
        id="added-overlap",
        why="float16, without weights; the second product starts before the output is cleared",
        case=replace(ADDED, dtype=F16, router_weights=RouterWeights.NONE, routing="one", topk=1, num_experts=2),
        config="overlap",
    ),
]
LONG = replace(PLAIN, tokens=7, num_experts=5, hidden=520, width=200, topk=2)
DECODED = [
    Emulated(id="plain", why="all edges ragged", case=PLAIN, config="deep", decodes=True),
    Emulated(
        id="long", why="tiles of several CTAs, several times round the stages", case=LONG, config="few", decodes=True
    ),
    Emulated(
        id="wide",
        why="several tiles of an expert's columns; fixups of several tiles",
        case=replace(LONG, hidden=136, width=456, tokens=29, num_experts=9),
        config="rows",
        decodes=True,
    ),
    Emulated(
        id="tokens",
        why="as many tokens as the tile has",
        case=replace(LONG, tokens=64, num_experts=3, hidden=264, width=136),
        config="halves",
        decodes=True,
    ),
    Emulated(id="one", why="fewer iterations than CTAs", case=CASES["one"], config="few", decodes=True),
    Emulated(
        id="short",
        why="fewer iterations than CTAs, in one tile",
        case=replace(LONG, tokens=3, num_experts=1, topk=1, hidden=136, width=8),
        config="few",
        decodes=True,
    ),
    Emulated(id="all-padding", why="no expert is chosen", case=CASES["all-padding"], config="few", decodes=True),
    Emulated(
        id="special",
        why="NaN and infinities stay in their rows; tokens without an expert",
        case=replace(CASES["special"], padding=0.3, num_experts=9, biases=True),
        config="rows",
        decodes=True,
    ),
    Emulated(id="shared", why="weights of two descriptors; all edges ragged", case=SHARED, config="deep", decodes=True),
    Emulated(
        id="shared-long",
        why="tiles of several CTAs, of routed and of shared experts; columns of a slice end within a box",
        case=replace(LONG, shared=3, shared_weight=-0.5, padding=0.3),
        config="few",
        decodes=True,
    ),
    *(
        Emulated(id=name, why="any case", case=replace(case, tokens=min(case.tokens, 32)), config="rows", decodes=True)
        for name, case in SHARED_CASES.items()
        if name != "shared"
    ),
    *(
        Emulated(
            id=name,
            why="any case",
            case=replace(CASES[name], tokens=min(CASES[name].tokens, 32)),
            config=config,
            decodes=True,
        )
        for name, config in (
            ("all-to-one", "rows"),
            ("without-tokens", "halves"),
            ("many-experts", "rows"),
            ("padding", "halves"),
            ("mapped", "rows"),
            ("int64", "deep"),
            ("gpt-oss", "halves"),
            ("input-weights", "rows"),
            ("no-weights", "halves"),
            ("strides", "rows"),
            *((f"activation-{i}", "rows") for i in range(len(ACTIVATIONS))),
        )
    ),
]


def after_router(case: ExpertsCase, schedule: str, arch: str, build: Callable[..., Function] = host.build) -> None:
    """The kernels for few tokens, launched behind one that writes the experts' numbers; judge."""
    given, spec, config = tensors(case, "cpu"), case.spec, DECODE_CONFIGS[arch]["few"]
    source, stream = given.topk_ids.clone(), make_fake_stream(use_tvm_ffi_env_stream=True)
    given.topk_ids.fill_(-1)
    with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=1, strict=True) as device:
        views = [from_dlpack(ids) for ids in (source, given.topk_ids)]
        router = toolkit.compiled(Router(), (*views, stream), TARGETS[arch].arch, "")
        function = build(host.key_of(spec, config), TARGETS[arch])
        ctas, workspace = config.ctas(spec, case.tokens, TARGETS[arch]), Workspace(given.x.device)
        with device.capture():
            router(source, given.topk_ids)
            host.run(function, spec, config, given, ctas, workspace)
    judge(case, given)


def some_shared(case: ExpertsCase, seed: int) -> ExpertsCase:
    """A random case, every third one with shared experts, where it may have them."""
    if seed % 3 or case.biases or case.interleaved or case.router_weights is RouterWeights.INPUT:
        return case
    return replace(case, shared=1 + seed % 2, shared_weight=(1.0, 0.4, -2.0)[seed // 3 % 3])


def random_decoded(seed: int, arch: str) -> Emulated:
    draw = random.Random(seed)
    name = draw.choice(list(DECODE_CONFIGS[arch]))
    config = DECODE_CONFIGS[arch][name]
    case = some_shared(random_case(draw, 150), seed)
    most = next(tokens for tokens in range(128, 0, -1) if config.serves(tokens))
    return Emulated(
        id=f"decode-{seed}", why="any", case=replace(case, tokens=min(case.tokens, most)), config=name, decodes=True
    )


def random_emulated(seed: int) -> Emulated:
    draw = random.Random(seed)
    config = draw.choice(list(CONFIGS))
    return Emulated(
        id=f"fuzz-{seed}",
        why="any",
        case=replace(some_shared(random_case(draw, 150), seed), deterministic=seed % 4 != 1),
        config=config,
        routing_ctas=draw.choice((1, 1, 2, 5)),
    )


def in_turn(cases: Sequence[Emulated], quick: Sequence[str]) -> list[Any]:
    """Parameters (one, schedule): each case under one schedule; under the others where there is time.

    Args:
        quick: ids of those that `make test` runs.
    """

    def marks(one: Emulated, other_schedule: bool) -> tuple[pytest.MarkDecorator, ...]:
        if other_schedule:
            return (pytest.mark.full,)
        return () if one.id in quick else (pytest.mark.rest,)

    return [
        pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=marks(one, (i + j) % 3 != 0))
        for i, one in enumerate(cases)
        for j, schedule in enumerate(SCHEDULES)
    ]


# Of random problems: a few, and more where there is time.
SEEDS = [pytest.param(seed, marks=() if seed < 6 else (pytest.mark.full,)) for seed in range(106)]
