# SPDX-License-Identifier: Apache-2.0
"""Documents: links lead somewhere, and the code that they show runs."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "emulator/README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A word of hexadecimal digits with letters among them, or of digits alone where a sentence presents it as a commit.
COMMIT = re.compile(
    r"""(?<![\w./#&-])(?:(?=[0-9]*[a-f])(?=[a-f]*[0-9])|(?:(?<=commit )|(?<="commit": ")|(?<=H[12]00, ))(?=[0-9]))"""
    r"""([0-9a-f]{7,40})(?![\w-])"""
)
ABSENT = re.compile(r"^Commits that pages name and that are not in the repository's history([^.]*)\.", re.M)


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


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()


def history() -> list[str]:
    """All commits before this one; skips the test where they are not there."""
    try:
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:
            pytest.skip("this is no repository of its own, so that it has no history")
        if git("rev-parse", "--is-shallow-repository") != "false":
            pytest.skip("this is a shallow clone, without the commits that pages name")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git does not say which commits there are: {error}")
    return git("rev-list", "HEAD").splitlines()


def unknown(named: Iterable[str], commits: list[str]) -> set[str]:
    """The names that no commit's hash begins with."""
    return {name for name in named if not any(commit.startswith(name) for commit in commits)}


def test_commits_that_pages_name_are_known_or_said_not_to_be() -> None:
    """One that is listed as absent is named, and absent."""
    commits, listing = history(), ROOT / "docs/performance.md"
    files = [*PAGES, *(ROOT / "docs/data").glob("*.jsonl")]
    (sentence,) = ABSENT.findall(listing.read_text())
    absent = COMMIT.findall(sentence)
    text = {file: file.read_text() for file in files}
    text[listing] = ABSENT.sub("", text[listing])
    named = {name: str(file.relative_to(ROOT)) for file in files for name in COMMIT.findall(text[file])}
    assert len(named) > 50
    assert {name: named[name] for name in unknown(named, commits) - set(absent)} == {}
    assert unknown(absent, commits) == set(absent), "they are in the history"
    assert set(absent) <= set(named), "no page names them"
    assert len(set(absent)) == len(absent)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("H200, 34b4e6ee, torch 2.14.0", ["34b4e6ee"]),
        ("(fafe102; 2048 rows)", ["fafe102"]),
        ("H200, 6480269, and products", ["6480269"]),
        ('{"commit": "1234567"}', ["1234567"]),
        ("commit a134e55. All", ["a134e55"]),
        ("1073741824 bytes, 4611686293305360384 and 0x4000004000050000", []),
        ("a facade, defaced; #1a2b3c4 &feed1234 /0123abcd/ x-abc1234 abc1234-x", []),
        ("https://example.com/0a1b2c3d4e", []),
    ],
)
def test_what_is_a_commit(text: str, found: list[str]) -> None:
    assert COMMIT.findall(text) == found


def test_an_unknown_commit_is_found() -> None:
    assert unknown(["abc1234", "abc12345", "fed4321"], ["abc1234500", "0fed4321"]) == {"fed4321"}


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
