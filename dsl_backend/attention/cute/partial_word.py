# SPDX-License-Identifier: Apache-2.0
"""What an attention kernel that merges its partial results knows of a part of a split output tile, in one int32."""

from typing import Any

BITS = 10
MASK = (1 << BITS) - 1
# An index of partial results, of which a CTA has two, has BITS bits.
MAX_CTAS = (1 << BITS) // 2


def pack(partial_idx: Any, source: Any, num_splits: Any) -> Any:
    """The word, which is not negative.

    Args:
        partial_idx: where the partial result goes.
        source: the CTA that the output tile begins in.
        num_splits: CTAs that have a part of it.
    """
    return partial_idx | (source << BITS) | (num_splits << 2 * BITS)


def unpack(word: Any) -> tuple[Any, Any, Any]:
    """(partial_idx, source, num_splits)."""
    return word & MASK, (word >> BITS) & MASK, word >> 2 * BITS
