# SPDX-License-Identifier: Apache-2.0
"""The disk cache: what is stored is found, what is wrong is a miss and said once, and nothing else happens."""

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache
from dsl_backend.runtime.cache import Cleared, DiskCache, Entry, Rejected
from dsl_backend.runtime.key import FORMAT, Identity

DATA = b"\x7fELF an object file" * 100
ROOT = os.geteuid() == 0


def identity(name: str = "Scale", **parts: Any) -> Identity:
    return Identity(
        f"kernels.{name}", "Key()", "sm_90a", {"kernel": name, "format": FORMAT, "versions": ["1"], **parts}
    )


@pytest.fixture
def disk() -> DiskCache:
    made = cache.open_cache()
    assert made.store(identity(), DATA, 1.5) is None
    return made


def found(disk: DiskCache, wanted: Identity | None = None) -> Entry | None:
    with disk.opened(wanted or identity()) as opened:
        return None if opened is None else opened[1]


def test_what_is_stored_is_found(disk: DiskCache) -> None:
    with disk.opened(identity()) as opened:
        assert opened is not None
        descriptor, entry = opened
        assert os.pread(descriptor, len(DATA), 0) == DATA, "the file begins with the object file"
    assert (entry.size_bytes, entry.compile_s) == (len(DATA), 1.5)
    assert (entry.digest, entry.kernel) == (identity().digest, "Scale")
    assert found(disk, identity("Other")) is None
    assert (cache.stats.stores, cache.stats.rejected) == (1, 0), "one that is not there is nobody's fault"
    assert (cache.stats.written_bytes, cache.stats.read_bytes) == (len(DATA), len(DATA))


def test_modes(disk: DiskCache) -> None:
    assert stat.S_IMODE(disk.path.stat().st_mode) == 0o700
    with disk.lock(identity()):
        assert {stat.S_IMODE(path.stat().st_mode) for path in disk.path.iterdir()} == {0o600}


def test_nothing_but_the_entry_stays(disk: DiskCache) -> None:
    assert [path.name for path in disk.path.iterdir()] == [f"{identity().digest}.o"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def listen(path: Path) -> None:
    path.unlink()
    # From its folder: addresses are short.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def other(path: Path) -> None:
    """Another version's entry under this name."""
    disk = DiskCache(path.parent)
    newer = identity(versions=["2"])
    disk.store(newer, DATA, 1.0)
    disk.path_of(newer.digest).replace(path)


WRONG = {
    "cut": (cut, "it is cut off, or was not written by this package"),
    "empty": (lambda path: os.truncate(path, 0), "it has 0 bytes"),
    "foreign": (lambda path: path.write_bytes(b"#!/bin/sh\n" * 50), "was not written by this package"),
    "code": (lambda path: flip(path, 200), "its content is not what was written"),
    "description": (lambda path: flip(path, len(DATA)), "cannot be read"),
    "checksum": (lambda path: flip(path, path.read_bytes().index(b'"sha256": "') + 12), "its content is not what"),
    "length": (lambda path: flip(path, path.stat().st_size - 10), "it is cut off"),
    "version": (other, "another kernel's, or another version's"),
    "link": (link, "symbolic link"),
    "link to nothing": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "symbolic link"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "it is a folder and not a file"),
    # Opening one waits for somebody who writes.
    "fifo": (lambda path: (path.unlink(), os.mkfifo(path)), "it is a FIFO and not a file"),
    "socket": (lambda path: listen(path), "it is a socket and not a file"),
    "writable": (lambda path: path.chmod(0o622), "others may write it: its mode is 0622"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_a_miss(kind: str, disk: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
    spoil, reason = WRONG[kind]
    path = disk.path_of(identity().digest)
    spoil(path)
    with caplog.at_level(logging.WARNING, logger="vllm.dsl_backend"):
        assert found(disk) is None
    assert cache.stats.rejected == 1
    (record,) = caplog.records
    assert str(path) in record.message
    assert reason in record.message
    ((_, listed),) = [(one, entry) for one, entry in disk.entries() if one == path]
    assert isinstance(listed, str) == (kind != "version")
    assert kind == "version" or reason in listed
    if kind == "folder":
        assert "Is a directory" in (disk.store(identity(), DATA, 1.0) or "")
        assert list(disk.clear().left) == [path], "what is in a folder is not ours"
    else:
        assert disk.store(identity(), DATA, 1.0) is None, "it is written anew"
        assert found(disk) is not None


def fake_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.skipif(not ROOT, reason="only root gives files away")
def test_a_foreign_owner_of_an_entry(disk: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(disk.path_of(identity().digest), 12345, -1)
    assert found(disk) is None
    assert "it belongs to user 12345" in caplog.text


@pytest.mark.skipif(not ROOT, reason="only root gives files away")
def test_a_foreign_owner_of_the_folder(disk: DiskCache) -> None:
    os.chown(disk.path, 12345, -1)
    with pytest.raises(Rejected, match="it belongs to user 12345 and not to user 0"):
        cache.open_cache()
    with pytest.raises(Rejected, match="it belongs to user 12345"):
        cache.existing()


def test_foreign_owners(disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The same for who is not root: everything is somebody else's."""
    fake_owner(monkeypatch)
    assert found(disk) is None
    assert f"it belongs to user {os.getuid()}" in caplog.text
    with pytest.raises(Rejected, match=f"belongs to user {os.getuid()} and not to user {os.getuid() + 1}"):
        cache.open_cache()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_folder_that_is_not_private(disk: DiskCache, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    disk.path.chmod(mode)
    with pytest.raises(Rejected, match=f"its mode is {mode:04o}: chmod 700 makes it private"):
        cache.open_cache()
    assert cache.usable() is None
    assert cache.usable() is None
    assert len(caplog.records) == 1, "said once"


def test_a_folder_that_is_none(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tempfile.gettempdir())
    with pytest.raises(Rejected, match="it is not a folder"):
        cache.open_cache()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(Rejected, match=r"File exists|not a folder"):
        cache.open_cache()


def test_no_space(disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing half written stays, and the entry that was there does."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in ("Scale", "Other"):
        assert disk.store(identity(name), b"new", 1.0) == "No space left on device (ENOSPC)"
    assert [record.message for record in caplog.records] == [
        f"compiled kernels are not kept on disk, each process compiles them: {disk.path}: No space left on device "
        f"(ENOSPC)"
    ]
    assert len(list(disk.path.iterdir())) == 1
    entry = found(disk)
    assert entry is not None
    assert entry.size_bytes == len(DATA)


def test_a_folder_that_cannot_be_written(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries are read from it, as from an image that was filled before; no lock can be had, and none is needed."""
    if ROOT:
        # Root writes into every folder: the calls that would fail for others are made to.
        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
        monkeypatch.setattr(DiskCache, "locked", refuse)
    disk.path.chmod(0o500)
    try:
        made = cache.open_cache()
        assert found(made) is not None
        with made.lock(identity("Other")):
            assert made.store(identity("Other"), DATA, 1.0)
    finally:
        disk.path.chmod(0o700)
    assert len(caplog.records) == 1
    assert "compiled kernels are not kept on disk" in caplog.text


def test_a_lock_that_nobody_gives_back(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.05)
    with disk.lock(identity()), disk.lock(identity()):
        assert "not waiting" in caplog.text


def test_locks_are_of_kernels(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.05)
    with disk.lock(identity()), disk.lock(identity("Other")):
        assert caplog.text == ""


def test_switched_off(monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    assert cache.usable() is None
    assert not folder.exists()
    assert not caplog.records, "who switched it off knows"


@pytest.mark.parametrize(("name", "value"), [("DSL_BACKEND_CACHE", "maybe"), ("DSL_BACKEND_CACHE_DIR", "here")])
def test_bad_settings(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=f"{name}='{value}' is not accepted: use"):
        cache.open_cache()


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSL_BACKEND_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/dsl-backend/kernels")


def test_clear(disk: DiskCache) -> None:
    disk.store(identity("Other"), DATA, 1.0)
    old, young = disk.path / f"{cache.SCRATCH_PREFIX}old", disk.path / f"{cache.SCRATCH_PREFIX}young"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    with disk.lock(identity()):
        pass
    assert disk.clear(frozenset({disk.path_of(identity("Other").digest)})) == Cleared(1, {})
    assert not old.exists()
    assert young.exists(), "it may be about to be renamed"
    assert found(disk) is not None
    with disk.lock(identity("Other")):
        assert disk.clear() == Cleared(1, {})
        assert list(disk.entries()) == []
        (lock,) = disk.path.glob("*.lock")
        assert lock.stem == identity("Other").digest, "a lock that is removed while it is held is none"
    assert disk.clear() == Cleared(0, {})
    assert [path.name for path in disk.path.iterdir()] == [young.name]


def test_a_lock_that_was_removed_guards_nothing(disk: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening a lock's file and locking it, another process has cleared the cache."""
    flock = fcntl.flock

    def cleared(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (disk.path / f"name{cache.LOCK_SUFFIX}").unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", cleared)
    assert disk.locked("name") is None
    descriptor = disk.locked("name")
    assert descriptor is not None
    assert disk.locked("name") is None, "it is held"
    cache.unlock(descriptor)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """As NFS may be: said once, and nobody waits."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for name in ("One", "Two"):
        with disk.lock(identity(name)):
            assert disk.store(identity(name), DATA, 1.0) is None
    with disk.claim(cache.AHEAD) as ours:
        assert ours
    (record,) = caplog.records
    assert f"no locks in {disk.path}" in record.message
    assert f"({errno.errorcode[number]})" in record.message


def test_a_claim_is_one_processs(disk: DiskCache) -> None:
    with disk.claim(cache.AHEAD) as first, disk.claim(cache.AHEAD) as second:
        assert (first, second) == (True, False)
    with disk.claim(cache.AHEAD) as again:
        assert again


def test_entries_that_go_meanwhile(disk: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process clears the cache between list and open, or its folder goes."""
    listing = disk.entries()
    disk.store(identity("Other"), DATA, 1.0)
    names = sorted(disk.path.glob("*.o"))
    next(listing)
    names[1].unlink()
    assert list(listing) == []
    with monkeypatch.context() as patch:
        patch.setattr(DiskCache, "files", lambda self: names)
        assert disk.clear() == Cleared(1, {}), "what another process has removed is not counted, and no error"
    assert cache.size_of(names[0]) == 0
    disk.path.rmdir()
    assert disk.clear() == Cleared(0, {})
    assert found(disk) is None
    assert disk.store(identity(), DATA, 1.0)


def test_what_cannot_be_read_is_said_once(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(*_: Any, **__: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.store(identity("Other"), DATA, 1.0)
    monkeypatch.setattr(os, "open", stale)
    assert found(disk) is None
    assert found(disk, identity("Other")) is None
    (record,) = caplog.records
    assert record.message == f"compiled kernels cannot be read from {disk.path}: Input/output error (EIO)"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A container's, whom /etc/passwd does not know."""
    monkeypatch.delenv("DSL_BACKEND_CACHE_DIR")
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}")
    assert cache.usable() is None
    assert cache.usable() is None
    (record,) = caplog.records
    assert "this user has no home folder: DSL_BACKEND_CACHE_DIR names another place" in record.message
    assert not Path("~").exists()


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/home/other/.cache")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert cache.usable() is None
    assert cache.usable() is None
    (record,) = caplog.records
    assert "/home/other/.cache: Permission denied (EACCES)" in record.message


def test_what_an_entry_says_is_json(disk: DiskCache) -> None:
    (_, entry), *_ = disk.entries()
    assert isinstance(entry, Entry)
    assert json.loads(json.dumps(dict(entry.parts))) == dict(identity().parts)
