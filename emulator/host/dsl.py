# SPDX-License-Identifier: Apache-2.0
"""What CuTe DSL is made to believe while an emulated device is active, and how its calls are followed.

CuTe DSL may have been imported before: its settings are read when it is, and here they are set in its objects as well
as in the environment. All replacements are undone when the device is left.
"""

import copy
import dataclasses
import importlib
import importlib.util
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from emulator.errors import HostError, Unsupported
from emulator.host.chips import chip
from emulator.host.launch import Region
from emulator.host.runtime import Module, Runtime
from emulator.host.tensors import DeviceView, require_cpu

# Attributes that are left on objects of CuTe DSL, for as long as those live.
MODULE, VIEW = "_emulator_module", "_emulator_view"
# In CuTe DSL, where the version has them: the look-up of an entry point, and the module that makes object files.
ENTRY, EXPORT = "_lookup_jit_entry", "_aot_support"
# Found elsewhere by host code: libc, and the run-time of TVM-FFI.
ELSEWHERE = ("printf", "sprintf", "snprintf", "malloc", "free", "memcpy", "memset", "memmove", "abort", "puts")
TVM_FFI = "TVMFFI"
# Of the names of runtime.c.
PREFIX = "emulator_host_"


class Host(Protocol):
    """What is asked of the device."""

    arch: str
    sms: int
    line_info: bool

    def passing(self, regions: Sequence[Region]) -> Any: ...


@contextmanager
def targeting(device: Host, library: Runtime) -> Iterator[None]:
    """CuTe DSL compiles for the device and calls the library, until the end."""
    hooks = Hooks(device, library)
    with ExitStack() as stack:
        dumps = stack.enter_context(tempfile.TemporaryDirectory(prefix="emulator-"))
        # Importing it writes to one of the variables below.
        importlib.import_module("cutlass.cute")
        stack.enter_context(variables(CUTE_DSL_ARCH=device.arch, CUTE_DSL_LIBS=str(library.path)))
        settings = {
            "arch": device.arch,
            "shared_libs": str(library.path),
            "keep_ptx": True,
            "lineinfo": device.line_info,
            "dump_dir": dumps,
            # A function from the files' cache would come without its PTX.
            "disable_file_caching": True,
        }
        base = importlib.import_module("cutlass.base_dsl.dsl")
        for language in base.DSLSingletonMeta._instances.values():
            stack.enter_context(replaced(language.envar, settings))
        for owner, values in hooks.replacements():
            stack.enter_context(replaced(owner, values))
        stack.callback(hooks.put_options_back)
        # It says that its cache is off because PTX is kept, which nobody in the block has asked for.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Cache is disabled as user wants")
        yield


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Variables of the environment, until the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Attributes of a class or an object, until the end; ones that it inherits are inherited again."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


class Uncalled:
    """Stands for the entry point of a function that is called by another one."""

    restype: object = None


class Unoptimised:
    """CuTe DSL's module that makes object files of host code, which runs once for each launch: nothing is optimised."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def export_module_to_bytes(self, *arguments: Any, **named: Any) -> Any:
        return self.module.export_module_to_bytes(*arguments, **named | {"opt_level": 0})


class Hooks:
    """The replacements of methods of CuTe DSL."""

    def __init__(self, device: Host, library: Runtime) -> None:
        self.device, self.library = device, library
        # A descriptor's address is what a call passes of a tensor.
        self.by_pointer: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.names: dict[int, str] = {}
        self.options: dict[int, tuple[Any, dict[str, Any]]] = {}

    def replacements(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """(class, its new attributes)."""
        executor = importlib.import_module("cutlass.base_dsl.jit_executor")
        cuda = importlib.import_module("cutlass.cutlass_dsl.cuda_jit_executor")
        tensor = importlib.import_module("cutlass.cute.runtime")._Tensor
        function = cuda.CudaDialectJitCompiledFunction
        yield (
            tensor,
            {
                "__init__": self.tensor_made(tensor.__init__),
                "__c_pointers__": self.tensor_passed(tensor.__c_pointers__),
            },
        )
        yield (
            function,
            {
                "__init__": self.compiled(function.__init__),
                "num_devices": property(lambda _: 1),
                "_load_cuda_library": self.loads(function._load_cuda_library),
            },
        )
        compiler = importlib.import_module("cutlass.base_dsl.compiler")
        yield compiler.Compiler, {"jit": self.links(compiler.Compiler.jit)}
        options = compiler.CompileOptions
        yield options, {"apply_envar_settings": self.sets(options.apply_envar_settings)}
        base = importlib.import_module("cutlass.base_dsl.dsl").BaseDSL
        yield base, {"compile_and_jit": self.compiles(base.compile_and_jit)}
        if hasattr(base, ENTRY):
            yield base, {ENTRY: self.looks_up(getattr(base, ENTRY))}
        yield executor.JitExecutor, {"run_compiled_program": self.runs(executor.JitExecutor.run_compiled_program)}
        arguments = executor.ExecutionArgs
        yield arguments, {"generate_execution_args": self.binds(arguments.generate_execution_args)}
        yield importlib.import_module("cutlass.utils.hardware_info").HardwareInfo, self.hardware()
        if importlib.util.find_spec("tvm_ffi"):
            yield from self.tvm_ffi_replacements(importlib.import_module("cutlass.cutlass_dsl.tvm_ffi_provider"))

    def tvm_ffi_replacements(self, provider: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        if hasattr(provider, EXPORT):
            yield provider, {EXPORT: Unoptimised(getattr(provider, EXPORT))}
        for name in (
            "TVMFFIJitCompiledFunctionBase",
            "TVMFFIJitCompiledFunction",
            "TVMFFIJitCompiledFunctionWithKwargs",
        ):
            owner = getattr(provider, name)
            if "__call__" in vars(owner):
                yield owner, {"__call__": self.tvm_ffi_called(vars(owner)["__call__"])}

    def hardware(self) -> dict[str, Any]:
        """HardwareInfo of this device: one block of a kernel fits an SM."""
        device = self.device

        def clusters(_: Any, cluster_size: int, stream: Any = None) -> int:
            if not 1 <= cluster_size <= 32:
                raise ValueError(f"cluster size {cluster_size} is not between 1 and 32")
            if cluster_size > device.sms:
                raise HostError(f"no cluster of {cluster_size} blocks fits {device.sms} SMs: give the device more")
            return device.sms // cluster_size

        def made(self: Any, device_id: int = 0) -> None:
            if device_id:
                raise ValueError(f"Device ID {device_id} is out of range for device count 1")
            self.device_id = device_id

        return {
            "__init__": made,
            "get_max_active_clusters": clusters,
            "get_l2_cache_size_in_bytes": lambda _: chip(device.arch).l2_bytes,
            "get_device_multiprocessor_count": lambda _: device.sms,
        }

    # Compilation.

    def compiled(self, original: Callable[..., None]) -> Callable[..., None]:
        """A function was compiled: keep its PTX."""

        def made(function: Any, *arguments: Any, **named: Any) -> None:
            original(function, *arguments, **named)
            text = function.artifacts.PTX if function.artifacts else None
            if text and ".version" in text:
                setattr(function, MODULE, Module(function.function_name, text))

        return made

    def sets(self, original: Callable[..., None]) -> Callable[..., None]:
        """Settings become options of a compilation, and stay in `cute.compile`, which has one set of options."""

        def apply(options: Any, *arguments: Any) -> None:
            for option in options.options.values():
                self.options.setdefault(id(option), (option, dict(vars(option))))
            original(options, *arguments)

        return apply

    def put_options_back(self) -> None:
        for option, values in self.options.values():
            vars(option).clear()
            vars(option).update(values)
        self.options.clear()

    def compiles(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Around what takes every error for one of the compiler."""

        def compile_and_link(*arguments: Any, **named: Any) -> Any:
            with self.running(self.library.loading):
                return original(*arguments, **named)

        return compile_and_link

    def looks_up(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An entry point is asked for, which generates the host code: not for TVM-FFI, which has code of its own."""

        def look_up(language: Any, *arguments: Any) -> Any:
            return Uncalled() if language.compile_options.enable_tvm_ffi else original(language, *arguments)

        return look_up

    def links(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Host code is about to be linked: with the library here, whatever else of these names is in the process."""

        def link(compiler: Any, module: Any, *arguments: Any, **named: Any) -> Any:
            missing = []
            for name in declarations(module):
                if self.library.exports(PREFIX + name):
                    rename(module, name, PREFIX + name)
                elif not (name in ELSEWHERE or name.startswith((TVM_FFI, PREFIX))):
                    missing.append(name)
            if missing:
                self.library.pending = Unsupported(f"host code calls {', '.join(missing)}, which the emulator has not")
                raise self.library.pending
            return original(compiler, module, *arguments, **named)

        return link

    def module(self, function: Any) -> Module | None:
        """The module of a function that is about to run."""
        found: Module | None = getattr(function, MODULE, None)
        if found is None and function.has_gpu_module:
            raise HostError(
                f"{function.function_name} was compiled outside of emulator.device(...), for the CUDA runtime: "
                "compile it inside"
            )
        if found is not None and found.arch != self.device.arch:
            raise HostError(f"{found.name} was compiled for {found.arch}, and this device is an {self.device.arch}")
        return found

    # Calls.

    @contextmanager
    def running(self, module: Module | None) -> Iterator[None]:
        """Host code runs; what was raised inside of it, and reached C as a number, is raised here."""
        library = self.library
        outer, library.loading = library.loading, module
        library.pending = None
        try:
            yield
        except BaseException:
            pending, library.pending = library.pending, None
            if pending is None:
                raise
            # The error that made it here says no more than a number.
            raise pending from None
        else:
            # Host code that only asserts success goes on where that of CUDA would end the process.
            pending, library.pending = library.pending, None
            if pending is not None:
                raise pending
        finally:
            library.loading = outer

    def loads(self, original: Callable[..., Any]) -> Callable[..., list[Any]]:
        def load(function: Any) -> list[Any]:
            with self.running(self.module(function)):
                original(function)
            # Its handles mean nothing to the CUDA runtime, which is asked to unload what this returns.
            return []

        return load

    def runs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(executor: Any, pointers: Sequence[Any]) -> Any:
            with self.device.passing(self.regions(pointers)), self.running(None):
                return original(executor, pointers)

        return run

    def regions(self, pointers: Sequence[Any]) -> list[Region]:
        found = []
        for index, pointer in enumerate(map(number, pointers)):
            if (tensor := self.by_pointer.get(pointer)) is not None:
                found.append(getattr(tensor, VIEW).region(self.names.get(pointer, f"argument {index}")))
        return found

    def binds(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Arguments of a call become pointers: remember what each is called."""

        def bind(bound: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
            pointers, adapted = original(bound, arguments, named)
            names = bound._meta.all_names
            if len(names) == len(pointers):
                self.names = dict(zip(map(number, pointers), names, strict=True))
            else:
                self.names = {}
            return pointers, adapted

        return bind

    def tensor_made(self, original: Callable[..., None]) -> Callable[..., None]:
        def make(tensor: Any, source: Any, *arguments: Any, **named: Any) -> None:
            view = source if isinstance(source, DeviceView) else DeviceView(source)
            require_cpu(view.tensor)
            original(tensor, view, *arguments, **named)
            setattr(tensor, VIEW, view)

        return make

    def tensor_passed(self, original: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def pointers(tensor: Any) -> list[int]:
            if not hasattr(tensor, VIEW):
                raise HostError(
                    "a tensor was made by from_dlpack outside of emulator.device(...), where it is memory of the CPU: "
                    "make it inside"
                )
            found = original(tensor)
            self.by_pointer.update(dict.fromkeys(map(number, found), tensor))
            return found

        return pointers

    def tvm_ffi_called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *arguments: Any, **named: Any) -> Any:
            module = self.module(function)
            regions: list[Region] = []
            names = function.execution_args._meta.all_names
            positional = [
                self.on_device(value, names[index] if index < len(names) else f"argument {index}", regions)
                for index, value in enumerate(arguments)
            ]
            keyword = {name: self.on_device(value, name, regions) for name, value in named.items()}
            with self.device.passing(regions), self.running(module):
                return original(function, *positional, **keyword)

        return call

    def on_device(self, value: Any, name: str, regions: list[Region]) -> Any:
        """An argument with the tensors in it moved to the device; their memory is added to the regions."""
        import tvm_ffi

        if (view := getattr(value, VIEW, None)) is not None:
            regions.append(view.region(name))
            return value
        if isinstance(value, tvm_ffi.Array):
            return tvm_ffi.convert(self.on_device(tuple(value), name, regions))
        if isinstance(value, (list, tuple)):
            moved = [self.on_device(part, f"{name}[{index}]", regions) for index, part in enumerate(value)]
            return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)
            for part in dataclasses.fields(value):
                moved = self.on_device(getattr(value, part.name), f"{name}.{part.name}", regions)
                object.__setattr__(made, part.name, moved)
            return made
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            view = DeviceView(value)
            require_cpu(value)
            regions.append(view.region(name))
            return tvm_ffi.from_dlpack(view)
        return value


def number(pointer: Any) -> int:
    """The address in what the DSL passes: a number, or one in ctypes' clothes."""
    return int(getattr(pointer, "value", pointer) or 0)


def declarations(module: Any) -> list[str]:
    """Names of the functions that a compiled host module calls and does not have."""
    functions = (each.operation for each in module.body.operations if each.operation.name == "llvm.func")
    return [each.attributes["sym_name"].value for each in functions if not len(each.regions[0].blocks)]


def rename(module: Any, name: str, new: str) -> None:
    """Give a declared function of a host module another name, wherever it is used."""
    ir = importlib.import_module("cutlass._mlir.ir")
    with module.context, ir.Location.unknown():
        ir.SymbolTable.replace_all_symbol_uses(name, new, module.operation)
        for each in module.body.operations:
            if each.operation.name == "llvm.func" and each.operation.attributes["sym_name"].value == name:
                each.operation.attributes["sym_name"] = ir.StringAttr.get(new)
