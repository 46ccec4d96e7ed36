# SPDX-License-Identifier: Apache-2.0
"""Draws numbers that are the same on every machine and in every version of Python."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """The numbers of one row.

    Python guarantees the sequence of `Random.random()` for a seed, and of no other method: all draws use it alone.

    Args:
        seed: of the whole list.
        family, index: of the row. Each row has its own sequence, so a change of one row changes no other.
    """

    def __init__(self, seed: int, family: str, index: int) -> None:
        self._next = random.Random(f"{seed} {family} {index}").random

    def between(self, least: int, most: int) -> int:
        """An integer; all are equally likely."""
        return least + int(self._next() * (most - least + 1))

    def log_between(self, least: int, most: int) -> int:
        """An integer; all orders of magnitude are equally likely."""
        return round(least * (most / least) ** self._next())

    def one_of(self, items: Sequence[T]) -> T:
        return items[int(self._next() * len(items))]

    def lengths(self, count: int, least: int, most: int) -> list[int]:
        return [self.log_between(least, most) for _ in range(count)]
