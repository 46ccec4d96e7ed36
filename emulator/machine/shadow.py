# SPDX-License-Identifier: Apache-2.0
"""Who last touched each word of a memory: the state behind race and initialisation checks.

A word is 4 bytes. Of the last write its stamp, its bytes and its instruction are kept; of the reads since then the same
while there is one reader, and a clock for each reader's component once there are more.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from emulator.machine.clocks import Vector

# A stretch of words without a gap is cheaper as a slice.
Words: TypeAlias = "NDArray[np.int64] | slice"
ALL_BYTES = 0xF
NOBODY, SEVERAL = -1, -2


@dataclass(frozen=True)
class Clash:
    """Two accesses that nothing orders.

    Attributes:
        word: index of the first word in question.
        component, where: of the earlier access; where is an instruction's number, -1 where it is not known.
        earlier: what it did, `write` or `read`.
        clock: of its stamp.
    """

    word: int
    component: int
    where: int
    earlier: str
    clock: int


def listed(words: Words) -> NDArray[np.int64]:
    return np.arange(words.start, words.stop, dtype=np.int64) if isinstance(words, slice) else words


class Shadow:
    """The history of a memory of `size` bytes."""

    def __init__(self, size: int) -> None:
        words = -(-size // 4)
        self.written = np.zeros(words, dtype=np.uint8)  # bytes of each word that were ever written
        self.writer = np.full(words, NOBODY, dtype=np.int16)
        self.write_clock = np.zeros(words, dtype=np.int32)
        self.write_bytes = np.zeros(words, dtype=np.uint8)
        self.write_where = np.full(words, -1, dtype=np.int32)
        self.write_atomic = np.zeros(words, dtype=np.bool_)
        self.reader = np.full(words, NOBODY, dtype=np.int16)
        self.read_clock = np.zeros(words, dtype=np.int32)
        self.read_bytes = np.zeros(words, dtype=np.uint8)
        self.read_where = np.full(words, -1, dtype=np.int32)
        self.readers: dict[int, Vector] = {}

    def unwritten(self, words: Words, mask: int | NDArray[np.uint8] = ALL_BYTES) -> int:
        """The first of the words with a byte that was never written; -1 where there is none."""
        missing = (self.written[words] & mask) != mask
        return int(listed(words)[missing.argmax()]) if missing.any() else -1

    def read(
        self,
        words: Words,
        stamp: tuple[int, int],
        order: Vector,
        where: int,
        mask: int | NDArray[np.uint8] = ALL_BYTES,
        *,
        atomic: bool = False,
    ) -> Clash | None:
        """Record a read of words by stamp = (component, clock).

        Args:
            order: clocks of what is ordered before the read.
            mask: bytes of each word, a bit each.
            atomic: it needs no order with atomic writes.

        Returns:
            The first write that is not ordered before it, if there is one.
        """
        clash = self._unordered_write(words, order, mask, atomic)
        component, clock = stamp
        before = self.reader[words]
        ours = (before == NOBODY) | (before == component)
        if ours.all():
            self.reader[words] = component
            self.read_clock[words] = clock
            self.read_bytes[words] |= mask
            self.read_where[words] = where
        else:
            self._read_by_several(words, before, stamp, mask, where)
        return clash

    def _read_by_several(
        self, words: Words, before: NDArray[np.int16], stamp: tuple[int, int], mask: int | NDArray[np.uint8], where: int
    ) -> None:
        for component in np.unique(before[before >= 0]):
            those = listed(words)[before == component]
            self._row(int(component))[those] = self.read_clock[those]
        self._row(stamp[0])[words] = stamp[1]
        self.reader[words] = SEVERAL
        self.read_bytes[words] |= mask
        self.read_where[words] = where

    def _row(self, component: int) -> Vector:
        row = self.readers.get(component)
        if row is None:
            row = self.readers[component] = np.zeros(self.reader.shape[0], dtype=np.int32)
        return row

    def write(
        self,
        words: Words,
        stamp: tuple[int, int],
        order: Vector,
        where: int,
        mask: int | NDArray[np.uint8] = ALL_BYTES,
        read_order: Vector | None = None,
        *,
        atomic: bool = False,
    ) -> Clash | None:
        """Record a write; arguments and result as in `read`.

        Args:
            atomic: it needs no order with other atomic ones.
            read_order: clocks of the reads that are ordered before it, where they differ from `order`: a read by the
                generic proxy needs no proxy fence before an asynchronous write.
        """
        clash = self._unordered_write(words, order, mask, atomic) or self._unordered_read(
            words, order if read_order is None else read_order, mask
        )
        self.writer[words], self.write_clock[words] = stamp
        self.write_bytes[words] = mask
        self.write_where[words] = where
        self.write_atomic[words] = atomic
        self.written[words] |= mask
        several = self.reader[words] == SEVERAL
        if several.any():
            for row in self.readers.values():
                row[listed(words)[several]] = 0
        self.reader[words] = NOBODY
        self.read_bytes[words] = 0
        return clash

    def unordered(self, words: Words, order: Vector, *, write: bool) -> Clash | None:
        """The first access that is not ordered before a read or write of words, which is not recorded."""
        return self._unordered_write(words, order, ALL_BYTES) or (
            self._unordered_read(words, order, ALL_BYTES) if write else None
        )

    def forget(self, words: Words) -> None:
        """The words were given back: what they held may not be read again."""
        self.written[words] = 0

    def _unordered_write(
        self, words: Words, order: Vector, mask: int | NDArray[np.uint8], atomic: bool = False
    ) -> Clash | None:
        writer = self.writer[words]
        late = (order[writer] < self.write_clock[words]) & (writer >= 0)
        if atomic and late.any():
            late &= ~self.write_atomic[words]
        if late.any():
            late &= (self.write_bytes[words] & mask) != 0
        if not late.any():
            return None
        word = int(listed(words)[late.argmax()])
        return Clash(word, int(self.writer[word]), int(self.write_where[word]), "write", int(self.write_clock[word]))

    def _unordered_read(self, words: Words, order: Vector, mask: int | NDArray[np.uint8]) -> Clash | None:
        reader = self.reader[words]
        touched = (self.read_bytes[words] & mask) != 0
        late = (order[reader] < self.read_clock[words]) & (reader >= 0) & touched
        if late.any():
            word = int(listed(words)[late.argmax()])
            return Clash(word, int(self.reader[word]), int(self.read_where[word]), "read", int(self.read_clock[word]))
        shared = (reader == SEVERAL) & touched
        if shared.any():
            several = listed(words)[shared]
            for component, row in self.readers.items():
                late = row[several] > order[component]
                if late.any():
                    word = int(several[late.argmax()])
                    return Clash(word, component, int(self.read_where[word]), "read", int(row[word]))
        return None
