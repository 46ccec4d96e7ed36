# SPDX-License-Identifier: Apache-2.0
"""Norms that quantise their result for the fp8 projection behind them, in place of a launch of its own."""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from dsl_backend.norm.spec import Scaling
from dsl_backend.quant.format import GROUP_SCALED, ROW_SCALED, TENSOR_SCALED
from dsl_backend.vllm_plugin.norms.source import given_to, taken_by
from dsl_backend.vllm_plugin.scaled_linears.find import KERNEL, holder_of


class HandedTo(NamedTuple):
    """Where a norm's result goes.

    Attributes:
        consumer: a projection whose kernel is this package's.
        scaling: of its input.
    """

    consumer: Any
    scaling: Scaling

    @property
    def scale(self) -> torch.Tensor | None:
        """The one scale of all rows; None where each row has computed ones."""
        scale: torch.Tensor | None = self.consumer.input_scale.view(1) if self.scaling is Scaling.TENSOR else None
        return scale


def consumers(model: nn.Module) -> dict[int, HandedTo | str]:
    """Module id -> the projection that alone reads its result, or why it gets none in 8 bits.

    Those that no module of the model holds have no entry.
    """
    owners = Counter(id(child) for module in model.modules() for child in module.children())
    return {
        id(child): consumer_of(parent, name, owners)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "variance_epsilon")
    }


def consumer_of(layer: Any, norm: str, owners: Counter[int]) -> HandedTo | str:
    """The projection behind a norm.

    Args:
        layer: what holds the norm.
        norm: the name of its attribute.
        owners: id of a module -> number of modules that have it as a child.
    """
    kind: Any = type(layer)
    given = given_to(kind, norm)
    if isinstance(given, str):
        return given
    module = getattr(layer, given.module)
    kind = type(module)
    name = taken_by(kind, given.argument)
    projection: Any = getattr(module, name, None) if name else None
    if projection is None:
        return f"{kind.__name__} does more with it than one product"
    chain = (layer, getattr(layer, norm), module, projection)
    if any("forward" in vars(one) for one in (layer, module, projection)):
        return "another forward was put into what is behind it"
    if any(owners[id(one)] != 1 for one in chain[1:]):
        return "several modules hold it or what is behind it"
    return served(projection)


def served(projection: Any) -> HandedTo | str:
    """How a projection gets its input, or why it gets none in 8 bits."""
    from vllm.model_executor.layers import linear

    from dsl_backend.vllm_plugin.scaled_linears.kernels import ServedByDsl
    from dsl_backend.vllm_plugin.scaled_linears.measured import Measured

    kind: Any = type(projection)
    known = [getattr(linear, name).forward for name in ("ReplicatedLinear", "ColumnParallelLinear")]
    if getattr(kind, "forward", None) not in known:
        return f"{kind.__name__} is no known projection"
    kernel = getattr(holder_of(projection), KERNEL, None)
    if not isinstance(kernel, ServedByDsl) or isinstance(kernel, Measured):
        return "dsl does not serve the projection behind it in 8 bits, for any number of rows"
    if getattr(projection, "input_scale_ub", None) is not None:
        return "its scales have an upper bound"
    if getattr(projection, "requires_unquantized_input", False):
        return "the projection behind it needs its input in 16 bits"
    computed = {ROW_SCALED: Scaling.TOKEN, GROUP_SCALED: Scaling.GROUP}.get(kernel.x_kind)
    if computed is not None:
        return HandedTo(projection, computed)
    if kernel.x_kind == TENSOR_SCALED and kernel.config.activation_quant_key.scale.static:
        return HandedTo(projection, Scaling.TENSOR)
    return f"no norm quantises to {kernel.x_kind}"
