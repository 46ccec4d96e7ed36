# SPDX-License-Identifier: Apache-2.0
"""What the checks depend on: the device and its own backends."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Device:
    """How the checks are run on this machine.

    Attributes:
        cuda: whether there is a CUDA device.
        dense, alibi, mla: vLLM's own backends that `dsl` is compared with.
        dense_truth, mla_truth: backend and dtype of the results that errors are measured from.
        dtypes: what `dsl` is compared in; float32 is for CPUs.
        flags: for every server on this device.
    """

    cuda: bool
    dense: str
    alibi: str
    mla: str
    dense_truth: tuple[str, str]
    mla_truth: tuple[str, str]
    dtypes: tuple[str, ...]
    flags: tuple[str, ...]


@cache
def device() -> Device:
    if torch.cuda.is_available():
        hopper = torch.cuda.get_device_capability()[0] == 9
        return Device(
            cuda=True,
            # FlashAttention reads fp8 caches on Hopper alone, and knows ALiBi in its second version alone.
            dense="FLASH_ATTN" if hopper else "TRITON_ATTN",
            alibi="TRITON_ATTN",
            mla="FLASH_ATTN_MLA" if hopper else "TRITON_MLA",
            dense_truth=("TRITON_ATTN", "float32"),
            # No MLA backend for GPUs computes in float32.
            mla_truth=("TRITON_MLA", "bfloat16"),
            dtypes=("bfloat16",),
            flags=("--gpu-memory-utilization", "0.3"),
        )
    return Device(
        cuda=False,
        dense="CPU_ATTN",
        alibi="CPU_ATTN",
        mla="CPU_MLA",
        dense_truth=("CPU_ATTN", "float32"),
        mla_truth=("CPU_MLA", "float32"),
        dtypes=("float32", "bfloat16"),
        flags=(),
    )
