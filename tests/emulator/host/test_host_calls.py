# SPDX-License-Identifier: Apache-2.0
"""Compiled functions are called with CPU tensors, and their launches arrive."""

import dataclasses
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from host_machines import AffineMachine, Failing, Recorder

import emulator
from emulator.host import dsl
from emulator.host.runtime import runtime

pytest.importorskip("cutlass")

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, cute
from cutlass.base_dsl.dsl import BaseDSL, DSLSingletonMeta
from cutlass.cute import runtime as cute_runtime
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr
from cutlass.cutlass_dsl import cuda_jit_executor
from cutlass.utils import HardwareInfo
from simple_kernels import Affine, Persistent, Staged, foreign
from tma_kernels import TmaCopy

ROOT = Path(__file__).resolve().parents[3]
ARCHES = ("sm_90a", "sm_100a")
TVM_FFI = "--enable-tvm-ffi"


def symbolic(dtype=Float32):
    return make_fake_compact_tensor(dtype, (cute.sym_int(),), assumed_align=16)


def dynamic(tensor):
    return from_dlpack(tensor).mark_layout_dynamic()


def through_views(x, y):
    cute.compile(Affine(), dynamic(x), dynamic(y))(dynamic(x), dynamic(y))


def through_adapters(x, y):
    cute.compile(Affine(), dynamic(x), dynamic(y))(x, y)


def at_once(x, y):
    Affine()(dynamic(x), dynamic(y))


def through_tvm_ffi(x, y):
    pytest.importorskip("tvm_ffi")
    cute.compile(Affine(), symbolic(), symbolic(), options=TVM_FFI)(x, y)


def through_tvm_ffi_views(x, y):
    pytest.importorskip("tvm_ffi")
    view = lambda tensor: from_dlpack(tensor, enable_tvm_ffi=True).mark_layout_dynamic()  # noqa: E731
    cute.compile(Affine(), view(x), view(y), options=TVM_FFI)(view(x), view(y))


PATHS = (through_views, through_adapters, at_once, through_tvm_ffi, through_tvm_ffi_views)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("path", PATHS)
def test_round_trip(path, arch) -> None:
    x, y = torch.randn(300), torch.zeros(300)
    machine = AffineMachine()
    with emulator.device(arch=arch, machine=machine) as device:
        path(x, y)
    assert torch.equal(y, x * 2 + 1)
    launch = machine.last
    assert (launch.grid, launch.block, launch.cluster, launch.arch) == ((3, 1, 1), (128, 1, 1), (1, 1, 1), arch)
    assert (launch.cooperative, launch.programmatic, launch.explicit_cluster, launch.shared_bytes) == (
        False,
        False,
        False,
        0,
    )
    regions = {(region.address, region.bytes, region.dtype) for region in launch.regions}
    assert regions == {(x.data_ptr(), 1200, "float32"), (y.data_ptr(), 1200, "float32")}
    assert {region.name for region in launch.regions} in ({"x", "y"}, {"argument 0", "argument 1"})
    assert len(launch.parameters[2].data) == 4
    assert f".target {arch}" in launch.ptx
    assert f".entry {launch.kernel}" in launch.ptx
    assert device.launches == len(machine.launches) == 1
    assert runtime().loading is None


@pytest.mark.parametrize("path", [through_views, through_tvm_ffi])
def test_host_code_is_generated_once(path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM-FFI's functions are compiled by way of an object file, without optimisation, and no engine is asked."""
    asked, levels = [], []
    provider = pytest.importorskip("cutlass.cutlass_dsl.tvm_ffi_provider")
    look_up, export = BaseDSL._lookup_jit_entry, provider._aot_support.export_module_to_bytes

    def exported(*arguments, opt_level, **named):
        levels.append(opt_level)
        return export(*arguments, opt_level=opt_level, **named)

    support = types.SimpleNamespace(export_module_to_bytes=exported)
    monkeypatch.setattr(provider, "_aot_support", support)
    uncalled = dsl.Uncalled
    monkeypatch.setattr(dsl, "Uncalled", lambda: asked.append("nobody") or uncalled())
    with emulator.device(arch="sm_90a", machine=AffineMachine()):
        path(torch.randn(300), torch.zeros(300))
    assert (asked, levels) == ((["nobody"], [0]) if path is through_tvm_ffi else ([], []))
    assert BaseDSL._lookup_jit_entry is look_up
    assert provider._aot_support is support


@pytest.mark.parametrize("path", PATHS)
def test_code_is_the_gpus(path) -> None:
    """The memory is global to the compiler; a generic access would be another instruction."""
    machine = Recorder()
    with emulator.device(arch="sm_90a", machine=machine):
        path(torch.zeros(8), torch.zeros(8))
    assert "ld.global" in machine.last.ptx
    assert "st.global" in machine.last.ptx
    assert "ld.b32" not in machine.last.ptx


def test_ptx_names_source_lines_unless_told_not_to() -> None:
    """They are comments to the code: nothing else of it may change."""
    texts = []
    for line_info in (True, False):
        machine = Recorder()
        with emulator.device(arch="sm_90a", machine=machine, line_info=line_info):
            source, target = (from_dlpack(torch.zeros(64, 64).half(), assumed_align=16) for _ in range(2))
            cute.compile(TmaCopy(), source, target)(source, target)
        texts.append(machine.last.ptx)
    assert ".loc" in texts[0]
    assert "tma_kernels.py" in texts[0]
    assert ".loc" not in texts[1]
    instructions = [
        [line for line in text.splitlines() if line.strip() and not re.match(r"\s*(\.loc|\.file|//)", line)]
        for text in texts
    ]
    assert instructions[0] == instructions[1]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [ZeroDivisionError("seven"), Interrupted(), emulator.LaunchError("no")])
@pytest.mark.parametrize("path", PATHS)
def test_errors_of_the_machine_reach_the_caller_as_themselves(path, error) -> None:
    with emulator.device(arch="sm_90a", machine=Failing(error)), pytest.raises(type(error)) as found:
        path(torch.zeros(8), torch.zeros(8))
    assert found.value is error


def test_a_call_after_an_error_is_a_call_like_any_other() -> None:
    x, y = torch.ones(8), torch.zeros(8)
    machine = AffineMachine()
    with emulator.device(arch="sm_90a", machine=machine) as device:
        compiled = cute.compile(Affine(), dynamic(x), dynamic(y))
        device.machine = Failing(ValueError("once"))
        with pytest.raises(ValueError, match="once"):
            compiled(x, y)
        device.machine = machine
        compiled(x, y)
    assert torch.equal(y, torch.full((8,), 3.0))


def test_the_cuda_runtime_is_given_no_handle() -> None:
    """It would be asked to unload a library that is not one of its own."""
    x = torch.zeros(8)
    with emulator.device(arch="sm_90a", machine=Recorder()):
        compiled = cute.compile(Affine(), dynamic(x), dynamic(x))
        compiled(x, x)
        assert compiled.jit_module.cuda_library == []


def test_regions_are_those_of_the_call() -> None:
    machine = Recorder()
    x, y, z = torch.zeros(8), torch.zeros(8), torch.zeros(4, 6)
    with emulator.device(arch="sm_90a", machine=machine) as device:
        compiled = cute.compile(Affine(), dynamic(x), dynamic(y))
        compiled(x, y)
        compiled(y, y)
        device.register(z[:, 1:3], "z")
        compiled(x, y)
    first, second, third = machine.launches
    assert {region.name for region in first.regions} == {"x", "y"}
    assert [region.address for region in second.regions] == [y.data_ptr()]
    assert {region.name for region in third.regions} == {"x", "y", "z"}
    # From its first element to its last: three rows of six and two more.
    assert next(r for r in third.regions if r.name == "z").bytes == (3 * 6 + 2) * 4


@cute.jit
def on_stream(x: cute.Tensor, y: cute.Tensor, stream: CUstream):
    Affine().kernel(x, y, cute.size(x)).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def test_streams_are_handles_and_nothing_else() -> None:
    pytest.importorskip("tvm_ffi")
    x, y, machine = torch.ones(8), torch.zeros(8), AffineMachine()
    with emulator.device(arch="sm_90a", machine=machine):
        compiled = cute.compile(on_stream, symbolic(), symbolic(), make_fake_stream())
        compiled(dynamic(x), dynamic(y), CUstream(1234))
        assert (y.sum(), machine.last.stream) == (24, 1234)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        cute.compile(on_stream, symbolic(), symbolic(), stream, options=TVM_FFI)(y, x)
        assert (x.sum(), machine.last.stream) == (56, 0)


@cute.jit
def behind_pointers(x: cute.Pointer, y: cute.Pointer, count: cutlass.Int32):
    Affine()(cute.make_tensor(x, cute.make_layout(count)), cute.make_tensor(y, cute.make_layout(count)))


@pytest.mark.parametrize("options", [None, TVM_FFI])
def test_memory_behind_pointers_is_registered_by_hand(options) -> None:
    x, y, machine = torch.ones(8), torch.zeros(8), AffineMachine()
    with emulator.device(arch="sm_90a", machine=machine) as device:
        pointers = [make_ptr(Float32, each.data_ptr(), cute.AddressSpace.gmem, assumed_align=16) for each in (x, y)]
        compiled = cute.compile(behind_pointers, *pointers, 8, options=options)
        device.register(y, "y")
        compiled(*pointers, 8)
    assert y.sum() == 24
    assert [region.name for region in machine.last.regions] == ["y"]


def test_numpy_arrays_are_tensors_too() -> None:
    x, y = np.arange(5, dtype=np.float32), np.zeros(5, dtype=np.float32)
    with emulator.device(arch="sm_90a", machine=AffineMachine()):
        through_views(x, y)
    assert y.tolist() == [1, 3, 5, 7, 9]


class Pair(NamedTuple):
    x: cute.Tensor
    y: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Arguments:
    x: cute.Tensor
    y: cute.Tensor


@cute.jit
def paired(pair):
    Affine()(pair[0], pair[1])


@cute.jit
def bundled(arguments: Arguments):
    Affine()(arguments.x, arguments.y)


def test_tensors_inside_of_other_arguments() -> None:
    pytest.importorskip("tvm_ffi")
    x, y = torch.ones(8), torch.zeros(8)
    machine = AffineMachine()
    with emulator.device(arch="sm_90a", machine=machine):
        cute.compile(paired, (symbolic(), symbolic()), options=TVM_FFI)((x, y))
        assert y.sum() == 24
        assert {region.name for region in machine.last.regions} == {"pair[0]", "pair[1]"}
        cute.compile(paired, Pair(symbolic(), symbolic()), options=TVM_FFI)(Pair(y, x))
        assert x.sum() == 56
        cute.compile(bundled, Arguments(symbolic(), symbolic()), options=TVM_FFI)(Arguments(x, y))
        assert y.sum() == 120
        assert {region.name for region in machine.last.regions} == {"arguments.x", "arguments.y"}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.int64, "int64"),
        (torch.uint8, "uint8"),
        (torch.bool, "bool"),
    ],
)
def test_types_have_names(dtype, name) -> None:
    machine = Recorder()
    with emulator.device(arch="sm_90a", machine=machine) as device:
        device.register(torch.zeros(3, dtype=dtype))
        Staged()(from_dlpack(torch.zeros(32)))
    assert name in {region.dtype for region in machine.last.regions}


def test_dynamic_shared_memory_is_what_the_dsl_counted() -> None:
    machine = Recorder()
    with emulator.device(arch="sm_90a", machine=machine):
        Staged()(from_dlpack(torch.zeros(32)))
    assert machine.last.shared_bytes == 4000


def test_host_code_sees_the_devices_sms() -> None:
    machine, out = Recorder(), torch.zeros(64)
    with emulator.device(arch="sm_100a", sms=6, machine=machine):
        clusters = HardwareInfo().get_max_active_clusters(2)
        assert HardwareInfo().get_device_multiprocessor_count() == 6
        Persistent()(from_dlpack(out), clusters)
        with pytest.raises(emulator.HostError, match="8 blocks fits 6 SMs"):
            HardwareInfo().get_max_active_clusters(8)
    assert machine.last.grid == (3, 1, 1)


def test_host_code_that_calls_what_is_not_there() -> None:
    with (
        emulator.device(arch="sm_90a", machine=Recorder()),
        pytest.raises(emulator.Unsupported, match="nobody_has_this"),
    ):
        foreign(from_dlpack(torch.zeros(8)))


def settings():
    language = next(iter(DSLSingletonMeta._instances.values()))
    function = cuda_jit_executor.CudaDialectJitCompiledFunction
    watched = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP_PTX")
    return (
        dict(vars(language.envar)),
        dict(vars(function)),
        dict(vars(HardwareInfo)),
        dict(vars(cute_runtime._Tensor)),
        {name: os.environ.get(name) for name in watched},
        {kind: dict(vars(option)) for kind, option in cute.compile._compile_options.options.items()},
    )


@pytest.mark.parametrize("error", [None, KeyError("inside")])
def test_everything_is_put_back(error) -> None:
    before = settings()
    try:
        with emulator.device(arch="sm_100a", machine=Recorder()):
            assert os.environ["CUTE_DSL_ARCH"] == "sm_100a"
            assert settings() != before
            through_views(torch.zeros(8), torch.zeros(8))
            if error:
                raise error
    except KeyError:
        pass
    assert settings() == before


def test_one_function_on_devices_of_one_arch() -> None:
    x, y = torch.ones(8), torch.zeros(8)
    with emulator.device(arch="sm_90a", machine=Recorder()):
        compiled = cute.compile(Affine(), dynamic(x), dynamic(y))
    machine = AffineMachine()
    assert emulator.run(compiled, x, y, arch="sm_90a", machine=machine).launches == 1
    assert y.sum() == 24


SCRIPT = """
import sys
sys.path[:0] = {folders!r}
{imports}
import torch
from host_machines import AffineMachine
x, y = torch.ones(8), torch.zeros(8)
with emulator.device(arch="sm_100a", machine=AffineMachine()):
    from simple_kernels import Affine
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack
    cute.compile(Affine(), from_dlpack(x), from_dlpack(y))(from_dlpack(x), from_dlpack(y))
    cute.compile(Affine(), from_dlpack(y), from_dlpack(x), options={options!r})(y, x)
assert x.sum() == 56, x
"""
ORDERS = {
    "emulator first": "import emulator",
    "cutlass first": "import cutlass.cute\nimport emulator",
    "another arch asked for": "import os\nos.environ['CUTE_DSL_ARCH'] = 'sm_80'\nimport cutlass.cute, emulator",
    "compiled before": "import os\nos.environ['CUTE_DSL_ARCH'] = 'sm_90a'\nimport cutlass.cute as cute\n"
    "from cutlass import Float32\nfrom simple_kernels import Affine\nf = cute.runtime.make_fake_compact_tensor\n"
    "cute.compile(Affine(), f(Float32, (8,)), f(Float32, (8,)))\nimport emulator",
}


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_imports_does_not_matter(order) -> None:
    folders = [str(ROOT), str(ROOT / "tests/emulator/kernels"), str(ROOT / "tests/emulator/host")]
    script = SCRIPT.format(folders=folders, imports=ORDERS[order], options=TVM_FFI)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
