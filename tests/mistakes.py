# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the source of a module, which tests are to find."""

import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsl_backend.runtime import toolkit


@dataclass(frozen=True)
class Mistake:
    """What a module's source says once, and what it would say."""

    id: str
    module: ModuleType
    said: str
    wrong: str


def spoilt(mistake: Mistake, folder: Path) -> ModuleType:
    """The module with the mistake in it, from a file: the compiler reads its functions' source."""
    source = inspect.getsource(mistake.module)
    assert source.count(mistake.said) == 1, f"{mistake.said!r} is not what {mistake.module.__name__} says once"
    file = folder / "spoilt.py"
    file.write_text(source.replace(mistake.said, mistake.wrong))
    spec = importlib.util.spec_from_file_location(f"spoilt_{abs(hash(mistake.id))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spoil_methods(right: type, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a class that others inherit from the methods that it has in a spoilt module.

    Other classes of the module stay the right ones: kernels check the types of their arguments.
    """
    wrong = getattr(module, right.__name__)
    for name, value in vars(sys.modules[right.__module__]).items():
        if isinstance(value, type) and value.__module__ == right.__module__:
            setattr(module, name, value)
    for name, method in vars(wrong).items():
        if not name.startswith("__"):
            monkeypatch.setattr(right, name, method)


def compile_again(monkeypatch: pytest.MonkeyPatch, *hosts: ModuleType) -> None:
    """Have modules that import `compile_kernel` compile each kernel: cached ones have other sources."""

    def compile_kernel(kernel: Any, arguments: Any, *, key: Any, target: Any) -> Any:
        return toolkit.compiled(kernel, arguments, target.arch, "")

    for host in hosts:
        monkeypatch.setattr(host, "compile_kernel", compile_kernel)
