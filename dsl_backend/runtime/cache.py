# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, for all processes of a user.

An entry is one file: the object file, then a JSON object that says what it is, then its length and a magic word.
Readers of object files look at what their header points to, so nothing has to be taken off. Entries are written beside
their place and renamed, so a reader finds all of one or none. Whatever is wrong with an entry is a miss, and one line
in the log; whatever is wrong with the folder is one line of the whole process, and kernels are compiled in memory.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from dsl_backend import envs
from dsl_backend.log import logger, warning_once
from dsl_backend.runtime.key import Identity

FOLDER = "kernels"
SUFFIX, LOCK_SUFFIX, SCRATCH_PREFIX = ".o", ".lock", ".writing-"
NAME = re.compile(r"[0-9a-f]{32}")
MAGIC = b"DSLKERN1"
TAIL = struct.Struct("<Q8s")
# Held by the one process that compiles ahead of others (`precompile.Ahead`).
AHEAD = "ahead"
# A compilation takes seconds; who waits this long waits for one that hangs.
LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.05
# What a process that was killed has left is not what another is about to rename.
ABANDONED_S = 3600.0
# Of a folder that cannot be written; `store` says so.
EXPECTED_ERRORS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EPERM)
# A file that another process has removed; NFS has a word of its own for one that was open.
GONE = (errno.ENOENT, errno.ESTALE)
HELD = (errno.EAGAIN, errno.EACCES)
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Rejected(Exception):
    """An entry or a folder that is not used; the message says why."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache, as it says of itself.

    Attributes:
        parts: the identity of the kernel (`Identity.parts`).
        size_bytes: of the object file.
        compile_s: that compiling took.
        made: when, in seconds since the epoch.
    """

    path: Path
    parts: Mapping[str, Any] = field(repr=False)
    size_bytes: int
    compile_s: float
    made: float

    @property
    def digest(self) -> str:
        return self.path.stem

    @property
    def kernel(self) -> str:
        return str(self.parts.get("kernel", "?")).rpartition(".")[2]

    @property
    def arch(self) -> str:
        return str(self.parts.get("arch", "?"))


@dataclass
class Stats:
    """What a process did with the cache: entries found, missed, written, and not used for what is wrong with them."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    rejected: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


stats = Stats()


def folder() -> Path:
    """Where entries lie; it may not exist."""
    return (envs.CACHE_DIR.read() or Path(platformdirs.user_cache_dir("dsl-backend"))) / FOLDER


def reason_of(error: OSError) -> str:
    """What the system says, with its name for it: `No space left on device (ENOSPC)`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror} ({name})" if error.strerror and name else str(error)


@contextlib.contextmanager
def regular(path: Path) -> Iterator[int]:
    """An open descriptor of a regular file. What is none is not opened: a FIFO would wait for its writer.

    Raises:
        Rejected: it is another kind of file.
        OSError: it cannot be opened.
    """
    require_regular(path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # It may have been replaced in between.
        require_regular(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Rejected(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and not a file")


def require_private(path: Path) -> None:
    """Refuse a folder that others could have put something into: what is in it is run.

    Raises:
        Rejected: it is not a folder of this user's with mode 0700.
        OSError: it cannot be looked at.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise Rejected("it is not a folder")
    if found.st_uid != os.geteuid():
        raise Rejected(f"it belongs to user {found.st_uid} and not to user {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise Rejected(f"its mode is {stat.S_IMODE(found.st_mode):04o}: chmod 700 makes it private")


class DiskCache:
    """A folder with entries, which exists and is private."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, digest: str) -> Path:
        return self.path / f"{digest}{SUFFIX}"

    @contextlib.contextmanager
    def opened(self, identity: Identity) -> Iterator[tuple[int, Entry] | None]:
        """An open descriptor of the kernel's object file, looked through, and its entry; None where it is missed."""
        path = self.place(identity.digest)
        with contextlib.ExitStack() as stack:
            found: tuple[int, Entry] | None = None
            try:
                descriptor = stack.enter_context(regular(path))
                entry, data = read(path, descriptor)
                if json.dumps(entry.parts, sort_keys=True) != identity.text:
                    raise Rejected("it is another kernel's, or another version's")
                stats.read_bytes += len(data)
                found = descriptor, entry
            except Rejected as reason:
                reject(path, str(reason))
            except OSError as error:
                if error.errno not in GONE:
                    stats.rejected += 1
                    warning_once(f"compiled kernels cannot be read from {self.path}: {reason_of(error)}")
            yield found

    def has(self, identity: Identity) -> bool:
        """Whether there is a file for the kernel; it is not looked into."""
        return os.path.lexists(self.place(identity.digest))

    def is_writable(self) -> bool:
        """Whether something can be written there, as far as that is seen without trying."""
        return os.access(self.path, os.W_OK | os.X_OK)

    def store(self, identity: Identity, data: bytes, compile_s: float) -> str | None:
        """Write an entry, over the one that may be there; why that was not possible, which is logged once, or None."""
        said = {
            "parts": identity.parts,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_bytes": len(data),
            "compile_s": round(compile_s, 4),
            "made": round(time.time(), 3),
        }
        text = json.dumps(said, sort_keys=True).encode()
        path = self.place(identity.digest)
        scratch: str | None = None
        try:
            # mkstemp's mode is 0600.
            descriptor, scratch = tempfile.mkstemp(dir=self.path, prefix=SCRATCH_PREFIX)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data + text + TAIL.pack(len(text), MAGIC))
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except OSError as error:
            unkept(f"{self.path}: {reason_of(error)}")
            if scratch is not None:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
            return reason_of(error)
        stats.stores += 1
        stats.written_bytes += len(data)
        return None

    @contextlib.contextmanager
    def lock(self, identity: Identity) -> Iterator[None]:
        """One process at a time compiles a kernel; without a lock where none can be had.

        The lock goes with the process that holds it, however that ends.
        """
        descriptor: int | None = None
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            while (descriptor := self.locked(identity.digest)) is None:
                if time.monotonic() > deadline:
                    logger.warning(
                        "another process has been compiling %s for %.0f s: not waiting", identity, LOCK_TIMEOUT_S
                    )
                    break
                time.sleep(LOCK_POLL_S)
        except OSError as error:
            self.without_locks(error)
        try:
            yield
        finally:
            unlock(descriptor)

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether this is the one process that has the claim; where locks cannot be had, every process has it."""
        try:
            descriptor = self.locked(name)
        except OSError as error:
            self.without_locks(error)
            yield True
            return
        try:
            yield descriptor is not None
        finally:
            unlock(descriptor)

    def locked(self, name: str) -> int | None:
        """A descriptor that holds the lock of this name until it is closed; None where another process holds it.

        Raises:
            OSError: the file system has no locks, or the file cannot be made.
        """
        path = self.path / f"{name}{LOCK_SUFFIX}"
        # Writable: NFS locks no other.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that was removed guards nothing: somebody else may have made and locked another.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except OSError as error:
            if error.errno not in (*GONE, *HELD):
                os.close(descriptor)
                raise
        os.close(descriptor)
        return None

    def without_locks(self, error: OSError) -> None:
        """Say once that there are no locks, where `store` will not say it."""
        if error.errno not in EXPECTED_ERRORS:
            warning_once(
                f"no locks in {self.path}, so that two processes may compile the same kernel: {reason_of(error)}"
            )

    def entries(self) -> Iterator[tuple[Path, Entry | str]]:
        """Every file that an entry can be, with the entry, or with what is wrong with it.

        Entries that another process removes meanwhile are left out.
        """
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            found = examined(path)
            if found is not None:
                yield path, found

    def clear(self, only: frozenset[Path] | None = None) -> "Cleared":
        """Remove entries, or only these, locks that nobody holds, and what killed processes have left."""
        left: dict[Path, str] = {}
        count = 0
        for path in self.files():
            if path.suffix == SUFFIX and (only is None or path in only):
                count += removed(path, left)
            elif path.suffix == LOCK_SUFFIX and (only is None or self.place(path.stem) in only):
                self.remove_lock(path, left)
            elif path.name.startswith(SCRATCH_PREFIX) and is_abandoned(path):
                removed(path, left)
        return Cleared(count, left)

    def remove_lock(self, path: Path, left: dict[Path, str]) -> None:
        """Remove a lock's file, unless a process holds it: two could hold the lock then."""
        try:
            descriptor = self.locked(path.stem)
        except OSError as error:
            left[path] = reason_of(error)
            return
        if descriptor is not None:
            removed(path, left)
            unlock(descriptor)

    def files(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []


def unlock(descriptor: int | None) -> None:
    """Give a lock back; in so many words, since a child that was forked meanwhile holds the descriptor too."""
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@dataclass(frozen=True)
class Cleared:
    """What clearing did: how many entries went, and files that could not be removed, with the reason."""

    removed: int
    left: Mapping[Path, str]


def removed(path: Path, left: dict[Path, str]) -> bool:
    """Whether a file was removed, by this process; one that could not be is added to those left."""
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in GONE:
            left[path] = reason_of(error)
        return False
    return True


def is_abandoned(path: Path) -> bool:
    """Whether a file is too old for somebody to be writing it."""
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > ABANDONED_S
    return False


def unkept(why: str) -> None:
    """Say once that compiled kernels are not kept."""
    warning_once(f"compiled kernels are not kept on disk, each process compiles them: {why}")


def reject(path: Path, reason: str) -> None:
    """An entry is a miss for a reason that somebody should hear of."""
    stats.rejected += 1
    warning_once(f"the kernel cache's {path} is not used: {reason}")


def examined(path: Path) -> Entry | str | None:
    """A file's entry, or what is wrong with it; None where it is gone."""
    try:
        with regular(path) as descriptor:
            return read(path, descriptor)[0]
    except Rejected as reason:
        return str(reason)
    except OSError as error:
        return None if error.errno in GONE else reason_of(error)


def size_of(path: Path) -> int:
    """A file's bytes; 0 where it is gone."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read(path: Path, descriptor: int) -> tuple[Entry, bytes]:
    """The entry of an open file, and its object file.

    Raises:
        Rejected: it is not the file of this user, not whole, or not what was written.
    """
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise Rejected(f"it belongs to user {found.st_uid}")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise Rejected(f"others may write it: its mode is {stat.S_IMODE(found.st_mode):04o}")
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        whole = file.read()
    if len(whole) < TAIL.size:
        raise Rejected(f"it has {len(whole)} bytes")
    length, magic = TAIL.unpack(whole[-TAIL.size :])
    if magic != MAGIC or length > len(whole) - TAIL.size:
        raise Rejected("it ends as no entry does: it is cut off, or was not written by this package")
    data, text = whole[: len(whole) - TAIL.size - length], whole[len(whole) - TAIL.size - length : -TAIL.size]
    try:
        said = json.loads(text)
        parts, size, digest = dict(said["parts"]), int(said["size_bytes"]), str(said["sha256"])
        entry = Entry(path, parts, size, float(said["compile_s"]), float(said["made"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Rejected(f"what it says of itself cannot be read: {error!r}") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise Rejected("its content is not what was written")
    return entry, data


def existing() -> DiskCache | None:
    """The cache as it is; None where there is none yet.

    Raises:
        Rejected: the folder is not private, or cannot be looked at.
    """
    path = folder()
    try:
        require_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Rejected(reason_of(error)) from None
    return DiskCache(path)


def open_cache() -> DiskCache:
    """The cache, made where there is none.

    Raises:
        Rejected: it is switched off, or cannot be made, or is not private.
    """
    if not envs.CACHE.read():
        raise Rejected(f"{envs.CACHE.name} switches it off")
    path = folder()
    if not path.is_absolute():
        # A user whom the system does not know, without HOME: containers have them.
        raise Rejected(f"this user has no home folder: {envs.CACHE_DIR.name} names another place")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        require_private(path)
    except OSError as error:
        raise Rejected(f"{error.filename or path}: {reason_of(error)}") from None
    return DiskCache(path)


def usable() -> DiskCache | None:
    """The cache; None where it cannot be used, and one line in the log says why."""
    try:
        return open_cache()
    except Rejected as reason:
        if envs.CACHE.read():
            unkept(f"{folder()}: {reason}")
        return None
