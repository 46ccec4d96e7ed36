# SPDX-License-Identifier: Apache-2.0
"""Bank conflicts of a warp's accesses to shared memory.

Shared memory has 32 banks of 4 bytes, and each delivers one word a cycle; lanes that want the same word get it together
(CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x, which later ones refer to). 128 bytes are what a
cycle delivers at most, so that wider accesses are made in parts: 8 bytes a lane by half warps, 16 by quarter warps. A
part takes as many wavefronts as its most wanted bank has words to deliver.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BANKS, WORD = 32, 4
LINE = BANKS * WORD


class Wavefronts(NamedTuple):
    """Attributes:
    needed: passes through shared memory.
    least: of an access of this size by these lanes, without conflicts.
    """

    needed: int
    least: int


def wavefronts(addresses: NDArray[np.int64], size: int, lanes: NDArray[np.int64] | None = None) -> Wavefronts:
    """How many wavefronts an access takes.

    Args:
        addresses: [n] bytes, one for each lane that takes part; for ldmatrix and stmatrix of each row, with size 16.
        size: bytes of a lane's access: 1, 2, 4, 8, 16 or 32.
        lanes: [n] their numbers; 0 to n - 1 if not given.
    """
    if not addresses.size:
        return Wavefronts(0, 0)
    # Which words share a bank does not change if all of them move by a line.
    relative = addresses - (int(addresses.min()) // LINE * LINE)
    return _cached(relative.tobytes(), size, b"" if lanes is None else lanes.tobytes())


@lru_cache(maxsize=1 << 16)
def _cached(relative: bytes, size: int, lanes: bytes) -> Wavefronts:
    addresses = np.frombuffer(relative, np.int64)
    numbers = np.frombuffer(lanes, np.int64) if lanes else np.arange(addresses.size)
    span = max(1, size // WORD)
    part = numbers // max(1, BANKS // span)
    words = addresses[:, None] // WORD + np.arange(span)
    # Words of different parts are different ones, whatever their addresses.
    beyond = (int(words.max()) // BANKS + 1) * BANKS
    distinct = np.unique(words + part[:, None] * beyond)
    banks = distinct // beyond * BANKS + distinct % BANKS
    counts = np.bincount(banks, minlength=-(-(int(banks.max()) + 1) // BANKS) * BANKS).reshape(-1, BANKS)
    return Wavefronts(int(counts.max(axis=1).sum()), int(np.unique(part).size))
