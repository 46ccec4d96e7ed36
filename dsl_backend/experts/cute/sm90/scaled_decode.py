# SPDX-License-Identifier: Apache-2.0
"""The products of experts for few tokens on SM90, of e4m3 weights.

Sums of a k tile are multiplied with their scales and added in float32, as in `gemm/sm90/scaled_small_m.py`. k tiles of
the second product belong to different experts, so that its sums are scaled by k tile with scales of channels too. The
router's weights are in the scales of its x.

The first product writes rows of the activation's result in 16 bits where a token has the expert, and lists these rows
for the launch that quantises them. Elsewhere it clears what the second product reads.
"""

from dataclasses import dataclass, fields
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.decode import DecodeParams, DecodeWork, by_expert
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.scaled_args import ScaledDecodeArgs
from dsl_backend.experts.cute.sm90.decode import DecodeGemm
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sm90.scaled_configs import ScaledSmallMConfig
from dsl_backend.gemm.sm90.scaled_small_m import ScaledSmallMGemm
from dsl_backend.gemm.views import bias_of
from dsl_backend.quant.format import GROUP


@dataclass(frozen=True)
class ScaledDecodeParams(DecodeParams):
    """With scales; M tokens, D chosen experts. The names of `scaled_args.ScaledDecodeScratch` mean the same.

    Attributes:
        mXScale: float32 [M, groups] or [M]; of the second product's x [D M, groups] or [D M].
        mWeightScale: float32 [E, blocks of rows, blocks of k] or [E, parts * n].
        mHidden, mHiddenScale, mRows, mFactors: what the first product writes beside its output.
    """

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor
    mHidden: cute.Tensor
    mHiddenScale: cute.Tensor
    mRows: cute.Tensor
    mFactors: cute.Tensor


class ScaledDecodeGemm(DecodeGemm, ScaledSmallMGemm):
    """See the module, and `experts/cute/decode.py`."""

    keeps_places = True

    def __init__(self, key: ExpertsKey, gemm: ScaledKey[ScaledSmallMConfig]):
        ScaledSmallMGemm.__init__(self, gemm)
        self.set_up(key)
        self.scaled_by_tile = self.blocked or not self.gated
        self.box_scales = 1 if self.blocked else 2

    def matrices(self, args: ScaledDecodeArgs) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(x, weight, out) of the product."""
        operands, scratch = args.operands, args.scratch
        if not self.gated:
            return by_expert(scratch.hidden), operands.w2, operands.out
        return operands.x if scratch.x is None else scratch.x, operands.w13, by_expert(scratch.wide)

    def extended(self, params: DecodeParams, args: ScaledDecodeArgs) -> ScaledDecodeParams:
        """The parameters with scales."""
        scales, scratch = args.operands.scales, args.scratch
        x_scale = scratch.hidden_scale
        if self.gated:
            x_scale = scales.x if scratch.x is None else scratch.x_scale
        base = {field.name: getattr(params, field.name) for field in fields(params)}
        return ScaledDecodeParams(
            **base,
            mXScale=x_scale,
            mWeightScale=scales.w13 if self.gated else scales.w2,
            mHidden=by_expert(scratch.hidden),
            mHiddenScale=scratch.hidden_scale,
            mRows=scratch.rows,
            mFactors=scratch.factors,
        )

    @cute.jit
    def note_pairs(self, params: ScaledDecodeParams, sListed: cute.Tensor, sIds: cute.Tensor):
        """The first product's first CTA lists the rows that will be quantised, each once, with the router's weights."""
        if cutlass.const_expr(self.gated):
            if cute.arch.block_idx()[0] == 0:
                tokens, topk = params.mOut.shape[0], self.slots.topk
                for pair in cutlass.range(cute.arch.thread_idx()[0], tokens * topk, self.threads, unroll=1):
                    token, expert = pair // topk, sIds[pair]
                    row, factor = cutlass.Int32(-1), cutlass.Float32(0.0)
                    if expert >= 0:
                        row = sListed[expert] * tokens + token
                        # A token may have an expert twice.
                        for slot in cutlass.range(topk, unroll=1):
                            if sIds[token * topk + slot] == expert:
                                factor += self.weight_of(params, token, slot)
                                if slot < pair % topk:
                                    row = cutlass.Int32(-1)
                    params.mRows[pair] = row
                    params.mFactors[pair] = factor

    def load_scales(self, params: Any, work: Any, scales: cute.Tensor, n_tile, k_tile, row_tile, first_token, thread):
        """Of the expert that a k tile is of."""
        m, n = (params.mOut if self.gated else params.mX).shape[0], params.mOut.shape[1]
        first_row = 0
        if self.gated:
            listed, n_tile = n_tile // work.of_expert, n_tile % work.of_expert
        else:
            listed, k_tile = k_tile // work.of_expert, k_tile % work.of_expert
            first_row = listed * m
        expert = work.sExperts[listed]
        if self.blocked:
            mScale = params.mWeightScale[expert, None, None]
            self.load_block_scales(mScale, scales, n_tile, k_tile, row_tile, n)
        else:
            mScale = params.mWeightScale[expert, None]
            for i in range(4):
                column = n_tile * self.columns + i // 2 * self.box + self.thread_column(row_tile, thread) + i % 2 * 8
                scales[i] = bias_of(mScale, column, 0, n, False)
        for i in range(self.tokens // 4):
            row = first_row + cutlass.min(self.thread_token(first_token, i, thread), m - 1)
            scales[2 * self.box_scales + i] = params.mXScale[row, k_tile] if self.blocked else params.mXScale[row]

    @cute.jit
    def biases_of(self, params: ScaledDecodeParams, expert: cutlass.Int32, column: cutlass.Int32):
        """The scales of an expert's column of the first product in place of its biases, its gate's and its up's."""
        scales = [cutlass.Float32(1.0), cutlass.Float32(1.0)]
        if cutlass.const_expr(not self.blocked):
            mScale, n = params.mWeightScale[expert, None], params.mOut.shape[1]
            scales = [bias_of(mScale, column, part, n, self.interleaved) for part in range(2)]
        return scales

    @cute.jit
    def store_hidden(
        self,
        params: ScaledDecodeParams,
        work: DecodeWork,
        gate: cutlass.Float32,
        up: cutlass.Float32,
        gate_scale: cutlass.Float32,
        up_scale: cutlass.Float32,
        token: cutlass.Int32,
        column: cutlass.Int32,
        listed: cutlass.Int32,
        group: cutlass.Int32,
    ):
        """One element of the first product's output, or a zero of the second one's x where no one quantises it."""
        tokens, n, _ = params.mOut.shape
        if token < tokens:
            if column < n:
                if work.sHits[group, token] > 0:
                    if cutlass.const_expr(not self.blocked):
                        x_scale = params.mXScale[token]
                        gate, up = gate * gate_scale * x_scale, up * up_scale * x_scale
                    value = self.activate([gate], [up])[0].to(self.out_dtype)
                    self.store_element(params.mOut, value, token, column, listed)
                else:
                    self.store_element(params.mHidden, cutlass.Uint8(0), token, column, listed)
                    row = listed * tokens + token
                    if cutlass.const_expr(self.blocked):
                        if column % GROUP == 0:
                            params.mHiddenScale[row, column // GROUP] = cutlass.Float32(0.0)
                    else:
                        if column == 0:
                            params.mHiddenScale[row] = cutlass.Float32(0.0)
