# SPDX-License-Identifier: Apache-2.0
"""The products of experts for few tokens on SM90."""

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.decode import DecodeParams, DecodeProduct, DecodeWork, gemm_key
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.configs import SmallMConfig
from dsl_backend.gemm.sm90.small_m import SmallMGemm


class DecodeGemm(DecodeProduct, SmallMGemm):
    """See `experts/cute/decode.py`."""

    def __init__(self, key: ExpertsKey, config: SmallMConfig, first: bool):
        SmallMGemm.__init__(self, gemm_key(key, config, first))
        self.set_up(key)

    @cute.jit
    def epilogue(
        self,
        params: DecodeParams,
        work: DecodeWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Accumulators to what the second product reads, or to the output; their places as in `SmallMGemm`."""
        lane = thread % 32
        listed, of_list = n_tile // work.of_expert, n_tile % work.of_expert
        group = cute.arch.thread_idx()[0] // WARPGROUP
        expert, tile = cutlass.Int32(0), n_tile
        if cutlass.const_expr(self.gated):
            expert, tile = work.sExperts[listed], of_list
            self.scale_tokens(params, work, expert, group, thread)
        for b in cutlass.range_constexpr(2):
            column = tile * self.columns + self.thread_column(row_tile, thread) + 8 * b
            biases = self.biases_of(params, expert, column) if cutlass.const_expr(self.gated) else (0.0, 0.0)
            for j in cutlass.range_constexpr(self.tokens // 8):
                for a in cutlass.range_constexpr(2):
                    token, i = first_token + 8 * j + 2 * (lane % 4) + a, a + 2 * b + 4 * j
                    if cutlass.const_expr(self.gated):
                        self.store_hidden(
                            params, work, acc_0[i], acc_1[i], biases[0], biases[1], token, column, listed, group
                        )
                    else:
                        self.store_out(params, work, acc_0[i], token, column)
                        self.store_out(params, work, acc_1[i], token, column + self.box)
