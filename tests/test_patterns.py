# SPDX-License-Identifier: Apache-2.0
"""docs/patterns.md: files, names and mutants that it mentions exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "patterns.md"
PARTS = ("**Arithmetic.**", "**Files:**", "**Mutant:**")
MOST_LINES = 30


def patterns(text: str) -> dict[str, str]:
    """Heading -> text."""
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    return {section.partition("\n")[0]: section for section in sections}


def part(section: str, start: str) -> str:
    """A part of a section, on one line."""
    return " ".join(section.split(start)[1].split("\n\n")[0].split())


def kinds(kernel: str) -> dict[str, str]:
    """Kind of mutant -> what the page of attention's mutants says of it for a kernel."""
    lines = (ROOT / "docs" / "attention-mutants.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    (head,) = (row for row in rows if row[0] == "kind" and len(row) > 2)
    return {row[0]: row[head.index(kernel)] for row in rows if len(row) == len(head)}


def problems(section: str) -> list[str]:
    """What a section says that is not so."""
    found = [f"no {start}" for start in PARTS if section.count(start) != 1]
    found += ["too long"] if len(section.strip().splitlines()) > MOST_LINES else []
    if found:
        return found
    files = part(section, "**Files:**")
    paths = re.findall(r"`([\w/]+\.py)`", files)
    found += ["names no file"] if not paths else []
    found += [f"{path} is not there" for path in paths if not (ROOT / path).is_file()]
    source = "".join((ROOT / path).read_text() for path in paths if (ROOT / path).is_file())
    found += [f"{name} is in none of the files" for name in re.findall(r"`(\w+)`", files) if name not in source]
    return found + problems_of_mutants(part(section, "**Mutant:**"))


def problems_of_mutants(text: str) -> list[str]:
    """Of the form: names in "quotes", or a `test`, in `file`; or kinds of "kernel" in `docs/attention-mutants.md`."""
    named = re.findall(r"((?:[^`]|`\w+`)*?)`((?:tests|docs)/[\w/.-]+)`", text)
    found = [] if named else ["names no mutant"]
    for words, path in named:
        quoted = re.findall(r'"([^"]+)"', words)
        tests = re.findall(r"`(test_\w+)`", words)
        if not (ROOT / path).is_file():
            found.append(f"{path} is not there")
        elif path.endswith(".md"):
            *kind, kernel = quoted
            said = kinds(kernel)
            found += [f"no {one} of {kernel} is found" for one in kind if not re.search(r"\d[cv]", said.get(one, ""))]
        else:
            source = " ".join((ROOT / path).read_text().split())
            found += [f"{one!r} is not in {path}" for one in quoted if f'"{one}"' not in source]
            found += [f"{one} is not in {path}" for one in tests if f"def {one}(" not in source]
            found += [f"no mutant of {path} is named"] if not quoted + tests else []
    return found


def test_there_are_a_dozen() -> None:
    assert len(patterns(PAGE.read_text())) == 12


@pytest.mark.parametrize("name", patterns(PAGE.read_text()))
def test_what_a_pattern_names_exists(name: str) -> None:
    assert problems(patterns(PAGE.read_text())[name]) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("primitives/ring.py", "primitives/rings.py", "dsl_backend/primitives/rings.py is not there"),
        ("`stage_of`", "`stages_of`", "stages_of is in none of the files"),
        ('"K over K"', '"K over Q"', "'K over Q' is not in tests/attention/test_two_cta_mla_mistakes.py"),
        ('Kind "bytes"', 'Kind "bites"', "no bites of SM90 forward is found"),
        ("**Mutant:**", "Mutant:", "no **Mutant:**"),
    ],
)
def test_what_does_not_exist_is_said(old: str, new: str, said: str) -> None:
    section = patterns(PAGE.read_text())["TMA ring"]
    assert old in section
    assert said in problems(section.replace(old, new))
