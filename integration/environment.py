# SPDX-License-Identifier: Apache-2.0
"""The settings that depend on the device, such as vLLM's own backends."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Load:
    """The sizes of the checks under load.

    Attributes:
        streams: concurrent requests.
        sequences: the largest number of requests in a batch; the others wait.
        longest: tokens of the longest answer.
        pages: pages of 16 tokens in a cache that is too small for all requests.
        alone: the number of requests that are also sent one by one.
        soak: the number of requests of a soak.
        end_s: seconds for a server under load to finish its requests after SIGTERM.
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
    """The settings of the checks on this machine.

    Attributes:
        cuda: whether there is a CUDA device.
        dense, alibi, mla: vLLM's own backends that `dsl` is compared with.
        fp8: whether `dense` supports 8-bit keys and values on this device.
        dense_truth, mla_truth: backend and dtype of the exact results, from which errors are measured.
        dtypes: the dtypes in which `dsl` is compared; float32 is for CPUs.
        kernels: the kernels that serve attention.
        flags: the flags of every server on this device.
        environment: variables for servers in tests that do not test the start.
        load: the sizes of the checks under load.
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
        found = re.findall(r"(?:dense-prefill|dense-decode|mla-decode)(?: e4m3)? (\w+)", line.partition(" (not by ")[0])
        return bool(found) and set(found) == {self.kernels}


@cache
def device() -> Device:
    if torch.cuda.is_available():
        hopper = torch.cuda.get_device_capability()[0] == 9
        return Device(
            cuda=True,
            # FlashAttention supports fp8 caches only on Hopper, and ALiBi only in version 2.
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
        # bfloat16 needs AVX-512 or AMX, and every processor with AMX has AVX-512.
        fp8=torch.backends.cpu.get_cpu_capability() == "AVX512",
        dense_truth=("CPU_ATTN", "float32"),
        mla_truth=("CPU_MLA", "float32"),
        dtypes=("float32", "bfloat16"),
        kernels="reference",
        flags=(),
        environment={
            # vLLM compiles helpers of its sampler at every start, which takes half of the time of the start.
            "TORCHDYNAMO_DISABLE": "1",
            # oneDNN caches primitives for the last 1024 shapes of a matrix product: with any backend a server grows by
            # some 300 MiB in its first few thousand steps, which would hide a leak.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
            # vLLM binds every server to the same cores, so servers of concurrent checks would compete for them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
        load=Load(streams=18, sequences=12, longest=32, pages=36, alone=18, soak=150),
    )
