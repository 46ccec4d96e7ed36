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

# (digest, the libraries that it was linked with) -> function. Never emptied: a captured graph may hold what is in it.
_functions: dict[tuple[str, str], Function] = {}
# CuTe DSL compiles one thing at a time.
_lock = threading.RLock()


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
    place = (identity.digest, toolkit.libraries())
    found = _functions.get(place)
    if found is not None:
        return found
    with _lock:
        if place not in _functions:
            _functions[place] = made(identity, lambda: toolkit.compiled(kernel, fake_args, target.arch, options))
        return _functions[place]


def forget() -> None:
    """Empty the memory, as a new process finds it; functions that somebody holds stay usable."""
    with _lock:
        _functions.clear()


def made(identity: Identity, compile_it: Callable[[], Any]) -> Function:
    """The function of a kernel that is not in memory."""
    started = time.perf_counter()
    if not toolkit.keeps_files():
        function: Function = compile_it()
        compiles.record(str(identity), identity.digest, Source.COMPILER, time.perf_counter() - started, 0)
        return function
    disk = cache.usable()
    if not identity.reusable:
        warning_once("sources of kernels were changed while this process runs: what it compiles is not kept on disk")
        disk = None
    if disk is None:
        return compiled(identity, compile_it, None, started)
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


def compiled(identity: Identity, compile_it: Callable[[], Any], disk: DiskCache | None, started: float) -> Function:
    """Compile, keep it where there is a place, and load what was exported."""
    began = time.perf_counter()
    function = compile_it()
    portable = toolkit.made_portable(function)
    data = toolkit.exported(function)
    compile_s = time.perf_counter() - began
    if disk is not None and portable:
        disk.store(identity, data, compile_s)
    elif disk is not None:
        warning_once("compiled kernels are not kept on disk: their host code is for this very processor")
    loaded = toolkit.loaded_from(data)
    compiles.record(str(identity), identity.digest, Source.COMPILER, time.perf_counter() - started, len(data))
    return loaded
