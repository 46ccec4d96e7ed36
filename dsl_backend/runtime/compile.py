# SPDX-License-Identifier: Apache-2.0
"""Compiles a CuTe DSL kernel object into a function, once for all processes of a user; later ones read it from disk.

A kernel whose launch has `min_blocks_per_mp` above one must also set `preferred_smem_carveout`. Otherwise CuTe DSL asks
the driver for the GPU's shared memory while it traces, and there may be no GPU.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsl_backend.log import warning_once
from dsl_backend.runtime import cache, toolkit
from dsl_backend.runtime.cache import DiskCache
from dsl_backend.runtime.compiles import Source, compiles
from dsl_backend.runtime.key import Identity, identify
from dsl_backend.runtime.target import Target

Function = Callable[..., Any]

# Reasons why a kernel is not kept although the folder can be used.
EDITED = "sources of kernels were changed while this process runs"
HERE_ALONE = "their host code is for this very processor"

# (digest, libraries that it was linked with) -> function. Never emptied: captured graphs may use the functions.
_functions: dict[tuple[str, str], Function] = {}
# CuTe DSL compiles one thing at a time.
_lock = threading.RLock()
# Set in a thread that only asks what would be compiled: `identities`, a list.
_asked = threading.local()


def compile_kernel(kernel: Any, fake_args: Sequence[Any], *, key: Any, target: Target, options: str = "") -> Function:
    """The function of a kernel: from memory, from disk, or compiled, in this order.

    Args:
        kernel: an object whose `__call__` is a `cute.jit` function.
        fake_args: of that call: `make_fake_compact_tensor(...)` and the like, and
            `make_fake_stream(use_tvm_ffi_env_stream=True)` for the stream, which callers then leave out.
        key: a frozen dataclass with all that the kernel object's static choices depend on: its config, dtypes, the
            number of SMs where that matters.
        target: its architecture is compiled for; the device need not be present.
        options: additional compile options of CuTe DSL, such as `--opt-level 2`.

    Returns:
        A function of positional arguments: tensors (torch's as they are) and numbers.

    Raises:
        InvalidInput: the key or the target is not accepted, or CuTe DSL is not installed.
        Exception: of CuTe DSL, where the kernel does not compile.
    """
    toolkit.require()
    identity = identify(kernel, fake_args, key=key, target=target, options=options)
    asked: list[Identity] | None = getattr(_asked, "identities", None)
    if asked is not None:
        asked.append(identity)
        return not_compiled
    slot = (identity.digest, toolkit.libraries())
    found = _functions.get(slot)
    if found is not None:
        return found
    with _lock:
        if slot not in _functions:
            _functions[slot] = made(identity, lambda: toolkit.compiled(kernel, fake_args, target.arch, options))
        return _functions[slot]


def not_compiled(*_: Any) -> Any:
    """Stands for the function of a kernel when only its identity was asked for."""
    raise AssertionError("this kernel was looked for and not compiled")


def identities(build: Callable[[], Any]) -> list[Identity]:
    """The identities that a function which calls `compile_kernel` would compile; nothing is compiled or loaded."""
    found: list[Identity] = []
    _asked.identities = found
    try:
        build()
    finally:
        del _asked.identities
    return found


def forget() -> None:
    """Forget the functions in memory; references to them stay usable."""
    with _lock:
        _functions.clear()


def made(identity: Identity, compile_it: Callable[[], Any]) -> Function:
    """The function of a kernel that is not in memory: from disk, or compiled."""
    started = time.perf_counter()
    if not toolkit.keeps_files():
        function: Function = compile_it()
        record(identity, started, 0, "CuTe DSL's own setting switches files off")
        return function
    disk = cache.usable()
    if not identity.reusable:
        warning_once(f"compiled kernels are not kept on disk: {EDITED}")
        return compiled(identity, compile_it, None, started, EDITED)
    if disk is None:
        return compiled(identity, compile_it, None, started, f"{cache.folder()} is not used")
    function_on_disk = from_disk(disk, identity, started)
    if function_on_disk is not None:
        return function_on_disk
    with disk.lock(identity):
        # Another process may have made it in the meantime.
        function_on_disk = from_disk(disk, identity, started)
        if function_on_disk is not None:
            return function_on_disk
        cache.stats.misses += 1
        return compiled(identity, compile_it, disk, started)


def from_disk(disk: DiskCache, identity: Identity, started: float) -> Function | None:
    """The function of a valid entry; None if there is none."""
    with disk.opened(identity) as found:
        if found is None:
            return None
        descriptor, entry = found
        try:
            function = toolkit.loaded(descriptor)
        except Exception as error:  # CuTe DSL has many, and all of them mean a miss
            cache.reject(entry.path, f"it does not load: {type(error).__name__}: {error}")
            return None
    cache.stats.hits += 1
    seconds = time.perf_counter() - started
    compiles.record(str(identity), identity.digest, Source.DISK, seconds, entry.size_bytes)
    return function


def compiled(
    identity: Identity, compile_it: Callable[[], Any], disk: DiskCache | None, started: float, unkept: str | None = None
) -> Function:
    """Compile, store the object file if possible, and load the function from it.

    Args:
        started: when the function was asked for, of `time.perf_counter`.
        unkept: why it cannot be stored.
    """
    began = time.perf_counter()
    function = compile_it()
    portable = toolkit.made_portable(function)
    data = toolkit.exported(function)
    if not portable:
        unkept = HERE_ALONE
        warning_once(f"compiled kernels are not kept on disk: {HERE_ALONE}")
    elif disk is not None:
        unkept = disk.store(identity, data, time.perf_counter() - began)
    loaded = toolkit.loaded_from(data)
    record(identity, started, len(data), unkept)
    return loaded


def record(identity: Identity, started: float, size_bytes: int, unkept: str | None) -> None:
    """Record a compilation of this process."""
    seconds = time.perf_counter() - started
    compiles.record(str(identity), identity.digest, Source.COMPILER, seconds, size_bytes, unkept)
