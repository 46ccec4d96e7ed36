# SPDX-License-Identifier: Apache-2.0
"""Every test has a cache of its own, and nothing in memory."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsl_backend import log
from dsl_backend.runtime import cache, compile, key, toolkit
from dsl_backend.runtime import family as families
from dsl_backend.runtime.compiles import compiles

# Tests put others in its place.
SOURCES_OF = key.sources_of


def fresh() -> None:
    """As in a new process."""
    compile.forget()
    compiles.clear()
    cache.stats = cache.Stats()
    log.warning_once.cache_clear()
    SOURCES_OF.cache_clear()
    key.imports_of.cache_clear()
    toolkit.missing.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the cache will be."""
    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DSL_BACKEND_CACHE", raising=False)
    monkeypatch.setattr(families, "load_all", lambda: ())
    # Files may be edited while tests run.
    monkeypatch.setattr(key, "LOADED", float("inf"))
    fresh()
    yield tmp_path / "cache" / cache.FOLDER
    fresh()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with these options, for `cache` to be in; root alone may."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / "cache" if not places else places[0]
        place.mkdir(exist_ok=True)
        again = ["remount"] if places else []
        words = ["mount", "-t", "tmpfs", "-o", ",".join([*again, options]), "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
        places.append(place)
        return place

    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    yield mount
    for place in places[:1]:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def unedited() -> Iterator[None]:
    """For tests whose processes each read the sources: says so where somebody edits them meanwhile."""
    modules = ("self_test_kernels", key.COMPILER)
    before = [SOURCES_OF(module) for module in modules]
    yield
    SOURCES_OF.cache_clear()
    if [SOURCES_OF(module) for module in modules] != before:
        pytest.fail("sources of the package were edited while this test ran: run it again", pytrace=False)
