# SPDX-License-Identifier: Apache-2.0
"""All launches of a layer, in one host function."""

from importlib import import_module
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.args import DecodeArgs, ExpertsArgs
from dsl_backend.experts.cute.combine import Combine
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.routing import Routing
from dsl_backend.experts.spec import RouterWeights


def layer_of(key: ExpertsKey, kernel_arch: str) -> Any:
    """The function of x and the arguments of a launch."""
    package = f"dsl_backend.experts.cute.{kernel_arch}"
    if key.decodes:
        return DecodeLayer(key, import_module(f"{package}.decode").DecodeGemm)
    return ExpertsLayer(key, import_module(f"{package}.grouped").GroupedGemm)


class DecodeLayer:
    """Both products for few tokens, by a class of kernels. Writes operands.out; at least one token."""

    def __init__(self, key: ExpertsKey, product: type[Any]):
        self.first, self.second = product(key, key.first, True), product(key, key.second, False)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: DecodeArgs, stream):
        """Launch; x is args.operands.x, see `gemm.args.launch_args`."""
        self.first.launch_product(args, stream)
        self.second.launch_product(args, stream)


class ExpertsLayer:
    """Routing, grouped GEMMs by a class of kernels, and the sum over a token's experts, unless the second GEMM adds.

    Writes operands.out; at least one token.
    """

    def __init__(self, key: ExpertsKey, product: type[Any]):
        self.first, self.second = (product(of_product) for of_product in key.products)
        self.routing = Routing(key.slots, self.first.tile_m)
        self.adds = key.adds
        self.combine = Combine(key.slots, key.router_weights is RouterWeights.OUTPUT, key.shared_weight)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ExpertsArgs, stream):
        """Launch; x is args.operands.x, see `gemm.args.launch_args`."""
        self.routing.launch(args, stream)
        self.first.launch(args, stream)
        self.second.launch(args, stream)
        if cutlass.const_expr(not self.adds):
            self.combine.launch(args, stream)
