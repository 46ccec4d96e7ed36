# SPDX-License-Identifier: Apache-2.0
"""What the checks depend on: the device, its own backends, and a child process that finds the plugin."""

import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import tomllib
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


def plugin_folder() -> Path | None:
    """A folder for PYTHONPATH that declares the entry point, where the package itself is not installed."""
    if any(point.name == "dsl" for point in metadata.entry_points(group="vllm.general_plugins")):
        return None
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = ROOT / ".cache" / "plugin"
    info = folder / "dsl_backend-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsl-backend\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs vLLM: like ours, with the plugin in reach."""
    paths = [str(ROOT), *([str(folder)] if (folder := plugin_folder()) else [])]
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # The checkpoints are on disk: nothing is to be looked up on a network.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # GiB; the smallest that the CPU build takes.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment.pop("VLLM_PLUGINS", None)
    return environment | changes
