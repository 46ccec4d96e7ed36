# SPDX-License-Identifier: Apache-2.0
"""Runs all micro-kernels on this machine's GPU of SM90 and keeps its answers.

    python3 tests/emulator/golden/make.py OUT              on a chip: needs numpy and libcuda alone
    python3 tests/emulator/golden/make.py OUT --emulate    the same file from the emulator, to try the rest

OUT/golden_sm90.npz goes to tests/emulator/golden/; OUT/golden_sm90.txt says what happened. A kernel that faults or
hangs ends the process that runs it; another one goes on behind it, and the fault is in the file.
"""

import argparse
import ctypes
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from micro import Golden, cases
from micro_case import DATA_TYPES, HEADER, Case, Map

THREADS, GROUP = 8, 16
ARENA_BYTES = 64 << 20
# Seconds without news after which a process is ended, the seconds that compiling may take, and those of it all.
QUIET = float(os.environ.get("GOLDEN_QUIET", "15"))
COMPILING = float(os.environ.get("GOLDEN_COMPILING", "60"))
TOTAL = 80

CUresult = ctypes.c_int
JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES = 5, 6
CLUSTER_DIMENSION, MAX_DYNAMIC_SHARED = 4, 8
DRIVER_VERSION_NAME = 1


class DriverError(Exception):
    """A call that failed; the message has its name and the driver's word for it."""


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Chip:
    """A GPU behind libcuda."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)
        self.arena = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(self.arena), ctypes.c_size_t(ARENA_BYTES))
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name = f"{name.value.decode()}, CUDA driver {version.value}"

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def load(self, text: str) -> ctypes.c_void_p:
        """A module of PTX; may be called by several threads."""
        self.call("cuCtxSetCurrent", self.context)
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        module = ctypes.c_void_p()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text.encode() + b"\0", 2, options, values)
        except DriverError as error:
            raise DriverError(f"{error}: {log.value.decode(errors='replace').strip()[:600]}") from None
        return module

    def encode(self, one: Map, address: int) -> bytes:
        """The driver's tensor map."""
        raw = ctypes.create_string_buffer(192)
        start = -ctypes.addressof(raw) % 64
        at = ctypes.addressof(raw) + start
        rank = len(one.dims)
        steps = one.element_strides or (1,) * rank
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(at),
            DATA_TYPES[one.type][0],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*one.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*one.strides),
            (ctypes.c_uint32 * rank)(*one.box),
            (ctypes.c_uint32 * rank)(*steps),
            0,
            (0, 32, 64, 128).index(one.swizzle),
            0,
            0,
        )
        return raw.raw[start : start + 128]

    def run(self, case: Case, module: ctypes.c_void_p) -> tuple[bytes, list[tuple[int, bytes]]]:
        """The output's bytes, and the tensor maps with their addresses."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, case.entry.encode())
        if case.shared:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, case.shared)
        content = case.output()
        addresses, free = [], int(self.arena.value or 0)
        for array in (*case.inputs, content):
            addresses.append(free)
            data = array.tobytes()
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(free), data, ctypes.c_size_t(len(data)))
            free += -(-len(data) // 256) * 256 + 256
        maps = []
        for one in case.maps:
            address = addresses[-1] if one.input is None else addresses[one.input]
            maps.append((address, self.encode(one, address)))
        values: list[Any] = [ctypes.c_uint64(address) for address in addresses]
        values += [ctypes.create_string_buffer(data, 128) for _, data in maps]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = Config((case.grid, 1, 1), (case.block, 1, 1), case.shared, None, None, 0)
        if case.cluster > 1:
            attribute = Attribute(CLUSTER_DIMENSION, 0, (case.cluster, 1, 1))
            config.attributes, config.count = ctypes.pointer(attribute), 1
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self.call("cuCtxSynchronize")
        out = ctypes.create_string_buffer(len(content))
        self.call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(addresses[-1]), ctypes.c_size_t(len(content)))
        return out.raw[: len(content)], maps


# The process that talks to the chip writes records: (what, name, more).


def compile_all(chip: Chip, some: Sequence[Case]) -> tuple[dict[str, ctypes.c_void_p], dict[str, str]]:
    """Modules by case, and what could not be compiled. A group that fails is compiled kernel by kernel."""
    groups = [some[place : place + GROUP] for place in range(0, len(some), GROUP)]
    modules: dict[str, ctypes.c_void_p] = {}
    errors: dict[str, str] = {}

    def build(group: Sequence[Case]) -> None:
        try:
            module = chip.load(HEADER + "".join(case.text() for case in group))
            modules.update((case.name, module) for case in group)
        except DriverError as error:
            if len(group) == 1:
                errors[group[0].name] = str(error)
                return
            for case in group:
                build([case])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(build, groups))
    return modules, errors


def work(record_file: Path, names: Sequence[str]) -> None:
    """Run cases one after the other. A failed launch leaves the context unusable: the process ends."""
    with record_file.open("ab") as file:

        def record(*what: Any) -> None:
            pickle.dump(what, file)
            file.flush()

        chip = Chip()
        record("device", chip.name, None)
        some = [cases()[name] for name in names]
        modules, errors = compile_all(chip, some)
        for name, words in errors.items():
            record("error", name, words)
        record("compiled", "", None)
        for case in some:
            if case.name not in modules:
                continue
            record("begin", case.name, None)
            error = attempt(chip, case, modules[case.name], record)
            if error and "cuTensorMap" not in error and "cuModuleGetFunction" not in error:
                file.flush()
                os._exit(3)


def attempt(chip: Chip, case: Case, module: ctypes.c_void_p, record: Callable[..., None]) -> str:
    """Run a case and write what came of it; returns the error."""
    try:
        record("done", case.name, chip.run(case, module))
    except DriverError as error:
        record("error", case.name, str(error))
        return str(error)
    return ""


def records(path: Path) -> Iterator[tuple[str, str, Any]]:
    """What was written so far; a record that is only half there ends them."""
    with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)


def on_chip(names: Sequence[str], out: Path) -> Golden:
    """Start processes until every case was run or failed."""
    golden = Golden("?")
    left = list(names)
    started = time.monotonic()
    for attempt in range(40):
        if not left or time.monotonic() - started > TOTAL:
            break
        path = out / f"records_{attempt}.pickle"
        path.touch()
        listed = out / f"names_{attempt}.txt"
        listed.write_text("\n".join(left))
        errors_path = out / f"errors_{attempt}.txt"
        with errors_path.open("wb") as errors_file:
            process = subprocess.Popen(
                [sys.executable, __file__, str(out), "--work", str(path), str(listed)], stderr=errors_file
            )
            size, news, hung = -1, time.monotonic(), False
            while process.poll() is None:
                time.sleep(0.05)
                if path.stat().st_size != size:
                    size, news = path.stat().st_size, time.monotonic()
                quiet = time.monotonic() - news
                if (
                    quiet > (QUIET if b"compiled" in path.read_bytes()[:4096] else COMPILING)
                    or time.monotonic() - started > TOTAL + 20
                ):
                    hung = True
                    process.kill()
                    process.wait()
        begun, finished, compiled = "", set(), False
        for what, name, more in records(path):
            compiled |= what == "compiled"
            if what == "device":
                golden.source = name
            elif what == "begin":
                begun = name
            elif what == "done":
                data, maps = more
                golden.outputs[name], golden.digests[name] = np.frombuffer(data, np.uint8), cases()[name].digest()
                if maps:
                    golden.maps[name] = maps
                finished.add(name)
            elif what == "error":
                golden.errors[name] = more
                finished.add(name)
        if begun and begun not in finished and process.returncode:
            golden.errors[begun] = "hung" if hung else f"the process ended with {process.returncode}"
            finished.add(begun)
        path.unlink()
        listed.unlink()
        said = errors_path.read_text(errors="replace").strip()
        errors_path.unlink()
        if said:
            sys.stderr.write(said[-2000:] + "\n")
        if not finished:
            golden.errors["*"] = f"nothing ran{'' if compiled else ', nothing was compiled'}: {said[-500:]}"
            break
        left = [name for name in left if name not in finished]
    for name in left:
        golden.errors.setdefault(name, "not run")
    return golden


def on_emulator(names: Sequence[str]) -> Golden:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from micro_emulate import emulate

    golden = Golden("emulator")
    for name in names:
        case = cases()[name]
        try:
            out, machine = emulate(case)
        except Exception as error:
            golden.errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if machine.findings.errors:
            golden.errors[name] = str(machine.findings.errors[0])
            continue
        golden.outputs[name], golden.digests[name] = out, case.digest()
    return golden


def summary(golden: Golden, seconds: float) -> str:
    from micro_tensor import plain

    lines = [
        golden.source,
        f"{len(golden.outputs)} of {len(cases())} kernels ran, {len(golden.errors)} did not, "
        f"{sum(map(len, golden.outputs.values()))} bytes, {seconds:.1f} s",
    ]
    lines += [f"error: {name}: {words}" for name, words in golden.errors.items()]
    for name, out in golden.outputs.items():
        if name.startswith("question/"):
            same = bool((out == plain(cases()[name])).all())
            lines.append(f"{name}: {'as' if same else 'NOT as'} the plain definition has it")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for golden_sm90.npz and golden_sm90.txt")
    parser.add_argument("--emulate", action="store_true", help="ask the emulator, not a chip")
    parser.add_argument("--only", default="", help="kernels in whose name this pattern is found")
    parser.add_argument("--work", nargs=2, type=Path, metavar=("RECORDS", "NAMES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], args.work[1].read_text().splitlines())
        return
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # What may fault comes last: it costs a new process.
    names = sorted(
        (name for name in cases() if re.search(args.only, name)), key=lambda name: name.startswith("question/")
    )
    golden = on_emulator(names) if args.emulate else on_chip(names, args.out)
    golden.save(args.out / "golden_sm90.npz")
    text = summary(golden, time.monotonic() - started)
    (args.out / "golden_sm90.txt").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
