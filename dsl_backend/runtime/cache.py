# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, for all processes of a user.

An entry is one file: the object file, then a JSON object that says what it is, then its length and a magic word.
Readers of object files look at what their header points to, so nothing has to be taken off. Entries are written beside
their place and renamed, so a reader finds all of one or none. Whatever is wrong with an entry or with the folder is a
miss, and one line in the log.
"""

import contextlib
import errno
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

import filelock
import platformdirs

from dsl_backend import envs
from dsl_backend.log import logger, warning_once
from dsl_backend.runtime.key import Identity

FOLDER = "kernels"
SUFFIX, LOCK_SUFFIX, SCRATCH_PREFIX = ".o", ".lock", ".writing-"
NAME = re.compile(r"[0-9a-f]{32}")
MAGIC = b"DSLKERN1"
TAIL = struct.Struct("<Q8s")
# A compilation takes seconds; who waits this long waits for one that hangs.
LOCK_TIMEOUT_S = 600.0
# What a process that was killed has left is not what another is about to rename.
ABANDONED_S = 3600.0
EXPECTED_ERRORS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EPERM)


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
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            reject(path, str(error))
            yield None
            return
        try:
            try:
                entry, data = read(path, descriptor)
                if json.dumps(entry.parts, sort_keys=True) != identity.text:
                    raise Rejected("it is another kernel's, or another version's")
            except (Rejected, OSError) as error:
                reject(path, str(error))
                yield None
                return
            stats.read_bytes += len(data)
            yield descriptor, entry
        finally:
            os.close(descriptor)

    def store(self, identity: Identity, data: bytes, compile_s: float) -> bool:
        """Write an entry, over the one that may be there; False, and a line in the log, where that is not possible."""
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
            warning_once(f"compiled kernels are not kept in {self.path}: {error.strerror or error}")
            if scratch is not None:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
            return False
        stats.stores += 1
        stats.written_bytes += len(data)
        return True

    @contextlib.contextmanager
    def lock(self, identity: Identity) -> Iterator[None]:
        """One process at a time compiles a kernel; without a lock where none can be had.

        The lock goes with the process that holds it, however that ends.
        """
        lock = filelock.FileLock(self.path / f"{identity.digest}{LOCK_SUFFIX}", timeout=LOCK_TIMEOUT_S, mode=0o600)
        held = False
        try:
            lock.acquire()
            held = True
        except filelock.Timeout:
            logger.warning("another process has been compiling %s for %.0f s: not waiting", identity, LOCK_TIMEOUT_S)
        except (OSError, NotImplementedError) as error:
            if getattr(error, "errno", None) not in EXPECTED_ERRORS:
                logger.warning("compiling %s without a lock: %s", identity, error)
        try:
            yield
        finally:
            if held:
                lock.release()

    def entries(self) -> Iterator[tuple[Path, Entry | str]]:
        """Every file that an entry can be, with the entry, or with what is wrong with it."""
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            yield path, examined(path)

    def clear(self, only: frozenset[Path] | None = None) -> int:
        """Remove entries, or only these, and what killed processes have left. Returns how many entries went."""
        count = 0
        for path in sorted(self.path.iterdir()):
            if path.suffix == SUFFIX and (only is None or path in only):
                path.unlink(missing_ok=True)
                count += 1
            elif path.name.startswith(SCRATCH_PREFIX) and time.time() - path.lstat().st_mtime > ABANDONED_S:
                path.unlink(missing_ok=True)
        # Locks stay: one that is removed while it is held lets two processes hold it.
        return count


def reject(path: Path, reason: str) -> None:
    """An entry is a miss for a reason that somebody should hear of."""
    stats.rejected += 1
    logger.warning("the kernel cache's %s is not used: %s", path, reason)


def examined(path: Path) -> Entry | str:
    """A file's entry, or what is wrong with it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return str(error)
    try:
        return read(path, descriptor)[0]
    except (Rejected, OSError) as error:
        return str(error)
    finally:
        os.close(descriptor)


def read(path: Path, descriptor: int) -> tuple[Entry, bytes]:
    """The entry of an open file, and its object file.

    Raises:
        Rejected: it is not the file of this user, not whole, or not what was written.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Rejected("it is not a file")
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
        raise Rejected(str(error)) from None
    return DiskCache(path)


def open_cache() -> DiskCache:
    """The cache, made where there is none.

    Raises:
        Rejected: it is switched off, or cannot be made, or is not private.
    """
    if not envs.CACHE.read():
        raise Rejected(f"{envs.CACHE.name} switches it off")
    path = folder()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        require_private(path)
    except OSError as error:
        raise Rejected(str(error)) from None
    return DiskCache(path)


def usable() -> DiskCache | None:
    """The cache; None where it cannot be used, and one line in the log says why."""
    try:
        return open_cache()
    except Rejected as reason:
        if envs.CACHE.read():
            warning_once(f"compiled kernels are not kept: {folder()}: {reason}")
        return None
