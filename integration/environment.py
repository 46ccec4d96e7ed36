# SPDX-License-Identifier: Apache-2.0
"""What the checks depend on: the device and its own backends."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much the checks under load ask of one server.

    Attributes:
        streams: requests at once.
        sequences: requests in a batch; the others wait.
        longest: tokens of the longest answer.
        pages: of a cache too small for so many requests, 16 tokens each.
        alone: requests that are also asked one by one.
        soak: requests of a soak.
        end_s: seconds that a server under load gets to finish what it has begun, after SIGTERM.
    """

    streams: int
    sequences: int
    longest: int
    pages: int
    alone: int
    soak: int
    end_s: int = 90


@dataclass(frozen=True)
class Device:
    """How the checks are run on this machine.

    Attributes:
        cuda: whether there is a CUDA device.
        dense, alibi, mla: vLLM's own backends that `dsl` is compared with.
        fp8: whether `dense` reads keys and values of 8 bits here.
        dense_truth, mla_truth: backend and dtype of the results that errors are measured from.
        dtypes: what `dsl` is compared in; float32 is for CPUs.
        kernels: that serve attention.
        flags: for every server on this device.
        environment: of servers whose start is not what is checked.
        load: how much the checks under load ask for.
    """

    cuda: bool
    dense: str
    alibi: str
    mla: str
    fp8: bool
    dense_truth: tuple[str, str]
    mla_truth: tuple[str, str]
    dtypes: tuple[str, ...]
    kernels: str
    flags: tuple[str, ...]
    environment: dict[str, str]
    load: Load

    def serves(self, line: str) -> bool:
        """Whether a line of a log says that the kernels of this device serve a layer's prefill and decode."""
        found = re.findall(r"(?:dense-prefill|dense-decode|mla-decode) (\w+)", line.partition(" (not by ")[0])
        return bool(found) and set(found) == {self.kernels}


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
            fp8=True,
            dense_truth=("TRITON_ATTN", "float32"),
            # No MLA backend for GPUs computes in float32.
            mla_truth=("TRITON_MLA", "bfloat16"),
            dtypes=("bfloat16",),
            kernels="sm90" if hopper else "triton",
            flags=("--gpu-memory-utilization", "0.3"),
            environment={},
            load=Load(streams=256, sequences=128, longest=128, pages=768, alone=16, soak=2000),
        )
    return Device(
        cuda=False,
        dense="CPU_ATTN",
        alibi="CPU_ATTN",
        mla="CPU_MLA",
        # By AVX-512 or AMX, and processors with AMX have AVX-512.
        fp8=torch.backends.cpu.get_cpu_capability() == "AVX512",
        dense_truth=("CPU_ATTN", "float32"),
        mla_truth=("CPU_MLA", "float32"),
        dtypes=("float32", "bfloat16"),
        kernels="reference",
        flags=(),
        environment={
            # vLLM compiles helpers of its sampler at every start, which takes as long as all the rest of it.
            "TORCHDYNAMO_DISABLE": "1",
            # oneDNN keeps what it made for each of the last 1024 shapes of a product: with any backend a server grows
            # by some 300 MiB in its first few thousand steps, and a leak would be lost in that.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
            # vLLM binds every server to the same cores, where those of checks that run side by side would queue up.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
        load=Load(streams=24, sequences=16, longest=40, pages=36, alone=24, soak=300),
    )
