# SPDX-License-Identifier: Apache-2.0
"""Serves the norms of models whose attention dsl serves: finds them, and replaces what their `forward` calls."""

import math
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.log import logger
from dsl_backend.norm import dispatch
from dsl_backend.norm.spec import FP8, NormSpec, Scaling
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.fused_mlp.find import sequence_parallelism
from dsl_backend.vllm_plugin.norms.handed import HandedTo, consumers
from dsl_backend.vllm_plugin.options import ServedBy
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each

# vLLM's classes -> what they add to the weight.
OFFSETS = {"RMSNorm": 0.0, "GemmaRMSNorm": 1.0}
IS_QUANTISED = "the model is quantised, and vLLM fuses norms with the quantisation behind them"
# For each model that dsl serves in this process, in order: name of a norm -> its spec.
_served: list[dict[str, NormSpec]] = []


def reasons_against_engine(vllm_config: Any, target: Target) -> str:
    """Why no norm of an engine is served, whatever its model; empty where nothing is against it."""
    reasons = [sequence_parallelism(vllm_config), options.against_kernels(vllm_config, "norms", target)]
    if getattr(vllm_config, "quant_config", None) is not None and options.of(vllm_config).norms is not ServedBy.DSL:
        reasons.append(IS_QUANTISED)
    passes = vllm_config.compilation_config.pass_config
    if vllm_config.parallel_config.tensor_parallel_size > 1 and getattr(passes, "fuse_allreduce_rms", False):
        reasons.append("vLLM fuses norms with the all-reduce in front of them (fuse_allreduce_rms)")
    return "; ".join(filter(None, reasons))


def norms(model: nn.Module, width: int) -> Iterator[tuple[str, Any]]:
    """The norms of a model's hidden states, with their names; none of those that are served already.

    Norms of heads and of latents are narrower: vLLM fuses them with their neighbours.
    """
    from vllm.model_executor.layers import layernorm

    kinds = tuple(getattr(layernorm, name) for name in OFFSETS)
    for name, module in model.named_modules():
        if type(module) in kinds and module.weight.shape == (width,) and not hasattr(module, "dsl_weight_offset"):
            yield name, module


def judge(module: Any, dtype: torch.dtype, target: Target, handed_to: HandedTo | str | None = None) -> NormSpec | str:
    """The spec of a norm with a residual that is served, or why it stays vLLM's.

    Args:
        handed_to: of a quantised model: where the norm's result goes, or why it stays vLLM's.
    """
    if isinstance(handed_to, str):
        return f"{IS_QUANTISED}: {handed_to}"
    scaling = Scaling.NONE if handed_to is None else handed_to.scaling
    bound_to: Any = getattr(getattr(module, "_forward_method", None), "__self__", None)
    if "forward" in vars(module) or bound_to is not module:
        return f"another forward was put into {type(module).__name__}"
    if not isinstance(module.weight, nn.Parameter) or getattr(module, "variance_size_override", None) is not None:
        return f"{type(module).__name__} has no weight, or the variance of a part of the row"
    try:
        spec = NormSpec(
            width=module.weight.shape[0],
            dtype=dtype,
            out_dtype=dtype if handed_to is None else FP8,
            weight_dtype=module.weight.dtype,
            residual=True,
            weight_offset=OFFSETS[type(module).__name__],
            scaling=scaling,
            vector=math.gcd(8, module.weight.shape[0]),
        )
        dispatch.choose(spec, target)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return spec


def serve_norms(model: nn.Module, vllm_config: Any) -> None:
    """Serve every norm of a model's hidden states that can be served; log how many, and why others are not."""
    if not options.serves_attention(vllm_config) or vllm_config.model_config is None:
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config, target)
    settings = vllm_config.model_config
    quantised = getattr(vllm_config, "quant_config", None) is not None
    found = consumers(model) if quantised and not against_engine else {}

    def handed_to(module: Any) -> HandedTo | str | None:
        return found.get(id(module), "no module holds it") if quantised else None

    served, left = serve_each(
        norms(model, settings.get_hidden_size()),
        lambda module: against_engine or judge(module, settings.dtype, target, handed_to(module)),
        lambda module, spec: replace(module, spec, handed_to(module)),
    )
    _served.append(served)
    ahead.compile_norms(vllm_config, served.values())
    for spec, count in Counter(served.values()).items():
        by = dispatch.choose(spec, target).title
        logger.info("dsl serves %d norms, %s, on %s: by %s", count, spec, target.arch, by)
    report_left("norms", left)


def replace(module: Any, spec: NormSpec, handed_to: HandedTo | str | None = None) -> None:
    """Have a norm's `forward` call this package's."""
    from dsl_backend.vllm_plugin.norms.method import forward, forward_in_8_bits

    module.dsl_weight_offset, module.dsl_handed_to = spec.weight_offset, handed_to
    module._forward_method = types.MethodType(forward if handed_to is None else forward_in_8_bits, module)


def compilation_key() -> str:
    """The served norms of each model of this process."""
    return key_of(_served)


def served_specs() -> set[NormSpec]:
    """All kinds of norms that are served in this process."""
    return {spec for served in _served for spec in served.values()}
