# SPDX-License-Identifier: Apache-2.0
"""Install the browser that the checks open their pages with, where that is possible without asking anybody.

    python3 tools/setup_browser.py

Only on a Debian or Ubuntu, and only as root; elsewhere it says so once, and the checks that need a browser are skipped.
It never fails: a machine without a browser can still check everything else.

Works with the standard library of Python 3.8 or newer. Environment variables:

    VENV    where it is noted that this was tried, so that it is not tried again (default .venv)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("chromium", "chromium-browser")
LIMIT_S = 240
STAMP = ".tried-browser"


def say(message: str) -> None:
    print(f"browser: {message}", flush=True)


def is_installed() -> bool:
    return any(shutil.which(name) for name in NAMES)


def objection() -> str | None:
    """Why nothing can be installed here; None where it can."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    if os.geteuid() != 0:
        return "this is not root"
    return None


def apt(*words: str) -> bool:
    """Whether apt-get did what it was asked to, without a question and in time."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = [
        "apt-get",
        "-qq",
        "-o",
        "Acquire::Retries=1",
        "-o",
        "Acquire::http::Timeout=20",
        "-o",
        "DPkg::Lock::Timeout=60",
        *words,
    ]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def install() -> bool:
    """Whether the browser could be installed; the lists of packages are brought up to date where it takes that."""
    package = ("install", "--yes", "--no-install-recommends", NAMES[0])
    return apt(*package) or (apt("update") and apt(*package))


def main() -> None:
    stamp = ROOT / os.environ.get("VENV", ".venv") / STAMP
    if is_installed() or stamp.exists():
        return
    reason = objection()
    if reason is None:
        say(f"installing {NAMES[0]} with apt-get")
        if install() and is_installed():
            return
        reason = "apt-get could not install it"
    say(f"no {NAMES[0]}: {reason}; the checks that open a page in a browser are skipped")
    if stamp.parent.is_dir():
        stamp.touch()


if __name__ == "__main__":
    main()
