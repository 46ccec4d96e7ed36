# SPDX-License-Identifier: Apache-2.0
"""The methods of projections that dsl serves: for few rows, or for all of them in batch-invariant mode."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from dsl_backend.linear import api
from dsl_backend.linear.tuned import MOST_ROWS, replaces
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.op import register_op
from dsl_backend.vllm_plugin.fused_mlp.method import spare_sms


def projection(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, measured: bool, batch_invariant: bool
) -> torch.Tensor:
    """The product x [rows, k] @ weight [n, k]^T + bias, by this package for few rows, else by torch, as vLLM has it.

    It is a registered operator because the number of rows is known here and not to torch.compile. A CUDA graph keeps
    the choice that was made for its number of rows.

    Args:
        measured: only for numbers of rows for which it was measured to be faster.
        batch_invariant: by this package for any number of rows, with the same bits for a row whatever the others are.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if batch_invariant:
        return api.linear(x, weight, bias, batch_invariant=True, spare_sms=spare_sms(x.device))
    if rows > MOST_ROWS or (measured and not replaces(rows, n, k, x.dtype, targets.of_device(x.device))):
        return nn.functional.linear(x, weight, bias)
    return api.linear(x, weight, bias, spare_sms=spare_sms(x.device))


def projection_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, measured: bool, batch_invariant: bool
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


PROJECTION = register_op("projection", projection, fake=projection_fake)


class ServedRows:
    """The method of a layer whose rows this package multiplies, over the method of vLLM that it stands in for.

    The weight stays vLLM's parameter in vLLM's layout. It is looked up at each call, since it may have been reloaded.
    Arguments as of `projection`.
    """

    def __init__(self, measured: bool, batch_invariant: bool) -> None:
        super().__init__()
        self.measured, self.batch_invariant = measured, batch_invariant

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Does nothing. On a CPU vLLM's method would pack the weight and remove it."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [..., k] to [..., n]."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = self.product(rows, layer.weight, bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `projection`, by the operator, which torch.compile sees as one node."""
        out: torch.Tensor = PROJECTION(rows, weight, bias, self.measured, self.batch_invariant)
        return out


class LinearMethod(ServedRows, UnquantizedLinearMethod):
    """Of a linear layer."""


class EmbeddingMethod(ServedRows, UnquantizedEmbeddingMethod):
    """Of the projection to logits, whose weight may be the embedding's.

    vLLM computes logits outside of its compiled model and of its graphs, once a step. There the function is called, and
    not the operator: half of the host's time for it was torch's dispatcher.
    """

    def product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return super().product(rows, weight, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return projection(rows, weight, bias, self.measured, self.batch_invariant)
