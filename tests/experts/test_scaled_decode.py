# SPDX-License-Identifier: Apache-2.0
"""SM90's kernels of experts in e4m3 for few tokens: which of them serve, and the kernels on the emulator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from experts_cases import SCHEDULES
from scaled_decode_cases import BY_ID, CASES, LONG, ScaledDecoded, emulate, random_decoded, with_an_expert_twice

from dsl_backend.errors import Unsupported
from dsl_backend.experts import dispatch, precompile, scaled_configs
from dsl_backend.experts.cute import scaled_host
from dsl_backend.experts.cute.sm90 import scaled_decode
from dsl_backend.experts.scaled_configs import MOST_FEW, ScaledDecodeConfig
from dsl_backend.quant.format import BLOCK_SCALED, GROUP, ROW_SCALED, ScaledFormat
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.experts import BLOCKS
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, compile_again, spoilt

TARGET = from_arch("sm_90a")
KERNEL = "cute-scaled-decode"
QUICK = "blocks-one"
# In `make test`, one schedule of one case; one schedule of the others in the rest.
PARAMETERS = [
    pytest.param(
        one.id,
        schedule,
        id=f"{one.id}-{schedule}",
        marks=pytest.mark.full if (i + j) % 3 else () if one.id == QUICK else pytest.mark.rest,
    )
    for i, one in enumerate(CASES)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize("weight", [BLOCK_SCALED, ROW_SCALED])
@pytest.mark.parametrize("sizes", [(128, 2048, 768), (32, 7168, 2048), (512, 7168, 2048), (5, 16, 128)])
def test_any_number_of_tokens_has_a_configuration(sizes: tuple[int, int, int], weight: ScaledFormat) -> None:
    """Tiles for few tokens of the least size that holds them, up to 64; then the grouped GEMMs of `cute-scaled`."""
    experts, hidden, width = sizes
    spec = replace(
        BLOCKS.spec,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=width,
        topk=min(experts, 8),
        weight=weight,
    )
    assert MOST_FEW == 64
    held = []
    for tokens in range(1, 67):
        config = scaled_configs.choose_decode(spec, tokens, TARGET)
        assert config in scaled_configs.decode_candidates(spec, TARGET)
        assert config.serves(tokens)
        assert isinstance(config, ScaledDecodeConfig) == (tokens <= MOST_FEW)
        if isinstance(config, ScaledDecodeConfig):
            held.append(config.first.tile_tokens)
            assert config.first.tile_k == (256 if weight == ROW_SCALED and tokens <= 32 else GROUP)
        else:
            assert config == scaled_configs.choose(spec, tokens, TARGET)
    assert held == [min(size for size in (8, 16, 32, 48, 64) if size >= tokens) for tokens in range(1, 65)]
    units = list(precompile.precompile_specs_of(spec, TARGET, KERNEL))
    assert len(units) == len(scaled_configs.decode_candidates(spec, TARGET))
    others = [unit.key for unit in precompile.precompile_specs_of(spec, TARGET)]
    assert not any(key.decodes for key in others), "they are taken by name alone"


def test_they_are_taken_by_name() -> None:
    assert dispatch.choose(BLOCKS.spec, TARGET).name == "cute-scaled"
    assert dispatch.choose(BLOCKS.spec, TARGET, KERNEL).title == "experts e4m3 decode sm90"
    assert dispatch.weight_alignment(KERNEL, BLOCKS.spec) == 16
    for spec, target, message in (
        (BLOCKS.spec, from_arch("sm_100a"), "sm_100a"),
        (replace(BLOCKS.spec, weight=None), TARGET, "weights in 16 bits: this one's are in 8 bits"),
        (replace(BLOCKS.spec, hidden_size=136), TARGET, "hidden_size 136 is not a multiple of 16"),
        (BLOCKS.spec, replace(TARGET, smem_bytes=40_000), "40000 bytes of shared memory are too few"),
    ):
        with pytest.raises(Unsupported, match=message):
            dispatch.choose(spec, target, KERNEL)


@pytest.mark.parametrize(("name", "schedule"), PARAMETERS)
def test_case(name: str, schedule: str) -> None:
    emulate(BY_ID[name], schedule, runs=1 if name == QUICK else 2)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["blocks", "channels"])
def test_a_token_may_have_an_expert_twice(name: str) -> None:
    one = BY_ID[name]
    emulate(one, "lazy", given=with_an_expert_twice(one.case), runs=1)


@pytest.mark.rest
def test_the_bits_are_the_same_in_any_order_of_events() -> None:
    first = emulate(BY_ID["blocks-long"], "eager")
    assert torch.equal(first, emulate(BY_ID["blocks-long"], "random", seed=5))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.rest if seed < 2 else pytest.mark.full) for seed in range(40)]
)
def test_fuzz(seed: int) -> None:
    emulate(random_decoded(seed), SCHEDULES[seed % 3], seed)


def of_decode(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(id, scaled_decode, said, wrong)


# Experts without a token, two k tiles of each; and scales of channels.
SHORT = ScaledDecoded(id="short", why="", case=replace(LONG, hidden=272, tokens=6), config="rows")
NARROW = ScaledDecoded(
    id="narrow", why="", case=replace(BY_ID["channels"].case, hidden=272, tokens=9), config="deep second"
)
BOTH_SCALES = "up = gate * gate_scale * x_scale, up"
MISTAKES = (
    (SHORT, of_decode("scales of the first expert", "k_tile // work.of_expert, k_tile", "0, k_tile")),
    (SHORT, of_decode("scales of x of the first expert", "first_row = listed * m", "first_row = 0")),
    (SHORT, of_decode("scales of the first k tile", "k_tile % work.of_expert", "0")),
    (SHORT, of_decode("no zeros", "cutlass.Uint8(0), token", "cutlass.Uint8(0x7F), token")),
    (
        SHORT,
        of_decode("scales are not cleared", "params.mHiddenScale[row, column // GROUP] = cutlass.Float32(0.0)", "pass"),
    ),
    (SHORT, of_decode("rows of other places", "sListed[expert] * tokens + token", "expert * tokens + token")),
    (SHORT, of_decode("the first token's weights", "self.weight_of(params, token", "self.weight_of(params, 0")),
    (NARROW, of_decode("rows 8 apart have one scale", " + i % 2 * 8", "")),
    (NARROW, of_decode("boxes have one scale", "i // 2 * self.box + ", "")),
    (NARROW, of_decode("the gate's scales for both", "column, part, n, self.int", "column, 0, n, self.int")),
    (NARROW, of_decode("scales of x are left out", BOTH_SCALES, "up = gate * gate_scale, up")),
)
FIRST = "rows of other places"


@pytest.mark.parametrize(
    ("of", "mistake"),
    [
        pytest.param(of, one, id=one.id, marks=pytest.mark.rest if one.id == FIRST else pytest.mark.full)
        for of, one in MISTAKES
    ],
)
def test_mistake_is_found(of: ScaledDecoded, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, scaled_host)
    module = spoilt(mistake, tmp_path)
    monkeypatch.setattr(scaled_decode, "ScaledDecodeGemm", module.ScaledDecodeGemm)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        emulate(of, "lazy", runs=1)
    assert not isinstance(raised.value, HostError), "it ran"
