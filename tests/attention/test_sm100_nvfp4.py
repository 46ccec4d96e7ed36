# SPDX-License-Identifier: Apache-2.0
"""SM100's dense kernels over NVFP4 caches on the emulator, and mistakes in what they do beyond an fp8 cache."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention.cute import dequant, host
from dsl_backend.attention.cute.fake_args import fake_args
from dsl_backend.attention.cute.sm100 import nvfp4_kernel
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig, default_config, default_split_config
from dsl_backend.attention.cute.sm100.dense_host import (
    Prefill,
    SplitKV,
    fake_nvfp4_tensors,
    kind_of,
    nvfp4_rows,
)
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel, Misaligned
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.testing import check, fuzz
from dsl_backend.testing.cases import FP16, Case, by_id
from dsl_backend.testing.cases.nvfp4 import HEADS_FIRST, NVFP4
from dsl_backend.testing.inputs import Layout
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, emulate, numbered, scratch
from tests.attention.test_sm100 import make
from tests.mistakes import Mistake, spoil_methods, spoilt

SERVED = [case for case in NVFP4 if case.around.layout is not Layout.SIDE_BY_SIDE]
QUICK = ("nvfp4-queries", "nvfp4-128", "nvfp4-192-128")


@numbered(SERVED, QUICK)
def test_case(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: make(planner, short, index), index)


@pytest.mark.full
@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("index", range(len(SERVED)))
def test_case_on_the_other_schedules(index: int, shift: int) -> None:
    emulate(SERVED[index], "sm_100a", lambda planner, short: make(planner, short, index + shift), index + shift)


def default(planner: Planner, short: bool) -> Kernel:
    kind, config = (SplitKV, default_split_config) if short else (Prefill, default_config)
    return kind(planner.spec, planner.target, scratch(), config(planner.spec))


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_default_configurations(dim: int, index: int) -> None:
    """What a chip would get: tiles of 96 keys in pages of 48 among them."""
    case = Case(
        q_lens=(1, 150, 3),
        kv_lens=(500, 260, 97),
        heads=(8, 2),
        dim=dim,
        page=48,
        dtype=FP16,
        nvfp4=True,
        around=HEADS_FIRST,
    )

    emulate(case, "sm_100a", default, index)


LAYERS, PROBLEMS, SEED, SPECS = 12, 5, 20261129, 10_000
SIZES = replace(fuzz.TINY, kv=400, q=150, requests=3, heads_kv=(1, 2))
DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (32, 160), (256, 256), (128, 192))
LAYOUTS = (Layout.HEADS_FIRST, Layout.SEPARATE, Layout.PADDED)


def drawn(layer: int, turn: int) -> Case:
    """A random problem of decode or of prefill, over a cache in NVFP4; the layer's facts are those of all its turns."""
    case = fuzz.problem(("decode", "prefill")[layer % 2], SEED, layer + turn * SPECS, SIZES, SPECS)
    assert isinstance(case, Case)
    draw = random.Random(f"{SEED} {layer}")
    dim, dim_v = DIMS[layer % len(DIMS)]
    fp8_q = draw.random() < 0.25
    stored = draw.choice(("16 bits", "16 bits", "e4m3", "nvfp4")) if case.heads[0] * dim_v % 64 == 0 else "16 bits"
    return replace(
        case,
        dim=dim,
        dim_v=dim_v,
        page=case.page or draw.choice(fuzz.PAGES),
        fp8=False,
        nvfp4=True,
        fp8_q=fp8_q,
        q_gain=1.0 if fp8_q else case.q_gain,  # e4m3 cannot be multiplied
        fp8_out=stored == "e4m3",
        nvfp4_out=stored == "nvfp4",
        tile=None,
        around=replace(case.around, layout=LAYOUTS[(layer + turn) % len(LAYOUTS)]),
    )


@pytest.mark.parametrize(
    "layer", [pytest.param(n, marks=pytest.mark.full if n > 1 else pytest.mark.rest) for n in range(LAYERS)]
)
def test_random_problems_of_a_layer(layer: int) -> None:
    """With the default of a layer, and with small tiles; keys are split among as many CTAs as a problem asks for."""
    for turn in range(PROBLEMS):
        case = drawn(layer, turn)

        def chosen(planner: Planner, short: bool, case: Case = case, turn: int = turn) -> Kernel:
            kernel = default(planner, short) if (layer + turn) % 2 else make(planner, short, layer)
            if short and case.programs is not None:
                assert isinstance(kernel, host.LayerKernel)
                kernel.num_ctas = case.programs
            return kernel

        emulate(case, "sm_100a", chosen, layer + turn)


def test_random_layers_differ() -> None:
    """All of a kernel's forms are among them: outputs of each kind, queries of both, masks, pages, layouts."""
    cases = [drawn(layer, turn) for layer in range(LAYERS) for turn in range(PROBLEMS)]
    assert len(cases) == 60
    for name in ("fp8_q", "fp8_out", "nvfp4_out", "sinks", "alibi", "scales_by_head"):
        assert {getattr(case, name) for case in cases} == {True, False}, name
    assert any(case.window[0] is not None for case in cases)
    assert any(case.softcap for case in cases)
    assert any(case.causal for case in cases)
    assert any(case.programs for case in cases)
    assert any(case.dtype == FP16 for case in cases)
    assert {case.around.layout for case in cases} == set(LAYOUTS)
    assert len({case.page for case in cases}) > 3


def test_pages_with_tokens_outermost_are_left_to_triton() -> None:
    problem = by_id("nvfp4-tokens-first").problem()
    with pytest.raises(Misaligned, match=r"keys have strides .* the tokens of a head must follow one another"):
        nvfp4_rows("keys", problem.keys)


def test_scales_need_room_of_their_own() -> None:
    """Boxes of scales are aligned: 64 bytes of 16 keys of 64 elements take 128."""
    spec = by_id("nvfp4").spec
    config, stored = DenseConfig(tile_n=64, dequant_stages=2), 2 * 64 * (32 + 8)
    without = replace(config, dequant_stages=0).smem_bytes(spec)
    barriers = 2 * 2 * 2 * 8
    assert config.smem_bytes(spec) - without == 2 * stored + barriers
    wide = replace(spec, page_size=64)
    assert config.smem_bytes(wide) - replace(config, dequant_stages=0).smem_bytes(wide) == 4 * 64 * 36 + barriers


# Three tiles of 64 keys of a request go through two stages.
CASE = Case(q_lens=(2, 1), kv_lens=(200, 70), heads=(2, 1), dim=64, page=32, q_gain=2.0, nvfp4=True, around=HEADS_FIRST)
CONFIG = DenseConfig(alternate=True, tile_n=64, stages=2, dequant_stages=2, ex2_emulation=0, min_split_tiles=1)
WORD = "scaled_e2m1_to_f16(nvfp4_words[i]"
SWAPPED = "scaled_e2m1_to_f16((nvfp4_words[i] >> 4) & 0x0F0F0F0F | (nvfp4_words[i] & 0x0F0F0F0F) << 4"
MISTAKES: dict[type, tuple[tuple[str, str, str], ...]] = {
    dequant.Nvfp4DequantTiles: (
        ("nibbles are swapped", WORD, SWAPPED),
        ("words are swapped", WORD, "scaled_e2m1_to_f16(nvfp4_words[1 - i]"),
        ("the scale of the neighbour block", "self.scale_index(i), stage", "self.scale_index(i) ^ 1, stage"),
        (
            "the scale of another stage",
            "self.scale_index(i), stage",
            "self.scale_index(i), (stage + 1) % self.dequant_stages",
        ),
        ("the scale of the first rows", "self.first_scale + self.scale_of_row(row)", "self.first_scale"),
    ),
}
FOUND_AT_EVERY_CHANGE = ("nibbles are swapped", "the scale of the neighbour block")


def run(index: int) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""

    class Fresh(SplitKV):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(kind_of(key)(key), fake_args(key, fake_nvfp4_tensors(key)), target.arch, "")

    def adjust(planner: Planner) -> None:
        kernel = Fresh(planner.spec, planner.target, scratch(), CONFIG)
        planner.short = planner.long = (*planner.long[:2], kernel)

    problem, target = CASE.problem(), replace(from_arch("sm_100a"), sm_count=1)
    with emulator.device(arch="sm_100a", sms=1, schedule=SCHEDULES[index], seed=index, strict=True):
        result = check.run(problem, "cute", adjust=adjust, target=target)
    check.judge(result, problem.expected(), problem.score_magnitude())


@pytest.mark.rest
def test_right_without_a_mistake() -> None:
    run(1)


@pytest.mark.parametrize(
    ("right", "mistake"),
    [
        pytest.param(
            right, mistake, id=mistake[0], marks=() if mistake[0] in FOUND_AT_EVERY_CHANGE else (pytest.mark.full,)
        )
        for right, mistakes in MISTAKES.items()
        for mistake in mistakes
    ],
)
def test_a_mistake_is_found(
    right: type, mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[right.__module__]
    spoil_methods(right, spoilt(Mistake(mistake[0], module, *mistake[1:]), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run(1)


# What TMA reads is the atom's: its coordinates of keys are those of values.
OF_VALUES, OF_KEYS = (f"self.tma_atom_{of}_scales,\n            self" for of in "vk")
INTO_STAGE = (
    "self.dims,\n            range(1),\n            work,\n            n_block,\n            pages,\n            stage"
)
MISTAKES_OF_LOADS = (
    ("scales of keys for those of values", OF_VALUES, OF_KEYS),
    ("scales into another stage", INTO_STAGE, INTO_STAGE.removesuffix("stage") + "(stage + 1) % 2"),
)


@pytest.mark.rest
@pytest.mark.parametrize("mistake", MISTAKES_OF_LOADS, ids=lambda mistake: mistake[0])
def test_a_mistake_of_the_load_warp_is_found(
    mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = spoilt(Mistake(mistake[0], nvfp4_kernel, *mistake[1:]), tmp_path)
    monkeypatch.setattr(nvfp4_kernel.Nvfp4Forward, "load_warp", wrong.Nvfp4LoadWarp)
    with pytest.raises((AssertionError, EmulatorError)):
        run(1)


@pytest.mark.full
@pytest.mark.parametrize("forgotten", [0, 1])
def test_a_forgotten_scale_of_the_tensor_is_found(forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = host.scales_of

    def without(*arguments: Any) -> Any:
        scales = list(right(*arguments))
        scales[forgotten] = torch.ones(1).expand(CASE.heads[1])
        return tuple(scales)

    monkeypatch.setattr(host, "scales_of", without)
    with pytest.raises((AssertionError, EmulatorError)):
        run(1)
