# SPDX-License-Identifier: Apache-2.0
"""Finds the projections of a model that this package serves, or why it does not."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import dispatch, tuned
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat, options
from dsl_backend.vllm_plugin.fused_mlp.find import sequence_parallelism
from dsl_backend.vllm_plugin.options import ServedBy

# The attribute by which a DeepSeekV2FusedQkvAProjLinear has a kernel of vLLM's multiply instead of its method.
OWN_KERNEL = "_use_min_latency_gemm"


def reasons_against_engine(vllm_config: Any) -> str:
    """Why no projection of an engine is served, whatever its model; empty where nothing is against it."""
    invariant = (
        "batch invariance (VLLM_BATCH_INVARIANT) asks for one kernel for any number of rows: "
        """--additional-config '{"dsl": {"projections": "dsl"}}' has dsl serve them"""
    )
    measured = options.of(vllm_config).projections is ServedBy.MEASURED
    return against_linear_layers(vllm_config, "projections", invariant=invariant if measured else "")


def against_linear_layers(vllm_config: Any, option: str, *, invariant: str, measured: str = "") -> str:
    """Why no linear layer that an option is about is served in an engine; empty where nothing is against it.

    Args:
        option: its name, of a `ServedBy`.
        invariant: what is against them with batch invariance; empty for nothing.
        measured: what is against them where the option is `measured`; empty for nothing.
    """
    served_by = getattr(options.of(vllm_config), option)
    reasons = (
        sequence_parallelism(vllm_config),
        f"additional_config['dsl']['{option}'] is vllm" if served_by is ServedBy.VLLM else "",
        measured if served_by is ServedBy.MEASURED else "",
        "LoRA (lora_config) adds to what a projection returns" if vllm_config.lora_config is not None else "",
        invariant if compat.is_batch_invariant() else "",
        linear_backend(vllm_config),
    )
    return "; ".join(filter(None, reasons))


def linear_backend(vllm_config: Any) -> str:
    """Why an engine asks for vLLM's kernels of linear layers; empty where it does not."""
    asked = getattr(getattr(vllm_config, "kernel_config", None), "linear_backend", "auto")
    return "" if asked == "auto" else f"--linear-backend {asked} asks for vLLM's kernels"


def projections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers of a model and its logits' projection, with their names; none that is fused or served already.

    A module that several names lead to comes once.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from dsl_backend.vllm_plugin.fused_mlp.method import GatedLinearMethod
    from dsl_backend.vllm_plugin.projections.method import EmbeddingMethod, LinearMethod
    from dsl_backend.vllm_plugin.routed_experts.method import AppliedByExperts

    ours = (GatedLinearMethod, LinearMethod, EmbeddingMethod, AppliedByExperts)
    for name, module in model.named_modules():
        if isinstance(module, (LinearBase, ParallelLMHead)) and not isinstance(module.quant_method, ours):
            yield name, module


def judge(layer: Any, vllm_config: Any, target: Target) -> LinearSpec | str:
    """The spec of a layer that is served, or why it stays vLLM's."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    kind: Any = type(layer)
    if isinstance(layer, ParallelLMHead):
        known, plain = (VocabParallelEmbedding, ParallelLMHead), UnquantizedEmbeddingMethod
    else:
        names = ("ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear")
        known, plain = tuple(getattr(linear, name) for name in names), linear.UnquantizedLinearMethod
    method = layer.quant_method
    if type(method) is not plain:
        return f"a layer is quantised or no plain product ({type(method).__name__})"
    forwards = [one.forward for one in known]
    plain_forward = kind.forward in forwards or is_plain_router(layer) or is_fused_latent(layer, forwards)
    if "forward" in vars(layer) or not plain_forward:
        return f"{kind.__name__} has a forward of its own"
    try:
        spec = spec_of(layer)
        dispatch.choose(spec, target)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    except AttributeError as error:  # a version of vLLM whose layers are others than those that are known
        return f"vLLM's layer is not as it was expected: {error}"
    served_by = options.of(vllm_config).projections
    if served_by is ServedBy.MEASURED and getattr(layer, OWN_KERNEL, False):
        return (
            f"{kind.__name__} has a kernel of vLLM's for up to 16 rows that dsl's was not timed beside: "
            """--additional-config '{"dsl": {"projections": "dsl"}}' has dsl serve them"""
        )
    if served_by is ServedBy.MEASURED and not tuned.faster(spec.n, spec.k, spec.dtypes.x, target):
        return (
            "nothing measured says that dsl is faster: "
            """--additional-config '{"dsl": {"projections": "dsl"}}' has dsl serve them"""
        )
    return spec


def is_plain_router(layer: Any) -> bool:
    """Whether a layer is vLLM's GateLinear and comes to the product of a ReplicatedLinear.

    Its other kernels, each behind a flag that begins with `allow_`, are for logits or weights in float32.
    """
    kinds = [kind for kind in type(layer).__mro__ if "forward" in vars(kind)]
    if kinds[0].__name__ != "GateLinear" or getattr(layer, "out_dtype", None) not in (None, layer.weight.dtype):
        return False
    allowed = {name for name, value in vars(layer).items() if name.startswith("allow_") and value}
    return allowed <= {"allow_specialized_router_gemm"}  # which is what the others need, and no kernel


def is_fused_latent(layer: Any, forwards: Sequence[Any]) -> bool:
    """Whether a layer is vLLM's projection to both latents of MLA, and a plain product but for its own kernel.

    That kernel is for few rows of DeepSeek-V3's sizes, behind the flag `OWN_KERNEL`.

    Args:
        forwards: those of plain products.
    """
    kinds = [kind for kind in type(layer).__mro__ if "forward" in vars(kind)]
    return (
        kinds[0].__name__ == "DeepSeekV2FusedQkvAProjLinear"
        and vars(kinds[1])["forward"] in forwards
        and isinstance(getattr(layer, OWN_KERNEL, None), bool)
    )


def spec_of(layer: Any) -> LinearSpec:
    """The spec of a projection on this rank. Raises InvalidInput: no kernel has such a layer."""
    n, k = layer.weight.shape
    # A layer with skip_bias_add hands its bias to the model instead.
    bias = getattr(layer, "bias", None) is not None and not getattr(layer, "skip_bias_add", False)
    return LinearSpec(
        n=n,
        k=k,
        dtypes=Dtypes.of(layer.weight.dtype),
        bias=bias,
        batch_invariant=compat.is_batch_invariant(),
        vector=math.gcd(8, n, k),
    )
