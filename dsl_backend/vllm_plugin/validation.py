# SPDX-License-Identifier: Apache-2.0
"""Checks a vLLM configuration against the kernels: every reason against it, with what would work instead."""

from collections.abc import Mapping
from typing import Any

import torch

from dsl_backend.attention import dispatch
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.quant.format import NVFP4_KV, format_of
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.model import KV_CACHE_DTYPES
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat

# The page size that stands for "not decided yet": the largest that vLLM's own choices are multiples of.
ANY_PAGE_SIZE = 16
KV_DTYPES = {name: getattr(torch, stored) for name, stored in KV_CACHE_DTYPES.items()}

# Reasons of vLLM's base class that are left out, since the dispatch table gives the same ones with more detail.
SAID_BY_DISPATCH = frozenset(
    {"head_size not supported", "dtype not supported", "kv_cache_dtype not supported", "block_size not supported"}
)
ADVICE = {
    "partial multimodal token full attention not supported": "bidirectional attention within a causal prompt "
    "(prefix-LM, multimodal tokens) is not served: use --attention-backend TRITON_ATTN",
    "sparse not supported": "sparse MLA is not served: use --attention-backend FLASHMLA_SPARSE",
    "per-head quant scales not supported": "fp8 keys with a scale for each head are not served (MLA has one head): "
    "use --kv-cache-dtype auto, or a checkpoint with one scale for each layer",
    "R-SWA not supported": "sliding windows with a globally visible prefix (R-SWA) are not served: use "
    "--attention-backend TRITON_ATTN",
    "batch invariance not supported": "batch invariance is not promised: unset VLLM_BATCH_INVARIANT, or use "
    "--attention-backend FLASH_ATTN",
    "PCP not supported": "prefill context parallelism is not served: use --prefill-context-parallel-size 1",
    "DCP not supported": "decode context parallelism is not served: use --decode-context-parallel-size 1",
}


def target_of(device_capability: Any) -> Target:
    """The usual GPU of a DeviceCapability of vLLM; None means the CPU. Accesses no device."""
    if device_capability is None:
        return targets.cpu_target()
    return targets.of_capability((device_capability.major, device_capability.minor))


def current_target() -> Target:
    """The target of vLLM's current platform. Accesses no device, since CUDA may not be initialised yet."""
    from vllm.platforms import current_platform

    return targets.cpu_target() if current_platform.is_cpu() else target_of(current_platform.get_device_capability())


def torch_kv_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a cache of vLLM's `--kv-cache-dtype`. Raises ValueError: no kernel serves it."""
    if kv_cache_dtype in (None, "auto"):
        return dtype
    if kv_cache_dtype not in KV_DTYPES:
        accepted = ", ".join(["auto", *KV_DTYPES])
        raise ValueError(f"--kv-cache-dtype {kv_cache_dtype} is not served: use one of {accepted}")
    found: torch.dtype = KV_DTYPES[kv_cache_dtype]
    if found == NVFP4_KV.dtype and not compat.pages_can_be_packed():
        raise ValueError(
            f"--kv-cache-dtype {kv_cache_dtype} needs a vLLM whose backends say what a page is "
            f"(AttentionBackend.customize_spec; 0.32 has it)"
        )
    return found


# The values of `--kv-cache-dtype` that are served.
SERVED_KV_DTYPES = ["auto", *KV_DTYPES]


def model_dtype_of(kv_dtype: torch.dtype) -> torch.dtype:
    """A dtype of queries that a cache of this dtype is served with."""
    return torch.float16 if format_of(kv_dtype).quantized else kv_dtype


def reasons_against(spec: AttentionSpec, target: Target, kernel: str | None = None) -> list[str]:
    """Why a layer of this spec cannot be served, by any kernel or by the one of that name."""
    return dispatch.reasons_against(spec, target, lambda operation: kernel_for(operation, kernel))


def kernel_for(operation: dispatch.Operation, kernel: str | None) -> str | None:
    """The kernel for an operation, given the name that the user asked for.

    Kernels without a cache write of their own use the best one that there is.
    """
    names = [entry.name for entry in dispatch.TABLE[operation]]
    return None if operation is dispatch.Operation.WRITE_KV and kernel not in names else kernel


def kernel_for_keys(spec: AttentionSpec, kernel: str | None) -> str | None:
    """The kernel that attends for a layer of this spec, given the name that the user asked for.

    Prefill of MLA projects keys to 16 bits: products in 8 bits are those of the cache, and it has the best kernel.
    """
    return None if kernel == dispatch.FP8_PRODUCTS and spec.page_size is None else kernel


def probe(target: Target, **changes: Any) -> list[str]:
    """Reasons against an ordinary layer with some facts of its spec changed."""
    dtype = changes.pop("dtype", torch.float16)
    facts: dict[str, Any] = {
        "heads_q": 1,
        "heads_kv": 1,
        "head_dim": 128,
        "head_dim_v": 128,
        "dtype": dtype,
        "kv_dtype": dtype,
        "page_size": ANY_PAGE_SIZE,
        "scale": 1.0,
    }
    return dispatch.reasons_against(AttentionSpec(**(facts | changes)), target)


def page_size_unit(target: Target) -> int:
    """The smallest power of two whose multiples the kernels take as page sizes."""
    for unit in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if not probe(target, page_size=unit):
            return unit
    return ANY_PAGE_SIZE


def configuration_reasons(
    *, generic: list[str], head_dims: tuple[int, int], mla: bool, selection: Mapping[str, Any], kernel: str | None
) -> list[str]:
    """Every reason against what vLLM's selection asks for.

    Args:
        generic: the reasons of vLLM's base class.
        head_dims: elements of a key and of a value.
        mla: absorbed MLA.
        selection: the keyword arguments of `validate_configuration`.
        kernel: the kernel that the user asked for by name, if any.
    """
    reasons = []
    dtype = selection["dtype"]
    try:
        kv_dtype = torch_kv_dtype(selection["kv_cache_dtype"], dtype)
    except ValueError as error:
        reasons.append(str(error))
        kv_dtype = dtype
    key, value = head_dims
    spec = AttentionSpec(
        heads_q=1,
        heads_kv=1,
        head_dim=key,
        head_dim_v=value,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=selection["block_size"] or ANY_PAGE_SIZE,
        scale=1.0,
        sinks=bool(selection.get("has_sink", False)),
        window_left=0 if selection.get("has_sliding_window", False) else None,
        mla=mla,
        batch_invariant=bool(selection.get("use_batch_invariant", False)),
    )
    reasons += reasons_against(spec, target_of(selection["device_capability"]), kernel)
    if compat.uses_dcp(selection) and "DCP not supported" not in generic:
        generic = [*generic, "DCP not supported"]
    return reasons + [ADVICE.get(reason, reason) for reason in generic if reason not in SAID_BY_DISPATCH]


def refuse(what: str, reasons: list[str]) -> None:
    """Raises ValueError with every reason, if there is any."""
    if reasons:
        raise ValueError("\n  - ".join([f"attention backend dsl does not serve {what}:", *reasons]))
