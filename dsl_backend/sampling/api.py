# SPDX-License-Identifier: Apache-2.0
"""Sampling as plain functions on tensors: `plan` once, `run` at every step.

    sampler = plan(SamplingSpec(vocab=128256), max_rows=256, device=torch.device("cuda"))
    tokens = run(sampler, logits, Parameters(seeds=seeds, positions=positions, top_k=top_k, top_p=top_p)).tokens

`reference.py` has the definition. Masks and tokens are equal, bit for bit, on every path and in every batch: they come
from integers. Log-probabilities are float32, and equal to rounding.
"""

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import cuda_index, detect
from dsl_backend.sampling.plan import SamplingPlan
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec

__all__ = ["Parameters", "Sampled", "SamplingPlan", "SamplingSpec", "plan", "run"]


def plan(spec: SamplingSpec, max_rows: int, device: torch.device | str, kernel: str | None = None) -> SamplingPlan:
    """A sampler for steps of up to max_rows rows: all that it will ever allocate.

    Args:
        device: of the logits, or its name.
        kernel: `cute`, `triton` or `reference`; that one or none. By default the best that serves the spec on the
            device.

    Raises:
        InvalidInput: max_rows is below 1, or the device or kernel is unknown or not there.
        Unsupported: no kernel, or not the one that was asked for, serves the spec; with every objection.
    """
    checks.instance("spec", spec, SamplingSpec)
    checks.kernel(kernel)
    max_rows, device = checks.integer("max_rows", max_rows, 1), checks.device("device", device)
    target = detect(device)
    if device.type == "cuda":
        device = torch.device("cuda", cuda_index(device))
    return SamplingPlan(spec, target, max_rows, device, kernel)


def run(plan: SamplingPlan, logits: torch.Tensor, rows: Parameters) -> Sampled:
    """Sample one token of each row. Reads no value on the host, allocates nothing and leaves the logits as they are.

    Args:
        logits: [rows, vocab] of the spec's dtype; a row's elements are adjacent, rows may have any stride. No row is
            fine.

    Returns:
        Views of the plan's buffers: its next step overwrites them.

    Raises:
        InvalidInput: a shape, dtype, stride or device does not fit, or a tensor requires a gradient while gradients are
            on.
    """
    checks.instance("plan", plan, SamplingPlan)
    checks.tensor("logits", logits)
    checks.instance("rows", rows, Parameters)
    spec = plan.spec
    if logits.dim() != 2 or logits.shape[1] != spec.vocab or logits.dtype != spec.dtype:
        raise InvalidInput(
            f"logits are {short(logits.dtype)} {tuple(logits.shape)}: {short(spec.dtype)} [rows, {spec.vocab}] is "
            f"needed"
        )
    checks.no_gradient("logits", logits)
    count = logits.shape[0]
    require(count <= plan.max_rows, f"{count} rows are not accepted: the plan has room for {plan.max_rows}")
    require(spec.vocab == 1 or logits.stride(1) == 1, f"logits have strides {logits.stride()}: the last must be 1")
    require(logits.device == plan.device, f"logits are on {logits.device}: {plan.device} is needed")
    rows.check(count, plan.device)
    out = plan.results.rows(count)
    if count:
        plan.kernel.launch(logits, rows, out)
    return out
