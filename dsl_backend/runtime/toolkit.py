# SPDX-License-Identifier: Apache-2.0
"""The interface to CuTe DSL: the only module of the run-time that imports cutlass.

A kernel is compiled without a GPU, with fake tensors, into a TVM-FFI function. The function is exported as an object
file with host code and cubin, and callers always get the function that was loaded from such a file: the process that
compiles it runs the same code as all later ones.
"""

import contextlib
import dataclasses
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.source_lines import looked_up_once

# The exported function's name in every object file.
SYMBOL = "kernel"
WHEELS = "nvidia_cutlass_dsl*.dist-info"
FFI = "apache-tvm-ffi"
PREFIX = "CUTE_DSL_"
# CuTe DSL's variables for paths and logging, which do not change the generated code.
NO_CODE = (
    *("LIBS", "ARCH", "LOG_", "CACHE_DIR", "DUMP_DIR", "KEEP", "PRINT_", "NO_CACHE", "DISABLE_FILE_CACHING"),
    *("JIT_CACHE_MAX_ELEMS", "JIT_TIME_PROFILING", "SHOW_STACKTRACE", "FILTER_STACKTRACE", "WARNINGS", "REMARKS"),
)

# CuTe DSL generates host code for the processor that it runs on. An entry must run on other processors too: a machine
# may fill the cache for another one, and many may share a home folder. (LLVM's names; host code is a few checks and
# a launch, which no newer instruction makes faster.)
BASELINES = {"x86_64": "x86-64-v2", "aarch64": "generic"}
# Without a list of features, a function gets all features of this processor.
FEATURES = {"x86_64": '["+sse4.2", "+popcnt", "+cx16"]', "aarch64": '["+neon"]'}


@cache
def missing() -> tuple[str, ...]:
    """Why CuTe DSL cannot be used, as objections of a dispatch table; empty if it can."""
    wheels = (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", FFI))
    return tuple(
        f"{wheel} is not installed: CuTe DSL kernels need `pip install {wheel}`"
        for module, wheel in wheels
        if importlib.util.find_spec(module) is None
    )


def require() -> None:
    """Raise InvalidInput if CuTe DSL or TVM-FFI is not installed."""
    if missing():
        raise InvalidInput("; ".join(missing()))


@cache
def versions() -> tuple[str, ...]:
    """Name and version of every wheel that makes or runs the code; sorted.

    Only the names of the metadata folders are read: an environment has hundreds of packages.
    """
    found = {path.name.removesuffix(".dist-info") for entry in sys.path for path in Path(entry or ".").glob(WHEELS)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.add(f"{FFI}-{metadata.version(FFI)}")
    return tuple(sorted(found))


def settings() -> dict[str, str]:
    """The variables of CuTe DSL that may change the generated code, and the processor of the host code."""
    chosen = {
        name: value
        for name, value in envs.starting_with(PREFIX).items()
        if not name.removeprefix(PREFIX).startswith(NO_CODE)
    }
    return {"host": BASELINES.get(platform.machine(), platform.machine()), **chosen}


@cache
def _dsl() -> Any:
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl()


def libraries() -> str:
    """The libraries that host code is linked with; they are a part of a function's identity in memory."""
    return str(_dsl().envar.shared_libs)


def keeps_files() -> bool:
    """Whether functions may come from files: not with CUTE_DSL_DISABLE_FILE_CACHING, and not on the emulator."""
    return not _dsl().envar.disable_file_caching


def converted(values: tuple[Any, ...]) -> Any:
    """A tuple as compiled functions receive it, for several launches: TVM-FFI converts a tuple in every call.

    It keeps the memory of its tensors. A tuple of 12 with three tensors takes 0.6 us less in a launch (on a CPU).
    """
    import tvm_ffi

    return tvm_ffi.convert(values)


def compiled(kernel: Any, arguments: Sequence[Any], arch: str, options: str) -> Any:
    """`kernel` compiled for `arch`; it can be called only in a process that has such a device."""
    from cutlass import cute
    from cutlass._mlir_helpers import op

    # Looked up at each call: vLLM replaces it to detect compilations while requests are served.
    with looked_up_once(op):
        return cute.compile(kernel, *arguments, options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip())


def made_portable(function: Any) -> bool:
    """Make a function's host code run on any processor of this architecture; False if that is not supported."""
    from cutlass._mlir import ir

    machine, module = platform.machine(), getattr(function, "ir_module", None)
    if machine not in BASELINES or module is None:
        return False

    def aim(operation: Any) -> Any:
        if operation.name == "llvm.func":
            operation.attributes["target_cpu"] = ir.StringAttr.get(BASELINES[machine])
            operation.attributes["target_features"] = ir.Attribute.parse(f"#llvm.target_features<{FEATURES[machine]}>")
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(aim)
    return True


def exported(function: Any) -> bytes:
    """The object file of a compiled function."""
    # In memory: the folder of temporary files may be full or missing.
    descriptor = os.memfd_create("exported")
    try:
        path = f"/proc/self/fd/{descriptor}"
        function.export_to_c(path, function_name=SYMBOL)
        return Path(path).read_bytes()
    finally:
        os.close(descriptor)


def loaded(descriptor: int) -> Callable[..., Any]:
    """The function of an open object file. Raises many types of CuTe DSL's errors if it is not an object file."""
    from cutlass import cute

    # By descriptor, so that the file that was checked is the one that is loaded.
    module = cute.runtime.load_module(f"/proc/self/fd/{descriptor}", enable_tvm_ffi=True)
    return module[SYMBOL]


def loaded_from(data: bytes) -> Callable[..., Any]:
    """The function of an object file in memory."""
    descriptor = os.memfd_create("kernel")
    try:
        os.write(descriptor, data)
        return loaded(descriptor)
    finally:
        os.close(descriptor)


def described(arguments: Sequence[Any]) -> tuple[str, ...]:
    """One line for each argument of a compilation: all facts that code depends on, without addresses.

    Sizes that are the same symbol have the same number, because code relies on their equality.
    """
    symbols: list[Any] = []
    return tuple(_described(argument, symbols) for argument in arguments)


def _described(value: Any, symbols: list[Any]) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(part, symbols) for part in value)})"
    if dataclasses.is_dataclass(value):
        fields = (f"{one.name}={_described(getattr(value, one.name), symbols)}" for one in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(fields)})"
    text = repr(value)
    # Python's default repr holds an address; a kernel's key must distinguish such arguments.
    parts = [type(value).__qualname__ if " at 0x" in text else text]
    # The repr leaves out alignments and streams.
    parts += [
        f"{name.lstrip('_')}={fact}"
        for name, fact in sorted(getattr(value, "__dict__", {}).items())
        if isinstance(fact, (bool, int, float, str))
    ]
    numbers = [_number(symbol, symbols) for symbol in _symbols((value, getattr(value, "shape", ()), _stride(value)))]
    return " ".join([*parts, *([f"symbols={numbers}"] if numbers else [])])


def _stride(value: Any) -> Any:
    # An attribute of a tensor; on other objects it may be a method.
    found = getattr(value, "stride", ())
    return found if isinstance(found, tuple) else ()


def _symbols(value: Any) -> Iterator[Any]:
    """The symbolic sizes in nested tuples, in order."""
    if isinstance(value, tuple):
        for part in value:
            yield from _symbols(part)
    elif hasattr(value, "divisibility"):
        yield value


def _number(symbol: Any, symbols: list[Any]) -> int:
    """Its index in the list, to which a new symbol is added. The list keeps it alive: its address stays its own."""
    for index, known in enumerate(symbols):
        if known is symbol:
            return index
    symbols.append(symbol)
    return len(symbols) - 1
