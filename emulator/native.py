# SPDX-License-Identifier: Apache-2.0
"""Builds the emulator's C code with the system's compiler, once per source and compiler, in a private folder."""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emulator.errors import HostError

TIMEOUT_S = 300


def compiler() -> list[str]:
    """The command of the C compiler: CC, or the system's."""
    asked = os.environ.get("CC", "")
    for name in [asked] if asked else ["cc", "gcc", "clang"]:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    reason = f"CC is {asked!r}, which cannot be run" if asked else "there is no cc, gcc or clang on PATH"
    raise HostError(f"the emulator builds a small library with a C compiler, and {reason}: install one, or set CC")


def cache_folder() -> Path:
    """A folder that is the user's alone, because a library in it is loaded into the process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "cute-dsl-emulator"
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise HostError(f"cannot make the cache folder {folder}: {error}; XDG_CACHE_HOME names another place") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HostError(f"{folder} must be a folder that belongs to you with mode 0700; remove it or chmod it")
    return folder


def run(command: list[str]) -> str:
    """Output of a command of the compiler; a failure is one error with all that it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"the C compiler could not be run: {error}") from None
    if done.returncode:
        raise HostError(f"the C compiler failed: {shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(source: Path, flags: Sequence[str], headers: Sequence[Path] = (), libraries: Sequence[str] = ()) -> Path:
    """The library made of one C file; the second call only looks it up.

    Args:
        headers: that the file includes from its own folder.
        libraries: to link with, such as `-lm`.

    Raises:
        HostError: there is no compiler, it fails, or the cache folder is not private.
    """
    command = compiler()
    version = run([*command, "--version"])
    # With -march=native the same command builds something else on another processor: the macros tell.
    target = run([*command, *flags, "-dM", "-E", "-x", "c", os.devnull]) if "-march=native" in flags else ""
    texts = [path.read_text() for path in (source, *headers)]
    parts = [*texts, *command, version, target, *flags, *libraries, platform.machine()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    built = cache_folder() / f"{source.stem}-{key}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            made = Path(scratch) / built.name
            run([*command, *flags, str(source), "-o", str(made), *libraries])
            # Whoever builds it at the same time has made the same.
            made.replace(built)
    return built
