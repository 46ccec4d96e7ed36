# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts for few tokens on the emulator, on both architectures: right, and without a finding."""

from dataclasses import replace

import pytest
import torch
from experts_cases import (
    DECODE_CONFIGS,
    DECODED,
    LONG,
    SCHEDULES,
    SEEDS,
    TARGETS,
    Emulated,
    after_router,
    emulate,
    in_turn,
    random_decoded,
)

from dsl_backend.errors import Unsupported
from dsl_backend.experts import api, dispatch, reference
from dsl_backend.experts.configs import DECODE_TOKENS, DecodeConfig, Kind, all_fitting, choose
from dsl_backend.experts.cute import host
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.experts import PLAIN, ExpertsCase, judge, tensors

ARCHS = tuple(DECODE_CONFIGS)
# Of the architecture that has the most.
TILES = 8


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("one", "schedule"), in_turn(DECODED, ("plain", "shared")))
def test_case(one: Emulated, schedule: str, arch: str) -> None:
    emulate(one, schedule, seed=1, arch=arch)


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", SEEDS)
def test_fuzz(seed: int, arch: str) -> None:
    emulate(random_decoded(seed, arch), SCHEDULES[seed % 3], seed, arch)


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
def test_the_bits_are_the_same_in_any_order_of_events(arch: str) -> None:
    one = next(one for one in DECODED if one.id == "wide")
    first = emulate(one, "eager", arch=arch)
    assert torch.equal(first, emulate(one, "random", seed=5, arch=arch))


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_behind_a_router_that_lets_them_start(schedule: str, arch: str) -> None:
    after_router(LONG, schedule, arch)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("place", range(TILES))
def test_every_tile_that_is_chosen(place: int, arch: str) -> None:
    """At full size, on two and a half rounds of the stages of each product."""
    case = ExpertsCase(tokens=1, num_experts=3, hidden=8, width=8, topk=2, routing="zipf", biases=place % 2 == 0)
    found = all_fitting(case.spec, TARGETS[arch], Kind.DECODE)
    if place >= len(found):
        pytest.skip(f"{arch} has {len(found)} tiles")
    config = found[place]
    assert isinstance(config, DecodeConfig)
    size = config.first.tile_k * config.first.stages * 5 // 2 - 24
    case = replace(case, tokens=config.first.tile_tokens, hidden=size, width=size)
    emulate(Emulated(id=str(config), why="real tiles", case=case, config=config, decodes=True), "random", place, arch)


def test_all_tiles_are_tried() -> None:
    assert all(len(all_fitting(PLAIN.spec, target, Kind.DECODE)) <= TILES for target in TARGETS.values())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 33, 64, 128])
def test_tokens_fit_what_is_chosen(tokens: int, arch: str) -> None:
    spec = replace(PLAIN.spec, num_experts=128, hidden_size=2048, intermediate_size=768, topk=8)
    config = choose(spec, tokens, from_arch(arch), Kind.DECODE)
    assert isinstance(config, DecodeConfig)
    assert config.serves(tokens)
    for tiles in (config.first, config.second):
        assert tiles.tile_tokens >= tokens


def test_more_tokens_are_several_launches() -> None:
    case = replace(PLAIN, tokens=2 * DECODE_TOKENS + 3, mapped=True)
    given = tensors(case, "cpu")
    parts = list(host.parts_of(given, DECODE_TOKENS))
    assert [part.x.shape[0] for part in parts] == [DECODE_TOKENS, DECODE_TOKENS, 3]
    for part in parts:
        reference.experts(case.spec, part)
    judge(case, given)
    assert all(part.topk_weights is None for part in host.parts_of(given._replace(topk_weights=None), 100))


def test_they_can_be_asked_for_by_name() -> None:
    for arch in ARCHS:
        assert dispatch.choose(PLAIN.spec, from_arch(arch), "cute-decode").title == "experts decode"
        assert dispatch.choose(PLAIN.spec, from_arch(arch), "cute-grouped").title == "experts grouped"
    with pytest.raises(Unsupported, match="serves GPUs of"):
        api.plan(PLAIN.spec, "cpu", kernel="cute-decode")


def test_few_tokens_get_them() -> None:
    """Where weights of many experts are read for few rows; never where each expert has a tile of rows."""
    spec = replace(PLAIN.spec, num_experts=128, hidden_size=2048, intermediate_size=768, topk=8)
    assert all(isinstance(choose(spec, tokens, from_arch("sm_90a")), DecodeConfig) for tokens in (1, 8, 32))
    assert not isinstance(choose(spec, 2048, from_arch("sm_90a")), DecodeConfig)


def test_ids_are_unique() -> None:
    assert len({one.id for one in DECODED}) == len(DECODED)
