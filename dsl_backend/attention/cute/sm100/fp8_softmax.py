# SPDX-License-Identifier: Apache-2.0
"""The softmax role of the dense SM100 kernel with e4m3 products."""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.fp8_queries import Queries
from dsl_backend.attention.cute.fp8_softmax import sum_of_e4m3
from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.sm100.dense_configs import P_COLUMNS
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps, hold_order, p_stored
from dsl_backend.attention.cute.sm100.idle_warps import arrive
from dsl_backend.attention.cute.sm100.two_s import TwoSSoftmaxWarps
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import Pair, add_pair, f32_to_e4m3, tree_reduce
from dsl_backend.primitives.ring import phase_of, stage_of

E4M3_OF_WORD = 4


class Fp8SoftmaxWarps(SoftmaxWarps):
    """As SoftmaxWarps; S is of a quantized Q, and P is e4m3, 2^p_offset at row_max.

    They quantize Q of a CTA's first work tile: until then there is nothing else for them to do.

    Args:
        queries: of a work tile, by all softmax warps.
        sQ_bytes: (row, column, stage). sQScale: (row, stage), of the quantized Q.
    """

    def __init__(self, queries: Queries | None, sQ_bytes: cute.Tensor, sQScale: cute.Tensor | None, *args: Any) -> None:
        super().__init__(*args)
        self.queries, self.sQ_bytes = queries, sQ_bytes
        self.sQScale, self.q_scale = sQScale, cute.make_rmem_tensor(1, cutlass.Float32)

    @cute.jit
    def begin(self):
        """Quantize Q of the first work tile."""
        work = self.work_pipeline.read(cutlass.Int32(0))
        if work.valid != 0:
            self.queries.quantize(work, self.sQ_bytes[None, None, 0], self.sQScale[None, 0])
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive_warp(self.barriers.q_full)
            arrive_warp(self.barriers.q_scale_full)

    @cute.jit
    def begin_q(self, count: cutlass.Int32):
        stages = self.config.scale_stages
        stage = stage_of(count, stages)
        cute.arch.mbarrier_wait(self.barriers.q_scale_full + stage, phase_of(count, stages))
        self.q_scale[0] = self.sQScale[self.row, stage]

    def scale_log2(self) -> cutlass.Float32:
        scale = self.score_mod.softmax_scale_log2
        return scale if self.score_mod.modifies else scale * self.q_scale[0]

    def scaled_by_q(self, scores: list[cutlass.Float32]) -> list[cutlass.Float32]:
        return [score * self.q_scale[0] for score in scores]

    def final_row_max(self) -> cutlass.Float32:
        return self.row_max[0] * self.scale_log2() - self.config.p_offset

    def store_p(
        self,
        scores: Sequence[cutlass.Float32],
        row_max_scaled: cutlass.Float32,
        ex2_emulation: int,
        tmem_offset: cutlass.Int32 | int,
        s_stage: cutlass.Int32 | int,
        s_idx: cutlass.Int32,
    ) -> Pair:
        total: Pair | None = None
        shift, early = row_max_scaled - self.config.p_offset, self.kernel.tile_n - self.config.late_p_keys
        for first in range(0, self.kernel.tile_n, P_COLUMNS):
            probs = self.exp2_scaled(scores[first : first + P_COLUMNS], shift, ex2_emulation)
            words = [f32_to_e4m3(*probs[j : j + E4M3_OF_WORD]) for j in range(0, len(probs), E4M3_OF_WORD)]
            rP = cute.make_rmem_tensor(len(words), cutlass.Int32)
            for j, word in enumerate(words):
                rP[j] = word
            tmem.store(
                cute.recast_tensor(rP, cutlass.Float32), self.tmem_ptr, tmem_offset + first // E4M3_OF_WORD, self.thread
            )
            # One sum at a time: one for each piece would be registers that are not there.
            some = self.sum_of(probs, words)
            total = some if total is None else add_pair(total, some)
            if first + P_COLUMNS == early:
                p_stored()
                self.arrive_p_full(s_stage)
                if self.config.late_p_keys:
                    hold_order()
        if self.config.late_p_keys:
            late_p_full = self.barriers.late_p_full
            assert late_p_full is not None
            p_stored()
            arrive(late_p_full + s_stage, self.arrive_count)
        assert total is not None
        return total

    def sum_of(self, probs: list[cutlass.Float32], words: list[cutlass.Int32]) -> Pair:
        """Of some P, as a pair of addends."""
        if self.config.rounded_sums:
            half = len(words) // 2
            return sum_of_e4m3(words[:half]), sum_of_e4m3(words[half:])
        return tree_reduce(list(zip(probs[::2], probs[1::2], strict=True)), add_pair)


class TwoSFp8SoftmaxWarps(Fp8SoftmaxWarps, TwoSSoftmaxWarps):
    """As Fp8SoftmaxWarps, with two S stages of the same rows; see two_s.py."""


class QuantizedQuerySoftmaxWarps(Fp8SoftmaxWarps):
    """As Fp8SoftmaxWarps, of queries that arrive in e4m3. Their scale is a factor of the softmax scale."""

    def begin(self) -> None:
        """Nothing: TMA loads all queries."""

    def begin_q(self, count: cutlass.Int32) -> None:
        """Nothing: rows have no scales of their own."""

    def scale_log2(self) -> cutlass.Float32:
        return self.score_mod.softmax_scale_log2

    def scaled_by_q(self, scores: list[cutlass.Float32]) -> list[cutlass.Float32]:
        return scores


class TwoSQuantizedQuerySoftmaxWarps(QuantizedQuerySoftmaxWarps, TwoSSoftmaxWarps):
    """As QuantizedQuerySoftmaxWarps, with two S stages of the same rows."""
