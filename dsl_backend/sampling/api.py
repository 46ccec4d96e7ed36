# SPDX-License-Identifier: Apache-2.0
"""Sampling as functions on tensors: `plan` once, `run` at every step.

    sampler = plan(SamplingSpec(vocab=128256), max_rows=256, device=torch.device("cuda"))
    tokens = run(sampler, logits, Parameters(seeds=seeds, positions=positions, top_k=top_k, top_p=top_p)).tokens

`reference.py` has the definition. Every kernel gives the same masks and tokens in every batch, bit for bit, because
they are computed with integers. Log-probabilities are float32 and agree up to rounding.
"""

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import cuda_index, detect
from dsl_backend.sampling.plan import SamplingPlan
from dsl_backend.sampling.spec import LogprobsMode, Parameters, Sampled, SamplingSpec

__all__ = ["LogprobsMode", "Parameters", "Sampled", "SamplingPlan", "SamplingSpec", "plan", "run"]


def plan(spec: SamplingSpec, max_rows: int, device: torch.device | str, kernel: str | None = None) -> SamplingPlan:
    """Plan steps of up to max_rows rows. All memory of the sampler is allocated here.

    Args:
        device: of the logits, or its name.
        kernel: `cute`, `triton` or `reference`; no other kernel is used. By default the best that serves the spec on
            the device.

    Raises:
        InvalidInput: max_rows is below 1, or there is no such device or kernel.
        Unsupported: no kernel serves the spec, or not the requested one. The message has every objection.
    """
    checks.instance("spec", spec, SamplingSpec)
    checks.kernel(kernel)
    max_rows, device = checks.integer("max_rows", max_rows, 1), checks.device("device", device)
    target = detect(device)
    if device.type == "cuda":
        device = torch.device("cuda", cuda_index(device))
    return SamplingPlan(spec, target, max_rows, device, kernel)


def run(
    plan: SamplingPlan,
    logits: torch.Tensor,
    parameters: Parameters,
    num_logprobs: int | None = None,
    *,
    new_tokens: bool = False,
    kept: bool = False,
) -> Sampled:
    """Sample one token for each row. It does not synchronize with the GPU, or write to the logits.

    Args:
        logits: [rows, vocab] of the spec's dtype, with contiguous columns and any row stride; rows may be 0.
        num_logprobs: how many of the likeliest tokens this step returns; the spec's num_logprobs by default, which is
            the most.
        new_tokens: return the tokens in memory of their own. Otherwise nothing is allocated.
        kept: return what the filters keep and what probabilities are normalized with, where the kernel finds it; for a
            plan of a spec with it. Without filters that is the whole row.

    Returns:
        Views of the plan's buffers, which its next step overwrites.

    Raises:
        InvalidInput: a shape, dtype, stride or device does not match, or a tensor requires a gradient while gradients
            are enabled.
    """
    checks.instance("plan", plan, SamplingPlan)
    checks.tensor("logits", logits)
    checks.instance("parameters", parameters, Parameters)
    spec = plan.spec
    if logits.dim() != 2 or logits.shape[1] != spec.vocab or logits.dtype != spec.dtype:
        raise InvalidInput(
            f"logits are {short(logits.dtype)} {tuple(logits.shape)}: {short(spec.dtype)} [rows, {spec.vocab}] is "
            f"needed"
        )
    checks.no_gradient("logits", logits)
    # No message is made up before it is needed: a step would pay for the text.
    count = logits.shape[0]
    if count > plan.max_rows:
        raise InvalidInput(f"{count} rows exceed the plan's max_rows, {plan.max_rows}")
    if spec.vocab > 1 and logits.stride(1) != 1:
        raise InvalidInput(f"logits have strides {logits.stride()}: the last must be 1")
    if logits.device != plan.device:
        raise InvalidInput(f"logits are on {logits.device}: {plan.device} is needed")
    parameters.check(count, plan.device)
    most = spec.num_logprobs
    wanted = most if num_logprobs is None else checks.integer("num_logprobs", num_logprobs, 0, most)
    checks.flag("new_tokens", new_tokens)
    checks.flag("kept", kept)
    require(spec.kept or not kept, "kept is asked for: a plan of a spec with kept=True is needed")
    out = plan.outputs(count, wanted, kept)
    if new_tokens:
        out = Sampled(torch.empty_like(out.tokens), *out[1:])
    if count:
        plan.kernel.launch(logits, parameters, out)
    return out
