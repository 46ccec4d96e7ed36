# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention through torch, on keys that are neither paged nor ragged: a reference time, not a replacement."""

import torch
from dsl_backend.providers import Launch, provider

from ..columns import needs_gpu
from .inputs import Inputs, tokens_of
from .problems import Problem


def cudnn_objections(problem: Problem) -> list[str]:
    reasons = needs_gpu()
    if not problem.uniform:
        reasons.append("needs requests of one length")
    if problem.q_lens != problem.kv_lens:
        reasons.append("its causal mask starts at the first key, so it does not support a context")
    if problem.window_left is not None:
        reasons.append("torch does not pass a window to it")
    if problem.is_fp8_kv:
        reasons.append("torch does not pass fp8 to it")
    return reasons


def shares_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether this torch supports GQA with cuDNN. Otherwise the keys are repeated before the timing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    except RuntimeError:
        return False
    return True


@provider("prefill", "mla-prefill", name="cuDNN", objections=cudnn_objections, package="torch")
def cudnn(problem: Problem, inputs: Inputs) -> Launch:
    """`scaled_dot_product_attention` restricted to cuDNN. The keys are copied to its layout before the timing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def side_by_side(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([tokens_of(problem, inputs, rows, r) for r in range(problem.requests)]).transpose(1, 2)

    operands = []
    for layer in inputs.layers:
        q = layer.q.view(problem.requests, -1, problem.heads_q, problem.head_dim).transpose(1, 2)
        operands.append((q, side_by_side(layer.keys), side_by_side(layer.values)))

    group = problem.heads_q // problem.heads_kv
    if group > 1 and not shares_heads(*operands[0]):
        operands = [(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for q, k, v in operands]
        group = 1

    def run(index: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *operands[index],
                is_causal=True,
                scale=problem.scale,
                enable_gqa=group > 1,
            )

    return Launch(run, lambda result: result.transpose(1, 2).flatten(0, 1))
