# SPDX-License-Identifier: Apache-2.0
"""Which of SM90's kernels of quantised operands serves so many rows, beside what was timed (docs/performance.md)."""

import pytest

from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig, ScaledSmallMConfig
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


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [2048, 8192])
def test_boxes_take_turns_with_many_rows(layer: str, rows: int) -> None:
    """In all five they were 4 to 40 % faster than the best other tile that was timed, with scales of blocks."""
    spec = spec_of(layer, blocks=True)
    for target in (H200, H200.sparing(8)):
        config = chosen(spec, rows, target).config
        assert isinstance(config, ScaledGemmConfig)
        assert (config.turns, config.box_n, config.cluster) == (2, 128, 1)


def test_boxes_take_turns_with_256_rows_where_tiles_suffice() -> None:
    for layer in ("llama", "deepseek"):
        config = chosen(spec_of(layer, blocks=True), 256, H200).config
        assert isinstance(config, ScaledGemmConfig)
        assert config.turns == 2
    # 64 tiles of 128 x 128 for 132 SMs: 42.8 us instead of 86.3.
    config = chosen(spec_of("down", blocks=True), 256, H200).config
    assert isinstance(config, ScaledGemmConfig)
    assert (config.turns, config.box_n) == (1, 32)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_untimed_is_chosen_for_few_rows(layer: str, blocks: bool) -> None:
    gated_blocks = blocks and LAYERS[layer][2]
    for rows in (1, 16, 63) if gated_blocks else (1, 16, 64, 128, 255):
        config = chosen(spec_of(layer, blocks=blocks), rows, H200).config
        assert isinstance(config, ScaledSmallMConfig) or getattr(config, "turns", None) == 1, (rows, config)


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
