# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves to `make test-rest`: selected by marker, and counted at the end of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest
def test_quick(): pass
def test_slow(): pass
def test_slow_but_kept(): pass
@pytest.mark.full
def test_slow_and_full(): pass
"""


def run(folder: Path, *options: str) -> str:
    own = 'REST = ("*::test_slow*",)\nKEPT = ("*_kept",)\n'
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text() + own)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    full\n    rest\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_left_is_counted(tmp_path: Path, workers: str) -> None:
    said = run(tmp_path, "-n", workers, "-m", "not full and not rest")
    assert "2 passed" in said
    assert "1 test was left to `make test-rest`" in said
    assert "test_slow_but_kept" in said


def test_the_rest(tmp_path: Path) -> None:
    said = run(tmp_path, "-m", "rest and not full")
    assert "1 passed" in said
    assert "make test-rest" not in said


def test_every_pattern_names_a_file_that_is_there() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [one for one in (*module.REST, *module.KEPT, *module.FULL) if not list(ROOT.glob(one.partition("::")[0]))]
    assert missing == []
