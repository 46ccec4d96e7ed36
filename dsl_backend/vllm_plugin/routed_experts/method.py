# SPDX-License-Identifier: Apache-2.0
"""The method of projections of shared experts that the kernels of routed experts compute."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


class AppliedByExperts(UnquantizedLinearMethod):
    """The method of a shared expert's projection: the kernels of routed experts read its weight."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Does nothing. On a CPU vLLM's method would pack the weight and remove it."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise RuntimeError("the kernels of routed experts apply this projection: vLLM's runner should not call it")
