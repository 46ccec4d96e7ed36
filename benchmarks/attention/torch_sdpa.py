# SPDX-License-Identifier: Apache-2.0
"""Torch's attention, on keys that are neither paged nor ragged: reference times, not replacements.

`torch` is `scaled_dot_product_attention` with the kernel that torch chooses, `cuDNN` the same restricted to cuDNN, and
`torch.compile` the Triton kernel that FlexAttention's template makes. The keys are copied to torch's layout before the
timing.
"""

import importlib.util

import torch
from dsl_backend.providers import Launch, provider, with_version

from ..columns import missing, needs_gpu
from . import cudnn_fp8
from .inputs import Inputs
from .problems import Problem
from .vllm_dense import e4m3_only, limits

FRONTEND = "nvidia-cudnn-frontend"
Operands = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def layout_objections(problem: Problem) -> list[str]:
    reasons = []
    if not problem.uniform:
        reasons.append("needs requests of one length")
    if problem.q_lens != problem.kv_lens:
        reasons.append("its causal mask starts at the first key, so it does not support a context")
    if problem.window_left is not None:
        reasons.append("torch does not pass a window to it")
    return reasons


def torch_objections(problem: Problem) -> list[str]:
    return layout_objections(problem) + (["torch does not pass fp8 to it"] if problem.is_fp8_kv else [])


def compiled_objections(problem: Problem) -> list[str]:
    return needs_gpu() + torch_objections(problem)


def cudnn_objections(problem: Problem) -> list[str]:
    # torch passes no fp8 to it: its own frontend does.
    reasons = missing("cudnn", FRONTEND) + e4m3_only(problem) if problem.is_fp8_kv else needs_gpu()
    return reasons + layout_objections(problem)


def shares_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether this torch supports GQA with cuDNN. Otherwise the keys are repeated before the timing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    except RuntimeError:
        return False
    return True


def operands_of(problem: Problem, inputs: Inputs) -> Operands:
    """Each layer's q, keys and values as torch takes them: [requests, heads, tokens, head_dim]."""
    return [
        (
            layer.q.view(problem.requests, -1, problem.heads_q, problem.head_dim).transpose(1, 2),
            cudnn_fp8.side_by_side(problem, inputs, layer.keys),
            cudnn_fp8.side_by_side(problem, inputs, layer.values),
        )
        for layer in inputs.layers
    ]


def by_token(result: torch.Tensor) -> torch.Tensor:
    """[requests, heads, tokens, head_dim] -> [all tokens, heads, head_dim]."""
    return result.transpose(1, 2).flatten(0, 1)


def cudnn_versions() -> list[str]:
    """The cuDNN that torch loads; and of its frontend, which only 8-bit keys use, where it is installed."""
    try:
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch was built with a newer one than it finds
        return [" ".join(str(error).split())[:100]]
    if number is None:
        return ["without cuDNN"]
    loaded = f"cuDNN {number // 10000}.{number % 10000 // 100}.{number % 100}"
    return [loaded, *([with_version(FRONTEND)] if importlib.util.find_spec("cudnn") else [])]


@provider(
    "prefill",
    "mla-prefill",
    name="cuDNN",
    objections=cudnn_objections,
    limits=limits,
    package="torch",
    details=cudnn_versions,
)
def cudnn(problem: Problem, inputs: Inputs) -> Launch:
    """`scaled_dot_product_attention` restricted to cuDNN; keys in e4m3 by cuDNN's own frontend."""
    if problem.is_fp8_kv:
        return cudnn_fp8.launch(problem, inputs)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    operands = operands_of(problem, inputs)
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

    return Launch(run, by_token)


@provider("prefill", name="torch", objections=torch_objections, default=False, package="torch")
def eager(problem: Problem, inputs: Inputs) -> Launch:
    """`scaled_dot_product_attention`, with the kernel that torch chooses."""
    operands, shared = operands_of(problem, inputs), problem.heads_q > problem.heads_kv

    def run(index: int) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *operands[index], is_causal=True, scale=problem.scale, enable_gqa=shared
        )

    return Launch(run, by_token)


def causal(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """FlexAttention's mask, which is traced."""
    return query >= key


@provider("prefill", name="torch.compile", objections=compiled_objections, default=False, package="torch")
def compiled(problem: Problem, inputs: Inputs) -> Launch:
    """The kernel that torch.compile makes of FlexAttention for the exact shape, with the blocks of a causal mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    operands, shared = operands_of(problem, inputs), problem.heads_q > problem.heads_kv
    tokens = problem.q_lens[0]
    mask = create_block_mask(causal, None, None, tokens, tokens, device=operands[0][0].device)
    # After a few shapes torch.compile silently falls back to eager mode.
    torch.compiler.reset()
    made = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")

    def run(index: int) -> torch.Tensor:
        result: torch.Tensor = made(*operands[index], block_mask=mask, scale=problem.scale, enable_gqa=shared)
        return result

    return Launch(run, by_token)
