# SPDX-License-Identifier: Apache-2.0
"""All launches of a layer, in one host function: routing, both products, and the sum over a token's experts."""

from cutlass import cute

from dsl_backend.experts.cute.args import ExpertsArgs
from dsl_backend.experts.cute.combine import Combine
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.routing import Routing
from dsl_backend.experts.cute.sm90.grouped import GroupedGemm
from dsl_backend.experts.spec import RouterWeights


class ExpertsLayer:
    """Writes operands.out; at least one token."""

    def __init__(self, key: ExpertsKey):
        self.routing = Routing(key.num_experts, key.first.tile_m)
        self.first, self.second = (GroupedGemm(product) for product in key.products)
        self.combine = Combine(key.num_experts, key.topk, key.router_weights is RouterWeights.OUTPUT)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ExpertsArgs, stream):
        """Launch; x is args.operands.x, see `gemm.args.launch_args`."""
        self.routing.launch(args, stream)
        self.first.launch(args, stream)
        self.second.launch(args, stream)
        self.combine.launch(args, stream)
