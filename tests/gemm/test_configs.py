# SPDX-License-Identifier: Apache-2.0
"""Which tiles serve a problem, and why others cannot."""

import math
from dataclasses import replace

import pytest
import torch

from dsl_backend.errors import Unsupported
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.configs import (
    MOST_STAGES,
    Config,
    arch_kernels,
    candidates,
    choose,
    estimate_us,
    fitting,
    variants,
)
from dsl_backend.gemm.cost import max_ctas, runs_at_once
from dsl_backend.gemm.sm90.configs import SWAP_AB, GemmConfig, SmallMConfig, SwapABConfig
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles
from dsl_backend.linear import dispatch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import Target, from_arch

SMEM_BYTES = 227 * 1024
H200, B200 = from_arch("sm_90a"), from_arch("sm_100a")
TARGETS = pytest.mark.parametrize("target", [H200, B200], ids=lambda target: target.arch)
LLAMA = LinearSpec(n=14336, k=4096, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
SHAPES = [(14336, 4096), (25600, 5120), (10880, 4096), (8, 8), (4096, 14336), (1536, 2048), (100000, 64)]
ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 129, 256, 257, 700, 1024, 8192, 100000)


@TARGETS
@pytest.mark.parametrize("activation", [None, Swiglu()], ids=["plain", "gated"])
def test_every_candidate_serves_something(activation: Swiglu | None, target: Target) -> None:
    specs = [LinearSpec(n=n, k=k, dtypes=Dtypes.of(torch.bfloat16), activation=activation) for n, k in SHAPES]
    served = {config for spec in specs for config in candidates(spec, target)}
    chosen = {choose(spec, rows, target) for spec in specs for rows in ROWS}
    assert chosen <= served
    for spec in specs:
        assert set(candidates(spec, target)) <= set(fitting(spec, target))
        for config in fitting(spec, target):
            assert config.objections(spec, target.smem_bytes) == []


@TARGETS
def test_shared_memory_is_filled(target: Target) -> None:
    arch = arch_kernels(target)
    for spec in (LLAMA, replace(LLAMA, activation=None)):
        plain = spec.activation is None
        swapped = sum(isinstance(config, SwapABConfig) for config in arch.gemms) if plain else 0
        few = len(arch.small_m) + len(arch.split_k if plain else arch.gated_split_k)
        assert len(fitting(spec, target)) == few + len(arch.gemms) - swapped
        for config in fitting(spec, target):
            deeper = replace(config, stages=config.stages + 1)
            assert config.stages >= 3, config
            assert config.stages == MOST_STAGES or deeper.objections(spec, target.smem_bytes), config


def test_clusters_of_two_need_an_even_number_of_ctas() -> None:
    odd = replace(B200, sm_count=147)
    assert [max_ctas(config, 64, odd) for config in (sm100.GemmConfig(two_cta=True), sm100.GemmConfig())] == [146, 147]


def test_spared_sms_have_no_ctas() -> None:
    few = H200.sparing(17)
    tiles = (SmallMConfig(tokens=8), GemmConfig(), GemmConfig(cluster=2))
    assert [max_ctas(config, 8, few) for config in tiles] == [115, 115, 114]
    assert max_ctas(GemmConfig(cluster=2), 64, H200.sparing(131)) == 2, "a cluster at least"


def test_split_k_serves_where_all_clusters_run_at_once() -> None:
    """A tile has 128 rows of weights and 16 of x: 28 clusters of 4 here, which 128 SMs run at once for sure."""
    spec = replace(LLAMA, n=3584, activation=None)
    config = SmallMConfig(tokens=16, num_splits=4)
    assert runs_at_once(config, spec, 16, H200.sparing(4))
    assert not runs_at_once(config, spec, 16, H200.sparing(5))
    assert not runs_at_once(config, spec, 17, H200)
    assert runs_at_once(replace(config, num_splits=1), spec, 8192, H200)
    tried = [one for one in variants(spec, 16, H200) if isinstance(one, SmallMConfig) and not one.stream_k]
    assert {one.num_splits for one in tried} == {2, 3, 4}
    assert estimate_us(config, spec, 17, H200) == math.inf
    two = replace(config, num_splits=2)
    assert [max_ctas(one, 16, H200) for one in (config, two, replace(config, num_splits=8))] == [112, 132, 112]
    assert getattr(choose(spec, 16, H200), "num_splits", 1) == 4, "measured to be faster"
    assert getattr(choose(spec, 16, H200.sparing(100)), "num_splits", 1) == 1, "its clusters do not run at once"
    assert max_ctas(replace(config, num_splits=6), 16, H200) == 84, "two clusters of 6 fill 12 SMs of 16"


@pytest.mark.parametrize(
    ("n", "k", "rows", "splits"),
    [
        (6144, 4096, 1, 4),
        (6144, 4096, 16, 4),
        (6144, 4096, 64, 4),
        (4096, 4096, 1, 4),
        (4096, 4096, 16, 4),
        (4096, 4096, 64, 8),
        (4096, 14336, 1, 1),
        (4096, 14336, 16, 1),
        (4096, 14336, 32, 8),
        (4096, 14336, 64, 8),
    ],
)
def test_a_b200_chooses_as_the_clock_does(n: int, k: int, rows: int, splits: int) -> None:
    """Between stream-K and split-K of Llama-8B's projections (docs/performance/linear.md)."""
    chosen = choose(replace(LLAMA, n=n, k=k, activation=None), rows, B200)
    assert isinstance(chosen, sm100.SmallMConfig)
    assert chosen.num_splits == splits


@pytest.mark.parametrize(
    ("n", "k", "rows", "kernel"),
    [
        (1792, 4096, 1, (16, 4)),
        (1792, 4096, 64, (64, 8)),
        (1792, 4096, 128, (64, 4)),
        (2048, 7168, 16, (16, 4)),
        (2048, 7168, 128, (64, 4)),
        (3584, 4096, 64, (64, 4)),
        (3584, 8192, 64, (64, 4)),
        (7168, 4096, 16, (16, 1)),
        (14336, 4096, 16, (16, 1)),
    ],
)
def test_gated_layers_of_a_b200_are_chosen_as_the_clock_has_them(
    n: int, k: int, rows: int, kernel: tuple[int, int]
) -> None:
    """Tokens and CTAs of a tile: narrow layers, as tensor parallelism leaves them, have split-K."""
    chosen = choose(replace(LLAMA, n=n, k=k), rows, B200)
    assert isinstance(chosen, sm100.SmallMConfig)
    assert (chosen.tokens, chosen.num_splits) == kernel


def test_sparing_sms_takes_no_other_kernels() -> None:
    """What was compiled ahead serves. The choice may be another: 88 tiles on 44 CTAs take two waves."""
    spec = replace(LLAMA, n=2816, k=2048)
    for spare in (16, 100):
        for rows in ROWS:
            assert choose(spec, rows, H200.sparing(spare)) in candidates(spec, H200)
    chosen = [[choose(spec, rows, H200.sparing(spare)) for rows in ROWS] for spare in (0, 100)]
    assert chosen[0] != chosen[1]


def test_estimates_follow_what_the_chip_says() -> None:
    """One row is bound by memory, 8192 by products."""
    few, many = ([choose_on(chip, rows)[1] for chip in H200.chips] for rows in (1, 8192))
    h200, h100 = H200.chips
    assert few[1] / few[0] == pytest.approx(h200.memory_gb_s / h100.memory_gb_s, rel=0.05)
    assert many[1] == pytest.approx(many[0], rel=0.01)


def choose_on(chip: Chip, rows: int) -> tuple[Config, float]:
    """The kernel that a GPU gets, and its estimate."""
    target = replace(H200, chip=chip, gpu="NVIDIA Test")
    config = choose(LLAMA, rows, target)
    return config, estimate_us(config, LLAMA, rows, target)


def test_what_any_usual_part_needs_is_compiled_without_a_gpu() -> None:
    chosen = {chip: {choose_on(chip, rows)[0] for rows in range(1, 1025, 16)} for chip in H200.chips}
    assert len(set(map(frozenset, chosen.values()))) == 2
    probed = {chip: set(candidates(LLAMA, replace(H200, chip=chip))) for chip in H200.chips}
    assert set().union(*probed.values()) == set(candidates(LLAMA, H200))
    assert all(chosen[chip] <= probed[chip] for chip in chosen)


def test_tensor_memory_is_had_in_powers_of_two() -> None:
    columns = [config.tmem_columns for config in (*sm100.GEMMS, *sm100.SMALL_M)]
    assert columns == [512, 512, 512, 512, 512, 256, 64, 128, 256, 512]


def test_too_little_shared_memory_is_an_objection() -> None:
    small = replace(H200, smem_bytes=20_000)
    assert candidates(LLAMA, small) == ()
    with pytest.raises(Unsupported, match="20000 bytes of shared memory are too few for every tile"):
        dispatch.choose(LLAMA, small, "cute")


@pytest.mark.parametrize(("target", "least", "most"), [(H200, 8, 16), (B200, 16, 32)])
def test_few_rows_get_the_smallest_tile_that_holds_them(target: Target, least: int, most: int) -> None:
    for rows in (1, 8, 9, 16, 32, 64):
        config = choose(LLAMA, rows, target)
        if rows <= most:
            assert isinstance(config, SmallMTiles), rows
            assert config.tile_tokens == max(least, 1 << (rows - 1).bit_length()), rows
    assert isinstance(choose(LLAMA, 8192, target), GemmTiles)


@TARGETS
@pytest.mark.parametrize("activation", [None, Swiglu()], ids=["plain", "gated"])
def test_there_is_a_variant_for_any_number_of_rows(activation: Swiglu | None, target: Target) -> None:
    spec = replace(LLAMA, activation=activation)
    for rows in sorted({*range(1, 17), *ROWS}):
        tried = list(variants(spec, rows, target))
        assert tried, f"nothing to try for {rows} rows"
        assert all(config.objections(spec, target.smem_bytes) == [] for config in tried)
        default = choose(spec, rows, target)
        if isinstance(default, SmallMTiles):
            assert default in tried, rows


@TARGETS
def test_batch_invariance_leaves_one_kernel(target: Target) -> None:
    (only,) = candidates(replace(LLAMA, batch_invariant=True), target)
    assert isinstance(only, GemmTiles)


@pytest.mark.parametrize(("target", "bandwidth", "rate"), [(H200, 4.52e6, 790e6), (B200, 8.0e6, 2250e6)])
def test_estimates_are_no_faster_than_the_chip(target: Target, bandwidth: float, rate: float) -> None:
    for n, k in SHAPES:
        spec = replace(LLAMA, n=n, k=k)
        for rows in ROWS:
            floor = max(spec.weight_rows * k * 2 / bandwidth, 2 * spec.weight_rows * k * rows / rate)
            for config in candidates(spec, target):
                assert estimate_us(config, spec, rows, target) > floor, (n, k, rows, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GemmConfig(tile_m=96), "tile_m 96: each consumer needs a multiple of 64 rows"),
        (GemmConfig(tile_m=64), "tile_m 64: each consumer needs a multiple of 64 rows"),
        (GemmConfig(box_n=20), "box_n 20 is not a multiple of 8 from 16 to 128"),
        (GemmConfig(stages=1), "1 stages: 2 are the least"),
        (GemmConfig(cluster=4), "clusters of 4 CTAs: 1 or 2 are possible"),
        (GemmConfig(band=0), "band 0 is not positive"),
        (GemmConfig(tile_m=256), "256 accumulators a thread: 192 are the most"),
        (GemmConfig(stages=5), "bytes of shared memory: 232448 are the most"),
        (SwapABConfig(tokens=72), "72 tokens are not a multiple of 16 from 16 to 256"),
        (SwapABConfig(tokens=272), "272 tokens are not a multiple of 16 from 16 to 256"),
        (SwapABConfig(box_n=32), "box_n 32 is not 64, 96 or 128, nor 32 with ping-pong"),
        (SwapABConfig(box_n=128, pingpong=True), "320 accumulators a thread: 184 are the most"),
        (SwapABConfig(tokens=256, box_n=96), "128 accumulators a thread: 96 are the most"),
        (SwapABConfig(cluster=4), "clusters of 4 CTAs: 1 or 2 are possible"),
        (SmallMConfig(tokens=24), "24 rows of a tile are neither 8 nor a multiple of 16"),
        (SmallMConfig(tokens=20), "20 tokens are not a multiple of 8 up to 128"),
        (SmallMConfig(tokens=136), "136 tokens are not a multiple of 8 up to 128"),
        (SmallMConfig(groups=3), "3 consumers: 1 or 2 are possible"),
        (SmallMConfig(split_tokens=True), "one consumer has no tokens to split"),
        (SmallMConfig(tile_k=96), "tile_k 96 is not a multiple of 64"),
        (SmallMConfig(stages=1), "1 stages: 2 are the least"),
        (SmallMConfig(stages=20), "bytes of shared memory: 232448 are the most"),
        (SmallMConfig(num_splits=5), "5 splits: one of 1, 2, 3, 4, 6, 8 is possible"),
        (SmallMConfig(tile_k=1024, num_splits=8), "8 splits of 4096 columns: each needs 1024 of its own"),
        (SmallMConfig(tokens=8, num_splits=8), "8 accumulators are too few for 8 splits: one gets none"),
        (SmallMConfig(tokens=32, stages=12, num_splits=2), "bytes of shared memory: 232448 are the most"),
        (sm100.GemmConfig(box_n=120), "box_n 120 is not a multiple of 16 from 16 to 128"),
        (sm100.GemmConfig(stages=1), "1 stages: 2 are the least"),
        (sm100.GemmConfig(band=0), "band 0 is not positive"),
        (sm100.GemmConfig(two_cta=True, stages=7), "bytes of shared memory: 232448 are the most"),
        (sm100.SmallMConfig(tokens=8), "8 tokens are neither a multiple of 16 up to 64 nor of 32 up to 128"),
        (sm100.SmallMConfig(tokens=80), "80 tokens are neither a multiple of 16 up to 64 nor of 32 up to 128"),
        (sm100.SmallMConfig(tokens=160), "160 tokens are neither"),
        (sm100.SmallMConfig(tile_k=96), "tile_k 96 is not a multiple of 64"),
        (sm100.SmallMConfig(stages=1), "1 stages: 2 are the least"),
        (sm100.SmallMConfig(stages=7), "bytes of shared memory: 232448 are the most"),
    ],
)
def test_what_is_refused(config: Config, message: str) -> None:
    for fine in (GemmConfig(), SmallMConfig(), SwapABConfig(), sm100.GemmConfig(), sm100.SmallMConfig()):
        assert fine.objections(LLAMA, SMEM_BYTES) == []
    assert any(message in reason for reason in config.objections(LLAMA, SMEM_BYTES))


@pytest.mark.parametrize("spec", [replace(LLAMA, activation=None), replace(LLAMA, residual=True)], ids=str)
def test_swapped_operands_need_an_activation_and_no_residual(spec: LinearSpec) -> None:
    assert SwapABConfig().objections(LLAMA, SMEM_BYTES) == []
    (reason,) = SwapABConfig().objections(spec, SMEM_BYTES)
    assert reason == "gate and up rows alternate in a tile: an activation is needed, and no residual"


def test_swapped_operands_are_tried_where_their_tokens_fit() -> None:
    tokens = {config.tokens for config in variants(LLAMA, 320, H200) if isinstance(config, SwapABConfig)}
    assert tokens == {80, 112, 160}
    assert {config.tokens for config in SWAP_AB if config.fits(2000)} == {*range(80, 257, 16)} - {240}
