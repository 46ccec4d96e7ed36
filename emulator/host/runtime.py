# SPDX-License-Identifier: Apache-2.0
"""The Python end of runtime.c: modules and kernels by handle, and launches on their way to the device.

One run-time library serves a process, because the engines of compiled functions hold its addresses for good. Which
device a launch goes to is decided when it is launched.
"""

import atexit
import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from emulator.errors import HostError, Unsupported
from emulator.host import build, entry, tensor_map
from emulator.host.chips import chip
from emulator.host.entry import Declared

UNKNOWN_ERROR = 999

# cudaLaunchAttributeID of driver_types.h.
COOPERATIVE, CLUSTER, PROGRAMMATIC, PREFERRED_CLUSTER = 2, 4, 6, 11
ATTRIBUTE_NAMES = {
    1: "access policy window",
    3: "synchronization policy",
    5: "cluster scheduling policy",
    7: "programmatic event",
    8: "priority",
    9: "memory synchronization domain map",
    10: "memory synchronization domain",
    12: "launch completion event",
    13: "device-updatable kernel node",
    14: "preferred shared memory carveout",
}
# cudaFuncAttribute of driver_types.h.
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14
# CUfunction_attribute of cuda.h.
SHARED_SIZE = 1


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    """CUDA's launch configuration."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


class Tiled(ctypes.Structure):
    """What runtime.c hands on of a call of cuTensorMapEncodeTiled."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_uint64)),
        ("strides", ctypes.POINTER(ctypes.c_uint64)),
        ("box", ctypes.POINTER(ctypes.c_uint32)),
        ("element_strides", ctypes.POINTER(ctypes.c_uint32)),
        ("type", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("interleave", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("promotion", ctypes.c_int),
        ("fill", ctypes.c_int),
    )


class Callback(NamedTuple):
    """An entry of the table: the method of `Runtime` that answers, and its arguments in C."""

    name: str
    arguments: tuple[Any, ...]


POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int
OUT_POINTER, OUT_INTEGER = ctypes.POINTER(POINTER), ctypes.POINTER(INTEGER)
CALLBACKS = (
    Callback("load", (OUT_POINTER, POINTER)),
    Callback("kernel", (OUT_POINTER, POINTER, ctypes.c_char_p)),
    Callback("device_attribute", (OUT_INTEGER, INTEGER)),
    Callback("kernel_attribute", (OUT_INTEGER, INTEGER, POINTER)),
    Callback("set_kernel_attribute", (POINTER, INTEGER, INTEGER)),
    Callback("occupancy", (OUT_INTEGER, POINTER, INTEGER, ctypes.c_size_t)),
    Callback("launch", (ctypes.POINTER(Config), POINTER, ctypes.POINTER(POINTER))),
    Callback("encode_tiled", (POINTER, ctypes.POINTER(Tiled))),
    Callback("failed", (INTEGER,)),
)


@dataclass(frozen=True)
class Module:
    """A compiled module: what the host code loads as a binary."""

    name: str
    ptx: str = field(repr=False)

    @functools.cached_property
    def arch(self) -> str:
        return entry.target(self.ptx)

    @functools.cached_property
    def entries(self) -> dict[str, tuple[Declared, ...]]:
        return entry.entries(self.ptx)

    @functools.cached_property
    def static_shared_bytes(self) -> int:
        return entry.static_shared_bytes(self.ptx)


@dataclass
class Kernel:
    """An entry of a module, and what the host code has set for it."""

    module: Module
    name: str
    max_dynamic_shared: int = 48 * 1024
    non_portable_cluster: bool = False


@dataclass(frozen=True)
class Request:
    """A launch as the host code asked for it.

    Attributes:
        attributes: words of the value, by `cudaLaunchAttributeID`.
        arguments: bytes of each parameter.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    arguments: tuple[bytes, ...]


class Target(Protocol):
    """Where launches go: a device."""

    arch: str
    sms: int

    def launch(self, request: Request) -> None: ...


class Runtime:
    """The library that compiled host code calls.

    Attributes:
        path: of the library, for engines to link.
        target: the device that is active, if any.
        loading: the module whose host code is running: what it loads is that.
        pending: raised while host code ran, which can pass on no more than a number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target: Target | None = None
        self.loading: Module | None = None
        self.pending: BaseException | None = None
        self._modules: dict[int, Module] = {}
        self._kernels: dict[int, Kernel] = {}
        self._handles = itertools.count(1)
        self._library = ctypes.CDLL(str(path))
        functions = []
        for callback in CALLBACKS:
            kind = ctypes.CFUNCTYPE(INTEGER, *callback.arguments)
            functions.append(kind(self._guarded(getattr(self, f"_{callback.name}"))))
        # C holds their addresses: they live as long as this does.
        self._functions = functions
        table = (POINTER * len(functions))(*(ctypes.cast(function, POINTER) for function in functions))
        self._library.emulator_install(table)
        atexit.register(self._library.emulator_remove)

    def exports(self, name: str) -> bool:
        """Whether host code that calls a function of this name finds it here."""
        return hasattr(self._library, name)

    def _guarded(self, answer: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                answer(*arguments)
            except BaseException as error:  # whatever it is, C cannot carry it
                self.pending = error
                if self.target is None:
                    warnings.warn(str(error), RuntimeWarning, stacklevel=2)
                return UNKNOWN_ERROR
            return 0

        return call

    def _active(self) -> Target:
        if self.target is None:
            raise HostError("a function that was compiled for the emulator was called outside of emulator.device(...)")
        return self.target

    def _load(self, library: Any, image: int) -> None:
        if self.loading is None:
            raise HostError(
                "host code loads a module whose PTX is not known: call compiled functions themselves, "
                "inside emulator.device(...)"
            )
        handle = next(self._handles)
        self._modules[handle] = self.loading
        library[0] = handle

    def _kernel(self, kernel: Any, library: int, name: bytes) -> None:
        module = self._modules[library]
        if name.decode() not in module.entries:
            raise HostError(
                f"the PTX of {module.name} has no entry {name.decode()}; it has {', '.join(module.entries)}"
            )
        handle = next(self._handles)
        self._kernels[handle] = Kernel(module, name.decode())
        kernel[0] = handle

    def _device_attribute(self, value: Any, attribute: int) -> None:
        target = self._active()
        known = chip(target.arch).attributes(target.sms)
        if attribute not in known:
            raise Unsupported(f"host code asks for device attribute {attribute} (cudaDeviceAttr)")
        value[0] = known[attribute]

    def _kernel_attribute(self, value: Any, attribute: int, kernel: int) -> None:
        if attribute != SHARED_SIZE:
            raise Unsupported(f"host code asks for kernel attribute {attribute} (CUfunction_attribute)")
        value[0] = self._kernels[kernel].module.static_shared_bytes

    def _set_kernel_attribute(self, kernel: int, attribute: int, value: int) -> None:
        if attribute == MAX_DYNAMIC_SHARED:
            self._kernels[kernel].max_dynamic_shared = value
        elif attribute == NON_PORTABLE_CLUSTER:
            self._kernels[kernel].non_portable_cluster = bool(value)
        else:
            raise Unsupported(f"host code sets kernel attribute {attribute} (cudaFuncAttribute)")

    def _occupancy(self, blocks: Any, kernel: int, block_threads: int, shared_bytes: int) -> None:
        raise Unsupported("host code asks for the occupancy of a kernel, which the emulator does not know")

    def _encode_tiled(self, to: int, asked: Any) -> None:
        """Write the tensor map that host code asks for, as CUtensorMap has it."""
        tiled = asked[0]
        rank = tiled.rank
        if not 1 <= rank <= tensor_map.MAX_RANK:
            raise HostError(f"a tensor map of rank {rank}: 1 to {tensor_map.MAX_RANK} are possible")
        made = tensor_map.tiled(
            address=tiled.address or 0,
            dims=tuple(tiled.dims[:rank]),
            strides=tuple(tiled.strides[: rank - 1]) if rank > 1 else (),
            box=tuple(tiled.box[:rank]),
            element_strides=tuple(tiled.element_strides[:rank]),
            codes=tensor_map.Codes(tiled.type, tiled.interleave, tiled.swizzle, tiled.promotion, tiled.fill),
        )
        ctypes.memmove(to, tensor_map.encode(made), tensor_map.BYTES)

    def _failed(self, error: int) -> None:
        """Host code asserts that a call of CUDA succeeded, and it did not; the first reason is kept."""
        raise self.pending or HostError(f"host code asserts the success of a call that gave CUDA's error {error}")

    def _launch(self, config: Any, kernel: int, arguments: Any) -> None:
        target = self._active()
        found, asked = self._kernels[kernel], config[0]
        declared = found.module.entries[found.name]
        attributes = (asked.attributes[index] for index in range(asked.attribute_count))
        target.launch(
            Request(
                kernel=found,
                grid=tuple(asked.grid),
                block=tuple(asked.block),
                shared_bytes=asked.shared_bytes,
                stream=asked.stream or 0,
                attributes={attribute.id: tuple(attribute.value) for attribute in attributes},
                arguments=tuple(ctypes.string_at(arguments[i], part.size) for i, part in enumerate(declared)),
            )
        )


@functools.cache
def runtime() -> Runtime:
    """The run-time library of this process."""
    return Runtime(build.library())
