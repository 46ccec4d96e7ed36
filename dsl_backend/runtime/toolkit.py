# SPDX-License-Identifier: Apache-2.0
"""The seam to CuTe DSL: the only place of the run-time that imports cutlass.

A kernel is compiled without a GPU, with fake tensors, into a function of TVM-FFI. It is exported as an object file,
which holds host code and cubin, and what is called is always what was loaded from such a file: a first start runs the
same code as all others.
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

# The exported function's name in every object file.
SYMBOL = "kernel"
WHEELS = "nvidia_cutlass_dsl*.dist-info"
FFI = "apache-tvm-ffi"
PREFIX = "CUTE_DSL_"
# Of CuTe DSL's variables, those that say where things lie or what is told about them, and not what code is made.
NO_CODE = (
    *("LIBS", "ARCH", "LOG_", "CACHE_DIR", "DUMP_DIR", "KEEP", "PRINT_", "NO_CACHE", "DISABLE_FILE_CACHING"),
    *("JIT_CACHE_MAX_ELEMS", "JIT_TIME_PROFILING", "SHOW_STACKTRACE", "FILTER_STACKTRACE", "WARNINGS", "REMARKS"),
)

# CuTe DSL makes host code for the very processor that it runs on. What is kept must run on others: the machine that
# fills a cache need not be the one that serves, and many may share a home. (LLVM's names; host code is a few checks and
# a launch, which no newer instruction makes faster.)
BASELINES = {"x86_64": "x86-64-v2", "aarch64": "generic"}
# Without a list of its own a function gets all that this processor has.
FEATURES = {"x86_64": '["+sse4.2", "+popcnt", "+cx16"]', "aarch64": '["+neon"]'}


@cache
def missing() -> list[str]:
    """Why there is no CuTe DSL here, as an objection of a dispatch table; empty where there is."""
    wheels = (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", FFI))
    return [
        f"{wheel} is not installed: CuTe DSL kernels need `pip install {wheel}`"
        for module, wheel in wheels
        if importlib.util.find_spec(module) is None
    ]


def require() -> None:
    """Refuse to go on without CuTe DSL.

    Raises:
        InvalidInput: it or TVM-FFI is not installed.
    """
    if missing():
        raise InvalidInput("; ".join(missing()))


@cache
def versions() -> tuple[str, ...]:
    """Name and version of every wheel that makes or runs the code; sorted.

    The names of the folders are read and not their metadata: there are hundreds of packages beside them.
    """
    found = {path.name.removesuffix(".dist-info") for place in sys.path for path in Path(place or ".").glob(WHEELS)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.add(f"{FFI}-{metadata.version(FFI)}")
    return tuple(sorted(found))


def settings() -> dict[str, str]:
    """CuTe DSL's own variables that may change what code is made, and the processor that the host code is for."""
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
    """The libraries that host code is linked with: a function made with others is another function."""
    return str(_dsl().envar.shared_libs)


def keeps_files() -> bool:
    """Whether functions may come from files: CUTE_DSL_DISABLE_FILE_CACHING says no, and so does an emulator."""
    return not _dsl().envar.disable_file_caching


def compiled(kernel: Any, arguments: Sequence[Any], arch: str, options: str) -> Any:
    """`kernel` compiled for `arch`; callable in this process only where it has such a device."""
    from cutlass import cute

    # The name is looked up at each call: vLLM replaces it to see who compiles while requests are served.
    return cute.compile(kernel, *arguments, options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip())


def made_portable(function: Any) -> bool:
    """Let a compiled function be exported for any processor of this machine's kind; False where nobody knows how."""
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
    # In memory: a folder for temporary files may be full, or not be there.
    descriptor = os.memfd_create("exported")
    try:
        path = f"/proc/self/fd/{descriptor}"
        function.export_to_c(path, function_name=SYMBOL)
        return Path(path).read_bytes()
    finally:
        os.close(descriptor)


def loaded(descriptor: int) -> Callable[..., Any]:
    """The function of an open object file.

    Raises:
        Exception: of CuTe DSL, which has many, where it is none.
    """
    from cutlass import cute

    # By descriptor, so that what is loaded is the file that was looked at.
    module = cute.runtime.load_module(f"/proc/self/fd/{descriptor}", enable_tvm_ffi=True)
    return module[SYMBOL]


def loaded_from(data: bytes) -> Callable[..., Any]:
    """The function of an object file that is nowhere else."""
    descriptor = os.memfd_create("kernel")
    try:
        os.write(descriptor, data)
        return loaded(descriptor)
    finally:
        os.close(descriptor)


def described(arguments: Sequence[Any]) -> tuple[str, ...]:
    """One line for each argument of a compilation: all that code depends on, and no addresses.

    Sizes that are the same symbol carry the same number: code relies on them being equal.
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
    # Python's own repr holds an address; a kernel's key tells such arguments apart.
    parts = [type(value).__qualname__ if " at 0x" in text else text]
    # What is known of an alignment or of a stream is not in its repr.
    parts += [
        f"{name.lstrip('_')}={fact}"
        for name, fact in sorted(getattr(value, "__dict__", {}).items())
        if isinstance(fact, (bool, int, float, str))
    ]
    numbers = [_number(symbol, symbols) for symbol in _symbols((value, getattr(value, "shape", ()), _stride(value)))]
    return " ".join([*parts, *([f"symbols={numbers}"] if numbers else [])])


def _stride(value: Any) -> Any:
    # Of a tensor; elsewhere it may be a method.
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
    """Its place in the list, which grows with it; held there, or another could get its address."""
    for place, known in enumerate(symbols):
        if known is symbol:
            return place
    symbols.append(symbol)
    return len(symbols) - 1
