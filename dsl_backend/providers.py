# SPDX-License-Identifier: Apache-2.0
"""Providers: implementations of an operator that `dsl-backend bench` times and `dsl-backend judge` checks.

    from dsl_backend.providers import provider

    @provider("softmax", name="mine")
    def mine(problem, inputs):
        def run(layer):
            tensors = inputs.layers[layer]
            return torch.softmax(tensors.x, -1, out=tensors.out)
        return run

A provider is in a file (`bench --with FILE`), in a module that an entry point of the group `dsl_backend.providers`
names, or in one of the benchmarks' own modules. docs/providers.md has the semantics of each operator.
"""

import contextlib
import hashlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, TypeVar

import torch

from dsl_backend import __version__

GROUP = "dsl_backend.providers"
# This package's distribution. A checkout may run without it, so that the version is the package's own.
OURS = "dsl-backend"
# The checkout, or the folder of installed packages.
ROOT = pathlib.Path(__file__).resolve().parents[1]
Run = Callable[[int], Any]


@dataclass(frozen=True)
class Launch:
    """A prepared provider.

    Attributes:
        run: launches on layer i of the inputs and returns the result. It must not copy between host and device.
        view: converts the result of `run` to the operator's output shape. Only the check uses it; it is never timed.
    """

    run: Callable[[int], torch.Tensor]
    view: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda result: result)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest accepted errors, relative to the norm of the exact result.

    Attributes:
        total: for all compared rows together.
        row: for the worst row alone, so that one wrong row among thousands is detected.
    """

    total: float
    row: float


def nothing(problem: Any) -> Sequence[str]:
    return ()


def limits_of(problem: Any) -> Limits:
    """The limits of the operator."""
    limits: Limits = problem.limits
    return limits


def no_details() -> Sequence[str]:
    return ()


def with_version(package: str) -> str:
    """A distribution and its version."""
    try:
        return f"{package} {__version__ if package == OURS else metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package}, not installed"


def hashed(path: pathlib.Path) -> str:
    """A file and the start of its SHA-256; its path below `ROOT` where it is there, else its name alone."""
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    try:
        return f"{shown} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return f"{shown}, not found"


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An implementation of an operator: one column of the report.

    Attributes:
        operator: its name in `dsl-backend bench`.
        make: from (problem, inputs) to a `Launch` or a function of the layer's index; plans, allocates and compiles.
        objections: why it cannot run a problem on this machine; empty if it can.
        limits: the largest errors that are accepted from its arithmetic; by default the operator's.
        default: whether it runs if the user names no providers.
        package: the distribution that it runs, whose version the report shows.
        details: what else the report shows of what it runs: a library's version, a module of the distribution.
        code: files with its kernel, if it is not the distribution's; the report shows their hashes.
        file: where it was loaded from, if from a file of the user.
    """

    operator: str
    name: str
    make: Callable[[Any, Any], Launch | Run]
    objections: Callable[[Any], Sequence[str]] = nothing
    limits: Callable[[Any], Limits] = limits_of
    default: bool = True
    package: str | None = None
    details: Callable[[], Sequence[str]] = no_details
    code: Sequence[pathlib.Path] = ()
    file: pathlib.Path | None = None

    def prepare(self, problem: Any, inputs: Any) -> Launch:
        made = self.make(problem, inputs)
        return made if isinstance(made, Launch) else Launch(made)

    @property
    def source(self) -> str:
        """What it is: a distribution with its version, details, and files with the start of their SHA-256."""
        package = [] if self.package is None else [with_version(self.package)]
        files = [hashed(path) for path in (*([] if self.file is None else [self.file]), *self.code)]
        return ", ".join((*package, *self.details(), *files)) or "unknown"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A process that is to run a user's file loads it again: its module has no name to import."""
        if self.file is None:
            return (again, (vars(self),))
        return (from_file, (self.file, self.operator, self.name))


def again(fields: dict[str, Any]) -> Provider:
    return Provider(**fields)


Made = TypeVar("Made", bound=Callable[[Any, Any], Any])
# Where `provider` puts what it makes: the list of modules that are imported once, or that of the file being loaded.
COLLECTING: list[list[Provider]] = [[]]


def provider(
    *operators: str,
    name: str,
    objections: Callable[[Any], Sequence[str]] = nothing,
    limits: Callable[[Any], Limits] = limits_of,
    default: bool = True,
    package: str | None = None,
    details: Callable[[], Sequence[str]] = no_details,
    code: Sequence[str | pathlib.Path] = (),
) -> Callable[[Made], Made]:
    """Makes a function of (problem, inputs) a provider of some operators; returns the function.

    The function may plan, allocate and compile. It returns a function of the index of a layer, which computes the
    layer's output and returns it, or a `Launch`. The arguments are those of `Provider`; relative paths of `code` begin
    at the folder of the function's own file.
    """

    def register(make: Made) -> Made:
        files = tuple(folder_of(make) / path for path in code)
        COLLECTING[-1].extend(
            Provider(
                operator=operator,
                name=name,
                make=make,
                objections=objections,
                limits=limits,
                default=default,
                package=package,
                details=details,
                code=files,
            )
            for operator in operators
        )
        return make

    return register


def folder_of(function: Callable[..., Any]) -> pathlib.Path:
    """Where the file is that defines a function, or the function of a `partial`."""
    return pathlib.Path(inspect.getfile(getattr(function, "func", function))).resolve().parent


@contextlib.contextmanager
def collecting() -> Iterator[list[Provider]]:
    """Inside, providers go to the list that this gives."""
    COLLECTING.append([])
    try:
        yield COLLECTING[-1]
    finally:
        COLLECTING.pop()


def of(operator: str) -> list[Provider]:
    """The providers of an operator from modules that were imported, in the order of their definitions."""
    return [one for one in COLLECTING[0] if one.operator == operator]


def unavailable(name: str, operator: str, error: BaseException) -> Provider:
    """A column that says why a provider is not there."""
    reason = f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Provider(operator=operator, name=name, make=refused, objections=Always(reason))


@dataclass(frozen=True)
class Always:
    """The same objection to every problem."""

    reason: str

    def __call__(self, problem: Any) -> Sequence[str]:
        return (self.reason,)


def refused(problem: Any, inputs: Any) -> Run:
    raise RuntimeError("this provider was not imported")


def load(path: pathlib.Path) -> list[Provider]:
    """The providers that a file defines. Raises what the file raises."""
    path = path.resolve()
    # Two files of the same name are two modules.
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and Triton look a function's module up.
    sys.modules[name] = module
    with collecting() as found:
        spec.loader.exec_module(module)
    return [replace(one, file=path) for one in found]


def from_file(path: pathlib.Path, operator: str, name: str) -> Provider:
    """One of a file's providers."""
    (found,) = (one for one in load(path) if (one.operator, one.name) == (operator, name))
    return found


def of_file(path: pathlib.Path, operator: str) -> list[Provider]:
    """A file's providers of an operator; one column that says why if the file cannot be imported.

    Raises:
        OSError: there is no such file.
    """
    path.open().close()
    try:
        return [one for one in load(path) if one.operator == operator]
    except Exception as error:  # a file of the user may raise anything
        return [unavailable(path.stem, operator, error)]


def installed(operator: str) -> list[Provider]:
    """The providers of an operator that other distributions bring, as entry points that name a module."""
    found: list[Provider] = []
    for point in metadata.entry_points(group=GROUP):
        try:
            with collecting() as made:
                point.load()
        except Exception as error:  # another distribution may raise anything
            found.append(unavailable(point.name, operator, error))
            continue
        version = point.dist.name if point.dist is not None else None
        BROUGHT.setdefault(point.value, [replace(one, package=one.package or version) for one in made])
        found += [one for one in BROUGHT[point.value] if one.operator == operator]
    return found


# The value of an entry point -> its providers, since a module is run only once.
BROUGHT: dict[str, list[Provider]] = {}
