# SPDX-License-Identifier: Apache-2.0
"""What a launch takes, spelled once: torch's tensors on the host, CuTe's in a kernel, under the same names.

A pair is a token and one of its slots: number token * k + slot, of M k pairs. The pairs of this rank's experts, sorted
by expert, are rows; a work tile is up to tile_m rows of one expert.
"""

from typing import Any, NamedTuple

from dsl_backend.experts.args import ExpertsOperands

# Int32 of a work tile's record: expert, first row, rows, 0. A power of two, so that one access loads it.
RECORD = 4


class ExpertsScratch(NamedTuple):
    """Memory of a launch; contents undefined before and after it.

    Attributes:
        tiles: int32 [tiles, RECORD], the work tiles.
        tile_count: int32 [2], the number of them, and of all their rows.
        counts: int32 [CTAs of the routing, E], rows of each expert among a CTA's pairs.
        pairs: int32 [M k], the pair of each row, in each expert's rows in rising order.
        hidden: [M k, I], the activation's result for each row.
        made: [M k, H], an expert's result for each pair; missing where these are added to the output at once.
    """

    tiles: Any
    tile_count: Any
    counts: Any
    pairs: Any
    hidden: Any
    made: Any


class DecodeScratch(NamedTuple):
    """Memory of a launch for few tokens; contents undefined before and after it, except for the flags.

    Attributes:
        hidden: [D, M, I], the activation's result of every token for each chosen expert, zeros where it has not that
            expert. D is as many as can be chosen.
        partials: float32, `SmallMTiles.partials` of each CTA.
        flags: int32, one for each warpgroup with accumulators of each CTA; 0 before and after.
    """

    hidden: Any
    partials: Any
    flags: Any


class DecodeArgs(NamedTuple):
    """All arguments of a launch for few tokens except the stream.

    Attributes:
        ctas: of each product.
    """

    operands: ExpertsOperands
    scratch: DecodeScratch
    ctas: Any


class ExpertsArgs(NamedTuple):
    """All arguments of a launch except the stream.

    Attributes:
        routing_ctas: CTAs that sort the pairs.
        first_ctas, second_ctas: CTAs at most of the first and of the second product.
    """

    operands: ExpertsOperands
    scratch: ExpertsScratch
    routing_ctas: Any
    first_ctas: Any
    second_ctas: Any
