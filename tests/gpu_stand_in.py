# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there, for Triton: it compiles for the GPU's architecture, and launches into a stand-in for CUDA.

    with gpu(from_arch("sm_90a")) as stand_in:
        kernel[grid](tensor_on_the_cpu, ...)
    stand_in.compilations, stand_in.launches

All of Triton's host code runs as on a GPU: binding and specialization of arguments, compilation up to machine code,
loading, and the launcher, which packs the arguments. Only what CUDA's driver does is missing (stand_in_cuda.c): with
`emulate`, the emulator runs the PTX of each launch.

It takes a process of its own, in which Triton does not interpret: that is decided when kernels are defined.
"""

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target

SOURCE = Path(__file__).with_name("stand_in_cuda.c")
LIBRARY = "libcuda.so.1"
PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# Of the C compiler that Triton needs too.
COMPILER = shutil.which("gcc") or shutil.which("clang")

# Triton keeps what it compiled for each number of a device: every stand-in has one of its own.
_numbers = itertools.count()


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Tiled(ctypes.Structure):
    """What a tensor map is asked for, in the order of stand_in_cuda.c's structure."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("type", "rank", "swizzle", "promotion", "fill")),
        *((name, ctypes.POINTER(ctypes.c_uint64)) for name in ("sizes", "strides")),
        *((name, ctypes.POINTER(ctypes.c_uint32)) for name in ("box", "element_strides")),
    ]


OnEncode = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Tiled))
OnLaunch = ctypes.CFUNCTYPE(None, ctypes.POINTER(LaunchConfig), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))
ATTRIBUTE_BYTES = 72


@dataclass(frozen=True)
class Compilation:
    """A specialization of a kernel that was not in memory.

    Attributes:
        kernel: its name. key: Triton's, of its specialization.
    """

    kernel: str
    key: str


@dataclass(frozen=True)
class Launch:
    """What came to CUDA's driver.

    Attributes:
        kernel: the name of its entry.
        compiled: what Triton compiled it to.
        programmatic: the launch may begin before the one in front of it has ended.
    """

    kernel: str
    compiled: Any = field(repr=False)
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    programmatic: bool


@dataclass
class StandIn:
    """What was compiled and launched so far.

    Attributes:
        seconds: of every call of a kernel, its name, what it was compiled to, and how long the call took.
    """

    target: Target
    compilations: list[Compilation] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    calls: list[tuple[str, Any, float]] = field(default_factory=list)


@functools.cache
def library() -> ctypes.CDLL:
    """The stand-in for CUDA's driver, found from now on by all who ask for the driver's name."""
    from triton import knobs
    from triton.backends.nvidia import driver

    assert COMPILER is not None, "Triton needs a C compiler, and so does the stand-in for CUDA"
    folder = tempfile.mkdtemp(prefix="stand-in-cuda-")
    built = Path(folder, LIBRARY)
    include = [f"-I{path}" for path in driver.include_dirs]
    command = [COMPILER, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{LIBRARY}", *include, "-o", str(built), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    knobs.nvidia.libcuda_path = folder
    loaded = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    loaded.stand_in.argtypes = (OnLaunch, OnEncode, *[ctypes.c_int] * 4)
    return loaded


def driver_of(target: Target) -> Any:
    """Triton's driver for CUDA, without what it asks torch and the GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    assert target.capability is not None, "a CPU has nothing to compile for"
    major, minor = target.capability
    number = next(_numbers)

    class Driver(CudaDriver):
        def __init__(self) -> None:
            self.utils = CudaUtils()
            self.launcher_cls = CudaLauncher

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return number

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    return Driver()


def taken_for(target: Target) -> Any:
    """Within, the package takes the CPU for a GPU of the target."""
    return mock.patch.object(targets, "at_hand", return_value=target)


@contextmanager
def counting(target: Target) -> Iterator[list[Compilation]]:
    """Within, launches end where Triton would compile; yields what it would have compiled, each specialization once."""
    from triton import knobs
    from triton.runtime import driver

    found: dict[Compilation, None] = {}
    listed: list[Compilation] = []

    def asked(*, key: str, fn: Any, **_: Any) -> bool:
        one = Compilation(fn.name, key)
        if one not in found:
            found[one] = None
            listed.append(one)
        return True

    library()
    driver.set_active(driver_of(target))
    with taken_for(target), mock.patch.object(knobs.runtime, "jit_cache_hook", asked):
        yield listed


def tensors_in(argument: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument, which may be a tuple of tuples, or a descriptor that is made on the host."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(getattr(argument, "base", None), torch.Tensor):
        yield argument.base  # type: ignore[attr-defined]
    elif isinstance(argument, tuple):
        for one in argument:
            yield from tensors_in(one)


def emulator_launch(launch: Launch, parameters: Any, arguments: tuple[Any, ...]) -> Any:
    """A launch as the emulator takes it.

    Args:
        parameters: the addresses of what the launcher packed.
        arguments: of the kernel's call; it may touch the memory of their tensors.
    """
    from emulator.host import entry
    from emulator.host import launch as emulated

    ptx = launch.compiled.asm["ptx"]
    regions = []
    for i, tensor in enumerate(tensors_in(arguments)):
        storage = tensor.untyped_storage()
        dtype = str(tensor.dtype).removeprefix("torch.")
        regions.append(emulated.Region(f"tensor {i}", storage.data_ptr(), storage.nbytes(), dtype, tensor))
    return emulated.Launch(
        kernel=launch.kernel,
        ptx=ptx,
        arch=entry.target(ptx),
        grid=launch.grid,
        block=launch.block,
        shared_bytes=launch.shared_bytes,
        programmatic=launch.programmatic,
        parameters=tuple(
            emulated.Parameter(one.name, one.align, ctypes.string_at(parameters[i], one.size))
            for i, one in enumerate(entry.entries(ptx)[launch.kernel])
        ),
        regions=tuple(regions),
    )


def encode_tiled(to: int, asked: Any) -> bool:
    """Writes the tensor map that the launcher asks for; False if CUDA would refuse it."""
    from emulator.errors import EmulatorError
    from emulator.host import tensor_map

    tiled = asked.contents
    rank = tiled.rank
    codes = tensor_map.Codes(tiled.type, 0, tiled.swizzle, tiled.promotion, tiled.fill)
    sizes, strides = tuple(tiled.sizes[:rank]), tuple(tiled.strides[: rank - 1])
    try:
        made = tensor_map.tiled(
            tiled.address, sizes, strides, tuple(tiled.box[:rank]), tuple(tiled.element_strides[:rank]), codes
        )
    except EmulatorError:
        return False
    ctypes.memmove(to, tensor_map.encode(made), tensor_map.BYTES)
    return True


def is_tritons(finding: Any) -> bool:
    """Whether Triton's code generation answers for it, and not a kernel.

    Several warps may hold the same values, and store them to one place by one instruction. And 3.6.0 has no proxy fence
    between cp.async and the wgmma that reads what it copied; 3.8.0 and 3.9.0 have one.
    """
    from emulator.machine.findings import Kind

    other = finding.other
    is_replica = finding.kind is Kind.RACE and other is not None and other.line == finding.place.line
    return is_replica or finding.kind is Kind.PROXY


@contextmanager
def gpu(target: Target, *, emulate: bool = False) -> Iterator[StandIn]:
    """Within, Triton has a GPU of the target, on which tensors of the CPU lie.

    Args:
        emulate: run the launches; the target is one that the emulator has. Leaving raises if its checks found errors.
    """
    import triton
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    assert target.capability is not None
    machine = None
    if emulate:
        from emulator.machine import Machine

        machine = Machine(arch=target.arch, sms=target.sm_count, schedule="lazy", seed=0)
    made = StandIn(target)
    called: list[tuple[Any, tuple[Any, ...]]] = []
    scratch: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def on_launch(config: Any, function: int, parameters: Any) -> None:
        facts, (kernel, arguments) = config.contents, called[-1]
        attributes = [
            ctypes.c_int.from_address(facts.attributes + i * ATTRIBUTE_BYTES).value for i in range(facts.num_attributes)
        ]
        grid, block = tuple(facts.grid), tuple(facts.block)
        launch = Launch(kernel.name, kernel, grid, block, facts.shared_bytes, PROGRAMMATIC in attributes)
        made.launches.append(launch)
        if machine is not None:
            try:
                machine.launch(emulator_launch(launch, parameters, (*arguments, *scratch)))
            except BaseException as error:
                errors.append(error)

    def on_encode(to: int, asked: Any) -> int:
        return encode_tiled(to, asked)

    def allocate(size: int, align: int, stream: int | None) -> torch.Tensor:
        """What a launch writes tensor maps to that it makes itself."""
        room = torch.empty(size + align, dtype=torch.uint8)
        scratch[:] = [room[-room.data_ptr() % align :][:size]]
        return scratch[0]

    def compiled(*, key: str, fn: Any, **_: Any) -> None:
        made.compilations.append(Compilation(fn.name, key))

    inner = JITFunction.run

    def call(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        began = time.monotonic()
        kernel = inner(self, *arguments, grid=grid, warmup=True, **options)
        called.append((kernel, arguments))
        if not warmup:
            inner(self, *arguments, grid=grid, warmup=False, **options)
        made.calls.append((self.__name__, kernel, time.monotonic() - began))
        if errors:
            raise errors.pop()
        return kernel

    entry, encode = OnLaunch(on_launch), OnEncode(on_encode)
    library().stand_in(entry, encode, *target.capability, target.smem_bytes, target.sm_count)
    driver.set_active(driver_of(target))
    triton.set_allocator(allocate)
    with (
        taken_for(target),
        mock.patch.object(JITFunction, "run", call),
        # The hook by which vLLM counts compilations.
        mock.patch.object(knobs.runtime, "jit_post_compile_hook", compiled),
    ):
        yield made
    wrong = [] if machine is None else [one for one in machine.findings if not one.warning and not is_tritons(one)]
    assert not wrong, "\n".join(map(str, wrong))
