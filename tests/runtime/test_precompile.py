# SPDX-License-Identifier: Apache-2.0
"""Which kernels a model needs, and compiling them in other processes: all of them, whatever becomes of one."""

import dataclasses
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsl_backend import cli
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache, key, machine, precompile, toolkit
from dsl_backend.runtime import compile as compilation
from dsl_backend.runtime import family as families
from dsl_backend.runtime.compile_process import Result as Became
from dsl_backend.runtime.compiles import Source, compiles
from dsl_backend.runtime.family import Family, precompile_specs
from dsl_backend.runtime.model import ModelShape, shape_of
from dsl_backend.runtime.precompile import PrecompileSpec, run
from dsl_backend.runtime.target import Target, from_arch

pytest.importorskip("cutlass")

import self_test_kernels
from self_test_kernels import ScaleKey, build

CONFIG = {"num_attention_heads": 8, "hidden_size": 1024, "vocab_size": 1000, "torch_dtype": "bfloat16"}
SM90, SM100 = from_arch("sm_90a"), from_arch("sm_100a")


Serve = Callable[[Callable[[ModelShape, Target], Any]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes a family with these precompile specs the only one."""

    def only(specs: Callable[[ModelShape, Target], Any]) -> None:
        monkeypatch.setattr(families, "load_all", lambda: (Family(name="self-test", precompile_specs=specs),))

    return only


def spec(target: Target = SM90, build: Any = build, **config: Any) -> PrecompileSpec:
    return PrecompileSpec("self-test", build, ScaleKey(**config), target)


def die(key: Any, target: Target) -> None:
    sys.stdout.write("for whoever reads standard output")
    sys.stdout.flush()
    sys.stderr.write("first words\nthe last words\n")
    sys.stderr.flush()
    os._exit(11)


def on_a_full_disk(key: Any, target: Target) -> Any:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not is_looked_for():
        os.fsync = full
    return build(key, target)


def is_looked_for() -> bool:
    """Whether this process asks if a kernel has to be compiled, and compiles nothing."""
    return hasattr(compilation._asked, "identities")


def sleep(key: Any, target: Target) -> None:
    """Says which process sleeps, in the file that the cache's folder is beside."""
    with (cache.folder().parent / "sleepers").open("a") as file:
        file.write(f"{os.getpid()} {signal.getsignal(signal.SIGINT) is signal.SIG_IGN}\n")
    time.sleep(600)


def sees_gpus(key: Any, target: Target) -> None:
    raise ValueError(f"sees {os.environ['CUDA_VISIBLE_DEVICES']!r}")


def is_nice(key: Any, target: Target) -> None:
    if not is_looked_for():
        raise ValueError(f"niceness of {os.nice(0)}")
    build(key, target)


class TestFamilies:
    def test_precompile_specs(self, serve: Serve) -> None:
        serve(self_test_kernels.precompile_specs)
        found = precompile_specs(shape_of(CONFIG), SM90)
        assert [one.key.dtype for one in found] == ["bfloat16", "float32"]
        assert str(found[0]) == ("self-test: ScaleKey(dtype='bfloat16', threads=128, broken=False) for sm_90a")
        assert precompile_specs(shape_of(CONFIG), SM90, ["self-test"]) == found

    def test_each_once(self, serve: Serve) -> None:
        serve(lambda model, target: [spec(), spec(threads=64), spec()])
        assert [one.key.threads for one in precompile_specs(shape_of(CONFIG), SM90)] == [128, 64]

    def test_refusals(self, serve: Serve) -> None:
        serve(self_test_kernels.precompile_specs)
        with pytest.raises(InvalidInput, match="family 'x' is not one of self-test"):
            precompile_specs(shape_of(CONFIG), SM90, ["x"])
        with pytest.raises(InvalidInput, match="family 'x' is not one of attention, experts, linear"):
            families.load("x")


@pytest.mark.usefixtures("unedited")
def test_other_processes_compile(folder: Path) -> None:
    """Two architectures, what is there already, one that fails, one that kills its process, one that cannot travel."""
    build(ScaleKey(threads=32), SM90)
    compilation.forget()
    todo = [
        spec(threads=32),
        spec(SM90),
        spec(build=die, threads=1),
        spec(SM100),
        spec(broken=True),
        spec(build=sees_gpus, threads=2),
        spec(build=lambda key, target: None, threads=3),
        spec(build=is_nice, threads=4),
    ]
    outcomes = {outcome.spec: outcome for outcome in run(todo, 2)}
    assert list(map(outcomes.__contains__, todo)) == [True] * len(todo)
    became = [outcomes[one].result for one in todo]
    assert became == [Became.PRESENT, Became.COMPILED, Became.FAILED, Became.COMPILED, *[Became.FAILED] * 4]
    errors = [outcomes[one].error or "" for one in todo]
    assert errors[2] == "its process ended with status 11: the last words"
    assert "this kernel is broken" in errors[4]
    assert errors[5] == "ValueError: sees ''"
    assert errors[6].startswith("cannot be given to another process: ")
    assert errors[7] == f"ValueError: niceness of {os.nice(0)}", "who waits for all of them has their priority"
    assert all(outcomes[one].size_bytes > 1000 for one in (todo[0], todo[1], todo[3]))
    assert len(list(folder.glob("*.o"))) == 3
    before = len(compiles.events)
    build(ScaleKey(), SM100)
    assert [event.source for event in compiles.events[before:]] == [Source.DISK], "this process finds what others made"


def test_nothing_to_do() -> None:
    assert list(run([])) == []


@pytest.mark.usefixtures("unedited")
def test_what_a_full_disk_does_not_keep(folder: Path) -> None:
    """Compiled, and reported as not kept; what others keep is told apart."""
    outcomes = {outcome.spec: outcome for outcome in run([spec(), spec(build=on_a_full_disk, threads=64)], 2)}
    kept, lost = outcomes.values() if spec() == next(iter(outcomes)) else reversed(outcomes.values())
    assert (kept.result, kept.error) == (Became.COMPILED, None)
    assert (lost.result, lost.error, lost.size_bytes) == (Became.UNKEPT, "No space left on device (ENOSPC)", 0)
    assert len(list(folder.glob("*.o"))) == 1


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(InvalidInput, match=r"no process to compile in: No such file or directory \(ENOENT\)"):
        list(run([spec()]))


def sleepers(folder: Path) -> list[int]:
    """The processes that are in `sleep`; they ignore Ctrl-C, which is their parent's."""
    path = folder.parent / "sleepers"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    assert all(ignored == "True" for _, ignored in lines)
    return [int(number) for number, _ in lines]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_end_when_nobody_asks_on(folder: Path) -> None:
    """Ctrl-C in the midst of it, say."""
    outcomes = run([spec(build=sleep, threads=threads) for threads in (1, 2)] + [spec()], 2)
    first = threading.Thread(target=lambda: next(outcomes, None), daemon=True)
    first.start()
    assert until(lambda: len(sleepers(folder)) == 2)
    for number in sleepers(folder):
        os.kill(number, signal.SIGKILL)
    first.join(60)
    outcomes.close()
    assert until(lambda: not any(map(is_alive, sleepers(folder))))


ORPHANS = """
import os, sys, time
sys.path[:0] = {paths!r}
import test_precompile as tests
from dsl_backend.runtime.precompile import ahead
assert ahead.add([tests.spec(build=tests.sleep_then_build, threads=threads) for threads in (1, 2)]) == 2
print("begun", flush=True)
sys.stdin.readline()
{end}
"""


def sleep_then_build(key: Any, target: Target) -> Any:
    if not is_looked_for():
        sleep(key, target)
    return build(key, target)


@pytest.mark.usefixtures("unedited")
@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(3)",
        "os._exit(3)",
        "os.kill(os.getpid(), 9)",
        # A child that was forked holds the pipes' other ends on.
        "os.fork() and os._exit(3); os.close(1); time.sleep(30)",
    ],
)
def test_processes_end_with_their_parent(folder: Path, end: str) -> None:
    """However that ends; and nothing of them is on its standard output."""
    here = Path(__file__).parent
    code = ORPHANS.format(paths=[str(here), str(here.parents[1])], end=end)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"begun\n"
        assert until(lambda: len(sleepers(folder)) >= 1)
        parent.stdin.close()
        assert parent.stdout.read() == b""
        assert parent.wait(60) in (3, -9)
    assert until(lambda: not any(map(is_alive, sleepers(folder))), 20)


class TestAhead:
    @pytest.fixture
    def ahead(self) -> Iterator[precompile.Ahead]:
        made = precompile.Ahead()
        yield made
        made.wait()

    @pytest.fixture
    def none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No process may be started."""

        def refuse(niceness: int) -> Any:
            raise AssertionError("a process was started")

        monkeypatch.setattr(precompile, "CompileProcess", refuse)

    @pytest.mark.usefixtures("unedited")
    def test_cold_then_warm(
        self, ahead: precompile.Ahead, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What this process needs later is on disk, and a warm start begins nothing."""
        monkeypatch.setattr(precompile, "PROGRESS_S", 0.0)
        monkeypatch.setattr(precompile, "processes", lambda count, spare: 1)
        todo = [spec(), spec(threads=64), spec(broken=True)]
        with caplog.at_level(logging.INFO):
            assert ahead.add([*todo, spec()], beside="while weights load") == 3
            assert ahead.add(todo) == 0, "what was asked for once"
            ahead.wait()
        said = [record.message for record in caplog.records]
        assert said[0] == "compiling 3 kernels in 1 processes while weights load"
        assert said[1:3] == ["compiled 1 of 3 kernels, 2 left", "compiled 2 of 3 kernels, 1 left"]
        assert said[3].startswith("compiled 2 kernels in 1 processes in ")
        assert said[4].startswith("1 of 3 kernels were not compiled ahead of their use: self-test: ScaleKey(")
        assert "this kernel is broken" in said[4]
        assert len(said) == 5
        assert not compiles.events, "nothing was compiled or loaded here"
        build(ScaleKey(), SM90)
        build(ScaleKey(threads=64), SM90)
        assert [event.source for event in compiles.events] == [Source.DISK] * 2
        monkeypatch.setattr(precompile, "CompileProcess", None)
        assert precompile.Ahead().add(todo[:2]) == 0

    @pytest.mark.usefixtures("unedited")
    def test_more_is_added_meanwhile(self, ahead: precompile.Ahead, folder: Path) -> None:
        for threads in (32, 64, 96):
            assert ahead.add([spec(threads=threads)]) == 1
        ahead.wait()
        assert len(list(folder.glob("*.o"))) == 3
        assert ahead.add([spec(threads=128)]) == 1, "and again when all was done"
        ahead.wait()
        assert len(list(folder.glob("*.o"))) == 4

    @pytest.mark.usefixtures("unedited")
    def test_a_kernel_in_progress_is_waited_for(self, ahead: precompile.Ahead, folder: Path) -> None:
        """And not compiled again: this process needs it before it is there."""
        assert ahead.add([spec(build=slowly)]) == 1
        assert until(lambda: any(folder.glob("*.lock")) and (folder.parent / "begun").exists())
        build(ScaleKey(), SM90)
        (event,) = compiles.events
        assert event.source is Source.DISK
        assert event.seconds > 0.5

    @pytest.mark.usefixtures("unedited", "folder")
    def test_processes_have_a_lower_priority(self, ahead: precompile.Ahead, caplog: pytest.LogCaptureFixture) -> None:
        """The engine's threads come first on a busy host, and keep their own."""
        before = os.nice(0)
        assert ahead.add([spec(build=is_nice)]) == 1
        ahead.wait()
        assert f"ValueError: niceness of {min(before + 10, 19)}" in caplog.text
        assert os.nice(0) == before

    @pytest.mark.usefixtures("unedited", "none")
    def test_another_process_compiles_ahead(
        self, ahead: precompile.Ahead, caplog: pytest.LogCaptureFixture, folder: Path
    ) -> None:
        """Another rank, or another engine of this node with the same model."""
        with cache.open_cache().claim(precompile.claim_of([spec(threads=64), spec()])) as ours:
            assert ours
            ahead.add([])
            ahead.add([spec(), spec(threads=64)])
            ahead.wait()
            ahead.add([spec(threads=96)])
            ahead.wait()
        assert not caplog.records

    @pytest.mark.usefixtures("unedited")
    def test_another_process_compiles_other_kernels_ahead(self, ahead: precompile.Ahead, folder: Path) -> None:
        """An engine with another model, which starts at the same time."""
        with cache.open_cache().claim(precompile.claim_of([spec(threads=64)])) as ours:
            assert ours
            ahead.add([spec()])
            ahead.wait()
        assert len(list(folder.glob("*.o"))) == 1

    @pytest.mark.usefixtures("none")
    @pytest.mark.parametrize("why", ["off", "emulated", "not private", "not writable", "edited"])
    def test_nothing_is_begun_that_could_not_be_kept(
        self, ahead: precompile.Ahead, monkeypatch: pytest.MonkeyPatch, folder: Path, why: str
    ) -> None:
        cache.open_cache()
        if why == "off":
            monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
        elif why == "emulated":
            monkeypatch.setattr(toolkit, "keeps_files", lambda: False)
        elif why == "not private":
            folder.chmod(0o755)
        elif why == "not writable":
            # Root may write into every folder.
            folder.chmod(0o500)
            monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
        else:
            monkeypatch.setattr(key, "LOADED", 0.0)
        assert ahead.add([spec()]) == 0
        folder.chmod(0o700)

    @pytest.mark.usefixtures("unedited")
    def test_a_full_disk_ends_it(
        self,
        ahead: precompile.Ahead,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Others would not be kept either; and it is said once, in the words of who compiles in memory then."""
        monkeypatch.setattr(precompile, "processes", lambda count, spare: 1)
        todo = [spec(build=on_a_full_disk, threads=64), spec()]
        assert ahead.add(todo) == 2
        ahead.wait()
        assert not list(folder.glob("*.o"))
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert f"each process compiles them: {folder}: No space left on device (ENOSPC)" in record.message

    def test_no_process_can_be_started(
        self, ahead: precompile.Ahead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        assert ahead.add([spec()]) == 1
        ahead.wait()
        assert "kernels are not compiled ahead of their use: FileNotFoundError" in caplog.text


def slowly(key: Any, target: Target) -> Any:
    """Takes its time in the process that compiles, and holds the kernel's lock."""
    if not is_looked_for():
        export = toolkit.exported

        def late(function: Any) -> bytes:
            (cache.folder().parent / "begun").touch()
            time.sleep(1.0)
            return export(function)

        toolkit.exported = late
    return build(key, target)


@pytest.mark.parametrize(
    ("cores", "gigabytes", "spare", "found"),
    [(16, 100, 1, 15), (16, 4, 1, 4), (2, 100, 1, 1), (1, 100, 8, 1), (64, 100, 8, 20), (8, 0, 0, 1)],
)
def test_how_many_processes(
    monkeypatch: pytest.MonkeyPatch, cores: int, gigabytes: int, spare: int, found: int
) -> None:
    """For 20 kernels."""
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "available_bytes", lambda: gigabytes << 30)
    assert precompile.processes(20, spare) == found


def test_a_containers_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert machine.cores() == 16
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    assert machine.available_bytes() == 8_000_000 * 1024
    for name, text in (("cpu.max", "max 100000"), ("memory.max", "max"), ("memory.current", "1")):
        (tmp_path / name).write_text(text + "\n")
    assert (machine.cores(), machine.available_bytes()) == (16, 8_000_000 * 1024)
    for name, text in (
        ("cpu.max", "250000 100000"),
        ("memory.max", "4000"),
        ("memory.current", "3000"),
        ("memory.stat", "anon 7\ninactive_file 500"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert (machine.cores(), machine.available_bytes()) == (2, 1500)


def test_nowhere_to_keep_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    with pytest.raises(InvalidInput, match=r"nothing compiled could be kept in .*: DSL_BACKEND_CACHE switches it off"):
        list(run([spec()]))
    monkeypatch.setenv("DSL_BACKEND_CACHE", "1")
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with pytest.raises(InvalidInput, match="its mode is 0755"):
        list(run([spec()]))


class TestCommands:
    @pytest.fixture(autouse=True)
    def family(self, serve: Serve) -> None:
        serve(self_test_kernels.precompile_specs)

    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(CONFIG))
        return path

    def invoke(self, *words: Any) -> Result:
        return CliRunner().invoke(cli.app, [str(word) for word in words])

    @pytest.mark.usefixtures("unedited")
    def test_compile_then_look(self, config: Path, folder: Path) -> None:
        words = ("compile", "--model", config, "--arch", "sm_90a", "--arch", "sm_100a", "--family", "self-test")
        done = self.invoke(*words)
        assert done.exit_code == 0, done.output
        assert "4 kernels: 4 compiled; " in done.stdout
        assert "4/4" in done.stderr, "a bar, and not among the results"
        again = json.loads(self.invoke(*words, "--json").stdout)
        assert [one["result"] for one in again["kernels"]] == ["present"] * 4
        assert {(one["arch"], one["key"].split("'")[1]) for one in again["kernels"]} == {
            (arch, dtype) for arch in ("sm_90a", "sm_100a") for dtype in ("bfloat16", "float32")
        }
        listed = json.loads(self.invoke("cache", "list", "--json").stdout)
        assert listed["folder"] == str(folder)
        assert {one["state"] for one in listed["kernels"]} == {"current"}
        assert listed["size_bytes"] == sum(path.stat().st_size for path in folder.glob("*.o"))
        shown = self.invoke("cache", "list").stdout
        assert shown.count("Scale ") == 4
        assert "4 kernels, " in shown
        assert self.invoke("cache", "verify").stdout.startswith("4 current, 0 stale, 0 broken in ")

    def test_dtype_and_ranks_arrive(self, config: Path, serve: Serve) -> None:
        seen: list[ModelShape] = []

        def enumerate_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
            seen.append(model)
            yield from ()

        serve(enumerate_specs)
        done = self.invoke(
            "compile", "--model", config, "--arch", "sm_90a", "--tensor-parallel", 2, "--dtype", "float16"
        )
        assert done.exit_code == 0
        assert done.stdout == "nothing to compile: no operator has a CuTe DSL kernel for this model on sm_90a\n"
        assert seen == [
            dataclasses.replace(shape_of(CONFIG, dtype="float16"), heads_q=4, heads_kv=4, tensor_parallel=2)
        ]

    @pytest.mark.usefixtures("unedited")
    def test_a_full_disk(self, config: Path, folder: Path, mounted: Callable[[str], Path]) -> None:
        """A real one: what was not kept is named, with the reason, and the exit status says so."""
        mounted("size=16k")
        words = ("compile", "--model", config, "--arch", "sm_90a", "--jobs", 1)
        done = self.invoke(*words)
        assert done.exit_code == 1
        assert f"2 kernels: 2 not kept; 0 KiB in {folder}" in done.stdout
        assert done.stdout.count("not kept: self-test: ScaleKey(") == 2
        assert done.stdout.count("No space left on device (ENOSPC)") == 2
        found = json.loads(self.invoke(*words, "--json").stdout)["kernels"]
        assert [(one["result"], one["error"]) for one in found] == [
            ("not kept", "No space left on device (ENOSPC)")
        ] * 2

    def test_what_is_not_kept(self, config: Path, serve: Serve) -> None:
        """The same where nothing can be mounted."""
        serve(lambda model, target: [spec(build=on_a_full_disk)])
        done = self.invoke("compile", "--model", config, "--arch", "sm_90a", "--jobs", 1)
        assert done.exit_code == 1
        assert "1 kernels: 1 not kept; 0 KiB in" in done.stdout
        assert "not kept: self-test: ScaleKey(" in done.stdout
        assert "for sm_90a: No space left on device (ENOSPC)" in done.stdout

    @pytest.mark.parametrize("kind", ["fifo", "folder", "link", "lock"])
    def test_what_is_no_file(self, folder: Path, kind: str) -> None:
        """In an entry's place or a lock's: nothing waits for it, it is named, and cleared where it can be."""
        cache.open_cache()
        path = folder / f"{'0' * 32}{'.lock' if kind == 'lock' else '.o'}"
        {"folder": path.mkdir, "link": lambda: path.symlink_to("nowhere")}.get(kind, lambda: os.mkfifo(path))()
        name = {"fifo": "a FIFO", "folder": "a folder", "link": "a symbolic link"}.get(kind)
        done = self.invoke("cache", "verify")
        assert done.exit_code == (0 if kind == "lock" else 1)
        assert name is None or f"broken: {path.name}: it is {name} and not a file" in done.stdout
        assert self.invoke("cache", "list").exit_code == 0
        done = self.invoke("cache", "clear")
        assert done.exit_code == (1 if kind == "folder" else 0)
        assert os.path.lexists(path) == (kind == "folder")
        assert (f"not removed: {path.name}: Is a directory (EISDIR)" in done.stdout) == (kind == "folder")

    def test_entries_that_go_meanwhile(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server's are cleared while they are listed."""
        build(ScaleKey(), SM90)
        examined = cache.examined

        def gone(path: Path) -> Any:
            found = examined(path)
            path.unlink()
            return found

        monkeypatch.setattr(cache, "examined", gone)
        done = self.invoke("cache", "list")
        assert done.exit_code == 0
        assert "1 kernels, 0 KiB" in done.stdout

    def test_a_kernel_that_fails(self, config: Path, serve: Serve) -> None:
        serve(lambda model, target: [spec(broken=True)])
        done = self.invoke("compile", "--model", config, "--arch", "sm_90a", "--jobs", 1)
        assert done.exit_code == 1
        assert "failed: self-test: ScaleKey(dtype='float32', threads=128, broken=True) for sm_90a: " in done.stdout
        assert "this kernel is broken" in done.stdout

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--arch", "hopper"), "arch 'hopper' is not a CUDA architecture"),
            (("--arch", "cpu"), "arch 'cpu' has no compiled kernels: use a name such as sm_90a"),
            (("--arch", "sm_90a", "--family", "x"), "family 'x' is not one of self-test"),
            (("--arch", "sm_90a", "--dtype", "int3"), "dtype 'int3' is not one of"),
            (("--arch", "sm_90a", "--tensor-parallel", "3"), "8 heads cannot be shared by 3 ranks"),
        ],
    )
    def test_refusals(self, config: Path, words: tuple[str, ...], message: str) -> None:
        done = self.invoke("compile", "--model", config, *words)
        assert done.exit_code == 2
        assert message in done.stderr
        assert done.stdout == ""

    def test_stale_and_broken(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build(ScaleKey(), SM90)
        with monkeypatch.context() as patch:
            patch.setattr(toolkit, "versions", lambda: ("nvidia_cutlass_dsl-9.9.9",))
            build(ScaleKey(threads=64), SM90)
        (folder / f"{'0' * 32}.o").write_bytes(b"not one")
        (folder / f"{'0' * 32}.o").chmod(0o600)
        done = self.invoke("cache", "verify")
        assert done.exit_code == 1
        assert f"broken: {'0' * 32}.o: it has 7 bytes" in done.stdout
        assert "1 current, 1 stale, 1 broken in " in done.stdout
        found = json.loads(self.invoke("cache", "verify", "--json").stdout)
        assert (found["current"], found["stale"], found["broken"]) == (1, 1, 1)
        listed = {
            one["state"]: one["why"] for one in json.loads(self.invoke("cache", "list", "--json").stdout)["kernels"]
        }
        assert listed == {"current": None, "stale": "made with nvidia_cutlass_dsl-9.9.9", "broken": "it has 7 bytes"}
        assert json.loads(self.invoke("cache", "clear", "--stale", "--json").stdout)["removed"] == 2
        assert self.invoke("cache", "verify").exit_code == 0
        compilation.forget()
        before = len(compiles.events)
        build(ScaleKey(), SM90)
        assert compiles.events[before].source is Source.DISK, "what is current stays"
        assert self.invoke("cache", "clear").stdout == "1 kernels removed\n"
        assert not list(folder.glob("*.o"))

    def test_other_sources_are_stale(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build(ScaleKey(), SM90)
        monkeypatch.setattr("dsl_backend.runtime.key.sources_of", lambda root: precompile_sources())
        (entry,) = json.loads(self.invoke("cache", "list", "--json").stdout)["kernels"]
        assert (entry["state"], entry["why"]) == ("stale", "made from other sources")

    def test_no_cache_yet(self, folder: Path) -> None:
        for words in (("list",), ("verify",), ("clear",)):
            done = self.invoke("cache", *words)
            assert done.exit_code == 0
            assert done.stdout.startswith("0 ")
        assert not folder.exists(), "looking makes nothing"

    def test_a_cache_of_somebody_else(self, folder: Path) -> None:
        cache.open_cache()
        folder.chmod(0o777)
        for words in (("list",), ("verify",), ("clear",)):
            done = self.invoke("cache", *words)
            assert done.exit_code == 2
            assert "is not used: its mode is 0777: chmod 700" in done.stderr


def precompile_sources() -> Any:
    from dsl_backend.runtime.key import Sources

    return Sources("other", 0.0)


def test_a_process_without_gpus_does_not_ask_the_driver_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuTe DSL 4.8.0 asks for the GPU to describe the error that there is none, up to Python's limit of recursion."""
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    code = """if True:
        from cuda.bindings import driver

        asked = []

        def no_device(*_):
            asked.append(1)
            if len(asked) > 50:
                raise SystemExit("the driver is asked again and again")
            return (driver.CUresult.CUDA_ERROR_NO_DEVICE,)

        driver.cuInit = no_device
        driver.cuGetErrorName = lambda _: (driver.CUresult.CUDA_SUCCESS, b"CUDA_ERROR_NO_DEVICE")
        from dsl_backend import envs

        envs.hide_gpus()
        from dsl_backend.runtime import toolkit
        from self_test_kernels import Scale, ScaleKey, fake_args

        toolkit.compiled(Scale(ScaleKey()), fake_args(ScaleKey()), "sm_90a", "")
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
