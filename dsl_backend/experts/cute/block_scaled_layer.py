# SPDX-License-Identifier: Apache-2.0
"""All launches of a layer whose scales are factors of SM100's matrix products, in one host function."""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import cute

from dsl_backend.experts.cute.combine import Combine
from dsl_backend.experts.cute.key import ExpertsKey, ProductKey
from dsl_backend.experts.cute.routing import Routing
from dsl_backend.experts.cute.scaled_args import ScaledExpertsArgs
from dsl_backend.experts.cute.sm100.block_scaled_grouped import BlockScaledGroupedGemm
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.scaled import ScaledGemmSpec
from dsl_backend.gemm.scaled_host import key_of
from dsl_backend.gemm.sm100.configs import BlockScaledConfig
from dsl_backend.quant.cute.blocks import QuantiseBlocks
from dsl_backend.quant.format import ScaledFormat


@dataclass(frozen=True, kw_only=True)
class BlockScaledExpertsKey(ExpertsKey):
    """All launches of a layer; see `spec.ExpertsSpec` and `block_scaled_configs`.

    Attributes:
        weight, activations: formats of the products' operands.
        first_gemm, second_gemm: the products.
    """

    weight: ScaledFormat
    activations: ScaledFormat
    first_gemm: ScaledGemmSpec
    second_gemm: ScaledGemmSpec

    def product_of(self, key: ProductKey, gemm: ScaledGemmSpec) -> BlockScaledGroupedGemm:
        assert isinstance(key.config, BlockScaledConfig)
        scaled: Any = replace(key_of(gemm, key.config, False), interleaved=key.interleaved)
        return BlockScaledGroupedGemm(key, scaled, self.weight)


class BlockScaledExpertsLayer:
    """Quantisation of x, routing, grouped GEMMs, and the sum over a token's experts.

    Writes operands.out; at least one token.
    """

    def __init__(self, key: BlockScaledExpertsKey):
        first, second = key.products
        self.first = key.product_of(first, key.first_gemm)
        self.second = key.product_of(second, key.second_gemm)
        self.routing = Routing(key.slots, self.first.tile_m, waits_first=True)
        self.combine = Combine(key.slots, key.router_weights is RouterWeights.OUTPUT)
        self.quantise = QuantiseBlocks(key.activations, key.dtype, waits_last=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledExpertsArgs, stream):
        """Launch; x is args.operands.x, see `gemm.args.launch_args`."""
        scratch, scales = args.scratch, args.operands.scales
        self.routing.launch(args, stream)
        self.quantise.launch(args.operands.x, scratch.x, scratch.x_scale, scales.x_global, stream)
        self.first.launch(args, stream)
        self.second.launch(args, stream)
        self.combine.launch(args, stream)
