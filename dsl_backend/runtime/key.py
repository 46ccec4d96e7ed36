# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel is known by, in memory and on disk: one text that names all it depends on, and its digest."""

import dataclasses
import enum
import hashlib
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target

# Changes when what is stored, or how it is called, changes its meaning.
FORMAT = 1
PACKAGE = "dsl_backend"
# Of the package, what no kernel is made from.
NO_KERNELS = (
    "vllm_plugin",
    "testing",
    "_benchmarks",
    "cli.py",
    "doctor.py",
    "environment.py",
    "families.py",
    "kernel_commands.py",
)
TRITON = "triton"
ACCEPTED = (
    "None, bool, int, float, str, bytes, an enum's member, a dtype, a type; tuples, frozensets, dataclasses of these"
)
LOADED = time.time()


@dataclasses.dataclass(frozen=True)
class Sources:
    """The Python files that a package's kernels are made from.

    Attributes:
        fingerprint: of their names and contents.
        newest: when the last of them was changed, in seconds since the epoch.
    """

    fingerprint: str
    newest: float

    @property
    def changed(self) -> bool:
        """Changed while this process runs: the code in memory is not the code on disk."""
        return self.newest > LOADED


@dataclasses.dataclass(frozen=True)
class Identity:
    """A compiled kernel's identity.

    Attributes:
        name: module and class of the kernel.
        key: its key, as text.
        arch: what it was compiled for.
        parts: all of it, by name.
        reusable: whether what is on disk can be trusted to be made from the code in memory.
    """

    name: str
    key: str
    arch: str
    parts: Mapping[str, Any] = dataclasses.field(repr=False, hash=False)
    reusable: bool = True

    @property
    def text(self) -> str:
        return json.dumps(self.parts, sort_keys=True)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.name.rpartition('.')[2]} {self.key} for {self.arch}"


def identify(kernel: Any, arguments: Sequence[Any], *, key: Any, target: Target, options: str = "") -> Identity:
    """The identity of a kernel object compiled with these arguments for the target.

    Of the target only the architecture counts, so that what a machine without a GPU has compiled is found on one with
    it: whatever else decides about code, such as a number of SMs, belongs into the key.

    Raises:
        InvalidInput: the key is no dataclass, or holds what has no stable text; the target is a CPU.
    """
    if target.is_cpu:
        raise InvalidInput("a CuTe DSL kernel cannot be compiled for target cpu: use an architecture such as sm_90a")
    if not dataclasses.is_dataclass(key) or isinstance(key, type):
        raise InvalidInput(f"a kernel's key is {key!r}: an instance of a dataclass is needed")
    owner = kernel if hasattr(kernel, "__qualname__") else type(kernel)
    name = f"{owner.__module__}.{owner.__qualname__}"
    sources = {root: sources_of(root) for root in sorted({PACKAGE, root_of(owner.__module__)})}
    text = stable(key)
    parts = {
        "format": FORMAT,
        "kernel": name,
        "key": text,
        "arguments": toolkit.described(arguments),
        "arch": target.arch,
        "options": options,
        "sources": {root: found.fingerprint for root, found in sources.items()},
        "toolkit": toolkit.versions(),
        "settings": toolkit.settings(),
    }
    reusable = not any(found.changed for found in sources.values())
    return Identity(name, text, target.arch, parts, reusable)


def stable(value: Any, where: str = "key") -> str:
    """A text that is the same in every process for equal values, and differs for different ones.

    Args:
        where: what the value is called in an error.

    Raises:
        InvalidInput: of a kind that has no such text.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, float) and math.isnan(value):
        raise InvalidInput(f"{where} is nan, which is equal to nothing")
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = (f"{one.name}={stable(getattr(value, one.name), f'{where}.{one.name}')}" for one in _fields(value))
        return f"{type(value).__qualname__}({', '.join(fields)})"
    if isinstance(value, tuple):
        return f"({', '.join(stable(part, f'{where}[{index}]') for index, part in enumerate(value))},)"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(stable(part, where) for part in value))}}}"
    raise InvalidInput(f"{where} is {value!r} of type {type(value).__qualname__}: use {ACCEPTED}")


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def root_of(module: str) -> str:
    """The package, or the module of its own, whose sources a kernel of this module is made from."""
    package = module.partition(".")[0]
    # A package without an __init__.py is any number of folders.
    return package if getattr(sys.modules.get(package), "__file__", None) else module


@cache
def sources_of(root: str) -> Sources:
    """The sources of an imported package or module, read once in a process.

    Raises:
        InvalidInput: it has no files, such as what was typed into an interpreter.
    """
    module = sys.modules.get(root) or importlib.import_module(root)
    file = getattr(module, "__file__", None)
    if file is None:
        raise InvalidInput(f"kernels of {root} cannot be compiled: it has no source file")
    top = Path(file)
    files = sorted(top.parent.rglob("*.py")) if top.name == "__init__.py" else [top]
    digest, newest = hashlib.sha256(), 0.0
    for path in files:
        name = path.relative_to(top.parent)
        if root == PACKAGE and (name.parts[0] in NO_KERNELS or TRITON in name.parts):
            continue
        text = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(text)} ".encode() + text)
        newest = max(newest, path.stat().st_mtime)
    return Sources(digest.hexdigest()[:32], newest)
