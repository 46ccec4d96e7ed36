# SPDX-License-Identifier: Apache-2.0
"""From a CuTe DSL kernel object to a function: compiled once for all processes of a user, then read from disk.

A kernel that launches with `min_blocks_per_mp` above one names its `preferred_smem_carveout` too: otherwise CuTe DSL
asks the driver for the chip's shared memory while it traces, and there may be none.
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

# Why a kernel is not kept, where nothing is wrong with the folder.
EDITED = "sources of kernels were changed while this process runs"
HERE_ALONE = "their host code is for this very processor"

# (digest, the libraries that it was linked with) -> function. Never emptied: a captured graph may hold what is in it.
_functions: dict[tuple[str, str], Function] = {}
# CuTe DSL compiles one thing at a time.
_lock = threading.RLock()
# Of a thread that wants to know what would be compiled: `identities`, a list.
_asked = threading.local()


def compile_kernel(kernel: Any, fake_args: Sequence[Any], *, key: Any, target: Target, options: str = "") -> Function:
    """The function of a kernel: from memory, from disk, or compiled, in this order.

    Args:
        kernel: an object whose `__call__` is a `cute.jit` function.
        fake_args: of that call: `make_fake_compact_tensor(...)` and the like, and
            `make_fake_stream(use_tvm_ffi_env_stream=True)` for the stream, which callers then leave out.
        key: a frozen dataclass with all that the kernel object's static choices depend on: its config, dtypes, the
            number of SMs where that matters.
        target: whose architecture is compiled for; it need not be at hand.
        options: more of CuTe DSL's compile options, such as `--opt-level 2`.

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
    place = (identity.digest, toolkit.libraries())
    found = _functions.get(place)
    if found is not None:
        return found
    with _lock:
        if place not in _functions:
            _functions[place] = made(identity, lambda: toolkit.compiled(kernel, fake_args, target.arch, options))
        return _functions[place]


def not_compiled(*_: Any) -> Any:
    """The function of a kernel whose identity alone was asked for."""
    raise AssertionError("this kernel was looked for and not compiled")


def identities(build: Callable[[], Any]) -> list[Identity]:
    """What a function that calls `compile_kernel` would have compiled; nothing is compiled, and nothing loaded."""
    found: list[Identity] = []
    _asked.identities = found
    try:
        build()
    finally:
        del _asked.identities
    return found


def forget() -> None:
    """Empty the memory, as a new process finds it; functions that somebody holds stay usable."""
    with _lock:
        _functions.clear()


def made(identity: Identity, compile_it: Callable[[], Any]) -> Function:
    """The function of a kernel that is not in memory."""
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
    """The function of an entry that is whole; None where there is none."""
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
    """Compile, keep it where there is a place, and load what was exported.

    Args:
        started: when the function was asked for, of `time.perf_counter`.
        unkept: why there is no place.
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
    """A function that was compiled here."""
    seconds = time.perf_counter() - started
    compiles.record(str(identity), identity.digest, Source.COMPILER, seconds, size_bytes, unkept)
