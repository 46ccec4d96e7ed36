# SPDX-License-Identifier: Apache-2.0
"""A gated activation and the next quantisation behind a product of somebody else's: one launch."""

import torch

from dsl_backend.gemm.reference import activate, halves
from dsl_backend.linear.scaled.eager import How, outputs
from dsl_backend.quant.reference import scales_of, stored
from dsl_backend.runtime import target as targets


def activated(both: torch.Tensor, how: How, out_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output [rows, n] and its scale, as `eager.linear` returns them.

    Args:
        both: [rows, 2 n] of the product, contiguous, with the bias; see `how.interleaved`.
        how: has an activation.
        out_scale: of an output with a given scale.
    """
    assert how.activation is not None
    out, scale = outputs(both, both.shape[1] // 2, how, out_scale)
    if not both.shape[0]:
        return out, scale
    if both.is_cuda or targets.triton_interpreted():
        # Imports Triton.
        from dsl_backend.linear.scaled.triton import activated as kernel

        kernel.launch(both, how.activation, how.interleaved, how.out_kind, out, scale, targets.detect(both.device))
        return out, scale
    gate, up = halves(both.float().t(), how.interleaved)
    result = activate(gate.t(), up.t(), how.activation)
    if how.out_kind is None:
        out.copy_(result)
        return out, None
    assert scale is not None
    if out_scale is None:
        scale.copy_(scales_of(result, how.out_kind))
    out.copy_(stored(result, scale, how.out_kind))
    return out, scale
