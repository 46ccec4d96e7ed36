# SPDX-License-Identifier: Apache-2.0
"""What a launch of experts with weights in 8 bits takes beside its operands; see `args`. E4m3 is seen as bytes."""

from typing import Any, NamedTuple

from dsl_backend.experts.args import ExpertsOperands


class ScaledScratch(NamedTuple):
    """Memory of a launch; contents undefined before and after it. Names of `args.ExpertsScratch` mean the same.

    Attributes:
        hidden: e4m3 [M k, I]. hidden_scale: float32 [M k, I / 128] or [M k], of each row.
        wide: [M k, I], the activation's result in 16 bits where a launch of its own quantises it; else None.
        x: e4m3 [M, H], and x_scale: float32 [M, H / 128] or [M], where x is quantised here; else None.
    """

    tiles: Any
    tile_count: Any
    counts: Any
    pairs: Any
    hidden: Any
    hidden_scale: Any
    wide: Any
    x: Any
    x_scale: Any
    made: Any


class ScaledDecodeScratch(NamedTuple):
    """Memory of a launch for few tokens; contents undefined before and after it, except for the flags.

    Names of `args.DecodeScratch` mean the same.

    Attributes:
        hidden: e4m3 [D, M, I]; zeros where a token has not that expert.
        hidden_scale: float32 [D M, I / 128] or [D M], of each row, times the router's weight; 0 where it has not.
        wide: [D, M, I], the activation's result in 16 bits where a token has that expert.
        rows: int32 [M k], each pair's row of `wide`; -1 where there is none, or an earlier pair has the same.
        factors: float32 [M k], the router's weight of each of these rows.
        x, x_scale: as those of `ScaledScratch`.
    """

    hidden: Any
    hidden_scale: Any
    wide: Any
    rows: Any
    factors: Any
    x: Any
    x_scale: Any
    partials: Any
    flags: Any


class ScaledDecodeArgs(NamedTuple):
    """As `args.DecodeArgs`, with other scratch."""

    operands: ExpertsOperands
    scratch: ScaledDecodeScratch
    ctas: Any


class ScaledExpertsArgs(NamedTuple):
    """As `args.ExpertsArgs`, with other scratch."""

    operands: ExpertsOperands
    scratch: ScaledScratch
    routing_ctas: Any
    first_ctas: Any
    second_ctas: Any
