# SPDX-License-Identifier: Apache-2.0
"""All launches of a layer whose weights are in 8 bits, in one host function."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.combine import Combine
from dsl_backend.experts.cute.key import ExpertsKey, ProductKey
from dsl_backend.experts.cute.routing import Routing
from dsl_backend.experts.cute.scaled_args import ScaledDecodeArgs, ScaledExpertsArgs
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.scaled import ScaledGemmSpec
from dsl_backend.gemm.scaled_host import key_of
from dsl_backend.quant.cute.kernel import ListedRows, Quantise, QuantiseKey
from dsl_backend.quant.format import ScaledFormat


@dataclass(frozen=True, kw_only=True)
class ScaledExpertsKey(ExpertsKey):
    """All launches of a layer; see `spec.ExpertsSpec` and `scaled_configs.ScaledExpertsConfig`.

    Attributes:
        weight, activations: formats of the products' operands.
        x_given: x is given in 8 bits.
        beside: a launch of its own quantises the activation's result.
        first_gemm, second_gemm: the products.
    """

    weight: ScaledFormat
    activations: ScaledFormat
    x_given: bool
    beside: bool
    first_gemm: ScaledGemmSpec
    second_gemm: ScaledGemmSpec


def layer_of(key: ScaledExpertsKey, kernel_arch: str) -> Any:
    """The function of x and the arguments of a launch."""
    return (ScaledDecodeLayer if key.decodes else ScaledExpertsLayer)(key, kernel_arch)


def product_of(key: ProductKey, gemm: ScaledGemmSpec, beside: bool, kernel_arch: str) -> Any:
    product = import_module(f"dsl_backend.experts.cute.{kernel_arch}.scaled_grouped").product
    config: Any = key.config
    return product(key, key_of(gemm, config, False), beside)


class ScaledExpertsLayer:
    """Quantisation of x, routing, grouped GEMMs, and the sum over a token's experts.

    Writes operands.out; at least one token.
    """

    def __init__(self, key: ScaledExpertsKey, kernel_arch: str):
        first, second = key.products
        self.first = product_of(first, key.first_gemm, key.beside, kernel_arch)
        self.second = product_of(second, key.second_gemm, False, kernel_arch)
        self.routing = Routing(key.slots, self.first.tile_m, waits_first=True)
        self.combine = Combine(key.slots, key.router_weights is RouterWeights.OUTPUT)
        quantised = QuantiseKey(by_group=key.activations.blocked, dtype=key.dtype)
        self.quantise_x, self.quantise = Quantise(quantised, waits_last=True), Quantise(quantised)
        self.x_given, self.beside = key.x_given, key.beside

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledExpertsArgs, stream):
        """Launch; x is args.operands.x, see `gemm.args.launch_args`."""
        scratch = args.scratch
        self.routing.launch(args, stream)
        if cutlass.const_expr(not self.x_given):
            self.quantise_x.launch(args.operands.x, scratch.x, scratch.x_scale, None, stream)
        self.first.launch(args, stream)
        if cutlass.const_expr(self.beside):
            rows = cute.domain_offset((1,), scratch.tile_count)
            self.quantise.launch(scratch.wide, scratch.hidden, scratch.hidden_scale, rows, stream)
        self.second.launch(args, stream)
        self.combine.launch(args, stream)


class ScaledDecodeLayer:
    """Quantisation of x, and both products for few tokens with the quantisation of the activation's result between.

    Writes operands.out; at least one token.
    """

    def __init__(self, key: ScaledExpertsKey, kernel_arch: str):
        product = import_module(f"dsl_backend.experts.cute.{kernel_arch}.scaled_decode").ScaledDecodeGemm
        tiles: tuple[Any, Any] = (key.first, key.second)
        self.first, self.second = (
            product(key, key_of(gemm, config, False))
            for gemm, config in zip((key.first_gemm, key.second_gemm), tiles, strict=True)
        )
        self.quantise = Quantise(QuantiseKey(by_group=key.activations.blocked, dtype=key.dtype))
        self.x_given = key.x_given

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledDecodeArgs, stream):
        """Launch; x is args.operands.x, see `gemm.args.launch_args`."""
        scratch = args.scratch
        if cutlass.const_expr(not self.x_given):
            self.quantise.launch(args.operands.x, scratch.x, scratch.x_scale, None, stream)
        self.first.launch_product(args, stream)
        listed = ListedRows(scratch.rows, scratch.factors)
        wide, hidden = rows_of(scratch.wide), rows_of(scratch.hidden)
        self.quantise.launch_listed(wide, hidden, scratch.hidden_scale, listed, stream)
        self.second.launch_product(args, stream)


def rows_of(matrices: cute.Tensor) -> cute.Tensor:
    """A dense stack [D, M, I] as rows [D M, I]."""
    count, rows, width = matrices.shape
    return cute.make_tensor(matrices.iterator, cute.make_layout((count * rows, width), stride=(matrices.stride[1], 1)))
