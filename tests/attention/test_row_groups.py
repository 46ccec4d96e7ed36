# SPDX-License-Identifier: Apache-2.0
"""Row groups by the estimate: where memory limits, and as large as leaves few CTAs idle."""

from dataclasses import replace

import pytest

from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.row_groups import MOST_ROW_TILES, NO_ROW_GROUP, load_us, row_group, tile_us
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import mla

SPEC = mla(64, q_lens=(1,), kv_lens=(1,)).spec
H200, H100 = from_arch("sm_90a").chips
SMS = H200.sm_count
# A chip whose memory never limits.
FAST_MEMORY = replace(H200, memory_gb_s=10 * H200.memory_gb_s)


def clusters(chip: Chip, row_tiles: int, num_clusters: int = SMS) -> int:
    return row_group(SPEC, ROWS, chip, num_clusters, row_tiles).clusters


def test_times_of_a_tile() -> None:
    """64 keys of 576 and 512 in 16 bits: 8.9 MFLOP and 74 KB."""
    assert tile_us(SPEC, 64, H200) == pytest.approx(2 * 64 * 64 * 1088 / (4096 * 0.57 * 1980))
    assert load_us(SPEC, 64, H200, SMS) == pytest.approx(SMS * 64 * 1152 / (0.9 * 4814e3))


@pytest.mark.parametrize("chip", [H100, H200])
def test_one_row_tile_has_no_row_group(chip: Chip) -> None:
    assert row_group(SPEC, ROWS, chip, SMS, 1) == NO_ROW_GROUP
    assert row_group(SPEC, ROWS, chip, SMS, MOST_ROW_TILES + 1) == NO_ROW_GROUP


@pytest.mark.parametrize("row_tiles", range(1, 9))
def test_products_that_limit_need_no_row_group(row_tiles: int) -> None:
    assert clusters(FAST_MEMORY, row_tiles) == 1
    # Clusters of two CTAs, which load a key tile once.
    assert clusters(H200, row_tiles, SMS // 2) == 1


@pytest.mark.parametrize(("row_tiles", "found"), [(2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 4)])
def test_row_groups_of_whole_requests(row_tiles: int, found: int) -> None:
    """All row tiles of a request where no CTA is left over; groups of 8 would leave 4 of 132 CTAs idle."""
    assert clusters(H100, row_tiles) == clusters(H200, row_tiles) == found


def test_slower_memory_bears_more_idle_ctas() -> None:
    """A chip may spend what it gains: iterations of an H100 wait for memory for longer than those of an H200."""
    by_chip = [row_group(SPEC, ROWS, chip, SMS, 2).iters for chip in (FAST_MEMORY, H200, H100)]
    assert by_chip == sorted(set(by_chip))
    assert by_chip[0] == NO_ROW_GROUP.iters
    gain = load_us(SPEC, ROWS, H100, SMS) / tile_us(SPEC, ROWS, H100)
    assert by_chip[2] == pytest.approx(100 * gain, abs=1)
