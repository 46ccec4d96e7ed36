# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear error each, at once."""

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from host_machines import Recorder

import emulator
from emulator.host import build, versions
from emulator.host.tensors import DeviceView

ROOT = Path(__file__).resolve().parents[3]


def affine(x, y, **options):
    pytest.importorskip("cutlass")
    from cutlass import cute
    from simple_kernels import Affine

    return cute.compile(Affine(), x, y, **options)


def device(**options):
    return emulator.device(**{"arch": "sm_90a", "machine": Recorder()} | options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"arch": "sm_80"}, emulator.Unsupported, "'sm_80'; there are sm_90, sm_90a"),
        ({"arch": "hopper"}, emulator.Unsupported, "'hopper'"),
        ({"sms": 0}, emulator.HostError, "at least one SM"),
        ({"schedule": "fast"}, emulator.Unsupported, "'fast'; there are eager, lazy, random"),
    ],
)
def test_a_device_that_there_is_not(options, error, words) -> None:
    with pytest.raises(error, match=words), device(**options):
        pass


def test_devices_do_not_nest() -> None:
    with device():
        with pytest.raises(emulator.HostError, match="do not nest"), device():
            pass
        # The outer one is unharmed.
        with pytest.raises(emulator.HostError, match="do not nest"), device():
            pass
    with device():
        pass


@pytest.mark.parametrize("found", ["4.5.2", "4.6.1", "4.7.0", "5.0.0"])
def test_other_releases(found, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: found)
    with pytest.raises(emulator.Unsupported, match=rf"{found} is installed; .* tested with 4\.6\.0, 4\.8"), device():
        pass


@pytest.mark.parametrize("found", versions.TESTED)
def test_tested_releases(found, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: found)
    assert versions.check() == found


def test_no_release(monkeypatch) -> None:
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(emulator.Unsupported, match="is not installed"), device():
        pass


class Elsewhere:
    """A tensor that says it is on some other device."""

    def __init__(self, kind) -> None:
        self.kind = kind

    def __dlpack_device__(self):
        return (self.kind, 0)

    def __dlpack__(self, **_):
        raise AssertionError("nobody may ask for its memory")


@pytest.mark.parametrize(("kind", "name"), [(2, "cuda"), (10, "rocm"), (77, "device type 77")])
def test_a_tensor_on_another_device(kind, name) -> None:
    pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack

    with device() as made:
        with pytest.raises(emulator.HostError, match=f"is on {name}"):
            from_dlpack(Elsewhere(kind))
        with pytest.raises(emulator.HostError, match=f"is on {name}"):
            made.register(Elsewhere(kind))


@pytest.mark.parametrize("options", [{}, {"options": "--enable-tvm-ffi"}])
def test_a_call_with_a_tensor_that_has_no_memory(options) -> None:
    pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack

    x = torch.zeros(8)
    with device():
        view = from_dlpack(x)
        compiled = affine(view.mark_layout_dynamic(), view.mark_layout_dynamic(), **options)
        with pytest.raises(emulator.HostError, match="cannot tell where a Tensor is"):
            compiled(torch.zeros(8, device="meta"), x)


def test_a_tensor_that_was_wrapped_too_early() -> None:
    pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack

    x = torch.zeros(8)
    early = from_dlpack(x)
    with device():
        compiled = affine(from_dlpack(x), from_dlpack(x))
        with pytest.raises(emulator.HostError, match=r"outside of emulator\.device"):
            compiled(early, early)


@pytest.mark.parametrize("options", [{}, {"options": "--enable-tvm-ffi"}])
def test_a_function_of_another_arch(options) -> None:
    pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack

    x, machine = torch.zeros(8), Recorder()
    with device():
        view = from_dlpack(x).mark_layout_dynamic()
        compiled = affine(view, view, **options)
        compiled(x, x)
    with (
        device(arch="sm_100a", machine=machine),
        pytest.raises(emulator.HostError, match="compiled for sm_90a, and this device is an sm_100a"),
    ):
        compiled(x, x)
    assert not machine.launches


@pytest.mark.parametrize("options", [{}, {"options": "--enable-tvm-ffi"}])
def test_a_function_that_was_compiled_outside(options, monkeypatch) -> None:
    pytest.importorskip("cutlass")
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cute.runtime import from_dlpack

    x = torch.zeros(8)
    for language in DSLSingletonMeta._instances.values():
        monkeypatch.setattr(language.envar, "arch", "sm_90a")
    view = from_dlpack(x).mark_layout_dynamic()
    compiled = affine(view, view, **options)
    with device(), pytest.raises(emulator.HostError, match=r"compiled outside of emulator\.device"):
        compiled(x, x)


@pytest.mark.parametrize("options", [{}, {"options": "--enable-tvm-ffi"}])
def test_a_call_outside_of_a_device(options) -> None:
    pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack

    x = torch.zeros(8)
    with device():
        view = from_dlpack(x).mark_layout_dynamic()
        compiled = affine(view, view, **options)
        compiled(x, x)
        device_view = DeviceView(x)
    arguments = (from_dlpack(device_view), from_dlpack(device_view))
    if options:
        import tvm_ffi

        arguments = (tvm_ffi.from_dlpack(device_view), tvm_ffi.from_dlpack(device_view))
    with (
        pytest.warns(RuntimeWarning, match=r"called outside of emulator\.device"),
        pytest.raises(Exception, match=r"999|Runtime Crash"),
    ):
        compiled(*arguments)


def test_findings_are_raised_at_the_end_unless_kept() -> None:
    machine = Recorder()
    machine.findings = ["a race", "a leak"]
    with (
        pytest.raises(emulator.FindingsError, match=r"2 findings:\n1\. a race\n2\. a leak") as found,
        device(machine=machine),
    ):
        pass
    assert found.value.findings == ("a race", "a leak")
    with device(machine=machine, keep_findings=True) as made:
        pass
    assert made.findings == ("a race", "a leak")
    # An error inside is not replaced by what was found.
    with pytest.raises(KeyError), device(machine=machine):
        raise KeyError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cute-dsl-emulator"


@pytest.mark.parametrize("command", ["/nonexistent", "/nonexistent -O1", "no-such-compiler"])
def test_a_compiler_that_is_missing(command, cache, monkeypatch) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(emulator.HostError, match=f"CC is '{command}', which cannot be run: install one, or set CC"):
        build.library()


def test_no_compiler_at_all(cache, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(emulator.HostError, match="no cc, gcc or clang on PATH"):
        build.library()


def test_a_missing_compiler_is_the_first_thing_that_a_device_says(cache) -> None:
    script = "import emulator\nwith emulator.device(arch='sm_90a', machine=object()): pass"
    environment = {"CC": "/nonexistent", "PATH": "/usr/bin", "XDG_CACHE_HOME": str(cache.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "HostError: the emulator builds a small library with a C compiler, and CC is '/nonexistent'" in done.stderr


def test_a_compiler_that_fails(cache, monkeypatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(emulator.HostError, match="the C compiler failed: false --version"):
        build.library()


def test_the_library_is_built_once_and_privately(cache) -> None:
    first = build.library()
    assert first.parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    made = first.stat().st_mtime_ns
    time.sleep(0.01)
    assert build.library() == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_another_source_or_another_compiler_is_another_library(cache, monkeypatch, tmp_path) -> None:
    first = build.library()
    monkeypatch.setenv("CC", "gcc -O0")
    second = build.library()
    changed = tmp_path / "runtime.c"
    changed.write_text(build.SOURCE.read_text() + "/* changed */")
    monkeypatch.setattr(build, "SOURCE", changed)
    assert len({first, second, build.library()}) == 3


@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o755), lambda path: (path.rmdir(), path.write_text(""))])
def test_a_cache_folder_that_others_can_write_is_refused(spoil, cache) -> None:
    cache.mkdir(mode=0o700)
    spoil(cache)
    with pytest.raises(emulator.HostError, match=r"must be a folder that belongs to you|cannot make the cache folder"):
        build.library()
