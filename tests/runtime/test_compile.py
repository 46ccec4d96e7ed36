# SPDX-License-Identifier: Apache-2.0
"""Kernels come into being: compiled once, found again, run on the emulator, with and without the disk."""

import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache, key, registry, toolkit
from dsl_backend.runtime import compile as compilation
from dsl_backend.runtime.compile import compile_kernel
from dsl_backend.runtime.compiles import Phase, Source, compiles
from dsl_backend.runtime.target import from_arch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tvm_ffi
from self_test_kernels import Scale, ScaleKey, build, fake_args

import emulator
from emulator.host.dsl import MODULE
from emulator.host.runtime import runtime
from emulator.host.tensors import DeviceView

ARCHES = registry.EMULATED
DTYPES = ["float32", "float16", "bfloat16"]
SM90 = from_arch("sm_90a")
KEY = ScaleKey()


def sources() -> list[Source]:
    return [event.source for event in compiles.events]


def on_device(tensor: torch.Tensor) -> Any:
    """CPU memory that says it is a GPU's."""
    return tvm_ffi.from_dlpack(DeviceView(tensor))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_emulator(arch: str, dtype: str, folder: Path) -> None:
    with emulator.device(arch=arch) as device:
        scale = build(ScaleKey(dtype=dtype), from_arch(arch))
        assert build(ScaleKey(dtype=dtype), from_arch(arch)) is scale, "from memory"
        for size in (1, 127, 129, 1000):
            x = torch.randn(size).to(getattr(torch, dtype))
            y = torch.full_like(x, float("nan"))
            scale(x, y, 0.3)
            torch.testing.assert_close(y, (x.float() * 0.3).to(x.dtype), rtol=0, atol=0)
        assert device.launches == 4
    assert sources() == [Source.COMPILER]
    assert not folder.exists(), "what was compiled for an emulator is of no use to others"


def test_a_function_of_the_emulator_stays_there() -> None:
    with emulator.device(arch="sm_90a"):
        inside = build(KEY, SM90)
    outside = build(KEY, SM90)
    assert outside is not inside
    with emulator.device(arch="sm_90a"):
        assert build(KEY, SM90) is inside


def test_an_object_file_runs() -> None:
    """What is loaded from an object file, host code and all, launches what was compiled; the emulator has the PTX."""
    with emulator.device(arch="sm_90a") as device:
        function = toolkit.compiled(Scale(KEY), fake_args(KEY), "sm_90a", "")
        assert toolkit.made_portable(function)
        scale = toolkit.loaded_from(toolkit.exported(function))
        x, y = torch.randn(500), torch.zeros(500)
        runtime().loading = getattr(function, MODULE)
        try:
            with device.passing([DeviceView(one).region("tensor") for one in (x, y)]):
                scale(on_device(x), on_device(y), 3.0)
        finally:
            runtime().loading = None
        assert torch.equal(y, x * 3)
        assert device.launches == 1


@pytest.mark.parametrize("arch", ARCHES)
def test_cold_and_warm(arch: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One start compiles, the next one loads. Bounds are loose: a busy machine is no failure."""
    target, seconds = from_arch(arch), []
    build(ScaleKey(threads=32), target)
    for _ in range(2):
        compilation.forget()
        started = time.perf_counter()
        scale = build(KEY, target)
        seconds.append(time.perf_counter() - started)
    with capsys.disabled():
        sys.stdout.write(f"\n{arch}: compiled in {seconds[0] * 1e3:.0f} ms, loaded in {seconds[1] * 1e3:.2f} ms\n")
    assert sources() == [Source.COMPILER, Source.COMPILER, Source.DISK]
    assert seconds[1] < 0.1
    assert seconds[1] < seconds[0] / 4
    assert cache.stats == cache.Stats(
        hits=1, misses=2, stores=2, read_bytes=compiles.events[1].size_bytes, written_bytes=cache.stats.written_bytes
    )
    # TVM-FFI knows what it is called with.
    with pytest.raises(TypeError, match=r"x: Tensor\(\[n0\], float32\)"):
        scale(1)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        scale(torch.ones(4), torch.ones(4), 2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run it")
def test_a_loaded_function_asks_the_driver() -> None:
    """Without a GPU a call gets as far as CUDA's runtime, and says so."""
    build(KEY, SM90)
    compilation.forget()
    scale = build(KEY, SM90)
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="Cuda Runtime Error"):
        scale(on_device(x), on_device(x), 2.0)
    assert sources()[-1] is Source.DISK


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: str, device: torch.device) -> None:
    """Compiled, and loaded by the next start, on the stream that torch is on."""
    from dsl_backend.runtime.target import detect

    target = detect(device)
    if not target.tma:
        pytest.skip(f"{target.arch} has no CuTe DSL kernels")
    for source in (Source.COMPILER, Source.DISK):
        compilation.forget()
        scale = build(ScaleKey(dtype=dtype), target)
        assert sources()[-1] is source
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(100_001, device=device, dtype=getattr(torch, dtype))
            y = torch.empty_like(x)
            scale(x, y, 0.5)
            torch.testing.assert_close(y, x * 0.5, rtol=0, atol=0)


def test_host_code_is_for_any_processor(tmp_path: Path) -> None:
    """One that only this processor runs would end others with an illegal instruction."""
    function = toolkit.compiled(Scale(KEY), fake_args(KEY), "sm_90a", "")
    assert toolkit.made_portable(function)
    text = tmp_path / "kernel.ll"
    function.export_to_c(str(text), function_name="kernel")
    groups = re.findall(r"^attributes #\d+ = \{(.*)\}$", text.read_text(errors="replace"), re.M)
    baseline = toolkit.settings()["host"]
    assert any(f'"target-cpu"="{baseline}"' in group for group in groups)
    if baseline == "x86-64-v2" and shutil.which("objdump"):
        binary = tmp_path / "kernel.o"
        binary.write_bytes(toolkit.exported(function))
        listing = subprocess.run(["objdump", "-d", binary], capture_output=True, text=True, check=True).stdout
        assert "mov" in listing
        assert not re.search(r"%[yz]mm|\tv[a-z]", listing), "AVX is not everywhere"


def test_host_code_that_is_not_portable_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolkit, "BASELINES", {})
    build(KEY, SM90)
    assert not list(folder.glob("*.o"))
    assert "their host code is for this very processor" in caplog.text


def spoiled(folder: Path) -> Path:
    """The only entry, with a bit of its code turned."""
    (path,) = folder.glob("*.o")
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    return path


def warned(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Warnings alone: where vLLM has set its loggers up, other records come too."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_corrupt_entry_is_compiled_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(KEY, SM90)
    path = spoiled(folder)
    compilation.forget()
    with caplog.at_level(logging.WARNING):
        build(KEY, SM90)
    assert sources() == [Source.COMPILER] * 2
    # Looked at before and after the lock was had, and said once.
    assert [str(path) in record.message for record in warned(caplog)] == [True]
    compilation.forget()
    build(KEY, SM90)
    assert sources()[-1] is Source.DISK


def test_what_does_not_load_is_compiled_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry that is what was written, but no object file of ours."""
    build(KEY, SM90)
    identity = key.identify(Scale(KEY), fake_args(KEY), key=KEY, target=SM90)
    cache.open_cache().store(identity, b"not an object file", 1.0)
    compilation.forget()
    build(KEY, SM90)
    assert sources() == [Source.COMPILER] * 2
    assert "it does not load" in caplog.text


def test_another_version_is_compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    build(KEY, SM90)
    compilation.forget()
    monkeypatch.setattr(toolkit, "versions", lambda: ("nvidia_cutlass_dsl-9.9.9",))
    build(KEY, SM90)
    assert sources() == [Source.COMPILER] * 2
    assert len(list(folder.glob("*.o"))) == 2


def test_without_a_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    scale = build(KEY, SM90)
    with pytest.raises(TypeError, match="factor: float32"):
        scale(1)
    assert not folder.exists()


def test_a_disk_that_is_full(folder: Path, mounted: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    """A real one: kernels are compiled in memory, and that is said once."""
    mounted("size=16k")
    for threads in (32, 64):
        with pytest.raises(TypeError, match="factor: float32"):
            build(ScaleKey(threads=threads), SM90)(1)
    assert [event.unkept for event in compiles.events] == ["No space left on device (ENOSPC)"] * 2
    (record,) = warned(caplog)
    assert f"not kept on disk, each process compiles them: {folder}: No space left on device" in record.message
    assert not list(folder.glob("*.o"))
    assert not list(folder.glob(f"{cache.SCRATCH_PREFIX}*"))


def test_a_disk_that_is_read_only(
    folder: Path, mounted: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A real one, as an image that was filled before: what is there is read, and all else compiled in memory."""
    mounted("size=1m")
    build(KEY, SM90)
    compilation.forget()
    mounted("ro")
    for threads in (128, 32, 64):
        build(ScaleKey(threads=threads), SM90)
    assert sources()[1:] == [Source.DISK, Source.COMPILER, Source.COMPILER]
    (record,) = warned(caplog)
    assert "Read-only file system (EROFS)" in record.message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The same where nothing can be mounted; not even a lock's file can be made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    cache.open_cache()
    monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(cache.DiskCache, "locked", refuse)
    for threads in (32, 64):
        build(ScaleKey(threads=threads), SM90)
    assert sources() == [Source.COMPILER] * 2
    assert all(errno.errorcode[number] in (event.unkept or "") for event in compiles.events)
    assert len(warned(caplog)) == 1


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A full one, or none that may be written: nothing but the cache is needed."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    build(KEY, SM90)
    assert len(list(folder.glob("*.o"))) == 1


def test_the_cache_is_cleared_beside_a_server(folder: Path) -> None:
    """What is in memory stays, and what is needed next is compiled and kept again."""
    held = build(KEY, SM90)
    disk = cache.existing()
    assert disk is not None
    assert disk.clear().removed == 1
    assert build(KEY, SM90) is held
    shutil.rmtree(folder)
    build(ScaleKey(threads=64), SM90)
    assert len(list(folder.glob("*.o"))) == 1


def test_what_would_be_compiled(folder: Path) -> None:
    """Kernels' identities, without compiling or loading them."""
    (found,) = compilation.identities(lambda: build(KEY, SM90))
    assert not compiles.events
    build(KEY, SM90)
    assert compiles.events[0].digest == found.digest
    assert cache.DiskCache(folder).has(found)
    with pytest.raises(InvalidInput):
        compilation.identities(lambda: compile_kernel(Scale(KEY), fake_args(KEY), key=3, target=SM90))
    compilation.forget()
    assert build(KEY, SM90) is not compilation.not_compiled, "an error leaves nothing behind"


def test_sources_that_were_edited(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The code in memory would be stored under the name of the code on disk."""
    monkeypatch.setattr(key, "LOADED", 0.0)
    build(KEY, SM90)
    assert not list(folder.glob("*.o"))
    assert "sources of kernels were changed" in caplog.text


def test_a_kernel_that_does_not_compile(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="this kernel is broken"):
            build(ScaleKey(broken=True), SM90)
    assert not list(folder.glob("*.o"))
    assert not compiles.events
    build(KEY, SM90)


def test_bad_options() -> None:
    with pytest.raises(Exception, match=r"opt-level|[Ii]nvalid"):
        compile_kernel(Scale(KEY), fake_args(KEY), key=KEY, target=SM90, options="--opt-level nine")


def test_cute_dsl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"nvidia-cutlass-dsl is not installed: .*`pip install nvidia-cutlass-dsl`"):
        build(KEY, SM90)


def test_after_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    build(KEY, SM90)
    assert (compiles.during_warmup, compiles.after_warmup) == (1, 0)
    compiles.end_warmup()
    with caplog.at_level(logging.WARNING):
        build(KEY, SM90)
        assert not warned(caplog), "from memory"
        build(ScaleKey(threads=64), SM90)
    assert (compiles.during_warmup, compiles.after_warmup) == (1, 1)
    (record,) = warned(caplog)
    assert "ScaleKey(dtype='float32', threads=64, broken=False) for sm_90a" in record.message
    assert compiles.events[-1].digest in record.message
    compilation.forget()
    build(KEY, SM90)
    assert (compiles.after_warmup, compiles.loads_after_warmup) == (1, 1)
    assert compiles.phase is Phase.SERVING


STAMPEDE = """
import json, sys, time
sys.path[:0] = {paths!r}
import cutlass
from self_test_kernels import ScaleKey, build
from dsl_backend.runtime.compiles import compiles
from dsl_backend.runtime.target import from_arch
print("ready", flush=True)
sys.stdin.readline()
for threads in (64, 128):
    build(ScaleKey(threads=threads), from_arch("sm_90a"))
print(json.dumps([event.source.value for event in compiles.events]), flush=True)
"""


@pytest.mark.usefixtures("unedited")
def test_stampede(folder: Path) -> None:
    """Four processes that want the same two kernels at the same time compile each once."""
    here = Path(__file__).parent
    code = STAMPEDE.format(paths=[str(here), str(here.parents[1])])
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [json.loads(output) for output in outputs]
    assert all(process.returncode == 0 for process in processes)
    for kernel in range(2):
        assert sorted(sources[kernel] for sources in found) == ["compiled", "loaded", "loaded", "loaded"]
    assert len(list(folder.glob("*.o"))) == 2


def test_a_process_that_dies_leaves_no_lock(folder: Path) -> None:
    """The next one compiles at once."""
    here = Path(__file__).parent
    code = (
        f"import os, sys\nsys.path[:0] = {[str(here), str(here.parents[1])]!r}\n"
        "from self_test_kernels import ScaleKey, build\n"
        "from dsl_backend.runtime import toolkit\n"
        "from dsl_backend.runtime.target import from_arch\n"
        "toolkit.exported = lambda function: os._exit(9)\n"
        "build(ScaleKey(), from_arch('sm_90a'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ))
    assert done.returncode == 9
    assert list(folder.glob("*.lock"))
    started = time.perf_counter()
    build(KEY, SM90)
    assert time.perf_counter() - started < 30
    assert sources() == [Source.COMPILER]
