# SPDX-License-Identifier: Apache-2.0
"""Documents: links lead somewhere, and the code that they show runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "emulator/README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def broken(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n[a](#one-heading) [b](#other) [c](gone.md) [d](page.md) [e](https://example.com/gone)\n"
    )
    assert broken(page) == ["#other", "gone.md"]


@pytest.mark.parametrize("page", ["architecture", "add-a-kernel", "decisions", "design"])
def test_files_that_pages_name_are_there(page: str) -> None:
    """Their paths are relative to the package."""
    named = re.findall(r"`(\w+/[\w/]*(?:\.py|/))`", (ROOT / f"docs/{page}.md").read_text())
    assert len(named) > 3
    assert [path for path in named if not any((base / path).exists() for base in (ROOT / "dsl_backend", ROOT))] == []


def test_lines_that_a_page_adds_are_in_the_sources() -> None:
    """The examples of docs/add-a-kernel.md are code of today."""
    added = re.findall(r"^ *\+ *(.*)$", (ROOT / "docs/add-a-kernel.md").read_text(), re.M)
    lines = {line.strip() for file in (ROOT / "dsl_backend").rglob("*.py") for line in file.read_text().splitlines()}
    assert len(added) > 10
    assert [line for line in added if line not in lines] == []


def test_code_of_the_readme_runs() -> None:
    """In a process of its own, where no test has imported anything before."""
    samples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert samples
    for sample in samples:
        code = f"{sample}\nassert out.shape == (2, 32, 128) and out.isfinite().all()\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
