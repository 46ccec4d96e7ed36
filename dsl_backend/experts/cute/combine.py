# SPDX-License-Identifier: Apache-2.0
"""The sum over a token's experts, in the order of its slots: the same bits at every run."""

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.args import ExpertsArgs
from dsl_backend.experts.cute.key import Slots
from dsl_backend.experts.cute.routing import flat, local_of
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import load_vector_if, store_vector

THREADS = 128
VECTOR = 8


class Combine:
    """out [M, H] = sum over slots of weight * made [M k, H], in float32, rounded once; 0 for a token without experts.

    Args:
        slots: of a token.
        weighted: the router's weights are multiplied in.
        shared_weight: of shared experts.
    """

    def __init__(self, slots: Slots, weighted: bool, shared_weight: float = 1.0):
        self.slots, self.weighted, self.shared_weight = slots, weighted, shared_weight

    @cute.jit
    def launch(self, args: ExpertsArgs, stream):
        operands = args.operands
        tokens, hidden = operands.out.shape
        weights = flat(operands.topk_weights) if cutlass.const_expr(self.weighted) else None
        self.kernel(flat(operands.topk_ids), operands.expert_map, weights, args.scratch.made, operands.out).launch(
            grid=(tokens, cute.ceil_div(hidden, THREADS * VECTOR), 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mIds: cute.Tensor,
        mMap: cute.Tensor,
        mWeights: cute.Tensor,
        mMade: cute.Tensor,
        mOut: cute.Tensor,
    ):
        dependent_launch.launch_dependents()
        dependent_launch.wait()
        token, block, _ = cute.arch.block_idx()
        column = (block * THREADS + cute.arch.thread_idx()[0]) * VECTOR
        inside = column < mOut.shape[1]
        of_token = cutlass.const_expr(self.slots.of_token)
        topk = cutlass.const_expr(self.slots.topk)
        routed = [mIds[token * topk + slot] for slot in range(topk)]
        given = [cutlass.Float32(1.0)] * topk
        if cutlass.const_expr(self.weighted):
            given = [mWeights[token * topk + slot] for slot in range(topk)]
        exists = [local_of(expert, mMap, self.slots.experts) >= 0 for expert in routed]
        exists += [cutlass.Boolean(True)] * self.slots.shared
        rMade = cute.make_rmem_tensor((VECTOR, of_token), mMade.element_type)
        weights = cute.make_rmem_tensor(of_token, cutlass.Float32)
        for slot in cutlass.range_constexpr(of_token):
            offset = cutlass.Int64(token * of_token + slot) * mMade.stride[0] + column
            load_vector_if(inside and exists[slot], mMade.iterator, offset, rMade[None, slot], 0)
            weights[slot] = cutlass.Float32(self.shared_weight)
            if cutlass.const_expr(slot < topk):
                # The weight of a slot without an expert may be NaN.
                weights[slot] = given[slot] if exists[slot] else cutlass.Float32(0.0)
        # All loads are on their way before the first one is waited for: ptxas would put some behind the first sums.
        cute.arch.sync_warp()
        if inside:
            rOut = cute.make_rmem_tensor(VECTOR, mOut.element_type)
            for i in cutlass.range_constexpr(VECTOR):
                total = cutlass.Float32(0.0)
                for slot in cutlass.range_constexpr(of_token):
                    total += weights[slot] * rMade[i, slot].to(cutlass.Float32)
                rOut[i] = total.to(mOut.element_type)
            store_vector(rOut, mOut.iterator, cutlass.Int64(token) * mOut.stride[0] + column)
