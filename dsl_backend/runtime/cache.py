# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, for all processes of a user.

An entry is one file: the object file, a JSON object that describes it, the length of that, and a magic word. A loader
of object files follows their header, so bytes behind the object file do no harm. An entry is written to a temporary
file and renamed, so a reader finds all of it or nothing. A broken entry is a miss and is logged once. If the folder
cannot be used, the process logs one line and compiles kernels in memory.
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
# How the lock of the one process that compiles a model's kernels ahead of use begins (`precompile.claim_of`).
AHEAD = "ahead"
# A compilation takes seconds: a lock that is held for this long belongs to one that hangs.
LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.05
# A temporary file older than this was left by a process that was killed.
ABANDONED_S = 3600.0
# Of a folder that cannot be written; `store` says so.
EXPECTED_ERRORS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EPERM)
# A file that another process has removed. NFS reports an open one with ESTALE.
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
    """An entry or a folder cannot be used; the message says why."""


@dataclass(frozen=True)
class Entry:
    """The description of an entry, as its file holds it.

    Attributes:
        parts: the identity of the kernel (`Identity.parts`).
        size_bytes: of the object file.
        compile_s: seconds that compiling took.
        made: time of creation, in seconds since the epoch.
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
    """Counts of a process: entries found, missed, written, and rejected because they are broken."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    rejected: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


stats = Stats()


def folder() -> Path:
    """The folder of the entries; it may not exist."""
    return (envs.CACHE_DIR.read() or Path(platformdirs.user_cache_dir("dsl-backend"))) / FOLDER


def reason_of(error: OSError) -> str:
    """The system's message and name of an error: `No space left on device (ENOSPC)`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror} ({name})" if error.strerror and name else str(error)


@contextlib.contextmanager
def regular(path: Path) -> Iterator[int]:
    """An open descriptor of a regular file. Nothing else is opened: a FIFO would block until it has a writer.

    Raises:
        Rejected: it is another kind of file.
        OSError: it cannot be opened.
    """
    require_regular(path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # It may have been replaced between the check and the open.
        require_regular(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Rejected(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and not a file")


def require_private(path: Path) -> None:
    """Reject a folder that other users can write to, because the code in it is run.

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

    def path_of(self, digest: str) -> Path:
        return self.path / f"{digest}{SUFFIX}"

    @contextlib.contextmanager
    def opened(self, identity: Identity) -> Iterator[tuple[int, Entry] | None]:
        """An open descriptor of the kernel's object file, looked through, and its entry; None where it is missed."""
        path = self.path_of(identity.digest)
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
        """Whether there is a file for the kernel; the file is not read."""
        return os.path.lexists(self.path_of(identity.digest))

    def is_writable(self) -> bool:
        """Whether the folder's permissions allow writing; nothing is written."""
        return os.access(self.path, os.W_OK | os.X_OK)

    def store(self, identity: Identity, data: bytes, compile_s: float) -> str | None:
        """Write an entry, and replace an existing one. Returns why that failed, which is logged once, or None."""
        said = {
            "parts": identity.parts,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_bytes": len(data),
            "compile_s": round(compile_s, 4),
            "made": round(time.time(), 3),
        }
        text = json.dumps(said, sort_keys=True).encode()
        path = self.path_of(identity.digest)
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
        """Let one process at a time compile a kernel; if the file system has no locks, there is none.

        The system releases the lock when the process that holds it ends.
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
        """Whether this process holds the lock of that name; True in every process if the file system has no locks."""
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
        # Opened for writing, because NFS locks no other files.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock on a removed file protects nothing: another process may have made and locked a new one.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except OSError as error:
            if error.errno not in (*GONE, *HELD):
                os.close(descriptor)
                raise
        os.close(descriptor)
        return None

    def without_locks(self, error: OSError) -> None:
        """Log once that there are no locks, if `store` does not report it."""
        if error.errno not in EXPECTED_ERRORS:
            warning_once(
                f"no locks in {self.path}, so that two processes may compile the same kernel: {reason_of(error)}"
            )

    def entries(self) -> Iterator[tuple[Path, Entry | str]]:
        """Every file that may be an entry, with the entry or with what is wrong with it.

        Files that another process removes in the meantime are left out.
        """
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            found = examined(path)
            if found is not None:
                yield path, found

    def clear(self, only: frozenset[Path] | None = None) -> "Cleared":
        """Remove all entries or only these, locks that no process holds, and temporary files of killed processes."""
        left: dict[Path, str] = {}
        count = 0
        for path in self.files():
            if path.suffix == SUFFIX and (only is None or path in only):
                count += removed(path, left)
            elif path.suffix == LOCK_SUFFIX and (only is None or self.path_of(path.stem) in only):
                self.remove_lock(path, left)
            elif path.name.startswith(SCRATCH_PREFIX) and is_abandoned(path):
                removed(path, left)
        return Cleared(count, left)

    def remove_lock(self, path: Path, left: dict[Path, str]) -> None:
        """Remove the file of a lock that no process holds. Otherwise two processes could hold the lock."""
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
    """Release a lock explicitly: a child that was forked in the meantime holds the descriptor too."""
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@dataclass(frozen=True)
class Cleared:
    """The result of clearing: the number of removed entries, and the reason for each file that is left."""

    removed: int
    left: Mapping[Path, str]


def removed(path: Path, left: dict[Path, str]) -> bool:
    """Whether this process removed a file; a file that could not be removed is added to `left`."""
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in GONE:
            left[path] = reason_of(error)
        return False
    return True


def is_abandoned(path: Path) -> bool:
    """Whether a temporary file is so old that no process can still be writing it."""
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > ABANDONED_S
    return False


def unkept(why: str) -> None:
    """Log once that compiled kernels are not kept."""
    warning_once(f"compiled kernels are not kept on disk, each process compiles them: {why}")


def reject(path: Path, reason: str) -> None:
    """Log why an entry is rejected, and count it."""
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
    """The entry of an open file, and its object file. Raises Rejected: it is another user's, cut off, or changed."""
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
    """The cache; None where there is none yet. Raises Rejected: the folder is not private, or cannot be looked at."""
    path = folder()
    try:
        require_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Rejected(reason_of(error)) from None
    return DiskCache(path)


def open_cache() -> DiskCache:
    """The cache, made where there is none. Raises Rejected: it is switched off, cannot be made, or is not private."""
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
