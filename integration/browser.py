# SPDX-License-Identifier: Apache-2.0
"""Opens a page of results in a real browser; returns its console, its charts and a screenshot."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
    "--virtual-time-budget=10000",  # virtual milliseconds in which the page's scripts run before the result is read
)
LIMIT_S = 120

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)


@dataclass(frozen=True)
class Shown:
    """A page as a browser shows it.

    Attributes:
        body: the document after its scripts have run.
        console: every line that the page logged, including uncaught errors.
        picture: a PNG of the top of the page.
    """

    body: str
    console: list[str]
    picture: Path

    @property
    def places(self) -> int:
        """The number of charts in the page's source."""
        return len(re.findall(r'<div [^>]*class="plotly-graph-div', self.body))

    @property
    def drawn(self) -> int:
        """The number of charts that plotly has drawn."""
        parts = re.split(r'<div [^>]*class="plotly-graph-div', self.body)[1:]
        return sum('class="main-svg"' in part and 'class="cartesianlayer"' in part for part in parts)


def show(page: Path, picture: Path, width: int = 1440, height: int = 2000, flags: Sequence[str] = ()) -> Shown:
    """Opens a page twice, once for its document and once for its screenshot.

    Raises:
        subprocess.SubprocessError: the browser failed, or took too long.
    """
    assert CHROMIUM is not None
    found = []
    for wish in ("--dump-dom", f"--screenshot={picture}"):
        # Concurrent browsers cannot share a profile.
        with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
            command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", f"--window-size={width},{height}", wish]
            done = subprocess.run(
                [*command, page.as_uri()], capture_output=True, text=True, timeout=LIMIT_S, check=True
            )
        found.append(done)
    console = [line for done in found for line in done.stderr.splitlines() if ":CONSOLE" in line]
    document = found[0].stdout
    return Shown(document[document.index("<body>") :], console, picture)


def require_shown(page: Path, picture: Path, figures: int) -> Shown:
    """Opens a page; checks that all of its charts are drawn and that its console is empty."""
    shown = show(page, picture)
    assert shown.console == []
    assert (shown.places, shown.drawn) == (figures, figures)
    # A white page of this size has 10 kB.
    assert shown.picture.stat().st_size > 40_000
    return shown
