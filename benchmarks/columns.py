# SPDX-License-Identifier: Apache-2.0
"""The columns of an operator's table: this package's kernels, the benchmarks' peers, and installed providers."""

import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from dsl_backend import providers
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.providers import Provider
from dsl_backend.runtime import target as targets

OURS = "dsl"


def columns(
    operator: str, make: Callable[..., Any], objections: Callable[..., Sequence[str]], kernels: Sequence[str]
) -> list[Provider]:
    """Every provider of an operator. This package's are first, one for each name in `kernels`, or the default one.

    Args:
        make, objections: of this package's kernels; they accept `kernel`, a name from the dispatch table or None.
    """
    names: Sequence[str | None] = kernels or [None]
    ours = [
        Provider(
            operator=operator,
            name=OURS if kernel is None else f"{OURS}:{kernel}",
            make=partial(make, kernel=kernel),
            objections=partial(objections, kernel=kernel),
            package=providers.OURS,
        )
        for kernel in names
    ]
    return [*ours, *providers.of(operator), *providers.installed(operator)]


def own_triton(
    operator: str,
    make: Callable[..., Any],
    objections: Callable[..., Sequence[str]],
    *files: str,
    default: bool = True,
) -> None:
    """Makes this package's Triton kernel a column of its own.

    Args:
        make, objections: of a problem and a kernel's name, as in `columns`.
        files: of the kernel, by their paths in the package.
    """
    folder = pathlib.Path(providers.__file__).resolve().parent
    providers.provider(
        operator,
        name="Triton",
        objections=partial(objections, kernel="triton"),
        default=default,
        package=providers.OURS,
        code=[folder / file for file in files],
    )(partial(make, kernel="triton"))


def reasons(choose: Callable[[], object]) -> list[str]:
    """Why a dispatch table has no kernel; empty if `choose` returns one."""
    try:
        choose()
    except (InvalidInput, Unsupported) as error:
        return [" ".join(str(error).split())]
    return []


def needs_gpu(problem: object = None) -> list[str]:
    return [] if torch.cuda.is_available() else ["needs a CUDA device"]


def missing(module: str, package: str | None = None) -> list[str]:
    """Why a package's kernels do not run here.

    Args:
        package: the distribution of the module, if it has another name.
    """
    absent = [] if importlib.util.find_spec(module) else [f"{package or module} is not installed"]
    return absent + needs_gpu()


def of_capability(majors: Sequence[int], what: str = "is for") -> list[str]:
    """Why kernels for GPUs of these major compute capabilities do not run here.

    Args:
        what: what they do for those GPUs alone.
    """
    capability = targets.detect().capability
    if capability is None or capability[0] in majors:
        return []
    return [f"{what} SM{'x and SM'.join(map(str, majors))}x, this is SM{capability[0]}{capability[1]}"]


@cache
def broken(module: str) -> tuple[str, ...]:
    """Why an installed module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # another distribution may raise anything
        return (f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}",)
    return ()


def lacks(module: str, name: str) -> list[str]:
    """Why a module of an installed package has not what a column calls."""
    found = list(broken(module))
    return found or ([] if hasattr(importlib.import_module(module), name) else [f"this {module} has no {name}"])


def missing_tilelang() -> list[str]:
    return missing("tilelang") or list(broken("tilelang"))


def missing_gluon() -> list[str]:
    if found := missing("triton"):
        return found
    there = importlib.util.find_spec("triton.experimental.gluon")
    return [] if there else ["this Triton has no Gluon"]


def missing_cutile() -> list[str]:
    """`cuda` is a namespace that cuda-python has too; a folder of that name with an `__init__.py` hides the others."""
    there = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.tile")
    found = ([] if there else ["cuda-tile is not installed"]) + needs_gpu()
    return found or list(broken("cuda.tile"))
