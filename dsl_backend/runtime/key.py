# SPDX-License-Identifier: Apache-2.0
"""The identity of a compiled kernel, in memory and on disk: a text that names all it depends on, and its digest."""

import ast
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
FOLDER = Path(__file__).resolve().parents[1]
# Calls CuTe DSL's compiler, for every kernel. What it imports generates no code.
COMPILER = "dsl_backend.runtime.toolkit"
# Triton's kernels have a cache of their own.
TRITON = "triton"
ACCEPTED = (
    "None, bool, int, float, str, bytes, an enum's member, a dtype, a type; tuples, frozensets, dataclasses of these"
)
LOADED = time.time()


@dataclasses.dataclass(frozen=True)
class Sources:
    """The Python files that a kernel is made from.

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
    modules = {owner.__module__, COMPILER, *modules_of(key), *parts_of(kernel)}
    sources = {module: sources_of(module) for module in sorted(modules)}
    text = stable(key)
    parts = {
        "format": FORMAT,
        "kernel": name,
        "key": text,
        "arguments": toolkit.described(arguments),
        "arch": target.arch,
        "options": options,
        "sources": {module: found.fingerprint for module, found in sources.items()},
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


def modules_of(value: Any) -> set[str]:
    """The modules that define the dataclasses and enums of a key."""
    if isinstance(value, (tuple, frozenset)):
        return {module for part in value for module in modules_of(part)}
    found = {type(value).__module__} if isinstance(value, enum.Enum) else set()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {type(value).__module__}.union(*(modules_of(getattr(value, one.name)) for one in _fields(value)))
    return found


def parts_of(kernel: Any) -> set[str]:
    """The modules of the objects of this package that a kernel object was given, such as a mask."""
    values = () if hasattr(kernel, "__qualname__") else vars(kernel).values()
    return {module for value in values if is_ours(module := type(value).__module__)}


def root_of(module: str) -> str:
    """The package, or the module of its own, whose sources a kernel of another package's module is made from."""
    package = module.partition(".")[0]
    # A package without an __init__.py is any number of folders.
    return package if getattr(sys.modules.get(package), "__file__", None) else module


@cache
def sources_of(module: str) -> Sources:
    """The sources of a kernel's module: the module, and the modules of this package that it imports, directly or not.

    Imports inside functions count, those for type checkers alone do not. Of a module of another package, all of that
    package counts too.

    Raises:
        InvalidInput: it has no file, such as what was typed into an interpreter.
    """
    if module == COMPILER:
        return fingerprinted({module: existing(module)})
    if is_ours(module):
        return fingerprinted(followed({module: existing(module)}))
    return fingerprinted(followed(files_of_root(root_of(module))))


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def existing(module: str) -> Path:
    """The file of a module of this package. Raises InvalidInput: there is none."""
    file = file_of(module)
    if file is None:
        raise InvalidInput(f"kernels of {module} cannot be compiled: it has no source file")
    return file


def file_of(module: str) -> Path | None:
    """The file of a module of this package; None where it has none. Nothing is imported."""
    path = FOLDER.joinpath(*module.split(".")[1:])
    candidates = (path / "__init__.py", path.parent / f"{path.name}.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def files_of_root(root: str) -> dict[str, Path]:
    """Name -> file, for all of another package, or for a module. Raises InvalidInput: it has no file."""
    module = sys.modules.get(root) or importlib.import_module(root)
    file = getattr(module, "__file__", None)
    if file is None:
        raise InvalidInput(f"kernels of {root} cannot be compiled: it has no source file")
    top = Path(file)
    files = sorted(top.parent.rglob("*.py")) if top.name == "__init__.py" else [top]
    return {path.relative_to(top.parent).as_posix(): path for path in files}


def followed(files: Mapping[str, Path]) -> dict[str, Path]:
    """These files, by name, and those of this package's modules that they import, directly or not."""
    found, waiting = dict(files), list(files.items())
    while waiting:
        name, path = waiting.pop()
        for module in imports_of(path, name if is_ours(name) else ""):
            file = None if TRITON in module.split(".") else file_of(module)
            if file is not None and module not in found:
                found[module] = file
                waiting.append((module, file))
    return found


@cache
def imports_of(path: Path, module: str) -> frozenset[str]:
    """The modules of this package that a file may import, with the packages that they are in.

    Args:
        module: the file's own name, for relative imports; empty where it is of another package.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_bytes())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # A name may be a module; one that is none has no file.
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)
    ours = [name.split(".") for name in found if is_ours(name)]
    return frozenset(".".join(parts[:count]) for parts in ours for count in range(1, len(parts) + 1))


def fingerprinted(files: Mapping[str, Path]) -> Sources:
    digest, newest = hashlib.sha256(), 0.0
    for name, path in sorted(files.items()):
        text = path.read_bytes()
        digest.update(f"{name} {len(text)} ".encode() + text)
        newest = max(newest, path.stat().st_mtime)
    return Sources(digest.hexdigest()[:32], newest)


def forget() -> None:
    """Read the sources again at the next call."""
    sources_of.cache_clear()
    imports_of.cache_clear()


def is_current(sources: Mapping[str, str]) -> bool:
    """Whether fingerprints that an entry was stored with are still those of this package's modules."""
    try:
        return bool(sources) and all(
            sources_of(module).fingerprint == fingerprint for module, fingerprint in sources.items() if is_ours(module)
        )
    except InvalidInput:  # a module that is no longer there
        return False
