# SPDX-License-Identifier: Apache-2.0
"""Which of SM90's kernels of quantised operands serves so many rows (docs/performance/scaled-linear.md has times)."""

import itertools
from dataclasses import replace

import pytest

from dsl_backend.errors import Unsupported
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig, ScaledSmallMConfig
from dsl_backend.linear.scaled import dispatch
from dsl_backend.linear.scaled.cute.host import chosen
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, ROW_SCALED
from dsl_backend.runtime.target import from_arch

H200 = from_arch("sm_90a")
LAYERS = {
    "llama": (14336, 4096, True),
    "deepseek": (18432, 7168, True),
    "down": (4096, 14336, False),
    "qkv": (6144, 4096, False),
    "o": (7168, 16384, False),
}


def spec_of(layer: str, *, blocks: bool, batch_invariant: bool = False) -> ScaledLinearSpec:
    n, k, gated = LAYERS[layer]
    x, weight = (GROUP_SCALED, BLOCK_SCALED) if blocks else (ROW_SCALED, ROW_SCALED)
    return ScaledLinearSpec(
        n=n,
        k=k,
        x=x,
        weight=weight,
        activation=Swiglu() if gated else None,
        out=x if gated else None,
        column_major=blocks,
        batch_invariant=batch_invariant,
    )


# Layer, whether it has scales of blocks, rows -> (columns of a tile, turns, whether additions overlap, halves of k).
TILES = [
    ("llama", True, 64, (256, 2, False, False)),  # 35.1 us; 40.2 with overlap, 46.7 by the kernel for few rows
    ("llama", True, 2048, (256, 2, False, False)),  # 414.3; 459.6 in a cluster, 495.1 with overlap
    ("llama", True, 8192, (256, 2, False, False)),
    ("llama", False, 256, (160, 2, True, False)),  # 65.6; 74.8 with sums of one block of k
    ("llama", False, 8192, (192, 2, True, False)),  # 1800; 1989 with 256 columns in turns
    ("deepseek", True, 64, (160, 1, False, False)),  # 74.2; 89.6 by the kernel for few rows
    ("deepseek", True, 256, (192, 2, True, False)),  # 136.2; 173.2 with 256 columns in turns
    ("deepseek", True, 2048, (256, 2, False, False)),
    ("down", True, 256, (128, 1, True, True)),  # 30.6; 41.5 with 64 columns
    ("down", False, 256, (128, 1, True, True)),  # 28.2; 41.2
    ("down", True, 8192, (256, 2, False, False)),  # 802.4; 886.6 with overlap
    ("down", False, 8192, (128, 1, True, False)),  # 766.6; 861.2
    ("qkv", True, 64, (64, 1, True, False)),  # 13.3; 13.9 with split-K
    ("qkv", True, 8192, (256, 2, False, False)),  # 346.5; 373.4
    ("qkv", False, 256, (96, 1, False, False)),  # 13.2; 17.8
    ("qkv", False, 8192, (192, 2, True, False)),  # 337.0; 366.8
    ("o", True, 256, (128, 1, True, False)),  # 64.1; 66.1
    ("o", True, 8192, (256, 2, False, False)),
]


def test_the_fastest_that_was_timed_serves() -> None:
    """Triton's took 1.08 to 3.6 times as long in 83 of 83 rows on an H200; SM100's were never timed."""
    for blocks, layer in itertools.product((True, False), LAYERS):
        spec = spec_of(layer, blocks=blocks)
        assert dispatch.choose(spec, H200).name == "cute-sm90"
        assert dispatch.choose(replace(spec, aligned=False), H200).name == "triton"
        assert dispatch.choose(spec, from_arch("sm_100a")).name == "triton"


def test_an_objection_is_of_one_layer_alone() -> None:
    """What CuTe DSL lacks is looked up once in a process: an objection that is added to it would be of all layers."""
    spec = spec_of("down", blocks=True)
    with pytest.raises(Unsupported, match="multiples of 16 bytes"):
        dispatch.choose(replace(spec, aligned=False), H200, "cute-sm90")
    assert dispatch.choose(spec, H200, "cute-sm90").title == "scaled-linear sm90"


@pytest.mark.parametrize(("layer", "blocks", "rows", "tile"), TILES)
def test_tiles_are_what_was_timed_to_be_fastest(
    layer: str, blocks: bool, rows: int, tile: tuple[int, int, bool, bool]
) -> None:
    """Or within 4 % of it; H200, us behind each."""
    config = chosen(spec_of(layer, blocks=blocks), rows, H200).config
    assert isinstance(config, ScaledGemmConfig)
    assert (2 * config.box_n, config.turns, config.overlap, config.splits > 1) == tile
    assert config.promotion == (1 if blocks or config.overlap else 4)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_untimed_is_chosen_for_few_rows(layer: str, blocks: bool) -> None:
    for rows in (1, 16):
        assert isinstance(chosen(spec_of(layer, blocks=blocks), rows, H200).config, ScaledSmallMConfig), rows
    for rows in (64, 128, 255):
        config = chosen(spec_of(layer, blocks=blocks), rows, H200).config
        if isinstance(config, ScaledGemmConfig):
            gated = LAYERS[layer][2]
            assert config.overlap or config.turns == 1 or (blocks and gated)
            assert config.splits == 1 or (rows >= 128 and not gated)


def test_clusters_do_not_split_blocks() -> None:
    """34.6 us instead of 26.2 of 64 rows of 14336 columns, 24.6 with two consumers; 26.1 instead of 22.3 of 16 rows."""
    for rows, groups in ((16, 1), (64, 2)):
        config = chosen(spec_of("down", blocks=True), rows, H200).config
        assert isinstance(config, ScaledSmallMConfig)
        assert (config.stream_k, config.groups) == (True, groups)


def test_wide_k_tiles_of_channels_are_split() -> None:
    """19.2 us instead of 23.7 of 64 rows of 14336 columns, 33.1 instead of 34.7 of 16384."""
    for layer in ("down", "o"):
        config = chosen(spec_of(layer, blocks=False), 64, H200).config
        assert isinstance(config, ScaledSmallMConfig)
        assert (config.tile_k, config.num_splits) == (256, 2)


def test_boxes_take_turns_with_64_rows_of_a_gated_layer() -> None:
    """34.9 us instead of 44.9 with 64 rows, 36.5 instead of 45.1 with 128."""
    for rows in (64, 128):
        assert getattr(chosen(spec_of("llama", blocks=True), rows, H200).config, "turns", 1) == 2


def test_one_kernel_serves_all_rows_if_batch_invariant() -> None:
    for layer in LAYERS:
        spec = spec_of(layer, blocks=True, batch_invariant=True)
        assert len({chosen(spec, rows, H200) for rows in (1, 64, 256, 2048)}) == 1
