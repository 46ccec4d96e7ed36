# SPDX-License-Identifier: Apache-2.0
"""The products of experts for few tokens on SM100."""

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.decode import DecodeParams, DecodeProduct, DecodeWork, gemm_key
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm100.configs import SmallMConfig
from dsl_backend.gemm.sm100.small_m import SmallMGemm


class DecodeGemm(DecodeProduct, SmallMGemm):
    """See `experts/cute/decode.py`."""

    def __init__(self, key: ExpertsKey, config: SmallMConfig, first: bool):
        SmallMGemm.__init__(self, gemm_key(key, config, first))
        self.set_up(key)

    @cute.jit
    def store_columns(
        self,
        params: DecodeParams,
        work: DecodeWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """A thread's accumulators to one column of what the second product reads, or to two of the output."""
        if cutlass.const_expr(self.gated):
            listed, group = n_tile // work.of_expert, cute.arch.thread_idx()[0] // WARPGROUP
            column = n_tile % work.of_expert * self.columns + thread
            expert = work.sExperts[listed]
            self.scale_tokens(params, work, expert, group, thread)
            biases = self.biases_of(params, expert, column)
            for j in cutlass.range(self.thread_tokens, unroll_full=True):
                self.store_hidden(
                    params, work, acc_0[j], acc_1[j], biases[0], biases[1], first_token + j, column, listed, group
                )
        else:
            column = n_tile * self.columns + thread
            for j in cutlass.range(self.thread_tokens, unroll_full=True):
                self.store_out(params, work, acc_0[j], first_token + j, column)
                self.store_out(params, work, acc_1[j], first_token + j, column + self.box)
