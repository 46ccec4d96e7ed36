# SPDX-License-Identifier: Apache-2.0
"""Score modifications: softmax scale, softcap, ALiBi; and sinks, which join the softmax's denominator.

Scores are in base 2, that is times log2(e), so that the softmax can use exp2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, kv_head_of
from dsl_backend.primitives.math import LOG2_E, exp2


@dataclass(frozen=True)
class ScoreModKey:
    """Which score modifications a layer has.

    Attributes:
        sinks: their dtype; None where the layer has none.
        signed: the softmax scale is not positive, so the largest score need not be the largest of q·k.
    """

    softcap: bool = False
    alibi: bool = False
    sinks: str | None = None
    signed: bool = False


class ScoreModArgs(NamedTuple):
    """Run-time values of the score modifications.

    Attributes:
        k_scale, v_scale: dequantization scales of an fp8 cache. A scale that all heads share has a stride of 0. With
            `LayerKey.scales_by_request` (request, head_kv).
        q_scale: the same of quantised queries, by KV head.
        out_scale: what outputs in e4m3 are divided by, and those in NVFP4 are multiplied by.
        out_block_scale: where the scales of blocks of NVFP4 outputs go, bytes.
    """

    scale: cutlass.Float32
    softcap: cutlass.Float32
    sinks: cute.Tensor | None  # (head_q)
    alibi_slopes: cute.Tensor | None  # (head_q), float32
    k_scale: cute.Tensor | None  # (head_kv), float32
    v_scale: cute.Tensor | None  # (head_kv), float32
    q_scale: cute.Tensor | None = None  # (head_kv), float32
    out_scale: cute.Tensor | None = None  # (1), float32
    out_block_scale: cute.Tensor | None = None  # (rows, blocks of a row)


def element_of(key: Any, scale: cute.Tensor, head_block: Any, request: Any) -> cutlass.Float32:
    """The scale of a head block's KV head, or of that of a request. `key` is a LayerKey."""
    head_kv = kv_head_of(key, head_block) if key.heads_kv > 1 else 0
    return scale[request, head_kv] if key.scales_by_request else scale[head_kv]


def v_scale_of(key: Any, scoring: ScoreModArgs, head_block: Any, request: Any) -> cutlass.Float32 | None:
    """The dequantization scale of the values; None if they are not quantized.

    Args:
        key: a LayerKey.
        request: read only with `key.scales_by_request`.
    """
    return None if scoring.v_scale is None else element_of(key, scoring.v_scale, head_block, request)


def out_factor_of(key: Any, scoring: ScoreModArgs, head_block: Any, request: Any) -> cutlass.Float32 | None:
    """What outputs are multiplied by besides the inverse of row_sum; None for 1.

    It is the scale of the values, and that of NVFP4 outputs or the inverse of e4m3 outputs'; arguments as of
    `v_scale_of`.
    """
    v_scale = v_scale_of(key, scoring, head_block, request)
    if scoring.out_scale is None:
        return v_scale
    factor = scoring.out_scale[0] if key.nvfp4_out else cutlass.Float32(1.0) / scoring.out_scale[0]
    return factor if v_scale is None else v_scale * factor


class SoftmaxScale:
    """The softmax scale, times the dequantization scales of keys and queries, and a constant.

    It is computed once if all requests and key heads share it, else for every work tile.
    """

    def __init__(self, key: Any, scoring: ScoreModArgs, constant: float):
        self.key, self.scoring, self.constant = key, scoring, constant
        self.of_tile = cute.make_rmem_tensor(1, cutlass.Float32) if key.scaled_by_tile else None
        self.shared = None if key.scaled_by_tile else self.scaled(0, 0)

    def scaled(self, head_block: cutlass.Int32 | int, request: cutlass.Int32 | int) -> cutlass.Float32:
        scale = self.scoring.scale
        for other in (self.scoring.k_scale, self.scoring.q_scale):
            if other is not None:
                scale = scale * element_of(self.key, other, head_block, request)
        return scale if self.constant == 1.0 else scale * self.constant

    @cute.jit
    def load(self, work: WorkTile):
        """Load the scale of a work tile, before its scores."""
        if cutlass.const_expr(self.key.scaled_by_tile):
            self.of_tile[0] = self.scaled(work.head_block, work.kv_source)

    @property
    def value(self) -> cutlass.Float32:
        return self.shared if self.of_tile is None else self.of_tile[0]


class NoScoreMod:
    """score = scale q·k. The scale is applied in the FMA of the exponential."""

    modifies = False

    def __init__(self, key: Any, scoring: ScoreModArgs):
        self.softmax_scale = SoftmaxScale(key, scoring, LOG2_E)

    @property
    def softmax_scale_log2(self) -> cutlass.Float32:
        """What S is multiplied by to be base-2 scores."""
        return self.softmax_scale.value


class ScoreMod:
    """score = softcap tanh(scale q·k / softcap) - slope |q_idx - kv_idx|, in base 2."""

    modifies = True

    def __init__(self, key: Any, scoring: ScoreModArgs):
        self.key, self.scoring, self.softmax_scale = key.scores, scoring, SoftmaxScale(key, scoring, 1.0)
        self.softmax_scale_log2 = cutlass.Float32(1.0)

    def apply(self, score: cutlass.Float32, slope: cutlass.Float32, distance: cutlass.Int32) -> cutlass.Float32:
        """The score of a q·k; slope is times log2(e), distance = q_idx - kv_idx."""
        value = score * self.softmax_scale.value
        if self.key.softcap:
            # c tanh(s / c) = c (1 - 2 / (e^(2s/c) + 1)), which is c or -c when the exponential overflows or underflows.
            cap = self.scoring.softcap
            power = exp2(value * (2.0 * LOG2_E) * cute.arch.rcp_approx(cap))
            value = cap - 2.0 * cap * cute.arch.rcp_approx(power + 1.0)
        value *= LOG2_E
        if self.key.alibi:
            signed = cutlass.Float32(distance)
            value -= slope * cute.arch.fmax(signed, -signed)
        return value


def score_mod_of(key: Any, scoring: ScoreModArgs) -> NoScoreMod | ScoreMod:
    """The score modification of a layer; `key` is a LayerKey."""
    modifies = key.scores.softcap or key.scores.alibi or key.scores.signed
    return ScoreMod(key, scoring) if modifies else NoScoreMod(key, scoring)
