# SPDX-License-Identifier: Apache-2.0
"""What the code of the kernels of experts depends on."""

from dataclasses import dataclass

import torch

from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.activation import Activation
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles


@dataclass(frozen=True)
class Slots:
    """Experts of a token: those that it is routed to, then the shared ones.

    Attributes:
        experts: routed experts of this rank; shared ones are numbered behind them.
        topk: experts that a token is routed to.
        shared: experts that every token has.
    """

    experts: int
    topk: int
    shared: int = 0

    @property
    def of_token(self) -> int:
        return self.topk + self.shared

    @property
    def all_experts(self) -> int:
        return self.experts + self.shared


@dataclass(frozen=True, kw_only=True)
class ProductKey:
    """One of the two products.

    Attributes:
        pairs_per_row: of x.
        activation: of the first product; None is the second one.
        interleaved: gate and up rows of the weights alternate.
        scaled: the accumulators are multiplied with the router's weight.
        experts: routed ones; shared ones are numbered behind them.
        shared: whether there are any.
        prefetches, trims: see `configs.ExpertsConfig`.
        adds: slots of a token, where the second product adds each row to its token's row of the output, which the first
            one clears; 0 where it writes each row to its pair's place.
        weighted: rows are multiplied with the router's weights before they are added.
    """

    dtype: torch.dtype
    pairs_per_row: int
    activation: Activation | None
    interleaved: bool
    bias: bool
    scaled: bool
    config: GemmTiles
    experts: int
    shared: bool
    prefetches: bool = False
    trims: bool = False
    adds: int = 0
    weighted: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsKey:
    """All launches of a layer; see `spec.ExpertsSpec`.

    Attributes:
        mapped: there is an expert map.
        first, second: of the products. Their class says which kernels they are: grouped GEMMs, both with the same
            tile_m, or those for few tokens.
        prefetches: the second product requests weights before the first one has ended.
        trims: see `configs.ExpertsConfig`; of the grouped GEMMs.
        adds: a token's experts are added by atomic operations of the second product; of the grouped GEMMs without
            shared experts.
    """

    num_experts: int
    topk: int
    dtype: torch.dtype
    ids_dtype: torch.dtype
    activation: Activation
    interleaved: bool
    w13_bias: bool
    w2_bias: bool
    router_weights: RouterWeights
    mapped: bool
    first: GemmTiles | SmallMTiles
    second: GemmTiles | SmallMTiles
    prefetches: bool = False
    trims: bool = False
    shared_experts: int = 0
    shared_weight: float = 1.0
    adds: bool = False

    @property
    def slots(self) -> Slots:
        return Slots(self.num_experts, self.topk, self.shared_experts)

    @property
    def decodes(self) -> bool:
        """Whether these are the kernels for few tokens."""
        return isinstance(self.first, SmallMTiles)

    @property
    def products(self) -> tuple[ProductKey, ProductKey]:
        """Of the grouped GEMMs."""
        assert isinstance(self.first, GemmTiles)
        assert isinstance(self.second, GemmTiles)
        adds = self.topk if self.adds else 0
        return (
            ProductKey(
                dtype=self.dtype,
                pairs_per_row=self.slots.of_token,
                activation=self.activation,
                interleaved=self.interleaved,
                bias=self.w13_bias,
                scaled=self.router_weights is RouterWeights.INPUT,
                config=self.first,
                experts=self.num_experts,
                shared=self.shared_experts > 0,
                prefetches=self.prefetches,
                trims=self.trims,
                adds=adds,
            ),
            ProductKey(
                dtype=self.dtype,
                pairs_per_row=1,
                activation=None,
                interleaved=False,
                bias=self.w2_bias,
                scaled=False,
                config=self.second,
                experts=self.num_experts,
                shared=self.shared_experts > 0,
                prefetches=self.prefetches,
                trims=self.trims,
                adds=adds,
                weighted=self.adds and self.router_weights is RouterWeights.OUTPUT,
            ),
        )
