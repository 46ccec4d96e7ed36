# SPDX-License-Identifier: Apache-2.0
"""docs/profile-a-kernel.md: the outputs that it shows are what its commands print."""

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "profile-a-kernel.md").read_text()
SHOWN = re.findall(r"^```\n\$ (python -m emulator .*)\n([^`]*)^```", PAGE, re.M)
# Its PTX is what the page shows.
VERSION = "4.6.0"
QUICK = "conflicts"


def missing(shown: str, printed: str) -> list[str]:
    """The lines of an excerpt that are not in an output, or not in this order."""
    lines = iter(printed.splitlines())
    return [line for line in shown.splitlines() if line != "..." and line not in lines]


def test_an_excerpt_is_compared_in_order() -> None:
    printed = "a\nb\n  c  1\nd"
    assert missing("a\n...\n  c  1", printed) == []
    assert missing("b\na", printed) == ["a"]
    assert missing("  c  2", printed) == ["  c  2"]


def test_every_case_is_shown() -> None:
    cases = re.findall(r"^def (\w+)\(\) -> None:", (ROOT / "docs/examples/profile_cases.py").read_text(), re.M)
    assert {command.split("::")[1].split()[0] for command, _ in SHOWN} == set(cases)
    assert len(SHOWN) > len(cases) == 8


@pytest.mark.skipif(metadata.version("nvidia-cutlass-dsl") != VERSION, reason=f"the page shows code of {VERSION}")
@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(*one, marks=() if QUICK in one[0] else pytest.mark.rest) for one in SHOWN],
)
def test_what_a_command_prints(command: str, shown: str) -> None:
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
    assert missing(shown, printed) == [], printed
