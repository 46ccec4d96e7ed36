# SPDX-License-Identifier: Apache-2.0
"""Wavefronts of accesses to shared memory."""

import numpy as np
import pytest

from emulator.machine.banks import Wavefronts, wavefronts

LANES = np.arange(32, dtype=np.int64)


@pytest.mark.parametrize(
    ("addresses", "size", "needed", "least"),
    [
        (LANES * 4, 4, 1, 1),
        (LANES[::-1] * 4 + 1024, 4, 1, 1),
        (LANES * 0 + 64, 4, 1, 1),  # one word for all
        (LANES // 2 * 4, 4, 1, 1),
        (LANES * 2, 2, 1, 1),
        (LANES, 1, 1, 1),
        (LANES * 8, 4, 2, 1),
        (LANES * 128, 4, 32, 1),
        (LANES * 132, 4, 1, 1),  # a column of a matrix with a padded row
        (LANES * 8, 8, 2, 2),
        (LANES * 16, 8, 4, 2),
        (LANES * 16, 16, 4, 4),
        (LANES * 128, 16, 32, 4),  # rows of 128 bytes without a swizzle
        (LANES * 128 + (LANES % 8) * 16, 16, 4, 4),  # and with one
        (LANES * 144, 16, 4, 4),
        (LANES * 32, 32, 8, 8),
        (LANES[:8] * 128, 16, 8, 1),
        (LANES[:1], 4, 1, 1),
        (LANES[:0], 4, 0, 0),
    ],
)
def test_patterns(addresses, size, needed, least) -> None:
    assert wavefronts(addresses, size) == Wavefronts(needed, least)


def test_lanes_say_which_part_of_the_warp_they_are() -> None:
    two = np.array([0, 128], np.int64)
    assert wavefronts(two, 16, np.array([0, 7])) == Wavefronts(2, 1)
    assert wavefronts(two, 16, np.array([0, 8])) == Wavefronts(2, 2)


def by_hand(addresses, size, lanes) -> int:
    """Word by word."""
    total = 0
    span = max(1, size // 4)
    for part in range(span):
        banks: dict[int, set[int]] = {}
        for address, lane in zip(addresses, lanes, strict=True):
            if lane * span // 32 == part:
                for word in range(address // 4, address // 4 + span):
                    banks.setdefault(word % 32, set()).add(word)
        total += max((len(words) for words in banks.values()), default=0)
    return total


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_random_accesses(size) -> None:
    made = np.random.default_rng(size)
    for _ in range(50):
        lanes = np.flatnonzero(made.random(32) < made.choice([0.3, 1.0]))
        addresses = made.integers(0, made.choice([64, 4096]), lanes.size) * size
        assert wavefronts(addresses, size, lanes).needed == by_hand(addresses, size, lanes)
