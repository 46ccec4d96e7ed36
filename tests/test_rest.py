# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves to `make test-rest`: selected by marker, and counted at the end of a run."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def run(folder: Path, *options: str, status: int | None = 0) -> str:
    """What pytest prints. status: its exit status; None for any."""
    own = 'REST = ("*::test_slow*",)\nKEPT = ("*_kept",)\n'
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text() + own)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    full\n    rest\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


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


def root_conftest() -> Any:
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_test_is_in_one_part(tmp_path: Path) -> None:
    all_parts = [run(tmp_path, "--part", f"{part}/3", status=None) for part in (1, 2, 3)]
    for name in ("quick", "slow", "slow_but_kept", "slow_and_full"):
        assert sum(f"test_some.py::test_{name} PASSED" in said for said in all_parts) == 1, name
    assert not any("4 passed" in said for said in all_parts)


def test_cases_and_engines_are_not_divided() -> None:
    part_with = root_conftest().part_with
    assert part_with("tests/a.py::test_b[1]", 1000) == part_with("tests/a.py::test_b[2-[x]]", 1000)
    assert part_with("tests/a.py::test_b[1]", 1000) != part_with("tests/a.py::test_c[1]", 1000)
    assert part_with("integration/a.py::test_b[1]", 1000) == part_with("integration/a.py::test_c", 1000)


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/0", "-1/4"])
def test_no_part(tmp_path: Path, text: str) -> None:
    said = run(tmp_path, f"--part={text}", status=4)
    assert f"'{text}' is no part I/N with I from 1 to N" in said


def test_every_pattern_names_a_file_that_is_there() -> None:
    module = root_conftest()
    missing = [one for one in (*module.REST, *module.KEPT, *module.FULL) if not list(ROOT.glob(one.partition("::")[0]))]
    assert missing == []
