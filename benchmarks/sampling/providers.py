# SPDX-License-Identifier: Apache-2.0
"""The providers of sampling: this package, FlashInfer, vLLM without FlashInfer, and sorting in torch."""

import importlib
import importlib.util
from functools import partial

import torch
from dsl_backend.providers import Launch, Run, provider
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import api, dispatch

from ..columns import missing, own_triton, reasons
from .problems import Inputs, Layer, Problem, only_exact

VLLM_OPS = "vllm.v1.sample.ops.topk_topp_sampler"


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec, targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Launch:
    """`api.run`, with a plan for each layer, because a plan has one buffer for tokens.

    Args:
        kernel: a name from the dispatch table; by default the kernel that dispatch chooses.
    """
    plans = []
    for layer in inputs.layers:
        plan = api.plan(problem.spec, problem.rows, layer.logits.device, kernel)
        plan.results = plan.results._replace(tokens=layer.tokens)
        plans.append(plan)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.run(plans[index], layer.logits, layer.parameters).tokens

    return Launch(run, partial(only_exact, inputs))


def flashinfer_objections(problem: Problem) -> list[str]:
    unused = ["vLLM does not use it for min-p"] if problem.filters == "min-p" else []
    return missing("flashinfer") + unused + (vllm_objections(problem) if problem.logprobs is not None else [])


@provider("sampling", name="FlashInfer", objections=flashinfer_objections, default=False, package="flashinfer-python")
def flashinfer(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer as vLLM calls it with top-k or top-p, and its own function for rows without filters.

    It takes float32, as vLLM gives it. At first use it compiles kernels for minutes, so it runs only if named.
    """
    from flashinfer import sampling

    def run(index: int) -> torch.Tensor:
        tokens = draw(index)
        return with_logprobs(problem, inputs.layers[index].logits, tokens)

    def draw(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        k, p, logits = layer.parameters.top_k, layer.parameters.top_p, layer.logits.float()
        if problem.filters == "none":
            return sampling.sampling_from_logits(logits, deterministic=True)
        if problem.filters == "k+p":
            return sampling.top_k_top_p_sampling_from_logits(logits, k, p, deterministic=True)
        probabilities = logits.softmax(dim=-1)
        if p is None:
            return sampling.top_k_sampling_from_probs(probabilities, k, deterministic=True)
        return sampling.top_p_sampling_from_probs(probabilities, p, deterministic=True)

    return run


def vllm_sampling(problem: Problem, inputs: Inputs, filter_name: str) -> Run:
    """VLLM's sampling without FlashInfer: a filter, softmax, and exponential noise.

    The filter works in place, so each launch copies the logits first. A server does not copy.
    """
    ops = importlib.import_module(VLLM_OPS)
    apply, scratch = getattr(ops, filter_name), torch.empty_like(inputs.layers[0].logits)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        logits = layer.logits
        if layer.parameters.top_k is not None or layer.parameters.top_p is not None:
            logits = apply(scratch.copy_(logits), layer.parameters.top_k, layer.parameters.top_p)
        chance = masked(logits, layer).softmax(dim=-1, dtype=torch.float32)
        tokens: torch.Tensor = ops.random_sample(chance, {})
        return with_logprobs(problem, layer.logits, tokens)

    return run


def with_logprobs(problem: Problem, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens, after vLLM's model runner (V2) has computed the log-probabilities that the problem asks for."""
    if problem.logprobs is not None:
        compute = importlib.import_module("vllm.v1.worker.gpu.sample.logprob").compute_topk_scores
        compute(logits, problem.logprobs, tokens.long())
    return tokens


def vllm_objections(problem: Problem) -> list[str]:
    return missing("vllm")


@provider("sampling", name="vLLM", objections=vllm_objections, package="vllm")
def vllm(problem: Problem, inputs: Inputs) -> Run:
    """With vLLM's Triton filter."""
    return vllm_sampling(problem, inputs, "apply_top_k_top_p")


def sorting_objections(problem: Problem) -> list[str]:
    absent = [] if importlib.util.find_spec("vllm") is not None else ["vllm is not installed"]
    same = [] if problem.filters in ("k", "p", "k+p") else [f"for {problem.filters} it is the same as the column vLLM"]
    return absent + same


@provider("sampling", name="torch", objections=sorting_objections, package="vllm")
def sorting(problem: Problem, inputs: Inputs) -> Run:
    """With vLLM's filter in eager torch, which sorts the vocabulary."""
    return vllm_sampling(problem, inputs, "apply_top_k_top_p_pytorch")


own_triton("sampling", ours, objections, "sampling/triton/kernel.py")


def masked(logits: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The logits after min-p, computed as in vLLM's logits processor."""
    if layer.parameters.min_p is None:
        return logits
    chance = logits.softmax(dim=-1)
    least = chance.amax(dim=-1, keepdim=True) * layer.parameters.min_p.unsqueeze(1)
    return logits.masked_fill(chance < least, -torch.inf)
