# SPDX-License-Identifier: Apache-2.0
"""The providers of sampling: this package, FlashInfer, vLLM without FlashInfer, and sorting in torch."""

import importlib.util
from collections.abc import Callable

import torch
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import api, dispatch
from dsl_backend.sampling.spec import Sampled, SamplingSpec

from ..case import Launch, Limits
from ..check import EXACT
from .problems import Inputs, Layer, Problem, verdict

VLLM_OPS = "vllm.v1.sample.ops.topk_topp_sampler"


class Column:
    """The common part of all providers."""

    default = True
    exact = False

    def limits(self, problem: Problem) -> Limits:
        return EXACT

    def launch(self, inputs: Inputs, run: Callable[[int], torch.Tensor]) -> Launch:
        """A launch whose tokens are checked against the layer that they were sampled from."""
        layer_of: dict[int, int] = {}

        def remembered(index: int) -> torch.Tensor:
            tokens = run(index)
            layer_of[tokens.data_ptr()] = index
            return tokens

        return Launch(remembered, lambda tokens: verdict(inputs, layer_of[tokens.data_ptr()], tokens, exact=self.exact))


class Ours(Column):
    """`api.run`, with a plan for each layer, because a plan has one buffer for tokens.

    Args:
        kernel: a name from the dispatch table; by default the kernel that dispatch chooses.
        name: the column's name.
    """

    exact = True

    def __init__(self, kernel: str | None = None, name: str | None = None) -> None:
        self.kernel = kernel
        self.name = name or ("dsl" if kernel is None else f"dsl:{kernel}")

    def objections(self, problem: Problem) -> list[str]:
        spec = SamplingSpec(vocab=problem.vocab)
        try:
            dispatch.choose(spec, targets.detect(), self.kernel)
        except (InvalidInput, Unsupported) as error:
            return [" ".join(str(error).split())]
        return []

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        plans = []
        for layer in inputs.layers:
            plan = api.plan(SamplingSpec(vocab=problem.vocab), problem.rows, layer.logits.device, self.kernel)
            plan.results = Sampled(layer.tokens)
            plans.append(plan)

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            return api.run(plans[index], layer.logits, layer.parameters).tokens

        return self.launch(inputs, run)


class FlashInfer(Column):
    """FlashInfer as vLLM calls it. At first use it compiles kernels for minutes, so it runs only if named."""

    name = "FlashInfer"
    default = False

    def objections(self, problem: Problem) -> list[str]:
        reasons = [] if torch.cuda.is_available() else ["needs a CUDA device"]
        if importlib.util.find_spec("flashinfer") is None:
            reasons.append("flashinfer is not installed")
        if problem.filters not in ("k", "p", "k+p"):
            reasons.append(f"vLLM does not use it for {problem.filters}")
        return reasons

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        from flashinfer import sampling

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            k, p = layer.parameters.top_k, layer.parameters.top_p
            if problem.filters == "k+p":
                return sampling.top_k_top_p_sampling_from_logits(layer.logits, k, p, deterministic=True)
            probabilities = layer.logits.softmax(dim=-1)
            if p is None:
                return sampling.top_k_sampling_from_probs(probabilities, k, deterministic=True)
            return sampling.top_p_sampling_from_probs(probabilities, p, deterministic=True)

        return self.launch(inputs, run)


class Vllm(Column):
    """vLLM's sampling without FlashInfer: its Triton filter, softmax, and exponential noise.

    The filter works in place, so each launch copies the logits first. A server does not copy.
    """

    name = "vLLM"
    filter_name = "apply_top_k_top_p"

    def objections(self, problem: Problem) -> list[str]:
        if importlib.util.find_spec("vllm") is None:
            return ["vllm is not installed"]
        return [] if torch.cuda.is_available() else ["needs a CUDA device"]

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        ops = importlib.import_module(VLLM_OPS)
        apply, scratch = getattr(ops, self.filter_name), torch.empty_like(inputs.layers[0].logits)

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            logits = layer.logits
            if layer.parameters.top_k is not None or layer.parameters.top_p is not None:
                logits = apply(scratch.copy_(logits), layer.parameters.top_k, layer.parameters.top_p)
            chance = masked(logits, layer).softmax(dim=-1, dtype=torch.float32)
            tokens: torch.Tensor = ops.random_sample(chance, {})
            return tokens

        return self.launch(inputs, run)


class Torch(Vllm):
    """vLLM's filter in eager torch, which sorts the vocabulary."""

    name = "torch"
    filter_name = "apply_top_k_top_p_pytorch"

    def objections(self, problem: Problem) -> list[str]:
        reasons = [] if importlib.util.find_spec("vllm") is not None else ["vllm is not installed"]
        if problem.filters not in ("k", "p", "k+p"):
            reasons.append(f"for {problem.filters} it is the same as the column vLLM")
        return reasons


def masked(logits: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The logits after min-p, computed as in vLLM's logits processor."""
    if layer.parameters.min_p is None:
        return logits
    chance = logits.softmax(dim=-1)
    least = chance.amax(dim=-1, keepdim=True) * layer.parameters.min_p.unsqueeze(1)
    return logits.masked_fill(chance < least, -torch.inf)
